//! Tests that clients receive the answers of servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::UdpSocket;

use super::*;
use upstream::unused_address;

#[tokio::test(start_paused = true)]
async fn a_reply_has_the_clients_id_and_question() {
    let upstream = Upstream::answering(|_| Answer::address(7)).await;
    let bench = Bench::new(&[upstream.address]);
    let asked = query(0x1234, "WwW.Example.Com");
    let answer = bench.ask(&asked).await.expect("an answer");
    assert_eq!(answer, Answer::address(7).to(&asked));
    let sent = &upstream.seen()[0];
    assert_eq!(sent[2..11], asked[2..11]);
    assert_eq!(sent[12..asked.len()], asked[12..]);
    assert_eq!(bench.count("istio_agent_dns_upstream_requests_total"), 1);
}

#[tokio::test(start_paused = true)]
async fn fewer_than_1_query_in_1000_fails_with_5_percent_loss() {
    for seed in 0..5 {
        let mut random = fastrand::Rng::with_seed(seed);
        let lossy = move |query: &[u8]| {
            let is_lost = random.u8(0..20) == 0 || random.u8(0..20) == 0;
            let answer = || Answer::address(1).to(query);
            (!is_lost).then(answer).into_iter().collect()
        };
        let upstream = Upstream::new(lossy, |_| Vec::new()).await;
        let bench = Bench::new(&[upstream.address]);
        let mut answered = 0;
        for number in 0..2000 {
            let asked = query(number, &format!("n{number}.test"));
            answered += u32::from(bench.ask(&asked).await.is_some());
        }
        assert!(answered > 1998, "{answered} of 2000 with seed {seed}");
        assert!(bench.count("istio_agent_dns_upstream_retries_total") > 150);
    }
}

#[tokio::test(start_paused = true)]
async fn answers_of_any_size_arrive_whole() {
    for (size, transport) in [
        (600, Transport::Udp),
        (4000, Transport::Udp),
        (60_000, Transport::Udp),
        (600, Transport::Tcp),
        (60_000, Transport::Tcp),
        (65_535, Transport::Tcp),
    ] {
        let upstream = Upstream::answering(move |query| Answer::of_size(size, query)).await;
        let bench = Bench::new(&[upstream.address]);
        let asked = query_with_opt(9, "large.test", 65_000, &[]);
        let answer = bench.ask_over(&asked, transport).await.expect("an answer");
        assert_eq!(answer.len(), size);
        assert_eq!(answer, Answer::of_size(size, &asked).to(&asked));
    }
}

#[tokio::test(start_paused = true)]
async fn a_udp_reply_above_the_advertised_size_arrives_whole() {
    let big = |query: &[u8]| vec![Answer::of_size(60_000, query).to(query)];
    let upstream = Upstream::new(big, |_| Vec::new()).await;
    let bench = Bench::new(&[upstream.address]);
    let asked = query(1, "large.test");
    let answer = bench.ask(&asked).await.expect("an answer");
    assert_eq!(answer, Answer::of_size(60_000, &asked).to(&asked));
}

#[tokio::test(start_paused = true)]
async fn a_truncated_reply_is_passed_on_with_what_it_has() {
    let cut = Answer { is_cut: true, ..Answer::address(1) };
    let expected = cut.clone();
    let upstream = Upstream::new(move |query| vec![cut.to(query)], |_| Vec::new()).await;
    let bench = Bench::new(&[upstream.address]);
    let asked = query(1, "large.test");
    let (answer, taken) = bench.timed(&asked).await;
    assert_eq!(answer.expect("an answer"), expected.to(&asked));
    assert!(taken < Duration::from_millis(100), "{taken:?}");
    assert_eq!(upstream.seen().len(), 1);
}

/// The EDNS options with the cookie of a client, and with the cookies of a client and a server.
const COOKIES: [&[u8]; 2] = [
    &[0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8],
    &[0, 10, 0, 16, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9, 9],
];

#[tokio::test(start_paused = true)]
async fn options_pass_in_neither_direction_and_are_not_cached() {
    let with_cookie = |query: &[u8]| {
        let mut reply = Answer::address(1).to(query);
        reply.truncate(reply.len() - 11);
        messages::push_opt(&mut reply, 1232, COOKIES[1]);
        reply
    };
    for max_ttl in [Duration::ZERO, Duration::from_secs(10)] {
        let over_udp = move |query: &[u8]| vec![with_cookie(query)];
        let over_tcp = move |query: &[u8]| upstream::frame(&with_cookie(query));
        let upstream = Upstream::new(over_udp, over_tcp).await;
        let bench = Bench::with(&[upstream.address], |config| {
            config.cache = cache::Config { max_ttl, ..STALE_CACHE };
        });
        let asked = query_with_opt(1, "a.test", 4096, COOKIES[0]);
        for transport in [Transport::Udp, Transport::Tcp] {
            let answer = bench.ask_over(&asked, transport).await;
            let plain = query_with_opt(1, "a.test", 4096, &[]);
            assert_eq!(answer.expect("an answer"), Answer::address(1).to(&plain));
            for sent in upstream.seen() {
                assert_eq!(sent[2..], plain[2..]);
            }
        }
        let expected = if max_ttl.is_zero() { 2 } else { 1 };
        assert_eq!(upstream.seen().len(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_know_edns_is_asked_again_without_it() {
    for rcode in [1, 4] {
        let old = move |query: &[u8]| {
            let mut reply = match messages::advertised(query) {
                Some(_) => Answer::rcode(rcode).to(query),
                None => Answer::address(1).to(query),
            };
            if messages::advertised(query).is_some() {
                reply.truncate(reply.len() - 11);
                reply[11] = 0;
            }
            vec![reply]
        };
        let upstream = Upstream::new(old, |_| Vec::new()).await;
        let bench = Bench::new(&[upstream.address]);
        let asked = query_with_opt(1, "a.test", 4096, &[]);
        let answer = bench.ask(&asked).await.expect("an answer");
        assert_eq!(answer, Answer::address(1).to(&asked));
        assert_eq!(upstream.seen().len(), 2);
        // A server whose error has an OPT record supports EDNS, so that it is not asked again.
        let upstream = Upstream::answering(move |_| Answer::rcode(rcode)).await;
        let bench = Bench::new(&[upstream.address]);
        let answer = bench.ask(&asked).await.expect("an answer");
        assert_eq!(answer, Answer::rcode(rcode).to(&asked));
        assert_eq!(upstream.seen().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_of_one_server_is_returned_only_without_other_answers() {
    for rcode in [2, 4, 5] {
        let bad = Upstream::answering(move |_| Answer::rcode(rcode)).await;
        let good = Upstream::answering(|_| Answer::address(1)).await;
        for parallel in [false, true] {
            let bench = Bench::with(&[bad.address, good.address], |c| c.parallel = parallel);
            for id in 0..8 {
                let answer = bench.ask(&query(id, "a.test")).await.expect("an answer");
                assert_eq!(answer[3] & 15, 0, "after {rcode}");
            }
        }
        let bench = Bench::new(&[bad.address]);
        let (answer, taken) = bench.timed(&query(1, "a.test")).await;
        assert_eq!(answer.expect("an answer")[3] & 15, rcode);
        assert!(taken < Duration::from_millis(100), "{taken:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_server_delays_few_queries() {
    let dead = Upstream::silent().await;
    let good = Upstream::answering(|_| Answer::address(1)).await;
    let bench = Bench::new(&[dead.address, good.address]);
    let mut late = 0;
    for id in 0..200 {
        let (answer, taken) = bench.timed(&query(id, &format!("n{id}.test"))).await;
        assert!(answer.is_some());
        assert!(taken < Duration::from_millis(500), "{taken:?}");
        late += u32::from(taken > Duration::from_millis(200));
    }
    assert!(late < 10, "{late} of 200 waited");
}

#[tokio::test(start_paused = true)]
async fn all_servers_are_asked_at_once_where_that_is_configured() {
    let dead = Upstream::silent().await;
    let good = Upstream::answering(|_| Answer::address(1)).await;
    for id in 0..8 {
        let bench = Bench::with(&[dead.address, good.address], |c| c.parallel = true);
        let (answer, taken) = bench.timed(&query(id, "a.test")).await;
        assert!(answer.is_some());
        assert!(taken < Duration::from_millis(100), "{taken:?}");
    }
    assert_eq!(dead.seen().len(), 8);
}

#[tokio::test(start_paused = true)]
async fn a_server_with_a_closed_port_delays_no_query() {
    let good = Upstream::answering(|_| Answer::address(1)).await;
    let bench = Bench::new(&[unused_address().await, good.address]);
    for id in 0..20 {
        let (answer, taken) = bench.timed(&query(id, "a.test")).await;
        assert!(answer.is_some());
        assert!(taken < Duration::from_millis(100), "{taken:?}");
    }
    let bench = Bench::new(&[unused_address().await]);
    let (answer, taken) = bench.timed(&query(1, "a.test")).await;
    assert!(answer.is_none());
    assert!(taken < Duration::from_millis(100), "{taken:?}");
    assert_eq!(bench.count("istio_agent_dns_upstream_failures_total"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_server_can_still_answer_the_first_try() {
    let slow = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
    let bench = Bench::new(&[slow.local_addr().expect("an address")]);
    let serving = async {
        let mut buffer = [0; 512];
        let (length, from) = slow.recv_from(&mut buffer).await.expect("a query");
        tokio::time::sleep(Duration::from_secs(4)).await;
        let reply = Answer::address(1).to(&buffer[..length]);
        slow.send_to(&reply, from).await.expect("it is sent");
    };
    let asked = query(1, "a.test");
    let (answer, ()) = tokio::join!(bench.ask(&asked), serving);
    assert_eq!(answer.expect("an answer"), Answer::address(1).to(&asked));
}

#[tokio::test(start_paused = true)]
async fn the_same_question_is_asked_once_for_all_clients() {
    let upstream = Upstream::answering(|_| Answer::address(1)).await;
    let bench = Bench::new(&[upstream.address]);
    let (one, two) = (query(1, "a.test"), query(2, "A.TEST"));
    let other = query(3, "b.test");
    let (first, second, third) = tokio::join!(bench.ask(&one), bench.ask(&two), bench.ask(&other));
    assert_eq!(first.expect("an answer"), Answer::address(1).to(&one));
    assert_eq!(second.expect("an answer"), Answer::address(1).to(&two));
    assert_eq!(third.expect("an answer"), Answer::address(1).to(&other));
    assert_eq!(upstream.seen().len(), 2);
    assert_eq!(bench.count("istio_agent_dns_upstream_requests_total"), 2);
    bench.ask(&one).await.expect("an answer");
    assert_eq!(upstream.seen().len(), 3, "nothing is kept");
}

#[tokio::test(start_paused = true)]
async fn a_waiting_client_is_answered_after_the_first_client_goes_away() {
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    let second_only = move |query: &[u8]| {
        let answer = || Answer::address(1).to(query);
        let is_second = counted.fetch_add(1, Ordering::Relaxed) > 0;
        is_second.then(answer).into_iter().collect()
    };
    let upstream = Upstream::new(second_only, |_| Vec::new()).await;
    let bench = Bench::new(&[upstream.address]);
    let asked = query(1, "a.test");
    let leaving = tokio::time::timeout(Duration::from_millis(100), bench.ask(&asked));
    let (left, answer) = tokio::join!(leaving, bench.ask(&asked));
    assert!(left.is_err());
    assert!(answer.is_some());
}

#[tokio::test(start_paused = true)]
async fn fresh_answers_are_given_again_only_where_that_is_configured() {
    for (max_ttl, expected) in [(Duration::ZERO, 2), (Duration::from_secs(10), 1)] {
        let upstream = Upstream::answering(|_| Answer::address(1)).await;
        let bench = Bench::with(&[upstream.address], |config| {
            config.cache = cache::Config { max_ttl, ..STALE_CACHE };
        });
        for id in [1, 2] {
            let asked = query(id, "a.test");
            let answer = bench.ask(&asked).await.expect("an answer");
            assert_eq!(answer, Answer::address(1).to(&asked));
        }
        assert_eq!(upstream.seen().len(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stale_answer_replaces_a_failure_and_nothing_else() {
    let state = Arc::new(AtomicU8::new(0));
    let now = state.clone();
    let upstream = move |query: &[u8]| match now.load(Ordering::Relaxed) {
        0 => vec![Answer::address(1).to(query)],
        1 => Vec::new(),
        rcode => vec![Answer::rcode(rcode).to(query)],
    };
    let upstream = Upstream::new(upstream, |_| Vec::new()).await;
    let bench = Bench::with(&[upstream.address], |config| {
        config.cache = STALE_CACHE;
    });
    let asked = query(1, "a.test");
    bench.ask(&asked).await.expect("an answer");
    state.store(1, Ordering::Relaxed);
    let (answer, taken) = bench.timed(&asked).await;
    // The offset of the TTL in the first record, which follows the question.
    let ttl = 12 + asked.len() - 12 + 6;
    assert_eq!(answer.expect("an old answer")[ttl..ttl + 4], [0, 0, 0, 5]);
    assert!(taken < TIMEOUT, "before the client gives up: {taken:?}");
    assert_eq!(bench.count("istio_agent_dns_cache_total{result=\"stale\"}"), 1);
    for (count, failure) in [(2, 2), (3, 4), (4, 5)] {
        state.store(failure, Ordering::Relaxed);
        let answer = bench.ask(&asked).await.expect("an old answer");
        assert_eq!(answer[ttl..ttl + 4], [0, 0, 0, 5], "{failure}");
        let stale = bench.count("istio_agent_dns_cache_total{result=\"stale\"}");
        assert_eq!(stale, count, "{failure}");
    }
    state.store(3, Ordering::Relaxed);
    assert_eq!(bench.ask(&asked).await.expect("an answer")[3] & 15, 3);
    state.store(1, Ordering::Relaxed);
    assert!(bench.ask(&asked).await.is_none(), "the name is known to be gone");
}
