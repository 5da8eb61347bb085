use tonic::Code;

use super::assert_dial_fails;
use crate::istiod::fake::{self, Authority, Clients, Fake, Files, NAME, encrypted, run};
use crate::istiod::{Config, Security, open_probe, tls};
use crate::problem;
use crate::trust::compliance::Policy;

fn client(config: &mut Config) -> &mut Option<tls::ClientCertificate> {
    match &mut config.security {
        Security::Tls(tls) => &mut tls.client,
        Security::Plaintext => panic!("no TLS"),
    }
}

#[tokio::test]
async fn refuses_a_certificate_for_another_name_or_of_another_root() {
    let authority = Authority::new("root");
    let tls = fake::server_tls(&authority, "other.example", Clients::Optional);
    let fake = Fake::start(Some(tls)).await;
    let files = Files::new();
    let roots = files.write("root.pem", &authority.pem());
    let names = format!("its certificate is not for {NAME:?}, but for other.example");
    let config = encrypted(fake.address, &roots);
    assert_dial_fails(config, problem::Code::IstiodCertificateName, &names).await;
    let roots = files.write("root.pem", &Authority::new("another").pem());
    let signed = format!("its certificate is not signed by a root of {}", roots.display());
    let config = encrypted(fake.address, &roots);
    assert_dial_fails(config, problem::Code::IstiodCertificateUntrusted, &signed).await;
    // The roots of two meshes may have the same name.
    let roots = files.write("root.pem", &Authority::new("root").pem());
    let config = encrypted(fake.address, &roots);
    assert_dial_fails(config, problem::Code::IstiodCertificateUntrusted, &signed).await;
    let mut config = encrypted(fake.address, &roots);
    if let Security::Tls(tls) = &mut config.security {
        tls.server_name = "not a name".to_owned();
    }
    assert_dial_fails(config, problem::Code::IstiodSanInvalid, "\"not a name\"").await;
}

#[tokio::test]
async fn an_expired_or_future_istiod_certificate_is_reported_with_both_dates() {
    let authority = Authority::new("root");
    let files = Files::new();
    let roots = files.write("root.pem", &authority.pem());
    for (years, code, expected) in [
        (
            [2000, 2020],
            problem::Code::IstiodCertificateExpired,
            "its certificate expired 2020-01-01T00:00:00Z, ",
        ),
        (
            [2190, 2999],
            problem::Code::IstiodCertificateNotYetValid,
            "its certificate is not valid before 2190-01-01T00:00:00Z, ",
        ),
    ] {
        let tls = fake::server_tls_for(&authority, NAME, Clients::Optional, years);
        let fake = Fake::start(Some(tls)).await;
        assert_dial_fails(encrypted(fake.address, &roots), code, expected).await;
        assert_dial_fails(encrypted(fake.address, &roots), code, "`date -u`").await;
    }
}

#[tokio::test]
async fn istiods_ca_certificate_is_accepted_if_a_root_has_signed_it() {
    let root = Authority::new("root");
    let (own, middle) = (root.below("istiod"), root.below("middle"));
    let below = middle.below("istiod");
    let files = Files::new();
    let roots = files.write("root.pem", &root.pem());
    for (chain, is_accepted) in
        [(&[&root][..], true), (&[&own], true), (&[&own, &root], true), (&[&below, &middle], false)]
    {
        let mut tls = fake::server_tls(&root, NAME, Clients::Optional);
        tls.cert_resolver = Authority::shown(chain);
        let fake = Fake::start(Some(tls)).await;
        let config = encrypted(fake.address, &roots);
        if is_accepted {
            let (istiod, _tasks) = run(config);
            istiod.try_connection().await.unwrap();
            continue;
        }
        let cause = open_probe(&config, config.limits.total).await.unwrap_err();
        assert_eq!(cause.code, problem::Code::IstiodCertificateUnusable);
        let text = cause.to_string();
        let certificate = "the certificate CN=istiod, issued by CN=middle, is a CA's (CA:TRUE)";
        assert!(text.contains(certificate), "{text}");
        assert!(text.contains("isCA: false") && !text.contains("OtherError"), "{text}");
    }
}

#[tokio::test]
async fn a_server_without_http2_in_alpn_is_refused() {
    let authority = Authority::new("root");
    let mut tls = fake::server_tls(&authority, NAME, Clients::Optional);
    tls.alpn_protocols.clear();
    let fake = Fake::start(Some(tls)).await;
    let roots = Files::new();
    let roots_path = roots.write("root.pem", &authority.pem());
    let (config, code) = (encrypted(fake.address, &roots_path), problem::Code::IstiodNotGrpc);
    assert_dial_fails(config, code, "does not offer HTTP/2 over TLS (ALPN)").await;
}

#[tokio::test]
async fn the_client_certificate_is_sent_while_it_is_valid() {
    let authority = Authority::new("root");
    let files = Files::new();
    let roots = files.write("root.pem", &authority.pem());
    let fake = Fake::start(Some(fake::server_tls(&authority, NAME, Clients::Optional))).await;
    let strict = Fake::start(Some(fake::server_tls(&authority, NAME, Clients::Required))).await;
    let valid = authority.issue("workload");
    let expired = authority.issue_until("workload", 2001);
    for (chain, key, sent) in [
        (valid.chain.as_str(), valid.key.as_str(), true),
        (&expired.chain, &expired.key, false),
        ("garbage", &valid.key, false),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &valid.key, false),
    ] {
        let pair = tls::ClientCertificate {
            chain: files.write("cert-chain.pem", chain),
            key: files.write("key.pem", key),
        };
        let mut config = encrypted(fake.address, &roots);
        *client(&mut config) = Some(pair.clone());
        let (istiod, _tasks) = run(config);
        istiod.try_connection().await.unwrap();
        assert_eq!(fake.seen().connections.last(), Some(&sent), "{chain}");
        let mut config = encrypted(strict.address, &roots);
        *client(&mut config) = Some(pair);
        let (istiod, _tasks) = run(config);
        match istiod.try_connection().await {
            Ok(_) => assert!(sent),
            Err(error) => {
                let text = error.to_string();
                assert!(!sent && text.contains("CertificateRequired"), "{text}");
            }
        }
    }
}

#[tokio::test]
async fn a_client_key_that_cannot_be_used_is_an_error() {
    let authority = Authority::new("root");
    let files = Files::new();
    let roots = files.write("root.pem", &authority.pem());
    let pair = authority.issue("workload");
    for (key, expected) in [("", "no PEM private key"), (&fake::key_pem(), "cannot be used with ")]
    {
        let mut config = encrypted("127.0.0.1:1", &roots);
        *client(&mut config) = Some(tls::ClientCertificate {
            chain: files.write("cert-chain.pem", &pair.chain),
            key: files.write("key.pem", key),
        });
        assert_dial_fails(config, problem::Code::ClientCertificateUnusable, expected).await;
    }
}

#[tokio::test]
async fn a_client_certificate_that_istiod_refuses_is_left_out() {
    let (authority, retired) = (Authority::new("root"), Authority::new("retired"));
    let fake = Fake::start(Some(fake::server_tls(&authority, NAME, Clients::Optional))).await;
    let files = Files::new();
    let roots = files.write("root.pem", &authority.pem());
    let pair = retired.issue("workload");
    for policy in [Policy::None, Policy::Fips140_2] {
        let mut config = encrypted(fake.address, &roots);
        if let Security::Tls(tls) = &mut config.security {
            tls.policy = policy;
        }
        *client(&mut config) = Some(tls::ClientCertificate {
            chain: files.write("cert-chain.pem", &pair.chain),
            key: files.write("key.pem", &pair.key),
        });
        let (istiod, _tasks) = run(config);
        let connection = istiod.try_connection().await.unwrap();
        assert_eq!(fake.seen().connections.last(), Some(&false), "{policy:?}");
        for (code, leaves) in [
            (None, false),
            (Some(Code::PermissionDenied), false),
            (Some(Code::Unauthenticated), true),
        ] {
            assert_eq!(istiod.leave_if_unauthenticated(&connection, code), leaves);
            assert_eq!(istiod.status().connected.is_none(), leaves, "{code:?}");
        }
    }
}

#[tokio::test]
async fn a_fips_policy_refuses_every_handshake_that_is_not_approved() {
    use rustls::SupportedCipherSuite;
    use rustls::crypto::SupportedKxGroup;
    use rustls::crypto::aws_lc_rs::cipher_suite::{
        TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256 as AES_OF_TLS12,
        TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256 as CHACHA_OF_TLS12,
        TLS13_AES_256_GCM_SHA384 as AES, TLS13_CHACHA20_POLY1305_SHA256 as CHACHA,
    };
    use rustls::crypto::aws_lc_rs::kx_group::{SECP256R1, SECP384R1, X25519};
    const OLD: Policy = Policy::Fips140_2;
    const NEW: Policy = Policy::Fips140_3;
    let authority = Authority::new("root");
    let files = Files::new();
    let roots = files.write("root.pem", &authority.pem());
    let rows: [(SupportedCipherSuite, &'static dyn SupportedKxGroup, &[Policy]); 8] = [
        (AES_OF_TLS12, SECP256R1, &[OLD, NEW]),
        (AES_OF_TLS12, SECP384R1, &[NEW]),
        (AES_OF_TLS12, X25519, &[]),
        (CHACHA_OF_TLS12, SECP256R1, &[]),
        (AES, SECP256R1, &[NEW]),
        (AES, SECP384R1, &[NEW]),
        (AES, X25519, &[]),
        (CHACHA, SECP256R1, &[]),
    ];
    for (suite, group, approved) in rows {
        let mut server = fake::server_tls(&authority, NAME, Clients::Optional);
        fake::offer(&mut server, suite, group);
        let fake = Fake::start(Some(server)).await;
        // Without a policy, the cryptographic module of a FIPS build refuses what the policy for FIPS
        // 140-3 refuses.
        let usual = if cfg!(feature = "fips") { approved.contains(&NEW) } else { true };
        for (policy, connects) in
            [(OLD, approved.contains(&OLD)), (NEW, approved.contains(&NEW)), (Policy::None, usual)]
        {
            let mut config = encrypted(fake.address, &roots);
            if let Security::Tls(tls) = &mut config.security {
                tls.policy = policy;
            }
            let (istiod, _tasks) = run(config);
            let tried = istiod.try_connection().await;
            assert_eq!(tried.is_ok(), connects, "{policy:?} {suite:?} {group:?}");
        }
    }
}

#[tokio::test]
async fn a_compliance_policy_decides_version_and_key_exchange() {
    use rustls::NamedGroup::{X25519MLKEM768, secp256r1};
    use rustls::ProtocolVersion::{TLSv1_2, TLSv1_3};
    let authority = Authority::new("root");
    let fake = Fake::start(Some(fake::server_tls(&authority, NAME, Clients::Optional))).await;
    let files = Files::new();
    let roots = files.write("root.pem", &authority.pem());
    for (policy, version, group) in [
        (Policy::None, TLSv1_3, X25519MLKEM768),
        (Policy::Fips140_2, TLSv1_2, secp256r1),
        (Policy::Fips140_3, TLSv1_3, secp256r1),
        (Policy::Pqc, TLSv1_3, X25519MLKEM768),
    ] {
        let mut config = encrypted(fake.address, &roots);
        if let Security::Tls(tls) = &mut config.security {
            tls.policy = policy;
        }
        let (istiod, _tasks) = run(config);
        let connection = istiod.try_connection().await.unwrap();
        let tls = connection.about().tls.clone().unwrap();
        let expected = [format!("{version:?}"), format!("{group:?}")];
        assert_eq!([tls.version.unwrap(), tls.key_exchange.unwrap()], expected);
        assert!(format!("{:?}", tls.cipher).contains("AES"), "{policy:?}");
    }
}
