//! Checks certificates and chains for validity and for acceptance by peers.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, Error};
use x509_parser::parse_x509_certificate;

use super::{checked, error};
use crate::problem::{Code, Level, Problem};
use crate::report::Check;
use crate::runtime::clock::rfc3339;
use crate::secrets::{Facts, MAX_NAMES};
use crate::trust::pem;
use crate::trust::trust_anchors;

pub(super) const ROOTS: &str = "roots of the mesh";

impl Facts {
    /// Reads the certificates of a PEM file. Broken ones are left out.
    pub(super) fn of_pem(pem: &[u8]) -> Vec<Self> {
        pem::items::<CertificateDer>(pem).flatten().flat_map(|der| Self::read(&der)).collect()
    }

    pub(super) fn validity(&self, name: &str, now: SystemTime) -> Check {
        let found = format!("{self}, valid until {}", rfc3339(self.not_after));
        checked(name, self.validity_problem(name, now).map_or(Ok(found), Err))
    }
}

/// Returns the certificate that is valid for longest. Others of a bundle may belong to a rotation that is over or has
/// not begun.
pub(super) fn latest(facts: &[Facts], now: SystemTime) -> Option<&Facts> {
    let facts = facts.iter();
    facts.max_by_key(|facts| (facts.not_before <= now, facts.not_after))
}

/// Checks a chain: its leaf must be valid, and peers that trust `roots` must accept it. If the roots of peers are
/// unknown, another invalid certificate is a warning.
pub(super) fn chain(name: &str, chain: &[u8], roots: Option<&[u8]>, now: SystemTime) -> Check {
    let facts = Facts::of_pem(chain);
    let mut checks = facts.iter().map(|link| link.validity(name, now));
    let leaf = checks
        .next()
        .unwrap_or_else(|| error(Code::SecretFileUnusable, name, "there is no certificate in it"));
    if leaf.level == Level::Error {
        return leaf;
    }
    let Some(roots) = roots else {
        return match checks.find(|other| other.level == Level::Error) {
            Some(invalid) => Check { level: Level::Warning, ..invalid },
            None => leaf,
        };
    };
    let Err(why) = verify(chain, roots, now) else {
        return leaf;
    };
    let roots = Facts::of_pem(roots);
    let signer = roots.iter().find(|root| facts.iter().any(|link| link.issuer == root.subject));
    if let Some(signer) = signer.filter(|root| root.not_after < now) {
        return error(Code::RootsExpired, ROOTS, signer.validity("", now).found);
    }
    if let (Error::Other(limit), true) = (&why, facts.len() > 1) {
        return Check {
            found: format!("{}; Envoy may accept its chain: {limit}", leaf.found),
            ..leaf
        };
    }
    let (level, peers) = match why {
        // Envoy is less strict in some respects.
        Error::InvalidCertificate(
            CertificateError::Other(_)
            | CertificateError::UnsupportedSignatureAlgorithmContext { .. },
        ) => (Level::Warning, "some peers"),
        _ => (Level::Error, "peers"),
    };
    let links = facts.iter().take(MAX_NAMES).map(|link| {
        format!("{link} (issued by {}, valid until {})", link.issuer, rfc3339(link.not_after))
    });
    let rejected = Vec::from_iter(links).join(", ");
    let subjects = roots.into_iter().take(MAX_NAMES).map(|root| root.subject);
    let trusted = Vec::from_iter(subjects).join("; ");
    let found = format!("{peers} reject {rejected}: {why}; the mesh's roots are {trusted}");
    Check::with_level(level, &Problem::new(Code::CertificateChainRejected, name, found))
}

/// Verifies a chain both as a client's and as a server's, like Envoy. A SPIFFE identity has no DNS name
/// to compare.
fn verify(chain: &[u8], roots: &[u8], now: SystemTime) -> Result<(), Error> {
    let chain: Vec<_> = pem::items(chain).flatten().collect();
    let (leaf, others) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
    let roots = trust_anchors::parse(Path::new("ROOTCA"), roots, now)
        .map_err(|error| Error::General(error.to_string()))?;
    let store = &roots.store;
    let provider = Arc::new(default_provider());
    let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH);
    let now = UnixTime::since_unix_epoch(since_epoch.unwrap_or_default());
    let algorithms = provider.signature_verification_algorithms.all;
    let verifier = WebPkiClientVerifier::builder_with_provider(store.clone(), provider)
        .build()
        .map_err(|error| Error::General(error.to_string()))?;
    let verdict = verifier.verify_client_cert(leaf, others, now).map(drop);
    roots.review(verdict, leaf, others, |usage| usage.client_auth)?;
    let parsed = ParsedCertificate::try_from(leaf)?;
    let verdict =
        verify_server_cert_signed_by_trust_anchor(&parsed, store, others, now, algorithms);
    roots.review(verdict, leaf, others, |usage| usage.server_auth)?;
    let (_, parsed) = parse_x509_certificate(leaf).map_err(|_| CertificateError::BadEncoding)?;
    match parsed.key_usage() {
        Ok(Some(usage)) if !usage.value.digital_signature() => {
            Err(Error::General("its key usage lacks digitalSignature".into()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose,
        IsCa, KeyPair, KeyUsagePurpose, SanType,
    };
    use rustls::crypto::aws_lc_rs::sign::any_supported_type;
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{PrivateKeyDer, ServerName};
    use rustls::sign::{CertifiedKey, SingleCertAndKey};
    use rustls::{ClientConfig, RootCertStore, ServerConfig};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;
    use crate::secrets::Secret;
    use crate::secrets::files::WorkloadFiles;

    type Authority = CertifiedIssuer<'static, KeyPair>;

    /// The name by which a client without SPIFFE verifies the workload.
    const DNS: &str = "workload.test";

    fn valid_until(year: i32) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(2000, 1, 1);
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        params
    }

    fn authority(name: &str, year: i32, issuer: Option<&Authority>) -> Authority {
        let mut params = valid_until(year);
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        match issuer {
            Some(issuer) => CertifiedIssuer::signed_by(params, key, issuer).unwrap(),
            None => CertifiedIssuer::self_signed(params, key).unwrap(),
        }
    }

    /// Issues a workload's certificate. Returns the certificate and its key.
    fn workload(year: i32, usages: &[ExtendedKeyUsagePurpose], issuer: &Authority) -> [String; 2] {
        let key = KeyPair::generate().unwrap();
        let mut params = valid_until(year);
        let uri = "spiffe://cluster.local/ns/shop/sa/web".try_into().unwrap();
        params.subject_alt_names =
            vec![SanType::URI(uri), SanType::DnsName(DNS.try_into().unwrap())];
        params.extended_key_usages = usages.to_vec();
        [params.signed_by(&key, issuer).unwrap().pem(), key.serialize_pem()]
    }

    fn pair(chain: &str, key: &str) -> Arc<SingleCertAndKey> {
        let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).flatten();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let pair = CertifiedKey::new(chain.collect(), any_supported_type(&key).unwrap());
        Arc::new(SingleCertAndKey::from(pair))
    }

    fn store(roots: &str) -> RootCertStore {
        let mut store = RootCertStore::empty();
        store.add_parsable_certificates(CertificateDer::pem_slice_iter(roots.as_bytes()).flatten());
        store
    }

    /// Returns true if peers that trust `roots`, a server and a client, complete handshakes with the workload.
    async fn is_accepted(chain: &str, key: &str, roots: &str) -> bool {
        let root = authority("peers", 2999, None);
        let [peer, peer_key] = workload(2999, &[], &root);
        let (peer, own) = (pair(&peer, &peer_key), pair(chain, key));
        let provider = Arc::new(default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(store(roots).into(), provider.clone());
        let server = ServerConfig::builder_with_provider(provider.clone());
        let server = server.with_safe_default_protocol_versions().unwrap();
        let client = ClientConfig::builder_with_provider(provider);
        let client = client.with_safe_default_protocol_versions().unwrap();
        let as_client = (
            server
                .clone()
                .with_client_cert_verifier(verifier.build().unwrap())
                .with_cert_resolver(peer.clone()),
            client
                .clone()
                .with_root_certificates(store(&root.pem()))
                .with_client_cert_resolver(own.clone()),
        );
        let as_server = (
            server.with_no_client_auth().with_cert_resolver(own),
            client.with_root_certificates(store(roots)).with_no_client_auth(),
        );
        for (server, client) in [as_client, as_server] {
            let (a, b) = tokio::io::duplex(1 << 16);
            let name = ServerName::try_from(DNS).unwrap();
            let accept = TlsAcceptor::from(Arc::new(server)).accept(a);
            let connect = TlsConnector::from(Arc::new(client)).connect(name, b);
            let (accepted, connected) = tokio::join!(accept, connect);
            if accepted.is_err() || connected.is_err() {
                return false;
            }
        }
        true
    }

    /// Writes the chain, the key and the roots to files, and returns the check of the chain in these files.
    fn verdict(chain_pem: &str, key: &str, roots: &str) -> Check {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let files = WorkloadFiles {
            chain: write("cert-chain.pem", chain_pem),
            key: write("key.pem", key),
            roots: write("root-cert.pem", roots),
            is_only_source: true,
        };
        match files.read() {
            [Ok(Secret::Certificate(pair)), Ok(Secret::Roots(roots))] => {
                let now = SystemTime::now();
                chain("it", pair.chain_pem(), Some(roots.pem()), now)
            }
            [Err(problem), _] => Check::from(&problem),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_chain_is_an_error_exactly_where_a_peer_refuses_the_handshake() {
        let root = authority("root", 2999, None);
        let namesake = authority("root", 2999, None);
        let old = authority("old", 2001, Some(&root));
        let middle = authority("middle", 2999, Some(&root));
        let [leaf, key] = workload(2999, &[], &middle);
        let [of_old, key_of_old] = workload(2999, &[], &old);
        let [expired, key_of_expired] = workload(2001, &[], &middle);
        let clients = [ExtendedKeyUsagePurpose::ClientAuth];
        let [of_client, key_of_client] = workload(2999, &clients, &middle);
        let (good, with_root) =
            (leaf.clone() + &middle.pem(), leaf.clone() + &middle.pem() + &root.pem());
        let (root, other) = (root.pem(), authority("other", 2999, None).pem());
        for (chain, key, roots, problem) in [
            (&good, &key, &root, None),
            (&with_root, &key, &(other.clone() + &root), None),
            (
                &(of_old + &old.pem()),
                &key_of_old,
                &root,
                Some("CN=old (issued by CN=root, valid until 2001-01-01"),
            ),
            (&leaf, &key, &root, Some("UnknownIssuer")),
            (&good, &key, &other, Some("the mesh's roots are CN=other")),
            (&(expired + &middle.pem()), &key_of_expired, &root, Some("ago, at 2001-01-01")),
            (&good, &key, &namesake.pem(), Some("BadSignature")),
            (&good, &key_of_old, &root, Some("key.pem: the private key does not belong")),
            (&(of_client + &middle.pem()), &key_of_client, &root, Some("server authentication")),
        ] {
            let check = verdict(chain, key, roots);
            assert_eq!(check.level == Level::Ok, problem.is_none(), "{check}");
            assert_eq!(check.level == Level::Error, problem.is_some(), "{check}");
            assert!(check.to_string().contains(problem.unwrap_or("workload.test")), "{check}");
            let is_accepted = is_accepted(chain, key, roots).await;
            assert_eq!(is_accepted, problem.is_none(), "{check}");
        }
    }

    /// Envoy 1.40 gives the same verdicts.
    #[test]
    fn a_ca_certificate_that_envoy_refuses_is_an_error_others_are_ok() {
        use rcgen::KeyUsagePurpose::{DigitalSignature, KeyCertSign};
        let root = authority("root", 2999, None);
        let middle = authority("middle", 2999, Some(&root));
        let of_root = authority("workload", 2999, Some(&root)).pem();
        let of_middle = authority("workload", 2999, Some(&middle)).pem();
        let with = |usages: &[KeyUsagePurpose], purposes: &[ExtendedKeyUsagePurpose]| {
            let mut params = valid_until(2999);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = usages.to_vec();
            params.extended_key_usages = purposes.to_vec();
            let key = KeyPair::generate().unwrap();
            params.signed_by(&key, &root).unwrap().pem()
        };
        let (server, client) =
            (ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth);
        let both = [server.clone(), client.clone()];
        for (shown, level, words) in [
            (root.pem(), Level::Ok, "valid until 2999"),
            (of_root.clone(), Level::Ok, "valid until 2999"),
            (of_root + &root.pem(), Level::Ok, "valid until 2999"),
            (with(&[KeyCertSign, DigitalSignature], &both), Level::Ok, "valid until 2999"),
            (
                of_middle + &middle.pem(),
                Level::Ok,
                "Envoy may accept its chain: the certificate CN=workload, issued by CN=middle",
            ),
            (authority("workload", 2999, Some(&middle)).pem(), Level::Error, "peers reject"),
            (with(&[KeyCertSign], &[]), Level::Error, "lacks digitalSignature"),
            (with(&[], &[server]), Level::Error, "InvalidPurpose"),
            (with(&[], &[client]), Level::Error, "InvalidPurpose"),
            (with(&[], &[ExtendedKeyUsagePurpose::Any]), Level::Error, "InvalidPurpose"),
        ] {
            let roots = root.pem();
            let roots = Some(roots.as_bytes());
            let check = chain("it", shown.as_bytes(), roots, SystemTime::now());
            assert_eq!(check.level, level, "{check}");
            assert!(check.found.contains(words), "{check}");
        }
    }

    #[test]
    fn an_expired_root_is_the_problem_and_not_the_chain_it_signed() {
        let (root, other) = (authority("root", 2001, None), authority("other", 2999, None));
        let [leaf, _] = workload(2999, &[], &root);
        for roots in [root.pem(), root.pem() + &other.pem()] {
            let check = chain("it", leaf.as_bytes(), Some(roots.as_bytes()), SystemTime::now());
            assert_eq!((check.level, &*check.code), (Level::Error, "ROOTS_EXPIRED"), "{check}");
            assert!(check.found.starts_with("CN=root expired "), "{check}");
            assert!(check.found.contains("ago, at 2001-01-01T00:00:00Z"), "{check}");
        }
    }

    /// A gateway does not know the roots of its clients.
    #[test]
    fn without_roots_an_intermediate_that_has_expired_is_a_warning() {
        let root = authority("root", 2999, None);
        let now = SystemTime::now();
        for (year, level) in [(2999, Level::Ok), (2001, Level::Warning)] {
            let middle = authority("middle", year, Some(&root));
            let [leaf, _] = workload(2999, &[], &middle);
            let check = chain("it", (leaf + &middle.pem()).as_bytes(), None, now);
            assert_eq!(check.level, level, "{check}");
        }
    }

    fn certificate() -> Vec<u8> {
        let mut params = CertificateParams::new(["a.test".to_owned(), "::1".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2030, 1, 1);
        let signed = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        signed.der().to_vec()
    }

    #[test]
    fn the_validity_of_a_certificate_is_compared_with_the_clock() {
        let facts = Facts::read(&certificate()).unwrap();
        assert_eq!(facts.to_string(), "a.test");
        let day = |days: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(days * 86_400);
        for (now, level, words) in [
            (day(18_000), Level::Error, "valid in 262 d, from 2020-01-01"),
            (day(18_300), Level::Ok, "valid until 2030-01-01"),
            (day(21_900), Level::Warning, "expires in 15 d"),
            (day(22_000), Level::Error, "ago, at 2030-01-01"),
        ] {
            let check = facts.validity("it", now);
            assert_eq!(check.level, level, "{check}");
            assert!(check.found.contains(words), "{check}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_certificate_or_none(at in any::<usize>(), byte in any::<u8>()) {
            let mut der = certificate();
            let at = at % der.len();
            der[at] = byte;
            if let Ok(facts) = Facts::read(&der) {
                facts.validity("it", SystemTime::UNIX_EPOCH);
            }
        }
    }
}
