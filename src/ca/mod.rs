//! Requests certificates from the certificate authority.
//!
//! [`key`] makes private keys, [`csr`] the certificate signing requests (CSR) for them, [`istio`]
//! calls istiod's `CreateCertificate`. The caller retries.

pub mod csr;
pub mod istio;
pub mod key;

use std::future::Future;
use std::time::Duration;

use tonic::Code;

use crate::istiod::refusal::code_name;
use crate::problem::Problem;

/// A certificate authority. Unit tests use a fake one.
pub trait Ca: Send + Sync + 'static {
    /// Connects to the authority if there is no connection, without a request. Returns true if there was one, which
    /// Connects to the authority if there is no connection, without a request.
    fn reach(&self) -> impl Future<Output = Result<Reached, SignError>> + Send;
    /// Signs a PEM certificate request for `ttl`. Returns PEM: the leaf first, the roots last.
    fn sign(
        &self,
        csr_pem: &str,
        ttl: Duration,
    ) -> impl Future<Output = Result<Vec<String>, SignError>> + Send;
}
/// How an authority was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// There was a connection, which may be lost by now.
    Before,
    Now,
}

#[derive(Clone, Debug, thiserror::Error)]
#[error("create certificate: rpc error: code = {} desc = {message}", code_name(*.code))]
pub struct SignError {
    pub code: Code,
    pub message: String,
    pub problem: Problem,
}
