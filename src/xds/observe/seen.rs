//! One type: how much of it came, the last response, and what became of it.
//!
//! A response waits for the answer that carries its nonce. One that a newer response displaces goes on
//! waiting, a few of them at most.
//!
//! Does not know which type it is.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::snapshot::{AckSnapshot, NackSnapshot, PushSnapshot, TypeSnapshot};
use super::{beginning, cut, now};
use crate::clock::rfc3339;
use crate::xds::response::{Received, Taker};

/// How many responses of a type may wait for their acknowledgement before the oldest is forgotten.
pub(super) const MOST_UNANSWERED: usize = 8;

/// One type, since the agent's start.
#[derive(Debug, Default)]
pub(super) struct Type {
    taker: Option<Taker>,
    pub(super) requests: u64,
    pub(super) responses: u64,
    pub(super) bytes: u64,
    pub(super) acks: u64,
    pub(super) nacks: u64,
    pub(super) last: Option<Push>,
    /// Responses before the last that wait for an answer.
    pub(super) unanswered: VecDeque<Push>,
    accepted: Option<Accepted>,
    refused: Option<Refused>,
}

/// A response that was passed on.
#[derive(Debug)]
pub(super) struct Push {
    version: String,
    nonce: String,
    resources: u32,
    bytes: u64,
    pub(super) at: SystemTime,
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

impl Type {
    pub(super) fn received(&mut self, received: Received) {
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
    pub(super) fn answered(&mut self, nonce: &str, refusal: Option<&str>) -> Option<Duration> {
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

    pub(super) fn snapshot(&self) -> TypeSnapshot {
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
