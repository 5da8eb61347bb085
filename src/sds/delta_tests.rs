//! The rules of delta streams, and what arbitrary requests do to both variants of the protocol.

use std::collections::BTreeMap;
use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest,
};
use proptest::prelude::*;
use prost::Message;
use tonic::Status;

use super::SecretOptions;
use super::consumers::Consumers;
use super::context::StreamContext;
use super::delta::Delta;
use super::metrics::Metrics;
use super::resource::{Resource, TYPE_URL};
use super::sotw::StateOfTheWorld;
use super::stream::{Protocol, ResponseId};
use crate::metrics::Registry;
use crate::secrets::files::source::FileError;
use crate::secrets::name::Name;
use crate::secrets::{Roots, Secret, SecretState};

static OPTIONS: SecretOptions = SecretOptions {
    key_provider: None,
    crl: None,
};

type State = SecretState<Resource<'static>>;

/// The state of each name.
type Table = BTreeMap<Name, State>;

/// One stream without a socket.
struct Tested<P> {
    context: StreamContext,
    protocol: P,
}

impl<P: Protocol> Tested<P> {
    fn new() -> Self {
        Self {
            context: StreamContext::new(
                Consumers::default().add(1),
                Metrics::new(&Registry::default()),
                true,
            ),
            protocol: P::default(),
        }
    }

    fn apply(&mut self, request: &P::Request) -> Result<(), Status> {
        self.protocol.apply(&mut self.context, request)
    }

    fn answer(&mut self, table: &Table, is_batching: bool) -> Option<P::Response> {
        let lookup = |name: &Name| table.get(name).cloned().unwrap_or(State::Unsigned);
        let id = || ResponseId {
            version: "v".to_owned(),
            nonce: "n".to_owned(),
        };
        self.protocol
            .answer(&mut self.context.names, &lookup, is_batching, id)
    }

    /// Answers until nothing is due.
    fn answer_all(&mut self, table: &Table) -> Result<(), TestCaseError> {
        for _ in 0..20 {
            if self.answer(table, true).is_none() {
                return Ok(());
            }
        }
        Err(TestCaseError::fail("it has no end"))
    }
}

fn available(text: &'static str) -> State {
    State::Available(Resource {
        secret: Secret::Roots(Roots::unchecked(text)),
        options: &OPTIONS,
        has_crl: false,
    })
}

fn unusable() -> State {
    State::Unusable(Arc::new(FileError::TooMany { most: 1 }))
}

fn file(path: &str) -> Name {
    Name::FileRoot(path.to_owned())
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

/// The names the next response updates and removes.
fn next(delta: &mut Tested<Delta>, table: &Table, is_batching: bool) -> (Vec<String>, Vec<String>) {
    let response: DeltaDiscoveryResponse = delta.answer(table, is_batching).unwrap_or_default();
    let updated = response.resources.into_iter().map(|one| one.name);
    (updated.collect(), response.removed_resources)
}

#[test]
fn each_name_is_answered_once_and_again_when_it_changes() {
    let mut table = Table::default();
    table.insert(file("a"), available("1"));
    table.insert(file("b"), unusable());
    table.insert(Name::Default, unusable());
    let mut delta = Tested::<Delta>::new();
    let names = ["file-root:a", "file-root:b", "default", "x"];
    delta.apply(&subscribe(&names)).expect("is fine");
    let (updated, mut removed) = next(&mut delta, &table, true);
    removed.sort();
    assert_eq!(updated, ["file-root:a"]);
    assert_eq!(
        removed,
        ["file-root:b", "x"],
        "the certificate is waited for"
    );
    assert_eq!(next(&mut delta, &table, true), Default::default());

    table.insert(file("b"), available("1"));
    table.insert(Name::Default, available("1"));
    assert_eq!(next(&mut delta, &table, true).0, ["file-root:b", "default"]);
    table.insert(file("a"), unusable());
    assert_eq!(
        next(&mut delta, &table, true),
        Default::default(),
        "a loss is no news"
    );
    let mut less = subscribe(&["file-root:b"]);
    less.resource_names_unsubscribe = vec!["default".to_owned(), "file-root:a".to_owned()];
    delta.apply(&less).expect("is fine");
    table.insert(Name::Default, available("2"));
    assert_eq!(
        next(&mut delta, &table, true).0,
        ["file-root:b"],
        "asked for again"
    );
}

#[test]
fn names_wait_for_each_other_only_while_batching() {
    let mut table = Table::default();
    table.insert(file("a"), available("1"));
    table.insert(file("b"), State::Reading);
    let mut delta = Tested::<Delta>::new();
    delta
        .apply(&subscribe(&["file-root:a", "file-root:b"]))
        .expect("is fine");
    assert_eq!(next(&mut delta, &table, true), Default::default());
    assert_eq!(delta.context.names.unanswered().count(), 2);
    assert_eq!(next(&mut delta, &table, false).0, ["file-root:a"]);
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "default|ROOTCA|file-root:[ab]|file-cert:[ab]~[ab]|file-root:system",
        ".{0,12}",
    ]
}

fn states() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(0..4_u8, 8)
}

/// A state for each name the strategy can make.
fn table(states: &[u8]) -> Table {
    let names = [
        "default",
        "ROOTCA",
        "file-root:a",
        "file-root:b",
        "file-cert:a~b",
    ];
    let names = names.iter().map(|name| name.parse().expect("is a name"));
    let states = states.iter().map(|state| match state {
        0 => State::Unsigned,
        1 => State::Reading,
        2 => unusable(),
        _ => available("1"),
    });
    names.zip(states).collect()
}

proptest! {
    /// Any requests in any order, with names in any state: no panic, and an end to the responses.
    #[test]
    fn arbitrary_requests_do_no_harm(
        requests in proptest::collection::vec(
            (proptest::collection::vec(name(), 0..4), "n?", any::<bool>(), states()),
            0..8,
        ),
    ) {
        let mut stream = Tested::<StateOfTheWorld>::new();
        let mut delta = Tested::<Delta>::new();
        for (names, nonce, is_nack, states) in requests {
            let asked: Vec<&str> = names.iter().map(String::as_str).collect();
            let error_detail = is_nack.then(Default::default);
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
                stream.answer_all(&table)?;
            }
            delta.apply(&changes).expect("is within bounds");
            delta.answer_all(&table)?;
        }
    }

    /// Bytes that decode as a request do no harm.
    #[test]
    fn arbitrary_frames_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let table = table(&[3; 8]);
        if let Ok(request) = DiscoveryRequest::decode(&*bytes) {
            let mut stream = Tested::<StateOfTheWorld>::new();
            drop(stream.apply(&request));
            stream.answer_all(&table)?;
        }
        if let Ok(request) = DeltaDiscoveryRequest::decode(&*bytes) {
            let mut delta = Tested::<Delta>::new();
            drop(delta.apply(&request));
            delta.answer_all(&table)?;
        }
    }
}
