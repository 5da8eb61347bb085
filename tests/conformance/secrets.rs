//! The secret socket: odd requests, and the order of answers.

use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::Secret;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::google::rpc;
use istio_agent::local_istiod::LocalIstiod;
use prost::Message;
use tonic::Code;

use crate::support::child::Child;
use crate::support::envoy::Envoy;
use crate::support::place::Place;
use crate::support::{
    SECRET, STREAM_SECRETS, ask_for_secrets, local_istiod, next_response, request,
};

async fn start() -> (LocalIstiod, Place, Child) {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let agent = place.start().await;
    (istiod, place, agent)
}

fn answer(names: &[&str], nonce: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        response_nonce: nonce.into(),
        ..request(SECRET, names)
    }
}

/// The names and the nonce of the next response.
async fn next_names(envoy: &mut Envoy) -> (Vec<String>, String) {
    let response = next_response(envoy).await;
    assert_eq!(response.type_url, SECRET);
    let secrets = response.resources.iter();
    let names = secrets.map(|any| Secret::decode(&*any.value).unwrap().name);
    (names.collect(), response.nonce)
}

#[tokio::test]
async fn only_what_is_new_is_answered() {
    let (_istiod, place, agent) = start().await;
    let mut envoy = ask_for_secrets(&place, &["default"]).await;
    let (names, first) = next_names(&mut envoy).await;
    assert_eq!(names, ["default"]);
    envoy.send(&answer(&["default"], &first));
    envoy.send(&answer(&["default", "ROOTCA"], &first));
    let (names, second) = next_names(&mut envoy).await;
    assert_eq!(names, ["ROOTCA"], "an acknowledgement was answered");
    envoy.send(&answer(&["default", "ROOTCA"], &first)); // Stale.
    envoy.send(&answer(&["default"], &second)); // Less.
    envoy.send(&answer(&[], &second)); // Nothing.
    let refusal = DiscoveryRequest {
        error_detail: Some(rpc::Status {
            code: 13,
            message: "bad secret".into(),
            ..Default::default()
        }),
        ..answer(&["default"], &second)
    };
    envoy.send(&refusal);
    envoy.send(&answer(&["ROOTCA", "default"], ""));
    let (mut names, third) = next_names(&mut envoy).await;
    names.sort();
    assert_eq!(names, ["ROOTCA", "default"]);
    agent.logs("bad secret").await;
    // A new stream may name the nonce of an old one, while that is still open.
    let mut another = Envoy::open_path(&place.sds_socket(), STREAM_SECRETS).await;
    another.send(&answer(&["default"], &third));
    assert_eq!(next_names(&mut another).await.0, ["default"]);
}

#[tokio::test]
async fn odd_first_requests_end_their_stream_with_a_reason_or_wait() {
    let (_istiod, place, _agent) = start().await;
    let long = "x".repeat(1 << 20);
    for name in ["", "default ", "file-cert:/etc/passwd", &long] {
        let status = ask_for_secrets(&place, &[name]).await.end().await;
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().starts_with("unknown secret name"));
        assert!(status.message().len() < 1000);
    }
    let nobody = DiscoveryRequest {
        node: None,
        ..request(SECRET, &["default"])
    };
    let envoy = Envoy::open_path(&place.sds_socket(), STREAM_SECRETS).await;
    envoy.send(&nobody);
    let status = envoy.end().await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "missing node information");

    let refusal = DiscoveryRequest {
        error_detail: Some(rpc::Status::default()),
        ..answer(&["default"], "never sent")
    };
    for first in [refusal, request(SECRET, &[])] {
        let mut envoy = Envoy::open_path(&place.sds_socket(), STREAM_SECRETS).await;
        envoy.send(&first);
        envoy.send(&request(SECRET, &["ROOTCA"]));
        assert_eq!(next_names(&mut envoy).await.0, ["ROOTCA"]);
    }
}

#[tokio::test]
async fn the_workloads_key_goes_under_no_other_name() {
    let (_istiod, place, _agent) = start().await;
    let odd = [
        "Default",
        "DEFAULT",
        "default ",
        " default",
        "default\0",
        "./default",
        "default/",
        "rootca",
        "ROOTCA,default",
        "default,ROOTCA",
        "file-root:",
        "file-cert:default",
        "kubernetes://default",
        "invalid://",
        "istio://default",
        "spiffe://cluster.local/ns/default/sa/bench",
        "*",
    ];
    for name in odd {
        let status = ask_for_secrets(&place, &[name]).await.end().await;
        assert_eq!(status.code(), Code::InvalidArgument, "{name:?}");
    }
    let mut many: Vec<&str> = odd.to_vec();
    many.push("ROOTCA");
    let mut envoy = ask_for_secrets(&place, &many).await;
    let response = next_response(&mut envoy).await;
    assert_eq!(response.resources.len(), 1);
    let text = String::from_utf8_lossy(&response.resources[0].value);
    assert!(!text.contains("PRIVATE KEY"), "ROOTCA came with a key");
}

#[tokio::test]
async fn too_many_names_and_too_large_requests_end_their_stream() {
    let (_istiod, place, _agent) = start().await;
    let names: Vec<String> = (0..10_001).map(|i| format!("name {i}")).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    let status = ask_for_secrets(&place, &names).await.end().await;
    assert_eq!(status.code(), Code::ResourceExhausted);
    names.truncate(9_999);
    names.push("default");
    let mut envoy = ask_for_secrets(&place, &names).await;
    assert_eq!(next_names(&mut envoy).await.0, ["default"]);
    let large = "x".repeat(5 << 20);
    let status = ask_for_secrets(&place, &[&large]).await.end().await;
    assert_eq!(status.code(), Code::OutOfRange, "{}", status.message());
}

#[tokio::test]
async fn other_methods_are_not_implemented() {
    let (_istiod, place, _agent) = start().await;
    let service = "/envoy.service.secret.v3.SecretDiscoveryService";
    let envoy = Envoy::open_path(&place.sds_socket(), &format!("{service}/Other")).await;
    assert_eq!(envoy.end().await.code(), Code::Unimplemented);
}

#[tokio::test]
async fn what_envoy_says_cannot_forge_a_line_of_the_log() {
    let (_istiod, place, agent) = start().await;
    let forged = "x\nforged\r\x1b[2Jforged\u{2028}forged";
    let mut envoy = ask_for_secrets(&place, &["default", forged]).await;
    let (_, nonce) = next_names(&mut envoy).await;
    envoy.send(&DiscoveryRequest {
        error_detail: Some(rpc::Status {
            message: forged.into(),
            ..Default::default()
        }),
        ..answer(&["default"], &nonce)
    });
    agent.logs("ACK ERROR").await;
    let log = agent.log();
    let whole = log.lines().filter(|line| line.contains("forged"));
    assert_eq!(whole.clone().count(), 2, "each is told once, on one line");
    for line in whole {
        assert!(line.starts_with("20") && !line.contains(['\r', '\x1b', '\u{2028}']));
    }
}
