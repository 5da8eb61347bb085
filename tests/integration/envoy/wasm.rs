//! Tests Wasm modules in a real Envoy: from a registry, over HTTP, and modules that cannot be fetched.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use envoy_types::pb::envoy::config::core::v3 as core;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
use envoy_types::pb::envoy::extensions::wasm::v3 as plugin;
use envoy_types::pb::envoy::extensions::wasm::v3::FailurePolicy;
use envoy_types::pb::google::protobuf;
use http::Method;
use local_istiod::Resource;
use prost::Message;
use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::support::control_plane::ControlPlane;
use crate::support::http::{get, header, read_head};
use crate::support::pod::{Pod, Settings, ask};
use crate::support::programs::{envoy_binary, registry_binary};
use crate::support::registry::Registry;
use crate::support::resources::{answering, extended};
use crate::support::{eventually, free_port, local, soon};

pub const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// Returns a Proxy-Wasm module that adds the header `x-wasm` to responses, and accepts connections.
pub fn module(mark: &str) -> Vec<u8> {
    let length = mark.len();
    let text = format!(
        r#"(module
            (import "env" "proxy_add_header_map_value"
                (func $add (param i32 i32 i32 i32 i32) (result i32)))
            (memory (export "memory") 2)
            (data (i32.const 16) "x-wasm")
            (data (i32.const 32) "{mark}")
            (global $free (mut i32) (i32.const 4096))
            (func (export "malloc") (param i32) (result i32)
                global.get $free
                (global.set $free (i32.add (global.get $free) (local.get 0))))
            (func (export "proxy_abi_version_0_2_1"))
            (func (export "_initialize"))
            (func (export "proxy_on_context_create") (param i32 i32))
            (func (export "proxy_on_vm_start") (param i32 i32) (result i32) i32.const 1)
            (func (export "proxy_on_configure") (param i32 i32) (result i32) i32.const 1)
            (func (export "proxy_on_new_connection") (param i32) (result i32) i32.const 0)
            (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
                (drop (call $add (i32.const 2) (i32.const 16) (i32.const 6)
                    (i32.const 32) (i32.const {length})))
                i32.const 0))"#
    );
    wat::parse_str(text).unwrap()
}

/// Returns the configuration of a filter that fails closed, with the URL of its module.
pub fn extension(
    kind: &str,
    name: &str,
    url: &str,
    sha256: &str,
    environment: &[(&str, &str)],
) -> Resource {
    let policy = FailurePolicy::FailClosed;
    failing(policy, kind, name, url, sha256, environment)
}

fn failing(
    policy: FailurePolicy,
    kind: &str,
    name: &str,
    url: &str,
    sha256: &str,
    environment: &[(&str, &str)],
) -> Resource {
    let uri = core::HttpUri {
        uri: url.to_owned(),
        timeout: Some(protobuf::Duration { seconds: 30, nanos: 0 }),
        http_upstream_type: Some(core::http_uri::HttpUpstreamType::Cluster("_".to_owned())),
    };
    let remote = core::RemoteDataSource {
        http_uri: Some(uri),
        sha256: sha256.to_owned(),
        retry_policy: None,
    };
    let pairs = environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let vm = plugin::VmConfig {
        runtime: "envoy.wasm.runtime.v8".to_owned(),
        code: Some(core::AsyncDataSource {
            specifier: Some(core::async_data_source::Specifier::Remote(remote)),
        }),
        environment_variables: Some(plugin::EnvironmentVariables {
            key_values: pairs.collect(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let config = plugin::PluginConfig {
        name: name.to_owned(),
        vm: Some(plugin::plugin_config::Vm::VmConfig(vm)),
        failure_policy: policy.into(),
        ..Default::default()
    };
    let typed_config = protobuf::Any {
        type_url: format!("type.googleapis.com/envoy.extensions.filters.{kind}.wasm.v3.Wasm"),
        // The HTTP filter and the network filter have the same fields.
        value: Wasm { config: Some(config) }.encode_to_vec(),
    };
    let extension =
        core::TypedExtensionConfig { name: name.to_owned(), typed_config: Some(typed_config) };
    Resource::new(name, EXTENSION, extension.encode_to_vec())
}

/// Waits until responses have this value of the header `x-wasm`.
async fn marked(port: u16, mark: &str) {
    let what = format!("x-wasm: {mark}");
    eventually(&what, async || {
        let head = get(port).await.ok()?;
        (header(&head, "x-wasm") == Some(mark)).then_some(())
    })
    .await;
}

/// Waits until requests are refused with a status.
async fn refused(port: u16, status: &str) {
    eventually(status, async || {
        let head = get(port).await.err()?;
        head.starts_with(&format!("HTTP/1.1 {status} ")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn modules_of_a_registry_run_and_a_moved_tag_is_followed() {
    let (Some(binary), Some(registry)) = (envoy_binary(), registry_binary()) else {
        return;
    };
    let mut registry = Registry::start(&registry).await;
    registry.push("v1", &module("one"));
    let secret = registry.pull_secret();
    let version = |version| {
        [
            ("ISTIO_META_WASM_IMAGE_PULL_SECRET", secret.as_str()),
            ("ISTIO_META_WASM_IMAGE_PULL_POLICY", "Always"),
            ("ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION", version),
        ]
    };
    let (tagged, pinned) = (free_port(), free_port());
    let listeners = [
        extended(answering("tagged", tagged), "http", "shop.tagged"),
        extended(answering("pinned", pinned), "network", "shop.pinned"),
    ];
    let control_plane = ControlPlane::of(&listeners).await;
    control_plane.add(extension("http", "shop.tagged", &registry.url(":v1"), "", &version("1")));
    let digest = registry.push("v2", &module("two"));
    let image = registry.url(":v1");
    control_plane.add(extension("network", "shop.pinned", &image, &digest, &version("1")));
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[
            ("WASM_INSECURE_REGISTRIES", &registry.authority),
            ("ISTIO_AGENT_WASM_REQUIRE_DIGEST", "false"),
        ],
    };
    let pod = Pod::serving(settings, &control_plane).await;
    pod.status(Method::PUT, "/debug/logging?level=debug").await;
    marked(tagged, "one").await;
    // The tag v1 has another digest than the filter requires, so all connections are closed.
    assert!(get(pinned).await.is_err());
    let image = registry.url(&format!("@sha256:{digest}"));
    control_plane.add(extension("network", "shop.pinned", &image, "", &version("1")));
    eventually("a network filter", async || get(pinned).await.ok()).await;
    registry.push("v1", &module("three"));
    control_plane.add(extension("http", "shop.tagged", &registry.url(":v1"), "", &version("2")));
    marked(tagged, "three").await;
    // The registry is stopped when istiod pushes a new version, and is started again without another push.
    registry.push("v1", &module("four"));
    registry.process = None;
    control_plane.add(extension("http", "shop.tagged", &registry.url(":v1"), "", &version("3")));
    refused(tagged, "403").await;
    registry.resume().await;
    marked(tagged, "four").await;
    let dump = ask(&pod.envoy, "/config_dump?include_eds").await.unwrap();
    assert!(dump.contains("/var/lib/istio/data/") && !dump.contains("dGVhbTpVKlU"), "{dump}");
    let page = pod.status(Method::GET, "/debug/wasm").await.unwrap();
    let log = pod.agent.log();
    assert!(log.contains("fetched a Wasm module of"), "{log}");
    let token = control_plane.token();
    let key = token.split('.').next_back().unwrap();
    for text in [dump, page, log] {
        for secret in ["dGVhbTpVKlU", "U*U", "IMAGE_PULL_SECRET", key] {
            assert!(!text.contains(secret), "{secret}");
        }
    }
}

/// Starts a server that responds with a module once `is_there` is true, and with 404 until then. Returns the URL of the
/// module.
pub async fn server(module: Vec<u8>, is_there: Arc<AtomicBool>) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind(local(0)).await.unwrap();
    let url = format!("http://{}/module", listener.local_addr().unwrap());
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = read_head(&mut stream).await;
            let (status, body) = if is_there.load(Ordering::Relaxed) {
                ("200 OK", module.as_slice())
            } else {
                ("404 Not Found", &b""[..])
            };
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n");
            let _ = stream.write_all(&[head.as_bytes(), body].concat()).await;
        }
    });
    (url, serving)
}

async fn recovers(delta: &str) {
    let Some(binary) = envoy_binary() else { return };
    let is_there = Arc::new(AtomicBool::new(false));
    let (url, _serving) = server(module("late"), is_there.clone()).await;
    let port = free_port();
    let listener = extended(answering("all", port), "http", "shop.plugin");
    let control_plane = ControlPlane::of(&[listener]).await;
    control_plane.add(extension("http", "shop.plugin", &url, "", &[]));
    let settings = Settings { envoy: Some(&binary), environment: &[("ISTIO_DELTA_XDS", delta)] };
    let pod = Pod::serving(settings, &control_plane).await;
    refused(port, "403").await;
    is_there.store(true, Ordering::Relaxed);
    // The agent fetches the module without another push of the control plane.
    marked(port, "late").await;
    assert!(pod.agent.log().contains("applying deny RBAC filter"));
    let wrong = "0".repeat(64);
    control_plane.add(extension("http", "shop.plugin", &url, &wrong, &[]));
    refused(port, "403").await;
    let open = FailurePolicy::FailOpen;
    let open = failing(open, "http", "shop.plugin", &url, &wrong, &[]);
    control_plane.add(open);
    let head = eventually("an answer", async || get(port).await.ok()).await;
    assert_eq!(header(&head, "x-wasm"), None, "{head}");
    let dump = ask(&pod.envoy, "/config_dump").await.unwrap();
    assert!(dump.contains("wasm-default-allow"), "{dump}");
}

#[tokio::test]
async fn envoy_gets_a_module_over_sotw_once_it_can_be_fetched() {
    recovers("false").await;
}

#[tokio::test]
async fn envoy_gets_a_module_over_delta_once_it_can_be_fetched() {
    recovers("true").await;
}

#[tokio::test]
async fn a_hanging_module_fetch_delays_no_listener_other_module_readiness_or_shutdown() {
    let Some(binary) = envoy_binary() else { return };
    // The kernel accepts connections to this listener, and no response is ever sent.
    let silent = TcpListener::bind(local(0)).await.unwrap();
    let (first, second, other) = (free_port(), free_port(), free_port());
    let control_plane = ControlPlane::of(&[answering("first", first)]).await;
    let environment = &[("ISTIO_DELTA_XDS", "true")];
    let mut pod =
        Pod::serving(Settings { envoy: Some(&binary), environment }, &control_plane).await;
    eventually("an answer", async || get(first).await.ok()).await;
    let url = format!("http://{}/module", silent.local_addr().unwrap());
    let waiting = extended(answering("waiting", free_port()), "http", "shop.plugin");
    control_plane.set(&[answering("first", first), waiting.clone()]).await;
    control_plane.add(extension("http", "shop.plugin", &url, "", &[]));
    let connection = soon(silent.accept()).await.unwrap();
    control_plane
        .set(&[
            answering("first", first),
            waiting,
            answering("second", second),
            extended(answering("other", other), "http", "shop.other"),
        ])
        .await;
    eventually("the second listener", async || get(second).await.ok()).await;
    let (url, _serving) = server(module("other"), Arc::new(AtomicBool::new(true))).await;
    control_plane.add(extension("http", "shop.other", &url, "", &[]));
    marked(other, "other").await;
    assert!(!pod.agent.log().contains("RBAC filter"), "it still hangs");
    assert!(pod.status(Method::GET, "/healthz/ready").await.is_some());
    pod.agent.signal(Signal::TERM);
    pod.agent.end().await;
    drop(connection);
}
