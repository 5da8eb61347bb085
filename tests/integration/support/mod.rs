//! Helpers of the tests: agents with a scripted or a real Envoy, control planes, and waiting with a time limit.

pub mod bench;
pub mod control_plane;
pub mod envoy;
pub mod faults;
pub mod http;
pub mod names;
pub mod namespace;
pub mod place;
pub mod pod;
pub mod process;
pub mod programs;
pub mod prometheus;
pub mod python;
pub mod registry;
pub mod resources;
pub mod scraped;
pub mod spire;
pub mod tls;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::panic::Location;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use local_istiod::{LocalIstiod, Options, Snapshot, Stream, Variant};
use prost::Message;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::{Code, Status};

use envoy::Envoy;
use place::Place;

pub const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
pub const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
pub const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";
pub const STREAM_SECRETS: &str = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets";

/// The time limit of everything that a test waits for. It allows for retries and a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// Starts a control plane whose streams the test scripts.
pub async fn local_istiod() -> LocalIstiod {
    LocalIstiod::start(options()).await.unwrap()
}

/// Starts a control plane that responds to discovery requests, with no resources.
pub async fn answering_istiod() -> LocalIstiod {
    let (_, snapshots) = watch::channel(Arc::new(Snapshot::default()));
    let options = Options { snapshots: Some(snapshots), ..options() };
    LocalIstiod::start(options).await.unwrap()
}

/// Returns options with a separate loopback address for each control plane, so that no other process takes its port
/// while it is stopped.
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

/// Kills a control plane, and starts it again with options that `change` has changed.
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

/// Returns the first request for a type on a stream: it has a node and no nonce.
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

/// Waits until the control plane accepts a stream, and returns this stream.
pub async fn accepted(istiod: &mut LocalIstiod) -> Stream {
    soon(istiod.streams.recv()).await.expect("a stream")
}

/// Makes a control plane end all streams with this status. With UNIMPLEMENTED it ends only delta streams, and sends an
/// empty response on each state-of-the-world stream.
pub fn refusing(mut istiod: LocalIstiod, status: Status) -> JoinSet<()> {
    let mut refusing = JoinSet::new();
    refusing.spawn(async move {
        let istiod = &mut istiod;
        let mut answered = Vec::new();
        while let Some(mut stream) = istiod.streams.recv().await {
            let is_known = stream.variant == Variant::StateOfTheWorld;
            if !is_known || status.code() != Code::Unimplemented {
                stream.end(status.clone()).await;
                continue;
            }
            let request: DiscoveryRequest = stream.next().await.unwrap().unwrap();
            let answer =
                DiscoveryResponse { type_url: request.type_url, ..DiscoveryResponse::default() };
            stream.send(&answer).await.unwrap();
            answered.push(stream);
        }
    });
    refusing
}

/// Opens a stream, and asserts that its request reaches istiod and that istiod's response reaches the stream.
pub async fn relays(place: &Place, istiod: &mut LocalIstiod) {
    let mut envoy = ask_for_clusters(place).await;
    answered(&mut envoy, istiod).await;
}

/// Asserts that the stream's request for clusters reaches istiod, and that istiod's response reaches the stream.
pub async fn answered(envoy: &mut Envoy, istiod: &mut LocalIstiod) {
    let mut stream = accepted(istiod).await;
    let got: DiscoveryRequest = soon(stream.next()).await.unwrap().unwrap();
    assert_eq!(got.type_url, CLUSTER);
    let answer =
        DiscoveryResponse { type_url: CLUSTER.into(), nonce: "good".into(), ..Default::default() };
    stream.send(&answer).await.unwrap();
    assert_eq!(next_response(envoy).await, answer);
}

/// Returns a port on which no process listens. Each port is returned once, and none of Istio's ports is returned. The
/// ports are below those that the kernel assigns to clients, so that no client takes one before the test binds it.
pub fn free_port() -> u16 {
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    let next = NEXT.get_or_init(|| {
        // Concurrent test processes begin at different ports.
        let of_process = u16::try_from(std::process::id() % 100).unwrap();
        AtomicU16::new(12_000 + of_process * 200)
    });
    loop {
        let port = next.fetch_add(1, Ordering::Relaxed);
        let is_of_istio = (15_000..15_100).contains(&port);
        if !is_of_istio && TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}

pub fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Waits for a future, at most for [`PATIENCE`]. After that it panics and names the caller.
#[track_caller]
pub fn soon<T>(future: impl Future<Output = T>) -> impl Future<Output = T> {
    let caller = Location::caller();
    async move {
        let Ok(value) = tokio::time::timeout(PATIENCE, future).await else {
            panic!("{caller}: not within {PATIENCE:?}");
        };
        value
    }
}

/// Repeats `look` until it returns a value, and returns this value.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let poll = async {
        loop {
            if let Some(value) = look().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let Ok(value) = tokio::time::timeout(PATIENCE, poll).await else {
        panic!("{what}: not within {PATIENCE:?}");
    };
    value
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, poll).await.is_ok(), "{what}: not within {PATIENCE:?}");
}

/// Gives the tasks 100 ms to become idle, and advances the clock.
pub async fn advance_clock(by: Duration) {
    tokio::time::sleep(Duration::from_millis(100)).await;
    tokio::time::pause();
    tokio::time::advance(by).await;
    tokio::time::resume();
}

/// Returns a message in a gRPC frame.
pub fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    Bytes::from([&[0], &length[..], message].concat())
}
