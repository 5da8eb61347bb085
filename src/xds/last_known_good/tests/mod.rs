mod after_nack;
mod copy;
mod damage;
mod disk;
mod pace;
mod recorder;
mod replay;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::Any;
use proptest::prelude::*;
use prost::Message;

use super::file::{Header, Index};
use super::writer::WriteOp;
use super::*;
use crate::files::directory::Directory;
use crate::logging::logged;
use crate::xds::request::frame;
use crate::xds::response::{Consumer, Received};
use crate::xds::wire::digest;

const IDENTITY: &str = "node";

/// The contents of resources by their names.
type Resources = BTreeMap<String, String>;

/// A resource that begins with its name.
#[derive(Clone, PartialEq, Message)]
struct Named {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    content: String,
}

fn as_any((name, content): (&String, &String)) -> Any {
    let (name, content) = (name.clone(), content.clone());
    Any { type_url: CLUSTER.into(), value: Named { name, content }.encode_to_vec() }
}

fn response(nonce: &str, changed: &Resources, removed: &[String]) -> Bytes {
    let resource = |(name, content): (&String, &String)| Resource {
        name: name.clone(),
        resource: Some(as_any((name, content))),
        ..Default::default()
    };
    let message = DeltaDiscoveryResponse {
        resources: changed.iter().map(resource).collect(),
        removed_resources: removed.to_vec(),
        type_url: CLUSTER.to_owned(),
        nonce: nonce.to_owned(),
        ..Default::default()
    };
    frame(&message.encode_to_vec())
}

fn handle(parent: &Path) -> LastKnownGood {
    let config = Config {
        volume: Volume::named(parent),
        max_bytes: 1 << 30,
        max_age: Duration::MAX,
        after: Duration::from_secs(5),
        on_nack: true,
    };
    LastKnownGood::new(config, None, &Registry::default(), CancellationToken::new()).0
}

/// Creates a writer that records stream 1.
fn writer(parent: &Path) -> Writer {
    let mut writer = Writer::new(handle(parent).shared);
    begin(&mut writer, 1, 1, IDENTITY);
    writer
}

fn begin(writer: &mut Writer, stream: u32, generation: usize, identity: &str) {
    let begin = WriteOp::Begin(identity.to_owned(), generation, mpsc::channel(1).0);
    writer.apply_batch((stream, vec![("", begin)]));
}

/// Gives the writer operations on clusters, and writes the changed files.
fn apply_and_write(writer: &mut Writer, stream: u32, ops: Vec<WriteOp>) {
    apply(writer, stream, ops);
    writer.write(false);
}

/// Gives the writer operations on clusters.
fn apply(writer: &mut Writer, stream: u32, ops: Vec<WriteOp>) {
    writer.apply_batch((stream, ops.into_iter().map(|op| (CLUSTER, op)).collect()));
}

fn received(nonce: &str, bytes: &Bytes) -> Received {
    Received {
        type_url: CLUSTER.into(),
        version: format!("version of {nonce}"),
        nonce: nonce.into(),
        resources: 1,
        removed: 0,
        bytes: bytes.len() as u64 - 5,
        consumer: Consumer::Envoy,
    }
}

/// The part of a type's resources that a response contains.
#[derive(Clone, Copy, PartialEq)]
enum Coverage {
    /// All resources. The response is the first one of a stream to an Envoy that has none.
    All,
    /// All resources except [`HELD_RESOURCE`], which Envoy has. The response is the first one of the stream.
    Initial,
    /// The changed resources.
    Part,
}

const HELD_RESOURCE: &str = "part";

/// Returns the first request on a stream of an Envoy that has these resources.
fn subscribed(names: &[&str]) -> WriteOp {
    WriteOp::FirstRequest {
        initial_resources: names.iter().map(|it| digest(it.as_bytes())).collect(),
    }
}

/// Returns the operations of a response that has passed to Envoy.
fn response_ops(nonce: &str, bytes: &Bytes, coverage: Coverage) -> Vec<WriteOp> {
    let first = match coverage {
        Coverage::All => Some(subscribed(&[])),
        Coverage::Initial => Some(subscribed(&[HELD_RESOURCE])),
        Coverage::Part => None,
    };
    let rest = [
        WriteOp::Bytes(bytes.slice(5..8)),
        WriteOp::Bytes(bytes.slice(8..)),
        WriteOp::Complete(received(nonce, bytes)),
    ];
    first.into_iter().chain(rest).collect()
}

fn ack_or_nack_ops(nonce: &str, is_accepted: bool) -> Vec<WriteOp> {
    let refusal = (!is_accepted).then(|| "the reason".to_owned());
    vec![WriteOp::AckOrNack(nonce.into(), refusal)]
}

/// Gives the writer a response and its ACK, and writes the changed files.
fn store_accepted(writer: &mut Writer, nonce: &str, bytes: &Bytes, coverage: Coverage) {
    apply_and_write(writer, 1, response_ops(nonce, bytes, coverage));
    apply_and_write(writer, 1, ack_or_nack_ops(nonce, true));
}

/// Returns the stored clusters; None if there is no file.
fn stored_clusters(parent: &Path) -> io::Result<Option<Resources>> {
    let opened = Directory::private(parent, DIRECTORY, false)
        .and_then(|directory| Index::open(&directory, CLUSTER));
    let index = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        opened => opened?,
    };
    let Some(index) = index else {
        return Ok(None);
    };
    let mut found = Resources::new();
    for place in index.resources.values() {
        let mut record = Vec::new();
        index.copy(vec![place.clone()], |block| {
            record.extend_from_slice(block);
            Ok(())
        })?;
        // A record is a message with one resource.
        let message = DeltaDiscoveryResponse::decode(&record[..])?;
        let any = message.resources[0].resource.clone().unwrap();
        let named = Named::decode(&any.value[..])?;
        assert_eq!(index.resources.get(&digest(named.name.as_bytes())), Some(place));
        found.insert(named.name, named.content);
    }
    Ok(Some(found))
}

fn file(parent: &Path) -> PathBuf {
    parent.join(DIRECTORY).join("Cluster")
}

fn resources(pairs: &[(&str, &str)]) -> Resources {
    let owned = |(name, content): &(&str, &str)| ((*name).to_owned(), (*content).to_owned());
    pairs.iter().map(owned).collect()
}

/// Asserts that these clusters are stored.
#[track_caller]
fn assert_stored(parent: &Path, expected: Option<&Resources>) {
    assert_eq!(stored_clusters(parent).unwrap().as_ref(), expected);
}

#[test]
fn a_response_is_stored_at_its_ack_and_not_after_a_nack_or_the_end_of_the_stream() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let first = resources(&[("a", "1"), ("b", "1")]);
    store_accepted(&mut writer, "1", &response("1", &first, &[]), Coverage::All);
    for nonce in ["2", "3"] {
        let other = response(nonce, &resources(&[("a", "2")]), &[]);
        apply_and_write(&mut writer, 1, response_ops(nonce, &other, Coverage::All));
        assert_stored(parent.path(), Some(&first));
        match nonce {
            "2" => apply_and_write(&mut writer, 1, ack_or_nack_ops(nonce, false)),
            _ => begin(&mut writer, 1, 1, IDENTITY),
        }
        apply_and_write(&mut writer, 1, ack_or_nack_ops(nonce, true));
        assert_stored(parent.path(), Some(&first));
    }
}

#[test]
fn a_nacked_response_is_not_stored_and_later_ones_are() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let one = |name: &str| response(name, &resources(&[(name, name)]), &[]);
    // While nothing is stored, a response after a refused one is stored.
    apply_and_write(&mut writer, 1, response_ops("refused", &one("refused"), Coverage::All));
    apply_and_write(&mut writer, 1, response_ops("a", &one("a"), Coverage::Initial));
    apply_and_write(&mut writer, 1, ack_or_nack_ops("refused", false));
    apply_and_write(&mut writer, 1, ack_or_nack_ops("a", true));
    apply_and_write(&mut writer, 1, response_ops("b", &one("b"), Coverage::Part));
    apply_and_write(&mut writer, 1, ack_or_nack_ops("b", false));
    apply_and_write(&mut writer, 1, response_ops("c", &one("c"), Coverage::Part));
    let passing = one("d");
    apply_and_write(&mut writer, 1, vec![WriteOp::Bytes(passing.slice(5..9))]);
    apply_and_write(&mut writer, 1, ack_or_nack_ops("c", true));
    let rest = WriteOp::Bytes(passing.slice(9..));
    let complete = WriteOp::Complete(received("d", &passing));
    apply_and_write(&mut writer, 1, vec![rest, complete]);
    apply_and_write(&mut writer, 1, ack_or_nack_ops("d", true));
    let expected = resources(&[("a", "a"), ("c", "c"), ("d", "d")]);
    assert_stored(parent.path(), Some(&expected));
    assert_eq!(writer.shared.failures.get(), 0);

    for nonce in ["e", "f"] {
        apply_and_write(&mut writer, 1, response_ops(nonce, &one(nonce), Coverage::Part));
    }
    apply_and_write(&mut writer, 1, ack_or_nack_ops("e", false));
    apply_and_write(&mut writer, 1, ack_or_nack_ops("f", true));
    let expected = resources(&[("a", "a"), ("c", "c"), ("d", "d"), ("f", "f")]);
    assert_stored(parent.path(), Some(&expected));
    assert_eq!(writer.shared.failures.get(), 0);
}

#[test]
fn after_a_failure_nothing_is_kept_until_the_next_stream() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let first = resources(&[("a", "1")]);
    let bytes = response("1", &first, &[]);
    let ops =
        || response_ops("1", &bytes, Coverage::All).into_iter().chain(ack_or_nack_ops("1", true));
    let both = || ops().map(|op| (CLUSTER, op)).chain(ops().map(|op| (LISTENER, op)));
    writer.apply_batch((1, both().collect()));
    writer.write(false);
    assert_eq!(writer.shared.types.lock().len(), 2);
    // A recorder sets this when the disk is too slow.
    writer.shared.is_stalled.store(true, Ordering::Relaxed);
    writer.apply_batch((1, both().collect()));
    assert!(writer.shared.types.lock().is_empty());
    let directory = fs::read_dir(parent.path().join(DIRECTORY)).unwrap();
    assert_eq!(directory.count(), 0);
    assert_eq!(writer.shared.failures.get(), 1);
    begin(&mut writer, 2, 1, IDENTITY);
    writer.apply_batch((2, both().collect()));
    writer.write(false);
    assert_stored(parent.path(), Some(&first));
    assert_eq!(writer.shared.failures.get(), 1);
}

#[test]
fn a_store_that_is_dropped_and_one_that_fails_are_named_in_the_log() {
    let parent = tempfile::tempdir().unwrap();
    let mut first = writer(parent.path());
    let bytes = response("1", &resources(&[("a", "1")]), &[]);
    store_accepted(&mut first, "1", &bytes, Coverage::All);
    let path = |name: &str| parent.path().join(DIRECTORY).join(name).display().to_string();
    let log = logged(|| begin(&mut first, 2, 2, "another node"));
    assert!(!log.contains("removing"), "{log}");
    assert_eq!(first.shared.failures.get(), 0);

    fs::write(path("Listener"), "damaged").unwrap();
    let log = logged(|| begin(&mut first, 3, 3, "another node"));
    let damaged = format!("removing stored configuration: {}: ", path("Listener"));
    assert!(log.contains(&damaged), "{log}");

    let log = logged(|| {
        apply_and_write(
            &mut first,
            3,
            vec![
                WriteOp::Bytes(bytes.slice(5..)),
                WriteOp::Complete(received("1", &bytes)),
                WriteOp::AckOrNack("2".to_owned(), None),
            ],
        )
    });
    let failed = format!("cannot store configuration in {}: Envoy has skipped", path("Cluster"));
    assert!(log.contains(&failed), "{log}");
}

#[test]
fn an_older_envoy_of_another_node_does_not_change_the_store_of_a_newer_one() {
    for newer in ["changed", IDENTITY] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path());
        let one = |mark: &str| response(mark, &resources(&[("a", mark)]), &[]);
        store_accepted(&mut writer, "1", &one("1"), Coverage::All);
        begin(&mut writer, 2, 2, newer);
        // The new Envoy of a hot restart may have another node.
        assert_stored(parent.path(), Some(&resources(&[("a", "1")])));
        accept_listeners(&mut writer, 2);
        apply_and_write(&mut writer, 2, response_ops("2", &one("2"), Coverage::All));
        apply_and_write(&mut writer, 2, ack_or_nack_ops("2", true));
        // The old Envoy continues its stream, and connects again.
        store_accepted(&mut writer, "3", &one("3"), Coverage::All);
        begin(&mut writer, 3, 1, IDENTITY);
        apply_and_write(&mut writer, 3, response_ops("4", &one("4"), Coverage::All));
        apply_and_write(&mut writer, 3, ack_or_nack_ops("4", true));
        assert_stored(parent.path(), Some(&resources(&[("a", "2")])));
        begin(&mut writer, 4, 2, newer);
        apply_and_write(&mut writer, 4, response_ops("5", &one("5"), Coverage::Part));
        apply_and_write(&mut writer, 4, ack_or_nack_ops("5", true));
        assert_stored(parent.path(), Some(&resources(&[("a", "5")])));
    }
}

/// Gives the writer an accepted response without listeners.
fn accept_listeners(writer: &mut Writer, stream: u32) {
    let bytes = response("listeners", &resources(&[]), &[]);
    let mut ops = response_ops("listeners", &bytes, Coverage::All);
    ops.extend(ack_or_nack_ops("listeners", true));
    let ops = ops.into_iter().map(|op| (LISTENER, op)).collect();
    writer.apply_batch((stream, ops));
}

#[test]
fn files_of_another_node_stay_until_clusters_and_listeners_are_accepted() {
    for large in [false, true] {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join(DIRECTORY);
        let mut former = writer(parent.path());
        let before = resources(&[("a", "before")]);
        store_accepted(&mut former, "1", &response("1", &before, &[]), Coverage::All);
        accept_listeners(&mut former, 1);
        former.write(false);
        fs::copy(directory.join("Listener"), directory.join("NameTable")).unwrap();
        drop(former);

        let mut next = Writer::new(handle(parent.path()).shared);
        begin(&mut next, 2, 1, "another node");
        assert!(next.shared.types.lock().is_empty(), "they cannot be served");
        // More than is kept in memory.
        let after = resources(&[("a", &"x".repeat(if large { 5 << 20 } else { 1 }))]);
        apply_and_write(
            &mut next,
            2,
            response_ops("2", &response("2", &after, &[]), Coverage::All),
        );
        apply_and_write(&mut next, 2, ack_or_nack_ops("2", true));
        assert_stored(parent.path(), Some(&before));
        // A second response of the same stream does not harm what waits.
        let more = response("3", &resources(&[("b", &"y".repeat(3 << 20))]), &[]);
        apply_and_write(&mut next, 2, response_ops("3", &more, Coverage::Part));
        assert_stored(parent.path(), Some(&before));
        accept_listeners(&mut next, 2);
        next.write(false);
        assert_stored(parent.path(), Some(&after));
        let identity = |name: &str| {
            let file = fs::File::open(directory.join(name)).unwrap();
            Header::read(&file).unwrap().identity
        };
        assert_eq!([identity("Cluster"), identity("Listener")], ["another node"; 2]);
        assert!(!directory.join("NameTable").exists());
        assert_eq!(next.shared.types.lock().len(), 2);
    }
}

#[test]
fn files_of_another_node_are_removed_above_the_size_limit() {
    let parent = tempfile::tempdir().unwrap();
    let mut former = writer(parent.path());
    let before = resources(&[("a", &"x".repeat(60 << 10))]);
    store_accepted(&mut former, "1", &response("1", &before, &[]), Coverage::All);
    let mut shared = handle(parent.path()).shared;
    Arc::get_mut(&mut shared).unwrap().config.max_bytes = 100 << 10;
    let mut next = Writer::new(shared);
    begin(&mut next, 2, 1, "another node");
    let after = resources(&[("b", &"y".repeat(60 << 10))]);
    apply_and_write(&mut next, 2, response_ops("2", &response("2", &after, &[]), Coverage::All));
    apply_and_write(&mut next, 2, ack_or_nack_ops("2", true));
    assert_stored(parent.path(), Some(&after));
}

#[test]
fn a_file_is_compacted_at_twice_its_size_without_changing_a_copy_being_served() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let large = |name: &str, mark: &str| resources(&[(name, &mark.repeat(1 << 17))]);
    let mut all = large("a", "0");
    all.extend(large("b", "0"));
    store_accepted(&mut writer, "0", &response("0", &all, &[]), Coverage::All);
    let directory = Directory::private(parent.path(), DIRECTORY, false).unwrap();
    let index = Index::open(&directory, CLUSTER).unwrap().unwrap();
    let numbers: HashSet<_> = (1..10)
        .map(|number| {
            let mark = number.to_string();
            let bytes = response(&mark, &large("a", &mark), &[]);
            store_accepted(&mut writer, &mark, &bytes, Coverage::Part);
            all.extend(large("a", &mark));
            assert_stored(parent.path(), Some(&all));
            let found = file(parent.path()).metadata().unwrap();
            assert!(found.len() < 5 << 17, "{}", found.len());
            found.ino()
        })
        .collect();
    assert!((2..9).contains(&numbers.len()), "{numbers:?}");
    let mut before = Vec::new();
    let places = index.resources.values().cloned().collect();
    index
        .copy(places, |block| {
            before.extend_from_slice(block);
            Ok(())
        })
        .unwrap();
    assert_eq!(before.iter().filter(|it| **it == b'0').count(), 2 << 17);
    assert_eq!(fs::read_dir(parent.path().join(DIRECTORY)).unwrap().count(), 1);
}

#[test]
fn a_response_of_any_size_is_stored_completely_and_held_mostly_on_disk() {
    for pieces in [100, 1 << 16, 3 << 20] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path());
        let many =
            |mark: &str| (0..3000).map(|i| (format!("name {i}"), mark.repeat(2000))).collect();
        let one = resources(&[("large", &"1".repeat(5 << 20))]);
        for (nonce, content) in [("1", many("1")), ("2", one), ("3", many("2"))] {
            let bytes = response(nonce, &content, &["name 3000".to_owned()]).slice(5..);
            for piece in bytes.chunks(pieces) {
                let piece = WriteOp::Bytes(bytes.slice_ref(piece));
                apply_and_write(&mut writer, 1, vec![piece]);
                let held = writer.files[CLUSTER].memory();
                assert!(held <= 3 << 20, "{held}");
            }
            let complete = WriteOp::Complete(received(nonce, &bytes));
            apply_and_write(&mut writer, 1, vec![subscribed(&[]), complete]);
            apply_and_write(&mut writer, 1, ack_or_nack_ops(nonce, true));
            assert_stored(parent.path(), Some(&content));
        }
    }
}

/// A response of a random history, Envoy's ACK or NACK, and other events.
#[derive(Clone, Debug)]
struct Step {
    changed: Vec<u8>,
    removed: Vec<u8>,
    /// True if the response has all resources of the type.
    replaces: bool,
    refused: Refused,
    /// True if the bytes of the response are moved to disk before it is complete.
    is_spilled: bool,
    /// True if Envoy sends its ACK or NACK only after the next response.
    is_late: bool,
    is_written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Refused {
    None,
    /// The resources with an even number are refused, with a reason that names them.
    Some,
    All,
}

fn step() -> impl Strategy<Value = Step> {
    let names = || prop::collection::vec(any::<u8>(), 0..40);
    let refused = prop_oneof![Just(Refused::None), Just(Refused::Some), Just(Refused::All)];
    (names(), names(), refused, any::<[bool; 4]>()).prop_map(
        |(changed, removed, refused, [replaces, is_spilled, is_late, is_written])| Step {
            changed,
            removed,
            replaces,
            refused,
            is_spilled,
            is_late,
            is_written,
        },
    )
}

/// A response that waits for Envoy's ACK or NACK.
struct Unanswered {
    nonce: String,
    changed: Resources,
    removed: Vec<String>,
    /// The stored resources that remain if the response does not contain them; None if all remain.
    retained: Option<Vec<String>>,
    refused: Refused,
}

impl Unanswered {
    fn is_refused(&self, name: &str) -> bool {
        let is_even = || (0..16).step_by(2).any(|even| format!("name {even}") == name);
        self.refused == Refused::All || self.refused == Refused::Some && is_even()
    }

    /// Gives the writer Envoy's ACK or NACK. Returns the resources that are then to be stored; `before` has the earlier
    /// ones.
    fn ack_or_nack(self, writer: &mut Writer, before: Option<Resources>) -> Option<Resources> {
        let changed = self.changed.keys();
        let named: Vec<_> = changed
            .filter(|name| self.is_refused(name))
            .map(|name| format!("{name}: bad"))
            .collect();
        let refusal = match self.refused {
            Refused::None => None,
            Refused::Some => Some(format!("Error adding/updating cluster(s) {}", named.join(", "))),
            Refused::All => Some("bad".to_owned()),
        };
        apply(writer, 1, vec![WriteOp::AckOrNack(self.nonce.clone(), refusal)]);
        let is_whole = self.retained.as_ref().is_some_and(Vec::is_empty);
        let is_nothing = match self.refused {
            Refused::None => false,
            Refused::Some => named.is_empty(),
            Refused::All => true,
        };
        if is_nothing || !is_whole && before.is_none() {
            return before;
        }
        let mut after = before.unwrap_or_default();
        after.retain(|name, _| {
            let is_retained = self.retained.as_ref().is_none_or(|retained| retained.contains(name));
            is_retained || self.changed.contains_key(name) && self.is_refused(name)
        });
        let accepted = self.changed.iter().filter(|(name, _)| !self.is_refused(name));
        after.extend(accepted.map(|(name, content)| (name.clone(), content.clone())));
        after.retain(|name, _| !self.removed.contains(name));
        Some(after)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    #[test]
    fn the_stored_resources_equal_the_accepted_ones(
        steps in prop::collection::vec(step(), 1..30),
        restart in 0usize..30,
    ) {
        let parent = tempfile::tempdir().unwrap();
        let (mut writer, mut model) = (writer(parent.path()), None::<Resources>);
        let mut unanswered = Vec::<Unanswered>::new();
        for (number, step) in steps.into_iter().enumerate() {
            let reconnects = number % 5 == 4;
            if number == restart || reconnects {
                for response in unanswered.drain(..) {
                    model = response.ack_or_nack(&mut writer, model);
                }
            }
            if number == restart {
                writer.write(false);
                writer = tests::writer(parent.path());
            }
            let name = |it: &u8| format!("name {}", it % 16);
            let changed: Resources = step.changed.iter()
                .map(|it| (name(it), number.to_string().repeat(usize::from(*it)))).collect();
            let mut removed: Vec<_> = step.removed.iter().map(name).collect();
            removed.retain(|it| !changed.contains_key(it));
            let nonce = number.to_string();
            let bytes = response(&nonce, &changed, &removed);
            let held: Vec<_> = (0..8).map(|it| name(&it)).collect();
            if reconnects {
                let names: Vec<_> = held.iter().map(String::as_str).collect();
                apply(&mut writer, 1, vec![subscribed(&names)]);
            }
            let mut ops = response_ops(&nonce, &bytes, if step.replaces { Coverage::All } else { Coverage::Part });
            let complete = ops.split_off(ops.len() - 2);
            apply(&mut writer, 1, ops);
            if step.is_spilled {
                let directory = writer.directory.as_ref().unwrap();
                writer.files.get_mut(CLUSTER).unwrap().spill(directory).unwrap();
            }
            apply(&mut writer, 1, complete);
            let retained = match (step.replaces, reconnects) {
                (true, _) => Some(Vec::new()),
                (false, true) => Some(held),
                (false, false) => None,
            };
            unanswered.push(Unanswered { nonce, changed, removed, retained, refused: step.refused });
            if !step.is_late || unanswered.len() > 3 {
                for response in unanswered.drain(..) {
                    model = response.ack_or_nack(&mut writer, model);
                }
            }
            if step.is_written {
                writer.write(false);
                prop_assert_eq!(stored_clusters(parent.path()).unwrap(), model.clone());
            }
        }
        for response in unanswered {
            model = response.ack_or_nack(&mut writer, model);
        }
        writer.write(false);
        prop_assert_eq!(stored_clusters(parent.path()).unwrap(), model.clone());
        if let Some(model) = model {
            let live: usize = model.iter().map(|(name, content)| name.len() + content.len() + 200).sum();
            let found = writer.shared.types.lock()[CLUSTER].length;
            prop_assert!(found <= 2 * live as u64 + 90_000, "{found} bytes for {live}");
        }
    }
}
