//! Tests the stored configuration that a new Envoy gets.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::Extension;
use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
use proptest::prelude::*;

use super::super::recorder::identity as identity_of;
use super::super::replay::Replay;
use super::super::store::BLOCK;
use super::*;
use crate::xds::request::Subscription;

fn request(type_url: &str, names: &[&str], nonce: &str, node: &str) -> Bytes {
    let request = DeltaDiscoveryRequest {
        node: Some(Node { id: node.to_owned(), ..Node::default() }),
        type_url: type_url.to_owned(),
        response_nonce: nonce.to_owned(),
        resource_names_subscribe: names.iter().map(ToString::to_string).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    frame(&request.encode_to_vec())
}

/// Stores clusters `a` and `b`, their endpoints and no listener.
fn store(parent: &Path) {
    let mut pod = Pod::start(parent);
    let both = resources(&[("a", "1"), ("b", "2")]);
    pod.accept_first(&both);
    pod.want(Type::ENDPOINTS, &["a", "b"]);
    pod.accept(Type::ENDPOINTS, "first", &both, &[]);
    assert!(pod.write());
}

fn cache(config: Config) -> EnvoyCache {
    Pod::with(config).ledger.envoy_cache(2, Protocol::Delta).unwrap()
}

/// Sends a request, and returns the response as type, version and resources. Returns None if there is none.
async fn ask(replay: &mut Replay, request: Bytes) -> Option<(String, String, Resources)> {
    replay.requests.send(request).await.unwrap();
    let mut bytes = Vec::new();
    // The clock moves to the timeout only if nothing else happens.
    while let Ok(part) = tokio::time::timeout(Duration::from_millis(1), replay.next()).await {
        bytes.extend_from_slice(&part.ok()?);
    }
    let message = DeltaDiscoveryResponse::decode(bytes.get(HEAD..)?).unwrap();
    let named = message.resources.into_iter().map(|it| (it.name, it.resource.unwrap().value));
    let resources = named.map(|(name, value)| (name, String::from_utf8(value).unwrap()));
    Some((message.type_url, message.system_version_info, resources.collect()))
}

#[tokio::test(start_paused = true)]
async fn a_resource_of_5_mb_is_sent_in_parts_of_64_kb() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", &"content".repeat(700_000))]));
    assert!(pod.write());
    let mut replay = Replay::start(cache(config(parent.path())));
    replay.requests.send(request(CLUSTER, &[], "", "node")).await.unwrap();
    let mut lengths = Vec::new();
    while let Ok(part) = tokio::time::timeout(Duration::from_millis(1), replay.next()).await {
        lengths.push(part.unwrap().len());
    }
    assert!(lengths.iter().sum::<usize>() > 4_900_000, "{lengths:?}");
    assert!(lengths.iter().all(|length| *length <= BLOCK + HEAD), "{lengths:?}");
}

#[tokio::test(start_paused = true)]
async fn a_subscription_gets_the_stored_resources_of_its_names_once() {
    let parent = tempfile::tempdir().unwrap();
    store(parent.path());
    let mut replay = Replay::start(cache(config(parent.path())));
    let answer = |type_of: Type, pairs: &[(&str, &str)]| {
        Some((type_of.url().to_owned(), "version of first".to_owned(), resources(pairs)))
    };
    let (endpoints, other) = (Type::ENDPOINTS.url(), "type.googleapis.com/other");
    for (type_url, names, nonce, expected) in [
        (CLUSTER, vec![], "", answer(Type::CLUSTER, &[("a", "1"), ("b", "2")])),
        (CLUSTER, vec![], "kept", None),
        (endpoints, vec!["a"], "", answer(Type::ENDPOINTS, &[("a", "1")])),
        (endpoints, vec![], "kept", None),
        (endpoints, vec!["none"], "", None),
        (other, vec![], "", None),
        (LISTENER, vec![], "", answer(Type::LISTENER, &[])),
    ] {
        let found = ask(&mut replay, request(type_url, &names, nonce, "node")).await;
        assert_eq!(found, expected, "{type_url} {names:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn configuration_too_old_or_missing_or_of_another_node_is_not_served() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join(DIRECTORY).join(FILE);
    let first = |node| request(CLUSTER, &[], "", node);
    let problem = async |cache: EnvoyCache, request| {
        let mut replay = Replay::start(cache.clone());
        replay.requests.send(request).await.unwrap();
        let error = replay.next().await.unwrap_err().reason();
        assert!(cache.max_wait_for_istiod().is_none());
        error.split_once(&path.display().to_string()).unwrap().1.to_owned()
    };
    let missing = problem(cache(config(parent.path())), first("node")).await;
    assert_eq!(missing, ": it has no clusters or no listeners");
    store(parent.path());
    let other = problem(cache(config(parent.path())), first("other")).await;
    assert_eq!(other, ": it is stored for another node");
    let max_age = Duration::from_secs(99);
    let cache = cache(Config { max_age, ..config(parent.path()) });
    cache.ledger.0.state.lock().current -= 100;
    let old = problem(cache, first("node")).await;
    assert!(old.ends_with("_MAX_AGE is 1 min 39 s"), "{old}");
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_2_s_after_listeners_and_within_a_minute() {
    let parent = tempfile::tempdir().unwrap();
    let cache = cache(config(parent.path()));
    let second = Duration::from_secs(1);
    for (has_listeners, least) in [(false, 60), (true, 2)] {
        cache.ledger.0.state.lock().view(2).no_longer_served = has_listeners;
        let mut replay = Replay::start(cache.clone());
        let mut next = std::pin::pin!(replay.next());
        assert!(futures_util::poll!(&mut next).is_pending());
        advance(second * least - second / 2).await;
        assert!(futures_util::poll!(&mut next).is_pending());
        advance(second).await;
        let end = next.await.unwrap_err();
        assert!(end.reason().contains("next stream goes to istiod"), "{end:?}");
    }
}

#[test]
fn sotw_responses_are_not_stored() {
    let parent = tempfile::tempdir().unwrap();
    let pod = Pod::start(parent.path());
    assert!(pod.ledger.envoy_cache(1, Protocol::Sotw).is_none());
}

fn identity(id: &str, names: impl IntoIterator<Item = String>) -> String {
    let value = |name: &str| Value { kind: Some(Kind::StringValue(format!("value of {name}"))) };
    // Each new hash map has another random order.
    let fields: HashMap<_, _> = names.into_iter().map(|it| (it.clone(), value(&it))).collect();
    let node = Node {
        id: id.to_owned(),
        metadata: Some(Struct { fields }),
        extensions: vec![Extension { name: fastrand::u64(..).to_string(), ..Default::default() }],
        ..Node::default()
    };
    let message = DeltaDiscoveryRequest { node: Some(node), ..DeltaDiscoveryRequest::default() };
    identity_of(&Subscription::decode(&message.encode_to_vec()[..]).unwrap()).unwrap()
}

#[test]
fn the_identity_depends_on_id_and_metadata_but_not_on_map_order() {
    let names = |count: u32| (0..count).map(|it| it.to_string());
    let first = identity("a", names(30));
    for _ in 0..5 {
        assert_eq!(identity("a", names(30)), first);
    }
    assert_ne!(identity("b", names(30)), first);
    assert_ne!(identity("a", names(29)), first);
}

#[test]
fn metadata_that_changes_in_a_live_pod_is_not_identity() {
    let without = identity("a", []);
    assert!(without.starts_with("2:"), "the version of the rule: {without}");
    for name in ["ANNOTATIONS", "LABELS", "PLATFORM_METADATA"] {
        assert_eq!(identity("a", [name.to_owned()]), without, "{name}");
    }
    for name in ["STATIC_LABELS", "INSTANCE_IPS", "OF_NEXT_YEAR", "annotations"] {
        assert_ne!(identity("a", [name.to_owned()]), without, "{name}");
    }
    assert_eq!(identity_of(&Subscription::decode(&[][..]).unwrap()), None);
}

proptest! {
    #[test]
    fn any_bytes_are_a_request_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(read) = Subscription::decode(Bytes::from(bytes)) {
            let _ = identity_of(&read);
        }
    }
}
