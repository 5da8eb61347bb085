//! Describes the workload's secrets for the debug page, without keys.
//!
//! The description is made from the published state when the page is requested.

use std::time::SystemTime;

use rustls::pki_types::CertificateDer;
use serde::Serialize;

use super::name::{DEFAULT, ROOT_CA};
use super::schedule::signed_seconds;
use super::x509;
use super::{Failure, State};
use crate::runtime::clock::rfc3339;
use crate::trust::{chain_verifier, pem};

/// The most certificates of a secret that are shown. No chain or bundle of roots for Envoy has more.
const MAX_CERTIFICATES: usize = 100;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    pub secrets: Vec<Secret>,
    /// The failure of the latest attempt; None after a success.
    pub problem: Option<Failure>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Secret {
    pub name: &'static str,
    /// True if the secret exists, so that Envoy gets it on request.
    pub served: bool,
    pub renewed_at: Option<String>,
    pub next_renewal: Option<String>,
    /// The chain in the order in which Envoy gets it: the leaf first.
    pub certificates: Vec<Certificate>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Certificate {
    pub serial: String,
    pub subject: String,
    pub spiffe_ids: Vec<String>,
    pub not_before: String,
    pub not_after: String,
    /// The remaining lifetime. It is negative once the certificate has expired.
    pub remaining_seconds: f64,
}

pub(super) fn snapshot(state: &State, now: SystemTime) -> Snapshot {
    let chain = state.workload.as_ref().map(|w| w.certificate.chain_pem());
    let roots = state.roots.as_ref().map(|roots| roots.pem());
    let secret = |name: &'static str, pem: Option<&bytes::Bytes>| Secret {
        name,
        served: pem.is_some(),
        renewed_at: state.dates.map(|dates| rfc3339(dates.issued)),
        next_renewal: state.dates.map(|dates| rfc3339(dates.due)),
        certificates: pem.map(|pem| certificates(pem, now)).unwrap_or_default(),
    };
    Snapshot {
        secrets: vec![secret(DEFAULT, chain), secret(ROOT_CA, roots)],
        problem: state.failure.clone(),
    }
}

/// Describes the certificates of a chain or bundle; broken ones are left out.
fn certificates(pem: &[u8], now: SystemTime) -> Vec<Certificate> {
    pem::items::<CertificateDer>(pem)
        .flatten()
        .filter_map(|der| certificate(&der, now))
        .take(MAX_CERTIFICATES)
        .collect()
}

fn certificate(der: &[u8], now: SystemTime) -> Option<Certificate> {
    let certificate = x509::parse(der).ok()?;
    let validity = certificate.validity();
    let not_after = validity.not_after.to_datetime().into();
    let mut spiffe_ids = chain_verifier::alternative_names(&certificate);
    spiffe_ids.retain(|uri| uri.starts_with("spiffe://"));
    Some(Certificate {
        serial: certificate.raw_serial_as_string(),
        subject: certificate.subject().to_string(),
        spiffe_ids,
        not_before: rfc3339(validity.not_before.to_datetime().into()),
        not_after: rfc3339(not_after),
        remaining_seconds: signed_seconds(not_after, now),
    })
}
