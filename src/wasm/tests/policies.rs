//! Checks which modules are fetched, stored and removed with pull policies, pins and rules of the operator.

use std::time::SystemTime;

use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Barrier;

use super::*;

fn manifest(module: &[u8]) -> String {
    let module = json!({
        "mediaType": "application/vnd.module.wasm.content.layer.v1+wasm",
        "digest": format!("sha256:{}", sha256(module)),
        "size": module.len(),
    });
    let config = json!({"mediaType": "x", "digest": "sha256:x"});
    json!({"schemaVersion": 2, "layers": [config, module]}).to_string()
}

/// Starts a registry with two images. Every tag names the image at the index `served`. If there is none, the registry
/// has no manifests.
async fn registry(served: Arc<AtomicUsize>) -> Server {
    Server::tls(move |head, _| {
        let modules = [MODULE, OTHER];
        let name = path(head).rsplit('/').next().unwrap_or_default();
        let blob = modules.iter().find(|module| name == format!("sha256:{}", sha256(module)));
        match (blob, modules.get(served.load(Ordering::Relaxed))) {
            (Some(blob), _) => ok(blob),
            (None, Some(module)) => {
                let [first, second] = modules.map(manifest);
                let by_digest = [first, second].into_iter();
                let mut by_digest =
                    by_digest.filter(|it| name == format!("sha256:{}", sha256(it.as_bytes())));
                ok(by_digest.next_back().unwrap_or_else(|| manifest(module)).as_bytes())
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
    // The module with the same and with a new resource version, after the tag has moved.
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
        // The registry no longer has the tag, and is not needed for a module that is known.
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
    let digest = sha256(manifest(MODULE).as_bytes());
    assert_eq!(agent.convert(&plugin(image(":b"))).await, path);
    let blobs = server.heads().iter().filter(|head| head.contains("/blobs/")).count();
    assert_eq!(blobs, 1);
    let requests = server.heads().len();
    let pinned = Plugin { sha256: &digest, ..plugin(image(":c")) };
    assert_eq!(agent.convert(&pinned).await, path);
    assert_eq!(agent.convert(&plugin(image(&format!("@sha256:{digest}")))).await, path);
    assert_eq!(server.heads().len(), requests);
    let wrong = "0".repeat(64);
    let wrong = Plugin { sha256: &wrong, ..plugin(image(":a")) };
    assert_eq!(agent.convert(&wrong).await, DENY);
    let failure = &agent.resources()[0];
    assert!(has(failure, "which does not match"), "{failure}");
    assert!(
        agent.has_metric("istio_agent_wasm_remote_fetch_count{result=\"checksum_mismatched\"} 1")
    );
}

#[tokio::test]
async fn operators_may_require_digests_and_list_registries() {
    let server = registry(Arc::default()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let authority = server.address.to_string();
    for (allowed, requires_digest, path, is_fetched) in [
        (vec![], false, "/team/plugin:v1", true),
        (vec![], true, "/team/plugin:v1", false),
        (vec![format!("oci://{authority}/team/")], false, "/team/plugin:v1", true),
        (vec![authority.clone()], false, "/team/plugin:v1", true),
        (vec![format!("{authority}/te")], false, "/team/plugin:v1", false),
        (vec!["docker.io".to_owned()], false, "/team/plugin:v1", false),
    ] {
        let what = format!("{allowed:?} {requires_digest}");
        let agent = start(Config { allowed, requires_digest, ..config(directory.path()) });
        let requests = server.heads().len();
        let found = agent.convert(&plugin(format!("oci://{authority}{path}"))).await;
        assert_eq!(found != DENY, is_fetched, "{what}: {found}");
        if !is_fetched {
            assert_eq!(server.heads().len(), requests);
        }
    }
    let source = |url: &str| fetch::Source::parse(url).expect("a URL");
    assert!(source("oci://docker.io/a/b").is_within("docker.io/a"));
    assert!(source("https://h/allowed/x").is_within("h/allowed"));
    for path in ["allowed/../x", "allowed/%2e%2e/x", "allowed/..%2fx", "allowedx"] {
        assert!(!source(&format!("https://h/{path}")).is_within("h/allowed"), "{path}");
    }
}

/// Sets the time of a file's last use to this long ago.
fn age(path: &str, age: Duration) {
    let file = std::fs::File::open(path).expect("a file");
    let time = SystemTime::now() - age;
    file.set_modified(time).expect("its time");
}

#[tokio::test]
async fn modules_of_resources_that_are_removed_in_delta_are_removed() {
    let server = Server::start(|head, _| ok(&[MODULE, path(head).as_bytes()].concat())).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let mut paths = Vec::new();
    for name in ["one", "two"] {
        let url = format!("http://{}/{name}", server.address);
        let path = agent.convert(&Plugin { name, ..plugin(url) }).await;
        age(&path, Duration::from_secs(24 * 3600));
        paths.push(path);
    }
    let is_left = || paths.iter().map(|path| Path::new(path).exists());
    agent.wasm.forget(b"three");
    agent.wasm.0.tidy().await;
    assert!(is_left().eq([true, true]));
    agent.wasm.forget(b"one");
    agent.wasm.0.tidy().await;
    assert!(is_left().eq([false, true]));
}

#[tokio::test]
async fn modules_without_a_resource_are_deleted_and_their_urls_are_fetched_again() {
    let served = Arc::new(AtomicUsize::new(0));
    let server = registry(served.clone()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let image = |tag: &str| plugin(format!("oci://{}/plugin:{tag}", server.address));
    let path = agent.convert(&image("a")).await;
    // The second URL has the same module; in the cache, it is a second link to the file.
    let second = Plugin { name: "second", ..image("b") };
    assert_eq!(agent.convert(&second).await, path);
    let day = Duration::from_secs(24 * 3600);
    let left = directory.path().join("data/fetch-cut.tmp");
    std::fs::write(&left, "part").expect("written");
    age(&path, day);
    age(left.to_str().expect("a path"), day);
    agent.wasm.0.tidy().await;
    assert!(Path::new(&path).exists() && !left.exists());
    // A complete response without the plugins removes them.
    let rbac = resource("rbac", "type.googleapis.com/other", Vec::new());
    agent.wasm.convert(&[rbac], true).await.expect("a response");
    assert!(agent.resources().is_empty());
    served.store(1, Ordering::Relaxed);
    agent.wasm.0.tidy().await;
    assert!(!Path::new(&path).exists());
    agent.wasm.0.tidy().await;
    let left = std::fs::read_dir(directory.path().join("data")).expect("a directory");
    assert_eq!(left.count(), 0, "links lead nowhere");
    for tag in ["a", "b"] {
        let found = agent.module(&image(tag)).await;
        assert_eq!(found, OTHER, "the tag has moved meanwhile");
    }
}

#[tokio::test]
async fn the_cache_exceeds_its_limit_only_for_modules_in_use() {
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
        let plugin = Plugin { name, ..module(path) };
        paths.push(agent.convert(&plugin).await);
    }
    let left: Vec<_> = paths.iter().map(|path| Path::new(path).exists()).collect();
    // The last but one module was still in use when the last one was stored.
    assert_eq!(left, [true, false, false, true, true]);
}

#[tokio::test]
async fn a_bounded_number_of_resources_is_remembered() {
    let server = Server::start(|_, _| ok(MODULE)).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let url = format!("http://{}/a", server.address);
    for index in 0..=MAX_RESOURCES {
        let name = &format!("plugin-{index}");
        let named = Plugin { name, ..plugin(url.as_str()) };
        agent.convert(&named).await;
    }
    let resources = agent.resources();
    assert_eq!(resources.len(), MAX_RESOURCES);
    assert_eq!(resources[0]["name"], "plugin-1", "the oldest is forgotten");
    assert_eq!(server.heads().len(), 1);
}

#[tokio::test]
async fn a_url_that_contains_a_digest_does_not_share_a_pinned_module() {
    let server = Server::start(|_, _| ok(MODULE)).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let (url, digest) = (format!("http://{}/a", server.address), sha256(OTHER));
    for url in [format!("{url}@{digest}"), format!("{digest} {url}")] {
        agent.convert(&plugin(url)).await;
        let pinned = Plugin { sha256: &digest, ..plugin(format!("http://{}/a", server.address)) };
        assert_eq!(agent.convert(&pinned).await, DENY);
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_happens_on_disk_at_start_and_a_hanging_disk_is_abandoned() {
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("data");
    std::fs::create_dir(&data).expect("a directory");
    let left = data.join("fetch-cut.tmp");
    std::fs::File::create(&left)
        .and_then(|file| file.set_modified(std::time::UNIX_EPOCH))
        .expect("a file");
    let agent = start(config(directory.path()));
    assert!(left.exists(), "nothing was looked at");
    agent.wasm.0.tidy().await;
    assert!(!left.exists());
    // Holds the lock of the cache, as a thread does that waits for the disk.
    let _hangs = agent.wasm.0.cache.clone().lock_owned().await;
    assert_eq!(agent.convert(&plugin("http://127.0.0.1:9/a")).await, DENY);
}

#[tokio::test]
async fn a_redirect_target_must_match_the_digest_but_not_the_allow_list() {
    let elsewhere = Server::start(|_, _| ok(MODULE)).await;
    let direct = format!("http://{}/m", elsewhere.address);
    let location = format!("location: {direct}\r\n");
    let server = Server::start(move |_, _| answer("302 Found", &location, b"")).await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent =
        start(Config { allowed: vec![server.address.to_string()], ..config(directory.path()) });
    let redirected = plugin(format!("http://{}/a", server.address));
    assert_eq!(agent.module(&redirected).await, MODULE);
    assert_eq!(agent.convert(&plugin(direct)).await, DENY);
    let other = sha256(OTHER);
    let pinned = Plugin { sha256: &other, ..redirected };
    assert_eq!(agent.convert(&pinned).await, DENY);
    assert_eq!(elsewhere.heads().len(), 2);
}

#[tokio::test]
async fn four_modules_are_fetched_at_a_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let most = Arc::new(AtomicUsize::new(0));
    let seen = most.clone();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let (open, four) = (AtomicUsize::new(0), Barrier::new(4));
        let accepted = futures_util::stream::poll_fn(|context| {
            listener.poll_accept(context).map(|found| found.ok())
        });
        let answers = accepted.for_each_concurrent(None, |(mut stream, _)| {
            let (open, four, seen) = (&open, &four, &seen);
            async move {
                seen.fetch_max(open.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                // If the agent fetched five modules at a time, the fifth connection would arrive during the pause.
                four.wait().await;
                tokio::time::sleep(Duration::from_millis(50)).await;
                open.fetch_sub(1, Ordering::Relaxed);
                stream.read_u8().await.expect("a request");
                stream.write_all(&ok(MODULE)).await.expect("written");
            }
        });
        answers.await;
    });
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let names: Vec<_> = (0..8).map(|index| format!("plugin-{index}")).collect();
    let resources = names.iter().map(|name| {
        let module = plugin(format!("http://{address}/{name}"));
        Plugin { name, ..module }.resource()
    });
    let resources: Vec<_> = resources.collect();
    let converted = agent.wasm.convert(&resources, true).await.expect("a response");
    assert_eq!((converted.retryable, most.load(Ordering::Relaxed)), (0, 4));
}

#[tokio::test]
async fn a_filter_without_its_module_is_reported_until_it_has_one() {
    let server = Server::start(|_, count| match count {
        0 => answer("404 Not Found", "", b""),
        _ => ok(MODULE),
    })
    .await;
    let directory = tempfile::tempdir().expect("a directory");
    let agent = start(config(directory.path()));
    let url = format!("http://user:hunter2@{}/a", server.address);
    let missing = plugin(url.clone());
    let codes = || {
        let missing = agent.wasm.missing_modules().into_iter();
        missing.map(|(_, problem)| problem.code).collect::<Vec<_>>()
    };
    assert_eq!(agent.convert(&missing).await, DENY);
    assert_eq!(codes(), [Code::WasmDownloadFailed]);
    let text = agent.wasm.missing_modules()[0].1.to_string();
    assert!(text.contains("status code 404") && !text.contains("hunter2"), "{text}");
    let other = plugin(url + "?other");
    assert_eq!(agent.module(&other).await, MODULE);
    assert!(codes().is_empty());
    let none = Plugin { name: "none", ..plugin("ftp://host/a") };
    assert_eq!(agent.convert(&none).await, DENY);
    assert_eq!(codes(), [Code::WasmConfiguration]);
    agent.wasm.forget(b"none");
    assert!(codes().is_empty());
    assert_eq!(agent.convert(&none).await, DENY);
    let without_module = resource("none", "type.googleapis.com/any", Vec::new());
    let converted = agent.wasm.convert(&[without_module], false).await;
    assert_eq!(converted.expect("a response").resources, [None]);
    assert!(codes().is_empty());
}
