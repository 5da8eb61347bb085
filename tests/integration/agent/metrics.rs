//! Tests the counters of discovery, the snapshot that `/debug/xdsz` shows, and the table of metrics in the
//! documentation.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use envoy_types::pb::google::rpc;
use istio_agent::xds::Protocol;
use istio_agent::xds::observe::TypeSnapshot;
use istio_agent::xds::response::Consumer;
use prost::Message;

use crate::support::bench::Bench;
use crate::support::{CLUSTER, LISTENER, until};

const TABLE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md"));

fn request(type_url: &str, nonce: &str, refusal: Option<&str>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(Node {
            id: "sidecar~127.0.0.1~bench.default~default.svc.cluster.local".into(),
            ..Default::default()
        }),
        type_url: type_url.into(),
        response_nonce: nonce.into(),
        error_detail: refusal.map(|reason| rpc::Status {
            code: 13,
            message: reason.into(),
            details: Vec::new(),
        }),
        ..Default::default()
    }
}

fn response(type_url: &str, nonce: &str, resources: usize) -> DeltaDiscoveryResponse {
    let resource = Resource {
        name: "r".into(),
        resource: Some(Any { type_url: type_url.into(), value: vec![7; 20_000] }),
        ..Default::default()
    };
    DeltaDiscoveryResponse {
        system_version_info: format!("version of {nonce}"),
        resources: vec![resource; resources],
        type_url: type_url.into(),
        nonce: nonce.into(),
        ..Default::default()
    }
}

impl Bench {
    fn seen(&self, type_url: &str) -> Option<TypeSnapshot> {
        self.observer.snapshot().types.remove(type_url)
    }

    fn assert_page(&self, lines: &[&str]) {
        let page = self.registry.render();
        for line in lines {
            assert!(page.contains(&format!("\n{line}\n")), "{line} in\n{page}");
        }
    }
}

#[tokio::test]
async fn each_type_shows_its_last_response_and_acks() {
    let mut bench = Bench::start().await;
    let mut envoy = bench.envoy(Protocol::Delta).await;
    envoy.send(&request(CLUSTER, "", None));
    envoy.send(&request(LISTENER, "", None));
    let mut istiod = bench.accepted().await;
    let sent = [response(CLUSTER, "1", 2), response(LISTENER, "2", 1), response(CLUSTER, "3", 30)];
    for response in &sent {
        istiod.send_bytes(response.encode_to_vec().into()).await.unwrap();
        envoy.next_bytes().await;
    }
    for (type_url, nonce, refusal) in
        [(CLUSTER, "1", None), (LISTENER, "2", Some("no such filter")), (CLUSTER, "3", None)]
    {
        envoy.send(&request(type_url, nonce, refusal));
    }
    for _ in 0..5 {
        istiod.next_bytes().await.unwrap().unwrap();
    }
    let clusters = bench.seen(CLUSTER).unwrap();
    let bytes = (sent[0].encoded_len() + sent[2].encoded_len()) as u64;
    assert_eq!((clusters.requests, clusters.responses), (3, 2));
    assert_eq!((clusters.acks, clusters.nacks), (2, 0));
    assert_eq!((clusters.bytes, clusters.consumer), (bytes, Some(Consumer::Envoy)));
    let last = clusters.last_response.unwrap();
    assert_eq!((&*last.version, &*last.nonce), ("version of 3", "3"));
    assert_eq!((last.resources, last.answered), (30, true));
    assert_eq!(clusters.last_ack.unwrap().version, "version of 3");
    let listeners = bench.seen(LISTENER).unwrap();
    assert_eq!((listeners.acks, listeners.nacks), (0, 1));
    let refused = listeners.last_nack.unwrap();
    assert_eq!(refused.version.as_deref(), Some("version of 2"));
    assert_eq!(refused.reason, "no such filter");
    let largest = request(LISTENER, "2", Some("no such filter")).encoded_len();
    bench.assert_page(&[
        "istio_agent_xds_proxy_requests 5",
        "istio_agent_xds_proxy_responses 3",
        "istio_agent_xds_push_to_ack_seconds_count 2",
        &format!("istio_agent_pilot_xds_recv_max {largest}"),
        &format!("istio_agent_xds_nacks_total{{type=\"{LISTENER}\"}} 1"),
    ]);
    assert!(bench.observer.snapshot().stream.unwrap().connected);
    assert!(bench.istiod.status().connected.unwrap().tls.is_some());
    drop((envoy, istiod));
    bench.finish().await;
}

#[tokio::test]
async fn the_end_of_a_stream_counts_once_on_each_side() {
    let mut bench = Bench::start().await;
    let mut envoy = bench.envoy(Protocol::Delta).await;
    envoy.send(&request(CLUSTER, "", None));
    let istiod = bench.accepted().await;
    let first = response(CLUSTER, "1", 1).encode_to_vec().into();
    istiod.send_bytes(first).await.unwrap();
    envoy.next_bytes().await;
    istiod.end(tonic::Status::permission_denied("no")).await;
    envoy.end().await;
    bench.assert_page(&[
        "istio_agent_istiod_connection_terminations{type=\"error\"} 1",
        "istio_agent_envoy_connection_terminations{type=\"cancelled\"} 1",
    ]);
    let envoy = bench.envoy(Protocol::Delta).await;
    envoy.send(&request(CLUSTER, "", None));
    let _istiod = bench.accepted().await;
    drop(envoy);
    let gone = || bench.observer.snapshot().stream.is_none();
    until("the end of the stream", gone).await;
    bench.assert_page(&[
        "istio_agent_istiod_connection_terminations{type=\"cancelled\"} 1",
        "istio_agent_istiod_connection_terminations{type=\"error\"} 1",
        "istio_agent_envoy_connection_terminations{type=\"cancelled\"} 2",
    ]);
    // The agent may notice the end first when it reads or when it writes, so only the beginning of the reason is
    // certain.
    let end = bench.observer.snapshot().last_end.unwrap();
    assert!(end.reason.starts_with("Envoy"), "{}", end.reason);
    bench.finish().await;
}

/// Adds the names of the metrics in the code below `folder` to `names`, except those in tests.
fn names_in(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && stem != "tests" {
            names_in(&path, names);
        } else if path.extension().is_some_and(|end| end == "rs") && !stem.ends_with("tests") {
            let text = fs::read_to_string(&path).unwrap();
            let program = text.split("\nmod tests {").next().unwrap();
            let named = program.split("\"istio_agent_").skip(1);
            let rests = named.map(|rest| rest.split('"').next().unwrap());
            // The prefix alone is not a metric.
            names.extend(
                rests.filter(|rest| !rest.is_empty()).map(|rest| format!("istio_agent_{rest}")),
            );
        }
    }
}

#[test]
fn the_table_of_metrics_names_every_metric_and_no_other() {
    let mut names = BTreeSet::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    names_in(&source, &mut names);
    let cells = TABLE.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let cells = cells.filter(|name| name.starts_with("istio_agent_")).map(str::to_owned);
    assert_eq!(cells.collect::<BTreeSet<_>>(), names);
    assert!(!names.is_empty());
}
