//! The two kinds of secret: a certificate chain with its private key, and trust anchors.
//!
//! A [`Certificate`] exists only if every element of the chain is a certificate and the leaf holds
//! the public half of the key: what Envoy would refuse is never published. The chain is served with its
//! roots, as pilot-agent does, byte for byte unless Envoy cannot read it. Signatures are not verified.
//! Keys are overwritten when dropped and left out of debug output.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use super::name::escaped;
use super::trust;
use super::x509::{self, Leaf, TextError};
use crate::clock::rfc3339;
use crate::identity::SpiffeId;
use crate::pem;

/// A secret as it is served. Clones share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Secret {
    Certificate(Arc<Certificate>),
    Roots(Roots),
}

/// One answer of the authority: the workload's certificate and the roots to trust.
#[derive(Debug)]
pub struct Workload {
    pub certificate: Arc<Certificate>,
    pub roots: Roots,
}

/// A chain whose leaf matches the key beside it.
#[derive(PartialEq, Eq)]
pub struct Certificate {
    chain_pem: Bytes,
    key_pem: Zeroizing<Vec<u8>>,
    leaf: Leaf,
}

/// Trust anchors as PEM; there is at least one.
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
    #[error("the text of our private key {0}")]
    Key(#[source] TextError),
}

impl Workload {
    /// Checks an answer: PEM elements, the leaf first, the roots last.
    pub fn new(
        answer: &[String],
        mut key_pem: Zeroizing<String>,
    ) -> Result<Self, CertificateError> {
        let [chain @ .., roots_pem] = answer else {
            return Err(CertificateError::TooShort { found: 0 });
        };
        let mut leaves = Vec::new();
        let elements = chain.iter().enumerate();
        // pilot-agent joins the elements: empty ones have no effect.
        for (index, element) in elements.filter(|(_, element)| !element.trim().is_empty()) {
            let checked = x509::leaf(element.as_bytes());
            leaves.push(checked.map_err(|error| not_certificates(index, element, error))?);
        }
        let Some(leaf) = leaves.into_iter().next() else {
            return Err(CertificateError::TooShort { found: 1 });
        };
        let missing = TextError::NoCertificate { bytes: 0 };
        let roots = Roots::merged([roots_pem.as_bytes()])
            .ok_or_else(|| not_certificates(chain.len(), roots_pem, missing))?;
        // One broken root would have Envoy refuse the chain.
        let (served, _) = Roots::from_file(roots_pem.as_bytes());
        let served = served.as_ref().unwrap_or(&roots).pem();
        // Elements without a line feed at their end are rewritten with one, as Envoy needs it.
        let chain = [chain.concat().as_bytes(), served].concat();
        let key_pem = Zeroizing::new(std::mem::take(&mut *key_pem).into_bytes());
        let certificate = Certificate::new(Zeroizing::new(chain), leaf, key_pem);
        let certificate = certificate.map_err(|error| match error {
            TextError::ForeignKey => CertificateError::ForeignKey,
            other => CertificateError::Key(other),
        })?;
        Ok(Self {
            certificate: Arc::new(certificate),
            roots,
        })
    }

    /// Refuses an expired certificate.
    pub(super) fn unexpired(self, now: SystemTime) -> Result<Self, CertificateError> {
        let not_after = self.certificate.not_after();
        match not_after > now {
            true => Ok(self),
            false => Err(CertificateError::Expired { not_after, now }),
        }
    }
}

fn not_certificates(index: usize, element: &str, error: TextError) -> CertificateError {
    let found = match error {
        TextError::NoCertificate { .. } => {
            format!("\"{}\" ({} bytes)", escaped(element, 32), element.len())
        }
        TextError::BrokenCertificate { found, .. } => found,
        other => other.to_string(),
    };
    CertificateError::NotCertificates { index, found }
}

impl Certificate {
    /// `leaf` is that of `chain`, whose elements are checked.
    pub(super) fn new(
        chain: Zeroizing<Vec<u8>>,
        leaf: Leaf,
        key_pem: Zeroizing<Vec<u8>>,
    ) -> Result<Self, TextError> {
        if x509::public_key(&key_pem)? != leaf.public_key {
            return Err(TextError::ForeignKey);
        }
        Ok(Self {
            chain_pem: pem::readable::<CertificateDer>(chain).to_vec().into(),
            key_pem: pem::readable::<PrivateKeyDer>(key_pem),
            leaf,
        })
    }

    /// Leaf, intermediates and roots.
    pub fn chain_pem(&self) -> &Bytes {
        &self.chain_pem
    }

    pub fn key_pem(&self) -> &[u8] {
        &self.key_pem
    }

    pub(super) fn is_issued_to(&self, identity: &SpiffeId) -> bool {
        self.leaf.names.contains(&identity.to_string())
    }

    pub(super) fn not_before(&self) -> SystemTime {
        self.leaf.not_before
    }

    pub fn not_after(&self) -> SystemTime {
        self.leaf.not_after
    }

    /// What is odd about the certificate without being a reason to refuse it.
    pub(super) fn unusual_fields(&self, identity: &SpiffeId, now: SystemTime) -> Vec<String> {
        let mut unusual_fields = Vec::new();
        if !self.is_issued_to(identity) {
            unusual_fields.push(format!(
                "it is issued to {:?}, we asked for {identity}",
                self.leaf.names
            ));
        }
        if self.not_after() <= now {
            unusual_fields.push(format!(
                "it is valid until {}, it is now {}: the clocks differ",
                rfc3339(self.not_after()),
                rfc3339(now)
            ));
        }
        if self.not_before() > now {
            unusual_fields.push(format!(
                "it is valid from {}, it is now {}: the clocks differ",
                rfc3339(self.not_before()),
                rfc3339(now)
            ));
        }
        unusual_fields
    }
}

impl fmt::Debug for Certificate {
    /// Everything but the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate")
            .field("names", &self.leaf.names)
            .field("not_after", &rfc3339(self.not_after()))
            .finish_non_exhaustive()
    }
}

impl Roots {
    /// The certificates of all texts, each once and in order; None if there is none.
    pub(super) fn merged<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> Option<Self> {
        let merged = trust::merge(texts);
        (!merged.is_empty()).then(|| Self(merged.into()))
    }

    /// The certificates of a file, byte for byte unless Envoy cannot read it, and how many broken ones are
    /// left out.
    pub(super) fn from_file(pem: &[u8]) -> (Option<Self>, usize) {
        let certificates = Vec::from_iter(x509::bundle(pem));
        let broken = certificates.iter().filter(|der| der.is_none()).count();
        let mut roots = Vec::from_iter(certificates.into_iter().flatten());
        if roots.is_empty() {
            return (None, broken);
        }
        let is_in_order = !trust::put_usable_first(&mut roots);
        if is_in_order && pem::plain_blocks(pem) == Some(roots.len()) {
            return (Some(Self(Bytes::copy_from_slice(pem))), broken);
        }
        (Some(Self(x509::text(roots).into())), broken)
    }

    /// These and the others.
    pub(super) fn with(&self, others: &Self) -> Self {
        Self(trust::merge([&*self.0, &*others.0]).into())
    }

    pub fn pem(&self) -> &Bytes {
        &self.0
    }

    #[cfg(test)]
    pub(crate) fn unchecked(text: &'static str) -> Self {
        Self(Bytes::from_static(text.as_bytes()))
    }
}
