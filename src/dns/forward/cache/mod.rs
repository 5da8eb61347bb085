//! Replies kept for a while: for as long as they are fresh, and longer for when no server answers.
//!
//! Both only as far as the configuration allows, which by default it does not: see [`super`]. A stale
//! reply takes the place of a failure only. Entries and bytes are bounded; beyond, any entry is removed.
//! Keys are bytes, and time is an argument.

use std::time::Duration;

use indexmap::IndexMap;
use tokio::time::Instant;

use super::message::Reply;
use crate::clock::later;
use crate::dns::wire::{self, ANY, FLAGS, NOERROR, NXDOMAIN, Record, SOA, Section, TC};

/// TTL of a stale answer: short, so that clients that keep it ask again soon.
const STALE_TTL: u32 = 5;

/// What an entry costs beside the bytes of its key and its reply, about.
const OVERHEAD: usize = 160;

/// What is kept, and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    pub max_entries: usize,
    pub max_bytes: usize,
    /// An answer is given again for its TTL, and no longer than this. Zero: servers are asked each
    /// time.
    pub max_ttl: Duration,
    /// The same for names and types that do not exist.
    pub max_negative_ttl: Duration,
    /// How long after its TTL an answer may be given while no server answers. Zero: never.
    pub max_stale: Duration,
}

impl Config {
    /// Whether anything is kept at all.
    pub(super) fn keeps(&self) -> bool {
        let times = [self.max_ttl, self.max_negative_ttl, self.max_stale];
        self.max_entries > 0 && self.max_bytes > 0 && times.iter().any(|time| !time.is_zero())
    }
}

#[derive(Debug)]
pub(super) struct Cache {
    config: Config,
    entries: IndexMap<Vec<u8>, Entry>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    reply: Reply,
    stored: Instant,
    fresh_until: Instant,
    stale_until: Instant,
    weight: usize,
}

/// What is there for a key.
#[derive(Debug)]
pub(super) enum Found {
    Fresh(Reply),
    /// For when no server answers.
    Stale(Reply),
    Nothing,
}

impl Cache {
    pub(super) fn new(config: Config) -> Self {
        Self {
            config,
            entries: IndexMap::new(),
            bytes: 0,
        }
    }

    pub(super) fn get(&mut self, key: &[u8], now: Instant) -> Found {
        let Some(entry) = self.entries.get(key) else {
            return Found::Nothing;
        };
        if now < entry.fresh_until {
            let age = now.duration_since(entry.stored).as_secs();
            let age = u32::try_from(age).unwrap_or(u32::MAX);
            return Found::Fresh(with_ttls(&entry.reply, |ttl| ttl.saturating_sub(age)));
        }
        if now < entry.stale_until {
            return Found::Stale(with_ttls(&entry.reply, |ttl| ttl.min(STALE_TTL)));
        }
        self.remove(key);
        Found::Nothing
    }

    /// Keeps a reply that may be kept. What is known now replaces what was, also where it is not
    /// kept itself; a server's failure replaces nothing.
    pub(super) fn put(&mut self, key: Vec<u8>, reply: &Reply, now: Instant) {
        if [NOERROR, NXDOMAIN].contains(&reply.rcode()) {
            self.remove(&key);
        }
        let Some((ttl, is_negative)) = lifetime(reply) else {
            return;
        };
        let (fresh, whole) = self.times(ttl, is_negative);
        let weight = OVERHEAD + key.len() + reply.0.len() + size_of::<Reply>();
        // One reply shall not empty the cache.
        if whole.is_zero() || weight > self.config.max_bytes / 8 {
            return;
        }
        self.make_room(weight);
        self.bytes += weight;
        let entry = Entry {
            reply: reply.clone(),
            stored: now,
            fresh_until: later(now, fresh),
            stale_until: later(now, whole),
            weight,
        };
        self.entries.insert(key, entry);
    }

    /// How many entries there are, and what they take.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        (self.entries.len(), self.bytes)
    }

    /// How long a reply is fresh, and how long it is of any use. That a name does not exist is not
    /// said once it is stale.
    fn times(&self, ttl: Duration, is_negative: bool) -> (Duration, Duration) {
        if is_negative {
            let fresh = ttl.min(self.config.max_negative_ttl);
            return (fresh, fresh);
        }
        let fresh = ttl.min(self.config.max_ttl);
        let stale = self.config.max_stale;
        let later = ttl.saturating_add(stale);
        let whole = if stale.is_zero() { fresh } else { later };
        (fresh, whole)
    }

    fn make_room(&mut self, weight: usize) {
        while self.entries.len() >= self.config.max_entries
            || self.bytes + weight > self.config.max_bytes
        {
            let any = fastrand::usize(..self.entries.len().max(1));
            let Some((_, entry)) = self.entries.swap_remove_index(any) else {
                return;
            };
            self.bytes -= entry.weight;
        }
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(entry) = self.entries.swap_remove(key) {
            self.bytes -= entry.weight;
        }
    }
}

/// The reply with other TTLs.
fn with_ttls(reply: &Reply, change: impl Fn(u32) -> u32) -> Reply {
    let mut bytes = reply.0.to_vec();
    let end = wire::question_end(&bytes);
    let records = end.and_then(|end| wire::records(&bytes, end));
    for record in records.unwrap_or_default() {
        let ttl = ttl(&bytes, &record).unwrap_or(0);
        wire::put(&mut bytes, record.ttl_at(), &change(ttl).to_be_bytes());
    }
    Reply(bytes.into(), reply.1)
}

/// How long a reply may be kept, and whether it is negative; `None` if it must not be. Source: RFC 2308, sections 2, 4 and 5.
fn lifetime(reply: &Reply) -> Option<(Duration, bool)> {
    let bytes = &reply.0;
    let end = wire::question_end(bytes)?;
    let records = wire::records(bytes, end)?;
    if bytes[FLAGS] & TC != 0 {
        return None;
    }
    let kind = wire::u16_at(bytes, end - 4)?;
    let answers = || records.iter().filter(|r| r.section == Section::Answer);
    let is_asked = |r: &Record| r.kind == kind || kind == ANY;
    let is_negative = match reply.rcode() {
        NOERROR => !answers().any(is_asked),
        NXDOMAIN => true,
        _ => return None,
    };
    let of_answers = answers().filter_map(|record| ttl(bytes, record)).min();
    let seconds = if is_negative {
        let is_soa = |r: &&Record| r.section == Section::Authority && r.kind == SOA;
        let soa = records.iter().find(is_soa)?;
        let minimum = wire::u32_at(bytes, soa.end.checked_sub(4)?)?;
        let of_answers = of_answers.unwrap_or(u32::MAX);
        ttl(bytes, soa)?.min(minimum).min(of_answers)
    } else {
        of_answers?
    };
    (seconds > 0).then_some((Duration::from_secs(seconds.into()), is_negative))
}

/// A TTL with the highest bit set is none. Source: RFC 2181, section 8.
fn ttl(message: &[u8], record: &Record) -> Option<u32> {
    wire::u32_at(message, record.ttl_at()).filter(|ttl| *ttl <= i32::MAX.unsigned_abs())
}

#[cfg(test)]
mod tests;
