//! Tests responses of the certificate authority. Those that must not be served are logged, and Envoy waits until a
//! good one arrives.

use std::time::Duration;

use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{Secret, secret};
use prost::Message;
use rcgen::{CertificateParams, KeyPair};
use tonic::Status;

use crate::support::envoy::Envoy;
use crate::support::place::Place;
use crate::support::{ask_for_secrets, local_istiod, next_response, restarted};

/// Returns the one secret of the next response.
async fn only_secret(envoy: &mut Envoy) -> Secret {
    let response = next_response(envoy).await;
    assert_eq!(response.resources.len(), 1);
    Secret::decode(&*response.resources[0].value).unwrap()
}

fn foreign_leaf() -> String {
    let key = KeyPair::generate().unwrap();
    CertificateParams::default().self_signed(&key).unwrap().pem()
}

#[tokio::test]
async fn unusable_answers_are_logged_and_never_served() {
    let istiod = local_istiod().await;
    let root = istiod.root_pem();
    let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let cases = [
        (vec![foreign_leaf(), root.clone()], "the private key does not belong to the certificate"),
        (vec![], "invalid empty CertChain"),
        (vec![foreign_leaf()], "invalid empty CertChain"),
        (
            vec!["no PEM".to_owned(), root.clone()],
            "element 0 of the chain: no certificate in 6 bytes, expected PEM",
        ),
        (
            vec![garbage.to_owned(), root],
            "element 0 of the chain: certificate 1 is broken: not an X.509 certificate",
        ),
        (
            vec![foreign_leaf(), "no root".to_owned()],
            "element 1 of the chain: no certificate in 7 bytes, expected PEM",
        ),
    ];
    istiod.answer_certificates_with(Some(cases[0].0.clone()));
    let place = Place::with_envoy(&istiod);
    let agent = place.start().await;
    let mut leaf = ask_for_secrets(&place, &["default"]).await;
    let mut roots = ask_for_secrets(&place, &["ROOTCA"]).await;
    for (chain, sentence) in cases {
        istiod.answer_certificates_with(Some(chain));
        agent.logs(sentence).await;
    }
    istiod.answer_certificates_with(None);
    // These are the first secrets of the streams, because no unusable response has been served.
    let served = only_secret(&mut leaf).await;
    assert_eq!(served.name, "default");
    assert!(matches!(served.r#type, Some(secret::Type::TlsCertificate(_))));
    assert_eq!(only_secret(&mut roots).await.name, "ROOTCA");
    assert_eq!(istiod.certificates_signed(), 1);
}

#[tokio::test]
async fn an_expired_leaf_is_served_with_a_warning_without_another() {
    let istiod = restarted(local_istiod().await, |options| {
        options.max_cert_ttl = Duration::ZERO;
    })
    .await;
    let place = Place::with_envoy(&istiod);
    let agent = place.start().await;
    let mut leaf = ask_for_secrets(&place, &["default"]).await;
    assert_eq!(only_secret(&mut leaf).await.name, "default");
    agent.logs("new certificate: already expired (valid until 20").await;
}

#[tokio::test]
async fn a_certificate_is_renewed_pushed_and_kept_while_the_authority_is_down() {
    let istiod = restarted(local_istiod().await, |options| {
        options.max_cert_ttl = Duration::from_secs(6);
    })
    .await;
    let place = Place::with_envoy(&istiod);
    let agent = place.start().await;
    let mut leaf = ask_for_secrets(&place, &["default"]).await;
    let first = only_secret(&mut leaf).await;
    let second = only_secret(&mut leaf).await;
    assert!(first != second, "the same secret was pushed twice");
    istiod.refuse_certificates(Some(Status::unavailable("maintenance")));
    agent.logs("maintenance").await;
    let mut another = ask_for_secrets(&place, &["default"]).await;
    assert!(second == only_secret(&mut another).await, "not the last good one");
    istiod.refuse_certificates(None);
    assert!(second != only_secret(&mut another).await);
    assert!(!agent.log().contains("PRIVATE KEY"));
}

#[tokio::test]
async fn roots_are_pushed_when_they_change_and_only_then() {
    let istiod = restarted(local_istiod().await, |options| {
        options.max_cert_ttl = Duration::from_secs(6);
    })
    .await;
    let place = Place::with_envoy(&istiod);
    let _agent = place.start().await;
    let mut leaf = ask_for_secrets(&place, &["default"]).await;
    let mut roots = ask_for_secrets(&place, &["ROOTCA"]).await;
    let first = only_secret(&mut roots).await;
    for _ in 0..2 {
        only_secret(&mut leaf).await;
    }
    istiod.rotate_root().unwrap();
    let second = only_secret(&mut roots).await;
    assert!(first != second, "the renewal of the certificate pushed the same roots");
    let anchors = |secret: Secret| {
        let text = String::from_utf8_lossy(&secret.encode_to_vec()).into_owned();
        text.matches("BEGIN CERTIFICATE").count()
    };
    assert_eq!((anchors(first), anchors(second)), (1, 2));
}
