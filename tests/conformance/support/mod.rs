//! A directory for an agent to run in, the running agent, and what tests ask it as Envoy.

pub mod child;
#[path = "../../agent/support/envoy.rs"]
pub mod envoy;
pub mod http;
pub mod place;
pub mod python;
pub mod scraped;

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use local_istiod::{LocalIstiod, Options, Stream};
use prost::Message;

use envoy::Envoy;
use place::Place;

pub const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
pub const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";
pub const STREAM_SECRETS: &str = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets";

/// How long anything may take that should happen soon on a busy machine, retries included.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// A control plane that expects streams to be scripted.
pub async fn local_istiod() -> LocalIstiod {
    LocalIstiod::start(options()).await.unwrap()
}

/// Each control plane has its own address, so that no other process takes its port while it is away.
pub fn options() -> Options {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let address = Ipv4Addr::new(127, 1, high, low);
    Options {
        listen: (address, 0).into(),
        extra_names: vec![address.to_string()],
        ..Options::default()
    }
}

/// Kills a control plane and starts the same again, changed by `change`.
pub async fn restarted(istiod: LocalIstiod, change: impl FnOnce(&mut Options)) -> LocalIstiod {
    let mut options = istiod.kill().await;
    change(&mut options);
    LocalIstiod::start(options).await.unwrap()
}

pub fn node() -> Option<Node> {
    Some(Node {
        id: "sidecar~127.0.0.1~bench.default~default.svc.cluster.local".into(),
        ..Default::default()
    })
}

/// A first request for a type.
pub fn request(type_url: &str, names: &[&str]) -> DiscoveryRequest {
    DiscoveryRequest {
        node: node(),
        type_url: type_url.into(),
        resource_names: names.iter().map(|name| (*name).to_owned()).collect(),
        ..Default::default()
    }
}

/// Opens a discovery stream that asks for clusters.
pub async fn ask_for_clusters(place: &Place) -> Envoy {
    let envoy = Envoy::open(&place.xds_socket(), istio_agent::xds::Protocol::Sotw).await;
    envoy.send(&request(CLUSTER, &[]));
    envoy
}

/// Opens a secret stream that asks for `names`.
pub async fn ask_for_secrets(place: &Place, names: &[&str]) -> Envoy {
    let envoy = Envoy::open_path(&place.sds_socket(), STREAM_SECRETS).await;
    envoy.send(&request(SECRET, names));
    envoy
}

pub async fn next_response(envoy: &mut Envoy) -> DiscoveryResponse {
    DiscoveryResponse::decode(envoy.next_bytes().await).unwrap()
}

/// The next stream the control plane accepted.
pub async fn accepted(istiod: &mut LocalIstiod) -> Stream {
    soon(istiod.streams.recv()).await.expect("a stream")
}

/// Asks for clusters until a stream comes through to istiod and back.
pub async fn relays(place: &Place, istiod: &mut LocalIstiod) {
    let mut envoy = ask_for_clusters(place).await;
    answered(&mut envoy, istiod).await;
}

/// The stream's request reaches istiod, and istiod's answer the stream.
pub async fn answered(envoy: &mut Envoy, istiod: &mut LocalIstiod) {
    let mut stream = accepted(istiod).await;
    let got: DiscoveryRequest = soon(stream.next()).await.unwrap().unwrap();
    assert_eq!(got.type_url, CLUSTER);
    let answer = DiscoveryResponse {
        type_url: CLUSTER.into(),
        nonce: "good".into(),
        ..Default::default()
    };
    stream.send(&answer).await.unwrap();
    assert_eq!(next_response(envoy).await, answer);
}

/// What must happen within the patience of a slow machine.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .expect("it takes too long")
}

/// Looks again until a condition holds.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(
        tokio::time::timeout(PATIENCE, poll).await.is_ok(),
        "{what} does not happen"
    );
}

/// A gRPC frame around a message.
pub fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    Bytes::from([&[0], &length[..], message].concat())
}
