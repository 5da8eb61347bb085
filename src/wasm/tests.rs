//! Conversions with servers that come, go and change what they serve.

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

use super::fetch::fake_server::{Server, answer, ok, path};
use super::fetch::hexadecimal;
use super::*;

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
            request_limit: Duration::from_secs(5),
            attempts: 1,
            max_bytes: 100_000,
            credentials: Vec::new(),
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
    Agent {
        wasm,
        registry,
        running,
    }
}

/// A resource with a module.
#[derive(Clone)]
struct Plugin<'a> {
    name: &'a str,
    url: String,
    sha256: &'a str,
    environment: Vec<(&'a str, &'a str)>,
    seconds: i64,
}

fn plugin(url: impl Into<String>) -> Plugin<'static> {
    Plugin {
        name: "plugin",
        url: url.into(),
        sha256: "",
        environment: Vec::new(),
        seconds: 10,
    }
}

impl Plugin<'_> {
    fn resource(&self) -> Bytes {
        let uri = core::HttpUri {
            uri: self.url.clone(),
            timeout: Some(protobuf::Duration {
                seconds: self.seconds,
                nanos: 0,
            }),
            ..Default::default()
        };
        let remote = core::RemoteDataSource {
            http_uri: Some(uri),
            sha256: self.sha256.to_owned(),
            retry_policy: None,
        };
        let pairs = self.environment.iter();
        let key_values = pairs
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
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
        Plugin {
            environment,
            ..plugin(self.url)
        }
    }
}

fn resource(name: &str, type_url: &str, value: Vec<u8>) -> Bytes {
    let extension = core::TypedExtensionConfig {
        name: name.to_owned(),
        typed_config: Some(protobuf::Any {
            type_url: type_url.to_owned(),
            value,
        }),
    };
    let any = protobuf::Any {
        type_url: OUTER.to_owned(),
        value: extension.encode_to_vec(),
    };
    any.encode_to_vec().into()
}

impl Agent {
    /// The path of the module's file, or the prefix of the filter in its place.
    async fn convert(&self, plugin: &Plugin<'_>) -> String {
        let converted = self
            .wasm
            .convert(&[plugin.resource()])
            .await
            .expect("a response");
        shown(converted.resources[0].clone().expect("rewritten"))
    }

    async fn module(&self, plugin: &Plugin<'_>) -> Vec<u8> {
        let path = self.convert(plugin).await;
        std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn has_metric(&self, line: &str) -> bool {
        self.registry.render().lines().any(|found| found == line)
    }

    /// Ends it as a restart would.
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

const DENY: &str = "wasm-default-deny";

#[tokio::test]
async fn one_fetch_serves_all_resources_and_the_file_is_readable_by_envoy() {
    let server = Server::start(|_, _| ok(MODULE)).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let url = format!("http://{}/a", server.address);
    let names: Vec<_> = (0..20).map(|index| format!("plugin-{index}")).collect();
    let plugins = names.iter().map(|name| {
        Plugin {
            name,
            ..plugin(url.as_str())
        }
        .resource()
    });
    let rbac = resource("rbac", "type.googleapis.com/other", b"\xff".to_vec());
    let resources: Vec<_> = plugins.chain([rbac]).collect();
    let converted = agent.wasm.convert(&resources).await.expect("a response");
    let (rbac, wasm) = converted.resources.split_last().expect("resources");
    assert!(rbac.is_none() && converted.retry_at.is_none());
    let paths: Vec<_> = wasm
        .iter()
        .map(|resource| shown(resource.clone().expect("rewritten")))
        .collect();
    let expected = directory.path().join("data").join(sha256(url.as_bytes()));
    let expected = expected.join(format!("{}.wasm", sha256(MODULE)));
    assert!(
        paths.iter().all(|path| Path::new(path) == expected),
        "{paths:?}"
    );
    let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(
        (mode(&expected), mode(expected.parent().expect("a parent"))),
        (0o644, 0o755)
    );
    assert_eq!(server.heads().len(), 1);
    for line in [
        "istio_agent_wasm_config_conversion_count{result=\"success\"} 20",
        "istio_agent_wasm_config_conversion_count{result=\"no_remote_load\"} 1",
        "istio_agent_wasm_remote_fetch_count{result=\"success\"} 1",
        "istio_agent_wasm_cache_entries 1",
        "istio_agent_wasm_config_conversion_duration_count 1",
    ] {
        assert!(
            agent.has_metric(line),
            "{line}\n{}",
            agent.registry.render()
        );
    }
    assert_eq!(agent.wasm.snapshot().modules[0].resources.len(), 20);
}

#[tokio::test]
async fn a_module_outlives_a_restart_unless_its_file_was_changed() {
    let is_there = Arc::new(AtomicBool::new(true));
    let serves = is_there.clone();
    let server = Server::start(move |_, _| match serves.load(Ordering::Relaxed) {
        true => ok(MODULE),
        false => answer("404 No", "", b""),
    });
    let server = server.await;
    let directory = tempfile::tempdir().expect("a directory");
    let plugin = plugin(format!("http://{}/a", server.address));
    let agent = start(config(directory.path()));
    let path = agent.convert(&plugin).await;
    agent.stop().await;
    std::fs::write(directory.path().join("data/fetch-cut.tmp"), "part").expect("written");
    is_there.store(false, Ordering::Relaxed);
    let agent = start(config(directory.path()));
    assert_eq!(agent.module(&plugin).await, MODULE);
    assert!(!directory.path().join("data/fetch-cut.tmp").exists());
    // Changed while the agent runs, and while it does not.
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

/// A registry whose tags lead to the `served` one of two artifacts.
async fn registry(served: Arc<AtomicUsize>) -> Server {
    let manifest = |module: &[u8]| {
        let module = json!({
            "mediaType": "application/vnd.module.wasm.content.layer.v1+wasm",
            "digest": format!("sha256:{}", sha256(module)),
            "size": module.len(),
        });
        let config = json!({"mediaType": "x", "digest": "sha256:x"});
        json!({"schemaVersion": 2, "layers": [config, module]}).to_string()
    };
    Server::tls(move |head, _| {
        let modules = [MODULE, OTHER];
        let name = path(head).rsplit('/').next().unwrap_or_default();
        let blob = modules
            .iter()
            .find(|module| name == format!("sha256:{}", sha256(module)));
        match (blob, modules.get(served.load(Ordering::Relaxed))) {
            (Some(blob), _) => ok(blob),
            (None, Some(module)) => {
                let [first, second] = modules.map(manifest);
                let by_digest = [first, second].into_iter();
                let mut by_digest =
                    by_digest.filter(|it| name == format!("sha256:{}", sha256(it.as_bytes())));
                ok(by_digest
                    .next_back()
                    .unwrap_or_else(|| manifest(module))
                    .as_bytes())
            }
            (None, None) => answer("404 No", "", b""),
        }
    })
    .await
}

#[tokio::test]
async fn a_tag_that_moves_is_followed_as_its_pull_policy_says() {
    let served = Arc::new(AtomicUsize::new(0));
    let server = registry(served.clone()).await;
    // What is found with the same and with a new version after the tag has moved.
    for (tag, policy, same, newer) in [
        ("v1", "UNSPECIFIED_POLICY", MODULE, MODULE),
        ("v1", "IfNotPresent", MODULE, MODULE),
        ("v1", "Always", MODULE, OTHER),
        ("v1", "always", MODULE, MODULE),
        ("latest", "UNSPECIFIED_POLICY", MODULE, OTHER),
        ("latest", "IfNotPresent", MODULE, MODULE),
        ("latest", "Always", MODULE, OTHER),
    ] {
        served.store(0, Ordering::Relaxed);
        let directory = tempfile::tempdir().expect("a directory");
        let agent = start(config(directory.path()));
        let image = plugin(format!("oci://{}/plugin:{tag}", server.address));
        let at = |version| image.clone().versioned(policy, version);
        assert_eq!(agent.module(&at("1")).await, MODULE, "{tag} {policy}");
        served.store(1, Ordering::Relaxed);
        assert_eq!(agent.module(&at("1")).await, same, "{tag} {policy}");
        assert_eq!(agent.module(&at("2")).await, newer, "{tag} {policy}");
        // No registry is needed for what is known.
        served.store(2, Ordering::Relaxed);
        assert_eq!(agent.module(&at("2")).await, newer, "{tag} {policy}");
    }
}

#[tokio::test]
async fn a_pinned_image_needs_its_digest_and_a_blob_is_fetched_once() {
    let server = registry(Arc::default()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let image = |version: &str| format!("oci://{}/plugin{version}", server.address);
    let path = agent.convert(&plugin(image(":a"))).await;
    let digest = Path::new(&path)
        .file_stem()
        .expect("a name")
        .to_string_lossy()
        .into_owned();
    assert_eq!(agent.convert(&plugin(image(":b"))).await, path);
    let blobs = server
        .heads()
        .iter()
        .filter(|head| head.contains("/blobs/"))
        .count();
    assert_eq!(blobs, 1);
    let requests = server.heads().len();
    let pinned = Plugin {
        sha256: &digest,
        ..plugin(image(":c"))
    };
    assert_eq!(agent.convert(&pinned).await, path);
    assert_eq!(
        agent
            .convert(&plugin(image(&format!("@sha256:{digest}"))))
            .await,
        path
    );
    assert_eq!(server.heads().len(), requests);
    let wrong = "0".repeat(64);
    let wrong = Plugin {
        sha256: &wrong,
        ..plugin(image(":a"))
    };
    assert_eq!(agent.convert(&wrong).await, DENY);
    let failure = &agent.wasm.snapshot().failures[0];
    assert!(
        failure.error.contains("which does not match"),
        "{failure:?}"
    );
    assert!(
        agent.has_metric("istio_agent_wasm_remote_fetch_count{result=\"checksum_mismatched\"} 1")
    );
}

#[tokio::test]
async fn a_failed_fetch_is_repeated_after_its_wait_and_at_once_for_a_changed_object() {
    let is_there = Arc::new(AtomicBool::new(false));
    let serves = is_there.clone();
    let server = Server::start(move |_, _| match serves.load(Ordering::Relaxed) {
        true => ok(MODULE),
        false => answer("404 No", "", b""),
    });
    let server = server.await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let module = plugin(format!("http://{}/a", server.address)).versioned("", "1");
    let converted = agent
        .wasm
        .convert(&[module.resource()])
        .await
        .expect("a response");
    let retry_at = converted.retry_at.expect("a wait");
    assert_eq!(converted.missing, 1);
    is_there.store(true, Ordering::Relaxed);
    assert_eq!(agent.convert(&module).await, DENY);
    assert_eq!(server.heads().len(), 1);
    let changed = module.clone().versioned("", "2");
    assert_eq!(
        agent
            .module(&Plugin {
                name: "plugin",
                ..changed
            })
            .await,
        MODULE
    );
    assert!(agent.wasm.snapshot().failures.is_empty());
    assert!(retry_at > Instant::now());
}

#[tokio::test]
async fn a_fetch_ends_with_its_time_limit_and_with_the_agent() {
    let server = Server::start(|_, _| Vec::new()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let url = format!("http://{}/a", server.address);
    for (seconds, expected) in [
        (0, "not complete within 0ns"),
        (1, "not complete within 1s"),
    ] {
        let plugin = Plugin {
            seconds,
            ..plugin(format!("{url}?{seconds}"))
        };
        assert_eq!(agent.convert(&plugin).await, DENY);
        let failures = agent.wasm.snapshot().failures;
        assert!(failures[0].error.contains(expected), "{failures:?}");
        assert_eq!(failures[0].url, url);
    }
    let wasm = agent.wasm.clone();
    let mut waiting = JoinSet::new();
    waiting.spawn(async move {
        wasm.convert(&[plugin(url).resource()])
            .await
            .map(|it| it.missing)
    });
    while agent.wasm.snapshot().fetching.is_empty() {
        tokio::task::yield_now().await;
    }
    agent.stop().await;
    let ended = waiting.join_next().await.expect("a task");
    assert_eq!(ended.expect("an end"), Ok(1));
}

#[tokio::test]
async fn operators_may_require_digests_and_list_registries() {
    let server = registry(Arc::default()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let authority = server.address.to_string();
    for (allowed, requires_digest, path, is_fetched) in [
        (vec![], false, "/team/plugin:v1", true),
        (vec![], true, "/team/plugin:v1", false),
        (
            vec![format!("oci://{authority}/team/")],
            false,
            "/team/plugin:v1",
            true,
        ),
        (vec![authority.clone()], false, "/team/plugin:v1", true),
        (
            vec![format!("{authority}/te")],
            false,
            "/team/plugin:v1",
            false,
        ),
        (
            vec!["docker.io".to_owned()],
            false,
            "/team/plugin:v1",
            false,
        ),
    ] {
        let what = format!("{allowed:?} {requires_digest}");
        let agent = start(Config {
            allowed,
            requires_digest,
            ..config(directory.path())
        });
        let requests = server.heads().len();
        let found = agent
            .convert(&plugin(format!("oci://{authority}{path}")))
            .await;
        assert_eq!(found != DENY, is_fetched, "{what}: {found}");
        if !is_fetched {
            assert_eq!(server.heads().len(), requests);
        }
    }
    let source = |url: &str| fetch::Source::parse(url).expect("a URL");
    assert!(source("oci://docker.io/a/b").is_within("docker.io/a"));
    assert!(source("https://h/allowed/x").is_within("h/allowed"));
    for path in [
        "allowed/../x",
        "allowed/%2e%2e/x",
        "allowed/..%2fx",
        "allowedx",
    ] {
        assert!(
            !source(&format!("https://h/{path}")).is_within("h/allowed"),
            "{path}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn unused_modules_are_removed_and_a_url_forgets_what_it_led_to() {
    let served = Arc::new(AtomicUsize::new(0));
    let server = registry(served.clone()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let image = |tag: &str| plugin(format!("oci://{}/plugin:{tag}", server.address));
    let path = agent.convert(&image("a")).await;
    // A second URL leads to it by way of the cache.
    assert_eq!(
        agent
            .convert(&Plugin {
                name: "second",
                ..image("b")
            })
            .await,
        path
    );
    agent.wasm.modules.cache.clone().purge(Duration::ZERO).await;
    assert!(Path::new(&path).exists(), "a module in use stays");
    served.store(1, Ordering::Relaxed);
    for name in ["plugin", "second"] {
        agent.wasm.modules.cache.release(name);
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    agent.wasm.modules.cache.clone().purge(Duration::ZERO).await;
    assert!(!Path::new(&path).exists());
    assert!(!Path::new(&path).parent().expect("a directory").exists());
    for tag in ["a", "b"] {
        assert_eq!(
            agent.module(&image(tag)).await,
            OTHER,
            "the tag has moved meanwhile"
        );
    }
}

#[tokio::test]
async fn the_cache_stays_within_its_limit_but_for_what_is_in_use() {
    let body = |index: usize| [MODULE, &vec![index as u8; 400]].concat();
    let server = Server::start(move |head, _| ok(&body(path(head).len()))).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let module = |path: &str| plugin(format!("http://{}/{path}", server.address));
    let mut paths = Vec::new();
    for (name, path) in [
        ("used", "a"),
        ("changing", "bb"),
        ("changing", "ccc"),
        ("changing", "dddd"),
        ("changing", "eeeee"),
    ] {
        paths.push(
            agent
                .convert(&Plugin {
                    name,
                    ..module(path)
                })
                .await,
        );
    }
    let left: Vec<_> = paths.iter().map(|path| Path::new(path).exists()).collect();
    // The last but one was in use when the last was stored.
    assert_eq!(left, [true, false, false, true, true]);
}

#[tokio::test]
async fn a_response_with_resources_that_cannot_be_read_is_refused_with_all_reasons() {
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let broken = resource("broken", HTTP, b"\xff".to_vec());
    let one = agent
        .wasm
        .convert(std::slice::from_ref(&broken))
        .await
        .expect_err("refused");
    assert!(!one.contains("errors occurred"), "{one}");
    let two = agent
        .wasm
        .convert(&[broken.clone(), broken])
        .await
        .expect_err("refused");
    assert_eq!(two, format!("2 errors occurred:\n\t* {one}\n\t* {one}"));
    assert!(
        agent
            .has_metric("istio_agent_wasm_config_conversion_count{result=\"unmarshal_failure\"} 3")
    );
    // Nothing was needed on disk.
    assert!(!directory.path().join("data").exists());
}
