//! Tests that broken root certificates and tokens are logged, and that repaired ones are used without a restart.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

use crate::support::place::{Place, ROOT, TOKEN, token};
use crate::support::{
    answered, ask_for_clusters, ask_for_secrets, local_istiod, next_response, relays, restarted,
    until,
};

/// The beginning of the log message about a stream that istiod does not authenticate.
const REFUSED: &str = "upstream terminated with unexpected error istiod at ";

fn expired_root() -> String {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_before = rcgen::date_time_ymd(2001, 1, 1);
    params.not_after = rcgen::date_time_ymd(2002, 1, 1);
    params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
}

#[tokio::test]
async fn broken_roots_are_logged_and_repaired_ones_used_without_a_restart() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    let expired = expired_root();
    let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let cases = [
        (Some(""), "root-cert.pem: the file is empty"),
        (None, "root-cert.pem: No such file"),
        (Some("no roots"), "no PEM certificate in 8 bytes"),
        (Some(garbage), "no usable certificate (1 broken, 0 expired)"),
        (Some(&*expired), "no usable certificate (0 broken, 1 expired)"),
    ];
    place.write(ROOT, "");
    let agent = place.start().await;
    for (content, sentence) in cases {
        let mut envoy = ask_for_clusters(&place).await;
        agent.logs(sentence).await;
        assert!(agent.log().contains(ROOT));
        place.write(ROOT, istiod.root_pem());
        answered(&mut envoy, &mut istiod).await;
        match cases.iter().skip_while(|case| case.0 != content).nth(1) {
            Some((Some(next), _)) => place.write(ROOT, next),
            Some((None, _)) => std::fs::remove_file(place.path(ROOT)).unwrap(),
            None => {}
        }
        istiod = restarted(istiod, |_| {}).await;
    }
}

#[tokio::test]
async fn ssl_cert_file_and_ssl_cert_dir_name_the_systems_roots() {
    for (file, directory) in [("own.pem", "none"), ("none", "none:own")] {
        let mut istiod = local_istiod().await;
        let place = Place::of(&istiod)
            .set("XDS_ROOT_CA", "SYSTEM")
            .set("CA_ROOT_CA", "SYSTEM")
            .set("SSL_CERT_FILE", file)
            .set("SSL_CERT_DIR", directory);
        let agent = place.start().await;
        let unanswered = ask_for_clusters(&place).await;
        agent.logs("no root certificates found").await;
        drop(unanswered);
        place.write("own.pem", istiod.root_pem());
        place.write("own/root.pem", istiod.root_pem());
        relays(&place, &mut istiod).await;
    }
}

#[tokio::test]
async fn a_missing_root_at_the_start_is_an_error_with_its_file() {
    let place = Place::of(&local_istiod().await);
    std::fs::remove_file(place.path(ROOT)).unwrap();
    let (code, log) = place.ends().await;
    assert_eq!(code, 255);
    assert!(log.contains("root file for istiod (ConfigMap istio-ca-root-cert)"), "{log}");
    assert!(log.contains(ROOT), "{log}");
}

#[tokio::test]
async fn another_meshs_root_is_refused_and_the_right_one_used_later() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    place.write(ROOT, local_istiod().await.root_pem());
    let agent = place.start().await;
    agent.logs("[ISTIOD_CERTIFICATE_UNTRUSTED]").await;
    place.write(ROOT, istiod.root_pem());
    relays(&place, &mut istiod).await;
}

#[tokio::test]
async fn a_refused_token_holds_envoys_stream_until_a_valid_one_exists() {
    let mut istiod = local_istiod().await;
    let expired = istiod.mint_token("default", "bench", Duration::ZERO).unwrap();
    let foreign = token(&local_istiod().await);
    let (huge, large) = ("x".repeat(100_000), "y".repeat(60_000));
    let cases = [
        (
            "",
            "failed to fetch token from file: token ./var/run/secrets/tokens/istio-token: the file is empty",
        ),
        (&*expired, "request authenticate failure"),
        (&foreign, "request authenticate failure"),
        (&huge, "istio-token: more than 65536 bytes"),
        ("two words", "byte 0x20 at position 3 is not allowed in a header"),
        (&large, ""),
    ];
    for (spoilt, sentence) in cases {
        let place = Place::with_envoy(&istiod);
        place.write(TOKEN, spoilt);
        let agent = place.start().await;
        let mut envoy = ask_for_clusters(&place).await;
        if spoilt != large {
            agent.logs(REFUSED).await;
        }
        agent.logs("Envoy's stream is held").await;
        agent.logs(sentence).await;
        agent.logs("resource:default failed to sign").await;
        let mut secrets = ask_for_secrets(&place, &["default"]).await;
        let good = token(&istiod);
        place.write(TOKEN, &good);
        assert_eq!(next_response(&mut secrets).await.resources.len(), 1);
        answered(&mut envoy, &mut istiod).await;
        for token in [spoilt, &good].map(|token| &token[..token.len().min(40)]) {
            let told = !token.is_empty() && agent.log().contains(token);
            assert!(!told, "the token is in the log");
        }
    }
}

#[tokio::test]
async fn a_missing_token_is_logged_and_used_once_it_is_there() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod);
    std::fs::remove_file(place.path(TOKEN)).unwrap();
    let agent = place.start().await;
    agent
        .logs("failed to fetch token from file: token ./var/run/secrets/tokens/istio-token: No such file")
        .await;
    let mut envoy = ask_for_clusters(&place).await;
    agent.logs(REFUSED).await;
    place.write(TOKEN, token(&istiod));
    answered(&mut envoy, &mut istiod).await;
}

#[tokio::test]
async fn a_broken_client_certificate_is_logged_and_the_token_used_instead() {
    let mut istiod = local_istiod().await;
    let place = Place::of(&istiod).set("PROV_CERT", "./certs");
    place.write("certs/root-cert.pem", istiod.root_pem());
    place.write("certs/cert-chain.pem", "no certificate");
    let agent = place.start().await;
    relays(&place, &mut istiod).await;
    let sentence = "cannot parse the cert chain, using token instead: ./certs/cert-chain.pem";
    agent.logs(sentence).await;
}

#[tokio::test]
async fn a_late_client_certificate_is_sent_even_without_an_authority() {
    let mut istiod = local_istiod().await;
    let issued = Place::of(&istiod).set("OUTPUT_CERTS", "./certs");
    std::fs::create_dir(issued.path("certs")).unwrap();
    let _issuing = issued.start_only();
    let files = ["key.pem", "cert-chain.pem"];
    let with_root = ["key.pem", "cert-chain.pem", "root-cert.pem"];
    until("a certificate", || {
        with_root.iter().all(|file| issued.path("certs").join(file).exists())
    })
    .await;

    let place = Place::of(&istiod).set("PROV_CERT", "./certs");
    let copy = |name: &str, to: &str| {
        let content = std::fs::read(issued.path("certs").join(name)).unwrap();
        place.write(&format!("{to}/{name}"), content);
    };
    // The workload's secrets are files, so the agent sends no CSR that istiod would refuse.
    for name in with_root {
        copy(name, "var/run/secrets/workload-spiffe-credentials");
    }
    place.write("certs/root-cert.pem", istiod.root_pem());
    std::fs::remove_file(place.path(TOKEN)).unwrap();
    let agent = place.start().await;
    let mut envoy = ask_for_clusters(&place).await;
    agent.logs(REFUSED).await;
    agent.logs("using token instead").await;
    for name in files {
        copy(name, "certs");
    }
    answered(&mut envoy, &mut istiod).await;
}
