//! What an [`super::Observer`] records, in its JSON form (times in UTC to the second, durations in
//! seconds), and the record of one type: how much of it came, the last response, and its ACK or NACK.
//!
//! A response waits for the request that carries its nonce. One that a newer response displaces goes
//! on waiting, up to [`MAX_UNANSWERED`] of a type.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;

use super::{Source, beginning, cut, now};
use crate::clock::rfc3339;
use crate::port;
use crate::problem::{Problem, codes};
use crate::xds::last_known_good::{KeptSnapshot, StoredResource, after_nack};
use crate::xds::response::{Consumer, Received};

/// How many responses of a type may wait for their ACK before the oldest is forgotten.
pub(super) const MAX_UNANSWERED: usize = 8;

/// Everything an [`super::Observer`] has recorded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// Streams so far.
    pub streams: u64,
    /// The newest open stream.
    pub stream: Option<StreamSnapshot>,
    pub last_end: Option<EndSnapshot>,
    /// By type URL.
    pub types: BTreeMap<String, TypeSnapshot>,
    /// What is kept on disk, by type URL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<BTreeMap<String, KeptSnapshot>>,
    /// Resources that Envoy has in the stored version, as it has refused istiod's, by type URL.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub after_nack: BTreeMap<String, Vec<StoredResource>>,
    /// Since when Envoy has served what is kept, as istiod has not answered since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_since: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamSnapshot {
    pub id: u32,
    pub protocol: &'static str,
    pub since: String,
    /// Whether istiod has answered on it. Until then Envoy's stream is held.
    pub connected: bool,
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EndSnapshot {
    pub id: u32,
    pub at: String,
    pub reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TypeSnapshot {
    /// Where its responses go.
    pub consumer: Option<Consumer>,
    /// Requests of Envoy, ACKs and NACKs included.
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
    pub source: Source,
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

impl TypeSnapshot {
    /// The NACK of the last response, if there is one, and the version. Times have whole seconds; of an ACK
    /// and a NACK within one, the one of this version is the last.
    fn refusal(&self) -> Option<(&str, &NackSnapshot)> {
        let (response, nack) = (self.last_response.as_ref()?, self.last_nack.as_ref()?);
        let is_last = self.last_ack.as_ref().is_none_or(|ack| {
            let is_of_this = nack.version.as_ref() == Some(&response.version);
            nack.at > ack.at || (nack.at == ack.at && is_of_this && ack.version != response.version)
        });
        (response.answered && is_last).then_some((&*response.version, nack))
    }
}

impl Snapshot {
    /// The types whose last response was refused, with Envoy's reason, which names the resources.
    pub fn refusals(&self) -> Vec<Problem> {
        let stored = self.after_nack.iter();
        let stored = stored.map(|(type_url, it)| after_nack::problem(type_url, it));
        let problems = self.types.iter().filter_map(|(url, of_type)| {
            let (version, nack) = of_type.refusal()?;
            let found = format!("version {version} at {}: {}", nack.at, nack.reason);
            let (code, subject) = match port::taken(&nack.reason) {
                Some(port) => (codes::PORT_TAKEN, format!("port {port}")),
                None => {
                    let name = url.rsplit(['.', '/']).next()?;
                    (codes::RESOURCE_REFUSED, format!("NACK of {name}"))
                }
            };
            Some(Problem::new(code, subject, port::explained(found)))
        });
        stored.chain(problems).collect()
    }
}

/// One type, since the agent's start.
#[derive(Debug, Default)]
pub(super) struct Type {
    /// The last response has an age of zero.
    pub(super) seen: TypeSnapshot,
    /// When the last response came.
    pub(super) last: Option<(SystemTime, Instant)>,
    /// In the order of arrival.
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
    pub(super) fn received(&mut self, response: Received, source: Source) {
        let (at, received) = (now(), Instant::now());
        let (version, nonce) = (cut(response.version), cut(response.nonce));
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
        self.unanswered.push_back(Unanswered {
            version,
            nonce,
            received,
        });
        if self.unanswered.len() > MAX_UNANSWERED {
            self.unanswered.pop_front();
        }
    }

    /// Records the ACK of the response of this nonce, or its NACK. Returns how long an ACK took. From now
    /// on neither the response nor those before it wait.
    pub(super) fn answered(&mut self, nonce: &str, nack: Option<&str>) -> Option<Duration> {
        let mut waiting = self.unanswered.iter();
        let index = waiting.position(|response| response.nonce == beginning(nonce));
        let answered = index.and_then(|index| self.unanswered.drain(..=index).next_back());
        if answered.is_some()
            && self.unanswered.is_empty()
            && let Some(last) = &mut self.seen.last_response
        {
            last.answered = true;
        }
        let at = rfc3339(now());
        if let Some(reason) = nack {
            self.seen.nacks += 1;
            self.seen.last_nack = Some(NackSnapshot {
                version: answered.map(|response| response.version),
                reason: reason.to_owned(),
                at,
            });
            return None;
        }
        // A changed subscription names the last response again, which is no ACK.
        let Unanswered {
            version, received, ..
        } = answered?;
        let took = received.elapsed();
        self.seen.acks += 1;
        self.seen.last_ack = Some(AckSnapshot {
            version,
            at,
            after_seconds: took.as_secs_f64(),
        });
        Some(took)
    }

    pub(super) fn snapshot(&self) -> TypeSnapshot {
        let mut snapshot = self.seen.clone();
        if let (Some(last), Some((_, received))) = (&mut snapshot.last_response, self.last) {
            last.age_seconds = received.elapsed().as_secs_f64();
        }
        snapshot
    }
}
