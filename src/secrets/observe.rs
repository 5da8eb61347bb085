//! What the secrets are, for people to read.
//!
//! The renewal notes the dates of each certificate in a [`Record`]; the rest is read from what is
//! published when somebody asks.
//!
//! Does not tell keys.

use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Serialize;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::State;
use super::certificate::{system_time, uris};
use super::metrics::seconds;
use super::name::{DEFAULT, ROOT_CA};
use crate::clock::{Clock, rfc3339};

/// More than any chain or bundle of roots that Envoy is given.
const MOST_CERTIFICATES: usize = 100;

/// The secrets at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    pub secrets: Vec<Secret>,
    /// Why the latest attempt brought no certificate.
    pub problem: Option<Problem>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Secret {
    pub name: &'static str,
    /// Whether Envoy gets it when it asks.
    pub served: bool,
    pub renewed_at: Option<String>,
    pub next_renewal: Option<String>,
    /// As Envoy gets them: a leaf is the first.
    pub certificates: Vec<Certificate>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Certificate {
    pub serial: String,
    pub subject: String,
    pub spiffe_ids: Vec<String>,
    pub not_before: String,
    pub not_after: String,
    /// Negative once it has expired.
    pub remaining_seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Problem {
    pub error: String,
    pub failures: u32,
    pub next_attempt: String,
}

/// The dates of a certificate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Issued {
    pub(super) not_before: SystemTime,
    pub(super) not_after: SystemTime,
    pub(super) at: SystemTime,
    /// When the next one is asked for.
    pub(super) due: SystemTime,
}

/// The dates of the last certificate issued. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Record {
    clock: Clock,
    issued: Arc<Mutex<Option<Issued>>>,
}

impl Record {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            clock,
            issued: Arc::default(),
        }
    }

    pub(super) fn issue(&self, issued: Issued) {
        *self.issued.lock() = Some(issued);
    }

    pub(super) fn issued(&self) -> Option<Issued> {
        *self.issued.lock()
    }

    pub(super) fn now(&self) -> SystemTime {
        self.clock.now()
    }

    pub(super) fn snapshot(&self, state: &State) -> Snapshot {
        let (now, issued) = (self.now(), self.issued());
        let chain = state.workload.as_ref().map(|w| w.certificate.chain_pem());
        let roots = state.roots.as_ref().map(|roots| roots.pem());
        let secret = |name: &'static str, pem: Option<&bytes::Bytes>| Secret {
            name,
            served: pem.is_some(),
            renewed_at: issued.map(|issued| rfc3339(issued.at)),
            next_renewal: issued.map(|issued| rfc3339(issued.due)),
            certificates: pem.map(|pem| certificates(pem, now)).unwrap_or_default(),
        };
        Snapshot {
            secrets: vec![secret(DEFAULT, chain), secret(ROOT_CA, roots)],
            problem: state.problem.as_ref().map(|problem| Problem {
                error: problem.cause(),
                failures: problem.failures,
                next_attempt: rfc3339(problem.next_attempt),
            }),
        }
    }
}

/// The certificates of a chain or bundle; what cannot be read is left out, as Envoy leaves it.
fn certificates(pem: &[u8], now: SystemTime) -> Vec<Certificate> {
    CertificateDer::pem_slice_iter(pem)
        .flatten()
        .filter_map(|der| certificate(&der, now))
        .take(MOST_CERTIFICATES)
        .collect()
}

fn certificate(der: &[u8], now: SystemTime) -> Option<Certificate> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let validity = certificate.validity();
    let not_after = system_time(validity.not_after.timestamp());
    let mut spiffe_ids = uris(&certificate);
    spiffe_ids.retain(|uri| uri.starts_with("spiffe://"));
    Some(Certificate {
        serial: certificate.raw_serial_as_string(),
        subject: certificate.subject().to_string(),
        spiffe_ids,
        not_before: rfc3339(system_time(validity.not_before.timestamp())),
        not_after: rfc3339(not_after),
        remaining_seconds: seconds(not_after, now),
    })
}
