//! A checked chain with its key, and the roots that came with it.
//!
//! A [`Certificate`] exists only if every element of the chain is a certificate, the leaf holds
//! the public half of our key and has not expired: what Envoy would refuse is never published.
//! The chain is served as it came, roots included, as pilot-agent does. Keys are overwritten when
//! dropped.
//!
//! Does not verify signatures: which roots to trust is what the answer says.

use std::fmt;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rcgen::{KeyPair, PublicKeyData};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use zeroize::Zeroizing;

use super::name::escaped;
use super::trust;
use crate::clock::rfc3339;
use crate::identity::SpiffeId;

/// What a workload proves its identity with, and whom it believes: one answer of the authority.
#[derive(Debug)]
pub struct Workload {
    pub certificate: Certificate,
    pub roots: Roots,
}

/// A chain whose leaf matches the key beside it.
pub struct Certificate {
    chain_pem: Bytes,
    key_pem: Zeroizing<String>,
    not_before: SystemTime,
    not_after: SystemTime,
    /// The URIs of the leaf's subject alternative name.
    uris: Vec<String>,
}

/// Trust anchors as PEM, each once and in order; there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots(Bytes);

/// Why an answer of the authority is not used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("invalid empty CertChain: found {found} elements, expected a leaf and the roots")]
    TooShort { found: usize },
    #[error("element {index} of the chain is {found}, expected certificates in PEM")]
    NotCertificates { index: usize, found: String },
    #[error("the leaf holds a public key that is not ours")]
    ForeignKey,
    #[error("the leaf expired at {}, it is now {}", rfc3339(*.not_after), rfc3339(*.now))]
    Expired {
        not_after: SystemTime,
        now: SystemTime,
    },
    #[error("our private key cannot be read")]
    Key(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Workload {
    /// Checks an answer: PEM elements, the leaf first, the roots last.
    pub fn new(
        answer: &[String],
        key_pem: Zeroizing<String>,
        now: SystemTime,
    ) -> Result<Self, CertificateError> {
        let [chain @ .., roots] = answer else {
            return Err(CertificateError::TooShort { found: 0 });
        };
        if chain.is_empty() {
            return Err(CertificateError::TooShort { found: 1 });
        }
        let anchors =
            Roots::new(roots).ok_or_else(|| not_certificates(chain.len(), excerpt(roots)))?;
        Ok(Self {
            certificate: Certificate::new(chain, roots, key_pem, now)?,
            roots: anchors,
        })
    }
}

impl Certificate {
    fn new(
        chain: &[String],
        roots: &str,
        key_pem: Zeroizing<String>,
        now: SystemTime,
    ) -> Result<Self, CertificateError> {
        let ders = chain_ders(chain)?;
        let Some(leaf) = ders.first() else {
            return Err(CertificateError::TooShort { found: 0 });
        };
        let leaf = parsed(leaf).map_err(|found| not_certificates(0, found))?;
        if leaf.public_key().subject_public_key.data != public_key(&key_pem)? {
            return Err(CertificateError::ForeignKey);
        }
        let not_after = system_time(leaf.validity().not_after.timestamp());
        if not_after <= now {
            return Err(CertificateError::Expired { not_after, now });
        }
        Ok(Self {
            chain_pem: joined(chain, roots),
            key_pem,
            not_before: system_time(leaf.validity().not_before.timestamp()),
            not_after,
            uris: uris(&leaf),
        })
    }

    /// Leaf, intermediates and roots.
    pub fn chain_pem(&self) -> &Bytes {
        &self.chain_pem
    }

    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// Whether it is issued to `identity`.
    pub(super) fn is_of(&self, identity: &SpiffeId) -> bool {
        self.uris.contains(&identity.to_string())
    }

    pub(super) fn not_before(&self) -> SystemTime {
        self.not_before
    }

    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// What is odd about the certificate without being a reason to refuse it.
    pub(super) fn oddities(&self, identity: &SpiffeId, now: SystemTime) -> Vec<String> {
        let mut oddities = Vec::new();
        if !self.is_of(identity) {
            oddities.push(format!(
                "it is issued to {:?}, we asked for {identity}",
                self.uris
            ));
        }
        if self.not_before > now {
            oddities.push(format!(
                "it is valid from {}, it is now {}: the clocks differ",
                rfc3339(self.not_before),
                rfc3339(now)
            ));
        }
        oddities
    }
}

impl fmt::Debug for Certificate {
    /// Everything but the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate")
            .field("uris", &self.uris)
            .field("not_after", &rfc3339(self.not_after))
            .finish_non_exhaustive()
    }
}

impl Roots {
    /// The certificates of a bundle; nothing if there is none in it.
    pub(super) fn new(pem: &str) -> Option<Self> {
        let merged = trust::merge([pem]);
        (!merged.is_empty()).then(|| Self(merged.into()))
    }

    /// These and the others.
    pub(super) fn with(&self, others: &Self) -> Self {
        Self(trust::merge([self.text(), others.text()]).into())
    }

    pub fn pem(&self) -> &Bytes {
        &self.0
    }

    fn text(&self) -> &str {
        // Made from text, so there is no other case.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

pub(super) fn is_certificate(der: &CertificateDer<'_>) -> bool {
    parsed(der).is_ok()
}

/// The certificates of all elements; the first is the leaf.
fn chain_ders(chain: &[String]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let mut ders = Vec::new();
    for (index, element) in chain.iter().enumerate() {
        let before = ders.len();
        for der in CertificateDer::pem_slice_iter(element.as_bytes()) {
            let der = der.map_err(|error| not_certificates(index, error.to_string()))?;
            parsed(&der).map_err(|found| not_certificates(index, found))?;
            ders.push(der);
        }
        if ders.len() == before {
            return Err(not_certificates(index, excerpt(element)));
        }
    }
    Ok(ders)
}

fn parsed<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok((rest, _)) => Err(format!("a certificate with {} bytes behind it", rest.len())),
        Err(error) => Err(format!("no X.509 certificate ({error})")),
    }
}

fn not_certificates(index: usize, found: String) -> CertificateError {
    CertificateError::NotCertificates { index, found }
}

fn excerpt(text: &str) -> String {
    format!("\"{}\" ({} bytes)", escaped(text, 32), text.len())
}

fn public_key(key_pem: &str) -> Result<Vec<u8>, CertificateError> {
    let der = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())
        .map_err(|error| CertificateError::Key(error.into()))?;
    let der = Zeroizing::new(der);
    let key = KeyPair::try_from(&*der).map_err(|error| CertificateError::Key(error.into()))?;
    Ok(Zeroizing::new(key).der_bytes().to_vec())
}

pub(super) fn system_time(unix: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(unix).unwrap_or(0))
}

pub(super) fn uris(leaf: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(names)) = leaf.subject_alternative_name() else {
        return Vec::new(); // Unreadable names are no names: the caller warns.
    };
    let uri = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => Some((*uri).to_owned()),
        _ => None,
    };
    names.value.general_names.iter().filter_map(uri).collect()
}

/// All elements in one piece, with a line break where one lacks it.
fn joined(chain: &[String], roots: &str) -> Bytes {
    let mut pem = Vec::new();
    for element in chain {
        pem.extend_from_slice(element.as_bytes());
        if !element.ends_with('\n') {
            pem.push(b'\n');
        }
    }
    pem.extend_from_slice(roots.as_bytes());
    pem.into()
}
