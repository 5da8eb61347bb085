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

use super::trust;
use super::x509::{self, Facts};
use crate::clock::rfc3339;
use crate::identity::SpiffeId;
use crate::pem;
use crate::problem::{Problem, codes};

const SIGNED: &str = "new certificate";

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
    pub(super) leaf: Facts,
}

/// Trust anchors as PEM; there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots(Bytes);

impl Workload {
    /// Checks an answer: PEM elements, the leaf first, the roots last.
    pub fn new(answer: &[String], mut key_pem: Zeroizing<String>) -> Result<Self, Problem> {
        let none = String::new();
        let (roots_pem, chain) = answer.split_last().unwrap_or((&none, &[]));
        let mut leaves = Vec::new();
        let elements = chain.iter().enumerate();
        // pilot-agent joins the elements: empty ones have no effect.
        for (index, element) in elements.filter(|(_, element)| !element.trim().is_empty()) {
            let leaf = x509::leaf(element.as_bytes());
            leaves.push(leaf.map_err(|found| not_certificates(index, found))?);
        }
        let leaf = leaves.into_iter().next().ok_or_else(|| {
            let (expected, found) = ("expected a leaf and the roots", answer.len());
            unusable(format!(
                "invalid empty CertChain: found {found} elements, {expected}"
            ))
        })?;
        let roots = Roots::merged([roots_pem.as_bytes()]);
        let missing = || not_certificates(chain.len(), x509::no_certificate(roots_pem.as_bytes()));
        let roots = roots.ok_or_else(missing)?;
        // One broken root would have Envoy refuse the chain.
        let (served, _) = Roots::from_file(roots_pem.as_bytes());
        let served = served.as_ref().unwrap_or(&roots).pem();
        // Elements without a line feed at their end are rewritten with one, as Envoy needs it.
        let chain = [chain.concat().as_bytes(), served].concat();
        let key_pem = Zeroizing::new(std::mem::take(&mut *key_pem).into_bytes());
        let certificate = Certificate::new(Zeroizing::new(chain), leaf, key_pem);
        Ok(Self {
            certificate: Arc::new(certificate.map_err(unusable)?),
            roots,
        })
    }
}

fn unusable(found: String) -> Problem {
    let subject = "answer of the certificate authority";
    Problem::new(codes::CERTIFICATE_ANSWER_UNUSABLE, subject, found)
}

fn not_certificates(index: usize, found: String) -> Problem {
    unusable(format!("element {index} of the chain: {found}"))
}

impl Certificate {
    /// `leaf` is that of `chain`, whose elements are checked.
    pub(super) fn new(
        chain: Zeroizing<Vec<u8>>,
        leaf: Facts,
        key_pem: Zeroizing<Vec<u8>>,
    ) -> Result<Self, String> {
        if x509::public_key(&key_pem)? != leaf.public_key {
            return Err("the private key does not belong to the certificate".to_owned());
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

    pub fn not_after(&self) -> SystemTime {
        self.leaf.not_after
    }

    /// Reports a signed certificate that is not for the identity, or not valid. It may be used anyway.
    pub(super) fn problems(&self, identity: &SpiffeId, now: SystemTime) -> Vec<Problem> {
        let is_foreign = !self.is_issued_to(identity);
        let foreign = is_foreign.then(|| {
            let names = self.leaf.names.join(", ");
            let found = format!("issued to {names}, requested for {identity}");
            Problem::new(codes::CERTIFICATE_FOR_OTHER_IDENTITY, SIGNED, found)
        });
        foreign.into_iter().chain(self.clock_problem(now)).collect()
    }

    /// A certificate is signed for now, and withdrawn when it expires: if it is not valid, a clock is wrong.
    pub(crate) fn clock_problem(&self, now: SystemTime) -> Option<Problem> {
        let (what, date) = match (self.leaf.not_before, self.leaf.not_after) {
            (_, end) if end <= now => ("already expired (valid until", end),
            (begin, _) if begin > now => ("not valid yet (valid from", begin),
            _ => return None,
        };
        let (date, now) = (rfc3339(date), rfc3339(now));
        let found = format!("{what} {date}, now {now}): this clock or istiod's is wrong");
        Some(Problem::new(codes::CLOCKS_DIFFER, SIGNED, found))
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
