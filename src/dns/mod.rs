//! Answers the workload's DNS questions.
//!
//! What the mesh does not know is forwarded to the resolvers the machine was given, by whoever
//! implements [`Forward`].
//!
//! Does not change where the workload sends its questions.

use std::future::Future;

use bytes::Bytes;

pub mod forward;

/// How a question came, and how it is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    Udp,
    Tcp,
}

/// Passes questions on.
pub trait Forward: Send + Sync + 'static {
    /// The reply, whole, with the query's id and question. Nothing when nobody answered: the client
    /// is then told that its server failed.
    fn forward(
        &self,
        query: Bytes,
        transport: Transport,
    ) -> impl Future<Output = Option<Bytes>> + Send;
}
