mod after_nack;
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

use super::file::Index;
use super::writer::{OTHER_NODE, WriteOp};
use super::*;
use crate::directory::Directory;
use crate::xds::request::frame;
use crate::xds::response::{Consumer, Received};
use crate::xds::wire::digest;

const IDENTITY: &str = "node";

/// Names and contents of resources.
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
    Any {
        type_url: CLUSTER.into(),
        value: Named { name, content }.encode_to_vec(),
    }
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

/// A writer that records stream 1.
fn writer(parent: &Path) -> Writer {
    let mut writer = Writer::new(handle(parent).shared);
    begin(&mut writer, 1, 1, IDENTITY);
    writer
}

fn begin(writer: &mut Writer, stream: u32, generation: usize, identity: &str) {
    let begin = WriteOp::Begin(identity.to_owned(), generation, mpsc::channel(1).0);
    writer.apply_batch((stream, vec![("", begin)]));
}

/// Hands operations of clusters in, and has what counts written.
fn take(writer: &mut Writer, stream: u32, ops: Vec<WriteOp>) {
    hand_in(writer, stream, ops);
    writer.write(false);
}

/// Hands operations of clusters in.
fn hand_in(writer: &mut Writer, stream: u32, ops: Vec<WriteOp>) {
    writer.apply_batch((stream, ops.into_iter().map(|op| (CLUSTER, op)).collect()));
}

fn received(nonce: &str, bytes: &Bytes) -> Received {
    Received {
        type_url: CLUSTER.into(),
        version: format!("version of {nonce}"),
        nonce: nonce.into(),
        resources: 1,
        bytes: bytes.len() as u64 - 5,
        consumer: Consumer::Envoy,
    }
}

/// The part of a type's resources that a response has.
#[derive(Clone, Copy, PartialEq)]
enum Coverage {
    /// All: the first of a stream, to an Envoy that held none.
    All,
    /// The first of a stream, to an Envoy that held [`PART`].
    Initial,
    /// The changed resources.
    Part,
}

const PART: &str = "part";

/// The first request of a stream, of an Envoy that holds these.
fn subscribed(names: &[&str]) -> WriteOp {
    WriteOp::FirstRequest {
        initial_resources: names.iter().map(|it| digest(it.as_bytes())).collect(),
    }
}

/// A response that has passed.
fn passed(nonce: &str, bytes: &Bytes, coverage: Coverage) -> Vec<WriteOp> {
    let first = match coverage {
        Coverage::All => Some(subscribed(&[])),
        Coverage::Initial => Some(subscribed(&[PART])),
        Coverage::Part => None,
    };
    let rest = [
        WriteOp::Bytes(bytes.slice(5..8)),
        WriteOp::Bytes(bytes.slice(8..)),
        WriteOp::Complete(received(nonce, bytes)),
    ];
    first.into_iter().chain(rest).collect()
}

fn answered(nonce: &str, is_accepted: bool) -> Vec<WriteOp> {
    let refusal = (!is_accepted).then(|| "the reason".to_owned());
    vec![WriteOp::AckOrNack(nonce.into(), refusal)]
}

/// Has a response kept.
fn keep(writer: &mut Writer, nonce: &str, bytes: &Bytes, coverage: Coverage) {
    take(writer, 1, passed(nonce, bytes, coverage));
    take(writer, 1, answered(nonce, true));
}

/// Returns the stored clusters; None if there is no file.
fn kept(parent: &Path) -> io::Result<Option<Resources>> {
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
        assert_eq!(
            index.resources.get(&digest(named.name.as_bytes())),
            Some(place)
        );
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
fn assert_kept(parent: &Path, expected: Option<&Resources>) {
    assert_eq!(kept(parent).unwrap().as_ref(), expected);
}

#[test]
fn a_response_is_stored_at_its_ack_and_not_after_a_nack_or_the_end_of_the_stream() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let first = resources(&[("a", "1"), ("b", "1")]);
    keep(&mut writer, "1", &response("1", &first, &[]), Coverage::All);
    for nonce in ["2", "3"] {
        let other = response(nonce, &resources(&[("a", "2")]), &[]);
        take(&mut writer, 1, passed(nonce, &other, Coverage::All));
        assert_kept(parent.path(), Some(&first));
        match nonce {
            "2" => take(&mut writer, 1, answered(nonce, false)),
            _ => begin(&mut writer, 1, 1, IDENTITY),
        }
        take(&mut writer, 1, answered(nonce, true));
        assert_kept(parent.path(), Some(&first));
    }
}

#[test]
fn a_nacked_response_is_not_stored_and_later_ones_are() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let one = |name: &str| response(name, &resources(&[(name, name)]), &[]);
    // While nothing is kept, those behind count.
    take(
        &mut writer,
        1,
        passed("refused", &one("refused"), Coverage::All),
    );
    take(&mut writer, 1, passed("a", &one("a"), Coverage::Initial));
    take(&mut writer, 1, answered("refused", false));
    take(&mut writer, 1, answered("a", true));
    take(&mut writer, 1, passed("b", &one("b"), Coverage::Part));
    take(&mut writer, 1, answered("b", false));
    take(&mut writer, 1, passed("c", &one("c"), Coverage::Part));
    let passing = one("d");
    take(&mut writer, 1, vec![WriteOp::Bytes(passing.slice(5..9))]);
    take(&mut writer, 1, answered("c", true));
    let rest = WriteOp::Bytes(passing.slice(9..));
    let complete = WriteOp::Complete(received("d", &passing));
    take(&mut writer, 1, vec![rest, complete]);
    take(&mut writer, 1, answered("d", true));
    let expected = resources(&[("a", "a"), ("c", "c"), ("d", "d")]);
    assert_kept(parent.path(), Some(&expected));
    assert_eq!(writer.shared.failures.get(), 0);

    for nonce in ["e", "f"] {
        take(&mut writer, 1, passed(nonce, &one(nonce), Coverage::Part));
    }
    take(&mut writer, 1, answered("e", false));
    take(&mut writer, 1, answered("f", true));
    let expected = resources(&[("a", "a"), ("c", "c"), ("d", "d"), ("f", "f")]);
    assert_kept(parent.path(), Some(&expected));
    assert_eq!(writer.shared.failures.get(), 0);
}

#[test]
fn after_a_failure_nothing_is_kept_until_the_next_stream() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let first = resources(&[("a", "1")]);
    let bytes = response("1", &first, &[]);
    let ops = || {
        passed("1", &bytes, Coverage::All)
            .into_iter()
            .chain(answered("1", true))
    };
    let both = || {
        ops()
            .map(|op| (CLUSTER, op))
            .chain(ops().map(|op| (LISTENER, op)))
    };
    writer.apply_batch((1, both().collect()));
    writer.write(false);
    assert_eq!(writer.shared.types.lock().len(), 2);
    // A recorder has waited long enough.
    writer.shared.is_stalled.store(true, Ordering::Relaxed);
    writer.apply_batch((1, both().collect()));
    assert!(writer.shared.types.lock().is_empty());
    let directory = fs::read_dir(parent.path().join(DIRECTORY)).unwrap();
    assert_eq!(directory.count(), 0);
    assert_eq!(writer.shared.failures.get(), 1);
    begin(&mut writer, 2, 1, IDENTITY);
    writer.apply_batch((2, both().collect()));
    writer.write(false);
    assert_kept(parent.path(), Some(&first));
    assert_eq!(writer.shared.failures.get(), 1);
}

/// Returns the log lines of `work`.
fn logged(work: impl FnOnce()) -> String {
    // With one subscriber alone, a line first met by another test's thread stays off in ours.
    let _another = tracing::Dispatch::new(tracing_subscriber::registry());
    let log = tempfile::NamedTempFile::new().unwrap();
    let writer = log.reopen().unwrap();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.try_clone().unwrap());
    tracing::subscriber::with_default(subscriber.finish(), work);
    fs::read_to_string(log.path()).unwrap()
}

#[test]
fn a_store_that_is_dropped_and_one_that_fails_are_named_in_the_log() {
    let parent = tempfile::tempdir().unwrap();
    let mut first = writer(parent.path());
    let bytes = response("1", &resources(&[("a", "1")]), &[]);
    keep(&mut first, "1", &bytes, Coverage::All);
    let path = |name: &str| {
        parent
            .path()
            .join(DIRECTORY)
            .join(name)
            .display()
            .to_string()
    };
    let log = logged(|| begin(&mut first, 2, 2, "another node"));
    // Of the other types nothing was kept.
    let dropped = format!(
        "removing stored configuration: {}: {OTHER_NODE}",
        path("Cluster")
    );
    assert_eq!(log.matches("removing").count(), 1, "{log}");
    assert!(log.contains(&dropped), "{log}");
    assert_eq!(first.shared.failures.get(), 0);

    fs::write(path("Listener"), "damaged").unwrap();
    let log = logged(|| begin(&mut first, 3, 3, "another node"));
    let damaged = format!("removing stored configuration: {}: ", path("Listener"));
    assert!(log.contains(&damaged), "{log}");

    let log = logged(|| {
        take(
            &mut first,
            3,
            vec![
                WriteOp::Bytes(bytes.slice(5..)),
                WriteOp::Complete(received("1", &bytes)),
                WriteOp::AckOrNack("2".to_owned(), None),
            ],
        )
    });
    let failed = format!(
        "cannot store configuration in {}: Envoy has skipped",
        path("Cluster")
    );
    assert!(log.contains(&failed), "{log}");
}

#[test]
fn an_older_envoy_of_another_node_does_not_change_the_store_of_a_newer_one() {
    for newer in ["changed", IDENTITY] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path());
        let one = |mark: &str| response(mark, &resources(&[("a", mark)]), &[]);
        keep(&mut writer, "1", &one("1"), Coverage::All);
        begin(&mut writer, 2, 2, newer);
        // The node may have changed with a hot restart.
        let expected = resources(&[("a", "1")]);
        assert_kept(parent.path(), (newer == IDENTITY).then_some(&expected));
        take(&mut writer, 2, passed("2", &one("2"), Coverage::All));
        take(&mut writer, 2, answered("2", true));
        // The old Envoy goes on, and connects again.
        keep(&mut writer, "3", &one("3"), Coverage::All);
        begin(&mut writer, 3, 1, IDENTITY);
        take(&mut writer, 3, passed("4", &one("4"), Coverage::All));
        take(&mut writer, 3, answered("4", true));
        assert_kept(parent.path(), Some(&resources(&[("a", "2")])));
        begin(&mut writer, 4, 2, newer);
        take(&mut writer, 4, passed("5", &one("5"), Coverage::Part));
        take(&mut writer, 4, answered("5", true));
        assert_kept(parent.path(), Some(&resources(&[("a", "5")])));
    }
}

#[test]
fn a_file_is_compacted_at_twice_its_size_without_changing_a_copy_being_served() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let large = |name: &str, mark: &str| resources(&[(name, &mark.repeat(1 << 17))]);
    let mut all = large("a", "0");
    all.extend(large("b", "0"));
    keep(&mut writer, "0", &response("0", &all, &[]), Coverage::All);
    let directory = Directory::private(parent.path(), DIRECTORY, false).unwrap();
    let index = Index::open(&directory, CLUSTER).unwrap().unwrap();
    let numbers: HashSet<_> = (1..10)
        .map(|number| {
            let mark = number.to_string();
            let bytes = response(&mark, &large("a", &mark), &[]);
            keep(&mut writer, &mark, &bytes, Coverage::Part);
            all.extend(large("a", &mark));
            assert_kept(parent.path(), Some(&all));
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
    assert_eq!(
        fs::read_dir(parent.path().join(DIRECTORY)).unwrap().count(),
        1
    );
}

#[test]
fn a_response_of_any_size_is_stored_completely_and_held_mostly_on_disk() {
    for pieces in [100, 1 << 16, 3 << 20] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path());
        let many = |mark: &str| {
            (0..3000)
                .map(|i| (format!("name {i}"), mark.repeat(2000)))
                .collect()
        };
        let one = resources(&[("large", &"1".repeat(5 << 20))]);
        for (nonce, content) in [("1", many("1")), ("2", one), ("3", many("2"))] {
            let bytes = response(nonce, &content, &["name 3000".to_owned()]).slice(5..);
            for piece in bytes.chunks(pieces) {
                let piece = WriteOp::Bytes(bytes.slice_ref(piece));
                take(&mut writer, 1, vec![piece]);
                let held = writer.files[CLUSTER].memory();
                assert!(held <= 3 << 20, "{held}");
            }
            let complete = WriteOp::Complete(received(nonce, &bytes));
            take(&mut writer, 1, vec![subscribed(&[]), complete]);
            take(&mut writer, 1, answered(nonce, true));
            assert_kept(parent.path(), Some(&content));
        }
    }
}

/// A response of a random history, what Envoy answers, and what happens meanwhile.
#[derive(Clone, Debug)]
struct Step {
    changed: Vec<u8>,
    removed: Vec<u8>,
    /// True if it has all resources of the type.
    replaces: bool,
    refused: Refused,
    /// True if its bytes are moved to disk.
    is_spilled: bool,
    /// True if Envoy answers it only after the next response.
    is_late: bool,
    is_written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Refused {
    None,
    /// The even names, with a reason that names them.
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

/// A response of which Envoy has not said whether it accepts it.
struct Unanswered {
    nonce: String,
    changed: Resources,
    removed: Vec<String>,
    /// The names that remain if the response does not name them; all if it is None.
    retained: Option<Vec<String>>,
    refused: Refused,
}

impl Unanswered {
    fn is_refused(&self, name: &str) -> bool {
        let is_even = || {
            (0..16)
                .step_by(2)
                .any(|even| format!("name {even}") == name)
        };
        self.refused == Refused::All || self.refused == Refused::Some && is_even()
    }

    /// Has Envoy answer, and returns what it holds then.
    fn answer(self, writer: &mut Writer, before: Option<Resources>) -> Option<Resources> {
        let changed = self.changed.keys();
        let named: Vec<_> = changed
            .filter(|name| self.is_refused(name))
            .map(|name| format!("{name}: bad"))
            .collect();
        let refusal = match self.refused {
            Refused::None => None,
            Refused::Some => Some(format!(
                "Error adding/updating cluster(s) {}",
                named.join(", ")
            )),
            Refused::All => Some("bad".to_owned()),
        };
        hand_in(
            writer,
            1,
            vec![WriteOp::AckOrNack(self.nonce.clone(), refusal)],
        );
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
            let is_retained = self
                .retained
                .as_ref()
                .is_none_or(|retained| retained.contains(name));
            is_retained || self.changed.contains_key(name) && self.is_refused(name)
        });
        let accepted = self
            .changed
            .iter()
            .filter(|(name, _)| !self.is_refused(name));
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
                    model = response.answer(&mut writer, model);
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
                hand_in(&mut writer, 1, vec![subscribed(&names)]);
            }
            let mut ops = passed(&nonce, &bytes, if step.replaces { Coverage::All } else { Coverage::Part });
            let complete = ops.split_off(ops.len() - 2);
            hand_in(&mut writer, 1, ops);
            if step.is_spilled {
                let directory = writer.directory.as_ref().unwrap();
                writer.files.get_mut(CLUSTER).unwrap().spill(directory).unwrap();
            }
            hand_in(&mut writer, 1, complete);
            let retained = match (step.replaces, reconnects) {
                (true, _) => Some(Vec::new()),
                (false, true) => Some(held),
                (false, false) => None,
            };
            unanswered.push(Unanswered { nonce, changed, removed, retained, refused: step.refused });
            if !step.is_late || unanswered.len() > 3 {
                for response in unanswered.drain(..) {
                    model = response.answer(&mut writer, model);
                }
            }
            if step.is_written {
                writer.write(false);
                prop_assert_eq!(kept(parent.path()).unwrap(), model.clone());
            }
        }
        for response in unanswered {
            model = response.answer(&mut writer, model);
        }
        writer.write(false);
        prop_assert_eq!(kept(parent.path()).unwrap(), model.clone());
        if let Some(model) = model {
            let live: usize = model.iter().map(|(name, content)| name.len() + content.len() + 200).sum();
            let found = writer.shared.types.lock()[CLUSTER].length;
            prop_assert!(found <= 2 * live as u64 + 90_000, "{found} bytes for {live}");
        }
    }
}
