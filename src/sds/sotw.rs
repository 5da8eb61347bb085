//! State-of-the-world (SotW) variant of the protocol: each request lists all names, and answers the
//! response with its nonce.
//!
//! A state machine without I/O. A secret is due when it was not sent since it was asked for, or when it
//! differs from the one sent last: pushes that wait for Envoy fall together. A secret that cannot be had
//! delays no other; SotW has no way to report it.

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tonic::Status;

use super::context::StreamContext;
use super::names::Names;
use super::resource::{Lookup, TYPE_URL};
use super::stream::{Protocol, ResponseId};

/// The protocol state of one stream.
#[derive(Debug, Default)]
pub(super) struct StateOfTheWorld {
    /// The nonce of the latest response.
    nonce: Option<String>,
}

impl Protocol for StateOfTheWorld {
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;

    fn apply(
        &mut self,
        context: &mut StreamContext,
        request: &DiscoveryRequest,
    ) -> Result<(), Status> {
        if context.is_skipped(&request.type_url, request.node.as_ref())?
            || !self.subscribes(context, request)
        {
            return Ok(());
        }
        let (names, unserved) = context.parse_all(&request.resource_names)?;
        // Unknown names alone end the stream.
        if let (true, Some((_, error))) = (names.is_empty(), unserved.first()) {
            return Err(Status::invalid_argument(error));
        }
        context.report(&unserved)?;
        // Without a nonce Envoy starts over: all it names is due again.
        let is_continued = !request.response_nonce.is_empty();
        context.names.replace(names, is_continued);
        Ok(())
    }

    /// Names just asked for go together, changed ones one by one.
    fn answer(
        &mut self,
        names: &mut Names,
        lookup: &Lookup<'_>,
        is_batching: bool,
        id: impl FnOnce() -> ResponseId,
    ) -> Option<DiscoveryResponse> {
        let [mut due, mut changed] = names.due(lookup, is_batching);
        due.retain(|(_, change)| change.is_ok());
        if due.is_empty() {
            changed.truncate(1);
            due = changed;
        }
        if due.is_empty() {
            return None;
        }
        let ResponseId { version, nonce } = id();
        self.nonce = Some(nonce.clone());
        let mut response = DiscoveryResponse {
            version_info: version,
            type_url: TYPE_URL.to_owned(),
            nonce,
            ..Default::default()
        };
        for change in due {
            if let (name, Ok(resource)) = &change {
                response.resources.push(resource.encode(name));
            }
            names.sent(change);
        }
        Some(response)
    }
}

impl StateOfTheWorld {
    /// Whether the names of a request count. NACKs, unsubscriptions and answers to an older response
    /// are dealt with here.
    fn subscribes(&self, context: &mut StreamContext, request: &DiscoveryRequest) -> bool {
        let id = context.id;
        if let Some(error) = &request.error_detail {
            context.nack(error);
            return false;
        }
        if request.resource_names.is_empty() && request.type_url == TYPE_URL {
            tracing::debug!(target: "ads", "ADS:SDS: UNSUBSCRIBE {id}");
            context.names = Names::default();
            return false;
        }
        if self.is_stale(context, &request.response_nonce) {
            context.metrics.expired_nonces.inc();
            tracing::debug!(target: "ads", "ADS:SDS: REQ {id} Expired nonce received");
            return false;
        }
        true
    }

    /// Whether a request answers a response older than the latest. Before the first response, a nonce
    /// is one of an earlier stream, and the request subscribes.
    fn is_stale(&self, context: &StreamContext, nonce: &str) -> bool {
        let latest = self.nonce.as_deref();
        !nonce.is_empty() && context.names.len() > 0 && latest.is_some_and(|latest| latest != nonce)
    }
}
