//! Tests that the doctor has no findings in set-ups that work.

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;

use super::{checks, diagnosed, is_ready};
use crate::support::control_plane::ControlPlane;
use crate::support::faults::{Fault, Faults};
use crate::support::http::{Backend, Server, connect, read_head, try_ask};
use crate::support::names::{Resolver, name_table};
use crate::support::pod::{Pod, Settings};
use crate::support::programs::envoy_binary;
use crate::support::resources::{
    answering, cluster, endpoints, listener, routes, secured, secured_listener,
};
use crate::support::{eventually, free_port};

const CART: &str = "outbound|8080||cart.shop";
/// A file that names no resolver.
const NO_RESOLVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

/// Starts a pod of this role, and waits until it is ready.
async fn ready(
    role: &str,
    environment: &[(&str, &str)],
    resources: &[Value],
) -> (Pod, ControlPlane) {
    let control_plane = ControlPlane::of(resources).await;
    (pod(role, environment, &control_plane).await, control_plane)
}

/// Starts a pod of this role with this control plane, and waits until it is ready.
async fn pod(role: &str, environment: &[(&str, &str)], control_plane: &ControlPlane) -> Pod {
    let none = ("ISTIO_AGENT_RESOLV_CONF", NO_RESOLVER);
    let environment = [&[none], environment].concat();
    let envoy = envoy_binary().unwrap();
    let settings = Settings { envoy: Some(&envoy), environment: &environment };
    let pod = Pod::start_as(role, settings, control_plane);
    is_ready(&pod).await;
    pod
}

/// Starts a sidecar that sends requests at this port to an endpoint, and sends some.
async fn calling(endpoint: u16, port: u16, count: usize) -> (Pod, ControlPlane) {
    let resources = [
        cluster(CART),
        endpoints(CART, &[endpoint]),
        listener("plain", port, "all"),
        routes("all", CART, "x"),
    ];
    let (pod, control_plane) = ready("sidecar", &[], &resources).await;
    for _ in 0..count {
        eventually("a response of the service", async || {
            try_ask(port, "GET /", "").await.filter(|answer| answer.status == 200)
        })
        .await;
    }
    (pod, control_plane)
}

/// Serves a CONNECT request by a connection to the same port at the loopback address.
async fn tunnel(mut client: TcpStream) {
    let head = read_head(&mut client).await.unwrap_or_default();
    let port = head.split(' ').nth(1).and_then(|host| host.rsplit(':').next()?.parse().ok());
    let port: u16 = port.unwrap_or_else(|| panic!("{head}"));
    let mut server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    let _ = copy_bidirectional(&mut client, &mut server).await;
}

fn count_all() -> String {
    json!({ "proxyStatsMatcher": { "inclusionRegexps": [".*"] } }).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_setting_that_works_has_a_finding() {
    if envoy_binary().is_none() {
        return;
    }
    let store = tempfile::tempdir().unwrap();
    let store_path = store.path().to_str().unwrap();
    let application = Backend::start().await;
    let probe = json!({ "tcpSocket": { "port": application.port } });
    let probers = json!({ "/app-health/cart/readyz": probe }).to_string();
    let pages = json!({ "scrape": "true", "port": application.port.to_string() }).to_string();
    let count_all = count_all();
    let dual = [("ISTIO_DUAL_STACK", "true"), ("INSTANCE_IPS", "127.0.0.1,::1")];
    type Row<'a> = (&'static str, &'static str, &'a [(&'a str, &'a str)]);
    let rows: [Row<'_>; 16] = [
        ("a sidecar", "sidecar", &[]),
        ("a gateway", "router", &[]),
        ("SotW", "sidecar", &[("ISTIO_DELTA_XDS", "false")]),
        ("no capture", "sidecar", &[("ISTIO_META_INTERCEPTION_MODE", "NONE")]),
        ("dual stack", "sidecar", &dual),
        ("IPv6", "sidecar", &[("INSTANCE_IP", "::1")]),
        ("stored configuration", "sidecar", &[("ISTIO_AGENT_KEEP_CONFIG", store_path)]),
        ("nothing stored", "sidecar", &[("ISTIO_AGENT_KEEP_CONFIG", "")]),
        ("no stored certificate", "sidecar", &[("ISTIO_AGENT_KEEP_CERTS", "")]),
        ("clusters on demand", "sidecar", &[("ISTIO_AGENT_ON_DEMAND_CLUSTERS", "true")]),
        ("an admin socket", "sidecar", &[("ISTIO_AGENT_ADMIN_SOCKET", "true")]),
        ("an RSA key", "sidecar", &[("WORKLOAD_RSA_KEY_SIZE", "2048")]),
        ("hot restart", "sidecar", &[("ISTIO_AGENT_HOT_RESTART", "true")]),
        ("all statistics", "sidecar", &[("PROXY_CONFIG", &count_all)]),
        ("a probe", "sidecar", &[("ISTIO_KUBE_APP_PROBERS", &probers)]),
        ("merged metrics", "sidecar", &[("ISTIO_PROMETHEUS_ANNOTATIONS", &pages)]),
    ];
    // All at once would start 16 Envoys on a machine that may have two cores.
    for rows in rows.chunks(5) {
        let mut set_ups = Faults::default();
        for (name, role, environment) in rows {
            let resources = [answering("plain", free_port())];
            let (pod, control_plane) = ready(role, environment, &resources).await;
            set_ups.add(name, async { Fault::none(pod).with(control_plane) });
        }
        set_ups.assert_all_reported().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_that_is_harmless_is_a_finding() {
    if envoy_binary().is_none() {
        return;
    }
    let mut set_ups = Faults::default();
    set_ups.add("istiod has restarted", async {
        let (pod, control_plane) = ready("sidecar", &[], &[answering("plain", free_port())]).await;
        let control_plane = control_plane.kill().await.revive().await;
        Fault::none(pod).with(control_plane)
    });
    set_ups.add("a port scanner", async {
        let port = free_port();
        let count_all = count_all();
        let counting = [("PROXY_CONFIG", &*count_all)];
        let (pod, control_plane) =
            ready("sidecar", &counting, &[secured_listener("tls", port)]).await;
        for _ in 0..9 {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
        }
        Fault::none(pod).with(control_plane)
    });
    set_ups.add("clients that give up", async {
        let server = Server::start(0, |path| {
            (path != "/hangs").then(|| (200, String::new(), String::new()))
        })
        .await;
        let port = free_port();
        let (pod, control_plane) = calling(server.port, port, 1).await;
        for _ in 0..20 {
            let mut stream = connect(port).await.unwrap();
            stream.write_all(b"GET /hangs HTTP/1.1\r\nhost: cart\r\n\r\n").await.unwrap();
        }
        Fault::none(pod).with((control_plane, server))
    });
    set_ups.add("requests, few of which fail", async {
        let server = Server::start(0, |path| {
            let status = if path == "/fails" { 500 } else { 200 };
            Some((status, String::new(), String::new()))
        })
        .await;
        let port = free_port();
        let (pod, control_plane) = calling(server.port, port, 5).await;
        for _ in 0..3 {
            try_ask(port, "GET /fails", "").await;
        }
        Fault::none(pod).with((control_plane, server))
    });
    set_ups.add("services that nobody calls", async {
        let tls = secured(cluster("outbound|443||tls.shop"));
        let resources = [
            answering("plain", free_port()),
            tls,
            endpoints("outbound|443||tls.shop", &[1]),
            cluster(CART),
            endpoints(CART, &[]),
        ];
        let (pod, control_plane) = ready("sidecar", &[], &resources).await;
        Fault::none(pod).with(control_plane)
    });
    set_ups.add("services that come and go", async {
        let plain = answering("plain", free_port());
        let (pod, control_plane) = ready("sidecar", &[], std::slice::from_ref(&plain)).await;
        for index in 0..50 {
            let name = format!("outbound|80||service-{index}.shop");
            control_plane.set(&[plain.clone(), cluster(&name), endpoints(&name, &[1])]).await;
        }
        Fault::none(pod).with(control_plane)
    });
    set_ups.add("DNS capture", async {
        let port = free_port();
        let resolver = Resolver::start(([127, 0, 0, 1], port).into());
        let resolv_conf = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&resolv_conf, format!("nameserver [127.0.0.1]:{port}\n")).unwrap();
        let dns = [
            ("ISTIO_META_DNS_CAPTURE", "true"),
            ("DNS_PROXY_ADDR", &*format!("127.0.0.1:{}", free_port())),
            ("ISTIO_AGENT_RESOLV_CONF", resolv_conf.path().to_str().unwrap()),
        ];
        let control_plane = ControlPlane::of(&[answering("plain", free_port())]).await;
        control_plane.add(name_table("shop", &[("books", &["10.1.2.3"])]));
        let pod = pod("sidecar", &dns, &control_plane).await;
        Fault::none(pod).with((control_plane, resolver, resolv_conf))
    });
    set_ups.add("an HTTP proxy", async {
        let proxy = Backend::serving(tunnel).await;
        let control_plane = ControlPlane::of(&[answering("plain", free_port())]).await;
        // Only the proxy finds this host. The agent uses no proxy for loopback addresses.
        let port = control_plane.istiod.address.port();
        let address = format!("istiod.istio-system.svc:{port}");
        let environment = [
            ("HTTPS_PROXY", &*format!("http://127.0.0.1:{}", proxy.port)),
            ("PROXY_CONFIG", &*json!({ "discoveryAddress": address }).to_string()),
        ];
        let pod = pod("sidecar", &environment, &control_plane).await;
        Fault::none(pod).with((control_plane, proxy))
    });
    set_ups.add("a container that was killed", async {
        let (mut pod, control_plane) =
            ready("sidecar", &[], &[answering("plain", free_port())]).await;
        pod.kill_and_restart(|| {}).await;
        is_ready(&pod).await;
        Fault::none(pod).with(control_plane)
    });
    set_ups.add("a hot restart", async {
        let override_file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&override_file, "{}").unwrap();
        let path = override_file.path().to_str().unwrap();
        let hot = [("ISTIO_AGENT_HOT_RESTART", "true"), ("ISTIO_BOOTSTRAP_OVERRIDE", path)];
        let (pod, control_plane) = ready("sidecar", &hot, &[answering("plain", free_port())]).await;
        let text = json!({ "node": { "metadata": { "MARK": "1" } } }).to_string();
        std::fs::write(&override_file, text).unwrap();
        pod.agent.signal(Signal::HUP);
        pod.agent.logs("epoch 1 is live").await;
        Fault::none(pod).with((control_plane, override_file))
    });
    set_ups.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_drains_has_no_other_finding() {
    let Some(envoy) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[answering("plain", free_port())]).await;
    let none = ("ISTIO_AGENT_RESOLV_CONF", NO_RESOLVER);
    let settings = Settings { envoy: Some(&envoy), environment: &[none] };
    let pod = Pod::draining_for("sidecar", "60s", settings, &control_plane);
    is_ready(&pod).await;
    pod.agent.terminate();
    pod.agent.logs("stopping Envoy").await;
    let (report, _) = diagnosed(&pod).await;
    let mut found: Vec<_> = checks(&report)
        .into_iter()
        .filter(|(_, check)| check["level"] == "error" || check["level"] == "warning")
        .map(|(_, check)| check["code"].as_str().unwrap())
        .collect();
    found.dedup();
    // The second follows from the first, so the text does not have it.
    assert_eq!(found, ["ENVOY_STOPPING", "READINESS_FAILED"], "{report:#}");
}
