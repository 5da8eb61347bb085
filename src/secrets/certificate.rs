//! Checks the authority's response, and makes the secrets of it: a certificate with its key, and roots.
//!
//! A [`Certificate`] exists only if every element of the chain is a certificate and the leaf holds
//! the public half of the key, so no secret is published that Envoy would reject. The chain is served with
//! its roots, as pilot-agent does, byte for byte unless Envoy cannot read it. Signatures are not verified.
//! Keys are overwritten when dropped and left out of debug output.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use super::trust::Roots;
use super::x509::Error::NoCertificate;
use super::x509::{self, Facts};
use crate::problem::{Code, Problem};
use crate::runtime::clock::rfc3339;
use crate::trust::identity::SpiffeId;
use crate::trust::pem;

/// The subject of problems with a certificate the authority has signed.
const NEW_CERTIFICATE: &str = "new certificate";

/// A secret as Envoy gets it. Clones share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Secret {
    Certificate(Arc<Certificate>),
    Roots(Roots),
}

/// A response of the authority: the workload's certificate and the roots to trust.
#[derive(Debug)]
pub struct Workload {
    pub certificate: Arc<Certificate>,
    pub roots: Roots,
}

/// A certificate chain and the private key of its leaf.
#[derive(PartialEq, Eq)]
pub struct Certificate {
    chain_pem: Bytes,
    key_pem: Zeroizing<Vec<u8>>,
    pub(super) leaf: Facts,
}

impl Workload {
    /// Checks the PEM elements of a response: the leaf comes first, the roots last.
    pub fn new(response: &[String], mut key_pem: Zeroizing<String>) -> Result<Self, Problem> {
        let empty = String::new();
        let (roots_pem, chain) = response.split_last().unwrap_or((&empty, &[]));
        let mut leaf = None;
        for (index, element) in chain.iter().enumerate() {
            // pilot-agent joins the elements, so empty ones have no effect.
            if !element.trim().is_empty() {
                let facts = x509::parse_chain(element.as_bytes())
                    .map_err(|error| not_certificates(index, error))?;
                leaf.get_or_insert(facts);
            }
        }
        let leaf = leaf.ok_or_else(|| {
            unusable(format!(
                "invalid empty CertChain: found {} elements, expected a leaf and the roots",
                response.len()
            ))
        })?;
        let roots_pem = roots_pem.as_bytes();
        let roots = Roots::merged([roots_pem])
            .ok_or_else(|| not_certificates(chain.len(), NoCertificate(roots_pem.len())))?;
        // Envoy would reject the chain for one broken root.
        let (readable_roots, _) = Roots::from_file(roots_pem);
        let readable_roots = readable_roots.as_ref().unwrap_or(&roots);
        // `Certificate::new` puts a line feed between elements that lack one, because Envoy needs it.
        let chain = [chain.concat().as_bytes(), readable_roots.pem()].concat();
        let key_pem = Zeroizing::new(std::mem::take(&mut *key_pem).into_bytes());
        let certificate = Certificate::new(Zeroizing::new(chain), leaf, key_pem);
        Ok(Self { certificate: Arc::new(certificate.map_err(unusable)?), roots })
    }
}

fn unusable(found: impl ToString) -> Problem {
    Problem::new(Code::CertificateAnswerUnusable, "answer of the certificate authority", found)
}

fn not_certificates(index: usize, found: x509::Error) -> Problem {
    unusable(format!("element {index} of the chain: {found}"))
}

impl Certificate {
    /// Joins a checked chain, its parsed leaf and the key. The error says that the key does not match.
    pub(super) fn new(
        chain: Zeroizing<Vec<u8>>,
        leaf: Facts,
        key_pem: Zeroizing<Vec<u8>>,
    ) -> Result<Self, x509::Error> {
        if x509::public_key(&key_pem)? != leaf.public_key {
            return Err(x509::Error::OtherKey);
        }
        Ok(Self {
            chain_pem: pem::readable::<CertificateDer>(chain).to_vec().into(),
            key_pem: pem::readable::<PrivateKeyDer>(key_pem),
            leaf,
        })
    }

    /// Returns leaf, intermediates and roots.
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

    /// Returns the problems of a certificate that is not for the identity, or not valid. It may be used
    /// anyway.
    pub(super) fn problems(&self, identity: &SpiffeId, now: SystemTime) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !self.is_issued_to(identity) {
            let found =
                format!("issued to {}, requested for {identity}", self.leaf.names.join(", "));
            let code = Code::CertificateForOtherIdentity;
            problems.push(Problem::new(code, NEW_CERTIFICATE, found));
        }
        problems.extend(self.clock_problem(now));
        problems
    }

    /// Reports a certificate that is not valid now. The authority signs for the present, and an expired
    /// certificate is withdrawn, so a clock is wrong then.
    pub(crate) fn clock_problem(&self, now: SystemTime) -> Option<Problem> {
        let (what, date) = match (self.leaf.not_before, self.leaf.not_after) {
            (_, end) if end <= now => ("already expired (valid until", end),
            (begin, _) if begin > now => ("not valid yet (valid from", begin),
            _ => return None,
        };
        let [date, now] = [date, now].map(rfc3339);
        let found = format!("{what} {date}, now {now}): this clock or istiod's is wrong");
        Some(Problem::new(Code::ClocksDiffer, NEW_CERTIFICATE, found))
    }
}

impl fmt::Debug for Certificate {
    /// Formats the certificate without its key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate")
            .field("names", &self.leaf.names)
            .field("not_after", &rfc3339(self.not_after()))
            .finish_non_exhaustive()
    }
}
