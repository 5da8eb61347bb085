mod damage;
mod disk;
mod recorder;
mod replay;

use std::collections::BTreeMap;
use std::fs;

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryResponse, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use proptest::prelude::*;
use prost::Message;

use super::store::Store;
use super::writer::Coverage;
use super::*;
use crate::xds::Protocol;
use crate::xds::intercept::frame;
use crate::xds::response::{Consumer, Received};

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
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

fn writer(parent: &Path, protocol: Protocol) -> Writer {
    let mut writer = Writer::new(parent.to_owned(), Status::new(&Registry::default()));
    let identity = IDENTITY.to_owned();
    writer
        .take(1, WriteOp::Node { protocol, identity })
        .unwrap();
    writer
}

fn complete(nonce: &str, bytes: &Bytes, replaces: bool) -> WriteOp {
    let response = Received {
        type_url: CLUSTER.into(),
        version: format!("version of {nonce}"),
        nonce: nonce.into(),
        resources: 1,
        bytes: bytes.len() as u64 - 5,
        consumer: Consumer::Envoy,
    };
    WriteOp::Complete(
        response,
        if replaces {
            Coverage::All
        } else {
            Coverage::Part
        },
    )
}

fn answered(nonce: &str, is_accepted: bool) -> WriteOp {
    WriteOp::Answered {
        type_url: CLUSTER.into(),
        nonce: nonce.into(),
        is_accepted,
    }
}

/// Has a response kept.
fn keep(writer: &mut Writer, nonce: &str, bytes: &Bytes, replaces: bool) {
    for op in [
        WriteOp::Bytes(vec![bytes.slice(..3), bytes.slice(3..)]),
        complete(nonce, bytes, replaces),
        answered(nonce, true),
    ] {
        writer.take(1, op).unwrap();
    }
}

/// What is kept of clusters; None if nothing is.
fn kept(parent: &Path, protocol: Protocol) -> io::Result<Option<Resources>> {
    let manifest = Manifest::read(parent)?.unwrap_or_default();
    let Some(of) = manifest.types.get(CLUSTER) else {
        return Ok(None);
    };
    let index = store::read(parent, protocol, &of.file)?;
    let mut found = Resources::new();
    for place in index.resources() {
        let mut record = Vec::new();
        index.copy(place.clone(), |block| {
            record.extend_from_slice(block);
            Ok(())
        })?;
        // A record is a message with one resource.
        let any = match protocol {
            Protocol::Sotw => DiscoveryResponse::decode(&record[..])?.resources[0].clone(),
            Protocol::Delta => DeltaDiscoveryResponse::decode(&record[..])?.resources[0]
                .resource
                .clone()
                .unwrap(),
        };
        let named = Named::decode(&any.value[..])?;
        assert_eq!(index.get(named.name.as_bytes()), Some(place));
        found.insert(named.name, named.content);
    }
    Ok(Some(found))
}

fn resources(pairs: &[(&str, &str)]) -> Resources {
    let owned = |(name, content): &(&str, &str)| ((*name).to_owned(), (*content).to_owned());
    pairs.iter().map(owned).collect()
}

fn files(parent: &Path) -> usize {
    fs::read_dir(parent.join("istio-agent-config"))
        .unwrap()
        .count()
}

#[test]
fn a_response_counts_from_its_ack_and_never_after_a_nack_or_the_streams_end() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let parent = tempfile::tempdir().unwrap();
        let mut writer = writer(parent.path(), protocol);
        let first = resources(&[("a", "1"), ("b", "1")]);
        keep(
            &mut writer,
            "1",
            &response(protocol, "1", &first, &[]),
            true,
        );
        for nonce in ["2", "3"] {
            let other = response(protocol, nonce, &resources(&[("a", "2")]), &[]);
            writer.take(1, WriteOp::Bytes(vec![other.clone()])).unwrap();
            writer.take(1, complete(nonce, &other, true)).unwrap();
            assert_eq!(
                kept(parent.path(), protocol).unwrap().as_ref(),
                Some(&first)
            );
            match nonce {
                "2" => writer.take(1, answered(nonce, false)).unwrap(),
                _ => writer.end(1),
            }
            writer.take(1, answered(nonce, true)).unwrap();
            assert_eq!(
                kept(parent.path(), protocol).unwrap().as_ref(),
                Some(&first)
            );
        }
        assert_eq!(files(parent.path()), 2, "manifest and one response");
    }
}

#[test]
fn a_failure_costs_what_is_kept_until_a_whole_response_comes() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path(), Protocol::Delta);
    let first = response(Protocol::Delta, "1", &resources(&[("a", "1")]), &[]);
    keep(&mut writer, "1", &first, true);
    // The first bytes of a response were lost.
    let second = response(Protocol::Delta, "2", &resources(&[("b", "1")]), &[]);
    writer
        .take(1, WriteOp::Bytes(vec![second.slice(9..)]))
        .unwrap();
    writer.take(1, complete("2", &second, false)).unwrap();
    writer.take(1, answered("2", true)).unwrap();
    assert_eq!(kept(parent.path(), Protocol::Delta).unwrap(), None);
    keep(&mut writer, "3", &second, false);
    assert_eq!(kept(parent.path(), Protocol::Delta).unwrap(), None);
    keep(&mut writer, "4", &first, true);
    let expected = Some(resources(&[("a", "1")]));
    assert_eq!(kept(parent.path(), Protocol::Delta).unwrap(), expected);
}

#[test]
fn a_message_whose_bytes_were_lost_costs_its_own_type_only() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path(), Protocol::Delta);
    let first = resources(&[("a", "1")]);
    let bytes = response(Protocol::Delta, "1", &first, &[]);
    writer.take(1, WriteOp::Bytes(vec![bytes.clone()])).unwrap();
    let WriteOp::Complete(mut lost, coverage) = complete("2", &bytes, true) else {
        panic!("it is one");
    };
    lost.type_url = "other".into();
    let lost = WriteOp::Message(Vec::new(), lost, coverage);
    for op in [lost, complete("1", &bytes, true), answered("1", true)] {
        writer.take(1, op).unwrap();
    }
    assert_eq!(kept(parent.path(), Protocol::Delta).unwrap(), Some(first));
}

#[test]
fn an_envoy_that_drains_after_its_node_has_changed_does_not_alter_what_is_kept() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path(), Protocol::Sotw);
    let (protocol, identity) = (Protocol::Sotw, "changed".to_owned());
    writer
        .take(2, WriteOp::Node { protocol, identity })
        .unwrap();
    let bytes = response(protocol, "1", &resources(&[("a", "1")]), &[]);
    keep(&mut writer, "1", &bytes, true);
    assert_eq!(kept(parent.path(), protocol).unwrap(), None);
}

#[test]
fn a_response_that_waits_for_its_ack_does_not_count_once_a_later_one_is_lost() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path(), Protocol::Delta);
    let bytes = response(Protocol::Delta, "1", &resources(&[("a", "1")]), &[]);
    writer.take(1, WriteOp::Bytes(vec![bytes.clone()])).unwrap();
    writer.take(1, complete("1", &bytes, true)).unwrap();
    writer.take(1, complete("2", &bytes, false)).unwrap();
    writer.take(1, answered("1", true)).unwrap();
    assert_eq!(kept(parent.path(), Protocol::Delta).unwrap(), None);
}

#[test]
fn another_format_and_another_identity_are_not_used() {
    let parent = tempfile::tempdir().unwrap();
    let bytes = response(Protocol::Delta, "1", &resources(&[("a", "1")]), &[]);
    let mut first = writer(parent.path(), Protocol::Delta);
    keep(&mut first, "1", &bytes, true);
    let (protocol, identity) = (Protocol::Sotw, "other".to_owned());
    first.take(2, WriteOp::Node { protocol, identity }).unwrap();
    assert_eq!(kept(parent.path(), Protocol::Sotw).unwrap(), None);
    assert_eq!(files(parent.path()), 1, "the manifest");
    let json = br#"{"format":3,"identity":"node","types":{}}"#;
    let text = [format!("{:08x}\n", crc32fast::hash(json)).as_bytes(), json].concat();
    fs::write(parent.path().join("istio-agent-config/manifest"), text).unwrap();
    let error = Manifest::read(parent.path()).unwrap_err().to_string();
    assert_eq!(error, "its format is 3, expected 2");
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
            writer.take(1, WriteOp::Bytes(vec![bytes.clone()])).unwrap();
            writer.take(1, complete(&nonce, &bytes, replaces)).unwrap();
            writer.take(1, answered(&nonce, is_accepted)).unwrap();
            if is_accepted && replaces {
                model = Some(changed);
            } else if let (true, Some(model)) = (is_accepted, &mut model) {
                model.extend(changed);
                model.retain(|it, _| !removed.contains(it));
            }
            if is_delta && number % 5 == 4 {
                let names = vec![Bytes::from_static(b"name 1")];
                writer.take(1, WriteOp::Unsubscribed { type_url: CLUSTER.into(), names }).unwrap();
                model.as_mut().map(|model| model.remove("name 1"));
            }
            prop_assert_eq!(kept(parent.path(), protocol).unwrap(), model.clone());
        }
        if let Some(model) = model {
            let live: usize = model.iter().map(|(name, content)| name.len() + content.len() + 200).sum();
            let manifest = Manifest::read(parent.path()).unwrap().unwrap();
            let found = manifest.types[CLUSTER].file.length;
            prop_assert!(found <= 2 * live as u64 + 40_000, "{found} bytes for {live}");
        }
    }
}
