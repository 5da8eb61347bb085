//! Tests the control plane over real connections.

mod client;

use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::config::core::v3::address::Address;
use envoy_types::pb::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier;
use envoy_types::pb::envoy::config::endpoint::v3::{ClusterLoadAssignment, LbEndpoint};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use envoy_types::pb::google::rpc;
use prost::Message;
use tonic::{Code, Streaming};

use super::*;
use client::Client;

/// A type that only agents know, without a definition here.
const TYPE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn signs_for_a_token_and_then_for_the_certificate_it_signed() {
    let istiod = LocalIstiod::start(Options::default()).await.unwrap();
    let token = istiod.mint_token("shop", "cart", HOUR).unwrap();
    let by_token = Client::connect(&istiod, Some(token), None).await;
    let (key, chain) = by_token.certificate("cart", 600).await.unwrap();
    assert_eq!(chain.len(), 2);
    let by_certificate = Client::connect(&istiod, None, Some((key, chain))).await;
    by_certificate.certificate("cart", 600).await.unwrap();
    assert_eq!(istiod.certificates_signed(), 2);
    assert_eq!(istiod.connections().len(), 2);
}

#[tokio::test]
async fn refuses_certificates_with_istiods_codes() {
    let istiod = LocalIstiod::start(Options::default()).await.unwrap();
    let stranger = Client::connect(&istiod, None, None).await;
    let status = stranger.certificate("cart", 600).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(status.message(), "request authenticate failure");
    let token = istiod.mint_token("shop", "cart", HOUR).unwrap();
    let cart = Client::connect(&istiod, Some(token), None).await;
    let status = cart.certificate("admin", 600).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("CSR signing error (unable to validate SAN"));
    let status = cart.certificate("cart", 91 * 24 * 3600).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    istiod.refuse_certificates(Some(tonic::Status::unavailable("maintenance")));
    let status = cart.certificate("cart", 600).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    istiod.refuse_certificates(None);
    cart.certificate("cart", 0).await.unwrap();
}

#[tokio::test]
async fn a_scripted_stream_passes_messages_both_ways_and_ends_with_a_status() {
    let mut istiod = LocalIstiod::start(Options::default()).await.unwrap();
    let token = istiod.mint_token("shop", "cart", HOUR).unwrap();
    let client = Client::connect(&istiod, Some(token), None).await;
    let request = DiscoveryRequest { type_url: "t".to_owned(), ..DiscoveryRequest::default() };
    let (_requests, opening) = client.state_of_the_world(vec![request]);
    let script = async {
        let mut stream = istiod.streams.recv().await.unwrap();
        let request: DiscoveryRequest = stream.next().await.unwrap().unwrap();
        assert_eq!(request.type_url, "t");
        assert_eq!(stream.caller.as_ref().unwrap().service_account, "cart");
        assert!(!format!("{stream:?}").contains("Bearer"));
        stream.send_bytes(vec![0x0a, 1, b'7'].into()).await.unwrap();
        stream.end(tonic::Status::aborted("enough")).await;
    };
    let (opened, ()) = tokio::join!(opening, script);
    let mut responses = opened.unwrap();
    let response: DiscoveryResponse = responses.message().await.unwrap().unwrap();
    assert_eq!(response.version_info, "7");
    assert_eq!(responses.message().await.unwrap_err().code(), Code::Aborted);
}

#[tokio::test]
async fn refuses_streams_without_an_identity_but_not_in_plaintext() {
    let istiod = LocalIstiod::start(Options::default()).await.unwrap();
    let stranger = Client::connect(&istiod, None, None).await;
    let status = stranger.state_of_the_world(Vec::new()).1.await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(status.message(), "authentication failure");
    let plaintext = Options { security: Security::Plaintext, ..Options::default() };
    let mut istiod = LocalIstiod::start(plaintext).await.unwrap();
    let client = Client::connect(&istiod, None, None).await;
    let (_requests, opening) = client.state_of_the_world(Vec::new());
    let script = async { drop(istiod.streams.recv().await.unwrap()) };
    let (opened, ()) = tokio::join!(opening, script);
    assert!(opened.unwrap().message().await.unwrap().is_none());
    let status = client.certificate("cart", 600).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
}

#[tokio::test]
async fn a_stop_ends_streams_and_a_restart_has_its_address_and_root() {
    let mut istiod = LocalIstiod::start(Options::default()).await.unwrap();
    let (address, root) = (istiod.address, istiod.root_pem());
    let token = istiod.mint_token("shop", "cart", HOUR).unwrap();
    let client = Client::connect(&istiod, Some(token.clone()), None).await;
    let (_requests, opening) = client.state_of_the_world(Vec::new());
    let mut opening = std::pin::pin!(opening);
    let stream = tokio::select! {
        stream = istiod.streams.recv() => stream.unwrap(),
        _ = opening.as_mut() => panic!("headers left before the first message"),
    };
    let (options, opened) = tokio::join!(istiod.stop(), opening);
    assert_eq!(opened.unwrap_err().code(), Code::Unavailable);
    drop(stream);
    let again = LocalIstiod::start(options).await.unwrap();
    assert_eq!((again.address, again.root_pem()), (address, root));
    let client = Client::connect(&again, Some(token), None).await;
    client.certificate("cart", 600).await.unwrap();
}

#[tokio::test]
async fn a_kill_closes_connections_without_a_word() {
    let mut istiod = LocalIstiod::start(Options::default()).await.unwrap();
    let token = istiod.mint_token("shop", "cart", HOUR).unwrap();
    let client = Client::connect(&istiod, Some(token), None).await;
    let (_requests, opening) = client.state_of_the_world(Vec::new());
    let mut opening = std::pin::pin!(opening);
    let stream = tokio::select! {
        stream = istiod.streams.recv() => stream.unwrap(),
        _ = opening.as_mut() => panic!("headers left before the first message"),
    };
    let options = istiod.kill().await;
    assert!(opening.await.is_err());
    drop(stream);
    assert_eq!(LocalIstiod::start(options.clone()).await.unwrap().address, options.listen);
}

#[tokio::test]
async fn a_rotation_keeps_clients_of_both_roots() {
    let istiod = LocalIstiod::start(Options::default()).await.unwrap();
    let token = istiod.mint_token("shop", "cart", HOUR).unwrap();
    let client = Client::connect(&istiod, Some(token), None).await;
    let old = client.certificate("cart", 600).await.unwrap();
    istiod.rotate_root().unwrap();
    let new = client.certificate("cart", 600).await.unwrap();
    assert_ne!(old.1.last(), new.1.last());
    for certificate in [old, new] {
        let client = Client::connect(&istiod, None, Some(certificate)).await;
        client.certificate("cart", 600).await.unwrap();
    }
}

fn node(namespace: &str) -> Node {
    Node {
        id: format!("sidecar~127.0.0.1~cart-1.{namespace}~{namespace}.svc.cluster.local"),
        ..Node::default()
    }
}

async fn serving() -> (LocalIstiod, watch::Sender<Arc<Snapshot>>, Client) {
    let (sender, snapshots) = watch::channel(Arc::new(snapshot(b"first")));
    let options = Options { snapshots: Some(snapshots), ..Options::default() };
    let istiod = LocalIstiod::start(options).await.unwrap();
    let token = istiod.mint_token("shop", "cart", HOUR).unwrap();
    let client = Client::connect(&istiod, Some(token), None).await;
    (istiod, sender, client)
}

fn snapshot(content: &[u8]) -> Snapshot {
    let mut snapshot = Snapshot::default();
    snapshot.insert("common", Resource::new("a", TYPE, content.to_vec()));
    snapshot.insert("cart-1", Resource::new("large", TYPE, vec![7; 6 << 20]));
    snapshot.insert("another", Resource::new("b", TYPE, Vec::new()));
    snapshot
}

#[tokio::test]
async fn serves_the_resources_of_a_node_and_pushes_changes() {
    let (_istiod, snapshots, client) = serving().await;
    let first = DiscoveryRequest {
        node: Some(node("shop")),
        type_url: TYPE.to_owned(),
        ..DiscoveryRequest::default()
    };
    let (_requests, opening) = client.state_of_the_world(vec![first]);
    let mut responses = opening.await.unwrap();
    let response = responses.message().await.unwrap().unwrap();
    assert_eq!(response.resources.len(), 2);
    assert_eq!(response.resources[0].value, b"first");
    snapshots.send_replace(Arc::new(snapshot(b"second")));
    let response = responses.message().await.unwrap().unwrap();
    assert_eq!(response.resources[0].value, b"second");
}

#[tokio::test]
async fn serves_delta_streams_with_what_changed_only() {
    let (_istiod, snapshots, client) = serving().await;
    let first = DeltaDiscoveryRequest {
        node: Some(node("shop")),
        type_url: TYPE.to_owned(),
        ..DeltaDiscoveryRequest::default()
    };
    let (_requests, opening) = client.delta(vec![first]);
    let mut responses = opening.await.unwrap();
    assert_eq!(responses.message().await.unwrap().unwrap().resources.len(), 2);
    snapshots.send_replace(Arc::new(snapshot(b"second")));
    let response = responses.message().await.unwrap().unwrap();
    assert_eq!(response.resources.len(), 1);
    assert_eq!(response.resources[0].name, "a");
}

#[tokio::test]
async fn refuses_nodes_with_istiods_codes() {
    let (_istiod, _snapshots, client) = serving().await;
    for (node, code) in
        [(None, Code::InvalidArgument), (Some(node("bank")), Code::PermissionDenied)]
    {
        let first =
            DiscoveryRequest { node, type_url: TYPE.to_owned(), ..DiscoveryRequest::default() };
        let (_requests, opening) = client.state_of_the_world(vec![first]);
        assert_eq!(opening.await.unwrap_err().code(), code);
    }
}

const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// Starts a control plane with two endpoints, one of which stands for machines.
async fn with_machines() -> (LocalIstiod, Client) {
    let text = r#"{"@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": "cart", "endpoints": [{"lb_endpoints": [
        {"endpoint": {"address": {"socket_address": {"address": "10.0.0.9", "port_value": 1}}}},
        {"endpoint": {"address": {"socket_address":
            {"address": "workload-group:shop/machines", "port_value": 2}}}}]}]}"#;
    let mut snapshot = Snapshot::default();
    for resource in resource::parse(text).unwrap() {
        snapshot.insert("common", resource);
    }
    let options =
        Options { snapshots: Some(watch::channel(Arc::new(snapshot)).1), ..Options::default() };
    let istiod = LocalIstiod::start(options).await.unwrap();
    let token = istiod.mint_token("shop", "cart", HOUR).unwrap();
    let client = Client::connect(&istiod, Some(token), None).await;
    (istiod, client)
}

/// Returns the first request of a machine, which has a readiness probe if `is_probed`.
fn first_machine_request(address: &str, is_probed: bool) -> DeltaDiscoveryRequest {
    let value = |kind| Value { kind: Some(kind) };
    let of = |name: &str, kind| Struct { fields: [(name.to_owned(), value(kind))].into() };
    let group = Kind::StringValue("machines".to_owned());
    let mut metadata = of("AUTO_REGISTER_GROUP", group);
    if is_probed {
        let probe = Kind::StructValue(of("readinessProbe", Kind::NullValue(0)));
        metadata.fields.insert("PROXY_CONFIG".to_owned(), value(probe));
    }
    DeltaDiscoveryRequest {
        node: Some(Node {
            id: format!("sidecar~{address}~machine.shop~shop.svc.cluster.local"),
            metadata: Some(metadata),
            ..Node::default()
        }),
        type_url: TYPE.to_owned(),
        ..DeltaDiscoveryRequest::default()
    }
}

/// Returns the addresses in the next response to a client that subscribes to endpoints.
async fn pushed(responses: &mut Streaming<DeltaDiscoveryResponse>) -> Vec<String> {
    let response = responses.message().await.unwrap().unwrap();
    let any = response.resources[0].resource.clone().unwrap();
    let assignment = ClusterLoadAssignment::decode(&*any.value).unwrap();
    let endpoints = assignment.endpoints.iter().flat_map(|it| &it.lb_endpoints);
    let address = |endpoint: &LbEndpoint| {
        let HostIdentifier::Endpoint(endpoint) = endpoint.host_identifier.as_ref()? else {
            return None;
        };
        match endpoint.address.as_ref()?.address.as_ref()? {
            Address::SocketAddress(socket) => Some(socket.address.clone()),
            _ => None,
        }
    };
    endpoints.filter_map(address).collect()
}

#[tokio::test]
async fn a_machine_is_an_endpoint_while_connected_with_a_successful_probe() {
    let (_istiod, client) = with_machines().await;
    let first = DeltaDiscoveryRequest {
        node: Some(node("shop")),
        type_url: ENDPOINTS.to_owned(),
        resource_names_subscribe: vec!["cart".to_owned()],
        ..DeltaDiscoveryRequest::default()
    };
    let (_requests, opening) = client.delta(vec![first]);
    let mut endpoints = opening.await.unwrap();
    let alone = ["10.0.0.9"];
    let both = ["10.0.0.9", "10.0.0.1"];
    assert_eq!(pushed(&mut endpoints).await, alone);
    let health = |error_detail| DeltaDiscoveryRequest {
        type_url: HEALTH.to_owned(),
        error_detail,
        ..DeltaDiscoveryRequest::default()
    };
    let (machine, opening) = client.delta(vec![first_machine_request("10.0.0.1", true)]);
    let machine_responses = opening.await.unwrap();
    machine.send(health(None)).unwrap();
    // This is the first push: the machine was not an endpoint while its health was unknown.
    assert_eq!(pushed(&mut endpoints).await, both);
    machine.send(health(Some(rpc::Status::default()))).unwrap();
    assert_eq!(pushed(&mut endpoints).await, alone);
    machine.send(health(None)).unwrap();
    assert_eq!(pushed(&mut endpoints).await, both);
    // Only the newer stream of a machine counts.
    let (newer, opening) = client.delta(vec![first_machine_request("10.0.0.1", true)]);
    let _newer_responses = opening.await.unwrap();
    assert_eq!(pushed(&mut endpoints).await, alone);
    newer.send(health(None)).unwrap();
    assert_eq!(pushed(&mut endpoints).await, both);
    drop((machine, machine_responses));
    let (other, opening) = client.delta(vec![first_machine_request("10.0.0.2", false)]);
    let other_responses = opening.await.unwrap();
    let all = ["10.0.0.9", "10.0.0.1", "10.0.0.2"];
    assert_eq!(pushed(&mut endpoints).await, all);
    drop((other, other_responses));
    assert_eq!(pushed(&mut endpoints).await, both);
}
