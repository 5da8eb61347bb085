//! Client of istiod's certificate service, on the shared connection.
//!
//! Connecting and answering have a time limit each. After an answer that does not come, the next call
//! dials anew and has twice the time, as a signer behind istiod may be slow. An error istiod answers
//! with keeps the connection, with one exception: if istiod does not know the caller, and a client
//! certificate may be there by now, the next call dials anew to present it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prost_types::value::Kind;
use tokio::time::timeout;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

use super::{Ca, SignError};
use crate::duration::rounded;
use crate::istiod::refusal::MAX_MESSAGE;
use crate::istiod::{Connection, Istiod};
use crate::problem::{Repetition, codes};
use crate::proto::istio_v1_auth::istio_certificate_service_client::IstioCertificateServiceClient;
use crate::proto::istio_v1_auth::{IstioCertificateRequest, IstioCertificateResponse};

/// More than any chain needs.
const MAX_ANSWER: usize = 4 << 20;

/// How often the limit of an answer doubles at most: from 10 s to 80 s, more than istiod waits for a
/// signer of the cluster (60 s).
const DOUBLINGS: u32 = 3;

/// Istiod, or another authority with its protocol.
#[derive(Clone, Debug)]
pub struct IstioCa {
    istiod: Istiod,
    cert_signer: String,
    limit: Duration,
    /// Consecutive calls without an answer.
    missed: Arc<AtomicU32>,
    failures: Arc<Mutex<Repetition>>,
}

impl IstioCa {
    /// `cert_signer` names the signer istiod is to use and may be empty. `limit` is for a connection, and
    /// at first for an answer.
    pub fn new(istiod: Istiod, cert_signer: String, limit: Duration) -> Self {
        Self {
            istiod,
            cert_signer,
            limit,
            missed: Arc::default(),
            failures: Arc::default(),
        }
    }

    async fn connection(&self) -> Result<Connection, SignError> {
        match timeout(self.limit, self.istiod.try_connection()).await {
            Ok(connected) => connected.map_err(|problem| SignError {
                code: Code::Unavailable,
                message: format!("{}: {}", problem.subject, problem.found),
                problem,
            }),
            Err(_) => Err(self.error(&late("connection", self.limit))),
        }
    }

    async fn signed(&self, csr_pem: &str, ttl: Duration) -> Result<Vec<String>, SignError> {
        let connection = self.connection().await?;
        let missed = self.missed.load(Ordering::Relaxed);
        let limit = self.limit.saturating_mul(1 << missed.min(DOUBLINGS));
        let call = self.create(connection.clone(), self.message(csr_pem, ttl), limit);
        let answer = timeout(limit, call).await;
        let is_silent = answer.is_err();
        let missed = missed.saturating_add(1) * u32::from(is_silent);
        self.missed.store(missed, Ordering::Relaxed);
        let status = match answer.unwrap_or_else(|_| Err(late("answer", limit))) {
            Ok(answer) => {
                self.istiod.answered(&connection);
                return Ok(answer.cert_chain);
            }
            Err(status) => status,
        };
        let code = Some(status.code());
        if self.istiod.leave_if_unauthenticated(&connection, code) {
            tracing::info!(target: "citadelclient", "recreated connection");
        }
        let error = self.error(&status);
        self.istiod.failed(&connection, is_silent, &error.problem);
        Err(error)
    }

    fn error(&self, status: &Status) -> SignError {
        SignError {
            code: status.code(),
            message: status.message().chars().take(MAX_MESSAGE).collect(),
            problem: self.istiod.explain(codes::ISTIOD_WITHOUT_CA, status),
        }
    }

    async fn create(
        &self,
        connection: Connection,
        request: IstioCertificateRequest,
        limit: Duration,
    ) -> Result<IstioCertificateResponse, Status> {
        let mut request = tonic::Request::new(request);
        *request.metadata_mut() = MetadataMap::from_headers(self.istiod.headers());
        request.set_timeout(limit);
        IstioCertificateServiceClient::with_origin(connection.service(), self.istiod.uri("/"))
            .max_decoding_message_size(MAX_ANSWER)
            .create_certificate(request)
            .await
            .map(tonic::Response::into_inner)
    }

    fn message(&self, csr_pem: &str, ttl: Duration) -> IstioCertificateRequest {
        let signer = prost_types::Value {
            kind: Some(Kind::StringValue(self.cert_signer.clone())),
        };
        IstioCertificateRequest {
            csr: csr_pem.to_owned(),
            validity_duration: i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(prost_types::Struct {
                fields: BTreeMap::from([("CertSigner".to_owned(), signer)]),
            }),
        }
    }
}

fn late(what: &str, limit: Duration) -> Status {
    let limit = rounded(limit);
    Status::deadline_exceeded(format!("no {what} within {limit}"))
}

impl Ca for IstioCa {
    async fn sign(&self, csr_pem: &str, ttl: Duration) -> Result<Vec<String>, SignError> {
        let signed = self.signed(csr_pem, ttl).await;
        let mut failures = self.failures.lock();
        match &signed {
            Ok(_) => drop(failures.end()),
            Err(error) => {
                if let Some(count) = failures.failed(&error.problem) {
                    tracing::error!(target: "citadelclient", "failed to sign CSR: {error}{count}");
                }
            }
        }
        signed
    }
}

#[cfg(test)]
mod tests;
