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
    let directory = Directory::private(parent.path(), DIRECTORY, false).unwrap();
    let (_, header) = writer::open(&directory, TABLE).unwrap();
    assert_eq!(header.length, bytes.len() as u64);
}

/// A recorder whose batches go to the receiver.
fn recorder() -> (Recorder, EnvoyCache, mpsc::Receiver<Batch>) {
    let (batches, received) = mpsc::channel(2);
    let config = Config {
        directory: PathBuf::new(),
        max_age: Duration::MAX,
        after: Duration::from_secs(5),
    };
    let kept = LastKnownGood {
        batches,
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

#[tokio::test(start_paused = true)]
async fn an_envoy_that_takes_its_time_after_an_answer_does_not_count_as_waiting() {
    let (mut recorder, envoy, _batches) = recorder();
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
    recorder.passed(&received("1", &bytes));
    assert_eq!(envoy.due(), None);
    request(&mut recorder, CLUSTER, "1");
    seconds(10).await;
    assert_eq!(envoy.due(), None);
    request(&mut recorder, "endpoints", "");
    assert_eq!(envoy.due(), Some(Instant::now() + Duration::from_secs(5)));
}

#[tokio::test(start_paused = true)]
async fn a_frozen_disk_delays_discovery_by_one_second_in_all() {
    let (mut first, envoy, mut batches) = recorder();
    let mut second = Recorder::new(Some(envoy), 2, Protocol::Sotw);
    let bytes = response(Protocol::Sotw, "1", &resources(&[("a", "1")]), &[]);
    let large = Bytes::from(vec![0; 64 << 10]);
    let begin = Instant::now();
    for number in 0..200 {
        let nonce = number.to_string();
        for recorder in [&mut first, &mut second] {
            request(recorder, CLUSTER, &nonce);
            recorder.begins(CLUSTER);
            for _ in 0..5 {
                recorder.passes(&large);
                recorder.flush().await;
            }
            recorder.passed(&received(&nonce, &bytes));
            recorder.flush().await;
        }
    }
    assert_eq!(begin.elapsed(), Duration::from_secs(1));
    assert!(first.has_room().now_or_never().is_none());
    // The disk follows again: what was missed is told first, and only whole responses follow.
    let mut told = Vec::new();
    for _ in 0..4 {
        let (stream, ops) = batches.try_recv().unwrap();
        assert_eq!(first.has_room().now_or_never().is_some(), told.is_empty());
        let ops = ops.iter().map(|(_, op)| match op {
            WriteOp::Begin(_) => 'B',
            WriteOp::Bytes(_) => 'b',
            WriteOp::Complete(..) => 'c',
            WriteOp::Answered { .. } => 'a',
            WriteOp::Lost => 'l',
            WriteOp::End => 'e',
        });
        told.push((stream, ops.collect::<String>()));
        first.flush().await;
        second.flush().await;
    }
    let expected = [(1, "Bab"), (1, "b"), (1, "l"), (2, "Bl")];
    assert_eq!(told, expected.map(|(stream, ops)| (stream, ops.to_owned())));
    first.begins(CLUSTER);
    first.passes(&large);
    first.flush().await;
    assert!(matches!(
        batches.try_recv().unwrap().1[..],
        [(_, WriteOp::Bytes(_))]
    ));
}

/// The operations of a delta stream whose Envoy names these resources when it begins.
fn ops_of(held: &[&str]) -> Vec<WriteOp> {
    let (_, envoy, _) = recorder();
    let mut recorder = Recorder::new(Some(envoy), 1, Protocol::Delta);
    let request = DeltaDiscoveryRequest {
        node: Some(Node::default()),
        type_url: CLUSTER.into(),
        initial_resource_versions: held
            .iter()
            .map(|name| ((*name).to_owned(), "1".to_owned()))
            .collect(),
        ..Default::default()
    };
    let mut requests = RequestReader::new(Protocol::Delta, 1000);
    let request = frame(&request.encode_to_vec());
    requests
        .feed(request, |it| recorder.requested(&it))
        .unwrap();
    for nonce in ["1", "2"] {
        let bytes = response(Protocol::Delta, nonce, &resources(&[("c", nonce)]), &[]);
        recorder.begins(CLUSTER);
        recorder.passes(&bytes);
        recorder.passed(&received(nonce, &bytes));
        recorder.push(CLUSTER, answered(nonce, true).remove(0));
    }
    let pending = std::mem::take(&mut recorder.pending).into_iter();
    let ops = pending.map(|(_, op)| op);
    ops.filter(|op| !matches!(op, WriteOp::Begin(_))).collect()
}

#[test]
fn what_a_reconnecting_envoy_does_not_name_is_dropped_at_the_ack_of_the_first_response() {
    let three = resources(&[("a", "0"), ("b", "0"), ("lost", "0")]);
    for (held, expected) in [
        (&["a", "b"][..], &[("a", "0"), ("b", "0"), ("c", "1")][..]),
        (&["b"], &[("b", "0"), ("c", "1")]),
        (&[], &[("c", "1")]),
    ] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path(), Protocol::Delta);
        let bytes = response(Protocol::Delta, "0", &three, &[]);
        keep(&mut writer, "0", &bytes, Coverage::All);
        let mut ops = ops_of(held).into_iter();
        for op in ops.by_ref() {
            assert_kept(parent.path(), Protocol::Delta, Some(&three));
            let is_ack = matches!(op, WriteOp::Answered { .. });
            take(&mut writer, 1, vec![op]);
            if is_ack {
                break;
            }
        }
        let mut expected = resources(expected);
        assert_kept(parent.path(), Protocol::Delta, Some(&expected));
        take(&mut writer, 1, ops.collect());
        expected.insert("c".into(), "2".into());
        assert_kept(parent.path(), Protocol::Delta, Some(&expected));
    }
}

#[test]
fn a_reconnecting_envoy_of_which_nothing_is_kept_has_kept_what_is_as_much_as_it_names() {
    for (held, expected) in [
        (&["a"][..], Some(resources(&[("c", "2")]))),
        (&["a", "b"], None),
    ] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path(), Protocol::Delta);
        take(&mut writer, 1, ops_of(held));
        assert_kept(parent.path(), Protocol::Delta, expected.as_ref());
    }
}
