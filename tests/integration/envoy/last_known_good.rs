//! Tests that an Envoy that starts while the control plane is unreachable gets the configuration that the
//! previous agent has stored.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse,
};
use http::Method;
use istio_agent::xds::Protocol;
use prost::Message as _;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;

use crate::support::control_plane::ControlPlane;
use crate::support::envoy::Envoy;
use crate::support::http::{Backend, Fresh, Lasting, Load, get, header};
use crate::support::names::name_table;
use crate::support::namespace::{has, is_inside, run};
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::{Process, is_alive};
use crate::support::programs::envoy_binary;
use crate::support::resources::{
    answering, cluster, endpoints, listener, logged, routes, secured, secured_listener,
};
use crate::support::{eventually, free_port, local, until};

const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

/// Creates a directory in memory, because certificates must not be stored on a disk.
fn memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

struct Workload {
    pod: Pod,
    _store: TempDir,
}

/// Starts a pod that stores configuration and certificates.
async fn workload(binary: &Path, control_plane: &ControlPlane) -> Workload {
    workload_with(binary, control_plane, "5s").await
}

/// Starts a pod whose Envoy gets the stored configuration `after` this time without a response of istiod.
async fn workload_with(binary: &Path, control_plane: &ControlPlane, after: &str) -> Workload {
    workload_of(binary, control_plane, &[("ISTIO_AGENT_KEEP_CONFIG_AFTER", after)]).await
}

/// Starts a pod that stores configuration and certificates, with more variables.
async fn workload_of(
    binary: &Path,
    control_plane: &ControlPlane,
    more: &[(&str, &str)],
) -> Workload {
    let store = memory();
    let directory = store.path().to_str().unwrap();
    let dns = format!("127.0.0.1:{}", free_port());
    let environment = [
        ("ISTIO_AGENT_KEEP_CONFIG", directory),
        ("ISTIO_AGENT_KEEP_CERTS", directory),
        ("ISTIO_META_DNS_CAPTURE", "true"),
        ("DNS_PROXY_ADDR", &dns),
    ];
    let settings = Settings { envoy: Some(binary), environment: &[&environment, more].concat() };
    let pod = Pod::serving(settings, control_plane).await;
    Workload { pod, _store: store }
}

async fn wait_for_mark(port: u16, mark: &str) {
    eventually("a route in force", async || {
        let head = get(port).await.ok()?;
        (header(&head, "x-mark") == Some(mark)).then_some(())
    })
    .await;
}

pub(super) async fn xdsz(pod: &Pod) -> Option<Value> {
    serde_json::from_str(&pod.status(Method::GET, "/debug/xdsz").await?).ok()
}

/// Waits until these types are stored.
pub(super) async fn wait_until_stored(pod: &Pod, types: &[&str]) {
    eventually("what is kept", async || {
        let kept = xdsz(pod).await?["kept"].clone();
        let has = |name: &&str| kept.as_object()?.keys().find(|it| it.ends_with(*name)).map(drop);
        types.iter().map(has).collect::<Option<()>>()
    })
    .await;
}

async fn source(pod: &Pod) -> Value {
    let found = eventually("a stream", async || {
        let stream = xdsz(pod).await?["stream"].clone();
        (!stream.is_null()).then_some(stream)
    });
    found.await["source"].clone()
}

/// Returns the configuration that Envoy has got by discovery, without the times of the updates.
async fn configuration(pod: &Pod) -> Vec<Value> {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(members) => {
                members.remove("last_updated");
                members.values_mut().for_each(strip);
            }
            Value::Array(items) => {
                items.iter_mut().for_each(strip);
                items.sort_by_cached_key(Value::to_string);
            }
            _ => {}
        }
    }
    let dump = async || ask(&pod.envoy, "/config_dump?include_eds").await;
    let dump = eventually("a dump of the configuration", dump).await;
    let mut dump: Value = serde_json::from_str(&dump).unwrap();
    let dumps = dump["configs"].as_array_mut().unwrap();
    let is_dynamic = |dump: &Value| {
        let kind = dump["@type"].as_str().unwrap();
        ["Clusters", "Listeners", "Routes", "Endpoints"]
            .iter()
            .any(|it| kind.ends_with(&format!("{it}ConfigDump")))
    };
    let mut dumps: Vec<_> = dumps.drain(..).filter(is_dynamic).collect();
    dumps.iter_mut().for_each(strip);
    dumps
}

/// Returns the configuration of a client that sends its requests to the port of a server; `mark` appears in
/// each response.
fn client(port: u16, server: u16, mark: &str) -> Vec<Value> {
    vec![
        secured(cluster("server")),
        endpoints("server", &[server]),
        listener("client", port, "all"),
        routes("all", "server", mark),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workloads_start_without_a_control_plane() {
    let Some(binary) = envoy_binary() else { return };
    let (port, tls_port) = (free_port(), free_port());
    let server_istiod = ControlPlane::of(&[secured_listener("server", tls_port)]).await;
    let client_istiod = ControlPlane::of(&client(port, tls_port, "0")).await.kill().await;
    let client_istiod = client_istiod.replace(server_istiod.keys.clone()).await;
    client_istiod.add(name_table("shop", &[("books", &["10.1.2.3"])]));
    let mut server = workload_with(&binary, &server_istiod, "0s").await;
    let mut client_pod = workload(&binary, &client_istiod).await;
    wait_for_mark(port, "0").await;
    wait_until_stored(&server.pod, &["Listener", "Cluster"]).await;
    let types = ["Listener", "Cluster", "ClusterLoadAssignment", "RouteConfiguration", "NameTable"];
    wait_until_stored(&client_pod.pod, &types).await;
    let before = configuration(&client_pod.pod).await;
    assert_eq!(source(&client_pod.pod).await, "istiod");

    let (server_istiod, client_istiod) = (server_istiod.kill().await, client_istiod.kill().await);
    server.pod.kill_and_restart(|| ()).await;
    client_pod.pod.kill_and_restart(|| ()).await;
    let started = Instant::now();
    wait_for_mark(port, "0").await;
    let took = started.elapsed();
    assert!(took <= Duration::from_secs(8), "{took:?}");
    assert_eq!(source(&client_pod.pod).await, "kept");
    assert_eq!(configuration(&client_pod.pod).await, before);
    let names = client_pod.pod.status(Method::GET, "/debug/ndsz").await.unwrap();
    assert!(names.contains("10.1.2.3"), "{names}");
    client_pod.pod.serves().await;

    let load = Load::default().with(Fresh(port)).with(Lasting::new(port));
    client_istiod.set(&client(port, tls_port, "1")).await;
    let _server_istiod = server_istiod.revive().await;
    let client_istiod = client_istiod.revive().await;
    let returned = Instant::now();
    wait_for_mark(port, "1").await;
    let took = returned.elapsed();
    assert!(took <= Duration::from_secs(5), "{took:?}");
    assert_eq!(source(&client_pod.pod).await, "istiod");
    client_istiod.set(&client(port, tls_port, "2")).await;
    wait_for_mark(port, "2").await;
    load.assert_flawless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_annotated_after_its_start_is_served_another_node_is_not() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let control_plane = ControlPlane::of(&[answering("answering", port)]).await;
    let mut workload = workload(&binary, &control_plane).await;
    let describe = |pod: &Pod, annotations: &str, labels: &str| {
        fs::create_dir_all(pod.path("etc/istio/pod")).unwrap();
        pod.replace("etc/istio/pod/annotations", annotations);
        pod.replace("etc/istio/pod/labels", labels);
    };
    // The first agent has stored it for a node without files of labels and annotations.
    wait_until_stored(&workload.pod, &["Listener", "Cluster"]).await;
    describe(&workload.pod, "a=\"b\"", "app=\"cart\"");
    workload.pod.kill_and_restart(|| ()).await;
    eventually("an answer", async || get(port).await.ok()).await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster"]).await;
    let _dead = control_plane.kill().await;
    let calico = "a=\"b\"\ncni.projectcalico.org/podIP=\"10.3.3.3/32\"";
    describe(&workload.pod, calico, "app=\"cart\"\ntier=\"back\"");
    workload.pod.kill_and_restart(|| ()).await;
    eventually("an answer", async || get(port).await.ok()).await;
    // Configuration of another node is not served, and stays.
    workload.pod.kill().await;
    workload.pod.restart(&[("ISTIO_META_MESH_ID", "other")]);
    until("attempts in twice the time after which it would be served", || {
        let log = workload.pod.agent.log();
        log.matches("failed to connect to upstream").count() >= 8
    })
    .await;
    get(port).await.unwrap_err();
    let kept = workload._store.path().join("istio-agent-config/configuration");
    assert!(kept.exists());
}

/// Returns a cluster whose name no server resolves, so that Envoy asks for listeners seconds after it has got clusters.
fn slow_cluster(resolver: &std::net::UdpSocket) -> Value {
    let port = resolver.local_addr().unwrap().port();
    let address = |address: &str, port| json!({ "socket_address": { "address": address, "port_value": port } });
    let endpoint = json!({ "endpoint": { "address": address("slow.test", 1) } });
    json!({
        "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
        "name": "slow",
        "type": "STRICT_DNS",
        "load_assignment": {
            "cluster_name": "slow",
            "endpoints": [{ "lb_endpoints": [endpoint] }],
        },
        "typed_dns_resolver_config": {
            "name": "envoy.network.dns_resolver.cares",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
                "resolvers": [address("127.0.0.1", port)],
                "query_timeout_seconds": 4,
                "query_tries": 1,
            },
        },
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_envoy_slow_between_two_types_gets_all_on_one_stream() {
    let Some(binary) = envoy_binary() else { return };
    let (port, resolver) = (free_port(), std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
    let resources = [slow_cluster(&resolver), answering("answering", port)];
    let control_plane = ControlPlane::of(&resources).await;
    let mut workload = workload_with(&binary, &control_plane, "1s").await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster"]).await;
    let dead = control_plane.kill().await;
    workload.pod.kill_and_restart(|| ()).await;
    eventually("an answer", async || get(port).await.ok()).await;
    let metrics = workload.pod.status(Method::GET, "/stats/prometheus").await.unwrap();
    assert!(metrics.contains("istio_agent_xds_kept_served_total 1\n"), "{metrics}");

    // istiod that answers while Envoy resolves the name ends the stream.
    workload.pod.kill_and_restart(|| ()).await;
    workload.pod.agent.logs("Envoy is served the configuration it had").await;
    let _control_plane = dead.revive().await;
    workload.pod.agent.logs("istiod answers; Envoy's next stream goes to istiod").await;
    eventually("an answer", async || get(port).await.ok()).await;
    assert_eq!(source(&workload.pod).await, "istiod");
}

/// Returns a stream of a client that claims to be an Envoy with another node, after it has accepted a response.
async fn claimed_envoy(pod: &Pod) -> Envoy {
    let mut client = Envoy::open(&pod.path("etc/istio/proxy/XDS"), Protocol::Delta).await;
    let node = Node {
        id: "sidecar~10.0.0.9~other.shop~shop.svc.cluster.local".to_owned(),
        ..Default::default()
    };
    let mut request = DeltaDiscoveryRequest {
        node: Some(node),
        type_url: LISTENER.to_owned(),
        ..Default::default()
    };
    client.send(&request);
    let response = DeltaDiscoveryResponse::decode(client.next_bytes().await).unwrap();
    (request.node, request.response_nonce) = (None, response.nonce);
    client.send(&request);
    client
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_envoys_header_neither_stores_configuration_nor_ends_the_recording() {
    let Some(binary) = envoy_binary() else { return };
    let [port, new] = [free_port(), free_port()];
    let control_plane = ControlPlane::of(&[answering("answering", port)]).await;
    let mut workload = workload(&binary, &control_plane).await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster"]).await;
    let client = claimed_envoy(&workload.pod).await;
    control_plane.set(&[answering("answering", port), answering("new", new)]).await;
    eventually("an answer", async || get(new).await.ok()).await;
    drop(client);
    let log = workload.pod.agent.log();
    assert!(!log.contains("overlapping stream"), "{log}");
    workload.pod.agent.terminate();
    workload.pod.agent.end().await;
    let _dead = control_plane.kill().await;
    workload.pod.restart(&[]);
    for port in [port, new] {
        eventually("an answer", async || get(port).await.ok()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_envoy_that_a_wrapper_runs_is_stored_and_served() {
    let Some(binary) = envoy_binary() else { return };
    let (port, place) = (free_port(), memory());
    let wrapper = place.path().join("wrapper");
    let script = format!("{} \"$@\" & trap 'kill -9 $!' TERM; wait", binary.display());
    fs::write(&wrapper, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let control_plane = ControlPlane::of(&[answering("answering", port)]).await;
    let mut workload = workload(&wrapper, &control_plane).await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster"]).await;
    let _dead = control_plane.kill().await;
    workload.pod.kill().await;
    until("the end of Envoy", || std::net::TcpStream::connect(local(port)).is_err()).await;
    workload.pod.restart(&[]);
    eventually("an answer", async || get(port).await.ok()).await;
    workload.pod.agent.terminate();
    workload.pod.agent.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_control_plane_that_returns_and_goes_ten_times_costs_no_request() {
    let Some(binary) = envoy_binary() else { return };
    let (port, answering_port) = (free_port(), free_port());
    let of = |mark: &str| {
        let cluster = cluster("server");
        let mut all = client(port, answering_port, mark);
        all[0] = cluster;
        all.push(answering("server", answering_port));
        all
    };
    let mut control_plane = ControlPlane::of(&of("0")).await;
    let mut workload = workload(&binary, &control_plane).await;
    wait_for_mark(port, "0").await;
    wait_until_stored(&workload.pod, &["RouteConfiguration", "ClusterLoadAssignment"]).await;
    let mut dead = control_plane.kill().await;
    workload.pod.kill_and_restart(|| ()).await;
    wait_for_mark(port, "0").await;
    let load = Load::default().with(Fresh(port)).with(Lasting::new(port));
    for _ in 0..10 {
        control_plane = dead.revive().await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..1000))).await;
        dead = control_plane.kill().await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..500))).await;
    }
    dead.set(&of("1")).await;
    let _control_plane = dead.revive().await;
    let returned = Instant::now();
    wait_for_mark(port, "1").await;
    let took = returned.elapsed();
    assert!(took <= Duration::from_secs(5), "{took:?}");
    load.assert_flawless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_envoy_that_rejects_the_stored_configuration_is_served_by_istiod() {
    let Some(binary) = envoy_binary() else { return };
    let (port, logs) = (free_port(), memory());
    let file = logs.path().join("there/access.log");
    fs::create_dir(file.parent().unwrap()).unwrap();
    let logged = logged(answering("logged", port), file.to_str().unwrap(), "line\n");
    let control_plane = ControlPlane::of(&[logged]).await;
    let mut workload = workload(&binary, &control_plane).await;
    eventually("an answer", async || get(port).await.ok()).await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster"]).await;
    let dead = control_plane.kill().await;
    // Envoy rejects the listener when the directory of its access log does not exist.
    workload.pod.kill_and_restart(|| fs::remove_dir_all(file.parent().unwrap()).unwrap()).await;
    eventually("a NACK", async || {
        let types = xdsz(&workload.pod).await?["types"].clone();
        let listener = types.as_object()?.iter().find(|(it, _)| it.ends_with(".Listener"))?.1;
        let response = &listener["last_response"];
        (response["source"] == json!("kept") && listener["nacks"] == json!(1)).then_some(())
    })
    .await;
    dead.set(&[answering("other", port)]).await;
    let _control_plane = dead.revive().await;
    eventually("an answer", async || get(port).await.ok()).await;
    assert_eq!(source(&workload.pod).await, "istiod");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accepted_listeners_of_a_rejected_response_replace_their_stored_versions() {
    let Some(binary) = envoy_binary() else { return };
    let [refused, old, new] = [free_port(), free_port(), free_port()];
    let all = [answering("refused", refused), answering("accepted", old)];
    let control_plane = ControlPlane::of(&all).await;
    let mut workload = workload(&binary, &control_plane).await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster"]).await;
    control_plane
        .set(&[
            logged(answering("refused", refused), "/missing/access.log", "line\n"),
            answering("accepted", new),
        ])
        .await;
    eventually("an answer", async || get(new).await.ok()).await;
    // If the stream ends before Envoy has accepted or rejected a response, nothing of the response is stored.
    eventually("Envoy's refusal", async || {
        let found = xdsz(&workload.pod).await?;
        let refusal = &found["types"][LISTENER]["last_nack"];
        (!refusal.is_null()).then_some(())
    })
    .await;
    let _dead = control_plane.kill().await;
    // The agent writes the accepted listeners when the stream has ended.
    eventually("the last version", async || {
        let found = xdsz(&workload.pod).await?;
        let last = &found["types"][LISTENER]["last_response"];
        (last["version"] == found["kept"][LISTENER]["version"]).then_some(())
    })
    .await;
    workload.pod.kill_and_restart(|| ()).await;
    for port in [refused, new] {
        eventually("an answer", async || get(port).await.ok()).await;
    }
    get(old).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_control_plane_that_accepts_streams_without_answering_counts_as_unreachable() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let control_plane = ControlPlane::of(&[answering("answering", port)]).await;
    let mut workload = workload(&binary, &control_plane).await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster"]).await;
    let _silent = control_plane.kill().await.revive_silent().await;
    workload.pod.kill_and_restart(|| ()).await;
    let started = Instant::now();
    eventually("an answer", async || get(port).await.ok()).await;
    assert!(started.elapsed() <= Duration::from_secs(8));
    // The next stream of this Envoy goes to the control plane, even if the control plane does not respond.
    eventually("a stream of the control plane's", async || {
        (source(&workload.pod).await == "istiod").then_some(())
    })
    .await;
    get(port).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_envoy_waits_and_nothing_is_kept_without_the_setting() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let control_plane = ControlPlane::of(&[answering("answering", port)]).await;
    let settings = Settings { envoy: Some(&binary), environment: &[] };
    let mut pod = Pod::serving(settings, &control_plane).await;
    assert!(xdsz(&pod).await.unwrap()["kept"].is_null());
    let dead = control_plane.kill().await;
    pod.kill_and_restart(|| ()).await;
    // By default, stored configuration is served after 5 s.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(get(port).await.is_err());
    let _control_plane = dead.revive().await;
    eventually("an answer", async || get(port).await.ok()).await;
}

/// Returns clusters of 4 kB, a listener and routes, each with this version, which Envoy's configuration dump shows.
pub(super) fn of_version(version: usize, clusters: usize, ports: [u16; 2]) -> Vec<Value> {
    let versioned = |mut resource: Value| {
        resource["metadata"] = json!({ "filter_metadata": { "version": { "is": version } } });
        resource
    };
    let filler = |number: usize| {
        let random: String = std::iter::repeat_with(fastrand::alphanumeric).take(4000).collect();
        let mut filler = versioned(json!({
            "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            "name": format!("filler-{number}"),
            "type": "STATIC",
        }));
        filler["metadata"]["filter_metadata"]["random"] = json!({ "is": random });
        filler
    };
    let [own, routed] = ports;
    let mut all: Vec<_> = (0..clusters).map(filler).collect();
    all.extend([
        versioned(answering("own", own)),
        versioned(listener("routed", routed, "all")),
        versioned(routes("all", "filler-0", "mark")),
    ]);
    all
}

/// Returns the versions of the clusters, the listeners and the routes that Envoy has.
async fn versions(pod: &Pod) -> [Vec<u64>; 3] {
    let dump = ask(&pod.envoy, "/config_dump").await.unwrap();
    let dump: Value = serde_json::from_str(&dump).unwrap();
    let all = |list: &str, place: &str| {
        let place = format!("{place}/metadata/filter_metadata/version/is");
        let sections = dump["configs"].as_array().unwrap().iter();
        let items = sections.filter_map(|section| section[list].as_array()).flatten();
        let found = items.filter_map(|item| Some(item.pointer(&place)?.as_f64()? as u64));
        BTreeSet::from_iter(found).into_iter().collect()
    };
    [
        all("dynamic_active_clusters", "/cluster"),
        all("dynamic_listeners", "/active_state/listener"),
        all("dynamic_route_configs", "/route_config"),
    ]
}

/// The number of kills; more with the variable `KILLS`.
fn kills() -> usize {
    std::env::var("KILLS").ok().and_then(|it| it.parse().ok()).unwrap_or(3)
}

/// Gives istiod a new version up to each 200 ms, for ever.
pub(super) async fn change(control_plane: &ControlPlane, version: &mut usize, ports: [u16; 2]) {
    loop {
        *version += 1;
        control_plane.set(&of_version(*version, 300, ports)).await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..200))).await;
    }
}

/// Checks that all resources of each type are of one version, and all types of one moment. `version` is the last one.
pub(super) async fn assert_one_moment(pod: &Pod, version: usize) {
    let of_types = versions(pod).await;
    eprintln!("{version}: {of_types:?}");
    assert!(of_types.iter().all(|it| it.len() == 1), "{of_types:?}");
    let all = of_types.concat();
    assert!(all.iter().max().unwrap() - all.iter().min().unwrap() <= 1, "{of_types:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_serves_the_state_of_one_moment_after_a_kill_during_changes() {
    let Some(binary) = envoy_binary() else { return };
    let ports = [free_port(), free_port()];
    let mut version = 0;
    let mut control_plane = ControlPlane::of(&of_version(version, 300, ports)).await;
    let more = [
        ("ISTIO_AGENT_KEEP_CONFIG_AFTER", "1s"),
        ("ISTIO_AGENT_HOT_RESTART", "true"),
        ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", "3s"),
        ("ISTIO_BOOTSTRAP_OVERRIDE", "override.json"),
        ("PROXY_CONFIG", r#"{"drainDuration": "1s"}"#),
    ];
    let mut workload = workload_of(&binary, &control_plane, &more).await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster", "RouteConfiguration"]).await;
    for round in 0..kills() {
        let time = Duration::from_millis(fastrand::u64(4000..9000));
        let changes = change(&control_plane, &mut version, ports);
        let changes = tokio::time::timeout(time, changes);
        if round % 2 == 0 {
            let _ = changes.await;
        } else {
            // At the kill, two Envoys may run.
            let restart = async {
                tokio::time::sleep(time.mul_f64(fastrand::f64())).await;
                let text = json!({ "stats_flush_interval": format!("{}s", 5 + round) }).to_string();
                workload.pod.replace("override.json", &text);
                workload.pod.agent.signal(Signal::HUP);
            };
            let _ = tokio::join!(changes, restart);
        }
        workload.pod.kill().await;
        let dead = control_plane.kill().await;
        workload.pod.restart(&[]);
        eventually("an answer", async || get(ports[0]).await.ok()).await;
        assert_one_moment(&workload.pod, version).await;
        control_plane = dead.revive().await;
        eventually("istiod's configuration", async || {
            (source(&workload.pod).await == "istiod").then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_serves_500_changes_made_while_it_is_stopped_after_a_restart() {
    let Some(binary) = envoy_binary() else { return };
    let ports = [free_port(), free_port()];
    let control_plane = ControlPlane::of(&of_version(0, 3, ports)).await;
    let mut workload = workload_with(&binary, &control_plane, "1s").await;
    wait_until_stored(&workload.pod, &["Listener", "Cluster", "RouteConfiguration"]).await;
    let envoy = workload.pod.envoy_pid().unwrap();
    kill_process(envoy, Signal::STOP).unwrap();
    let stopped = Instant::now();
    let mut pace = tokio::time::interval(Duration::from_millis(20));
    for version in 1..=500 {
        pace.tick().await;
        control_plane.set(&of_version(version, 3, ports)).await;
    }
    assert!(stopped.elapsed() >= Duration::from_secs(9));
    kill_process(envoy, Signal::CONT).unwrap();
    let pod = &mut workload.pod;
    eventually("the last version", async || {
        (versions(pod).await.iter().all(|it| *it == [500])).then_some(())
    })
    .await;
    let log = pod.agent.log();
    for text in ["not stored", "stored configuration is"] {
        assert!(!log.contains(text), "{log}");
    }
    let _dead = control_plane.kill().await;
    pod.agent.terminate();
    pod.agent.end().await;
    pod.restart(&[]);
    eventually("an answer", async || get(ports[0]).await.ok()).await;
    assert_eq!(versions(pod).await, [[500], [500], [500]]);
}

/// The number of services of a large mesh.
const SERVICES: usize = 10_000;

fn service(number: usize) -> String {
    format!("outbound|80||service-{number}.shop.svc.cluster.local")
}

/// Returns the services from `first` on, a server, and a client of one service.
fn large_mesh(first: usize, [port, server]: [u16; 2], mark: &str) -> Vec<Value> {
    let services = (first..first + SERVICES).map(service);
    let mut all: Vec<_> =
        services.flat_map(|it| [cluster(&it), endpoints(&it, &[server])]).collect();
    all.extend([
        answering("server", server),
        listener("client", port, "all"),
        routes("all", &service(SERVICES - 1), mark),
    ]);
    all
}

/// Returns the number of resources of this type that Envoy has when it opens another stream.
fn initial_versions(control_plane: &mut ControlPlane, type_of: &str) -> Option<usize> {
    let requests = control_plane.requests().iter().filter(|it| it.type_url.ends_with(type_of));
    requests.map(|it| it.initial_resource_versions.len()).find(|count| *count > 0)
}

/// Waits until the file has the newest response of each of these types.
async fn wait_until_newest_is_stored(pod: &Pod, types: &[&str]) {
    eventually("a record of the newest responses", async || {
        let found = xdsz(pod).await?;
        let is_stored = |name: &&str| {
            let mut all = found["types"].as_object()?.iter();
            let (url, it) = all.find(|(url, _)| url.ends_with(*name))?;
            let stored = &found["kept"][url]["version"];
            (stored.is_string() && it["last_response"]["version"] == *stored).then_some(())
        };
        types.iter().map(is_stored).collect::<Option<()>>()
    })
    .await;
}

/// Returns the time of the last record in the file, in seconds of Unix time.
async fn last_record(pod: &Pod) -> Option<u64> {
    let metrics = pod.status(Method::GET, "/stats/prometheus").await?;
    let mut lines = metrics.lines().filter(|it| it.contains("RouteConfiguration"));
    let line = lines.find(|it| it.starts_with("istio_agent_xds_kept_timestamp_seconds"))?;
    line.rsplit(' ').next()?.parse().ok()
}

fn unix_now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_services_stay_stored_when_istiod_restarts() {
    const TYPES: [&str; 3] = ["v3.Cluster", "ClusterLoadAssignment", "RouteConfiguration"];
    let Some(binary) = envoy_binary() else { return };
    let ports @ [port, _] = [free_port(), free_port()];
    let control_plane = ControlPlane::of(&large_mesh(0, ports, "0")).await;
    let mut workload = workload(&binary, &control_plane).await;
    wait_for_mark(port, "0").await;
    wait_until_newest_is_stored(&workload.pod, &TYPES).await;
    let before = configuration(&workload.pod).await;
    let mut control_plane = control_plane.kill().await.revive().await;
    let revived = unix_now();
    for type_of in &TYPES[..2] {
        eventually("the names that Envoy has", async || {
            let names = initial_versions(&mut control_plane, type_of)?;
            assert_eq!(names, SERVICES, "{type_of}");
            Some(())
        })
        .await;
    }
    eventually("a record after the restart", async || {
        (last_record(&workload.pod).await? > revived).then_some(())
    })
    .await;
    assert_eq!(configuration(&workload.pod).await, before);
    // The first service is removed, another one is added, and the routes change.
    control_plane.set(&large_mesh(1, ports, "1")).await;
    wait_for_mark(port, "1").await;
    wait_until_newest_is_stored(&workload.pod, &TYPES).await;
    let after = configuration(&workload.pod).await;
    assert_ne!(after, before);
    let _dead = control_plane.kill().await;
    workload.pod.kill_and_restart(|| ()).await;
    wait_for_mark(port, "1").await;
    assert_eq!(source(&workload.pod).await, "kept");
    assert_eq!(configuration(&workload.pod).await, after);
}

/// A disk that can hang: a file system in a file that is frozen, or one whose server is stopped.
struct Disk {
    server: Option<Process>,
    place: TempDir,
}

/// While this exists, the disk hangs.
struct Hanging<'a>(&'a Disk);

impl Disk {
    fn frozen() -> Self {
        let disk = Self { server: None, place: memory() };
        fs::create_dir(disk.directory()).unwrap();
        let image = disk.place.path().join("image");
        fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let image = image.to_str().unwrap();
        run("mkfs.ext4", &["-q", image]);
        run("mount", &["-o", "loop", image, &disk.directory()]);
        disk
    }

    fn of_server() -> Self {
        let mut disk = Self { server: None, place: memory() };
        let (files, directory) = (disk.place.path().join("files"), disk.directory());
        fs::create_dir(&files).unwrap();
        fs::create_dir(&directory).unwrap();
        let mut command = Command::new("bindfs");
        command.arg("-f").arg(files).arg(&directory);
        disk.server = Some(Process::start(&mut command, &disk.place.path().join("log")));
        while !fs::read_to_string("/proc/mounts").unwrap().contains(&directory) {
            std::thread::sleep(Duration::from_millis(10));
        }
        disk
    }

    fn directory(&self) -> String {
        self.place.path().join("disk").to_str().unwrap().to_owned()
    }

    fn hang(&self) -> Hanging<'_> {
        match &self.server {
            Some(server) => server.signal(Signal::STOP),
            None => run("fsfreeze", &["-f", &self.directory()]),
        }
        Hanging(self)
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        match &self.0.server {
            Some(server) => server.signal(Signal::CONT),
            None => run("fsfreeze", &["-u", &self.0.directory()]),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        run("umount", &["-l", &self.directory()]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_delays_neither_envoy_nor_probes_nor_a_stop() {
    const TEST: &str =
        "last_known_good::a_disk_that_hangs_delays_neither_envoy_nor_probes_nor_a_stop";
    let Some(binary) = envoy_binary() else { return };
    if !is_inside(TEST) {
        return;
    }
    let has_loop_devices = Path::new("/dev/loop-control").exists();
    let can_freeze = has_loop_devices && has("mkfs.ext4") && has("fsfreeze");
    let frozen = can_freeze.then(Disk::frozen);
    let disks = frozen.into_iter().chain(has("bindfs").then(Disk::of_server));
    for disk in disks {
        let (port, answering_port) = (free_port(), free_port());
        let of = |mark: usize| {
            let mut all = client(port, answering_port, &mark.to_string());
            all[0] = cluster("server");
            all.push(answering("server", answering_port));
            all
        };
        let control_plane = ControlPlane::of(&of(0)).await;
        let directory = disk.directory();
        let more = [("ISTIO_AGENT_KEEP_CONFIG", &*directory), ("ISTIO_META_DNS_CAPTURE", "false")];
        let mut workload = workload_of(&binary, &control_plane, &more).await;
        wait_until_newest_is_stored(&workload.pod, &["RouteConfiguration"]).await;
        let probe = async || workload.pod.status(Method::GET, "/healthz/ready").await;
        eventually("readiness", probe).await;
        let hanging = disk.hang();
        // Changes are written after 5 s.
        for mark in 1..=20 {
            let changed = Instant::now();
            control_plane.set(&of(mark)).await;
            wait_for_mark(port, &mark.to_string()).await;
            let took = changed.elapsed();
            assert!(took <= Duration::from_secs(2), "{took:?}");
            let asked = Instant::now();
            probe().await.unwrap();
            let answered = asked.elapsed();
            assert!(answered <= Duration::from_secs(2), "{answered:?}");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        let thawed = unix_now();
        assert!(last_record(&workload.pod).await.unwrap() <= thawed - 10);
        drop(hanging);
        eventually("a record of the last changes", async || {
            (last_record(&workload.pod).await? >= thawed).then_some(())
        })
        .await;

        let hanging = disk.hang();
        control_plane.set(&of(21)).await;
        wait_for_mark(port, "21").await;
        tokio::time::sleep(Duration::from_secs(6)).await;
        let stopped = Instant::now();
        workload.pod.agent.terminate();
        // The kernel keeps a process with a thread that waits for a frozen disk, but ends its other threads.
        let agent = workload.pod.agent.pid();
        until("the end of the agent", || !is_alive(agent)).await;
        let took = stopped.elapsed();
        assert!(took <= Duration::from_secs(8), "{took:?}");
        drop(hanging);
        assert!(workload.pod.agent.end().await.success());
        let _dead = control_plane.kill().await;
        workload.pod.restart(&[]);
        eventually("a stored route", async || {
            let head = get(port).await.ok()?;
            ["20", "21"].contains(&header(&head, "x-mark")?).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_and_routes_stay_stored_while_envoy_drains_and_exits() {
    let Some(binary) = envoy_binary() else { return };
    let (backend, port) = (Backend::start().await, free_port());
    let control_plane = ControlPlane::of(&[
        cluster("books"),
        endpoints("books", &[backend.port]),
        listener("plain", port, "all"),
        routes("all", "books", "0"),
    ])
    .await;
    let mut workload = workload_with(&binary, &control_plane, "1s").await;
    wait_for_mark(port, "0").await;
    let types = ["Listener", "Cluster", "ClusterLoadAssignment", "RouteConfiguration"];
    wait_until_stored(&workload.pod, &types).await;
    workload.pod.agent.terminate();
    workload.pod.agent.end().await;
    let _dead = control_plane.kill().await;
    workload.pod.restart(&[]);
    wait_for_mark(port, "0").await;
}
