//! What the relay has seen of each type, for `/debug/xdsz` and the metrics.
//!
//! The relay tells its [`Observer`] of each message when it is complete, never of parts. Types are
//! told apart up to [`MOST_TYPES`]; what comes beyond, or under no usable name, is counted together.
//! A response counts as acknowledged when a request carries its nonce, whoever sends that: Envoy, or
//! the agent for what it takes itself.
//!
//! Does not keep resources, nor what Envoy subscribes to.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;

use super::Protocol;
use super::metrics::Metrics;
use super::request::Request;
use super::response::{Received, Taker};
use super::status::End;
use crate::clock::{Clock, rfc3339};
use crate::metrics::{Kind, Registry};

/// How many types are told apart. A mesh has about ten.
const MOST_TYPES: usize = 64;

/// A type with a longer name is counted with the others.
const LONGEST_TYPE: usize = 256;

/// How much is kept of a version, a nonce or the reason of an end, in bytes.
const LONGEST_TEXT: usize = 256;

/// How many responses of a type may wait for their acknowledgement before the oldest is forgotten.
const MOST_UNANSWERED: usize = 8;

const OTHER: &str = "other";

/// Hears of what passes, and tells. Clones share what they know.
#[derive(Clone, Debug)]
pub struct Observer {
    table: Arc<Mutex<Table>>,
    pub(super) metrics: Metrics,
}

#[derive(Debug, Default)]
struct Table {
    types: BTreeMap<String, Type>,
    streams: u64,
    stream: Option<Stream>,
    last_end: Option<EndSnapshot>,
}

#[derive(Debug)]
struct Stream {
    id: u32,
    protocol: Protocol,
    since: SystemTime,
    is_open: bool,
}

/// One type, since the agent's start.
#[derive(Debug, Default)]
struct Type {
    taker: Option<Taker>,
    requests: u64,
    responses: u64,
    bytes: u64,
    acks: u64,
    nacks: u64,
    last: Option<Push>,
    /// Responses before the last that wait for an answer.
    unanswered: VecDeque<Push>,
    accepted: Option<Accepted>,
    refused: Option<Refused>,
}

/// A response that was passed on.
#[derive(Debug)]
struct Push {
    version: String,
    nonce: String,
    resources: u32,
    bytes: u64,
    at: SystemTime,
    received: Instant,
    is_answered: bool,
}

#[derive(Debug)]
struct Accepted {
    version: String,
    at: SystemTime,
    took: Duration,
}

#[derive(Debug)]
struct Refused {
    version: Option<String>,
    reason: String,
    at: SystemTime,
}

/// Everything an [`Observer`] knows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// Streams of Envoy so far.
    pub streams: u64,
    /// The newest stream of Envoy, while there is one.
    pub stream: Option<StreamSnapshot>,
    pub last_end: Option<EndSnapshot>,
    /// By type URL.
    pub types: BTreeMap<String, TypeSnapshot>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamSnapshot {
    pub id: u32,
    pub protocol: &'static str,
    pub since: String,
    /// Whether it is tied to a stream of istiod, or held until there is one.
    pub connected: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EndSnapshot {
    pub id: u32,
    pub at: String,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TypeSnapshot {
    /// Who gets its responses.
    pub taker: Option<Taker>,
    /// Requests of Envoy, its answers included.
    pub requests: u64,
    pub responses: u64,
    pub bytes: u64,
    pub acks: u64,
    pub nacks: u64,
    pub last_response: Option<PushSnapshot>,
    pub last_ack: Option<AckSnapshot>,
    pub last_nack: Option<NackSnapshot>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PushSnapshot {
    pub version: String,
    pub nonce: String,
    pub resources: u32,
    pub bytes: u64,
    pub at: String,
    pub age_seconds: f64,
    pub answered: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AckSnapshot {
    pub version: String,
    pub at: String,
    /// Since the response was complete.
    pub after_seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NackSnapshot {
    /// Unknown if the response was forgotten or one of an earlier stream.
    pub version: Option<String>,
    pub reason: String,
    pub at: String,
}

type Value = fn(&Type) -> Option<f64>;

/// The metrics that tell types apart: name, meaning, kind, and where the value is.
const FAMILIES: [(&str, &str, Kind, Value); 5] = [
    (
        "istio_agent_xds_pushes_total",
        "Discovery responses from istiod",
        Kind::Counter,
        |of| Some(of.responses as f64),
    ),
    (
        "istio_agent_xds_push_bytes_total",
        "Bytes of discovery responses from istiod",
        Kind::Counter,
        |of| Some(of.bytes as f64),
    ),
    (
        "istio_agent_xds_acks_total",
        "Discovery responses that were accepted",
        Kind::Counter,
        |of| Some(of.acks as f64),
    ),
    (
        "istio_agent_xds_nacks_total",
        "Discovery responses that were refused",
        Kind::Counter,
        |of| Some(of.nacks as f64),
    ),
    (
        "istio_agent_xds_last_push_timestamp_seconds",
        "When the last discovery response came, as seconds of Unix time",
        Kind::Gauge,
        |of| of.last.as_ref().map(|push| unix_seconds(push.at)),
    ),
];

impl Observer {
    pub(super) fn new(registry: &Registry) -> Self {
        let table = Arc::<Mutex<Table>>::default();
        for (name, help, kind, value) in FAMILIES {
            let table = table.clone();
            registry.computed(name, help, kind, &["type"], move |series| {
                for (type_url, of) in &lock(&table).types {
                    if let Some(value) = value(of) {
                        series(&[type_url], value);
                    }
                }
            });
        }
        let metrics = Metrics::new(registry);
        Self { table, metrics }
    }

    /// What is known now.
    pub fn snapshot(&self) -> Snapshot {
        let table = lock(&self.table);
        Snapshot {
            streams: table.streams,
            stream: table.stream.as_ref().map(Stream::snapshot),
            last_end: table.last_end.clone(),
            types: table
                .types
                .iter()
                .map(|(type_url, of)| (type_url.clone(), of.snapshot()))
                .collect(),
        }
    }

    pub(super) fn stream_began(&self, id: u32, protocol: Protocol) {
        let mut table = lock(&self.table);
        table.streams += 1;
        table.stream = Some(Stream {
            id,
            protocol,
            since: now(),
            is_open: false,
        });
    }

    pub(super) fn istiod_connected(&self, id: u32) {
        let mut table = lock(&self.table);
        if let Some(stream) = table.stream.as_mut().filter(|stream| stream.id == id) {
            stream.is_open = true;
        }
    }

    /// `connected` says whether istiod's stream was opened at all.
    pub(super) fn stream_ended(&self, id: u32, end: &End, connected: bool) {
        let (of_istiod, of_envoy) = end.classes();
        if connected {
            self.metrics.istiod_ended(of_istiod);
        }
        self.metrics.envoy_ended(of_envoy);
        let mut table = lock(&self.table);
        table.stream.take_if(|stream| stream.id == id);
        table.last_end = Some(EndSnapshot {
            id,
            at: rfc3339(now()),
            reason: cut(end.reason()),
        });
    }

    pub(super) fn received(&self, received: Received) {
        self.metrics.responses.inc();
        let mut table = lock(&self.table);
        table.of(&received.type_url).received(received);
    }

    pub(super) fn requested(&self, request: &Request) {
        let bytes = request.frame.len().saturating_sub(super::request::HEAD);
        self.metrics.largest_request.raise(bytes as f64);
        lock(&self.table).of(&request.type_url).requests += 1;
        self.answered(
            &request.type_url,
            &request.nonce,
            request.refusal.as_deref(),
        );
    }

    /// An answer to the response of this nonce, with the problem if it is a refusal.
    pub(super) fn answered(&self, type_url: &str, nonce: &str, refusal: Option<&str>) {
        if nonce.is_empty() {
            return;
        }
        let took = lock(&self.table).of(type_url).answered(nonce, refusal);
        if let Some(took) = took {
            self.metrics.push_to_ack.observe(took.as_secs_f64());
        }
    }
}

impl Table {
    /// The entry of a type, or that of all others.
    fn of(&mut self, type_url: &str) -> &mut Type {
        let is_named = (1..=LONGEST_TYPE).contains(&type_url.len());
        let has_room = self.types.len() < MOST_TYPES;
        let name = match is_named && (has_room || self.types.contains_key(type_url)) {
            true => type_url,
            false => OTHER,
        };
        self.types.entry(name.to_owned()).or_default()
    }
}

impl Type {
    fn received(&mut self, received: Received) {
        self.taker = Some(received.taker);
        self.responses += 1;
        self.bytes += received.bytes;
        let push = Push {
            version: cut(received.version),
            nonce: cut(received.nonce),
            resources: received.resources,
            bytes: received.bytes,
            at: now(),
            received: Instant::now(),
            is_answered: false,
        };
        if let Some(before) = self.last.replace(push).filter(|push| !push.is_answered) {
            if self.unanswered.len() == MOST_UNANSWERED {
                self.unanswered.pop_front();
            }
            self.unanswered.push_back(before);
        }
    }

    /// Returns how long an acceptance took.
    fn answered(&mut self, nonce: &str, refusal: Option<&str>) -> Option<Duration> {
        let answered = self.await_no_longer(beginning(nonce));
        match (refusal, answered) {
            (Some(reason), answered) => {
                self.nacks += 1;
                self.refused = Some(Refused {
                    version: answered.map(|(version, _)| version),
                    reason: reason.to_owned(),
                    at: now(),
                });
                None
            }
            (None, Some((version, took))) => {
                self.acks += 1;
                let at = now();
                self.accepted = Some(Accepted { version, at, took });
                Some(took)
            }
            // A changed subscription names the last response again.
            (None, None) => None,
        }
    }

    /// Version and age of the response of this nonce, if it waits for an answer. It and those before
    /// it do no longer.
    fn await_no_longer(&mut self, nonce: &str) -> Option<(String, Duration)> {
        let earlier = self.unanswered.iter().position(|push| push.nonce == nonce);
        if let Some(index) = earlier {
            let push = self.unanswered.drain(..=index).next_back()?;
            return Some((push.version, push.received.elapsed()));
        }
        let last = self.last.as_mut();
        let push = last.filter(|push| !push.is_answered && push.nonce == nonce)?;
        push.is_answered = true;
        self.unanswered.clear();
        Some((push.version.clone(), push.received.elapsed()))
    }

    fn snapshot(&self) -> TypeSnapshot {
        TypeSnapshot {
            taker: self.taker,
            requests: self.requests,
            responses: self.responses,
            bytes: self.bytes,
            acks: self.acks,
            nacks: self.nacks,
            last_response: self.last.as_ref().map(Push::snapshot),
            last_ack: self.accepted.as_ref().map(|accepted| AckSnapshot {
                version: accepted.version.clone(),
                at: rfc3339(accepted.at),
                after_seconds: accepted.took.as_secs_f64(),
            }),
            last_nack: self.refused.as_ref().map(|refused| NackSnapshot {
                version: refused.version.clone(),
                reason: refused.reason.clone(),
                at: rfc3339(refused.at),
            }),
        }
    }
}

impl Push {
    fn snapshot(&self) -> PushSnapshot {
        PushSnapshot {
            version: self.version.clone(),
            nonce: self.nonce.clone(),
            resources: self.resources,
            bytes: self.bytes,
            at: rfc3339(self.at),
            age_seconds: self.received.elapsed().as_secs_f64(),
            answered: self.is_answered,
        }
    }
}

impl Stream {
    fn snapshot(&self) -> StreamSnapshot {
        StreamSnapshot {
            id: self.id,
            protocol: match self.protocol {
                Protocol::StateOfTheWorld => "state of the world",
                Protocol::Delta => "delta",
            },
            since: rfc3339(self.since),
            connected: self.is_open,
        }
    }
}

fn now() -> SystemTime {
    Clock::system().now()
}

fn unix_seconds(at: SystemTime) -> f64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// What is kept of a text.
fn beginning(text: &str) -> &str {
    let end = (0..=LONGEST_TEXT.min(text.len())).rfind(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

fn cut(mut text: String) -> String {
    text.truncate(beginning(&text).len());
    text
}

/// What a panic may have left behind is a number too few, not a broken table.
fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tonic::Status;

    use super::*;

    const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

    fn observer() -> (Observer, Registry) {
        let registry = Registry::default();
        (Observer::new(&registry), registry)
    }

    fn response(type_url: &str, nonce: &str) -> Received {
        Received {
            type_url: type_url.to_owned(),
            version: format!("version of {nonce}"),
            nonce: nonce.to_owned(),
            resources: 3,
            bytes: 100,
            taker: Taker::Envoy,
        }
    }

    fn of(observer: &Observer, type_url: &str) -> TypeSnapshot {
        observer.snapshot().types.remove(type_url).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_told_by_its_nonce() {
        // What is answered after two responses, and how often each was then accepted or refused.
        for (answers, acks, nacks, accepted) in [
            (vec![("1", None), ("2", None)], 2, 0, Some("version of 2")),
            (vec![("2", None), ("1", None)], 1, 0, Some("version of 2")),
            (vec![("2", None), ("2", None)], 1, 0, Some("version of 2")),
            (vec![("1", None)], 1, 0, Some("version of 1")),
            (vec![("", None), ("old", None)], 0, 0, None),
            (
                vec![("1", None), ("2", Some("no"))],
                1,
                1,
                Some("version of 1"),
            ),
            (vec![("old", Some("no"))], 0, 1, None),
        ] {
            let (observer, _) = observer();
            observer.received(response(CLUSTER, "1"));
            observer.received(response(CLUSTER, "2"));
            for &(nonce, refusal) in &answers {
                observer.answered(CLUSTER, nonce, refusal);
            }
            let seen = of(&observer, CLUSTER);
            assert_eq!((seen.acks, seen.nacks), (acks, nacks), "{answers:?}");
            let version = seen.last_ack.map(|ack| ack.version);
            assert_eq!(version.as_deref(), accepted, "{answers:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tells_the_last_response_its_age_and_how_long_its_acknowledgement_took() {
        let (observer, registry) = observer();
        observer.received(response(CLUSTER, "1"));
        tokio::time::advance(Duration::from_millis(20)).await;
        observer.answered(CLUSTER, "1", None);
        tokio::time::advance(Duration::from_secs(2)).await;
        let seen = of(&observer, CLUSTER);
        let last = seen.last_response.unwrap();
        assert_eq!((&*last.version, &*last.nonce), ("version of 1", "1"));
        assert_eq!((last.resources, last.bytes, last.answered), (3, 100, true));
        assert_eq!(last.age_seconds, 2.02);
        assert_eq!(seen.last_ack.unwrap().after_seconds, 0.02);
        let page = registry.render();
        for line in [
            "istio_agent_xds_proxy_responses 1",
            "istio_agent_xds_push_to_ack_seconds_bucket{le=\"0.05\"} 1",
            "istio_agent_xds_push_to_ack_seconds_sum 0.02",
            &format!("istio_agent_xds_pushes_total{{type=\"{CLUSTER}\"}} 1"),
            &format!("istio_agent_xds_push_bytes_total{{type=\"{CLUSTER}\"}} 100"),
            &format!("istio_agent_xds_acks_total{{type=\"{CLUSTER}\"}} 1"),
            &format!("istio_agent_xds_nacks_total{{type=\"{CLUSTER}\"}} 0"),
            &format!("istio_agent_xds_last_push_timestamp_seconds{{type=\"{CLUSTER}\"}} 1"),
        ] {
            assert!(page.contains(line), "{line} in\n{page}");
        }
    }

    #[test]
    fn a_refusal_is_told_with_its_version_and_reason() {
        let (observer, _) = observer();
        observer.received(response(CLUSTER, "1"));
        observer.requested(&Request {
            frame: Bytes::from_static(&[0; 47]),
            type_url: CLUSTER.to_owned(),
            nonce: "1".to_owned(),
            refusal: Some("no such port".to_owned()),
        });
        let seen = of(&observer, CLUSTER);
        assert_eq!((seen.requests, seen.nacks), (1, 1));
        let refused = seen.last_nack.unwrap();
        assert_eq!(refused.version.as_deref(), Some("version of 1"));
        assert_eq!(refused.reason, "no such port");
        assert!(seen.last_ack.is_none() && seen.last_response.unwrap().answered);
    }

    #[test]
    fn nothing_grows_with_what_istiod_and_envoy_send() {
        let (observer, _) = observer();
        let long = "é".repeat(1000);
        for number in 0..1000 {
            observer.received(response(&format!("type {number}"), &long));
        }
        for number in 0..1000 {
            observer.received(response(&long, &number.to_string()));
            observer.received(response("type 0", &number.to_string()));
        }
        observer.answered("type 1", &long, None);
        let snapshot = observer.snapshot();
        assert_eq!(snapshot.types.len(), MOST_TYPES + 1);
        assert_eq!(snapshot.types[OTHER].responses, 2000 - MOST_TYPES as u64);
        let last = snapshot.types["type 1"].last_response.clone().unwrap();
        assert_eq!((last.nonce.len(), last.answered), (LONGEST_TEXT, true));
        let table = lock(&observer.table);
        assert_eq!(table.types["type 0"].unanswered.len(), MOST_UNANSWERED);
    }

    #[test]
    fn streams_are_told_apart_and_their_ends_counted_once_for_each_side() {
        let (observer, registry) = observer();
        observer.stream_began(1, Protocol::Delta);
        observer.istiod_connected(1);
        observer.stream_began(2, Protocol::StateOfTheWorld);
        observer.stream_ended(1, &End::Stopped, true);
        let snapshot = observer.snapshot();
        let stream = snapshot.stream.unwrap();
        assert_eq!((stream.id, stream.connected), (2, false));
        assert_eq!(snapshot.last_end.unwrap().id, 1);
        let bad = End::BadRequest(Status::internal("x".repeat(1000)));
        observer.stream_ended(2, &bad, false);
        let snapshot = observer.snapshot();
        assert!(snapshot.stream.is_none());
        assert_eq!(snapshot.streams, 2);
        assert_eq!(snapshot.last_end.unwrap().reason.len(), LONGEST_TEXT);
        let page = registry.render();
        for line in [
            "istio_agent_istiod_connection_terminations{type=\"cancelled\"} 1\n",
            "istio_agent_envoy_connection_terminations{type=\"cancelled\"} 1\n",
            "istio_agent_envoy_connection_terminations{type=\"error\"} 1\n",
        ] {
            assert!(page.contains(line), "{line} in\n{page}");
        }
        assert!(!page.contains("istiod_connection_terminations{type=\"error\"}"));
    }
}
