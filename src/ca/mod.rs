//! Client of the certificate authority.
//!
//! [`key`] makes private keys, [`csr`] the certificate signing requests (CSR) for them, [`istio`]
//! calls istiod's `CreateCertificate`. Retries are up to the caller.

pub mod csr;
pub mod istio;
pub mod key;

use std::future::Future;
use std::time::Duration;

use tonic::Code;

/// A certificate authority; tests substitute one of their own.
pub trait Ca: Send + Sync + 'static {
    /// Signs a PEM certificate request for `ttl`. The answer is PEM: the leaf first, the roots last.
    fn sign(
        &self,
        csr_pem: &str,
        ttl: Duration,
    ) -> impl Future<Output = Result<Vec<String>, SignError>> + Send;
}

/// How much is kept of the text of an error, in characters.
const MAX_MESSAGE: usize = 1024;

/// Why the authority did not sign.
#[derive(Clone, Debug, thiserror::Error)]
#[error("create certificate: rpc error: code = {} desc = {message}", code_name(*.code))]
pub struct SignError {
    pub code: Code,
    pub message: String,
}

impl SignError {
    /// Whether the authority will refuse the same request again. Other causes may pass by themselves: a
    /// restart, overload, a token that is refreshed on disk and read again.
    pub fn is_lasting(&self) -> bool {
        matches!(
            self.code,
            Code::InvalidArgument
                | Code::NotFound
                | Code::AlreadyExists
                | Code::PermissionDenied
                | Code::FailedPrecondition
                | Code::OutOfRange
                | Code::Unimplemented
                | Code::DataLoss
        )
    }
}

/// The code as Go's gRPC library spells it: operators search logs for it.
fn code_name(code: Code) -> String {
    match code {
        Code::Cancelled => "Canceled".to_owned(),
        other => format!("{other:?}"),
    }
}

impl From<tonic::Status> for SignError {
    fn from(status: tonic::Status) -> Self {
        Self {
            code: status.code(),
            message: status.message().chars().take(MAX_MESSAGE).collect(),
        }
    }
}
