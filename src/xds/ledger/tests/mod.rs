mod damage;
mod disk;
mod histories;
mod replay;
mod store;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use envoy_types::pb::google::rpc;
use prost::Message as _;
use tokio::time::advance;

use super::file::{Record, Writer};
use super::rejected::{Rejected, rejected};
use super::store::{Piece, Store};
use super::*;
use crate::logging::logged;
use crate::xds::request::{HEAD, Request, frame};
use crate::xds::response::{Consumer, Received};
use crate::xds::wire::NameDigest;

/// The contents of resources by their names.
type Resources = BTreeMap<String, String>;

/// An Envoy with one stream, the ledger, and the task's writer.
struct Pod {
    ledger: Ledger,
    writer: Writer,
    pid: i32,
    streams: u32,
    recorder: Recorder,
}

fn config(parent: &Path) -> Config {
    Config {
        volume: Some(Volume::named(parent)),
        former: None,
        own: None,
        max_bytes: 1 << 30,
        max_age: Duration::from_secs(3600),
        after: Duration::from_secs(5),
        on_nack: true,
        on_demand: false,
    }
}

fn resources(pairs: &[(&str, &str)]) -> Resources {
    let owned = |(name, content): &(&str, &str)| ((*name).to_owned(), (*content).to_owned());
    pairs.iter().map(owned).collect()
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn digest(name: &str) -> NameDigest {
    NameDigest::of(name.as_bytes())
}

impl Pod {
    /// Starts an Envoy with an agent of its own, which reads the file.
    fn start(parent: &Path) -> Self {
        Self::with(config(parent))
    }

    fn with(config: Config) -> Self {
        let parent = config.volume.clone().unwrap().directory;
        config.prepare();
        let (ledger, _) = Ledger::new(config, None, &Registry::default(), CancellationToken::new());
        if let Some((store, record)) = read(&ledger.0) {
            ledger.0.state.lock().install(store, record);
        }
        let cache = ledger.envoy_cache(1, Protocol::Delta);
        let recorder = Recorder::new(cache, 1);
        Self { ledger, writer: Writer::new(parent), pid: 1, streams: 1, recorder }
    }

    /// Begins another stream of the Envoy of this process.
    fn reconnect(&mut self, pid: i32) {
        (self.pid, self.streams) = (pid, self.streams + 1);
        let cache = self.ledger.envoy_cache(pid, Protocol::Delta);
        self.recorder = Recorder::new(cache, self.streams);
    }

    fn request(&mut self, type_of: Type, change: impl FnOnce(&mut DeltaDiscoveryRequest)) {
        let node = Node { id: "node".to_owned(), ..Node::default() };
        let mut message = DeltaDiscoveryRequest {
            type_url: type_of.url().to_owned(),
            node: Some(node),
            ..DeltaDiscoveryRequest::default()
        };
        change(&mut message);
        let frame = frame(&message.encode_to_vec());
        self.recorder.record_request(&Request::decode(Protocol::Delta, frame).unwrap());
    }

    /// Subscribes to a type, with the resources that Envoy has.
    fn subscribe(&mut self, type_of: Type, has: &[&str]) {
        let versions = has.iter().map(|name| ((*name).to_owned(), "1".to_owned()));
        self.request(type_of, |it| it.initial_resource_versions = versions.collect());
    }

    /// Subscribes to resources by their names.
    fn want(&mut self, type_of: Type, names: &[&str]) {
        self.request(type_of, |it| it.resource_names_subscribe = owned(names));
    }

    /// Subscribes to all types that a record needs.
    fn subscribe_all(&mut self) {
        NEEDED.into_iter().for_each(|type_of| self.subscribe(type_of, &[]));
    }

    fn response(type_of: Type, nonce: &str, changed: &Resources, removed: &[&str]) -> Bytes {
        let resource = |(name, content): (&String, &String)| Resource {
            name: name.clone(),
            resource: Some(Any {
                type_url: type_of.url().to_owned(),
                value: content.clone().into(),
            }),
            ..Resource::default()
        };
        let message = DeltaDiscoveryResponse {
            resources: changed.iter().map(resource).collect(),
            removed_resources: removed.iter().map(|it| (*it).to_owned()).collect(),
            type_url: type_of.url().to_owned(),
            nonce: nonce.to_owned(),
            ..DeltaDiscoveryResponse::default()
        };
        frame(&message.encode_to_vec())
    }

    fn received(type_of: Type, nonce: &str) -> Received {
        Received {
            type_url: type_of.url().to_owned(),
            version: format!("version of {nonce}"),
            nonce: nonce.to_owned(),
            resources: 1,
            removed: 0,
            bytes: 1,
            consumer: Consumer::Envoy,
            names: Default::default(),
        }
    }

    /// Passes a response to Envoy in chunks of this size.
    fn pass(&mut self, type_of: Type, nonce: &str, response: &Bytes, chunk: usize) {
        let length = (response.len() - HEAD) as u64;
        self.recorder.begin_response(type_of.url(), length);
        for part in response.chunks(chunk) {
            self.recorder.record_bytes(&Bytes::copy_from_slice(part));
        }
        self.recorder.complete_response(&Self::received(type_of, nonce), None);
    }

    fn push(&mut self, type_of: Type, nonce: &str, changed: &Resources, removed: &[&str]) {
        let response = Self::response(type_of, nonce, changed, removed);
        self.pass(type_of, nonce, &response, 16 << 10);
    }

    fn ack(&mut self, type_of: Type, nonce: &str) {
        self.request(type_of, |it| it.response_nonce = nonce.to_owned());
    }

    fn nack(&mut self, type_of: Type, nonce: &str, reason: &str) {
        let status = rpc::Status { code: 13, message: reason.to_owned(), ..rpc::Status::default() };
        self.request(type_of, |it| {
            it.response_nonce = nonce.to_owned();
            it.error_detail = Some(status);
        });
    }

    /// Passes a response that Envoy accepts.
    fn accept(&mut self, type_of: Type, nonce: &str, changed: &Resources, removed: &[&str]) {
        self.push(type_of, nonce, changed, removed);
        self.ack(type_of, nonce);
    }

    /// Accepts a first response of each needed type, with these clusters.
    fn accept_first(&mut self, clusters: &Resources) {
        self.subscribe_all();
        self.accept(Type::CLUSTER, "first", clusters, &[]);
        self.accept(Type::LISTENER, "first", &Resources::new(), &[]);
    }

    /// Returns the resources in the ledger.
    fn stored(&self, type_of: Type) -> Resources {
        let (pieces, ..) = self.ledger.0.state.lock().read(type_of, None);
        contents(pieces)
    }

    /// Writes a batch if the ledger has one. Returns true if it has.
    fn write(&mut self) -> bool {
        let mut state = self.ledger.0.state.lock();
        while state.compact() {}
        let batch = state.take_batch(false);
        let is_written = batch.is_some();
        if let Some(batch) = batch {
            let written = self.writer.write(&batch).map(|length| (batch.record, length));
            assert!(state.conclude(written).is_none());
        }
        is_written
    }
}

fn contents(pieces: Vec<Piece>) -> Resources {
    let mut bytes = Vec::new();
    for piece in pieces {
        for part in piece.parts().unwrap() {
            bytes.extend_from_slice(&part.unwrap());
        }
    }
    let message = DeltaDiscoveryResponse::decode(&bytes[..]).unwrap();
    assert!(message.removed_resources.is_empty());
    let count = message.resources.len();
    let content = |it: Resource| (it.name, it.resource.unwrap().value);
    let text = |(name, value)| (name, String::from_utf8(value).unwrap());
    let found: Resources = message.resources.into_iter().map(content).map(text).collect();
    assert_eq!(found.len(), count);
    found
}

/// Returns the clusters that the file has.
fn in_file(parent: &Path) -> Resources {
    let (mut store, _) = file::read(parent, u64::MAX).unwrap().unwrap();
    contents_of(&mut store, Type::CLUSTER)
}

fn contents_of(store: &mut Store, type_of: Type) -> Resources {
    let places = store.all(type_of);
    contents(store.pieces(places))
}

#[tokio::test(start_paused = true)]
async fn a_response_is_stored_at_its_ack_and_not_after_a_nack() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    let first = resources(&[("a", "1"), ("b", "1")]);
    pod.accept_first(&first);
    for nonce in ["2", "3"] {
        pod.push(Type::CLUSTER, nonce, &resources(&[("a", "2")]), &[]);
        assert_eq!(pod.stored(Type::CLUSTER), first);
        match nonce {
            "2" => pod.nack(Type::CLUSTER, nonce, "no"),
            _ => pod.reconnect(1),
        }
        assert_eq!(pod.stored(Type::CLUSTER), first);
    }
    pod.subscribe(Type::CLUSTER, &["a", "b"]);
    pod.accept(Type::CLUSTER, "4", &resources(&[("a", "3"), ("c", "1")]), &["b"]);
    assert_eq!(pod.stored(Type::CLUSTER), resources(&[("a", "3"), ("c", "1")]));
}

#[tokio::test(start_paused = true)]
async fn the_first_response_of_a_stream_replaces_what_envoy_does_not_have() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("kept", "1"), ("gone", "1")]));
    assert!(pod.write());
    pod.reconnect(1);
    pod.subscribe(Type::CLUSTER, &["kept"]);
    pod.subscribe(Type::LISTENER, &[]);
    pod.accept(Type::CLUSTER, "2", &resources(&[("new", "1")]), &[]);
    assert!(!pod.write(), "listeners are not answered");
    pod.accept(Type::LISTENER, "2", &Resources::new(), &[]);
    let expected = resources(&[("kept", "1"), ("new", "1")]);
    assert_eq!(pod.stored(Type::CLUSTER), expected);
    assert!(pod.write());
    assert_eq!(in_file(parent.path()), expected);
}

#[tokio::test(start_paused = true)]
async fn no_record_is_written_while_envoy_has_a_mix_of_versions() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.subscribe_all();
    pod.accept(Type::CLUSTER, "1", &resources(&[("a", "1")]), &[]);
    assert!(!pod.write(), "listeners are not answered");
    pod.accept(Type::LISTENER, "1", &resources(&[("l", "1")]), &[]);
    assert!(pod.write());
    pod.push(Type::CLUSTER, "2", &resources(&[("a", "2")]), &[]);
    assert!(!pod.write(), "a response is not answered");
    pod.ack(Type::CLUSTER, "2");
    pod.recorder.begin_response(LISTENER, 1000);
    assert!(!pod.write(), "a response is incomplete");
    pod.reconnect(1);
    pod.subscribe(Type::CLUSTER, &["a"]);
    pod.subscribe(Type::LISTENER, &["l"]);
    for type_of in NEEDED {
        pod.accept(type_of, "3", &Resources::new(), &[]);
    }
    pod.want(Type::ENDPOINTS, &["a"]);
    assert!(!pod.write(), "a resource is missing");
    pod.accept(Type::ENDPOINTS, "1", &resources(&[("a", "1")]), &[]);
    assert!(pod.write());
    assert_eq!(in_file(parent.path()), resources(&[("a", "2")]));
    // A name that istiod does not have, and a type that Envoy no longer asks for, are not awaited for ever.
    pod.want(Type::ROUTES, &["no"]);
    assert!(!pod.write());
    advance(Duration::from_secs(61)).await;
    pod.accept(Type::CLUSTER, "3", &resources(&[("a", "3")]), &[]);
    assert!(pod.write());
    assert_eq!(in_file(parent.path()), resources(&[("a", "3")]));
}

#[tokio::test(start_paused = true)]
async fn the_log_says_once_for_what_a_record_waits() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.subscribe_all();
    pod.accept(Type::CLUSTER, "1", &resources(&[("a", "1")]), &[]);
    let mut log = String::new();
    for _ in 0..3 {
        advance(Duration::from_secs(61)).await;
        log += &logged(|| assert!(!pod.write()));
    }
    let expected = "Envoy has not accepted clusters and listeners";
    assert_eq!(log.matches(expected).count(), 1, "{log}");
}

#[tokio::test(start_paused = true)]
async fn five_hundred_unanswered_responses_are_merged_and_accepted_with_the_last() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "old"), ("b", "old")]));
    for push in 0..500 {
        let content = push.to_string();
        let name = if push % 2 == 0 { "a" } else { "b" };
        pod.push(Type::CLUSTER, &content, &resources(&[(name, &content)]), &[]);
    }
    for push in 0..437 {
        pod.ack(Type::CLUSTER, &push.to_string());
        let expected = if push < 436 { ["old", "old"] } else { ["436", "435"] };
        let [a, b] = expected;
        assert_eq!(pod.stored(Type::CLUSTER), resources(&[("a", a), ("b", b)]), "{push}");
    }
    for push in 437..500 {
        pod.ack(Type::CLUSTER, &push.to_string());
    }
    let expected = resources(&[("a", "498"), ("b", "499")]);
    assert_eq!(pod.stored(Type::CLUSTER), expected);
    assert!(pod.write());
    assert_eq!(in_file(parent.path()), expected);
}

#[tokio::test(start_paused = true)]
async fn a_rejected_one_of_merged_responses_does_not_cost_the_accepted_ones() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "old"), ("b", "old")]));
    for push in 0..70 {
        let name = if push == 0 { "a" } else { "b" };
        let nonce = push.to_string();
        pod.push(Type::CLUSTER, &nonce, &resources(&[(name, &nonce)]), &[]);
    }
    pod.nack(Type::CLUSTER, "0", "no");
    for push in 1..70 {
        pod.ack(Type::CLUSTER, &push.to_string());
    }
    assert_eq!(pod.stored(Type::CLUSTER), resources(&[("a", "old"), ("b", "69")]));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_early_changes_neither_file_nor_age() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "1")]));
    assert!(pod.write());
    let mut pod = Pod::start(parent.path());
    pod.ledger.0.state.lock().current -= 1000;
    pod.subscribe_all();
    pod.accept(Type::CLUSTER, "1", &resources(&[("a", "2")]), &[]);
    pod.recorder.stop();
    for _ in 0..3 {
        assert!(!pod.write());
        advance(Duration::from_secs(61)).await;
    }
    assert!(pod.ledger.0.state.lock().age() >= Duration::from_secs(1000));
    assert_eq!(in_file(parent.path()), resources(&[("a", "1")]));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_recorded_if_the_directory_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.ledger.0.state.lock().turn_off();
    pod.accept_first(&resources(&[("a", "1")]));
    assert!(pod.ledger.0.state.lock().store.is_empty());
    assert_eq!(pod.ledger.snapshot(), None);
    // Zeros would say that Envoy has no listener.
    assert_eq!(pod.ledger.accepted(), BTreeMap::new());
}

#[tokio::test(start_paused = true)]
async fn resources_that_envoy_has_unsubscribed_from_are_not_stored() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&Resources::new());
    pod.want(Type::ENDPOINTS, &["a", "b", "c"]);
    let all = |content| resources(&[("a", content), ("b", content), ("c", content)]);
    pod.accept(Type::ENDPOINTS, "1", &all("1"), &[]);
    assert!(pod.write());
    // istiod sends them once more before it gets the request, and Envoy acknowledges what it no longer has.
    pod.push(Type::ENDPOINTS, "2", &all("2"), &[]);
    pod.request(Type::ENDPOINTS, |it| it.resource_names_unsubscribe = owned(&["a", "b"]));
    pod.ack(Type::ENDPOINTS, "2");
    let left = resources(&[("c", "2")]);
    assert_eq!(pod.stored(Type::ENDPOINTS), left);
    assert_eq!(pod.ledger.accepted()[Type::ENDPOINTS.url()], 1);
    assert!(pod.write());
    assert_eq!(Pod::start(parent.path()).stored(Type::ENDPOINTS), left);
    // The older Envoy of a hot restart does not need what the newer one needs.
    pod.reconnect(2);
    pod.subscribe_all();
    pod.want(Type::ENDPOINTS, &["c"]);
    pod.accept(Type::ENDPOINTS, "3", &resources(&[("c", "3")]), &[]);
    let newer = std::mem::replace(
        &mut pod.recorder,
        Recorder::new(pod.ledger.envoy_cache(1, Protocol::Delta), 3),
    );
    pod.want(Type::ENDPOINTS, &["c"]);
    pod.request(Type::ENDPOINTS, |it| it.resource_names_unsubscribe = owned(&["c"]));
    assert_eq!(pod.stored(Type::ENDPOINTS), resources(&[("c", "3")]));
    drop(newer);
}

#[tokio::test(start_paused = true)]
async fn resources_that_envoy_rejects_after_its_unsubscription_get_no_stored_version() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&Resources::new());
    pod.want(Type::ROUTES, &["a"]);
    pod.accept(Type::ROUTES, "1", &resources(&[("a", "1")]), &[]);
    pod.reconnect(2);
    pod.subscribe_all();
    pod.want(Type::ROUTES, &["a", "b"]);
    pod.push(Type::ROUTES, "2", &resources(&[("a", "2"), ("b", "2")]), &[]);
    pod.request(Type::ROUTES, |it| it.resource_names_unsubscribe = owned(&["b"]));
    pod.nack(Type::ROUTES, "2", "bad");
    let (Some((_, stored)), _) = pod.ledger.0.state.lock().take_stored(2) else {
        panic!("no stored version of a");
    };
    let names: Vec<_> = stored.resources.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["a"]);
    assert!(
        !pod.ledger.0.state.lock().view(2).of(Type::ROUTES).rejected.contains_key(&digest("b"))
    );
}

#[tokio::test(start_paused = true)]
async fn two_responses_with_one_nonce_have_an_answer_each() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.want(Type::EXTENSION, &["a"]);
    let first = Pod::response(Type::EXTENSION, "1", &resources(&[("a", "deny")]), &[]);
    let second = Pod::response(Type::EXTENSION, "1", &resources(&[("a", "module")]), &[]);
    for response in [&first, &second] {
        let message = response.slice(HEAD..);
        let received = Pod::received(Type::EXTENSION, "1");
        pod.recorder.record_message(&received, &message, false);
    }
    pod.ack(Type::EXTENSION, "1");
    assert_eq!(pod.stored(Type::EXTENSION), resources(&[("a", "deny")]));
    pod.ack(Type::EXTENSION, "1");
    assert_eq!(pod.stored(Type::EXTENSION), resources(&[("a", "module")]));
}

#[tokio::test(start_paused = true)]
async fn a_new_envoy_gets_stored_versions_of_rejected_resources_only_once() {
    let parent = tempfile::tempdir().unwrap();
    Pod::start(parent.path()).accept_first(&Resources::new());
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "1"), ("b", "1")]));
    assert!(pod.write());
    let mut pod = Pod::start(parent.path());
    pod.subscribe_all();
    pod.push(Type::CLUSTER, "1", &resources(&[("a", "2"), ("b", "2")]), &[]);
    pod.nack(Type::CLUSTER, "1", "Error adding/updating cluster(s) a: bad");
    assert_eq!(pod.ledger.rejected()[CLUSTER], ["a"]);
    assert_eq!(pod.ledger.accepted()[CLUSTER], 1);
    let frame = pod.recorder.take_stored().expect("a stored version");
    let message = DeltaDiscoveryResponse::decode(&frame[HEAD..]).unwrap();
    assert_eq!(message.nonce, rejected::NONCE);
    assert_eq!(message.resources.len(), 1);
    assert_eq!(message.resources[0].name, "a");
    assert_eq!(message.resources[0].resource.as_ref().unwrap().value, b"1");
    assert!(pod.recorder.take_stored().is_none());
    let expected = resources(&[("a", "1"), ("b", "2")]);
    assert_eq!(pod.stored(Type::CLUSTER), expected);
    let ack = Request {
        type_url: CLUSTER.to_owned(),
        nonce: rejected::NONCE.to_owned(),
        ..Request::default()
    };
    pod.recorder.record_stored_ack_or_nack(&ack);
    assert_eq!(pod.ledger.after_nack()[CLUSTER][0].name, "a");
    // The Envoy has a version now, and keeps it.
    pod.push(Type::CLUSTER, "2", &resources(&[("a", "3")]), &[]);
    pod.nack(Type::CLUSTER, "2", "Error adding/updating cluster(s) a: bad");
    assert!(pod.recorder.take_stored().is_none());
    pod.accept(Type::CLUSTER, "3", &resources(&[("a", "4")]), &[]);
    assert!(pod.ledger.after_nack().is_empty() && pod.ledger.rejected().is_empty());
    // A reason without names rejects all.
    pod.push(Type::CLUSTER, "4", &resources(&[("b", "3"), ("c", "1")]), &[]);
    pod.nack(Type::CLUSTER, "4", "no");
    assert_eq!(pod.ledger.rejected()[CLUSTER], ["b", "c"]);
}

#[test]
fn rejected_names_are_those_at_the_beginning_of_an_entry() {
    let names = ["outbound|80||a", "outbound|80||a.b", "web", "a, b", "0.0.0.0_80"];
    let all: HashSet<_> = names.iter().map(|name| digest(name)).collect();
    let these = |names: &[&str]| Rejected::These(names.iter().map(|it| digest(it)).collect());
    let clusters = "Error adding/updating cluster(s) ";
    let listeners = "Error adding/updating listener(s) ";
    for (reason, expected) in [
        (format!("{clusters}outbound|80||a.b: no"), these(&["outbound|80||a.b"])),
        (format!("{clusters}outbound|80||a: no"), these(&["outbound|80||a"])),
        (
            format!("{clusters}outbound|80||a: no, outbound|80||a.b: no"),
            these(&["outbound|80||a", "outbound|80||a.b"]),
        ),
        // A tenant's filter has the name of a listener that Envoy has accepted.
        (format!("{listeners}0.0.0.0_80: filter web: unknown"), these(&["0.0.0.0_80"])),
        (format!("{listeners}0.0.0.0_80: bad (web: no)"), these(&["0.0.0.0_80"])),
        (format!("{listeners}0.0.0.0_80: no\nweb: no\n"), these(&["0.0.0.0_80", "web"])),
        (format!("{listeners}a, b: no"), these(&["a, b"])),
        (format!("{listeners}unknown: no"), Rejected::All),
        ("web: no".to_owned(), Rejected::All),
        (format!("{listeners}web: no, ...(truncated)"), Rejected::Unknown),
    ] {
        assert_eq!(rejected(&reason, &all), expected, "{reason}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_needs_more_memory_than_configured_is_not_stored_and_said_once() {
    let parent = tempfile::tempdir().unwrap();
    let log = logged(|| {
        let config = Config { max_bytes: 20_000, ..config(parent.path()) };
        let mut pod = Pod::with(config);
        let random = || {
            let digits = std::iter::repeat_with(|| fastrand::char(' '..'~'));
            digits.take(30_000).collect::<String>()
        };
        for pid in 1..4 {
            pod.reconnect(pid);
            pod.subscribe_all();
            pod.accept(Type::CLUSTER, "1", &resources(&[("a", &random())]), &[]);
            pod.accept(Type::LISTENER, "1", &Resources::new(), &[]);
            assert!(!pod.write());
            assert!(pod.stored(Type::CLUSTER).is_empty());
        }
    });
    assert_eq!(log.matches("KEEP_CONFIG_MAX_BYTES").count(), 1, "{log}");
}

#[tokio::test(start_paused = true)]
async fn an_envoy_that_had_resources_before_its_first_stream_is_not_stored() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.subscribe(Type::CLUSTER, &["unknown"]);
    pod.subscribe(Type::LISTENER, &[]);
    pod.accept(Type::CLUSTER, "1", &resources(&[("a", "1")]), &[]);
    pod.accept(Type::LISTENER, "1", &Resources::new(), &[]);
    assert!(!pod.write());
}

#[tokio::test(start_paused = true)]
async fn another_nodes_file_stays_until_this_nodes_is_complete() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "1")]));
    assert!(pod.write());
    let mut pod = Pod::start(parent.path());
    pod.request(Type::CLUSTER, |it| it.node.as_mut().unwrap().id = "other".to_owned());
    assert!(!pod.ledger.0.state.lock().can_serve());
    pod.accept(Type::CLUSTER, "1", &resources(&[("b", "1")]), &[]);
    assert!(!pod.write());
    assert_eq!(in_file(parent.path()), resources(&[("a", "1")]));
    pod.subscribe(Type::LISTENER, &[]);
    pod.accept(Type::LISTENER, "1", &Resources::new(), &[]);
    assert!(pod.write());
    assert_eq!(in_file(parent.path()), resources(&[("b", "1")]));
}

#[tokio::test(start_paused = true)]
async fn files_of_former_releases_stay_until_a_record_is_valid() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    let directory = parent.path().join(DIRECTORY);
    Directory::private(parent.path(), DIRECTORY, true).unwrap();
    let former = directory.join("Cluster");
    std::fs::write(&former, "former").unwrap();
    pod.subscribe_all();
    pod.accept(Type::CLUSTER, "1", &resources(&[("a", "1")]), &[]);
    assert!(!pod.write());
    assert!(former.exists());
    pod.accept(Type::LISTENER, "1", &Resources::new(), &[]);
    assert!(pod.write());
    assert!(!former.exists());
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_fails_costs_the_file_and_is_tried_again() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "1")]));
    assert!(pod.write());
    std::fs::remove_file(parent.path().join(DIRECTORY).join(FILE)).unwrap();
    pod.accept(Type::CLUSTER, "2", &resources(&[("a", "2")]), &[]);
    let error = {
        let mut state = pod.ledger.0.state.lock();
        let batch = state.take_batch(false).expect("a batch");
        let written = pod.writer.write(&batch).map(|length| (batch.record, length));
        state.conclude(written).expect("an error")
    };
    assert_eq!(error.to_string(), "the file has been removed");
    assert_eq!(pod.ledger.write_failure(), Some(error.to_string()));
    assert_eq!(pod.ledger.snapshot(), Some(BTreeMap::new()));
    assert_eq!(pod.stored(Type::CLUSTER), resources(&[("a", "2")]));
    assert!(pod.write());
    assert_eq!(pod.ledger.write_failure(), None);
    assert_eq!(in_file(parent.path()), resources(&[("a", "2")]));
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_of_an_older_envoy_does_not_undo_newer_ones() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "1")]));
    pod.push(Type::CLUSTER, "2", &resources(&[("a", "2"), ("b", "1")]), &[]);
    let old = std::mem::replace(&mut pod.recorder, Recorder::new(None, 0));
    pod.reconnect(2);
    pod.accept_first(&resources(&[("c", "1")]));
    assert!(pod.write());
    assert_eq!(in_file(parent.path()), resources(&[("c", "1")]));
    let new = std::mem::replace(&mut pod.recorder, old);
    pod.ack(Type::CLUSTER, "2");
    pod.recorder = new;
    // It drains, and answers late.
    assert_eq!(pod.stored(Type::CLUSTER), resources(&[("c", "1")]));
    pod.accept(Type::CLUSTER, "3", &resources(&[("c", "2")]), &[]);
    assert!(pod.write());
    assert_eq!(in_file(parent.path()), resources(&[("c", "2")]));
}

#[tokio::test(start_paused = true)]
async fn no_record_is_written_while_one_response_passes_and_another_is_consumed() {
    let table = Type::of("type.googleapis.com/istio.networking.nds.v1.NameTable").unwrap();
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "1")]));
    let response = Pod::response(Type::CLUSTER, "2", &resources(&[("a", "2"), ("b", "1")]), &[]);
    pod.recorder.begin_response(CLUSTER, (response.len() - HEAD) as u64);
    pod.recorder.record_bytes(&response.slice(..response.len() - 1));
    let message = Pod::response(table, "1", &resources(&[("n", "1")]), &[]).slice(HEAD..);
    pod.recorder.record_message(&Pod::received(table, "1"), &message, true);
    assert!(!pod.write());
    pod.recorder.record_bytes(&response.slice(response.len() - 1..));
    pod.recorder.complete_response(&Pod::received(Type::CLUSTER, "2"), None);
    pod.ack(Type::CLUSTER, "2");
    assert!(pod.write());
    assert_eq!(in_file(parent.path()), resources(&[("a", "2"), ("b", "1")]));
}

#[tokio::test(start_paused = true)]
async fn a_response_that_is_cut_off_by_a_newer_stream_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.subscribe_all();
    let response = Pod::response(
        Type::CLUSTER,
        "1",
        &resources(&[("a", &"x".repeat(200_000)), ("b", "1")]),
        &[],
    );
    pod.recorder.begin_response(CLUSTER, (response.len() - HEAD) as u64);
    pod.recorder.record_bytes(&response.slice(..150_000));
    let older = std::mem::replace(&mut pod.recorder, Recorder::new(None, 0));
    pod.reconnect(1);
    pod.subscribe_all();
    let newer = std::mem::replace(&mut pod.recorder, older);
    pod.recorder.record_bytes(&response.slice(150_000..));
    drop(std::mem::replace(&mut pod.recorder, newer));
    assert!(!pod.write());
    let mut state = pod.ledger.0.state.lock();
    state.read(Type::CLUSTER, None);
    assert!(state.store.is_empty());
}

#[tokio::test(start_paused = true)]
async fn two_envoys_of_a_hot_restart_have_a_view_each() {
    let parent = tempfile::tempdir().unwrap();
    let mut parent_envoy = Pod::start(parent.path());
    parent_envoy.accept_first(&resources(&[("a", "1")]));
    let cache = parent_envoy.ledger.envoy_cache(2, Protocol::Delta);
    let mut successor = Pod {
        ledger: parent_envoy.ledger.clone(),
        writer: Writer::new(parent.path().to_owned()),
        pid: 2,
        streams: 2,
        recorder: Recorder::new(cache, 2),
    };
    successor.subscribe_all();
    successor.push(Type::CLUSTER, "1", &resources(&[("a", "2")]), &[]);
    parent_envoy.push(Type::CLUSTER, "2", &resources(&[("a", "2")]), &[]);
    parent_envoy.ack(Type::CLUSTER, "2");
    assert!(!successor.write(), "the successor has not answered");
    successor.ack(Type::CLUSTER, "1");
    successor.accept(Type::LISTENER, "1", &Resources::new(), &[]);
    assert!(successor.write());
    assert_eq!(in_file(parent.path()), resources(&[("a", "2")]));
}
