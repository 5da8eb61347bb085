//! What a stream hands to the writer.

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};

use futures_util::FutureExt;

use super::*;
use crate::xds::request::RequestReader;
use crate::xds::response::Captured;

#[test]
fn a_message_that_the_agent_consumes_while_another_passes_is_kept_beside_it() {
    const TABLE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
    let parent = tempfile::tempdir().unwrap();
    let config = Config {
        directory: parent.path().to_owned(),
        max_age: Duration::MAX,
        after: Duration::MAX,
    };
    let (kept_handle, writing) = LastKnownGood::new(config, &Registry::default());
    let thread = std::thread::spawn(writing);
    let mut recorder = Recorder::new(Some(kept_handle.envoy_cache(1)), 1, Protocol::Delta);
    let clusters = resources(&[("a", "1"), ("b", "2")]);
    let bytes = response(Protocol::Delta, "1", &clusters, &[]);
    let received = |type_url: &str| Received {
        type_url: type_url.into(),
        version: "v".into(),
        nonce: "1".into(),
        resources: 2,
        bytes: bytes.len() as u64 - 5,
        consumer: Consumer::Envoy,
    };
    let mut requests = RequestReader::new(Protocol::Delta, 1000);
    let request = |nonce: &str| {
        frame(
            &DeltaDiscoveryRequest {
                node: Some(Node::default()),
                type_url: CLUSTER.into(),
                response_nonce: nonce.into(),
                ..Default::default()
            }
            .encode_to_vec(),
        )
    };
    requests
        .feed(request(""), |request| recorder.requested(&request))
        .unwrap();
    recorder.begins(CLUSTER);
    recorder.passes(&bytes.slice(..20));
    recorder.consumed(&Captured {
        interceptor: 0,
        received: received(TABLE),
        message: bytes.slice(5..),
    });
    recorder.passes(&bytes.slice(20..));
    recorder.passed(&received(CLUSTER));
    requests
        .feed(request("1"), |request| recorder.requested(&request))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.unwrap().block_on(recorder.flush());
    drop((recorder, kept_handle));
    thread.join().unwrap();
    assert_eq!(
        kept(parent.path(), Protocol::Delta).unwrap(),
        Some(clusters)
    );
    let manifest = Manifest::read(parent.path()).unwrap().unwrap();
    assert_eq!(manifest.types[TABLE].file.length, bytes.len() as u64);
}

/// A recorder whose ops go to the receiver.
fn recorder() -> (Recorder, EnvoyCache, mpsc::Receiver<(u32, WriteOp)>) {
    let (ops, received) = mpsc::channel(2);
    let config = Config {
        directory: PathBuf::new(),
        max_age: Duration::MAX,
        after: Duration::from_secs(5),
    };
    let kept = LastKnownGood {
        ops,
        ..LastKnownGood::new(config, &Registry::default()).0
    };
    let envoy = kept.envoy_cache(1);
    let recorder = Recorder::new(Some(envoy.clone()), 1, Protocol::Sotw);
    (recorder, envoy, received)
}

fn request(recorder: &mut Recorder, type_url: &str, nonce: &str) {
    let message = DiscoveryRequest {
        node: Some(Node::default()),
        type_url: type_url.into(),
        response_nonce: nonce.into(),
        ..Default::default()
    };
    RequestReader::new(Protocol::Sotw, 1000)
        .feed(frame(&message.encode_to_vec()), |request| {
            recorder.requested(&request);
        })
        .unwrap();
}

fn received(bytes: &Bytes, nonce: &str) -> Received {
    Received {
        type_url: CLUSTER.into(),
        version: "v".into(),
        nonce: nonce.into(),
        resources: 1,
        bytes: bytes.len() as u64 - 5,
        consumer: Consumer::Envoy,
    }
}

#[tokio::test(start_paused = true)]
async fn an_envoy_that_takes_its_time_after_an_answer_does_not_count_as_waiting() {
    let (mut recorder, envoy, _notes) = recorder();
    let bytes = response(Protocol::Sotw, "1", &resources(&[("a", "1")]), &[]);
    let seconds = |n| tokio::time::sleep(Duration::from_secs(n));
    assert_eq!(envoy.due(), None);
    request(&mut recorder, CLUSTER, "");
    let begin = Instant::now();
    assert_eq!(envoy.due(), Some(begin + Duration::from_secs(5)));
    seconds(4).await;
    recorder.begins(CLUSTER);
    recorder.passes(&bytes);
    assert_eq!(envoy.due(), Some(begin + Duration::from_secs(9)));
    recorder.passed(&received(&bytes, "1"));
    assert_eq!(envoy.due(), None);
    request(&mut recorder, CLUSTER, "1");
    seconds(10).await;
    assert_eq!(envoy.due(), None);
    request(&mut recorder, "endpoints", "");
    assert_eq!(envoy.due(), Some(Instant::now() + Duration::from_secs(5)));
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_does_not_follow_delays_a_response_by_a_second_and_costs_its_bytes() {
    let (mut recorder, _envoy, mut ops) = recorder();
    let bytes = response(Protocol::Sotw, "1", &resources(&[("a", "1")]), &[]);
    let large = Bytes::from(vec![0; 64 << 10]);
    request(&mut recorder, CLUSTER, "");
    let begin = Instant::now();
    for nonce in ["1", "2", "3"] {
        recorder.begins(CLUSTER);
        for _ in 0..5 {
            recorder.passes(&large);
            recorder.flush().await;
        }
        recorder.passed(&received(&bytes, nonce));
        request(&mut recorder, CLUSTER, nonce);
        recorder.flush().await;
    }
    assert_eq!(begin.elapsed(), Duration::from_secs(1));
    assert!(recorder.has_room().now_or_never().is_none());
    let mut kinds = String::new();
    while let Ok((_, op)) = ops.try_recv() {
        assert!(kinds.len() > 5 || recorder.has_room().now_or_never().is_some());
        kinds.push(match op {
            WriteOp::Node { .. } => 'n',
            WriteOp::Bytes(_) => 'b',
            WriteOp::Complete(..) => 'c',
            WriteOp::Answered { .. } => 'a',
            _ => '?',
        });
        recorder.flush().await;
    }
    assert_eq!(kinds, "nbcacaca");
    assert!(recorder.has_room().now_or_never().is_none());
    recorder.begins(CLUSTER);
    recorder.passes(&large);
    recorder.flush().await;
    assert!(matches!(ops.try_recv(), Ok((_, WriteOp::Bytes(_)))));
}
