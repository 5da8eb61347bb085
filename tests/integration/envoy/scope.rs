//! Tests `pilot-agent scope` with a real Envoy: it finds the services that were used, and prints a `Sidecar` for them.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::net::UdpSocket;

use crate::support::control_plane::{ControlPlane, NAMESPACE};
use crate::support::http::{Backend, get};
use crate::support::names::name_table;
use crate::support::pod::{Pod, Settings, ask};
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, passthrough, routes};
use crate::support::{eventually, free_port, local};

/// Returns an outbound cluster with the name and the metadata of the service that istiod gives it.
fn outbound(subset: &str, namespace: &str, host: &str) -> Value {
    let mut cluster = cluster(&format!("outbound|8080|{subset}|{host}"));
    let service = json!({ "host": host, "name": host, "namespace": namespace });
    cluster["metadata"] = json!({ "filter_metadata": { "istio": { "services": [service] } } });
    cluster
}

/// Returns Istio's listener for outbound traffic, which sends connections to no service to this cluster.
fn catch_all(cluster: &str) -> Value {
    let proxy = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": cluster,
        "cluster": cluster,
    });
    json!({
        "@type": "type.googleapis.com/envoy.config.listener.v3.Listener",
        "name": "virtualOutbound",
        "address": { "socket_address": { "address": "127.0.0.1", "port_value": free_port() } },
        "filter_chains": [{
            "name": "virtualOutbound-catchall-tcp",
            "filters": [{ "name": "envoy.filters.network.tcp_proxy", "typed_config": proxy }],
        }],
    })
}

fn to_no_service(name: &str) -> Value {
    let mut cluster = passthrough("", &[]);
    cluster["name"] = json!(name);
    cluster
}

/// Sends the agent DNS queries for the address of a name until the name table has it.
async fn look_up(port: u16, name: &str) {
    let mut question = b"\0\x01\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    for label in name.split('.') {
        question.push(u8::try_from(label.len()).unwrap());
        question.extend(label.bytes());
    }
    question.extend(b"\0\0\x01\0\x01");
    let socket = UdpSocket::bind(local(0)).await.unwrap();
    eventually("the name is in the table", async || {
        socket.send_to(&question, local(port)).await.unwrap();
        let mut answer = [0; 512];
        socket.recv(&mut answer).await.unwrap();
        (answer[3] & 15 == 0).then_some(())
    })
    .await;
}

/// Runs `pilot-agent scope` with these arguments. Returns its output, or its errors if it fails.
fn scope(pod: &Pod, words: &[&str]) -> Result<String, String> {
    let mut command = pod.command();
    command.arg("scope").args(words).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[tokio::test]
async fn the_advice_lists_connected_and_requested_services_and_what_is_unknown() {
    let Some(envoy) = envoy_binary() else { return };
    let (backend, port, dns) = (Backend::start().await, free_port(), free_port());
    let used = "used.shop.svc.cluster.local";
    let of_used = format!("outbound|8080|v1|{used}");
    let mut resources = vec![
        outbound("", NAMESPACE, used),
        outbound("v1", NAMESPACE, used),
        outbound("", NAMESPACE, "asked.shop.svc.cluster.local"),
        outbound("", "other", "*.example.com"),
        outbound("", "other", "left.other.svc.cluster.local"),
        to_no_service("BlackHoleCluster"),
        to_no_service("PassthroughCluster"),
        catch_all("BlackHoleCluster"),
        listener("in", port, "in"),
        routes("in", &of_used, "0"),
    ];
    let clusters = resources.iter().filter_map(|it| it["name"].as_str());
    let of_cluster = |name: &str| {
        if name == of_used { endpoints(name, &[backend.port]) } else { endpoints(name, &[]) }
    };
    let outbound = clusters.filter(|name| name.starts_with("outbound|"));
    let all: Vec<_> = outbound.map(of_cluster).collect();
    resources.extend(all);
    let control_plane = ControlPlane::of(&resources).await;
    control_plane.add(name_table(NAMESPACE, &[("asked", &["10.1.0.1"])]));
    let address = format!("127.0.0.1:{dns}");
    let settings = Settings {
        envoy: Some(&envoy),
        environment: &[
            ("ISTIO_META_DNS_CAPTURE", "true"),
            ("DNS_PROXY_ADDR", &address),
            ("ISTIO_META_WORKLOAD_NAME", "cart"),
            ("ISTIO_METAJSON_LABELS", r#"{"app":"cart","pod-template-hash":"5d8"}"#),
        ],
    };
    let pod = Pod::serving(settings, &control_plane).await;
    eventually("an answer", async || get(port).await.ok()).await;
    look_up(dns, "asked.shop.svc.cluster.local").await;

    let advice = scope(&pod, &["--keep", "istio-system/*"]).unwrap();
    let (comments, resource) = advice.split_once("apiVersion").unwrap();
    assert_eq!(
        format!("apiVersion{resource}"),
        "apiVersion: networking.istio.io/v1\n\
         kind: Sidecar\n\
         metadata:\n  name: \"cart\"\n  namespace: \"shop\"\n\
         spec:\n  workloadSelector:\n    labels:\n      \"app\": \"cart\"\n\
         \x20 egress:\n  - hosts:\n\
         \x20   - \"istio-system/*\"\n\
         \x20   - \"shop/asked.shop.svc.cluster.local\"\n\
         \x20   - \"shop/used.shop.svc.cluster.local\"\n"
    );
    for said in [
        "Envoy was sent 4 services (5 clusters); 1 had connections.",
        "Left out: 2 services, 2 clusters",
        "REGISTRY_ONLY",
        "less than an hour",
        "Looked up but not connected to, kept: \"shop/asked.shop.svc.cluster.local\"",
    ] {
        assert!(comments.contains(said), "{said}: {comments}");
    }
    let without = scope(&pod, &["--include-asked=false"]).unwrap();
    assert!(!without.contains("    - \"shop/asked"), "{without}");

    // Merged with the report of another pod, the advice lists the services that either pod used.
    let mut other: Value = serde_json::from_str(&scope(&pod, &["--json"]).unwrap()).unwrap();
    pod.replace("a.json", &other.to_string());
    other["services"] = json!([{
        "namespace": "other", "host": "*.example.com", "clusters": 1, "connections": 3, "requests": 9,
        "is_asked": false,
    }]);
    pod.replace("b.json", &other.to_string());
    let merged = scope(&pod, &["--merge", "a.json", "b.json"]).unwrap();
    for said in [
        "    - \"other/*.example.com\"\n",
        "    - \"shop/used.shop.svc.cluster.local\"\n",
        "\"*.example.com\" is not narrowed down",
    ] {
        assert!(merged.contains(said), "{said}: {merged}");
    }
    pod.replace("b.json", "{}");
    let error = scope(&pod, &["--merge", "a.json", "b.json"]).unwrap_err();
    assert!(error.contains("b.json"), "{error}");

    let metrics = pod.status(http::Method::GET, "/metrics/agent").await.unwrap();
    assert!(metrics.contains("\nistio_agent_xds_services 4\n"), "{metrics}");
    assert!(ask(&pod.envoy, "/ready").await.is_some());
}

#[tokio::test]
async fn a_gateway_gets_no_advice() {
    let Some(envoy) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let settings = Settings { envoy: Some(&envoy), environment: &[] };
    let pod = Pod::start_as("router", settings, &control_plane);
    pod.serves().await;
    let error = scope(&pod, &[]).unwrap_err();
    assert!(error.contains("found a router, expected a sidecar"), "{error}");
}
