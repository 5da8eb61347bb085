//! Stores replies while they are fresh, and longer for the case that servers fail or do not answer.
//!
//! The configuration limits both times, by default to zero: see [`super`]. A stale reply only takes the
//! place of a failure. Entries and bytes are bounded; a random entry is removed to make room. Keys are
//! bytes, and time is an argument.

use std::time::Duration;

use indexmap::IndexMap;
use tokio::time::Instant;

use super::message::Reply;
use crate::dns::wire::{self, ANY, FLAGS, NOERROR, NXDOMAIN, Record, SOA, Section, TC};
use crate::runtime::clock::later;

/// TTL of a stale answer: short, so that clients that cache it retry soon.
const STALE_TTL: u32 = 5;

/// Approximate bytes of an entry besides its key and its reply.
const OVERHEAD: usize = 160;

/// Limits of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    pub max_entries: usize,
    pub max_bytes: usize,
    /// An answer is fresh for its TTL, at most for this time. With zero, servers are asked each time.
    pub max_ttl: Duration,
    /// Like `max_ttl`, for names and types that do not exist.
    pub max_negative_ttl: Duration,
    /// Time after its TTL in which an answer may be used while servers fail or do not answer. With zero, never.
    pub max_stale: Duration,
}

impl Config {
    /// Returns whether any reply can be stored.
    pub(super) fn is_enabled(&self) -> bool {
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

/// The result of a lookup.
#[derive(Debug)]
pub(super) enum Lookup {
    Fresh(Reply),
    /// Usable only if the servers fail or do not answer.
    Stale(Reply),
    Miss,
}

impl Cache {
    pub(super) fn new(config: Config) -> Self {
        Self { config, entries: IndexMap::new(), bytes: 0 }
    }

    pub(super) fn get(&mut self, key: &[u8], now: Instant) -> Lookup {
        let Some(entry) = self.entries.get(key) else {
            return Lookup::Miss;
        };
        if now < entry.fresh_until {
            let age = now.duration_since(entry.stored).as_secs();
            let age = u32::try_from(age).unwrap_or(u32::MAX);
            return Lookup::Fresh(with_ttls(&entry.reply, |ttl| ttl.saturating_sub(age)));
        }
        if now < entry.stale_until {
            return Lookup::Stale(with_ttls(&entry.reply, |ttl| ttl.min(STALE_TTL)));
        }
        self.remove(key);
        Lookup::Miss
    }

    /// Stores a reply if it may be stored. Even if not, it removes the entry that it makes obsolete; a
    /// server's failure removes nothing.
    pub(super) fn put(&mut self, key: Vec<u8>, reply: &Reply, now: Instant) {
        if !reply.is_failure() {
            self.remove(&key);
        }
        let Some((ttl, is_negative)) = cacheable_ttl(reply) else {
            return;
        };
        let (fresh, usable) = self.lifetime(ttl, is_negative);
        let weight = OVERHEAD + key.len() + reply.bytes.len() + size_of::<Reply>();
        // One reply must not empty the cache.
        if usable.is_zero() || weight > self.config.max_bytes / 8 {
            return;
        }
        self.make_room(weight);
        self.bytes += weight;
        let entry = Entry {
            reply: reply.clone(),
            stored: now,
            fresh_until: later(now, fresh),
            stale_until: later(now, usable),
            weight,
        };
        self.entries.insert(key, entry);
    }

    /// Returns the number of entries, and their bytes.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        (self.entries.len(), self.bytes)
    }

    /// Returns how long a reply is fresh, and how long it is usable. A negative reply is not usable when
    /// it is stale.
    fn lifetime(&self, ttl: Duration, is_negative: bool) -> (Duration, Duration) {
        if is_negative {
            let fresh = ttl.min(self.config.max_negative_ttl);
            return (fresh, fresh);
        }
        let fresh = ttl.min(self.config.max_ttl);
        let max_stale = self.config.max_stale;
        if max_stale.is_zero() {
            return (fresh, fresh);
        }
        (fresh, ttl.saturating_add(max_stale))
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

/// Returns the reply with changed TTLs.
fn with_ttls(reply: &Reply, change: impl Fn(u32) -> u32) -> Reply {
    let mut bytes = reply.bytes.to_vec();
    let end = wire::question_end(&bytes);
    for record in end.and_then(|end| wire::records(&bytes, end)).unwrap_or_default() {
        let ttl = ttl(&bytes, &record).unwrap_or(0);
        wire::put(&mut bytes, record.ttl_at(), &change(ttl).to_be_bytes());
    }
    Reply { bytes: bytes.into(), ..*reply }
}

/// Returns how long a reply may be stored, and whether it is negative; `None` if it must not be stored.
/// Source: RFC 2308, sections 2, 4 and 5.
fn cacheable_ttl(reply: &Reply) -> Option<(Duration, bool)> {
    let bytes = &reply.bytes;
    let end = wire::question_end(bytes)?;
    let records = wire::records(bytes, end)?;
    if bytes[FLAGS] & TC != 0 {
        return None;
    }
    let kind = wire::u16_at(bytes, end - 4)?;
    let mut answers = records.iter().filter(|r| r.section == Section::Answer);
    let min_answer_ttl = answers.clone().filter_map(|r| ttl(bytes, r)).min();
    let is_negative = match reply.rcode() {
        NOERROR => !answers.any(|r| r.kind == kind || kind == ANY),
        NXDOMAIN => true,
        _ => return None,
    };
    let seconds = if is_negative {
        let soa = records.iter().find(|r| r.section == Section::Authority && r.kind == SOA)?;
        let minimum = wire::u32_at(bytes, soa.end.checked_sub(4)?)?;
        ttl(bytes, soa)?.min(minimum).min(min_answer_ttl.unwrap_or(u32::MAX))
    } else {
        min_answer_ttl?
    };
    match seconds {
        0 => None,
        _ => Some((Duration::from_secs(seconds.into()), is_negative)),
    }
}

/// Returns the TTL of a record. One with the highest bit set is invalid. Source: RFC 2181, section 8.
fn ttl(message: &[u8], record: &Record) -> Option<u32> {
    wire::u32_at(message, record.ttl_at()).filter(|ttl| *ttl <= i32::MAX.unsigned_abs())
}

#[cfg(test)]
mod tests;
