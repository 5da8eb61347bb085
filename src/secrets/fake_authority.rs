//! A certificate authority for tests. It signs each CSR with a temporary root, without checks, or misbehaves as the
//! test has set.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, PKCS_ECDSA_P256_SHA256,
    PKCS_RSA_SHA256, PublicKeyData, SanType, SignatureAlgorithm,
};
use rustls::pki_types::CertificateSigningRequestDer;
use rustls::pki_types::pem::PemObject;
use tokio::sync::watch;
use tonic::Code;
use x509_parser::prelude::{FromDer, X509CertificationRequest};

use crate::ca::key::KeyType;
use crate::ca::{Ca, Reached, SignError};
use crate::problem::{self, Problem};
use crate::runtime::clock::Clock;
use crate::secrets::Config;
use crate::trust::identity::SpiffeId;

/// The reaction of the authority to a CSR.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Answer {
    Signed,
    Fails(Code),
    /// Refuses connections.
    Unreachable,
    /// Signs RSA keys, and fails with this code for other keys.
    RefusesEcdsa(Code),
    /// Does not respond until the test sets another answer.
    Waits,
    Empty,
    LeafOnly,
    GarbageLeaf,
    GarbageRoots,
    ForeignKey,
    ForeignName,
    Expired,
    /// A certificate whose validity ends at the moment when it begins.
    ZeroLifetime,
}

#[derive(Clone)]
pub(crate) struct FakeAuthority {
    clock: Clock,
    answer: Arc<watch::Sender<Answer>>,
    log: Arc<Mutex<Log>>,
    root: Arc<Mutex<Root>>,
    /// The number of seconds by which the authority's clock is ahead of the agent's clock.
    skew: Arc<AtomicI64>,
    is_connected: Arc<AtomicBool>,
}

#[derive(Default)]
struct Log {
    requests: usize,
    in_flight: usize,
    most_in_flight: usize,
    keys: HashSet<Vec<u8>>,
}

struct Root {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

pub(crate) fn config() -> Config {
    Config {
        identity: SpiffeId::new("cluster.local", "shop", "cart"),
        key_type: KeyType::P256,
        falls_back_to_rsa: false,
        encoding: Default::default(),
        ttl: Duration::from_secs(24 * 3600),
        grace_ratio: 0.5,
        grace_jitter: 0.0,
        least_pause: crate::secrets::MIN_PAUSE,
        cache: None,
    }
}

/// Returns a simulated clock that shows 2026-02-02T02:40:00Z.
pub(crate) fn clock() -> Clock {
    Clock::simulated(SystemTime::UNIX_EPOCH + Duration::from_secs(1_770_000_000))
}

impl FakeAuthority {
    pub(crate) fn new(clock: &Clock) -> Self {
        Self {
            clock: clock.clone(),
            answer: Arc::new(watch::Sender::new(Answer::Signed)),
            log: Arc::default(),
            root: Arc::new(Mutex::new(Root::new())),
            skew: Arc::default(),
            is_connected: Arc::new(AtomicBool::new(true)),
        }
    }

    pub(crate) fn set(&self, answer: Answer) {
        self.answer.send_replace(answer);
    }

    pub(crate) fn rotate_root(&self) {
        *self.root.lock().unwrap() = Root::new();
    }

    /// Signs with a new root from now on, and still returns the old root next to the new one.
    pub(crate) fn rotate_root_with_overlap(&self) {
        let mut root = self.root.lock().unwrap();
        let old = std::mem::replace(&mut *root, Root::new());
        root.pem.push_str(&old.pem);
    }

    pub(crate) fn set_skew(&self, seconds: i64) {
        self.skew.store(seconds, Ordering::Relaxed);
    }

    pub(crate) fn root_pem(&self) -> String {
        self.root.lock().unwrap().pem.clone()
    }

    pub(crate) fn requests(&self) -> usize {
        self.log.lock().unwrap().requests
    }

    pub(crate) fn most_in_flight(&self) -> usize {
        self.log.lock().unwrap().most_in_flight
    }

    pub(crate) fn forget_keys(&self) {
        self.log.lock().unwrap().keys = HashSet::new();
    }

    pub(crate) fn distinct_keys(&self) -> usize {
        self.log.lock().unwrap().keys.len()
    }

    fn signed(&self, key: &PublicKey, life: Duration) -> Vec<String> {
        self.signed_for(config().identity, key, life)
    }

    fn signed_for(&self, identity: SpiffeId, key: &PublicKey, life: Duration) -> Vec<String> {
        let skew = self.skew.load(Ordering::Relaxed);
        let distance = Duration::from_secs(skew.unsigned_abs());
        let now = self.clock.now();
        let now = if skew < 0 { now - distance } else { now + distance };
        let mut params = CertificateParams::default();
        let uri = identity.to_string();
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let is_lifeless = *self.answer.borrow() == Answer::ZeroLifetime;
        let age = if is_lifeless { 0 } else { 120 };
        params.not_before = epoch + since_epoch - Duration::from_secs(age);
        params.not_after = epoch + since_epoch + life;
        let root = self.root.lock().unwrap();
        let leaf = params.signed_by(key, &root.issuer).unwrap();
        vec![leaf.pem(), root.pem.clone()]
    }
}

fn failure(code: Code) -> SignError {
    let message = "told to fail".to_owned();
    let problem = Problem::new(problem::Code::IstiodError, "istiod", message.clone());
    SignError { code, message, problem }
}

impl Ca for FakeAuthority {
    async fn reach(&self) -> Result<Reached, SignError> {
        let is_reachable = *self.answer.borrow() != Answer::Unreachable;
        let was_connected = self.is_connected.swap(is_reachable, Ordering::Relaxed);
        match (is_reachable, was_connected) {
            (false, _) => Err(failure(Code::Unavailable)),
            (true, false) => Ok(Reached::Now),
            (true, true) => Ok(Reached::Before),
        }
    }

    async fn sign(&self, csr_pem: &str, ttl: Duration) -> Result<Vec<String>, SignError> {
        let key = PublicKey::of(csr_pem);
        {
            let mut log = self.log.lock().unwrap();
            log.requests += 1;
            log.in_flight += 1;
            log.most_in_flight = log.most_in_flight.max(log.in_flight);
            log.keys.insert(key.bits.clone());
        }
        let _in_flight = InFlight(&self.log); // It is dropped at the end of the call, also if the call is cancelled.
        let mut answers = self.answer.subscribe();
        let answer = *answers.wait_for(|a| *a != Answer::Waits).await.unwrap();
        let mut signed = self.signed(&key, ttl);
        match answer {
            Answer::Signed | Answer::Waits => {}
            Answer::RefusesEcdsa(_) if key.is_rsa => {}
            Answer::Fails(code) | Answer::RefusesEcdsa(code) => return Err(failure(code)),
            Answer::Unreachable => return Err(failure(Code::Unavailable)),
            Answer::Empty => signed.clear(),
            Answer::LeafOnly => signed.truncate(1),
            Answer::GarbageLeaf => signed[0] = "no certificate".to_owned(),
            Answer::GarbageRoots => signed[1] = "no certificate".to_owned(),
            Answer::ForeignKey => {
                let other = KeyPair::generate().unwrap();
                let bits = other.public_key_raw().to_vec();
                signed = self.signed(&PublicKey { bits, is_rsa: false }, ttl);
            }
            Answer::ForeignName => {
                let other = SpiffeId::new("cluster.local", "shop", "till");
                signed = self.signed_for(other, &key, ttl);
            }
            Answer::Expired | Answer::ZeroLifetime => signed = self.signed(&key, Duration::ZERO),
        }
        Ok(signed)
    }
}

struct InFlight<'a>(&'a Mutex<Log>);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap().in_flight -= 1;
    }
}

impl Root {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }
}

struct PublicKey {
    bits: Vec<u8>,
    is_rsa: bool,
}

impl PublicKey {
    fn of(csr_pem: &str) -> Self {
        let der = CertificateSigningRequestDer::from_pem_slice(csr_pem.as_bytes()).unwrap();
        let (_, csr) = X509CertificationRequest::from_der(&der).unwrap();
        let key = csr.certification_request_info.subject_pki;
        Self {
            bits: key.subject_public_key.data.to_vec(),
            is_rsa: matches!(key.parsed(), Ok(x509_parser::public_key::PublicKey::RSA(_))),
        }
    }
}

impl PublicKeyData for PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.bits
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        if self.is_rsa { &PKCS_RSA_SHA256 } else { &PKCS_ECDSA_P256_SHA256 }
    }
}
