//! Gets a certificate signed.
//!
//! [`key`] makes a key, [`csr`] the request for it, [`istio`] has istiod sign it. [`Ca`] is what the
//! keeper of secrets sees, so a test can stand in for the authority.
//!
//! Does not keep keys or certificates, nor try again: the keeper decides when.

pub mod csr;
pub mod istio;
pub mod key;

use std::future::Future;
use std::time::Duration;

use tonic::Code;

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
#[error("create certificate: rpc error: code = {} desc = {message}", spelled(*.code))]
pub struct SignError {
    pub code: Code,
    pub message: String,
}

/// How soon another attempt makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The cause passes by itself: a restart, a busy moment, a token about to be refreshed.
    Soon,
    /// Somebody has to change something first.
    Later,
}

impl SignError {
    pub fn retry(&self) -> Retry {
        match self.code {
            Code::Unavailable
            | Code::ResourceExhausted
            | Code::Aborted
            | Code::Internal
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Unknown
            // The token is refreshed on disk and read again.
            | Code::Unauthenticated => Retry::Soon,
            _ => Retry::Later,
        }
    }
}

/// The code as Go's gRPC library spells it, which logs are searched for.
fn spelled(code: Code) -> String {
    match code {
        Code::Cancelled => "Canceled".to_owned(),
        other => format!("{other:?}"),
    }
}

impl From<tonic::Status> for SignError {
    fn from(status: tonic::Status) -> Self {
        Self {
            code: status.code(),
            message: status.message().to_owned(),
        }
    }
}
