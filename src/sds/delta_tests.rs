//! The rules of a stream of changes, and what arbitrary requests do to both forms.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::secret;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest,
};
use proptest::prelude::*;
use prost::Message;

use super::delta::Delta;
use super::desk::Desk;
use super::metrics::Metrics;
use super::secret::{Shelf, Shown, TYPE_URL, Version};
use super::session::{Protocol, Stamp};
use super::stream::Stream;
use crate::metrics::Registry;
use crate::secrets::files::source::FileError;
use crate::secrets::name::Name;

/// What a test says there is.
#[derive(Default)]
struct Table(BTreeMap<Name, Shown>);

impl Shelf for Table {
    fn shown(&self, name: &Name) -> Shown {
        self.0.get(name).cloned().unwrap_or(Shown::NotYet)
    }

    fn content(&self, _: &Name) -> Option<secret::Type> {
        Some(secret::Type::ValidationContext(Default::default()))
    }
}

fn there(text: &'static str) -> Shown {
    Shown::There(Version::of(&Bytes::from_static(text.as_bytes())))
}

fn missing() -> Shown {
    Shown::Missing(Arc::new(FileError::TooMany { most: 1 }))
}

fn file(path: &str) -> Name {
    Name::FileRoot(path.to_owned())
}

fn fresh<P: Protocol>() -> P {
    P::new(Desk::new(1, Metrics::new(&Registry::default()), true))
}

fn subscribe(names: &[&str]) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(Node {
            id: "router~1".to_owned(),
            ..Default::default()
        }),
        type_url: TYPE_URL.to_owned(),
        resource_names_subscribe: names.iter().map(|&name| name.to_owned()).collect(),
        ..Default::default()
    }
}

fn stamp() -> Stamp {
    Stamp {
        version: "v".to_owned(),
        nonce: "n".to_owned(),
    }
}

/// What the next response brings and takes away.
fn next(delta: &mut Delta, table: &Table, is_patient: bool) -> (Vec<String>, Vec<String>) {
    if !delta.is_due(table, is_patient) {
        return Default::default();
    }
    let response: DeltaDiscoveryResponse = delta.answer(table, is_patient, stamp());
    let brought = response.resources.into_iter().map(|one| one.name);
    (brought.collect(), response.removed_resources)
}

#[test]
fn says_of_each_name_what_is_known_once_and_again_when_it_changes() {
    let mut table = Table::default();
    table.0.insert(file("a"), there("1"));
    table.0.insert(file("b"), missing());
    table.0.insert(Name::Default, missing());
    let mut delta: Delta = fresh();
    let names = ["file-root:a", "file-root:b", "default", "x"];
    delta.apply(&subscribe(&names)).expect("is fine");
    let (brought, mut removed) = next(&mut delta, &table, true);
    removed.sort();
    assert_eq!(brought, ["file-root:a"]);
    assert_eq!(
        removed,
        ["file-root:b", "x"],
        "the certificate is waited for"
    );
    assert_eq!(next(&mut delta, &table, true), Default::default());

    table.0.insert(file("b"), there("1"));
    table.0.insert(Name::Default, there("1"));
    assert_eq!(next(&mut delta, &table, true).0, ["file-root:b", "default"]);
    table.0.insert(file("a"), missing());
    assert_eq!(
        next(&mut delta, &table, true),
        Default::default(),
        "a loss is no news"
    );
    let mut less = subscribe(&["file-root:b"]);
    less.resource_names_unsubscribe = vec!["default".to_owned(), "file-root:a".to_owned()];
    delta.apply(&less).expect("is fine");
    table.0.insert(Name::Default, there("2"));
    assert_eq!(
        next(&mut delta, &table, true).0,
        ["file-root:b"],
        "asked for again"
    );
}

#[test]
fn names_wait_for_each_other_only_as_long_as_somebody_is_patient() {
    let mut table = Table::default();
    table.0.insert(file("a"), there("1"));
    table.0.insert(file("b"), Shown::Pending);
    let mut delta: Delta = fresh();
    delta
        .apply(&subscribe(&["file-root:a", "file-root:b"]))
        .expect("is fine");
    assert_eq!(next(&mut delta, &table, true), Default::default());
    assert!(delta.waits(&table).reading);
    assert_eq!(next(&mut delta, &table, false).0, ["file-root:a"]);
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "default|ROOTCA|file-root:[ab]|file-cert:[ab]~[ab]|file-root:system",
        ".{0,12}",
    ]
}

fn shelf() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(0..4_u8, 8)
}

/// Some state of every name the strategy can make.
fn table(states: &[u8]) -> Table {
    let names = [
        "default",
        "ROOTCA",
        "file-root:a",
        "file-root:b",
        "file-cert:a~b",
    ];
    let names = names.iter().map(|name| name.parse().expect("is a name"));
    let shown = states.iter().map(|state| match state {
        0 => Shown::NotYet,
        1 => Shown::Pending,
        2 => missing(),
        _ => there("1"),
    });
    Table(names.zip(shown).collect())
}

proptest! {
    /// Any requests in any order, with anything there: no panic, no name nobody asked for, and an
    /// end to what there is to say.
    #[test]
    fn arbitrary_requests_do_no_harm(
        requests in proptest::collection::vec(
            (proptest::collection::vec(name(), 0..4), "n?", any::<bool>(), shelf()),
            0..8,
        ),
    ) {
        let mut stream: Stream = fresh();
        let mut delta: Delta = fresh();
        for (names, nonce, is_refusal, states) in requests {
            let asked: Vec<&str> = names.iter().map(String::as_str).collect();
            let error_detail = is_refusal.then(Default::default);
            let whole = DiscoveryRequest {
                node: subscribe(&[]).node,
                resource_names: names.clone(),
                response_nonce: nonce,
                error_detail: error_detail.clone(),
                ..Default::default()
            };
            let mut changes = subscribe(&asked);
            changes.error_detail = error_detail;
            changes.resource_names_unsubscribe = names.into_iter().take(1).collect();
            let table = table(&states);
            if stream.apply(&whole).is_ok() {
                said(&mut stream, &table)?;
            }
            delta.apply(&changes).expect("is within bounds");
            said(&mut delta, &table)?;
        }
    }

    /// Bytes that are no request are errors of the decoder, and those that are do no harm.
    #[test]
    fn arbitrary_frames_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let table = table(&[3; 8]);
        if let Ok(request) = DiscoveryRequest::decode(&*bytes) {
            let mut stream: Stream = fresh();
            drop(stream.apply(&request));
            said(&mut stream, &table)?;
        }
        if let Ok(request) = DeltaDiscoveryRequest::decode(&*bytes) {
            let mut delta: Delta = fresh();
            drop(delta.apply(&request));
            said(&mut delta, &table)?;
        }
    }
}

fn said<P: Protocol>(protocol: &mut P, table: &Table) -> Result<(), TestCaseError> {
    for _ in 0..20 {
        if !protocol.is_due(table, true) {
            return Ok(());
        }
        protocol.answer(table, true, stamp());
    }
    Err(TestCaseError::fail("it has no end"))
}
