//! Defines the records of an [`super::Observer`] in their JSON form (times in UTC to the second, durations in
//! seconds), and the record of one type: counters, the last response, and its ACK or NACK.
//!
//! A response waits for the request with its nonce, even after a newer response. Up to [`MAX_UNANSWERED`]
//! responses of a type wait.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;

use super::OnDemandSnapshot;
use super::{Source, beginning, cut};
use crate::net::port;
use crate::problem::{Code, Problem};
use crate::runtime::clock::rfc3339;
use crate::xds::ledger::{StoredResource, StoredSnapshot, rejected};
use crate::xds::response::{Consumer, Received};
use crate::xds::{CLUSTER, LISTENER};

/// The time after which a new stream's missing responses are reported.
const SETTLED: Duration = Duration::from_secs(5);

/// The most responses of a type that wait for their ACK. Beyond it the oldest is dropped.
pub(super) const MAX_UNANSWERED: usize = 8;

/// The complete record of an [`super::Observer`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// The number of streams so far.
    pub streams: u64,
    /// The newest open stream.
    pub stream: Option<StreamSnapshot>,
    pub last_end: Option<EndSnapshot>,
    /// The requests and responses of each type, by type URL.
    pub types: BTreeMap<String, TypeSnapshot>,
    /// Stored configuration, by type URL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<BTreeMap<&'static str, StoredSnapshot>>,
    /// The reason why the last changes of the configuration could not be stored.
    #[serde(skip)]
    pub write_failure: Option<String>,
    /// The newest Envoy's clusters, if it gets them on demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_demand: Option<OnDemandSnapshot>,
    /// Resources of which Envoy has the stored version, because it has rejected istiod's, by type URL.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub after_nack: BTreeMap<&'static str, Vec<StoredResource>>,
    /// The number of resources that Envoy has, by type URL, if configuration is stored.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub accepted: BTreeMap<&'static str, usize>,
    /// The first names of the resources in the last response of a type that Envoy has rejected, by type URL.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rejected: BTreeMap<&'static str, Vec<String>>,
    /// The time since which Envoy has stored configuration, without a response of istiod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_since: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamSnapshot {
    pub id: u32,
    pub protocol: &'static str,
    pub since: String,
    #[serde(skip)]
    pub began: Instant,
    /// True once istiod has responded on the stream. Until then Envoy's stream is held.
    pub connected: bool,
    pub source: Source,
    /// What does not work on istiod's stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EndSnapshot {
    pub id: u32,
    pub at: String,
    pub reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TypeSnapshot {
    /// The side that gets the responses.
    pub consumer: Option<Consumer>,
    /// The number of Envoy's requests, including ACKs and NACKs.
    pub requests: u64,
    pub responses: u64,
    pub bytes: u64,
    pub acks: u64,
    pub nacks: u64,
    /// True if the last answer was a NACK.
    #[serde(skip)]
    pub is_rejected: bool,
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
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AckSnapshot {
    pub version: String,
    pub at: String,
    pub age_seconds: f64,
    /// The time since the response was complete.
    pub after_seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NackSnapshot {
    /// None if the response was dropped, or belongs to an earlier stream.
    pub version: Option<String>,
    pub reason: String,
    pub at: String,
}

impl Snapshot {
    /// Describes what istiod has sent of clusters and listeners, if it has not answered a request for them, or if Envoy has
    /// no listener and `needs_listeners`, as every captured sidecar does, although its stream has been open for some
    /// seconds.
    pub fn missing_listeners(&self, needs_listeners: bool) -> Option<Problem> {
        let stream = self.stream.as_ref().filter(|it| it.source == Source::Istiod)?;
        let mut asked = [CLUSTER, LISTENER].into_iter().filter_map(|url| self.types.get(url));
        let is_unanswered = asked.any(|it| it.requests > 0 && it.last_response.is_none());
        let lacks_listeners = needs_listeners && stream.connected && self.listeners() == Some(0);
        if !is_unanswered && !lacks_listeners || stream.began.elapsed() < SETTLED {
            return None;
        }
        let states = [(CLUSTER, "clusters"), (LISTENER, "listeners")].map(|(type_url, name)| {
            let seen = self.types.get(type_url);
            match seen.and_then(|seen| seen.last_response.as_ref()) {
                Some(response) => {
                    let PushSnapshot { resources, at, .. } = response;
                    format!("{name}: asked for, last response with {resources} resources at {at}")
                }
                None if seen.is_some_and(|seen| seen.requests > 0) => {
                    format!("{name}: asked for since {}, not answered", stream.since)
                }
                None => format!("{name}: not asked for, because Envoy waits for its clusters"),
            }
        });
        Some(Problem::new(Code::ListenersMissing, "discovery", states.join("; ")))
    }

    /// Returns the number of listeners that Envoy has. Returns None if it is not known, because Envoy has not answered or
    /// has rejected some.
    fn listeners(&self) -> Option<usize> {
        let Some(seen) = self.types.get(LISTENER) else { return Some(0) };
        match &seen.last_response {
            None => Some(0),
            Some(response) if seen.is_rejected || !response.answered => None,
            Some(response) => self.accepted.get(LISTENER).copied().or_else(|| {
                // Later responses may have changes only.
                (seen.responses == 1).then_some(response.resources as usize)
            }),
        }
    }

    /// Lists types whose last response was rejected, with Envoy's reason, which names the resources, and types
    /// with stored versions in place of rejected ones.
    pub fn rejections(&self) -> Vec<Problem> {
        let stored = self.after_nack.iter().map(|(type_url, it)| rejected::problem(type_url, it));
        let rejected = self.types.iter().filter_map(|(url, seen)| {
            let response =
                seen.last_response.as_ref().filter(|it| it.answered && seen.is_rejected)?;
            let version = &response.version;
            let nack = seen.last_nack.as_ref()?;
            let names = self.rejected.get(&**url).map(|names| names.join(", "));
            let names = names.map(|names| format!(" ({names})")).unwrap_or_default();
            let found = format!("version {version} at {}{names}: {}", nack.at, nack.reason);
            let (code, subject) = match port::taken(&nack.reason) {
                Some(port) => (Code::PortTaken, format!("port {port}")),
                None => {
                    let name = url.rsplit(['.', '/']).next()?;
                    (Code::ResourceRefused, format!("NACK of {name}"))
                }
            };
            Some(Problem::new(code, subject, port::explained(found)))
        });
        stored.chain(rejected).collect()
    }
}

/// The record of a type since the start of the agent.
#[derive(Debug, Default)]
pub(super) struct Type {
    /// The snapshot, in which the last response and its ACK have an age of zero.
    pub(super) seen: TypeSnapshot,
    /// The time of the last response.
    pub(super) last: Option<(SystemTime, Instant)>,
    /// The time of the last ACK.
    last_ack: Option<Instant>,
    /// The responses that wait for their ACK, in the order of arrival.
    pub(super) unanswered: VecDeque<Unanswered>,
}

/// A response that waits for its ACK or NACK.
#[derive(Debug)]
pub(super) struct Unanswered {
    version: String,
    nonce: String,
    received: Instant,
}

impl Type {
    /// Records a response, which then waits for its ACK.
    pub(super) fn record_response(&mut self, response: Received, source: Source) {
        let at = SystemTime::now();
        let received = Instant::now();
        let version = cut(response.version);
        let nonce = cut(response.nonce);
        self.seen.consumer = Some(response.consumer);
        self.seen.responses += 1;
        self.seen.bytes += response.bytes;
        self.seen.last_response = Some(PushSnapshot {
            version: version.clone(),
            nonce: nonce.clone(),
            resources: response.resources,
            bytes: response.bytes,
            at: rfc3339(at),
            age_seconds: 0.0,
            answered: false,
            source,
        });
        self.last = Some((at, received));
        self.unanswered.push_back(Unanswered { version, nonce, received });
        if self.unanswered.len() > MAX_UNANSWERED {
            self.unanswered.pop_front();
        }
    }

    /// Records the ACK of the response with this nonce, or its NACK. Returns the time that an ACK took. The
    /// response and earlier ones no longer wait.
    pub(super) fn record_ack_or_nack(
        &mut self,
        nonce: &str,
        nack: Option<&str>,
    ) -> Option<Duration> {
        let index = self.unanswered.iter().position(|response| response.nonce == beginning(nonce));
        let response = index.and_then(|index| self.unanswered.drain(..=index).next_back());
        if response.is_some()
            && self.unanswered.is_empty()
            && let Some(last) = &mut self.seen.last_response
        {
            last.answered = true;
        }
        let at = rfc3339(SystemTime::now());
        if let Some(reason) = nack {
            self.seen.is_rejected = true;
            self.seen.nacks += 1;
            self.seen.last_nack = Some(NackSnapshot {
                version: response.map(|response| response.version),
                reason: reason.to_owned(),
                at,
            });
            return None;
        }
        // A request that changes a subscription has the nonce of the last response, but is not an ACK.
        let response = response?;
        let latency = response.received.elapsed();
        self.seen.is_rejected = false;
        self.last_ack = Some(Instant::now());
        self.seen.acks += 1;
        self.seen.last_ack = Some(AckSnapshot {
            version: response.version,
            at,
            age_seconds: 0.0,
            after_seconds: latency.as_secs_f64(),
        });
        Some(latency)
    }

    pub(super) fn snapshot(&self) -> TypeSnapshot {
        let mut snapshot = self.seen.clone();
        if let (Some(last), Some((_, received))) = (&mut snapshot.last_response, self.last) {
            last.age_seconds = received.elapsed().as_secs_f64();
        }
        if let (Some(ack), Some(at)) = (&mut snapshot.last_ack, self.last_ack) {
            ack.age_seconds = at.elapsed().as_secs_f64();
        }
        snapshot
    }
}
