//! Tests that Envoy gets clusters when the workload uses them first, and others not at all.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use http::Method;
use local_istiod::{Event, Resource};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::last_known_good::{wait_until_stored, xdsz};
use crate::support::control_plane::ControlPlane;
use crate::support::http::{Backend, get, try_ask};
use crate::support::namespace;
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::is_alive;
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{SECRET, eventually, free_port, until};

const CLUSTERS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const LISTENERS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const ROUTES: &str = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";
pub(super) const ON: (&str, &str) = ("ISTIO_AGENT_ON_DEMAND_CLUSTERS", "true");

/// Returns the name of the cluster of a service.
fn outbound(service: &str) -> String {
    format!("outbound|80||{service}.shop.svc.cluster.local")
}

/// A mesh with these services, all served by one backend, and the outbound listeners of a client.
struct Mesh {
    http: u16,
    /// The TCP listeners, which lead to the last services.
    tcp: Vec<u16>,
    backend: Backend,
    services: Vec<String>,
    /// Services that have routes only.
    routed: Vec<String>,
    /// The service that gets copies of all requests.
    mirror: Option<String>,
    /// The service that an HTTP filter may call. The filter lets requests pass if it fails.
    authz: Option<String>,
    more: Vec<Value>,
}

impl Mesh {
    async fn of(services: &[&str]) -> Self {
        Self {
            http: free_port(),
            tcp: vec![free_port()],
            backend: Backend::start().await,
            services: services.iter().map(|it| (*it).to_owned()).collect(),
            routed: Vec::new(),
            mirror: None,
            authz: None,
            more: Vec::new(),
        }
    }

    /// A mesh of 200 services, some of which have a TCP listener.
    async fn of_many() -> Self {
        let services: Vec<_> = (0..200).map(|it| format!("s{it:03}")).collect();
        let services: Vec<_> = services.iter().map(String::as_str).collect();
        let tcp = (0..40).map(|_| free_port()).collect();
        Self { tcp, ..Self::of(&services).await }
    }

    /// Returns the resources: each service has a cluster, endpoints and a route.
    fn resources(&self) -> Vec<Value> {
        let mut resources = self.more.clone();
        for service in &self.services {
            resources.push(cluster(&outbound(service)));
            resources.push(endpoints(&outbound(service), &[self.backend.port]));
        }
        let mut table = outbound_routes("http", &[&self.services[..], &self.routed].concat());
        if let Some(mirror) = &self.mirror {
            table["request_mirror_policies"] = json!([{ "cluster": outbound(mirror) }]);
        }
        resources.push(table);
        let mut http = outward(listener("http", self.http, "http"));
        if let Some(authz) = &self.authz {
            let filters =
                &mut http["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"];
            filters.as_array_mut().unwrap().insert(0, ext_authz(&outbound(authz)));
        }
        resources.push(http);
        for (port, service) in self.tcp.iter().rev().zip(self.services.iter().rev()) {
            resources.push(tcp_listener(&format!("tcp-{service}"), *port, &outbound(service)));
        }
        resources
    }

    /// Returns the resources with another timeout in each cluster.
    fn changed(&self, seconds: u32) -> Vec<Value> {
        let mut resources = self.resources();
        for resource in &mut resources {
            if resource.get("connect_timeout").is_some() {
                resource["connect_timeout"] = json!(format!("{seconds}s"));
            }
        }
        resources
    }

    /// Waits until Envoy has routes.
    async fn is_routed(&self) {
        eventually("routes", async || (self.get("none").await? == 404).then_some(())).await;
    }

    /// Requests these services one after the other, over TCP if they have a listener, and prints the longest time.
    async fn succeeds_for(&self, services: &[String]) {
        let mut longest = Duration::ZERO;
        let http = self.services.len() - self.tcp.len();
        for service in services {
            let begin = Instant::now();
            match self.services.iter().position(|it| it == service).unwrap().checked_sub(http) {
                None => assert_eq!(self.get(service).await, Some(200), "{service}"),
                Some(listener) => {
                    get(self.tcp[listener]).await.unwrap_or_else(|error| {
                        panic!("{service}, after {:?}: {error}", begin.elapsed())
                    });
                }
            }
            longest = longest.max(begin.elapsed());
        }
        println!("{} requests took at most {longest:?}", services.len());
    }

    /// Requests a service. Returns the status.
    async fn get(&self, service: &str) -> Option<u16> {
        try_ask(self.http, &format!("GET /{service}"), "").await.map(|it| it.status)
    }
}

fn outbound_routes(name: &str, services: &[String]) -> Value {
    let mut table = routes(name, "none", "http");
    let route = |service: &String| json!({ "match": { "prefix": format!("/{service}") }, "route": { "cluster": outbound(service) } });
    table["virtual_hosts"][0]["routes"] = services.iter().map(route).collect();
    table["validate_clusters"] = json!(false);
    table
}

fn outward(mut listener: Value) -> Value {
    listener["traffic_direction"] = json!("OUTBOUND");
    listener
}

pub(super) fn tcp_listener(name: &str, port: u16, cluster: &str) -> Value {
    json!({
        "@type": "type.googleapis.com/envoy.config.listener.v3.Listener",
        "name": name,
        "traffic_direction": "OUTBOUND",
        "address": { "socket_address": { "address": "127.0.0.1", "port_value": port } },
        "filter_chains": [{ "filters": [{
            "name": "envoy.filters.network.tcp_proxy",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
                "stat_prefix": cluster,
                "cluster": cluster,
            },
        }]}],
    })
}

fn ext_authz(cluster: &str) -> Value {
    json!({
        "name": "envoy.filters.http.ext_authz",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_authz.v3.ExtAuthz",
            "failure_mode_allow": true,
            "transport_api_version": "V3",
            "grpc_service": { "envoy_grpc": { "cluster_name": cluster } },
        },
    })
}

/// Waits until Envoy has a cluster with this timeout.
async fn wait_for_timeout(pod: &Pod, cluster: &str, timeout: &str) {
    eventually("a changed cluster", async || {
        let dump = ask(&pod.envoy, "/config_dump?resource=dynamic_active_clusters").await?;
        let dump: Value = serde_json::from_str(&dump).ok()?;
        let mut clusters = dump["configs"].as_array()?.iter().map(|it| &it["cluster"]);
        let found = clusters.find(|it| it["name"] == *cluster)?;
        (found["connect_timeout"] == *timeout).then_some(())
    })
    .await;
}

/// Returns the outbound clusters that Envoy has.
pub(super) async fn loaded(pod: &Pod) -> BTreeSet<String> {
    let clusters = ask(&pod.envoy, "/clusters?format=json").await.unwrap();
    let clusters: Value = serde_json::from_str(&clusters).unwrap();
    let names = clusters["cluster_statuses"].as_array().unwrap().iter();
    let names = names.filter_map(|it| it["name"].as_str()).filter(|it| it.starts_with("outbound|"));
    names.map(ToOwned::to_owned).collect()
}

async fn pod(control_plane: &ControlPlane) -> Option<Pod> {
    let binary = envoy_binary()?;
    let settings = Settings { envoy: Some(&binary), environment: &[ON] };
    Some(Pod::serving(settings, control_plane).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_gets_only_the_clusters_that_the_workload_uses() {
    let mesh = Mesh::of(&["a", "b", "c", "d"]).await;
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    assert_eq!(loaded(&pod).await, BTreeSet::new());
    assert_eq!(mesh.get("a").await, Some(200));
    assert_eq!(mesh.get("a").await, Some(200));
    assert_eq!(loaded(&pod).await, BTreeSet::from([outbound("a")]));
    // The TCP listener.
    get(mesh.tcp[0]).await.unwrap();
    assert_eq!(loaded(&pod).await, BTreeSet::from([outbound("a"), outbound("d")]));
    // Two services are used, and one does not exist.
    let seen = xdsz(&pod).await.unwrap()["on_demand"].take();
    let pinned = json!({ "kind": 0, "named": 0, "secret": 0 });
    assert_eq!([&seen["known"], &seen["sent"], &seen["used"]], [4, 2, 2], "{seen}");
    assert_eq!((&seen["pinned"], &seen["asked"]), (&pinned, &json!(2)), "{seen}");
    let metrics = pod.status(Method::GET, "/metrics/agent").await.unwrap();
    for line in [
        "istio_agent_on_demand_clusters{state=\"sent\"} 2",
        "istio_agent_on_demand_requests_total 2",
        "istio_agent_on_demand_wait_seconds_count 2",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_endpoints_delays_no_other() {
    let mut mesh = Mesh::of_many().await;
    mesh.more.push(cluster(&outbound("silent")));
    mesh.routed.push("silent".to_owned());
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    control_plane.add(Resource::withheld(outbound("silent"), ENDPOINTS));
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    let silent = mesh.get("silent");
    let others = async {
        let (first, second) = mesh.services.split_at(100);
        mesh.succeeds_for(first).await;
        // A change of all clusters, too, and no endpoints of one that Envoy has.
        control_plane.set(&mesh.changed(7)).await;
        for service in ["silent", "s000"] {
            control_plane.add(Resource::withheld(outbound(service), ENDPOINTS));
        }
        mesh.succeeds_for(second).await;
        mesh.succeeds_for(first).await;
        wait_for_timeout(&pod, &outbound("s000"), "7s").await;
    };
    let (silent, ()) = tokio::join!(silent, others);
    assert_eq!(silent, Some(503));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_service_is_answered_at_once_until_it_exists() {
    let mut mesh = Mesh::of(&["a"]).await;
    mesh.routed.push("late".to_owned());
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(_pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    for _ in 0..3 {
        let begin = Instant::now();
        assert_eq!(mesh.get("late").await, Some(503));
        // The timeout of the filter.
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
    mesh.services.push("late".to_owned());
    control_plane.set(&mesh.resources()).await;
    eventually("a new service", async || (mesh.get("late").await? == 200).then_some(())).await;
    mesh.services.pop();
    control_plane.set(&mesh.resources()).await;
    eventually("its end", async || (mesh.get("late").await? == 503).then_some(())).await;
    assert_eq!(mesh.get("a").await, Some(200));
}

#[tokio::test(flavor = "multi_thread")]
async fn first_requests_do_not_fail_while_istiod_ends_its_streams() {
    let services: Vec<_> = (0..40).map(|it| format!("s{it:02}")).collect();
    let names: Vec<_> = services.iter().map(String::as_str).collect();
    let mesh = Mesh::of(&names).await;
    let mut control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    for used in services.chunks(4) {
        let [first, second, third, fourth] = used else { panic!("chunks of four") };
        assert_eq!(mesh.get(first).await, Some(200));
        let restarting = async { control_plane.kill().await.revive().await };
        let during = async { (mesh.get(second).await, mesh.get(third).await) };
        let (revived, during) = tokio::join!(restarting, during);
        control_plane = revived;
        assert_eq!(during, (Some(200), Some(200)), "{second}, {third}");
        assert_eq!(mesh.get(fourth).await, Some(200));
    }
    assert_eq!(loaded(&pod).await.len(), 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn first_requests_do_not_fail_while_streams_end_after_their_first_responses() {
    let mesh = Mesh::of_many().await;
    let mut control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(_pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    mesh.succeeds_for(&mesh.services[..1]).await;
    let ends = async {
        loop {
            control_plane = control_plane.kill().await.revive().await;
            let mut left = BTreeSet::from([CLUSTERS, ENDPOINTS, LISTENERS, ROUTES]);
            while !left.is_empty() {
                let is_first = |it: &Event| matches!(it, Event::Pushed { type_url, .. } if left.contains(&**type_url));
                let Event::Pushed { type_url, .. } =
                    control_plane.event("a first response", is_first).await
                else {
                    panic!("an event of another kind")
                };
                left.remove(&*type_url);
            }
        }
    };
    let requests = join_all(mesh.services[1..].chunks(10).map(|it| mesh.succeeds_for(it)));
    tokio::select! {
        () = ends => {}
        _ = requests => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crashed_envoy_has_the_used_clusters_at_once() {
    let mesh = Mesh::of(&["a", "b", "c"]).await;
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    assert_eq!(mesh.get("b").await, Some(200));
    let before = pod.envoy_pid().unwrap();
    kill_process(before, Signal::KILL).unwrap();
    eventually("another Envoy", async || pod.envoy_pid().filter(|pid| *pid != before)).await;
    mesh.is_routed().await;
    assert_eq!(loaded(&pod).await, BTreeSet::from([outbound("b")]));
    assert_eq!(mesh.get("b").await, Some(200));
    assert_eq!(mesh.get("c").await, Some(200));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_container_gets_the_used_clusters_while_istiod_is_away() {
    let mesh = Mesh::of(&["a", "b", "c"]).await;
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(binary) = envoy_binary() else { return };
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let directory = store.path().to_str().unwrap();
    let environment = [
        ON,
        ("ISTIO_AGENT_KEEP_CONFIG", directory),
        ("ISTIO_AGENT_KEEP_CERTS", directory),
        ("ISTIO_AGENT_KEEP_CONFIG_AFTER", "1s"),
    ];
    let settings = Settings { envoy: Some(&binary), environment: &environment };
    let mut pod = Pod::serving(settings, &control_plane).await;
    mesh.is_routed().await;
    assert_eq!(mesh.get("b").await, Some(200));
    wait_until_stored(&pod, &["Cluster", "ClusterLoadAssignment", "Listener"]).await;
    pod.agent.terminate();
    pod.agent.end().await;
    let dead = control_plane.kill().await;
    pod.restart(&[]);
    mesh.is_routed().await;
    assert_eq!(loaded(&pod).await, BTreeSet::from([outbound("b")]));
    assert_eq!(mesh.get("b").await, Some(200));
    let _control_plane = dead.revive().await;
    eventually("a service that was not used", async || (mesh.get("c").await? == 200).then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clusters_come_on_demand_if_nothing_is_stored() {
    let mesh = Mesh::of(&["a", "b", "c"]).await;
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(binary) = envoy_binary() else { return };
    let environment = [ON, ("ISTIO_AGENT_KEEP_CONFIG", "")];
    let settings = Settings { envoy: Some(&binary), environment: &environment };
    let pod = Pod::serving(settings, &control_plane).await;
    mesh.is_routed().await;
    assert_eq!(mesh.get("b").await, Some(200));
    assert_eq!(loaded(&pod).await, BTreeSet::from([outbound("b")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn clusters_that_envoy_cannot_discover_are_pinned() {
    let mut mesh = Mesh::of(&["a", "mirror", "authz", "c"]).await;
    mesh.mirror = Some("mirror".to_owned());
    mesh.authz = Some("authz".to_owned());
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    eventually("the pinned clusters", async || {
        let pinned = BTreeSet::from([outbound("mirror"), outbound("authz")]);
        (loaded(&pod).await == pinned).then_some(())
    })
    .await;
    assert_eq!(mesh.get("a").await, Some(200));
}

/// Returns a cluster of this service with a secret of istiod.
fn with_secret(service: &str, secret: &str) -> Value {
    let mut cluster = cluster(&outbound(service));
    let source = json!({ "ads": {}, "resource_api_version": "V3" });
    let secret = json!({ "name": secret, "sds_config": source });
    cluster["transport_socket"] = json!({
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": { "tls_certificate_sds_secret_configs": [secret] },
        },
    });
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_does_not_come_delays_no_other_service() {
    let mut mesh = Mesh::of_many().await;
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    mesh.succeeds_for(&mesh.services[..1]).await;
    let add_secrets = || {
        for secret in ["never", "changed"] {
            control_plane.add(Resource::withheld(format!("kubernetes://{secret}"), SECRET));
        }
    };
    // A new cluster, and a changed one that Envoy has.
    mesh.more.push(with_secret("new", "kubernetes://never"));
    mesh.more.push(endpoints(&outbound("new"), &[mesh.backend.port]));
    control_plane.set(&mesh.resources()).await;
    add_secrets();
    let (first, second) = mesh.services.split_at(100);
    mesh.succeeds_for(first).await;
    let mut changed = mesh.changed(7);
    for resource in &mut changed {
        if resource["name"] == outbound("s000") {
            resource["transport_socket"] =
                with_secret("s000", "kubernetes://changed")["transport_socket"].clone();
        }
    }
    control_plane.set(&changed).await;
    add_secrets();
    wait_for_timeout(&pod, &outbound("s001"), "7s").await;
    mesh.succeeds_for(second).await;
    mesh.succeeds_for(first).await;
    assert!(!loaded(&pod).await.contains(&outbound("new")));
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_resolvers_delay_no_other_service() {
    let test = "on_demand::silent_resolvers_delay_no_other_service";
    if !namespace::is_inside(test) {
        return;
    }
    namespace::put("/etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:2 attempts:1\n");
    // Takes queries, and answers none.
    let _resolver = std::net::UdpSocket::bind("127.0.0.1:53").unwrap();
    let mut mesh = Mesh::of_many().await;
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    let dns = |service: &str, host: &str| {
        let endpoint = json!({ "endpoint": { "address": { "socket_address":
            { "address": host, "port_value": 80 } } } });
        json!({
            "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            "name": outbound(service),
            "type": "STRICT_DNS",
            "load_assignment": {
                "cluster_name": outbound(service),
                "endpoints": [{ "lb_endpoints": [endpoint] }],
            },
        })
    };
    // More than are looked up at a time.
    let silent = |first: &str| -> Vec<Value> {
        let services = [first, "x1", "x2", "x3", "x4", "x5"];
        services.map(|service| dns(service, "silent.example.com")).into()
    };
    mesh.more = silent("external");
    control_plane.set(&mesh.resources()).await;
    mesh.succeeds_for(&mesh.services[..100]).await;
    assert!(!loaded(&pod).await.contains(&outbound("external")));
    // A name that can be resolved, and then a change to one that cannot.
    mesh.more = silent("other");
    mesh.more.push(dns("external", "localhost"));
    control_plane.set(&mesh.resources()).await;
    eventually("a cluster whose name is resolved", async || {
        loaded(&pod).await.contains(&outbound("external")).then_some(())
    })
    .await;
    mesh.more = silent("external");
    control_plane.set(&mesh.changed(7)).await;
    wait_for_timeout(&pod, &outbound("s001"), "7s").await;
    mesh.succeeds_for(&mesh.services[100..]).await;
    mesh.succeeds_for(&mesh.services[..100]).await;
    assert!(loaded(&pod).await.contains(&outbound("external")));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_first_requests_at_once_succeed() {
    let services: Vec<_> = (0..200).map(|it| format!("s{it:03}")).collect();
    let mesh = Mesh::of(&services.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    let statuses = join_all(services.iter().map(|service| mesh.get(service))).await;
    let failed: Vec<_> = statuses.iter().filter(|it| **it != Some(200)).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(loaded(&pod).await.len(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_successor_of_a_hot_restart_has_the_used_clusters() {
    let mesh = Mesh::of(&["a", "b", "c"]).await;
    let control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(binary) = envoy_binary() else { return };
    let environment = [
        ON,
        ("ISTIO_AGENT_HOT_RESTART", "true"),
        ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", "3s"),
        ("ISTIO_BOOTSTRAP_OVERRIDE", "in/override.json"),
        ("PROXY_CONFIG", r#"{"drainDuration": "1s"}"#),
    ];
    let settings = Settings { envoy: Some(&binary), environment: &environment };
    let pod = Pod::serving(settings, &control_plane).await;
    mesh.is_routed().await;
    assert_eq!(mesh.get("a").await, Some(200));
    let before = pod.envoy_pid().unwrap();
    std::fs::create_dir_all(pod.path("in")).unwrap();
    pod.replace("in/override.json", r#"{"node": {"metadata": {"MARK": "1"}}}"#);
    pod.agent.signal(Signal::HUP);
    eventually("the successor", async || pod.envoy_pid().filter(|pid| *pid != before)).await;
    for _ in 0..50 {
        assert_eq!(mesh.get("a").await, Some(200));
        assert_eq!(mesh.get("b").await, Some(200));
    }
    until("the end of the former Envoy", || !is_alive(before)).await;
    assert!(loaded(&pod).await.contains(&outbound("a")));
    assert_eq!(mesh.get("c").await, Some(200));
}

/// The number of seconds of [`no_request_fails_in_chaos`]; more with the variable `CHAOS_SECONDS`.
fn chaos_time() -> Duration {
    let seconds = std::env::var("CHAOS_SECONDS").ok().and_then(|it| it.parse().ok());
    Duration::from_secs(seconds.unwrap_or(10))
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_fails_in_chaos() {
    let services: Vec<_> = (0..60).map(|it| format!("s{it:02}")).collect();
    let mut mesh = Mesh::of(&services.iter().map(String::as_str).collect::<Vec<_>>()).await;
    mesh.routed.push("absent".to_owned());
    let mut control_plane = ControlPlane::of(&mesh.resources()).await;
    let Some(pod) = pod(&control_plane).await else { return };
    mesh.is_routed().await;
    let (port, end) = (mesh.http, Instant::now() + chaos_time());
    let requests = tokio::spawn(async move {
        let (mut failed, mut count) = (Vec::new(), 0);
        while Instant::now() < end {
            let service = fastrand::choice(&services).unwrap();
            let status = try_ask(port, &format!("GET /{service}"), "").await.map(|it| it.status);
            count += 1;
            if status != Some(200) {
                failed.push((service.clone(), status));
            }
        }
        (failed, count)
    });
    let mut memory = Vec::new();
    for round in 0.. {
        if Instant::now() >= end {
            break;
        }
        // Routes change, and services that are not requested come and go.
        mesh.routed = vec!["absent".to_owned(), format!("routed-{round}")];
        mesh.more = vec![cluster(&outbound("no-endpoints"))];
        if round % 2 == 0 {
            mesh.more.push(cluster(&outbound("comes-and-goes")));
        }
        control_plane.set(&mesh.changed(1 + round % 9)).await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..300))).await;
        let absent = mesh.get("absent");
        // A client that leaves while it waits.
        let left = tokio::time::timeout(Duration::from_millis(2), mesh.get("no-endpoints"));
        let (absent, _) = tokio::join!(absent, left);
        assert_eq!(absent, Some(503));
        if round % 10 == 9 {
            control_plane = control_plane.kill().await.revive().await;
        }
        memory.push(pod.agent.memory("RssAnon"));
    }
    let (failed, count) = requests.await.unwrap();
    assert!(failed.is_empty(), "{} of {count}: {failed:?}", failed.len());
    let dump = ask(&pod.envoy, "/config_dump?resource=dynamic_warming_clusters").await.unwrap();
    assert!(!dump.contains("outbound|"), "{dump}");
    let quarter = memory.len() / 4;
    let most = |part: &[u64]| part.iter().copied().max().unwrap_or_default();
    let (begin, end) = (most(&memory[..2 * quarter]), most(&memory[2 * quarter..]));
    assert!(end <= begin + 2048, "{begin} kB in the first half, {end} kB in the second");
}
