//! Tests fetches of Wasm modules: through a proxy, from a name whose address changes, and interrupted by SIGKILL.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use aws_lc_rs::digest::{SHA256, digest};
use envoy_types::pb::envoy::config::core::v3 as core;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
use envoy_types::pb::envoy::extensions::wasm::v3 as plugin;
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::google::protobuf;
use istio_agent::xds::Protocol;
use local_istiod::{LocalIstiod, Stream};
use prost::Message;
use rustix::process::Signal;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::conformance::doctor::{checks, diagnosed};
use crate::conformance::proxy::Tinyproxy;
use crate::support::envoy::Envoy;
use crate::support::http::Server;
use crate::support::place::Place;
use crate::support::{accepted, local_istiod, next_response, request, soon, until};

const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const MODULE: &str = "\0asm\x01\0\0\0module";

/// Returns the configuration of a filter with the URL of its module.
fn extension(url: &str) -> protobuf::Any {
    let uri = core::HttpUri {
        uri: url.to_owned(),
        timeout: Some(protobuf::Duration { seconds: 30, nanos: 0 }),
        ..Default::default()
    };
    let remote = core::RemoteDataSource { http_uri: Some(uri), ..Default::default() };
    let code = core::AsyncDataSource {
        specifier: Some(core::async_data_source::Specifier::Remote(remote)),
    };
    let vm = plugin::VmConfig { code: Some(code), ..Default::default() };
    let config = plugin::PluginConfig {
        vm: Some(plugin::plugin_config::Vm::VmConfig(vm)),
        ..Default::default()
    };
    let wasm = Wasm { config: Some(config) };
    let extension = core::TypedExtensionConfig {
        name: url.to_owned(),
        typed_config: Some(protobuf::Any {
            type_url: "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm".to_owned(),
            value: wasm.encode_to_vec(),
        }),
    };
    protobuf::Any { type_url: EXTENSION.to_owned(), value: extension.encode_to_vec() }
}

/// Opens a stream as Envoy, and sends filters with modules at `urls` on it as istiod.
async fn sent(place: &Place, istiod: &mut LocalIstiod, urls: &[&str]) -> (Envoy, Stream) {
    let envoy = Envoy::open(&place.xds_socket(), Protocol::Sotw).await;
    envoy.send(&request(EXTENSION, urls));
    let mut stream = accepted(istiod).await;
    let asked: DiscoveryRequest = soon(stream.next()).await.unwrap().unwrap();
    assert_eq!(asked.type_url, EXTENSION);
    let response = DiscoveryResponse {
        type_url: EXTENSION.to_owned(),
        nonce: "n".to_owned(),
        resources: urls.iter().map(|url| extension(url)).collect(),
        ..Default::default()
    };
    stream.send(&response).await.unwrap();
    (envoy, stream)
}

/// Sends filters with modules at `urls` as istiod, and returns the resources that Envoy gets, as text.
async fn converted(place: &Place, istiod: &mut LocalIstiod, urls: &[&str]) -> Vec<String> {
    let (mut envoy, _stream) = sent(place, istiod, urls).await;
    let resources = next_response(&mut envoy).await.resources.into_iter();
    let texts = resources.map(|any| String::from_utf8_lossy(&any.value).into_owned());
    texts.collect()
}

/// Starts a registry with one image. The registry is also its own token server.
async fn registry() -> Server {
    let name = |bytes: &str| {
        let digest = digest(&SHA256, bytes.as_bytes());
        let digits = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
        format!("sha256:{}", digits.collect::<String>())
    };
    let layer = json!({
        "mediaType": "application/vnd.module.wasm.content.layer.v1+wasm",
        "digest": name(MODULE),
        "size": MODULE.len(),
    });
    let manifest = json!({ "schemaVersion": 2, "layers": [layer, layer] }).to_string();
    let blob = format!("/v2/team/plugin/blobs/{}", name(MODULE));
    let (port, has_token) = (Arc::new(OnceLock::<u16>::new()), AtomicBool::new(false));
    let own = port.clone();
    let server = Server::tls(move |path| {
        let body = match path {
            _ if path.starts_with("/token?") => {
                has_token.store(true, Ordering::Relaxed);
                r#"{"token":"t"}"#
            }
            _ if !has_token.load(Ordering::Relaxed) => {
                let realm = format!("https://0.0.0.0:{}/token", own.get()?);
                let challenge = format!("www-authenticate: Bearer realm=\"{realm}\"\r\n");
                return Some((401, challenge, String::new()));
            }
            "/v2/team/plugin/manifests/v1" => &manifest,
            _ if path == blob => MODULE,
            _ => return Some((404, String::new(), String::new())),
        };
        Some((200, String::new(), body.to_owned()))
    });
    let server = server.await;
    port.set(server.port).unwrap();
    server
}

#[tokio::test]
async fn modules_and_their_tokens_are_fetched_through_a_proxy() {
    let Some(proxy) = Tinyproxy::start() else {
        return;
    };
    let plain = Server::start(0, |_| Some((200, String::new(), MODULE.to_owned()))).await;
    let registry = registry().await;
    // The agent uses no proxy for loopback addresses. 0.0.0.0 is not one of them, and reaches the same machine.
    let module = format!("http://0.0.0.0:{}/module", plain.port);
    let image = format!("oci://0.0.0.0:{}/team/plugin:v1", registry.port);
    let mut istiod = local_istiod().await;
    let through = format!("http://agent:hush@127.0.0.1:{}", proxy.port);
    let place = Place::with_envoy(&istiod)
        .set("http_proxy", &through)
        .set("HTTPS_PROXY", &through)
        .set("WASM_INSECURE_REGISTRIES", "*");
    let agent = place.start().await;
    let filters = converted(&place, &mut istiod, &[&module, &image]).await;
    assert_eq!(filters.len(), 2);
    for filter in filters {
        assert!(filter.contains("/var/lib/istio/data/"), "{filter}");
    }
    assert_eq!(proxy.requests(&format!("GET {module} ")), 1);
    // The four requests: one that is refused with 401, and those for token, manifest and layer.
    assert_eq!(proxy.connect_requests(registry.port), 4);
    assert_eq!((plain.requests.borrow().len(), registry.requests.borrow().len()), (1, 4));
    assert!(!plain.requests.borrow()[0].contains("roxy-"));
    assert!(!agent.log().contains("hush"), "{}", agent.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_names_each_missing_module_with_cause_and_remedy() {
    let mut istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod)
        .set("WASM_HTTP_REQUEST_MAX_RETRIES", "1")
        .set("ISTIO_AGENT_WASM_ALLOWED_REGISTRIES", "127.0.0.1:1,127.0.0.1:2");
    let _agent = place.start().await;
    let urls = ["http://127.0.0.1:1/a", "oci://127.0.0.1:2/team/plugin:v1", "http://127.0.0.1:3/a"];
    let (mut envoy, _stream) = sent(&place, &mut istiod, &urls).await;
    next_response(&mut envoy).await;
    let (report, _) = diagnosed(&place);
    for (code, words) in [
        (
            "WASM_DOWNLOAD_FAILED",
            ["127.0.0.1:1/a", "Connection refused", "`url` of the WasmPlugin"],
        ),
        (
            "WASM_MANIFEST_FAILED",
            ["127.0.0.1:2/team/plugin", "Connection refused", "imagePullSecret"],
        ),
        (
            "WASM_NOT_ALLOWED",
            ["127.0.0.1:3/a", "is not listed", "ISTIO_AGENT_WASM_ALLOWED_REGISTRIES"],
        ),
    ] {
        let checks = checks(&report);
        let found = checks.iter().find(|check| check["code"] == code);
        let found = found.unwrap_or_else(|| panic!("{code}: {report:#}"));
        assert_eq!(found["level"], "error", "{found}");
        assert_eq!(
            found["consequence"], "everything is refused, HTTP requests with 403",
            "{found}"
        );
        let found = found.to_string();
        assert!(words.iter().all(|words| found.contains(words)), "{words:?}: {found}");
    }
}

#[tokio::test]
async fn a_blocked_address_at_the_second_lookup_is_refused() {
    let mut istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod).set("WASM_HTTP_REQUEST_MAX_RETRIES", "2");
    place.write("hosts", "127.0.0.1 modules.test\n");
    let hosts = place.path("hosts");
    // Only the agent has this hosts file.
    let starting = format!("mount --bind '{}' /etc/hosts && exec \"$0\" \"$@\"", hosts.display());
    let alone = ["unshare", "--mount", "sh", "-c", &starting];
    let trial = Command::new(alone[0]).args(&alone[1..]).arg("true").status();
    if !trial.is_ok_and(|status| status.success()) {
        let sentence = "A file system of its own cannot be had here.";
        assert!(std::env::var_os("NETNS_TESTS").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
        return;
    }
    let server = Server::start(0, move |_| {
        std::fs::write(&hosts, "169.254.169.254 modules.test\n").unwrap();
        Some((503, String::new(), String::new()))
    })
    .await;
    let url = format!("http://modules.test:{}/module", server.port);
    let place = place.started_by(&alone);
    let agent = place.start().await;
    let filters = converted(&place, &mut istiod, &[&url]).await;
    assert!(filters[0].contains("wasm-default-deny"), "{filters:?}");
    let blocked = "connection blocked: resolved IP 169.254.169.254 is link-local";
    assert!(agent.log().contains(blocked), "{}", agent.log());
    assert_eq!(server.requests.borrow().len(), 1);
}

#[tokio::test]
async fn a_download_cut_by_a_kill_is_not_a_module() {
    let mut istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/module", listener.local_addr().unwrap());
    let urls = [url.as_str()];
    let module = [MODULE.as_bytes(), &[0; 1 << 20]].concat();
    let serve = async |length: usize| {
        let (mut stream, _) = listener.accept().await.unwrap();
        // A response that precedes its request would end the connection.
        assert_ne!(stream.read(&mut [0; 4096]).await.unwrap(), 0);
        let whole = module.len();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {whole}\r\n\r\n");
        let answer = [head.as_bytes(), &module[..length]].concat();
        stream.write_all(&answer).await.unwrap();
        stream
    };
    let modules = place.path("var/lib/istio/data");
    let files = || -> Vec<Vec<u8>> {
        let entries = std::fs::read_dir(&modules).into_iter().flatten();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.map(|path| std::fs::read(path).unwrap()).collect()
    };
    let agent = place.start().await;
    let (_envoy, _stream) = sent(&place, &mut istiod, &urls).await;
    let _held = soon(serve(1 << 19)).await;
    until("a part of the module on disk", || files().iter().any(|content| !content.is_empty()))
        .await;
    agent.signal(Signal::KILL);
    agent.ends().await;
    let _agent = place.start().await;
    let (filters, _) = tokio::join!(converted(&place, &mut istiod, &urls), serve(module.len()));
    assert!(filters[0].contains(".wasm"), "{filters:?}");
    assert!(files().contains(&module));
}
