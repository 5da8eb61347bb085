//! Wasm modules in a real Envoy: from a registry, over HTTP, and not at all.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use envoy_types::pb::envoy::config::core::v3 as core;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
use envoy_types::pb::envoy::extensions::wasm::v3 as plugin;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;
use envoy_types::pb::google::protobuf;
use http::Method;
use http_body_util::BodyExt;
use istio_agent::xds::Protocol;
use local_istiod::Resource;
use prost::Message;
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::memory::open;
use crate::support::control_plane::ControlPlane;
use crate::support::http::{get, header, read_head};
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::Process;
use crate::support::resources::{answering, extended};
use crate::support::{envoy_binary, eventually, free_port, local, registry_binary, soon};

const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// A user of the registry, and the password's bcrypt, a published test vector.
const USER: &str = "team:U*U";
const HASHED: &str = "team:$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW\n";

/// A module for the ABI of proxies that adds a header `x-wasm` to responses, and accepts connections.
fn module(mark: &str) -> Vec<u8> {
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

fn sha256(bytes: &[u8]) -> String {
    let digest = digest(&SHA256, bytes);
    digest
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// A filter whose module istiod names by its URL.
fn extension(
    kind: &str,
    name: &str,
    url: &str,
    sha256: &str,
    environment: &[(&str, &str)],
) -> Resource {
    let uri = core::HttpUri {
        uri: url.to_owned(),
        timeout: Some(protobuf::Duration {
            seconds: 30,
            nanos: 0,
        }),
        http_upstream_type: Some(core::http_uri::HttpUpstreamType::Cluster("_".to_owned())),
    };
    let remote = core::RemoteDataSource {
        http_uri: Some(uri),
        sha256: sha256.to_owned(),
        retry_policy: None,
    };
    let pairs = environment
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
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
        failure_policy: 2,
        ..Default::default()
    };
    let typed_config = protobuf::Any {
        type_url: format!("type.googleapis.com/envoy.extensions.filters.{kind}.wasm.v3.Wasm"),
        // Both kinds have the same fields.
        value: Wasm {
            config: Some(config),
        }
        .encode_to_vec(),
    };
    let extension = core::TypedExtensionConfig {
        name: name.to_owned(),
        typed_config: Some(typed_config),
    };
    Resource::new(name, EXTENSION, extension.encode_to_vec())
}

/// Waits until requests have this header `x-wasm`.
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
        head.starts_with(&format!("HTTP/1.1 {status} "))
            .then_some(())
    })
    .await;
}

/// A registry with TLS that asks for [`USER`].
struct Registry {
    _process: Process,
    directory: TempDir,
    authority: String,
}

impl Registry {
    async fn start(binary: &std::path::Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        let own = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        std::fs::write(path("cert.pem"), own.cert.pem()).unwrap();
        std::fs::write(path("key.pem"), own.signing_key.serialize_pem()).unwrap();
        std::fs::write(path("users"), HASHED).unwrap();
        let authority = local(free_port()).to_string();
        let config = json!({
            "version": 0.1,
            "storage": { "filesystem": { "rootdirectory": path("data") } },
            "http": { "addr": authority, "tls": { "certificate": path("cert.pem"), "key": path("key.pem") } },
            "auth": { "htpasswd": { "realm": "Registry", "path": path("users") } },
        });
        std::fs::write(path("config.yml"), config.to_string()).unwrap();
        let mut command = Command::new(binary);
        command.arg("serve").arg(path("config.yml")).env_clear();
        let log = directory.path().join("registry.log");
        let registry = Self {
            _process: Process::start(&mut command, &log),
            directory,
            authority,
        };
        eventually("a registry", async || registry.curl("", &[]).ok()).await;
        registry
    }

    /// What a request for a path under `/v2/` answers.
    fn curl(&self, path: &str, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new("curl");
        command.args(["-sSfkL", "-i", "-u", USER]).args(arguments);
        let path = match path.starts_with("https:") {
            true => path.to_owned(),
            false => format!("https://{}/v2/{path}", self.authority),
        };
        let output = command
            .arg(path)
            .output()
            .map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    /// Uploads a module under a tag, and returns the digest of its manifest.
    fn push(&self, tag: &str, module: &[u8]) -> String {
        let file = self.directory.path().join("upload");
        let data = format!("@{}", file.display());
        let upload = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            let begun = self.curl("plugin/blobs/uploads/", &["-X", "POST"]).unwrap();
            let mut lines = begun.lines().filter_map(|line| line.split_once(": "));
            let (_, location) = lines
                .find(|(name, _)| name.eq_ignore_ascii_case("location"))
                .unwrap();
            let joint = if location.contains('?') { '&' } else { '?' };
            let location = format!("{location}{joint}digest=sha256:{}", sha256(bytes));
            let stream = "content-type: application/octet-stream";
            self.curl(
                &location,
                &["-X", "PUT", "-H", stream, "--data-binary", &data],
            )
            .unwrap();
            json!({ "digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len() })
        };
        let [mut config, mut layer] = [upload(b"{}"), upload(module)];
        config["mediaType"] = json!("application/vnd.module.wasm.config.v1+json");
        layer["mediaType"] = json!("application/vnd.module.wasm.content.layer.v1+wasm");
        let oci = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": oci,
            "config": config,
            "layers": [config, layer],
        });
        let manifest = manifest.to_string();
        std::fs::write(&file, &manifest).unwrap();
        let kind = format!("content-type: {oci}");
        let put = ["-X", "PUT", "-H", &kind, "--data-binary", &data];
        self.curl(&format!("plugin/manifests/{tag}"), &put).unwrap();
        sha256(manifest.as_bytes())
    }

    fn url(&self, version: &str) -> String {
        format!("oci://{}/plugin{version}", self.authority)
    }

    fn pull_secret(&self) -> String {
        json!({ "auths": { &self.authority: { "auth": "dGVhbTpVKlU=" } } }).to_string()
    }
}

#[tokio::test]
async fn modules_of_a_registry_with_a_password_run_in_envoy_and_a_moved_tag_is_followed() {
    let (Some(binary), Some(registry)) = (envoy_binary(), registry_binary()) else {
        return;
    };
    let registry = Registry::start(&registry).await;
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
    control_plane.add(extension(
        "http",
        "shop.tagged",
        &registry.url(":v1"),
        "",
        &version("1"),
    ));
    let digest = registry.push("v2", &module("two"));
    let image = registry.url(":v1");
    control_plane.add(extension(
        "network",
        "shop.pinned",
        &image,
        &digest,
        &version("1"),
    ));
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[
            ("WASM_INSECURE_REGISTRIES", &registry.authority),
            ("ISTIO_AGENT_WASM_REQUIRE_DIGEST", "false"),
        ],
    };
    let pod = Pod::serving(settings, &control_plane).await;
    marked(tagged, "one").await;
    // The tag v1 has another digest: all connections are closed.
    assert!(get(pinned).await.is_err());
    let image = registry.url(&format!("@sha256:{digest}"));
    control_plane.add(extension(
        "network",
        "shop.pinned",
        &image,
        "",
        &version("1"),
    ));
    eventually("a network filter", async || get(pinned).await.ok()).await;
    registry.push("v1", &module("three"));
    control_plane.add(extension(
        "http",
        "shop.tagged",
        &registry.url(":v1"),
        "",
        &version("2"),
    ));
    marked(tagged, "three").await;
    let dump = ask(&pod.envoy, "/config_dump?include_eds").await.unwrap();
    assert!(
        dump.contains("/var/lib/istio/data/") && !dump.contains("dGVhbTpVKlU"),
        "{dump}"
    );
    let page = pod.status(Method::GET, "/debug/wasm").await.unwrap();
    for text in [dump, page, pod.agent.log()] {
        assert!(!text.contains("dGVhbTpVKlU") && !text.contains("IMAGE_PULL_SECRET"));
    }
}

/// Serves a module once `is_there`.
async fn server(module: Vec<u8>, is_there: Arc<AtomicBool>) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind(local(0)).await.unwrap();
    let url = format!("http://{}/module", listener.local_addr().unwrap());
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = read_head(&mut stream).await;
            let (status, body) = match is_there.load(Ordering::Relaxed) {
                true => ("200 OK", module.as_slice()),
                false => ("404 Not Found", &b""[..]),
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
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[("ISTIO_DELTA_XDS", delta)],
    };
    let pod = Pod::serving(settings, &control_plane).await;
    refused(port, "403").await;
    is_there.store(true, Ordering::Relaxed);
    // No push of the control plane.
    marked(port, "late").await;
    assert!(pod.agent.log().contains("applying deny RBAC filter"));
    let wrong = "0".repeat(64);
    control_plane.add(extension("http", "shop.plugin", &url, &wrong, &[]));
    refused(port, "403").await;
}

#[tokio::test]
async fn envoy_gets_a_module_once_it_is_there_over_sotw() {
    recovers("false").await;
}

#[tokio::test]
async fn envoy_gets_a_module_once_it_is_there_over_delta() {
    recovers("true").await;
}

#[tokio::test]
async fn a_fetch_that_hangs_holds_up_neither_listeners_nor_readiness_nor_the_end() {
    let Some(binary) = envoy_binary() else { return };
    // Accepts connections by its queue, and never answers.
    let silent = TcpListener::bind(local(0)).await.unwrap();
    let (first, second) = (free_port(), free_port());
    let control_plane = ControlPlane::of(&[answering("first", first)]).await;
    let environment = &[];
    let mut pod = Pod::serving(
        Settings {
            envoy: Some(&binary),
            environment,
        },
        &control_plane,
    )
    .await;
    eventually("an answer", async || get(first).await.ok()).await;
    let url = format!("http://{}/module", silent.local_addr().unwrap());
    let waiting = extended(answering("waiting", free_port()), "http", "shop.plugin");
    control_plane
        .set(&[answering("first", first), waiting.clone()])
        .await;
    control_plane.add(extension("http", "shop.plugin", &url, "", &[]));
    let connection = soon("a fetch", silent.accept()).await.unwrap();
    control_plane
        .set(&[
            answering("first", first),
            waiting,
            answering("second", second),
        ])
        .await;
    eventually("the second listener", async || get(second).await.ok()).await;
    assert!(pod.status(Method::GET, "/healthz/ready").await.is_some());
    pod.agent.signal(Signal::TERM);
    pod.agent.end().await;
    drop(connection);
}

#[tokio::test]
async fn a_module_of_100_mb_costs_three_mb_of_memory() {
    let large = [module("large"), vec![0; 100_000_000]].concat();
    let is_there = Arc::new(AtomicBool::new(true));
    let (small, _first) = server(module("small"), is_there.clone()).await;
    let (large, _second) = server(large, is_there).await;
    let mut control_plane = ControlPlane::scripted(Duration::from_secs(3600)).await;
    let pod = Pod::start(Settings::default(), &control_plane);
    let path = pod.path("etc/istio/proxy/XDS");
    let socket = eventually("the socket of the agent", async || {
        UnixStream::connect(&path).await.ok()
    });
    let (mut body, _connection) = open(socket.await, Protocol::Sotw).await;
    let istiod = soon("a stream", control_plane.istiod.streams.recv()).await;
    let istiod = istiod.unwrap();
    let mut used = Vec::new();
    for url in [small, large] {
        pod.agent.reset_peak();
        let before = pod.agent.memory("VmRSS");
        let started = Instant::now();
        let response = DiscoveryResponse {
            resources: vec![extension("http", "shop.plugin", &url, "", &[]).any],
            type_url: EXTENSION.to_owned(),
            ..Default::default()
        };
        istiod
            .send_bytes(response.encode_to_vec().into())
            .await
            .unwrap();
        let frame = soon("the module", body.frame()).await.unwrap().unwrap();
        let text = String::from_utf8_lossy(&frame.into_data().unwrap()).into_owned();
        assert!(text.contains("/var/lib/istio/data/"), "{text}");
        let grown = pod.agent.memory("VmHWM").saturating_sub(before);
        println!("{url}: {grown} KiB in {:?}", started.elapsed());
        used.push(grown);
    }
    assert!(used[1] < 3 * 1024, "{used:?} KiB");
}
