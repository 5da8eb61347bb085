//! Tests the stored configuration that a new Envoy gets.

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

use super::super::recorder::identity;
use super::super::replay::{Replay, answer};
use super::*;
use crate::xds::request::Subscription;

const NODE: &str = "node of these tests";

fn request(type_url: &str, names: &[&str], nonce: &str) -> Bytes {
    let request = DeltaDiscoveryRequest {
        node: Some(Node { id: NODE.into(), ..Default::default() }),
        type_url: type_url.to_owned(),
        response_nonce: nonce.to_owned(),
        resource_names_subscribe: names.iter().map(ToString::to_string).collect(),
        ..Default::default()
    };
    frame(&request.encode_to_vec())
}

/// Stores clusters `a` and `b`, their endpoints and no listener for the node of these tests.
fn store(parent: &Path) {
    let first = Subscription::decode(request(CLUSTER, &[], "").slice(5..)).unwrap();
    let mut writer = writer(parent);
    begin(&mut writer, 1, 1, &identity(&first).unwrap());
    let both = resources(&[("a", "1"), ("b", "2")]);
    for (type_url, resources) in
        [(CLUSTER, &both), (ENDPOINTS, &both), (LISTENER, &Resources::new())]
    {
        let bytes = response("1", resources, &[]);
        let response = response_ops("1", &bytes, Coverage::All).into_iter();
        let ops = response.chain(ack_or_nack_ops("1", true));
        writer.apply_batch((1, ops.map(|op| (type_url, op)).collect()));
    }
    writer.write(false);
}

/// The type, version and resources of a response.
type Answer = (String, String, Resources);

/// Returns the responses to these requests.
fn replayed(parent: &Path, max_age: Duration, requests: Vec<Bytes>) -> io::Result<Vec<Answer>> {
    let config = Config {
        volume: Volume::named(parent),
        max_bytes: 1 << 30,
        max_age,
        after: Duration::ZERO,
        on_nack: true,
    };
    let (store, _) =
        LastKnownGood::new(config, None, &Registry::default(), CancellationToken::new());
    let (sender, queue) = mpsc::channel(1000);
    requests.into_iter().for_each(|request| sender.try_send(request).unwrap());
    drop(sender);
    let (out, mut answers) = mpsc::channel(1000);
    answer(&store.shared, queue, &out)?;
    drop(out);
    let mut bytes = Vec::new();
    while let Some(block) = answers.blocking_recv() {
        bytes.extend_from_slice(&block?);
    }
    parsed(&bytes)
}

fn parsed(bytes: &[u8]) -> io::Result<Vec<Answer>> {
    let mut found = Vec::new();
    let mut rest = bytes;
    while let Some((head, behind)) = rest.split_first_chunk::<5>() {
        let length = u32::from_be_bytes(head[1..].try_into().unwrap()) as usize;
        let (message, behind) = behind.split_at(length);
        rest = behind;
        let message = DeltaDiscoveryResponse::decode(message)?;
        let anys = message.resources.into_iter().map(|it| it.resource.unwrap());
        let named = anys.map(|any| Named::decode(&any.value[..]).unwrap());
        found.push((
            message.type_url,
            message.system_version_info,
            named.map(|it| (it.name, it.content)).collect(),
        ));
    }
    Ok(found)
}

#[test]
fn a_subscription_gets_the_stored_resources_of_its_names_once() {
    let parent = tempfile::tempdir().unwrap();
    store(parent.path());
    let requests = vec![
        request(CLUSTER, &[], ""),
        request(CLUSTER, &[], "kept"),
        request(ENDPOINTS, &["a"], ""),
        request(ENDPOINTS, &[], "kept"),
        request(ENDPOINTS, &["none"], ""),
        request("type.googleapis.com/other", &[], ""),
        request(LISTENER, &[], ""),
    ];
    let day = Duration::from_secs(86400);
    let found = replayed(parent.path(), day, requests).unwrap();
    let answer = |type_url: &str, pairs: &[(&str, &str)]| {
        let version = "version of 1".to_owned();
        (type_url.to_owned(), version, resources(pairs))
    };
    let expected = [
        answer(CLUSTER, &[("a", "1"), ("b", "2")]),
        answer(ENDPOINTS, &[("a", "1")]),
        answer(LISTENER, &[]),
    ];
    assert_eq!(found, expected);
}

#[test]
fn stored_resources_that_are_too_old_or_of_another_node_are_not_served() {
    let parent = tempfile::tempdir().unwrap();
    let day = Duration::from_secs(86400);
    let refused = |max_age, request| {
        let refused = replayed(parent.path(), max_age, vec![request]);
        refused.unwrap_err().to_string()
    };
    let first = request(CLUSTER, &[], "");
    let store_path = parent.path().join(DIRECTORY);
    let file = |name: &str| store_path.join(name).display().to_string();
    let missing = "No such file or directory (os error 2)";
    assert_eq!(refused(day, first.clone()), format!("{}: {missing}", file("")));
    store(parent.path());
    // Each file was last current before this number of seconds; the endpoints are the oldest.
    let endpoints = request(ENDPOINTS, &["a"], "");
    for (name, seconds) in [("Cluster", 100), ("Listener", 50), ("ClusterLoadAssignment", 200)] {
        let mut content = fs::read(file(name)).unwrap();
        let mut header: serde_json::Value = serde_json::from_slice(&content[4..4096]).unwrap();
        header["current"] = header["current"].as_u64().unwrap().saturating_sub(seconds).into();
        let text = format!("{:4092}", header.to_string());
        let sum = crc32fast::hash(text.as_bytes()).to_be_bytes();
        content[..4096].copy_from_slice(&[&sum, text.as_bytes()].concat());
        fs::write(file(name), content).unwrap();
    }
    let both = vec![first.clone(), endpoints];
    assert_eq!(replayed(parent.path(), day, both.clone()).unwrap().len(), 2);
    let least = Duration::from_secs(150);
    assert_eq!(replayed(parent.path(), least, vec![first.clone()]).unwrap().len(), 1);
    replayed(parent.path(), least, both).unwrap_err();
    let old = refused(Duration::from_secs(99), first.clone());
    assert!(old.starts_with(&format!("{}: it is ", file(""))), "{old}");
    assert!(old.ends_with("_MAX_AGE is 1 min 39 s"), "{old}");
    let stranger = frame(&DeltaDiscoveryRequest::default().encode_to_vec());
    let of_another = format!("{}: it is stored for another node", file("Cluster"));
    assert_eq!(refused(day, stranger), of_another);
    fs::write(file("ClusterLoadAssignment"), "damaged").unwrap();
    let damaged = refused(day, first);
    assert!(damaged.starts_with(&format!("{}: ", file("ClusterLoadAssignment"))), "{damaged}");
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_two_seconds_after_envoy_has_answered_listeners_and_at_most_after_a_minute() {
    let parent = tempfile::tempdir().unwrap();
    let cache = handle(parent.path()).envoy_cache(1, Protocol::Delta).unwrap();
    let second = Duration::from_secs(1);
    for (has_listeners, least) in [(false, 60), (true, 2)] {
        cache.generation.no_longer_served.store(has_listeners, Ordering::Relaxed);
        let mut replay = Replay::start(cache.clone());
        let mut next = std::pin::pin!(replay.next());
        assert!(futures_util::poll!(&mut next).is_pending());
        tokio::time::advance(second * least - second / 2).await;
        assert!(futures_util::poll!(&mut next).is_pending());
        tokio::time::advance(second).await;
        let end = next.await.unwrap_err();
        assert!(end.reason().contains("next stream goes to istiod"), "{end:?}");
    }
}

#[test]
fn files_that_are_exchanged_while_they_are_read_change_nothing() {
    let parent = tempfile::tempdir().unwrap();
    store(parent.path());
    let store = handle(parent.path());
    let (requests, queue) = mpsc::channel(1000);
    let (out, mut answers) = mpsc::channel(1000);
    let thread = std::thread::spawn(move || answer(&store.shared, queue, &out));
    let ask = |type_url| requests.try_send(request(type_url, &["*"], ""));
    ask(CLUSTER).unwrap();
    let mut bytes = answers.blocking_recv().unwrap().unwrap().to_vec();
    let directory = parent.path().join(DIRECTORY);
    for entry in fs::read_dir(&directory).unwrap() {
        let other = parent.path().join("other");
        fs::write(&other, "another").unwrap();
        fs::rename(other, entry.unwrap().path()).unwrap();
    }
    ask(ENDPOINTS).unwrap();
    drop(requests);
    while let Some(block) = answers.blocking_recv() {
        bytes.extend_from_slice(&block.unwrap());
    }
    thread.join().unwrap().unwrap();
    let both = resources(&[("a", "1"), ("b", "2")]);
    let found: Vec<_> =
        parsed(&bytes).unwrap().into_iter().map(|(_, _, resources)| resources).collect();
    assert_eq!(found, [both.clone(), both]);
}
