//! Tests the relay between Envoy's socket and istiod's port.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use istio_agent::ca::Ca;
use istio_agent::ca::csr;
use istio_agent::ca::istio::IstioCa;
use istio_agent::ca::key::KeyType;
use istio_agent::trust::identity::SpiffeId;
use istio_agent::xds::Protocol;
use istio_agent::xds::interceptor::{Intercepting, Interceptor, Interceptors, Outcome};
use local_istiod::{LocalIstiod, Variant};
use prost::Message;
use tokio::sync::Semaphore;
use tonic::Code;

use crate::support::bench::Bench;
use crate::support::envoy::Envoy;
use crate::support::{CLUSTER, LISTENER, framed, soon, until};

const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";
const NAMES: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

pub const PROTOCOLS: [(Protocol, Variant); 2] =
    [(Protocol::Sotw, Variant::StateOfTheWorld), (Protocol::Delta, Variant::Delta)];

fn node() -> Option<Node> {
    Some(Node {
        id: "sidecar~127.0.0.1~bench.default~default.svc.cluster.local".into(),
        ..Default::default()
    })
}

/// Returns a request that ends with an unknown field.
pub fn request(protocol: Protocol, type_url: &str) -> Vec<u8> {
    let type_url = type_url.to_owned();
    let mut bytes = match protocol {
        Protocol::Sotw => {
            DiscoveryRequest { node: node(), type_url, ..Default::default() }.encode_to_vec()
        }
        Protocol::Delta => {
            DeltaDiscoveryRequest { node: node(), type_url, ..Default::default() }.encode_to_vec()
        }
    };
    prost::encoding::string::encode(777, &"from the future".to_owned(), &mut bytes);
    bytes
}

/// Returns a response with a resource of `size` bytes. It ends with an unknown field.
pub fn response(protocol: Protocol, type_url: &str, size: usize) -> Bytes {
    let any = Any { type_url: type_url.into(), value: vec![3; size] };
    let (type_url, nonce) = (type_url.to_owned(), "nonce".to_owned());
    let mut bytes = match protocol {
        Protocol::Sotw => {
            let resources = vec![any];
            DiscoveryResponse { resources, type_url, nonce, ..Default::default() }.encode_to_vec()
        }
        Protocol::Delta => {
            let resource = Some(any);
            let resources = vec![Resource { name: "r".into(), resource, ..Default::default() }];
            DeltaDiscoveryResponse { resources, type_url, nonce, ..Default::default() }
                .encode_to_vec()
        }
    };
    prost::encoding::string::encode(777, &"from the future".to_owned(), &mut bytes);
    bytes.into()
}

#[tokio::test]
async fn messages_pass_unchanged_both_ways_with_unknown_fields() {
    for (protocol, variant) in PROTOCOLS {
        let mut bench = Bench::start().await;
        let mut envoy = bench.envoy(protocol).await;
        let first = request(protocol, CLUSTER);
        envoy.send_raw(framed(&first));
        let mut istiod = bench.accepted().await;
        assert_eq!(istiod.variant, variant);
        assert_eq!(istiod.next_bytes().await.unwrap().unwrap(), first);
        for size in [0, 1, 100_000, 5_000_000] {
            let message = response(protocol, CLUSTER, size);
            let (sent, got) = tokio::join!(istiod.send_bytes(message.clone()), envoy.next_bytes());
            sent.unwrap();
            assert!(got == message, "{size} bytes came out changed");
            envoy.send_raw(framed(&first));
            assert_eq!(istiod.next_bytes().await.unwrap().unwrap(), first);
        }
        drop((envoy, istiod));
        bench.finish().await;
    }
}

#[tokio::test]
async fn istiod_gets_the_agents_metadata_and_not_envoys() {
    let mut bench = Bench::start().await;
    for account in ["first", "second"] {
        bench.write_token("default", account);
        let envoy = bench.envoy(Protocol::Delta).await;
        envoy.send_raw(framed(&request(Protocol::Delta, CLUSTER)));
        let istiod = bench.accepted().await;
        assert_eq!(istiod.caller.as_ref().unwrap().service_account, account);
        assert_eq!(istiod.headers["clusterid"], "Kubernetes");
        assert!(!istiod.headers.contains_key("x-envoy-internal"));
        assert!(!istiod.headers.contains_key("grpc-accept-encoding"));
    }
    assert_eq!(bench.control_plane.connections().len(), 1, "one connection for all streams");
    bench.finish().await;
}

#[tokio::test]
async fn the_newest_stream_replaces_an_older_one_of_either_protocol() {
    let mut bench = Bench::start().await;
    let older = bench.envoy(Protocol::Delta).await;
    older.send_raw(framed(&request(Protocol::Delta, CLUSTER)));
    let mut older_istiod = bench.accepted().await;
    older_istiod.next_bytes().await.unwrap();
    let newer = bench.envoy(Protocol::Sotw).await;
    newer.send_raw(framed(&request(Protocol::Sotw, CLUSTER)));
    assert_eq!(older.end().await.code(), Code::Ok);
    assert!(!matches!(soon(older_istiod.next_bytes()).await, Ok(Some(_))));
    let mut istiod = bench.accepted().await;
    assert!(istiod.next_bytes().await.unwrap().is_some());
    drop((newer, istiod));
    bench.finish().await;
}

#[tokio::test]
async fn each_of_a_thousand_streams_of_envoy_replaces_the_one_before() {
    let mut bench = Bench::start().await;
    let mut newest = bench.envoy(Protocol::Delta).await;
    for _ in 1..1_000 {
        let older = std::mem::replace(&mut newest, bench.envoy(Protocol::Delta).await);
        assert_eq!(older.end().await.code(), Code::Ok);
        while bench.control_plane.streams.try_recv().is_ok() {}
    }
    drop(newest);
    bench.finish().await;
}

#[tokio::test]
async fn the_stream_to_istiod_ends_with_envoys() {
    let mut bench = Bench::start().await;
    for half_close in [true, false] {
        let mut envoy = bench.envoy(Protocol::Delta).await;
        envoy.send_raw(framed(&request(Protocol::Delta, CLUSTER)));
        let mut istiod = bench.accepted().await;
        istiod.next_bytes().await.unwrap();
        if half_close {
            envoy.half_close();
            assert_eq!(envoy.end().await.code(), Code::Ok);
        } else {
            drop(envoy);
        }
        assert!(!matches!(soon(istiod.next_bytes()).await, Ok(Some(_))));
    }
    bench.finish().await;
}

#[tokio::test]
async fn workload_health_is_reported_between_envoys_requests_and_again_on_each_stream() {
    let mut bench = Bench::start().await;
    for (number, (protocol, _)) in PROTOCOLS.repeat(2).into_iter().enumerate() {
        // Streams of clients that are not children of the agent, such as an Envoy in a wrapper or an application,
        // report health as well.
        bench.is_envoy.store(number < PROTOCOLS.len(), Ordering::Relaxed);
        bench.health.send_replace(None);
        let ill = Err("status code was not from [200,400), bad code 503".to_owned());
        let mut envoy = bench.envoy(protocol).await;
        envoy.send_raw(framed(&request(protocol, CLUSTER)));
        let mut istiod = bench.accepted().await;
        assert_eq!(next_request(protocol, &mut istiod).await.0, CLUSTER);
        bench.health.send_replace(Some(ill.clone()));
        envoy.send_raw(framed(&request(protocol, LISTENER)));
        assert_eq!(next_request(protocol, &mut istiod).await.0, LISTENER);
        let (type_url, error) = next_request(protocol, &mut istiod).await;
        assert_eq!(type_url, HEALTH);
        assert_eq!(error, Some((13, ill.clone().unwrap_err())));
        bench.health.send_replace(Some(Ok(())));
        assert_eq!(next_request(protocol, &mut istiod).await, (HEALTH.into(), None));
        drop((envoy, istiod));
        envoy = bench.envoy(protocol).await;
        envoy.send_raw(framed(&request(protocol, LISTENER)));
        istiod = bench.accepted().await;
        assert_eq!(next_request(protocol, &mut istiod).await.0, LISTENER);
        assert_eq!(next_request(protocol, &mut istiod).await, (HEALTH.into(), None));
    }
    bench.finish().await;
}

#[tokio::test]
async fn envoys_stream_moves_to_the_first_control_plane_when_that_answers_again() {
    let (mut bench, second) = Bench::with_second().await;
    let first = std::mem::replace(&mut bench.control_plane, second);
    let options = first.kill().await;
    let mut envoy = bench.envoy(Protocol::Delta).await;
    envoy.send_raw(framed(&request(Protocol::Delta, CLUSTER)));
    let mut stream = bench.accepted().await;
    assert_eq!(next_request(Protocol::Delta, &mut stream).await.0, CLUSTER);
    answer(Protocol::Delta, &stream, &mut envoy).await;
    let first = LocalIstiod::start(options).await.unwrap();
    assert_eq!(first.connections(), []);
    tokio::time::pause();
    // The agent dials the first control plane again after 600 s and a random delay of up to 60 s.
    tokio::time::advance(Duration::from_secs(661)).await;
    tokio::time::resume();
    assert_eq!(envoy.end().await.code(), Code::Ok);
    let _second = std::mem::replace(&mut bench.control_plane, first);
    let envoy = bench.envoy(Protocol::Delta).await;
    envoy.send_raw(framed(&request(Protocol::Delta, CLUSTER)));
    let mut stream = bench.accepted().await;
    assert_eq!(next_request(Protocol::Delta, &mut stream).await.0, CLUSTER);
    drop((envoy, stream));
    bench.finish().await;
}

/// Sends a response of istiod, and reads it as Envoy.
async fn answer(protocol: Protocol, istiod: &local_istiod::Stream, envoy: &mut Envoy) {
    let message = response(protocol, CLUSTER, 1);
    istiod.send_bytes(message).await.unwrap();
    envoy.next_bytes().await;
}

/// Returns the type and the error of the next request that istiod receives.
async fn next_request(
    protocol: Protocol,
    istiod: &mut local_istiod::Stream,
) -> (String, Option<(i32, String)>) {
    let bytes = soon(istiod.next_bytes()).await.unwrap().unwrap();
    let (type_url, error) = match protocol {
        Protocol::Sotw => {
            let request = DiscoveryRequest::decode(bytes).unwrap();
            (request.type_url, request.error_detail)
        }
        Protocol::Delta => {
            let request = DeltaDiscoveryRequest::decode(bytes).unwrap();
            (request.type_url, request.error_detail)
        }
    };
    (type_url, error.map(|error| (error.code, error.message)))
}

#[tokio::test]
async fn a_killed_istiod_ends_envoys_stream_as_unavailable_even_inside_a_message() {
    let mut bench = Bench::start().await;
    for inside_a_message in [false, true] {
        let mut envoy = bench.envoy(Protocol::Sotw).await;
        envoy.send_raw(framed(&request(Protocol::Sotw, CLUSTER)));
        let istiod = bench.accepted().await;
        answer(Protocol::Sotw, &istiod, &mut envoy).await;
        let sending = response(Protocol::Sotw, CLUSTER, 50_000_000);
        if inside_a_message {
            istiod.send_bytes(sending).await.unwrap();
            let started = soon(envoy.first_bytes()).await;
            assert!(started > 0);
        }
        let idle = LocalIstiod::start(Default::default()).await.unwrap();
        let options = std::mem::replace(&mut bench.control_plane, idle).kill().await;
        assert_eq!(envoy.end().await.code(), Code::Unavailable);
        bench.control_plane = LocalIstiod::start(options).await.unwrap();
    }
    bench.finish().await;
}

#[tokio::test]
async fn a_stalled_envoy_never_blocks_a_certificate_request() {
    let mut bench = Bench::start().await;
    let envoy = bench.envoy(Protocol::Sotw).await;
    envoy.send_raw(framed(&request(Protocol::Sotw, CLUSTER)));
    let istiod = bench.accepted().await;
    let flood = tokio::task::spawn(async move {
        let message = response(Protocol::Sotw, CLUSTER, 30_000_000);
        while istiod.send_bytes(message.clone()).await.is_ok() {}
    });
    let authority = IstioCa::new(bench.istiod.clone(), String::new(), Duration::from_secs(10));
    let identity = SpiffeId::new("cluster.local", "default", "bench");
    for _ in 0..20 {
        let request = csr::generate(KeyType::P256, Default::default(), &identity).unwrap();
        let chain = authority.sign(&request.csr_pem, Duration::from_secs(60)).await.unwrap();
        assert_eq!(chain.len(), 2);
    }
    assert_eq!(bench.control_plane.connections().len(), 1, "one connection for both");
    drop(envoy);
    soon(flood).await.unwrap();
    bench.finish().await;
}

#[tokio::test]
async fn requests_that_istiod_does_not_read_end_envoys_stream() {
    let mut bench = Bench::start().await;
    let mut large = request(Protocol::Sotw, CLUSTER);
    prost::encoding::string::encode(778, &"x".repeat(1 << 20), &mut large);
    for is_envoy in [false, true] {
        bench.is_envoy.store(is_envoy, Ordering::Relaxed);
        let mut envoy = bench.envoy(Protocol::Sotw).await;
        (0..40).for_each(|_| envoy.send_raw(framed(&large)));
        let mut istiod = bench.accepted().await;
        // Responses pass while requests wait in the other direction.
        answer(Protocol::Sotw, &istiod, &mut envoy).await;
        (0..60).for_each(|_| envoy.send_raw(framed(&large)));
        if is_envoy {
            let status = envoy.end().await;
            assert_eq!(status.code(), Code::ResourceExhausted);
            let problem = "more than 67108864 bytes of requests wait for istiod";
            assert_eq!(status.message(), problem);
            continue;
        }
        for _ in 0..100 {
            assert!(soon(istiod.next_bytes()).await.unwrap().unwrap() == large);
        }
    }
    bench.finish().await;
}

#[tokio::test]
async fn incomplete_requests_of_other_clients_have_a_bound_too() {
    let mut bench = Bench::start().await;
    bench.is_envoy.store(false, Ordering::Relaxed);
    for _ in 0..3 {
        let envoy = bench.envoy(Protocol::Sotw).await;
        envoy.send_raw(Bytes::from_static(&[0, 8, 0, 0, 0])); // The header announces a message of 128 MiB.
        let part = Bytes::from(vec![0; 1 << 20]);
        (0..100).for_each(|_| envoy.send_raw(part.clone()));
        assert_eq!(envoy.end().await.code(), Code::ResourceExhausted);
    }
    let mut envoy = bench.envoy(Protocol::Sotw).await;
    envoy.send_raw(framed(&request(Protocol::Sotw, CLUSTER)));
    loop {
        // The first streams that istiod has accepted are those without a complete request.
        let mut istiod = bench.accepted().await;
        if let Ok(Some(_)) = soon(istiod.next_bytes()).await {
            answer(Protocol::Sotw, &istiod, &mut envoy).await;
            break;
        }
    }
    bench.finish().await;
}

#[tokio::test]
async fn a_first_delta_request_of_six_megabytes_passes() {
    let mut bench = Bench::start().await;
    let envoy = bench.envoy(Protocol::Delta).await;
    let versions = (0..60_000).map(|i| (format!("outbound|80||{i:060}"), format!("{i:030}")));
    let first = DeltaDiscoveryRequest {
        node: node(),
        type_url: CLUSTER.into(),
        initial_resource_versions: versions.collect(),
        ..Default::default()
    };
    assert!(first.encoded_len() > 6_000_000);
    envoy.send(&first);
    let mut istiod = bench.accepted().await;
    let got: DeltaDiscoveryRequest = istiod.next().await.unwrap().unwrap();
    assert_eq!(got.initial_resource_versions.len(), 60_000);
    drop((envoy, istiod));
    bench.finish().await;
}

#[tokio::test]
async fn bad_requests_end_the_stream_with_a_status() {
    let bench = Bench::with(Interceptors::default(), 1000).await;
    let cases: [(&[u8], Code, &str); 6] = [
        (&[0, 0, 0, 4, 0], Code::ResourceExhausted, "larger than max (1024 vs. 1000)"),
        (
            &[0, 0xff, 0xff, 0xff, 0xff],
            Code::ResourceExhausted,
            "larger than max (4294967295 vs. 1000)",
        ),
        (&[0, 0], Code::Internal, "2 bytes into a message"),
        (&[1, 0, 0, 0, 0], Code::Unimplemented, "compressed"),
        (&[0, 0, 0, 0, 2, 0x22, 9], Code::Internal, "not a protobuf message"),
        (&[0, 0, 0, 0, 9, 0x22], Code::Internal, "6 bytes into a message"),
    ];
    for (bytes, code, text) in cases {
        let mut envoy = bench.envoy(Protocol::Sotw).await;
        envoy.send_raw(Bytes::copy_from_slice(bytes));
        envoy.half_close();
        let status = envoy.end().await;
        assert_eq!(status.code(), code, "{}", status.message());
        assert!(status.message().contains(text), "{}", status.message());
    }
    bench.finish().await;
}

#[tokio::test]
async fn single_bytes_and_many_tiny_frames_are_understood() {
    let mut bench = Bench::start().await;
    let envoy = bench.envoy(Protocol::Sotw).await;
    let slow = framed(&request(Protocol::Sotw, CLUSTER));
    for byte in slow.iter() {
        envoy.send_raw(Bytes::copy_from_slice(&[*byte]));
        tokio::task::yield_now().await;
    }
    let mut istiod = bench.accepted().await;
    assert_eq!(istiod.next_bytes().await.unwrap().unwrap(), slow[5..]);
    let tiny = DiscoveryRequest { type_url: "t".into(), ..Default::default() };
    for _ in 0..10_000 {
        envoy.send(&tiny);
    }
    for _ in 0..10_000 {
        let got: DiscoveryRequest = soon(istiod.next()).await.unwrap().unwrap();
        assert_eq!(got, tiny);
    }
    drop((envoy, istiod));
    bench.finish().await;
}

#[tokio::test]
async fn other_methods_are_unimplemented() {
    let bench = Bench::start().await;
    for path in ["/envoy.service.cluster.v3.ClusterDiscoveryService/StreamClusters", "/"] {
        let envoy = Envoy::open_path(&bench.socket(), path).await;
        assert_eq!(envoy.end().await.code(), Code::Unimplemented);
    }
    bench.finish().await;
}

/// An interceptor that subscribes to name tables, ACKs good ones and NACKs bad ones. None of them reaches Envoy.
struct NameTableInterceptor;
/// An interceptor that rewrites one extension configuration for each permit.
struct ExtensionInterceptor(Arc<Semaphore>);

impl Interceptor for NameTableInterceptor {
    fn type_url(&self) -> &str {
        NAMES
    }
    fn subscribes(&self) -> bool {
        true
    }
    fn intercept(&self, _: Protocol, message: Bytes) -> Intercepting {
        let refused = message.windows(3).any(|bytes| bytes == b"bad");
        Box::pin(async move {
            if refused { Outcome::Rejected("a bad table".into()) } else { Outcome::Accepted }
        })
    }
}

impl Interceptor for ExtensionInterceptor {
    fn type_url(&self) -> &str {
        EXTENSION
    }
    fn subscribes(&self) -> bool {
        false
    }
    fn intercept(&self, _: Protocol, message: Bytes) -> Intercepting {
        let permits = self.0.clone();
        Box::pin(async move {
            permits.acquire().await.unwrap().forget();
            Outcome::Forward(rewritten(&message), None)
        })
    }
}

/// Returns the message with one more field.
fn rewritten(message: &[u8]) -> Bytes {
    let mut message = message.to_vec();
    prost::encoding::string::encode(778, &"rewritten".to_owned(), &mut message);
    message.into()
}

#[tokio::test]
async fn intercepted_types_are_subscribed_acked_and_rewritten_in_order() {
    let permits = Arc::new(Semaphore::new(0));
    let rewriting = ExtensionInterceptor(permits.clone());
    let interceptors = Interceptors::new(vec![Box::new(NameTableInterceptor), Box::new(rewriting)]);
    let mut bench = Bench::with(interceptors, 1 << 20).await;
    let protocol = Protocol::Sotw;
    let mut envoy = bench.envoy(protocol).await;
    envoy.send_raw(framed(&request(protocol, CLUSTER)));
    envoy.send_raw(framed(&request(protocol, LISTENER)));
    let mut istiod = bench.accepted().await;
    let mut asked = Vec::new();
    for _ in 0..3 {
        let request: DiscoveryRequest = soon(istiod.next()).await.unwrap().unwrap();
        asked.push(request.type_url);
    }
    assert_eq!(asked, [CLUSTER, LISTENER, NAMES]);

    let table = |value: &[u8], nonce: &str| DiscoveryResponse {
        version_info: "v".into(),
        resources: vec![Any { type_url: NAMES.into(), value: value.to_vec() }],
        type_url: NAMES.into(),
        nonce: nonce.into(),
        ..Default::default()
    };
    let extension = |size| response(protocol, EXTENSION, size);
    istiod.send(&table(b"good", "1")).await.unwrap();
    istiod.send_bytes(extension(10)).await.unwrap();
    istiod.send_bytes(extension(70_000)).await.unwrap();
    istiod.send(&table(b"bad", "2")).await.unwrap();
    istiod.send_bytes(response(protocol, "istio.io/debug", 10)).await.unwrap();
    istiod.send_bytes(response(protocol, CLUSTER, 100_000)).await.unwrap();

    for (nonce, problem) in [("1", None), ("2", Some("a bad table"))] {
        let answer: DiscoveryRequest = soon(istiod.next()).await.unwrap().unwrap();
        assert_eq!((&*answer.type_url, &*answer.version_info), (NAMES, "v"));
        assert_eq!(answer.response_nonce, nonce);
        assert_eq!(answer.error_detail.as_ref().map(|status| &*status.message), problem);
    }
    // The response with clusters overtakes the responses that wait to be rewritten. Those keep their order. The
    // response of type `istio.io/debug` is dropped: neither Envoy nor the agent uses the type.
    let cluster = response(protocol, CLUSTER, 100_000);
    assert_eq!(envoy.next_bytes().await, cluster);
    permits.add_permits(2);
    for size in [10, 70_000] {
        assert_eq!(envoy.next_bytes().await, rewritten(&extension(size)));
    }
    drop((envoy, istiod));
    bench.finish().await;
}

#[tokio::test]
async fn restarts_of_istiod_and_envoy_leak_no_task() {
    let mut bench = Bench::start().await;
    for _ in 0..20 {
        let mut envoy = bench.envoy(Protocol::Delta).await;
        envoy.send_raw(framed(&request(Protocol::Delta, CLUSTER)));
        let mut istiod = bench.accepted().await;
        istiod.next_bytes().await.unwrap();
        answer(Protocol::Delta, &istiod, &mut envoy).await;
        let idle = LocalIstiod::start(Default::default()).await.unwrap();
        let options = std::mem::replace(&mut bench.control_plane, idle).kill().await;
        assert_eq!(envoy.end().await.code(), Code::Unavailable);
        bench.control_plane = LocalIstiod::start(options).await.unwrap();
    }
    let handles = tokio::runtime::Handle::current();
    until("a quiet runtime", || handles.metrics().num_alive_tasks() < 12).await;
    bench.finish().await;
}
