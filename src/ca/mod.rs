//! Gets a certificate signed.

pub mod csr;

use std::future::Future;
use std::time::Duration;

/// A certificate authority.
pub trait Ca: Send + Sync + 'static {
    /// Signs a PEM certificate request for `ttl`. The answer is PEM: the leaf first, the roots last.
    fn sign(
        &self,
        csr_pem: &str,
        ttl: Duration,
    ) -> impl Future<Output = Result<Vec<String>, SignError>> + Send;
}

/// Why the authority did not sign.
#[derive(Clone, Debug, thiserror::Error)]
#[error("create certificate: {code:?}: {message}")]
pub struct SignError {
    pub code: tonic::Code,
    pub message: String,
}
