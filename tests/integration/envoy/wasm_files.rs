//! Tests the files of Wasm modules, and the memory that a fetch takes.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use istio_agent::xds::Protocol;
use local_istiod::Resource;
use prost::Message;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::envoy::memory::open;
use crate::envoy::wasm::{EXTENSION, extension, module, server};
use crate::support::control_plane::ControlPlane;
use crate::support::namespace::{is_inside, run};
use crate::support::pod::{Pod, Settings};
use crate::support::{eventually, soon};

const DATA: &str = "var/lib/istio/data";

/// An agent without Envoy, and both ends of its discovery stream.
struct Relay {
    pod: Pod,
    istiod: local_istiod::Stream,
    body: Incoming,
    _connection: JoinSet<()>,
    _control_plane: ControlPlane,
}

impl Relay {
    async fn start(environment: &[(&str, &str)]) -> Self {
        let mut control_plane = ControlPlane::scripted(Duration::from_secs(3600)).await;
        let settings = Settings { environment, ..Settings::default() };
        let pod = Pod::start(settings, &control_plane);
        let path = pod.path("etc/istio/proxy/XDS");
        let socket =
            eventually("the socket of the agent", async || UnixStream::connect(&path).await.ok());
        let (body, connection) = open(socket.await, Protocol::Sotw).await;
        let istiod = soon(control_plane.istiod.streams.recv()).await;
        Self {
            pod,
            istiod: istiod.unwrap(),
            body,
            _connection: connection,
            _control_plane: control_plane,
        }
    }

    /// Sends a resource from istiod, and returns the response that Envoy gets.
    async fn send(&mut self, resource: Resource) -> String {
        let response = DiscoveryResponse {
            resources: vec![resource.any],
            type_url: EXTENSION.to_owned(),
            ..Default::default()
        };
        let message = response.encode_to_vec();
        self.istiod.send_bytes(message.into()).await.unwrap();
        self.receive().await
    }

    async fn receive(&mut self) -> String {
        let frame = soon(self.body.frame()).await;
        let data = frame.unwrap().unwrap().into_data().unwrap();
        String::from_utf8_lossy(&data).into_owned()
    }
}

fn plugin(url: &str) -> Resource {
    extension("http", "shop.plugin", url, "", &[])
}

#[tokio::test]
async fn a_module_of_100_mb_costs_three_mb_of_memory() {
    let large = [module("large"), vec![0; 100_000_000]].concat();
    let is_there = Arc::new(AtomicBool::new(true));
    let (small, _first) = server(module("small"), is_there.clone()).await;
    let (large, _second) = server(large, is_there).await;
    let mut relay = Relay::start(&[]).await;
    let mut used = Vec::new();
    for url in [small, large] {
        relay.pod.agent.reset_peak();
        let before = relay.pod.agent.memory("VmRSS");
        let started = Instant::now();
        let text = relay.send(plugin(&url)).await;
        assert!(text.contains(DATA), "{text}");
        let grown = relay.pod.agent.memory("VmHWM").saturating_sub(before);
        println!("{url}: {grown} KiB in {:?}", started.elapsed());
        used.push(grown);
    }
    assert!(used[1] < 3 * 1024, "{used:?} KiB");
}

#[tokio::test]
async fn a_full_or_read_only_disk_is_named_and_used_later() {
    let test = "wasm_files::a_full_or_read_only_disk_is_named_and_used_later";
    if !is_inside(test) {
        return;
    }
    let large = [module("large"), vec![0; 300_000]].concat();
    let is_there = Arc::new(AtomicBool::new(true));
    let (small, _first) = server(module("small"), is_there.clone()).await;
    let (large, _second) = server(large, is_there).await;
    let mut relay = Relay::start(&[]).await;
    let path = relay.pod.path(DATA);
    fs::create_dir_all(&path).unwrap();
    let data = path.to_str().unwrap();
    run("mount", &["-t", "tmpfs", "-o", "size=100k", "tmpfs", data]);
    assert!(relay.send(plugin(&small)).await.contains(DATA));
    let text = relay.send(plugin(&large)).await;
    assert!(text.contains("wasm-default-deny"), "{text}");
    let log = relay.pod.agent.log();
    assert!(log.contains("No space left on device"), "{log}");
    assert_eq!(downloads(&path), 0);
    run("mount", &["-o", "remount,size=1m", data]);
    let text = relay.receive().await;
    assert!(text.contains(DATA), "fetched again without a push: {text}");
    run("mount", &["-o", "remount,ro", data]);
    // A module that is on the disk already is used.
    assert!(relay.send(plugin(&large)).await.contains(DATA));
    let other = format!("{small}?other");
    let text = relay.send(plugin(&other)).await;
    assert!(text.contains("wasm-default-deny"), "{text}");
    let log = relay.pod.agent.log();
    assert!(log.contains("Read-only file system"), "{log}");
    run("mount", &["-o", "remount,rw", data]);
    assert!(relay.receive().await.contains(DATA));
}

/// Returns the number of files of fetches that are in flight.
fn downloads(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().ends_with(".tmp")).count()
}

#[tokio::test]
async fn modules_are_left_to_envoy_with_a_warning_on_request() {
    let name = "ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION";
    let mut relay = Relay::start(&[(name, "false")]).await;
    let secret = [("ISTIO_META_WASM_IMAGE_PULL_SECRET", "{}")];
    let url = "oci://127.0.0.1:9/plugin";
    let resource = extension("http", "shop.plugin", url, "", &secret);
    let sent = String::from_utf8_lossy(&resource.any.value).into_owned();
    let text = relay.send(resource).await;
    assert!(text.contains(&sent), "{text}");
    let log = relay.pod.agent.log();
    let warning = "ECDS is forwarded unchanged. Envoy cannot fetch the modules of WasmPlugins, and its \
                   configuration dump shows pull secrets";
    assert!(log.contains(warning), "{log}");
}
