//! Tests the support bundle of a pod that has secrets in many places: no file of the bundle contains one.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use http::Method;
use serde_json::{Value, json};

use crate::envoy::wasm::extension;
use crate::support::control_plane::ControlPlane;
use crate::support::pod::{Pod, Settings, ask};
use crate::support::programs::envoy_binary;
use crate::support::resources::{answering, extended, secured_listener};
use crate::support::{eventually, free_port};

/// The secrets, such as headers, passwords and tokens. The name of each constant says where the secret is.
const OF_ROUTE: &str = "Bearer route-8fbb1c";
const OF_MATCH: &str = "key-of-match-77ad";
const OF_SERVICE: &str = "metadata-of-service-19c2";
const OF_LUA: &str = "key-in-lua-6b21";
const OF_FORMAT: &str = "key-in-access-log-90fe";
const OF_TAG: &str = "tag-of-traces-41aa";
const OF_ISTIOD: &str = "header-for-istiod-5e11";
const OF_AUTHORITY: &str = "header-for-authority-a9d0";
const OF_PROXY: &str = "password-of-proxy-3b7f";
const OF_PROBE: &str = "header-of-probe-c04e";
const OF_METADATA: &str = "proxy-metadata-d2d6";
const OF_REGISTRY: &str = "dGVhbTpVKlUtOTI4MQ==";
/// The user `cart` and the password of the HTTP proxy, in base64.
const BASIC: &str = "Y2FydDpwYXNzd29yZC1vZi1wcm94eS0zYjdm";

/// Returns a listener with secrets in its routes and its access log.
fn listener(port: u16) -> Value {
    let mut listener = extended(answering("all", port), "http", "shop.plugin");
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    let header = |name: &str, value: &str| json!({ "key": name, "value": value });
    let routes = &mut manager["route_config"];
    routes["request_headers_to_add"] = json!([{ "header": header("authorization", OF_ROUTE) }]);
    routes["virtual_hosts"][0]["routes"][0]["match"]["headers"] =
        json!([{ "name": "x-api-key", "string_match": { "exact": OF_MATCH } }]);
    let service = json!({
        "envoy_grpc": { "cluster_name": "sds-grpc" },
        "initial_metadata": [header("x-tenant", OF_SERVICE)],
    });
    manager["tracing"] = json!({ "custom_tags": [{ "tag": "a", "literal": { "value": OF_TAG } }] });
    manager["http_filters"].as_array_mut().unwrap().insert(
        0,
        json!({
            "name": "envoy.filters.http.lua",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
                "default_source_code": { "inline_string": format!("-- {OF_LUA}") },
            },
        }),
    );
    manager["access_log"] = json!([{
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": "/dev/null",
            "log_format": { "text_format_source": { "inline_string": format!("{OF_FORMAT}\n") } },
        },
    }, {
        "name": "envoy.access_loggers.http_grpc",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            "common_config": {
                "log_name": "all", "transport_api_version": "V3", "grpc_service": service,
            },
        },
    }]);
    listener
}

/// Unpacks an archive with tar. Returns the contents of its files by name.
fn unpacked(archive: &Path, directory: &Path) -> BTreeMap<String, String> {
    let mut tar = Command::new("tar");
    tar.arg("xzf").arg(archive).arg("-C").arg(directory);
    assert!(tar.status().unwrap().success());
    let root = directory.join("support-bundle");
    let (mut files, mut folders) = (BTreeMap::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(&root).unwrap().display().to_string();
            files.insert(name, fs::read_to_string(path).unwrap());
        }
    }
    files
}

#[tokio::test]
async fn a_bundle_has_the_whole_pod_and_none_of_its_secrets() {
    let Some(binary) = envoy_binary() else { return };
    let listeners = [listener(free_port()), secured_listener("secured", free_port())];
    let control_plane = ControlPlane::of(&listeners).await;
    let pull = json!({ "auths": { "registry": { "auth": OF_REGISTRY } } }).to_string();
    let environment = [("ISTIO_META_WASM_IMAGE_PULL_SECRET", pull.as_str())];
    let url = "oci://registry/plugin:v1";
    control_plane.add(extension("http", "shop.plugin", url, "", &environment));
    let metadata = json!({ "proxyMetadata": { "LIGHT_TOKEN": OF_METADATA } }).to_string();
    let proxy = format!("http://cart:{OF_PROXY}@127.0.0.1:1");
    let probers = json!({ "/app-health/cart/livez": { "httpGet": {
        "path": "/", "port": 1, "httpHeaders": [{ "name": "X-Probe", "value": OF_PROBE }],
    }}});
    let settings = Settings {
        envoy: Some(&binary),
        environment: &[
            ("PROXY_CONFIG", &metadata),
            ("XDS_HEADER_X_TENANT", OF_ISTIOD),
            ("CA_HEADER_X_TENANT", OF_AUTHORITY),
            ("HTTPS_PROXY", &proxy),
            ("ISTIO_KUBE_APP_PROBERS", &probers.to_string()),
            ("OUTPUT_CERTS", "certs"),
            // Without the conversion, Envoy gets the pull secret.
            ("ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION", "false"),
        ],
    };
    let pod = Pod::start(settings, &control_plane);
    fs::create_dir(pod.path("certs")).unwrap();
    let key =
        eventually("a key", async || fs::read_to_string(pod.path("certs/key.pem")).ok()).await;
    let in_dump = [OF_ROUTE, OF_MATCH, OF_SERVICE, OF_METADATA, OF_LUA, OF_FORMAT, OF_TAG];
    eventually("a dump with the secrets", async || {
        let dump = ask(&pod.envoy, "/config_dump").await?;
        dump.contains("certificate_chain").then_some(())?;
        in_dump.iter().all(|secret| dump.contains(secret)).then_some(())
    })
    .await;
    // Envoy refuses the filter, and its error contains the filter with the pull secret.
    eventually("the refusal", async || {
        let page = pod.status(Method::GET, "/debug/xdsz").await?;
        (page.contains("\"nacks\":1") && pod.agent.log().contains(OF_REGISTRY)).then_some(())
    })
    .await;
    // The command runs without the agent's environment, so it cannot recognize secrets by the values of variables.
    let output = pod.command().arg("support-bundle").output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let archive = pod.path("bundle.tgz");
    fs::write(&archive, &output.stdout).unwrap();
    let mut files = unpacked(&archive, &pod.path("."));
    files.insert("messages".to_owned(), log);

    let token = control_plane.token();
    let token: Vec<_> = token.split('.').skip(1).collect();
    let key: Vec<_> = key.lines().filter(|line| !line.starts_with("---")).collect();
    let others = [OF_ISTIOD, OF_AUTHORITY, OF_PROXY, OF_PROBE, OF_REGISTRY, BASIC];
    for (name, text) in &files {
        for secret in [&in_dump[..], &others, &token, &key].concat() {
            assert!(!text.contains(secret), "{secret} in {name}:\n{text}");
        }
    }
    for (name, expected) in [
        ("versions.txt", "agent: 1.31.0"),
        ("doctor.txt", "configuration"),
        ("doctor.json", "\"groups\""),
        ("config.json", "\"value\": \"default:info,xdsproxy:debug\""),
        ("bootstrap/envoy-rev.json", "\"NAMESPACE\": \"shop\""),
        ("envoy/server_info.json", "\"state\""),
        ("envoy/listeners.json", "\"name\": \"all\""),
        ("envoy/clusters.json", "\"name\": \"xds-grpc\""),
        ("envoy/memory.json", "\"allocated\""),
        ("envoy/certs.json", "\"spiffe://cluster.local/ns/shop/sa/cart\""),
        ("envoy/stats.txt", "server.live: "),
        ("envoy/config_dump.json", "\"name\": \"all\""),
        ("envoy/config_dump.json", "\"stat_prefix\": "),
        ("envoy/config_dump.json", "\"name\": \"secured\""),
        ("doctor.txt", "[RESOURCE_REFUSED]"),
        ("left_out.json", "\"envoy/config_dump.json\": "),
        ("agent/overview.json", "\"start_up\""),
        ("agent/log.txt", "\tinfo\t"),
        ("agent/overview.json", "spiffe://cluster.local/ns/shop/sa/cart"),
        ("agent/overview.json", "\"acks\""),
        ("agent/metrics.txt", "istio_agent_build_info"),
        ("capture.txt", "$ iptables-save"),
    ] {
        let text = files.get(name).unwrap_or_else(|| panic!("no {name} in {files:?}"));
        assert!(text.contains(expected), "{expected} in {name}:\n{text}");
    }
    for (name, text) in files.iter().filter(|(name, _)| name.ends_with(".json")) {
        serde_json::from_str::<Value>(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    // The agent has no pages for DNS, Wasm and health checks, because the pod has none of these.
    let errors = files.get("errors.txt").into_iter();
    let errors = errors.flat_map(|errors| errors.lines());
    let others = errors.filter(|line| !line.ends_with("the answer is 404 Not Found"));
    assert_eq!(others.collect::<Vec<_>>(), [""; 0]);
}
