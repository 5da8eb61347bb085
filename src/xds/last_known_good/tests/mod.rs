mod damage;
mod disk;
mod recorder;
mod replay;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryResponse, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use proptest::prelude::*;
use prost::Message;

use super::file::Index;
use super::writer::{Coverage, StreamInfo, WriteOp};
use super::*;
use crate::directory::Directory;
use crate::xds::Protocol;
use crate::xds::intercept::frame;
use crate::xds::response::{Consumer, Received};

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

fn response(protocol: Protocol, nonce: &str, changed: &Resources, removed: &[String]) -> Bytes {
    let (type_url, nonce) = (CLUSTER.to_owned(), nonce.to_owned());
    let message = match protocol {
        Protocol::Sotw => DiscoveryResponse {
            resources: changed.iter().map(as_any).collect(),
            type_url,
            nonce,
            ..Default::default()
        }
        .encode_to_vec(),
        Protocol::Delta => DeltaDiscoveryResponse {
            resources: changed
                .iter()
                .map(|(name, content)| Resource {
                    name: name.clone(),
                    resource: Some(as_any((name, content))),
                    ..Default::default()
                })
                .collect(),
            removed_resources: removed.to_vec(),
            type_url,
            nonce,
            ..Default::default()
        }
        .encode_to_vec(),
    };
    frame(&message)
}

/// A writer that records stream 1.
fn writer(parent: &Path, protocol: Protocol) -> Writer {
    let mut writer = Writer::new(parent.to_owned(), Status::new(&Registry::default()));
    begin(&mut writer, 1, 1, IDENTITY, protocol);
    writer
}

fn begin(writer: &mut Writer, stream: u32, generation: u64, identity: &str, protocol: Protocol) {
    let identity = identity.to_owned();
    take(
        writer,
        stream,
        vec![WriteOp::Begin(StreamInfo {
            protocol,
            identity,
            generation,
        })],
    );
}

/// Hands operations of clusters in.
fn take(writer: &mut Writer, stream: u32, ops: Vec<WriteOp>) {
    writer.take((stream, ops.into_iter().map(|op| (CLUSTER, op)).collect()));
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

/// A response that has passed.
fn passed(nonce: &str, bytes: &Bytes, coverage: Coverage) -> Vec<WriteOp> {
    vec![
        WriteOp::Bytes(bytes.slice(..3)),
        WriteOp::Bytes(bytes.slice(3..)),
        WriteOp::Complete(received(nonce, bytes), coverage),
    ]
}

fn answered(nonce: &str, is_accepted: bool) -> Vec<WriteOp> {
    vec![WriteOp::Answered {
        nonce: nonce.into(),
        is_accepted,
    }]
}

/// Has a response kept.
fn keep(writer: &mut Writer, nonce: &str, bytes: &Bytes, coverage: Coverage) {
    take(writer, 1, passed(nonce, bytes, coverage));
    take(writer, 1, answered(nonce, true));
}

/// What is kept of clusters; None if nothing is.
fn kept(parent: &Path, protocol: Protocol) -> io::Result<Option<Resources>> {
    let opened = Directory::private(parent, DIRECTORY, false)
        .and_then(|directory| writer::open(&directory, CLUSTER));
    let (file, header) = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found?,
    };
    if header.length == 0 {
        return Ok(None);
    }
    let index = Index::read(protocol, &header, file)?;
    let mut found = Resources::new();
    for place in index.resources.values() {
        let mut record = Vec::new();
        index.message(vec![place.clone()], 0, |block| {
            record.extend_from_slice(block);
            Ok(())
        })?;
        // A record is a message with one resource.
        let any = match protocol {
            Protocol::Sotw => DiscoveryResponse::decode(&record[5..])?.resources[0].clone(),
            Protocol::Delta => DeltaDiscoveryResponse::decode(&record[5..])?.resources[0]
                .resource
                .clone()
                .unwrap(),
        };
        let named = Named::decode(&any.value[..])?;
        assert_eq!(index.get(named.name.as_bytes()).as_ref(), Some(place));
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

/// What a stream has kept of clusters.
#[track_caller]
fn assert_kept(parent: &Path, protocol: Protocol, expected: Option<&Resources>) {
    assert_eq!(kept(parent, protocol).unwrap().as_ref(), expected);
}

#[test]
fn a_response_counts_from_its_ack_and_never_after_a_nack_or_the_streams_end() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path(), protocol);
        let first = resources(&[("a", "1"), ("b", "1")]);
        let bytes = response(protocol, "1", &first, &[]);
        keep(&mut writer, "1", &bytes, Coverage::All);
        for nonce in ["2", "3"] {
            let other = response(protocol, nonce, &resources(&[("a", "2")]), &[]);
            take(&mut writer, 1, passed(nonce, &other, Coverage::All));
            assert_kept(parent.path(), protocol, Some(&first));
            match nonce {
                "2" => take(&mut writer, 1, answered(nonce, false)),
                _ => take(&mut writer, 1, vec![WriteOp::End]),
            }
            take(&mut writer, 1, answered(nonce, true));
            assert_kept(parent.path(), protocol, Some(&first));
        }
    }
}

#[test]
fn a_refused_response_leaves_those_behind_it_and_one_passed_over_does_not_count() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path(), Protocol::Delta);
    let one = |name: &str| response(Protocol::Delta, name, &resources(&[(name, name)]), &[]);
    keep(&mut writer, "a", &one("a"), Coverage::All);
    for nonce in ["b", "c", "d", "e"] {
        take(&mut writer, 1, passed(nonce, &one(nonce), Coverage::Part));
    }
    let passing = one("f");
    take(&mut writer, 1, vec![WriteOp::Bytes(passing.slice(..9))]);
    take(&mut writer, 1, answered("b", false));
    take(&mut writer, 1, answered("c", true));
    take(&mut writer, 1, answered("e", true));
    let rest = WriteOp::Bytes(passing.slice(9..));
    let complete = WriteOp::Complete(received("f", &passing), Coverage::Part);
    take(&mut writer, 1, vec![rest, complete]);
    take(&mut writer, 1, answered("f", true));
    let expected = resources(&[("a", "a"), ("c", "c"), ("e", "e"), ("f", "f")]);
    assert_kept(parent.path(), Protocol::Delta, Some(&expected));
}

#[test]
fn what_the_disk_did_not_take_costs_its_own_type_until_a_whole_response_comes() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path(), Protocol::Delta);
    let first = resources(&[("a", "1")]);
    let bytes = response(Protocol::Delta, "1", &first, &[]);
    keep(&mut writer, "1", &bytes, Coverage::All);
    take(&mut writer, 1, passed("2", &bytes, Coverage::Part));
    for (lost, expected) in [(LISTENER, Some(&first)), (CLUSTER, None)] {
        writer.take((1, vec![(lost, WriteOp::Lost)]));
        assert_kept(parent.path(), Protocol::Delta, expected);
    }
    // Of a response that waited for its ACK as well.
    take(&mut writer, 1, answered("2", true));
    keep(&mut writer, "3", &bytes, Coverage::Part);
    assert_kept(parent.path(), Protocol::Delta, None);
    keep(&mut writer, "4", &bytes, Coverage::All);
    assert_kept(parent.path(), Protocol::Delta, Some(&first));
}

#[test]
fn an_older_envoy_of_another_node_does_not_alter_what_a_newer_one_has_accepted() {
    let parent = tempfile::tempdir().unwrap();
    let protocol = Protocol::Delta;
    let mut writer = writer(parent.path(), protocol);
    let one = |mark: &str| response(protocol, mark, &resources(&[("a", mark)]), &[]);
    keep(&mut writer, "1", &one("1"), Coverage::All);
    // The node has changed with a hot restart: what is kept stays until there is something else.
    begin(&mut writer, 2, 2, "changed", protocol);
    take(&mut writer, 2, passed("2", &one("2"), Coverage::All));
    assert_kept(parent.path(), protocol, Some(&resources(&[("a", "1")])));
    take(&mut writer, 2, answered("2", true));
    // The old Envoy goes on, and connects again, also while the new one has no stream.
    keep(&mut writer, "3", &one("3"), Coverage::All);
    for is_end in [false, true] {
        if is_end {
            take(&mut writer, 2, vec![WriteOp::End]);
        }
        begin(&mut writer, 3, 1, IDENTITY, protocol);
        take(&mut writer, 3, passed("4", &one("4"), Coverage::All));
        take(&mut writer, 3, answered("4", true));
        assert_kept(parent.path(), protocol, Some(&resources(&[("a", "2")])));
    }
    begin(&mut writer, 4, 2, "changed", protocol);
    take(&mut writer, 4, passed("5", &one("5"), Coverage::Part));
    take(&mut writer, 4, answered("5", true));
    assert_kept(parent.path(), protocol, Some(&resources(&[("a", "5")])));
}

#[test]
fn an_older_envoy_of_the_same_node_is_recorded_once_the_newer_one_has_no_stream() {
    let parent = tempfile::tempdir().unwrap();
    let protocol = Protocol::Sotw;
    let mut writer = writer(parent.path(), protocol);
    begin(&mut writer, 2, 2, IDENTITY, protocol);
    let bytes = response(protocol, "1", &resources(&[("a", "1")]), &[]);
    for (is_end, expected) in [(false, None), (true, Some(&resources(&[("a", "1")])))] {
        if is_end {
            take(&mut writer, 2, vec![WriteOp::End]);
        }
        begin(&mut writer, 3, 1, IDENTITY, protocol);
        take(&mut writer, 3, passed("1", &bytes, Coverage::All));
        take(&mut writer, 3, answered("1", true));
        assert_kept(parent.path(), protocol, expected);
    }
}

#[test]
fn the_space_of_what_no_longer_counts_is_given_back_unless_it_is_being_served() {
    let parent = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut writer = writer(parent.path(), Protocol::Sotw);
    let large = resources(&[("a", &"1".repeat(1 << 20))]);
    let bytes = response(Protocol::Sotw, "1", &large, &[]);
    let size = || file(parent.path()).metadata().unwrap().blocks() * 512;
    let reading = writer.status.reading.clone();
    let guard = reading.read();
    for _ in 0..3 {
        keep(&mut writer, "1", &bytes, Coverage::All);
    }
    assert!(size() > 3 << 20);
    drop(guard);
    keep(&mut writer, "1", &bytes, Coverage::All);
    assert!(size() < 2 << 20, "{}", size());
    assert_kept(parent.path(), Protocol::Sotw, Some(&large));
}

/// The names a response changes and those it removes, whether it replaces all, and its answer.
type Step = (Vec<u8>, Vec<u8>, bool, bool);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn what_is_kept_is_the_sum_of_what_was_accepted(
        is_delta in any::<bool>(),
        steps in prop::collection::vec(any::<Step>(), 1..20),
        restart in 0usize..20,
    ) {
        let protocol = if is_delta { Protocol::Delta } else { Protocol::Sotw };
        let parent = tempfile::tempdir().unwrap();
        let (mut writer, mut model) = (writer(parent.path(), protocol), None::<Resources>);
        for (number, (changed, removed, replaces, is_accepted)) in steps.into_iter().enumerate() {
            if number == restart {
                writer = tests::writer(parent.path(), protocol);
            }
            let name = |it: &u8| format!("name {}", it % 16);
            let changed: Resources = changed.iter()
                .map(|it| (name(it), number.to_string().repeat(usize::from(*it)))).collect();
            let mut removed: Vec<_> = removed.iter().map(name).collect();
            removed.retain(|it| is_delta && !changed.contains_key(it));
            let nonce = number.to_string();
            let bytes = response(protocol, &nonce, &changed, &removed);
            if is_delta && number % 5 == 4 {
                let names = (0..8).map(|it| name(&it).into()).collect();
                let frame = file::retained_frame(names).unwrap();
                take(&mut writer, 1, vec![WriteOp::Bytes(frame)]);
                if let (true, Some(model)) = (is_accepted, &mut model) {
                    model.retain(|it, _| (0..8).any(|other| name(&other) == *it));
                }
            }
            let coverage = if replaces { Coverage::All } else { Coverage::Part };
            take(&mut writer, 1, passed(&nonce, &bytes, coverage));
            take(&mut writer, 1, answered(&nonce, is_accepted));
            if is_accepted && replaces {
                model = Some(changed);
            } else if let (true, Some(model)) = (is_accepted, &mut model) {
                model.extend(changed);
                model.retain(|it, _| !removed.contains(it));
            }
            prop_assert_eq!(kept(parent.path(), protocol).unwrap(), model.clone());
        }
        if let Some(model) = model {
            let live: usize = model.iter().map(|(name, content)| name.len() + content.len() + 200).sum();
            let found = writer.status.types.lock()[CLUSTER].length;
            prop_assert!(found <= 2 * live as u64 + 40_000, "{found} bytes for {live}");
        }
    }
}
