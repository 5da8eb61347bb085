//! Replies kept for a while: for as long as they are fresh, and longer for when no server answers.
//!
//! Both only as far as the configuration allows, which by default it does not: see [`super`]. A stale
//! reply takes the place of a failure only. Entries and bytes are bounded; a reply that was asked for
//! since the last time room was made is spared once. Keys are bytes, and time is an argument.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::reply::Reply;
use crate::dns::wire::{self, ANY, FLAGS, NOERROR, NXDOMAIN, OPT, Record, SOA, Section, TC, TSIG};

/// TTL of a stale answer: short, so that clients that keep it ask again soon.
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
    /// For when no server answers.
    Stale(Reply),
    Nothing,
}

/// How long a reply may be kept, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lifetime {
    seconds: u32,
    is_negative: bool,
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
            return Found::Fresh(with_ttls(&entry.reply, |ttl| ttl.saturating_sub(age)));
        }
        if now < entry.stale_until {
            entry.was_used = true;
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
        let Some(lifetime) = lifetime(reply) else {
            return;
        };
        let (fresh, whole) = self.times(lifetime);
        let weight = OVERHEAD + key.len() + reply.bytes().len() + size_of::<Reply>();
        // One reply shall not empty the cache.
        if whole.is_zero() || weight > self.config.max_bytes / 8 {
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

    /// How long a reply is fresh, and how long it is of any use. That a name does not exist is not
    /// said once it is stale.
    fn times(&self, lifetime: Lifetime) -> (Duration, Duration) {
        let ttl = Duration::from_secs(lifetime.seconds.into());
        if lifetime.is_negative {
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

/// The reply with other TTLs.
fn with_ttls(reply: &Reply, change: impl Fn(u32) -> u32) -> Reply {
    let mut bytes = reply.bytes().to_vec();
    let end = wire::question_end(&bytes);
    let records = end.and_then(|end| wire::records(&bytes, end));
    let records = records.unwrap_or_default().into_iter();
    for record in records.filter(|record| ![OPT, TSIG].contains(&record.kind)) {
        let ttl = ttl(&bytes, &record).unwrap_or(0);
        wire::put(&mut bytes, record.ttl_at(), &change(ttl).to_be_bytes());
    }
    Reply::from_bytes(bytes)
}

/// How long a reply may be kept; `None` if it must not be. Source: RFC 2308, sections 2, 4 and 5.
fn lifetime(reply: &Reply) -> Option<Lifetime> {
    let bytes = reply.bytes();
    let end = wire::question_end(bytes)?;
    let records = wire::records(bytes, end)?;
    if bytes[FLAGS] & TC != 0 || reply.has_extended_rcode() {
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
        let minimum = wire::u32_at(bytes, soa.end.checked_sub(4)?).map(sane)?;
        ttl(bytes, soa)?
            .min(minimum)
            .min(of_answers.unwrap_or(u32::MAX))
    } else {
        of_answers?
    };
    (seconds > 0).then_some(Lifetime {
        seconds,
        is_negative,
    })
}

fn ttl(message: &[u8], record: &Record) -> Option<u32> {
    wire::u32_at(message, record.ttl_at()).map(sane)
}

/// A TTL with the highest bit set is none. Source: RFC 2181, section 8.
fn sane(ttl: u32) -> u32 {
    if ttl > i32::MAX.unsigned_abs() {
        0
    } else {
        ttl
    }
}

#[cfg(test)]
mod tests {
    use super::super::query::Query;
    use super::super::reply::Received;
    use super::super::tests::{Answer, KEEPING, query};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn reply(answer: &Answer) -> Reply {
        let asked = query(1, "a.test");
        let parsed = Query::parse(asked.clone().into()).expect("a query");
        match Received::read(&answer.to(&asked), 1, &parsed) {
            Received::Reply(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    fn caching(max_ttl: u64, max_negative_ttl: u64, max_stale: u64) -> Cache {
        Cache::new(Config {
            max_ttl: SECOND * u32::try_from(max_ttl).expect("fits"),
            max_negative_ttl: Duration::from_secs(max_negative_ttl),
            max_stale: Duration::from_secs(max_stale),
            ..KEEPING
        })
    }

    /// What is found after some seconds, with the TTL of the first record.
    fn found(cache: &mut Cache, stored: Instant, after: u64) -> (&'static str, u32) {
        let ttl = |reply: &Reply| {
            let at = 12 + "a.test".len() + 2 + 4 + 6;
            wire::u32_at(reply.bytes(), at).expect("a TTL")
        };
        match cache.get(b"key", stored + Duration::from_secs(after)) {
            Found::Fresh(reply) => ("fresh", ttl(&reply)),
            Found::Stale(reply) => ("stale", ttl(&reply)),
            Found::Nothing => ("nothing", 0),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cache_without_time_or_room_keeps_nothing() {
        assert!(KEEPING.keeps());
        for off in [
            Config {
                max_stale: Duration::ZERO,
                ..KEEPING
            },
            Config {
                max_entries: 0,
                ..KEEPING
            },
            Config {
                max_bytes: 0,
                ..KEEPING
            },
        ] {
            assert!(!off.keeps(), "{off:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_fresh_for_its_ttl_then_stale_then_gone() {
        let address = Answer::address(1); // Its TTL is 30.
        let no_ttl = Answer {
            addresses: vec![(0, [10, 0, 0, 1].into())],
            ..Answer::default()
        };
        let missing = Answer::missing(20, 10);
        let endless = Answer {
            addresses: vec![(u32::MAX, [10, 0, 0, 1].into())],
            ..Answer::default()
        };
        let cases = [
            // Answer; longest TTLs and staleness; seconds; what is found.
            (&address, (60, 60, 60), 0, ("fresh", 30)),
            (&address, (60, 60, 60), 29, ("fresh", 1)),
            (&address, (60, 60, 60), 30, ("stale", 5)),
            (&address, (60, 60, 60), 89, ("stale", 5)),
            (&address, (60, 60, 60), 90, ("nothing", 0)),
            (&address, (10, 60, 60), 9, ("fresh", 21)),
            (&address, (10, 60, 60), 10, ("stale", 5)),
            (&address, (0, 0, 60), 0, ("stale", 5)),
            (&address, (10, 0, 0), 10, ("nothing", 0)),
            (&address, (0, 0, 0), 0, ("nothing", 0)),
            (&no_ttl, (60, 60, 60), 0, ("nothing", 0)),
            (&endless, (60, 60, 60), 0, ("nothing", 0)),
            (&missing, (60, 60, 60), 9, ("fresh", 11)),
            (&missing, (60, 60, 60), 10, ("nothing", 0)),
            (&missing, (60, 0, 60), 0, ("nothing", 0)),
            (&Answer::rcode(3), (60, 60, 60), 0, ("nothing", 0)),
            (&Answer::rcode(2), (60, 60, 60), 0, ("nothing", 0)),
            (&Answer::default(), (60, 60, 60), 0, ("nothing", 0)),
        ];
        for (answer, (ttl, negative, stale), after, expected) in cases {
            let mut cache = caching(ttl, negative, stale);
            let now = Instant::now();
            cache.put(b"key".to_vec(), &reply(answer), now);
            let case = format!("{answer:?}, at most {ttl} {negative} {stale}, after {after}");
            assert_eq!(found(&mut cache, now, after), expected, "{case}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_known_now_replaces_what_was_and_a_failure_replaces_nothing() {
        let cases = [
            (Answer::rcode(2), "fresh"),
            (Answer::rcode(5), "fresh"),
            (Answer::rcode(3), "nothing"),
            (Answer::default(), "nothing"),
            (Answer::address(2), "fresh"),
        ];
        for (answer, expected) in cases {
            let mut cache = caching(60, 0, 60);
            let now = Instant::now();
            cache.put(b"key".to_vec(), &reply(&Answer::address(1)), now);
            cache.put(b"key".to_vec(), &reply(&answer), now);
            assert_eq!(found(&mut cache, now, 0).0, expected, "{answer:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn entries_and_bytes_are_bounded_and_what_is_asked_for_stays() {
        for (max_entries, max_bytes) in [(10, usize::MAX / 2), (1000, 8 * 1024)] {
            let mut cache = Cache::new(Config {
                max_entries,
                max_bytes,
                max_ttl: SECOND * 60,
                ..KEEPING
            });
            let now = Instant::now();
            let reply = reply(&Answer::address(1));
            cache.put(b"key".to_vec(), &reply, now);
            for number in 0..1000u32 {
                assert_eq!(found(&mut cache, now, 0).0, "fresh", "after {number}");
                cache.put(number.to_be_bytes().to_vec(), &reply, now);
                let (entries, bytes) = cache.size();
                assert!(entries <= max_entries && bytes <= max_bytes);
                assert_eq!(cache.order.len(), entries);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_large_answer_does_not_empty_the_cache() {
        let mut cache = caching(60, 60, 60);
        cache.config.max_bytes = 8 * 1024;
        let now = Instant::now();
        let large = Answer {
            padding: 2000,
            ..Answer::address(1)
        };
        cache.put(b"key".to_vec(), &reply(&large), now);
        assert_eq!(cache.size(), (0, 0));
    }
}
