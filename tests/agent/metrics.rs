//! What the agent tells of itself: counters, and what it has seen pass.

use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use envoy_types::pb::google::rpc;
use istio_agent::ca::csr::KeyType;
use istio_agent::ca::istio::IstioCa;
use istio_agent::clock::Clock;
use istio_agent::identity::SpiffeId;
use istio_agent::xds::Protocol;
use istio_agent::xds::observe::TypeSnapshot;
use istio_agent::xds::response::Taker;
use istio_agent::{sds, secrets};
use prost::Message;

use crate::support::{Bench, CLUSTER, LISTENER, eventually};

const README: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md"));

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
        resource: Some(Any {
            type_url: type_url.into(),
            value: vec![7; 20_000],
        }),
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
async fn each_type_is_told_with_its_last_response_and_envoys_answers() {
    let mut bench = Bench::start().await;
    let mut envoy = bench.envoy(Protocol::Delta).await;
    envoy.send(&request(CLUSTER, "", None));
    envoy.send(&request(LISTENER, "", None));
    let mut istiod = bench.accepted().await;
    let sent = [
        response(CLUSTER, "1", 2),
        response(LISTENER, "2", 1),
        response(CLUSTER, "3", 30),
    ];
    for response in &sent {
        istiod
            .send_bytes(response.encode_to_vec().into())
            .await
            .unwrap();
        envoy.next_bytes().await;
    }
    for (type_url, nonce, refusal) in [
        (CLUSTER, "1", None),
        (LISTENER, "2", Some("no such filter")),
        (CLUSTER, "3", None),
    ] {
        envoy.send(&request(type_url, nonce, refusal));
    }
    for _ in 0..5 {
        istiod.next_bytes().await.unwrap().unwrap();
    }
    let clusters = bench.seen(CLUSTER).unwrap();
    let bytes = (sent[0].encoded_len() + sent[2].encoded_len()) as u64;
    assert_eq!((clusters.requests, clusters.responses), (3, 2));
    assert_eq!((clusters.acks, clusters.nacks), (2, 0));
    assert_eq!(
        (clusters.bytes, clusters.taker),
        (bytes, Some(Taker::Envoy))
    );
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
    let envoy = bench.envoy(Protocol::Delta).await;
    envoy.send(&request(CLUSTER, "", None));
    let istiod = bench.accepted().await;
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
    eventually("the end of the stream", gone).await;
    bench.assert_page(&[
        "istio_agent_istiod_connection_terminations{type=\"cancelled\"} 1",
        "istio_agent_istiod_connection_terminations{type=\"error\"} 1",
        "istio_agent_envoy_connection_terminations{type=\"cancelled\"} 2",
    ]);
    // Whether the end shows in reading or in writing first is chance.
    let end = bench.observer.snapshot().last_end.unwrap();
    assert!(end.reason.starts_with("Envoy"), "{}", end.reason);
    bench.finish().await;
}

#[tokio::test]
async fn the_readme_names_every_metric() {
    let bench = Bench::start().await;
    let authority = IstioCa::new(bench.istiod.clone(), String::new(), Duration::from_secs(1));
    let config = secrets::Config {
        identity: SpiffeId::new("cluster.local", "default", "bench"),
        key_type: KeyType::P256,
        encoding: Default::default(),
        ttl: Duration::from_secs(3600),
        grace_ratio: 0.5,
        grace_jitter: 0.0,
        least_pause: secrets::LEAST_PAUSE,
        spread_by: String::new(),
        keep: None,
    };
    let clock = Clock::system();
    let (secrets, _) = secrets::new(config, authority, clock, &bench.registry);
    let config = secrets::files::Config {
        workload: None,
        system_roots: "none".into(),
        debounce: Duration::ZERO,
    };
    let (files, _) = secrets::files::new(config, Clock::system(), &bench.registry);
    let sources = sds::Sources {
        secrets: Some(secrets),
        files,
        serves_workload: true,
        style: sds::Style::default(),
    };
    sds::new(sources, &bench.registry);
    let names = format!("{:?}", bench.registry);
    let names: Vec<_> = names.split('"').filter(|n| n.contains('_')).collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        assert!(README.contains(&format!("| `{name}` |")), "{name}");
    }
    bench.finish().await;
}
