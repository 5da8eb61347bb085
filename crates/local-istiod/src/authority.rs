//! The certificate authority: throw-away roots, the serving certificate and workload certificates.
//!
//! The newest root signs workload certificates. Every response ends with all roots, so older
//! certificates stay trusted after a rotation. The first root signs the serving certificate, so agents
//! that know the roots from a file can still connect after a rotation.
//!
//! The callers of this module pass the identity that they have authenticated.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use tokio::sync::watch;
use x509_parser::prelude::FromDer;

use super::csr::{self, CsrError};
use crate::identity::SpiffeId;

/// The lifetime that istiod chooses if a request leaves it open.
const DEFAULT_TTL: Duration = Duration::from_secs(24 * 3600);
/// The maximum requested lifetime; istiod refuses longer ones.
const MAX_TTL: Duration = Duration::from_secs(90 * 24 * 3600);
/// The time by which certificates are backdated, so that workloads whose clock is slow accept them.
const BACKDATED: Duration = Duration::from_secs(120);
const ROOT_TTL: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A self-signed root certificate with its key.
pub(super) struct Root {
    key: KeyPair,
    pem: String,
    der: Vec<u8>,
    not_after: SystemTime,
}

/// A workload certificate and its roots as PEM, and the lifetime of the certificate.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) chain: Vec<String>,
    pub(super) lifetime: Duration,
}

#[derive(Debug)]
pub(super) struct Authority {
    roots: watch::Sender<Vec<Arc<Root>>>,
    /// The root certificates that are sent in place of the roots, if any.
    other_roots: watch::Sender<Option<String>>,
    trust_domain: String,
    max_ttl: Duration,
    clock_ahead: Duration,
    signed: AtomicU64,
}

/// The reason why no certificate was issued.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error(
        "requested TTL {} s is greater than the max allowed TTL {} s",
        .requested.as_secs(),
        MAX_TTL.as_secs()
    )]
    Ttl { requested: Duration },
    #[error("{0}")]
    Csr(String),
    #[error("unable to validate SAN Identities in CSR: found {found:?}, expected {expected}")]
    Identity { found: String, expected: SpiffeId },
    #[error("root certificate is unreadable or out of date")]
    Root,
    #[error("cannot make a certificate")]
    Certificate(#[from] rcgen::Error),
}

impl Root {
    pub(super) fn generate(trust_domain: &str) -> Result<Self, AuthorityError> {
        let key = KeyPair::generate()?;
        let pem = root_params(trust_domain).self_signed(&key)?.pem();
        Self::assemble(key, pem)
    }

    /// Reads a root that [`Root::pem`] and [`Root::key_pem`] have written.
    pub(super) fn from_pem(certificate: &str, key: &str) -> Result<Self, AuthorityError> {
        Self::assemble(KeyPair::from_pem(key)?, certificate.to_owned())
    }

    pub(super) fn pem(&self) -> &str {
        &self.pem
    }

    pub(super) fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    pub(super) fn der(&self) -> &[u8] {
        &self.der
    }

    fn assemble(key: KeyPair, pem: String) -> Result<Self, AuthorityError> {
        let (_, block) =
            x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|_| AuthorityError::Root)?;
        let (_, certificate) = x509_parser::certificate::X509Certificate::from_der(&block.contents)
            .map_err(|_| AuthorityError::Root)?;
        if certificate.public_key().subject_public_key.data.as_ref() != key.der_bytes() {
            return Err(AuthorityError::Root);
        }
        let seconds = u64::try_from(certificate.validity().not_after.timestamp())
            .map_err(|_| AuthorityError::Root)?;
        let not_after = UNIX_EPOCH + Duration::from_secs(seconds);
        Ok(Self { key, der: block.contents, pem, not_after })
    }
}

impl Authority {
    /// Creates an authority. Lifetimes above `max_ttl` are shortened without an error, so that a demo
    /// can rotate certificates every few seconds. The clock for issuing workload certificates is ahead
    /// by `clock_ahead`.
    pub(super) fn new(
        roots: Vec<Arc<Root>>,
        trust_domain: String,
        max_ttl: Duration,
        clock_ahead: Duration,
    ) -> Self {
        Self {
            roots: watch::Sender::new(roots),
            other_roots: watch::Sender::default(),
            trust_domain,
            max_ttl,
            clock_ahead,
            signed: AtomicU64::new(0),
        }
    }

    pub(super) fn roots(&self) -> Vec<Arc<Root>> {
        self.roots.borrow().clone()
    }

    /// Returns all roots, the newest first.
    pub(super) fn roots_pem(&self) -> String {
        self.roots.borrow().iter().rev().map(|root| root.pem()).collect()
    }

    pub(super) fn rotate_root(&self) -> Result<(), AuthorityError> {
        let root = Arc::new(Root::generate(&self.trust_domain)?);
        self.roots.send_modify(|roots| roots.push(root));
        Ok(())
    }

    pub(super) fn publish(&self, roots: Option<String>) {
        self.other_roots.send_replace(roots);
    }

    /// Returns the number of workload certificates issued so far.
    pub(super) fn signed(&self) -> u64 {
        self.signed.load(Ordering::Relaxed)
    }

    /// Makes a key and the certificate of the control plane itself.
    pub(super) fn serving_certificate(
        &self,
        names: &[String],
    ) -> Result<(Vec<u8>, KeyPair), AuthorityError> {
        let roots = self.roots();
        let root = roots.first().ok_or(AuthorityError::Root)?;
        let key = KeyPair::generate()?;
        let mut params = leaf_params(SystemTime::now(), root.not_after);
        for name in names {
            params.subject_alt_names.push(match name.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName(name.as_str().try_into()?),
            });
        }
        let certificate = params.signed_by(&key, &issuer(&self.trust_domain, root))?;
        Ok((certificate.der().to_vec(), key))
    }

    /// Signs the request of `caller`. If the `requested` lifetime is zero, the authority chooses the
    /// lifetime.
    pub(super) fn sign(
        &self,
        csr_pem: &str,
        caller: &SpiffeId,
        requested: Duration,
    ) -> Result<Issued, AuthorityError> {
        if requested > MAX_TTL {
            return Err(AuthorityError::Ttl { requested });
        }
        let csr = csr::parse(csr_pem)
            .map_err(|error: CsrError| AuthorityError::Csr(error.to_string()))?;
        match csr.uri {
            Some(found) if found != caller.to_string() => {
                return Err(AuthorityError::Identity { found, expected: caller.clone() });
            }
            _ => {}
        }
        let wanted = if requested.is_zero() { DEFAULT_TTL } else { requested };
        let issued = self.issue(&csr.key, caller, wanted.min(self.max_ttl))?;
        self.signed.fetch_add(1, Ordering::Relaxed);
        Ok(issued)
    }

    fn issue(
        &self,
        key: &impl PublicKeyData,
        caller: &SpiffeId,
        ttl: Duration,
    ) -> Result<Issued, AuthorityError> {
        let roots = self.roots();
        let root = roots.last().ok_or(AuthorityError::Root)?;
        let now = SystemTime::now() + self.clock_ahead;
        let not_after = (now + ttl).min(root.not_after);
        let lifetime = not_after.duration_since(now).map_err(|_| AuthorityError::Root)?;
        let mut params = leaf_params(now, not_after);
        let uri = caller.to_string().try_into()?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        let leaf = params.signed_by(key, &issuer(&self.trust_domain, root))?;
        let other_roots = self.other_roots.borrow().clone();
        Ok(Issued {
            chain: vec![leaf.pem(), other_roots.unwrap_or_else(|| self.roots_pem())],
            lifetime,
        })
    }
}

fn issuer<'a>(trust_domain: &str, root: &'a Root) -> Issuer<'static, &'a KeyPair> {
    Issuer::new(root_params(trust_domain), &root.key)
}

fn root_params(trust_domain: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, trust_domain);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let now = SystemTime::now();
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + ROOT_TTL).into();
    params
}

fn leaf_params(now: SystemTime, not_after: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = (now - BACKDATED).into();
    params.not_after = not_after.into();
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Root").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};

    use super::*;

    fn caller() -> SpiffeId {
        "spiffe://cluster.local/ns/shop/sa/cart".parse().unwrap()
    }

    fn authority(max_ttl: Duration) -> Authority {
        let root = Arc::new(Root::generate("cluster.local").unwrap());
        Authority::new(vec![root], "cluster.local".to_owned(), max_ttl, Duration::ZERO)
    }

    fn request(uri: &str) -> String {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        let key = KeyPair::generate().unwrap();
        params.serialize_request(&key).unwrap().pem().unwrap()
    }

    #[test]
    fn issues_the_callers_identity_in_the_form_of_istiod() {
        let issued = authority(MAX_TTL)
            .sign(&request(&caller().to_string()), &caller(), Duration::ZERO)
            .unwrap();
        assert_eq!(issued.lifetime, DEFAULT_TTL);
        let (_, pem) = x509_parser::pem::parse_x509_pem(issued.chain[0].as_bytes()).unwrap();
        let leaf = pem.parse_x509().unwrap();
        let san = leaf.subject_alternative_name().unwrap().unwrap();
        assert!(san.critical);
        let names = format!("{:?}", san.value.general_names);
        assert!(names.contains("spiffe://cluster.local/ns/shop/sa/cart"), "{names}");
        let usage = leaf.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.server_auth && usage.client_auth);
        let usage = leaf.key_usage().unwrap().unwrap().value;
        assert!(usage.digital_signature() && usage.key_encipherment());
        assert_eq!(leaf.subject().iter_attributes().count(), 0);
    }

    #[test]
    fn bounds_lifetimes() {
        let short = authority(Duration::from_secs(20));
        let csr = request(&caller().to_string());
        let issued = short.sign(&csr, &caller(), Duration::from_secs(3600));
        assert_eq!(issued.unwrap().lifetime, Duration::from_secs(20));
        let too_long = short.sign(&csr, &caller(), MAX_TTL + Duration::from_secs(1));
        let message = too_long.unwrap_err().to_string();
        assert!(message.contains("greater than the max allowed TTL"), "{message}");
    }

    #[test]
    fn refuses_another_identity_than_the_callers() {
        let error = authority(MAX_TTL)
            .sign(&request("spiffe://cluster.local/ns/shop/sa/admin"), &caller(), DEFAULT_TTL)
            .unwrap_err();
        assert!(matches!(error, AuthorityError::Identity { .. }), "{error}");
    }

    #[test]
    fn a_rotation_keeps_the_old_root_and_signs_with_the_new_one() {
        let authority = authority(MAX_TTL);
        let old = authority.roots_pem();
        authority.rotate_root().unwrap();
        let csr = request(&caller().to_string());
        let chain = authority.sign(&csr, &caller(), DEFAULT_TTL).unwrap().chain;
        assert!(chain[1].ends_with(&old) && chain[1] != old);
        let (_, leaf) = x509_parser::pem::parse_x509_pem(chain[0].as_bytes()).unwrap();
        let (_, root) = x509_parser::pem::parse_x509_pem(chain[1].as_bytes()).unwrap();
        let root = root.parse_x509().unwrap();
        let leaf = leaf.parse_x509().unwrap();
        // All roots have the same subject, so the signature is verified.
        let key = UnparsedPublicKey::new(
            &ECDSA_P256_SHA256_ASN1,
            &root.public_key().subject_public_key.data,
        );
        let signature = &leaf.signature_value.data;
        assert!(key.verify(leaf.tbs_certificate.as_ref(), signature).is_ok());
    }

    #[test]
    fn a_stored_root_is_the_same_root() {
        let root = Root::generate("cluster.local").unwrap();
        let again = Root::from_pem(root.pem(), &root.key_pem()).unwrap();
        assert_eq!(again.der(), root.der());
        let other = KeyPair::generate().unwrap().serialize_pem();
        assert!(Root::from_pem(root.pem(), &other).is_err());
    }
}
