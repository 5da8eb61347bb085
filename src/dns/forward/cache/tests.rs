//! Tests the lifetimes, the replacement and the limits of stored replies.

use super::super::message::Query;
use super::super::tests::{Answer, STALE_CACHE, query};
use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn reply(answer: &Answer) -> Reply {
    let asked = query(1, "a.test");
    let parsed = Query::parse(asked.clone().into()).expect("a query");
    Reply::read(&answer.to(&asked), 1, &parsed).expect("a reply")
}

fn caching(max_ttl: u64, max_negative_ttl: u64, max_stale: u64) -> Cache {
    Cache::new(Config {
        max_ttl: SECOND * u32::try_from(max_ttl).expect("fits"),
        max_negative_ttl: Duration::from_secs(max_negative_ttl),
        max_stale: Duration::from_secs(max_stale),
        ..STALE_CACHE
    })
}

/// Looks up the key after some seconds. Returns the kind of the result, and the TTL of the first record.
fn found(cache: &mut Cache, stored: Instant, after: u64) -> (&'static str, u32) {
    let ttl = |reply: &Reply| {
        // The TTL follows the header, the question, and the name, type and class of the record.
        let at = 12 + "a.test".len() + 2 + 4 + 6;
        wire::u32_at(&reply.bytes, at).expect("a TTL")
    };
    match cache.get(b"key", stored + Duration::from_secs(after)) {
        Lookup::Fresh(reply) => ("fresh", ttl(&reply)),
        Lookup::Stale(reply) => ("stale", ttl(&reply)),
        Lookup::Miss => ("nothing", 0),
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_without_time_or_room_keeps_nothing() {
    assert!(STALE_CACHE.is_enabled());
    for off in [
        Config { max_stale: Duration::ZERO, ..STALE_CACHE },
        Config { max_entries: 0, ..STALE_CACHE },
        Config { max_bytes: 0, ..STALE_CACHE },
    ] {
        assert!(!off.is_enabled(), "{off:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_fresh_for_its_ttl_then_stale_then_gone() {
    let address = Answer::address(1); // Its TTL is 30.
    let no_ttl = Answer { addresses: vec![(0, [10, 0, 0, 1].into())], ..Answer::default() };
    let missing = Answer::nxdomain(20, 10);
    let endless = Answer { addresses: vec![(u32::MAX, [10, 0, 0, 1].into())], ..Answer::default() };
    let cases = [
        // The answer; the limits of TTL, negative TTL and staleness; the age in seconds; the result of the lookup.
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
async fn a_new_answer_replaces_the_cached_one_and_a_failure_does_not() {
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
async fn entries_and_bytes_are_bounded() {
    for (max_entries, max_bytes) in [(10, usize::MAX / 2), (1000, 8 * 1024)] {
        let mut cache =
            Cache::new(Config { max_entries, max_bytes, max_ttl: SECOND * 60, ..STALE_CACHE });
        let now = Instant::now();
        let reply = reply(&Answer::address(1));
        for number in 0..1000u32 {
            cache.put(number.to_be_bytes().to_vec(), &reply, now);
            let (entries, bytes) = cache.size();
            assert!(entries > 0 && entries <= max_entries && bytes <= max_bytes);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_large_answer_does_not_empty_the_cache() {
    let mut cache = caching(60, 60, 60);
    cache.config.max_bytes = 8 * 1024;
    let now = Instant::now();
    let large = Answer { padding: 2000, ..Answer::address(1) };
    cache.put(b"key".to_vec(), &reply(&large), now);
    assert_eq!(cache.size(), (0, 0));
}
