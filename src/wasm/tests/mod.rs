//! Tests conversions while servers fail, recover and change the modules that they serve.

mod policies;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use envoy_types::pb::envoy::config::core::v3 as core;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3 as http_wasm;
use envoy_types::pb::envoy::extensions::wasm::v3 as plugin;
use envoy_types::pb::google::protobuf;
use prost::Message;
use serde_json::json;
use tokio::task::JoinSet;

use super::fetch::download::hexadecimal;
use super::fetch::fake_server::{Server, answer, ok, path};
use super::*;
use crate::trust::trust_anchors::SystemRoots;

const OUTER: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const HTTP: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const MODULE: &[u8] = b"\0asm\x01\0\0\0one";
const OTHER: &[u8] = b"\0asm\x01\0\0\0other";

struct Agent {
    wasm: Wasm,
    registry: Registry,
    running: JoinSet<()>,
}

fn config(directory: &Path) -> Config {
    Config {
        directory: directory.join("data"),
        fetch: FetchConfig {
            insecure: vec!["*".to_owned()],
            blocked: Vec::new(),
            proxies: Default::default(),
            request_limit: Duration::from_secs(5),
            attempts: 1,
            max_bytes: 100_000,
            credentials: Vec::new(),
            roots: SystemRoots::new("", ""),
        },
        expiry: Duration::from_secs(3600),
        purge_interval: Duration::from_secs(3600),
        max_cache_bytes: 1000,
        requires_digest: false,
        allowed: Vec::new(),
    }
}

fn start(config: Config) -> Agent {
    let registry = Registry::default();
    let (wasm, purging) = Wasm::new(config, &registry);
    let mut running = JoinSet::new();
    running.spawn(purging);
    Agent { wasm, registry, running }
}

/// The parameters of a resource with a remote module.
#[derive(Clone)]
struct Plugin<'a> {
    name: &'a str,
    url: String,
    sha256: &'a str,
    environment: Vec<(&'a str, &'a str)>,
    seconds: i64,
}

fn plugin(url: impl Into<String>) -> Plugin<'static> {
    Plugin { name: "plugin", url: url.into(), sha256: "", environment: Vec::new(), seconds: 10 }
}

impl Plugin<'_> {
    fn resource(&self) -> Bytes {
        let uri = core::HttpUri {
            uri: self.url.clone(),
            timeout: Some(protobuf::Duration { seconds: self.seconds, nanos: 0 }),
            ..Default::default()
        };
        let remote = core::RemoteDataSource {
            http_uri: Some(uri),
            sha256: self.sha256.to_owned(),
            retry_policy: None,
        };
        let pairs = self.environment.iter();
        let key_values = pairs.map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let vm = plugin::VmConfig {
            code: Some(core::AsyncDataSource {
                specifier: Some(core::async_data_source::Specifier::Remote(remote)),
            }),
            environment_variables: Some(plugin::EnvironmentVariables {
                key_values,
                ..Default::default()
            }),
            ..Default::default()
        };
        let wasm = http_wasm::Wasm {
            config: Some(plugin::PluginConfig {
                vm: Some(plugin::plugin_config::Vm::VmConfig(vm)),
                ..Default::default()
            }),
        };
        resource(self.name, HTTP, wasm.encode_to_vec())
    }

    fn versioned(self, policy: &'static str, version: &'static str) -> Plugin<'static> {
        let environment = vec![
            ("ISTIO_META_WASM_IMAGE_PULL_POLICY", policy),
            ("ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION", version),
        ];
        Plugin { environment, ..plugin(self.url) }
    }
}

fn resource(name: &str, type_url: &str, value: Vec<u8>) -> Bytes {
    let extension = core::TypedExtensionConfig {
        name: name.to_owned(),
        typed_config: Some(protobuf::Any { type_url: type_url.to_owned(), value }),
    };
    let any = protobuf::Any { type_url: OUTER.to_owned(), value: extension.encode_to_vec() };
    any.encode_to_vec().into()
}

impl Agent {
    /// Converts the resource of `plugin`. Returns the path of the module's file, or the statistics prefix of the filter
    /// that replaces the plugin.
    async fn convert(&self, plugin: &Plugin<'_>) -> String {
        let converted = self.wasm.convert(&[plugin.resource()], false).await.expect("a response");
        shown(converted.resources[0].clone().expect("rewritten"))
    }

    async fn module(&self, plugin: &Plugin<'_>) -> Vec<u8> {
        let path = self.convert(plugin).await;
        std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn resources(&self) -> Vec<Value> {
        let mut snapshot = self.wasm.snapshot();
        let resources = snapshot["resources"].as_array_mut();
        std::mem::take(resources.expect("a list"))
    }

    fn has_metric(&self, line: &str) -> bool {
        self.registry.render().lines().any(|found| found == line)
    }

    /// Ends the agent as a restart would.
    async fn stop(mut self) {
        self.running.shutdown().await;
    }
}

fn shown(resource: Bytes) -> String {
    let any = protobuf::Any::decode(resource).expect("an Any");
    let extension = core::TypedExtensionConfig::decode(&*any.value).expect("an extension");
    let config = extension.typed_config.expect("a config");
    if config.type_url != HTTP {
        let text = String::from_utf8_lossy(&config.value).into_owned();
        return text[text.find("wasm").expect("a prefix")..].to_owned();
    }
    let wasm = http_wasm::Wasm::decode(&*config.value).expect("Wasm");
    let Some(plugin::plugin_config::Vm::VmConfig(vm)) = wasm.config.and_then(|it| it.vm) else {
        panic!("no VM");
    };
    let Some(core::async_data_source::Specifier::Local(local)) =
        vm.code.and_then(|it| it.specifier)
    else {
        panic!("no local code");
    };
    match local.specifier {
        Some(core::data_source::Specifier::Filename(path)) => path,
        other => panic!("{other:?}"),
    }
}

fn sha256(bytes: &[u8]) -> String {
    hexadecimal(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref())
}

/// Returns true if the error of a resource contains this text.
fn has(resource: &Value, problem: &str) -> bool {
    let error = resource["error"].as_str();
    error.is_some_and(|error| error.contains(problem))
}

const DENY: &str = "wasm-default-deny";

#[tokio::test]
async fn one_fetch_serves_all_resources_and_the_file_is_readable_by_envoy() {
    let server = Server::start(|_, _| ok(MODULE)).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let url = format!("http://{}/a", server.address);
    let names: Vec<_> = (0..20).map(|index| format!("plugin-{index}")).collect();
    let plugins = names.iter().map(|name| Plugin { name, ..plugin(url.as_str()) }.resource());
    let rbac = resource("rbac", "type.googleapis.com/other", b"\xff".to_vec());
    let resources: Vec<_> = plugins.chain([rbac]).collect();
    let converted = agent.wasm.convert(&resources, true).await.expect("a response");
    let (rbac, wasm) = converted.resources.split_last().expect("resources");
    assert!(rbac.is_none() && converted.retry_at.is_none());
    let paths: Vec<_> =
        wasm.iter().map(|resource| shown(resource.clone().expect("rewritten"))).collect();
    let expected = directory.path().join("data");
    let expected = expected.join(format!("{}.wasm", sha256(MODULE)));
    assert!(paths.iter().all(|path| Path::new(path) == expected), "{paths:?}");
    let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!((mode(&expected), mode(expected.parent().expect("a parent"))), (0o644, 0o755));
    assert_eq!(server.heads().len(), 1);
    for line in [
        "istio_agent_wasm_config_conversion_count{result=\"success\"} 20",
        "istio_agent_wasm_config_conversion_count{result=\"no_remote_load\"} 1",
        "istio_agent_wasm_remote_fetch_count{result=\"success\"} 1",
        "istio_agent_wasm_cache_entries 1",
        "istio_agent_wasm_config_conversion_duration_count 1",
    ] {
        assert!(agent.has_metric(line), "{line}\n{}", agent.registry.render());
    }
    assert_eq!(agent.resources().len(), 20);
}

#[tokio::test]
async fn a_module_outlives_a_restart_unless_its_file_was_changed() {
    let is_there = Arc::new(AtomicBool::new(true));
    let serves = is_there.clone();
    let server = Server::start(move |_, _| {
        if serves.load(Ordering::Relaxed) {
            return ok(MODULE);
        }
        answer("404 No", "", b"")
    });
    let server = server.await;
    let directory = tempfile::tempdir().expect("a directory");
    let plugin = plugin(format!("http://{}/a", server.address));
    let agent = start(config(directory.path()));
    let path = agent.convert(&plugin).await;
    agent.stop().await;
    is_there.store(false, Ordering::Relaxed);
    let agent = start(config(directory.path()));
    assert_eq!(agent.module(&plugin).await, MODULE);
    // The module's file is changed while the agent runs, and later while no agent runs.
    std::fs::write(&path, OTHER).expect("written");
    assert_eq!(agent.convert(&plugin).await, DENY);
    assert!(!Path::new(&path).exists());
    is_there.store(true, Ordering::Relaxed);
    agent.stop().await;
    let agent = start(config(directory.path()));
    assert_eq!(agent.module(&plugin).await, MODULE);
    agent.stop().await;
    std::fs::write(&path, OTHER).expect("written");
    let agent = start(config(directory.path()));
    assert_eq!(agent.module(&plugin).await, MODULE);
    assert_eq!(server.heads().len(), 4);
}

#[tokio::test]
async fn a_failed_fetch_is_repeated_after_a_wait_or_a_change() {
    let is_there = Arc::new(AtomicBool::new(false));
    let serves = is_there.clone();
    let server = Server::start(move |_, _| {
        if serves.load(Ordering::Relaxed) {
            return ok(MODULE);
        }
        answer("404 No", "", b"")
    });
    let server = server.await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let module = plugin(format!("http://{}/a", server.address)).versioned("", "1");
    let converted = agent.wasm.convert(&[module.resource()], true).await.expect("a response");
    let retry_at = converted.retry_at.expect("a wait");
    assert_eq!(converted.retryable, 1);
    is_there.store(true, Ordering::Relaxed);
    assert_eq!(agent.convert(&module).await, DENY);
    assert_eq!(server.heads().len(), 1);
    let changed = module.clone().versioned("", "2");
    assert_eq!(agent.module(&changed).await, MODULE);
    assert!(agent.resources()[0]["error"].is_null());
    assert!(retry_at > Instant::now());
}

#[tokio::test]
async fn a_fetch_ends_with_its_time_limit_and_with_the_agent() {
    let server = Server::start(|_, _| Vec::new()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let url = format!("http://{}/a", server.address);
    for (seconds, expected) in [(0, "not complete within 0 ms"), (1, "not complete within 1.0 s")] {
        let plugin = Plugin { seconds, ..plugin(format!("{url}?{seconds}")) };
        assert_eq!(agent.convert(&plugin).await, DENY);
        let failure = &agent.resources()[0];
        assert!(has(failure, expected), "{failure}");
        assert_eq!(failure["url"], url);
    }
    let wasm = agent.wasm.clone();
    let mut waiting = JoinSet::new();
    waiting.spawn(async move {
        wasm.convert(&[plugin(url).resource()], true).await.map(|it| it.retryable)
    });
    while agent.wasm.snapshot()["fetching"] == json!([]) {
        tokio::task::yield_now().await;
    }
    agent.stop().await;
    let ended = waiting.join_next().await.expect("a task");
    assert_eq!(ended.expect("an end").ok(), Some(1));
}

#[tokio::test]
async fn a_response_with_unreadable_resources_is_refused_with_all_reasons() {
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let broken = resource("broken", HTTP, b"\xff".to_vec());
    let one = agent.wasm.convert(std::slice::from_ref(&broken), true).await.expect_err("refused");
    let two = agent.wasm.convert(&[broken.clone(), broken], true).await.expect_err("refused");
    assert_eq!(two.to_string(), format!("{one}\n{one}"));
    assert!(
        agent
            .has_metric("istio_agent_wasm_config_conversion_count{result=\"unmarshal_failure\"} 3")
    );
    // The agent has not created its directory, because it had no module to store.
    assert!(!directory.path().join("data").exists());
}
