//! Tests the verification of certificate chains that a server presents in handshakes. OpenSSL signed the
//! recorded chains.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CustomExtension, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose as Purpose, GeneralSubtree, IsCa, KeyPair, KeyUsagePurpose,
    NameConstraints, SignatureAlgorithm, date_time_ymd,
};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::time_provider::TimeProvider;
use rustls::version::{TLS12, TLS13};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::trust::compliance::Policy;
use crate::trust::trust_anchors;

const NAME: &str = "istiod.test";

type Ca = CertifiedIssuer<'static, KeyPair>;
type Change = fn(&mut CertificateParams);

/// Returns the parameters of a CA certificate that is valid for the name of the server.
fn params(name: &str, change: Change) -> CertificateParams {
    let mut params = CertificateParams::new([NAME.to_owned()]).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_before = date_time_ymd(2000, 1, 1);
    params.not_after = date_time_ymd(2999, 1, 1);
    change(&mut params);
    params
}

fn root(name: &str, change: Change) -> Ca {
    Ca::self_signed(params(name, change), KeyPair::generate().unwrap()).unwrap()
}

fn issued(name: &str, issuer: &Ca, change: Change) -> Ca {
    Ca::signed_by(params(name, change), KeyPair::generate().unwrap(), issuer).unwrap()
}

fn unchanged(_: &mut CertificateParams) {}

fn permits_dns(params: &mut CertificateParams) {
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: vec![GeneralSubtree::DnsName(NAME.to_owned())],
        excluded_subtrees: Vec::new(),
    });
}

fn permits_uris(params: &mut CertificateParams) {
    let constraints = yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            let permitted = writer.next();
            permitted.write_tagged_implicit(yasna::Tag::context(0), |writer| {
                writer.write_sequence_of(|writer| {
                    writer.next().write_sequence(|writer| {
                        let uri = writer.next();
                        uri.write_tagged_implicit(yasna::Tag::context(6), |writer| {
                            writer.write_bytes(b"cluster.local");
                        });
                    });
                });
            });
        });
    });
    let oid = [2, 5, 29, 30];
    params.custom_extensions = vec![CustomExtension::from_oid_content(&oid, constraints)];
}

fn has_uri(params: &mut CertificateParams) {
    params.is_ca = IsCa::ExplicitNoCa;
    let uri = "spiffe://cluster.local/ns/istio-system/sa/istiod";
    let uri = rcgen::SanType::URI(uri.try_into().unwrap());
    params.subject_alt_names.push(uri);
}

fn anchors(roots: &[&Ca]) -> TrustAnchors {
    let pem: String = roots.iter().map(|root| root.pem()).collect();
    trust_anchors::parse(Path::new("roots"), pem.as_bytes(), SystemTime::now()).unwrap()
}

/// A clock that stands still.
#[derive(Debug)]
struct TestTime;

impl TimeProvider for TestTime {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000)))
    }
}

/// Returns the outcome of handshakes with a server that presents `chain` and has `key`. It must be the same
/// with TLS 1.2 and 1.3.
async fn connect(chain: &[&Ca], key: &KeyPair, roots: &[&Ca], name: &str) -> Result<(), String> {
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let chain = chain.iter().map(|ca| ca.der().clone()).collect();
    let pair = CertifiedKey::new(chain, any_supported_type(&key).unwrap());
    let pair = Arc::new(SingleCertAndKey::from(pair));
    let anchors = Arc::new(anchors(roots));
    let mut outcomes = Vec::new();
    for version in [&TLS12, &TLS13] {
        let server = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(pair.clone());
        let mut client = Policy::None
            .builder()
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(anchors.clone())
            .with_no_client_auth();
        // The errors of both versions name the time of the verification.
        client.time_provider = Arc::new(TestTime);
        let (a, b) = tokio::io::duplex(1 << 16);
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let accept = TlsAcceptor::from(Arc::new(server)).accept(a);
        let connect = TlsConnector::from(Arc::new(client)).connect(name, b);
        let (_, connected) = tokio::join!(accept, connect);
        outcomes.push(connected.map(drop).map_err(|error| error.to_string()));
    }
    assert_eq!(outcomes[0], outcomes[1]);
    outcomes.remove(0)
}

async fn handshake(chain: &[&Ca], roots: &[&Ca]) -> Result<(), String> {
    connect(chain, chain[0].key(), roots, NAME).await
}

#[track_caller]
fn assert_refused(outcome: Result<(), String>, why: &str) {
    let text = outcome.expect_err(why);
    assert!(text.contains(why), "{text}, not {why}");
}

#[tokio::test]
async fn a_root_or_root_signed_ca_certificate_is_accepted_as_leaf() {
    let plain = root("root", unchanged);
    let shallow = root("shallow", |root| {
        root.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        root.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    });
    let constrained = root("constrained", permits_dns);
    let usages: [Change; 4] = [
        unchanged,
        |leaf| leaf.extended_key_usages = vec![Purpose::ServerAuth, Purpose::ClientAuth],
        |leaf| leaf.extended_key_usages = vec![Purpose::Any],
        // Go ignores the key usage of a leaf.
        |leaf| leaf.key_usages = vec![KeyUsagePurpose::KeyCertSign],
    ];
    for usage in usages {
        let leaf = issued("leaf", &plain, usage);
        assert_eq!(handshake(&[&leaf], &[&constrained, &plain]).await, Ok(()));
        assert_eq!(handshake(&[&leaf, &plain], &[&plain]).await, Ok(()));
        let own = root("own", usage);
        assert_eq!(handshake(&[&own], &[&own]).await, Ok(()));
    }
    for root in [&shallow, &constrained] {
        assert_eq!(handshake(&[root], &[root]).await, Ok(()));
    }
    let leaf = issued("leaf", &shallow, unchanged);
    assert_eq!(handshake(&[&leaf], &[&shallow]).await, Ok(()));
    // The root file has an earlier certificate with the same name and key.
    let key = KeyPair::from_pem(&plain.key().serialize_pem()).unwrap();
    let renewed = Ca::self_signed(params("root", unchanged), key).unwrap();
    assert_eq!(handshake(&[&renewed], &[&plain]).await, Ok(()));
    // A root that is not self-signed.
    let pinned = issued("pinned", &plain, unchanged);
    assert_eq!(handshake(&[&pinned], &[&pinned]).await, Ok(()));
}

#[tokio::test]
async fn a_leaf_that_is_a_root_is_accepted_whoever_has_signed_it() {
    let (plain, namesake) = (root("root", unchanged), root("root", unchanged));
    let server = |change| issued("leaf", &plain, change);
    let leaf = server(|leaf| leaf.is_ca = IsCa::ExplicitNoCa);
    let key = KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).unwrap();
    let other_key = Ca::self_signed(params("root", unchanged), key).unwrap();
    let expired = issued("root", &namesake, |middle| {
        middle.not_after = date_time_ymd(2001, 1, 1);
    });
    for roots in [vec![&leaf], vec![&namesake, &leaf], vec![&other_key, &leaf]] {
        assert_eq!(handshake(&[&leaf], &roots).await, Ok(()));
        assert_eq!(handshake(&[&leaf, &expired], &roots).await, Ok(()));
    }
    let another = server(|leaf| leaf.is_ca = IsCa::NoCa);
    assert_refused(handshake(&[&leaf], &[&another]).await, "UnknownIssuer");
    let other = connect(&[&leaf], leaf.key(), &[&leaf], "other.test").await;
    assert_refused(other, "not valid for name");
    let early = server(|leaf| {
        leaf.is_ca = IsCa::ExplicitNoCa;
        leaf.not_before = date_time_ymd(2998, 1, 1);
    });
    assert_refused(handshake(&[&early], &[&early]).await, "not valid yet");
    let client = server(|leaf| {
        leaf.is_ca = IsCa::ExplicitNoCa;
        leaf.extended_key_usages = vec![Purpose::ClientAuth];
    });
    assert_refused(handshake(&[&client], &[&client]).await, "does not allow extended key usage");
}

#[tokio::test]
async fn a_ca_certificate_with_a_fault_is_refused_as_a_leaf() {
    let plain = root("root", unchanged);
    let faults: [(Change, &str); 4] = [
        (|leaf| leaf.not_after = date_time_ymd(2001, 1, 1), "certificate expired"),
        (|leaf| leaf.not_before = date_time_ymd(2998, 1, 1), "certificate not valid yet"),
        (|leaf| leaf.extended_key_usages = vec![Purpose::ClientAuth], "InvalidPurpose"),
        (|leaf| leaf.subject_alt_names.clear(), "not valid for name \"istiod.test\""),
    ];
    for (fault, why) in faults {
        let leaf = issued("leaf", &plain, fault);
        assert_refused(handshake(&[&leaf], &[&plain]).await, why);
        let own = root("own", fault);
        if why != "certificate expired" {
            assert_refused(handshake(&[&own], &[&own]).await, why);
        }
        assert_refused(handshake(&[&own], &[&plain]).await, "certificate");
    }
    let leaf = issued("leaf", &plain, unchanged);
    let other = connect(&[&leaf], leaf.key(), &[&plain], "other.test").await;
    assert_refused(other, "not valid for name \"other.test\"");
    let without_key = connect(&[&leaf], &KeyPair::generate().unwrap(), &[&plain], NAME).await;
    assert_refused(without_key, "BadSignature");
}

#[tokio::test]
async fn a_leaf_ca_certificate_without_eligible_root_is_refused_with_remedy() {
    let remedy = "CN=leaf, issued by CN=root, is a CA's (CA:TRUE), and no root has signed it \
                directly: issue it with -addext basicConstraints=CA:FALSE (openssl) or isCA: false";
    let plain = root("root", unchanged);
    let leaf = issued("leaf", &plain, unchanged);
    let (namesake, stranger) = (root("root", unchanged), root("stranger", unchanged));
    assert_refused(handshake(&[&leaf], &[&namesake, &stranger]).await, remedy);
    assert_refused(handshake(&[&leaf, &plain], &[&namesake]).await, remedy);
    let constraints: [Change; 4] = [
        permits_dns,
        permits_uris,
        |root| root.key_usages = vec![KeyUsagePurpose::CrlSign],
        |root| root.is_ca = IsCa::ExplicitNoCa,
    ];
    for constraint in constraints {
        let root = root("root", constraint);
        let leaf = issued("leaf", &root, unchanged);
        assert_refused(handshake(&[&leaf], &[&root]).await, remedy);
    }
    let middle = issued("middle", &plain, unchanged);
    let leaf = issued("leaf", &middle, unchanged);
    let remedy = remedy.replace("CN=root", "CN=middle");
    assert_refused(handshake(&[&leaf, &middle], &[&plain]).await, &remedy);
    assert_refused(handshake(&[&leaf, &middle, &plain], &[&plain]).await, &remedy);
    // The key of the root signed this leaf, but the leaf names another issuer.
    let key = KeyPair::from_pem(&plain.key().serialize_pem()).unwrap();
    let alias = Ca::self_signed(params("middle", unchanged), key).unwrap();
    let leaf = issued("leaf", &alias, unchanged);
    assert_refused(handshake(&[&leaf], &[&plain]).await, &remedy);
}

#[tokio::test]
async fn signatures_of_each_algorithm_are_verified_and_an_altered_leaf_is_refused() {
    let algorithms: [&SignatureAlgorithm; 5] = [
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_RSA_SHA256,
        &rcgen::PKCS_RSA_SHA512,
    ];
    for algorithm in algorithms {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let root = Ca::self_signed(params("root", unchanged), key).unwrap();
        let leaf = issued("leaf", &root, unchanged);
        assert_eq!(handshake(&[&leaf], &[&root]).await, Ok(()), "{algorithm:?}");
        let mut der = leaf.der().to_vec();
        *der.last_mut().unwrap() ^= 1;
        assert_eq!(verify_leaf(&der, &anchors(&[&root])), Err(true));
    }
}

/// Verifies a leaf without intermediates. If the leaf is refused, returns true if the error names the remedy.
fn verify_leaf(leaf: &[u8], anchors: &TrustAnchors) -> Result<(), bool> {
    let name = ServerName::try_from(NAME).unwrap();
    let verdict = anchors.verify_server_cert(&leaf.into(), &[], &name, &[], UnixTime::now());
    let names_remedy = |error: Error| error.to_string().contains("CA:FALSE");
    verdict.map(drop).map_err(names_remedy)
}

#[test]
fn a_sha1_signature_is_refused_and_a_version_1_root_may_sign() {
    for (pem, expected) in [
        (&include_bytes!("recorded/sha1.pem")[..], Err(true)),
        (include_bytes!("recorded/version1.pem"), Ok(())),
    ] {
        let recorded = CertificateDer::pem_slice_iter(pem).flatten();
        let leaf = recorded.last().unwrap();
        let anchors = trust_anchors::parse(Path::new("recorded"), pem, SystemTime::now()).unwrap();
        assert_eq!(anchors.certificates.len(), 2);
        let only_root = TrustAnchors {
            store: anchors.store.clone(),
            certificates: anchors.certificates.iter().filter(|it| **it != leaf).cloned().collect(),
        };
        assert_eq!(verify_leaf(&leaf, &only_root), expected);
        assert_eq!(verify_leaf(&leaf, &anchors), Ok(()));
    }
}

#[tokio::test]
async fn errors_for_constraints_that_webpki_cannot_verify_name_the_certificate() {
    let plain = root("root", unchanged);
    let constrained = issued("constrained", &plain, permits_uris);
    let leaf = issued("leaf", &constrained, has_uri);
    let why = "CN=leaf, issued by CN=constrained, is below CN=constrained, whose name \
               constraints for URIs cannot be verified";
    assert_refused(handshake(&[&leaf, &constrained], &[&plain]).await, why);
    let excluding = issued("excluding", &plain, |ca| {
        ca.name_constraints = Some(NameConstraints {
            permitted_subtrees: Vec::new(),
            excluded_subtrees: vec![GeneralSubtree::DnsName(NAME.to_owned())],
        });
    });
    let leaf = issued("leaf", &excluding, has_uri);
    let violates = handshake(&[&leaf, &excluding], &[&plain]).await;
    assert_refused(violates, "invalid peer certificate");
    let mut chain = vec![issued("1", &plain, unchanged)];
    for depth in 2..=7 {
        chain.push(issued(&depth.to_string(), chain.last().unwrap(), unchanged));
    }
    for (depth, outcome) in [(6, Ok(())), (7, Err("CN=leaf, issued by CN=7, has more than 6"))] {
        let leaf = issued("leaf", &chain[depth - 1], |leaf| leaf.is_ca = IsCa::ExplicitNoCa);
        let shown = std::iter::once(&leaf).chain(chain[..depth].iter().rev());
        let found = handshake(&Vec::from_iter(shown), &[&plain]).await;
        match outcome {
            Ok(()) => assert_eq!(found, Ok(())),
            Err(why) => assert_refused(found, why),
        }
    }
}

#[test]
fn a_certificate_with_one_of_the_names_is_accepted() {
    let key = KeyPair::generate().unwrap();
    for (wanted, name, expected) in [
        (&[][..], "b.test", true),
        (&["a.test", "b.test"], "b.test", true),
        (&["a.test"], "b.test", false),
        (&["a.b.test"], "*.b.test", true),
        (&["c.a.b.test", "b.test"], "*.b.test", false),
    ] {
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let now = SystemTime::now();
        let roots = trust_anchors::parse(Path::new("root"), certificate.pem().as_bytes(), now);
        let names = wanted.iter().map(|name| (*name).to_owned()).collect();
        let verifier = OneOf { roots: roots.unwrap(), names };
        let server = ServerName::try_from("other.test").unwrap();
        let leaf = certificate.der();
        let verified = verifier.verify_server_cert(leaf, &[], &server, &[], UnixTime::now());
        assert_eq!(verified.is_ok(), expected, "{wanted:?} {name}: {verified:?}");
    }
}
