//! The record of one type: how much of it came, the last response, and its ACK or NACK.
//!
//! A response waits for the request that carries its nonce. One that a newer response displaces goes
//! on waiting, up to [`MAX_UNANSWERED`] of a type.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::snapshot::{AckSnapshot, NackSnapshot, PushSnapshot, TypeSnapshot};
use super::{Source, beginning, cut, now};
use crate::clock::rfc3339;
use crate::xds::response::Received;

/// How many responses of a type may wait for their ACK before the oldest is forgotten.
pub(super) const MAX_UNANSWERED: usize = 8;

/// One type, since the agent's start.
#[derive(Debug, Default)]
pub(super) struct Type {
    /// Counts, the last ACK and the last NACK; not the last response, which ages.
    pub(super) seen: TypeSnapshot,
    pub(super) last: Option<Push>,
    /// Responses before the last that wait for an ACK or NACK.
    pub(super) unanswered: VecDeque<Push>,
}

/// A response that was passed on.
#[derive(Debug)]
pub(super) struct Push {
    /// With an age of zero.
    seen: PushSnapshot,
    pub(super) at: SystemTime,
    received: Instant,
}

impl Type {
    pub(super) fn received(&mut self, received: Received, source: Source) {
        self.seen.consumer = Some(received.consumer);
        self.seen.responses += 1;
        self.seen.bytes += received.bytes;
        let at = now();
        let push = Push {
            seen: PushSnapshot {
                version: cut(received.version),
                nonce: cut(received.nonce),
                resources: received.resources,
                bytes: received.bytes,
                at: rfc3339(at),
                age_seconds: 0.0,
                answered: false,
                source,
            },
            at,
            received: Instant::now(),
        };
        let before = self.last.replace(push);
        if let Some(before) = before.filter(|push| !push.seen.answered) {
            if self.unanswered.len() == MAX_UNANSWERED {
                self.unanswered.pop_front();
            }
            self.unanswered.push_back(before);
        }
    }

    /// Records the ACK of the response of this nonce, or its NACK. Returns how long an ACK took.
    pub(super) fn answered(&mut self, nonce: &str, nack: Option<&str>) -> Option<Duration> {
        let answered = self.take_unanswered(beginning(nonce));
        let at = rfc3339(now());
        if let Some(reason) = nack {
            self.seen.nacks += 1;
            self.seen.last_nack = Some(NackSnapshot {
                version: answered.map(|(version, _)| version),
                reason: reason.to_owned(),
                at,
            });
            return None;
        }
        // A changed subscription names the last response again, which is no ACK.
        let (version, took) = answered?;
        self.seen.acks += 1;
        self.seen.last_ack = Some(AckSnapshot {
            version,
            at,
            after_seconds: took.as_secs_f64(),
        });
        Some(took)
    }

    /// Version and age of the response of this nonce, if it waits for an ACK. From now on neither it
    /// nor those before it wait.
    fn take_unanswered(&mut self, nonce: &str) -> Option<(String, Duration)> {
        let mut unanswered = self.unanswered.iter();
        let earlier = unanswered.position(|push| push.seen.nonce == nonce);
        if let Some(index) = earlier {
            let push = self.unanswered.drain(..=index).next_back()?;
            return Some((push.seen.version, push.received.elapsed()));
        }
        let last = self.last.as_mut();
        let push = last.filter(|push| !push.seen.answered && push.seen.nonce == nonce)?;
        push.seen.answered = true;
        self.unanswered.clear();
        Some((push.seen.version.clone(), push.received.elapsed()))
    }

    pub(super) fn snapshot(&self) -> TypeSnapshot {
        TypeSnapshot {
            last_response: self.last.as_ref().map(Push::snapshot),
            ..self.seen.clone()
        }
    }
}

impl Push {
    fn snapshot(&self) -> PushSnapshot {
        PushSnapshot {
            age_seconds: self.received.elapsed().as_secs_f64(),
            ..self.seen.clone()
        }
    }
}
