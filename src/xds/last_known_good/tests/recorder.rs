//! Tests the operations that the recorder of a stream sends to the writer.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::{Extension, Node};
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};

use tokio::time::Instant;

use super::super::file::open;
use super::super::recorder::identity as identity_of;
use super::*;
use crate::xds::request::{RequestReader, Subscription};

#[tokio::test(start_paused = true)]
async fn a_name_table_that_arrives_during_another_message_is_stored_as_well() {
    const TABLE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
    let parent = tempfile::tempdir().unwrap();
    let config = Config {
        volume: Volume::named(parent.path()),
        max_bytes: 1 << 30,
        max_age: Duration::MAX,
        after: Duration::MAX,
        on_nack: true,
    };
    let (kept_handle, writing) =
        LastKnownGood::new(config, None, &Registry::default(), CancellationToken::new());
    let mut recorder = Recorder::new(kept_handle.envoy_cache(1, Protocol::Delta), 1);
    let clusters = resources(&[("a", "1"), ("b", "2")]);
    let bytes = response("1", &clusters, &[]);
    let received = |type_url: &str| Received {
        type_url: type_url.into(),
        version: "v".into(),
        nonce: "1".into(),
        resources: 2,
        removed: 0,
        bytes: bytes.len() as u64 - 5,
        consumer: Consumer::Envoy,
    };
    request(&mut recorder, CLUSTER, "", &[]);
    recorder.begin_response(CLUSTER);
    recorder.record_bytes(&bytes.slice(..2));
    recorder.record_message(&received(TABLE), &bytes.slice(5..), true);
    recorder.record_bytes(&bytes.slice(2..));
    recorder.complete_response(&received(CLUSTER));
    request(&mut recorder, CLUSTER, "1", &[]);
    recorder.flush().await;
    drop((recorder, kept_handle));
    writing.await;
    assert_stored(parent.path(), Some(&clusters));
    let directory = Directory::private(parent.path(), DIRECTORY, false).unwrap();
    let (_, header) = open(&directory, TABLE).unwrap().unwrap();
    let fields = DeltaDiscoveryResponse {
        type_url: String::new(),
        nonce: String::new(),
        ..DeltaDiscoveryResponse::decode(&bytes[5..]).unwrap()
    };
    assert_eq!(header.length, fields.encoded_len() as u64);
}

/// Returns the cache of an Envoy, and the receiver of the batches of its streams.
fn envoy(parent: &Path) -> (EnvoyCache, mpsc::Receiver<Batch>) {
    let (batches, received) = mpsc::channel(2);
    let store = LastKnownGood { batches, ..handle(parent) };
    (store.envoy_cache(1, Protocol::Delta).unwrap(), received)
}

/// Records a request of an Envoy that has these resources.
fn request(recorder: &mut Recorder, type_url: &str, nonce: &str, held: &[&str]) {
    let held = held.iter().map(|name| ((*name).to_owned(), "1".to_owned()));
    let message = DeltaDiscoveryRequest {
        node: Some(Node::default()),
        type_url: type_url.into(),
        response_nonce: nonce.into(),
        initial_resource_versions: held.collect(),
        ..Default::default()
    };
    RequestReader::new(Protocol::Delta, 1000)
        .feed(frame(&message.encode_to_vec()), |request| {
            recorder.record_request(&request);
        })
        .unwrap();
}

#[test]
fn sotw_responses_are_not_stored() {
    let store = handle(Path::new(""));
    assert!(store.envoy_cache(1, Protocol::Sotw).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_frozen_disk_delays_discovery_by_one_second_in_all() {
    let parent = tempfile::tempdir().unwrap();
    let (envoy, mut batches) = envoy(parent.path());
    let shared = envoy.store.shared.clone();
    let recorder = |stream| Recorder::new(Some(envoy.clone()), stream);
    let mut recorders = [recorder(1), recorder(2)];
    let large = resources(&[("a", &"1".repeat(5 << 16))]);
    let large = response("1", &large, &[]);
    let start = Instant::now();
    for number in 0..200 {
        let nonce = number.to_string();
        if number == 100 {
            recorders[1] = recorder(3);
        }
        for recorder in &mut recorders {
            request(recorder, CLUSTER, &nonce, &[]);
            recorder.begin_response(CLUSTER);
            for part in large.chunks(1 << 16) {
                recorder.record_bytes(&large.slice_ref(part));
                recorder.flush().await;
            }
            recorder.complete_response(&received(&nonce, &large));
            recorder.flush().await;
        }
    }
    assert_eq!(start.elapsed(), Duration::from_secs(1));
    assert!(recorders.iter().all(|recorder| recorder.batch.is_empty()));
    // The writer takes the batches that have waited, as after a recovery of the disk.
    let mut writer = Writer::new(shared);
    while let Ok(batch) = batches.try_recv() {
        writer.apply_batch(batch);
    }
    writer.write(false);
    assert_stored(parent.path(), None);
    let clusters = resources(&[("a", "1")]);
    let bytes = response("1", &clusters, &[]);
    let mut next = recorder(4);
    request(&mut next, CLUSTER, "", &[]);
    next.begin_response(CLUSTER);
    next.record_bytes(&bytes);
    next.complete_response(&received("1", &bytes));
    request(&mut next, CLUSTER, "1", &[]);
    next.flush().await;
    writer.apply_batch(batches.try_recv().unwrap());
    writer.write(false);
    assert_stored(parent.path(), Some(&clusters));
}

#[tokio::test]
async fn a_writer_that_has_stopped_is_not_a_slow_disk() {
    let parent = tempfile::tempdir().unwrap();
    let (envoy, batches) = envoy(parent.path());
    let shared = envoy.store.shared.clone();
    drop(batches);
    let mut recorder = Recorder::new(Some(envoy), 1);
    request(&mut recorder, CLUSTER, "", &[]);
    recorder.flush().await;
    assert!(recorder.batch.is_empty());
    assert!(!shared.is_stalled.load(Ordering::Relaxed));
}

/// Returns the operations of a stream with two accepted responses. Envoy names the resources `held` in its first
/// request.
fn ops_of(held: &[&str]) -> Vec<WriteOp> {
    let (envoy, _) = envoy(Path::new(""));
    let mut recorder = Recorder::new(Some(envoy), 1);
    request(&mut recorder, CLUSTER, "", held);
    for nonce in ["1", "2"] {
        let bytes = response(nonce, &resources(&[("c", nonce)]), &[]);
        recorder.begin_response(CLUSTER);
        recorder.record_bytes(&bytes);
        recorder.complete_response(&received(nonce, &bytes));
        request(&mut recorder, CLUSTER, nonce, &[]);
    }
    let pending = std::mem::take(&mut recorder.batch).into_iter();
    let ops = pending.map(|(_, op)| op);
    ops.filter(|op| !matches!(op, WriteOp::Begin(..))).collect()
}

#[test]
fn resources_that_a_reconnecting_envoy_does_not_name_are_removed_at_the_first_ack() {
    let three = resources(&[("a", "0"), ("b", "0"), ("lost", "0")]);
    for (held, expected) in [
        (&["a", "b"][..], &[("a", "0"), ("b", "0"), ("c", "1")][..]),
        (&["b"], &[("b", "0"), ("c", "1")]),
        (&[], &[("c", "1")]),
    ] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path());
        store_accepted(&mut writer, "0", &response("0", &three, &[]), Coverage::All);
        let mut ops = ops_of(held).into_iter();
        for op in ops.by_ref() {
            assert_stored(parent.path(), Some(&three));
            let is_ack = matches!(op, WriteOp::AckOrNack(..));
            apply_and_write(&mut writer, 1, vec![op]);
            if is_ack {
                break;
            }
        }
        let mut expected = resources(expected);
        assert_stored(parent.path(), Some(&expected));
        apply_and_write(&mut writer, 1, ops.collect());
        expected.insert("c".into(), "2".into());
        assert_stored(parent.path(), Some(&expected));
    }
}

#[test]
fn without_a_store_a_reconnecting_envoys_first_response_must_be_complete() {
    for (held, expected) in [(&["a"][..], Some(resources(&[("c", "2")]))), (&["a", "b"], None)] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path());
        apply_and_write(&mut writer, 1, ops_of(held));
        assert_stored(parent.path(), expected.as_ref());
    }
}

fn identity(id: &str, labels: usize) -> String {
    let labels = (0..labels).map(|i| (format!("label {i}"), i.to_string()));
    identity_with(id, labels)
}

fn identity_with(id: &str, metadata: impl Iterator<Item = (String, String)>) -> String {
    let value = |text: String| Value { kind: Some(Kind::StringValue(text)) };
    // Each new hash map has another random order.
    let fields: HashMap<_, _> = metadata.map(|(name, text)| (name, value(text))).collect();
    let node = Node {
        id: id.into(),
        metadata: Some(Struct { fields }),
        extensions: vec![Extension { name: fastrand::u64(..).to_string(), ..Default::default() }],
        ..Default::default()
    };
    let message = DeltaDiscoveryRequest { node: Some(node), ..Default::default() };
    let read = Subscription::decode(&message.encode_to_vec()[..]).unwrap();
    identity_of(&read).unwrap()
}

#[test]
fn the_identity_depends_on_id_and_metadata_but_not_on_the_order_of_maps() {
    let first = identity("a", 30);
    for _ in 0..5 {
        assert_eq!(identity("a", 30), first);
    }
    assert_ne!(identity("b", 30), first);
    assert_ne!(identity("a", 29), first);
}

#[test]
fn metadata_that_changes_while_a_pod_lives_is_not_part_of_the_identity() {
    let with = |name: &str| identity_with("a", [(name.to_owned(), "new".to_owned())].into_iter());
    let without = identity("a", 0);
    assert!(without.starts_with("2:"), "the version of the rule: {without}");
    for name in ["ANNOTATIONS", "LABELS", "PLATFORM_METADATA"] {
        assert_eq!(with(name), without, "{name}");
    }
    for name in ["STATIC_LABELS", "INSTANCE_IPS", "OF_NEXT_YEAR", "annotations"] {
        assert_ne!(with(name), without, "{name}");
    }
}

#[test]
fn a_request_without_a_node_has_no_identity() {
    let read = Subscription::decode(&[][..]).unwrap();
    assert_eq!(identity_of(&read), None);
}

proptest! {
    #[test]
    fn any_bytes_are_a_request_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(read) = Subscription::decode(Bytes::from(bytes)) {
            let _ = identity_of(&read);
        }
    }
}
