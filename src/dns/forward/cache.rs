//! Replies kept for a while: for as long as they are fresh, and a little longer for when no server
//! answers.
//!
//! Fresh ones are given out only as far as the configuration allows, which by default it does not:
//! a workload that asks again expects to see what has changed since. A stale one takes the place of
//! a failure only. Entries and bytes are bounded; what was asked for since the last look is spared
//! once when room is needed.
//!
//! Does not know what a query looks like: keys are bytes. Time is an argument.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::reply::{self, Life, Reply};

/// TTL of a stale answer: short, so that whoever keeps it asks again soon.
const STALE_TTL: u32 = 5;

/// What a key and its places in two maps cost beside its bytes, about.
const OVERHEAD: usize = 160;

/// What is kept, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl Default for Config {
    fn default() -> Self {
        Self {
            max_entries: 1024,
            max_bytes: 512 * 1024,
            max_ttl: Duration::ZERO,
            max_negative_ttl: Duration::ZERO,
            max_stale: Duration::from_secs(300),
        }
    }
}

#[derive(Debug)]
pub(super) struct Cache {
    config: Config,
    entries: HashMap<Arc<[u8]>, Entry>,
    /// Keys, oldest first.
    order: BTreeMap<u64, Arc<[u8]>>,
    bytes: usize,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    reply: Reply,
    stored: Instant,
    fresh_until: Instant,
    stale_until: Instant,
    place: u64,
    was_used: bool,
    weight: usize,
}

/// What is there for a key.
#[derive(Debug)]
pub(super) enum Found {
    Fresh(Reply),
    /// For when nobody answers.
    Stale(Reply),
    Nothing,
}

impl Cache {
    pub(super) fn new(config: Config) -> Self {
        Self {
            config,
            entries: HashMap::new(),
            order: BTreeMap::new(),
            bytes: 0,
            next: 0,
        }
    }

    pub(super) fn get(&mut self, key: &[u8], now: Instant) -> Found {
        let Some(entry) = self.entries.get_mut(key) else {
            return Found::Nothing;
        };
        if now < entry.fresh_until {
            entry.was_used = true;
            let age = now.duration_since(entry.stored).as_secs();
            let age = u32::try_from(age).unwrap_or(u32::MAX);
            return Found::Fresh(entry.reply.with_ttls(|ttl| ttl.saturating_sub(age)));
        }
        if now < entry.stale_until {
            entry.was_used = true;
            return Found::Stale(entry.reply.with_ttls(|ttl| ttl.min(STALE_TTL)));
        }
        self.remove(key);
        Found::Nothing
    }

    /// Keeps a reply that may be kept. What is known now replaces what was, also where it is not
    /// kept itself; a server's failure replaces nothing.
    pub(super) fn put(&mut self, key: Vec<u8>, reply: &Reply, now: Instant) {
        if [reply::NOERROR, reply::NXDOMAIN].contains(&reply.rcode()) {
            self.remove(&key);
        }
        let Some(life) = reply.life() else {
            return;
        };
        let (fresh, whole) = self.lifetimes(life);
        let weight = OVERHEAD + key.len() + reply.weight();
        // One reply shall not empty the cache.
        if whole.is_zero() || weight > self.config.max_bytes / 8 || self.config.max_entries == 0 {
            return;
        }
        self.make_room(weight);
        let key = Arc::from(key);
        let place = self.take_place(&key);
        self.bytes += weight;
        let entry = Entry {
            reply: reply.clone(),
            stored: now,
            fresh_until: now + fresh,
            stale_until: now + whole,
            place,
            was_used: false,
            weight,
        };
        self.entries.insert(key, entry);
    }

    /// How many entries there are, and what they take.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        (self.entries.len(), self.bytes)
    }

    /// How long a reply is fresh, and how long it is of any use. A name that did not exist is not
    /// said to be missing when nobody knows.
    fn lifetimes(&self, life: Life) -> (Duration, Duration) {
        let ttl = Duration::from_secs(life.seconds.into());
        if life.is_negative {
            let fresh = ttl.min(self.config.max_negative_ttl);
            return (fresh, fresh);
        }
        let fresh = ttl.min(self.config.max_ttl);
        let stale = self.config.max_stale;
        let whole = if stale.is_zero() { fresh } else { ttl + stale };
        (fresh, whole)
    }

    fn make_room(&mut self, weight: usize) {
        while self.entries.len() >= self.config.max_entries
            || self.bytes + weight > self.config.max_bytes
        {
            let Some((_, key)) = self.order.pop_first() else {
                return;
            };
            match self.entries.get_mut(&key) {
                Some(entry) if entry.was_used => {
                    entry.was_used = false;
                    entry.place = self.next;
                    self.take_place(&key);
                }
                _ => self.remove(&key),
            }
        }
    }

    fn take_place(&mut self, key: &Arc<[u8]>) -> u64 {
        let place = self.next;
        self.next += 1;
        self.order.insert(place, key.clone());
        place
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.place);
            self.bytes -= entry.weight;
        }
    }
}
