//! Calls istiod's certificate service on the shared connection.
//!
//! Connecting and the call have a time limit each. After a timeout, the next call dials again and has twice
//! the time, because a signer behind istiod may be slow. An error response keeps the connection, with one
//! exception: after UNAUTHENTICATED the next call dials again to present a client certificate that may exist
//! by then.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prost_types::value::Kind;
use tokio::time::timeout;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

use super::{Ca, Reached, SignError};
use crate::istiod::refusal::MAX_MESSAGE;
use crate::istiod::{Connection, Istiod};
use crate::problem::{self, Repetition};
use crate::proto::istio_v1_auth::IstioCertificateRequest;
use crate::proto::istio_v1_auth::istio_certificate_service_client::IstioCertificateServiceClient;
use crate::runtime::duration::rounded;

/// The largest accepted response, more than any chain needs.
const MAX_RESPONSE: usize = 4 << 20;

/// The number of times that the limit of a call doubles at most: from 10 s to 80 s, more than istiod waits
/// for a signer of the cluster (60 s).
const MAX_DOUBLINGS: u32 = 3;

/// Istiod, or another authority with its protocol.
#[derive(Debug)]
pub struct IstioCa {
    istiod: Istiod,
    cert_signer: String,
    limit: Duration,
    /// The number of consecutive calls that timed out.
    timeouts: AtomicU32,
    failures: Mutex<Repetition>,
}

impl IstioCa {
    /// `cert_signer` is the name of the signer istiod is to use and may be empty. `limit` bounds connecting,
    /// and the first call.
    pub fn new(istiod: Istiod, cert_signer: String, limit: Duration) -> Self {
        Self { istiod, cert_signer, limit, timeouts: AtomicU32::new(0), failures: Mutex::default() }
    }

    /// Returns the connection to istiod, or the error of the current or next dial. Waits for `limit` at most.
    async fn connection(&self) -> Result<Connection, SignError> {
        match timeout(self.limit, self.istiod.try_connection()).await {
            Ok(connected) => connected.map_err(|problem| SignError {
                code: Code::Unavailable,
                message: format!("{}: {}", problem.subject, problem.found),
                problem,
            }),
            Err(_) => Err(self.error(&timeout_status("connection", self.limit))),
        }
    }

    /// Calls istiod once, and records the result for the choice of the control plane and the next time limit.
    async fn try_sign(&self, csr_pem: &str, ttl: Duration) -> Result<Vec<String>, SignError> {
        let connection = self.connection().await?;
        let earlier_timeouts = self.timeouts.load(Ordering::Relaxed);
        let limit = self.limit.saturating_mul(1 << earlier_timeouts.min(MAX_DOUBLINGS));
        let call = self.create_certificate(connection.clone(), csr_pem, ttl, limit);
        let result = timeout(limit, call).await;
        let timed_out = result.is_err();
        let timeouts = if timed_out { earlier_timeouts.saturating_add(1) } else { 0 };
        self.timeouts.store(timeouts, Ordering::Relaxed);
        let status = match result.unwrap_or_else(|_| Err(timeout_status("answer", limit))) {
            Ok(chain) => {
                self.istiod.record_success(&connection);
                return Ok(chain);
            }
            Err(status) => status,
        };
        if self.istiod.leave_if_unauthenticated(&connection, Some(status.code())) {
            tracing::info!(target: "citadelclient", "recreated connection");
        }
        let error = self.error(&status);
        self.istiod.record_failure(&connection, timed_out, &error.problem);
        Err(error)
    }

    /// Logs an error, and repetitions at growing intervals.
    fn log(&self, error: &SignError) {
        if let Some(count) = self.failures.lock().failed(&error.problem) {
            tracing::error!(target: "citadelclient", "failed to sign CSR: {error}{count}");
        }
    }

    fn error(&self, status: &Status) -> SignError {
        SignError {
            code: status.code(),
            message: status.message().chars().take(MAX_MESSAGE).collect(),
            problem: self.istiod.explain(problem::Code::IstiodWithoutCa, status),
        }
    }

    /// Sends the request, and returns the certificates of the response. `limit` is announced to istiod.
    async fn create_certificate(
        &self,
        connection: Connection,
        csr_pem: &str,
        ttl: Duration,
        limit: Duration,
    ) -> Result<Vec<String>, Status> {
        let signer = prost_types::Value { kind: Some(Kind::StringValue(self.cert_signer.clone())) };
        let mut request = tonic::Request::new(IstioCertificateRequest {
            csr: csr_pem.to_owned(),
            validity_duration: i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(prost_types::Struct {
                fields: BTreeMap::from([("CertSigner".to_owned(), signer)]),
            }),
        });
        *request.metadata_mut() = MetadataMap::from_headers(self.istiod.headers());
        request.set_timeout(limit);
        IstioCertificateServiceClient::with_origin(connection.service(), self.istiod.uri("/"))
            .max_decoding_message_size(MAX_RESPONSE)
            .create_certificate(request)
            .await
            .map(|response| response.into_inner().cert_chain)
    }
}

fn timeout_status(what: &str, limit: Duration) -> Status {
    Status::deadline_exceeded(format!("no {what} within {}", rounded(limit)))
}

impl Ca for IstioCa {
    async fn reach(&self) -> Result<Reached, SignError> {
        let was_connected = self.istiod.is_connected();
        self.connection().await.inspect_err(|error| self.log(error))?;
        Ok(if was_connected { Reached::Before } else { Reached::Now })
    }

    async fn sign(&self, csr_pem: &str, ttl: Duration) -> Result<Vec<String>, SignError> {
        let chain = self.try_sign(csr_pem, ttl).await.inspect_err(|error| self.log(error))?;
        self.failures.lock().end();
        Ok(chain)
    }
}

#[cfg(test)]
mod tests;
