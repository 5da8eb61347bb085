//! Tests that Envoy gets the same configuration through the agent as directly from istiod, and that streams
//! and certificate requests share connections to istiod.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse};
use istio_agent::envoy::admin::Admin;
use istio_agent::xds::Protocol;
use local_istiod::{Stream, Variant};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tonic::Status;

use crate::envoy::memory::open;
use crate::support::control_plane::ControlPlane;
use crate::support::pod::{BareEnvoy, Pod, Settings, ask};
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, routes, secured, secured_listener};
use crate::support::{CLUSTER, eventually, free_port, soon};

#[tokio::test]
async fn sotw_config_through_the_agent_equals_config_without_it() {
    compare("false").await;
}

#[tokio::test]
async fn delta_config_through_the_agent_equals_config_without_it() {
    compare("true").await;
}

async fn compare(delta: &str) {
    let Some(binary) = envoy_binary() else { return };
    let (plain, tls) = (free_port(), free_port());
    let resources = |mark: &str, backends: &[u16]| {
        vec![
            secured(cluster("carts")),
            cluster("books"),
            endpoints("carts", &[7001]),
            endpoints("books", backends),
            listener("plain", plain, "all"),
            secured_listener("tls", tls),
            routes("all", "books", mark),
        ]
    };
    let control_plane = ControlPlane::of(&resources("one", &[7002])).await;
    let settings = Settings { envoy: Some(&binary), environment: &[("ISTIO_DELTA_XDS", delta)] };
    let pod = Pod::serving(settings, &control_plane).await;
    let direct = BareEnvoy::serving(&binary, without_agent(&pod, &control_plane)).await;
    assert_same(&pod.envoy, &direct.admin, "one", 2).await;

    let mut changed = resources("two", &[7002, 7003]);
    changed.remove(2);
    changed.remove(0);
    control_plane.set(&changed).await;
    assert_same(&pod.envoy, &direct.admin, "two", 1).await;
}

/// Waits until both Envoys have the configuration with this `mark`, and asserts that their configurations are equal.
async fn assert_same(through_agent: &Admin, direct: &Admin, mark: &str, clusters: usize) {
    let has_all = |config: &Config| {
        let parts = |of: &str| config.get(of).map(Vec::as_slice).unwrap_or_default();
        parts("dynamic_active_clusters").len() == clusters
            && parts("dynamic_endpoint_configs").len() == clusters
            && parts("dynamic_listeners").len() == 2
            && parts("dynamic_active_secrets").len() == 2
            && parts("dynamic_route_configs").concat().contains(mark)
    };
    let mut last = Vec::new();
    for envoy in [through_agent, direct] {
        let config = eventually("an Envoy with all resources", async || {
            Some(config_of(envoy).await?).filter(has_all)
        });
        last.push(config.await);
    }
    assert_eq!(last[0], last[1]);
}

/// The lists of a configuration dump by their names, each sorted by the texts of its items.
type Config = BTreeMap<String, Vec<String>>;

/// Returns the resources that Envoy has got by discovery, without the times of the updates.
async fn config_of(envoy: &Admin) -> Option<Config> {
    let dump = ask(envoy, "/config_dump?include_eds").await?;
    let mut dump: Value = serde_json::from_str(&dump).unwrap();
    let mut config = Config::new();
    for section in dump["configs"].as_array_mut()? {
        // The secret streams of the two Envoys count their versions independently, so these versions may differ.
        let counts = section["@type"] == "type.googleapis.com/envoy.admin.v3.SecretsConfigDump";
        strip(section, counts);
        for (name, list) in section.as_object()?.iter() {
            let Some(list) = list.as_array().filter(|_| name.starts_with("dynamic")) else {
                continue;
            };
            let mut texts: Vec<_> = list.iter().map(ToString::to_string).collect();
            texts.sort();
            config.insert(name.clone(), texts);
        }
    }
    Some(config)
}

fn strip(value: &mut Value, version_too: bool) {
    match value {
        Value::Object(members) => {
            members.remove("last_updated");
            if version_too {
                members.remove("version_info");
            }
            members.values_mut().for_each(|v| strip(v, version_too));
        }
        Value::Array(items) => items.iter_mut().for_each(|v| strip(v, version_too)),
        _ => {}
    }
}

/// Returns the bootstrap of the agent's Envoy, with discovery from the control plane itself and without
/// static listeners, which would need the same ports.
fn without_agent(pod: &Pod, control_plane: &ControlPlane) -> Value {
    let mut bootstrap = pod.bootstrap();
    bootstrap["static_resources"]["listeners"] = json!([]);
    bootstrap["dynamic_resources"]["ads_config"]["grpc_services"][0]["initial_metadata"] = json!([
        { "key": "authorization", "value": format!("Bearer {}", control_plane.token()) },
        { "key": "clusterid", "value": "Kubernetes" },
    ]);
    for cluster in bootstrap["static_resources"]["clusters"].as_array_mut().unwrap() {
        let address = "/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address";
        let address = cluster.pointer_mut(address).unwrap();
        if let Some(path) = address["pipe"]["path"].as_str() {
            *address = json!({ "pipe": { "path": absolute(pod, path) } });
        }
        if cluster["name"] == "xds-grpc" {
            go_direct(cluster, control_plane);
        }
    }
    bootstrap
}

fn absolute(pod: &Pod, path: &str) -> String {
    let path = Path::new(path).strip_prefix("./").unwrap();
    pod.path(path.to_str().unwrap()).display().to_string()
}

fn go_direct(cluster: &mut Value, control_plane: &ControlPlane) {
    let port = control_plane.istiod.address.port();
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"] =
        json!({ "socket_address": { "address": "127.0.0.1", "port_value": port } });
    let root = control_plane.istiod.root_pem();
    cluster["transport_socket"] = json!({
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": "istiod.istio-system.svc",
            "common_tls_context": {
                "alpn_protocols": ["h2"],
                "validation_context": { "trusted_ca": { "inline_string": root } },
            },
        },
    });
}

#[tokio::test]
async fn streams_that_end_and_certificate_requests_share_one_connection() {
    let Some(binary) = envoy_binary() else { return };
    for delta in ["false", "true"] {
        let mut control_plane = ControlPlane::scripted(Duration::from_secs(5)).await;
        let settings = Settings {
            envoy: Some(&binary),
            environment: &[("ISTIO_DELTA_XDS", delta), ("SECRET_GRACE_PERIOD_RATIO", "1")],
        };
        let _pod = Pod::start(settings, &control_plane);
        for _ in 0..8 {
            let stream = soon(control_plane.istiod.streams.recv());
            answer_and_end(stream.await.unwrap()).await;
        }
        eventually("certificates are renewed", async || {
            (control_plane.istiod.certificates_signed() >= 4).then_some(())
        })
        .await;
        assert_eq!(control_plane.istiod.connections().len(), 1);
    }
}

#[tokio::test]
async fn another_client_does_not_evict_envoy_and_has_another_connection_to_istiod() {
    let Some(binary) = envoy_binary() else { return };
    let mut control_plane = ControlPlane::scripted(Duration::from_secs(3600)).await;
    let settings = Settings { envoy: Some(&binary), ..Settings::default() };
    let pod = Pod::start(settings, &control_plane);
    let streams = &mut control_plane.istiod.streams;
    let of_envoy = soon(streams.recv()).await.unwrap();
    let socket = UnixStream::connect(pod.path("etc/istio/proxy/XDS")).await;
    let _client = open(socket.unwrap(), Protocol::Sotw).await;
    let mut of_client = soon(streams.recv()).await.unwrap();
    of_client.next_bytes().await.unwrap().unwrap();
    answer_and_end(of_envoy).await;
    assert_eq!(control_plane.istiod.connections().len(), 2);
}

/// Answers the first request, waits for the next one, and ends the stream. An Envoy that has got a response
/// soon opens another stream.
async fn answer_and_end(mut stream: Stream) {
    stream.next_bytes().await.unwrap().unwrap();
    // Envoy requests clusters first.
    let (type_url, nonce) = (CLUSTER.to_owned(), "1".to_owned());
    let answer = match stream.variant {
        Variant::StateOfTheWorld => {
            DiscoveryResponse { type_url, nonce, ..Default::default() }.encode_to_vec()
        }
        Variant::Delta => {
            DeltaDiscoveryResponse { type_url, nonce, ..Default::default() }.encode_to_vec()
        }
    };
    stream.send_bytes(answer.into()).await.unwrap();
    soon(stream.next_bytes()).await.unwrap();
    stream.end(Status::unavailable("restarting")).await;
}
