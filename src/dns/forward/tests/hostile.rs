//! Tests that hostile servers and invalid files do no harm.

use std::time::Duration;

use proptest::prelude::*;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, UdpSocket};

use super::super::message::{Query, Reply};
use super::upstream::frame;
use super::*;
use crate::problem::Code;

/// A change that makes a valid reply invalid.
type Alter = fn(Vec<u8>) -> Vec<u8>;

const FORGED_REPLIES: &[(&str, Alter)] = &[
    ("id", |mut reply| {
        reply[0] ^= 1;
        reply
    }),
    ("name", |mut reply| {
        reply[13] ^= 1;
        reply
    }),
    ("type", |mut reply| {
        let end = messages::question(&reply).len() + 12;
        reply[end - 3] = 28;
        reply
    }),
    ("no question", |reply| {
        let mut bare = reply[..12].to_vec();
        bare[5] = 0;
        bare
    }),
    ("query", |mut reply| {
        reply[2] &= 0x7f;
        reply
    }),
    ("opcode", |mut reply| {
        reply[2] |= 0x20;
        reply
    }),
    ("short", |reply| reply[..11].to_vec()),
    ("empty", |_| Vec::new()),
];

#[tokio::test(start_paused = true)]
async fn replies_that_do_not_match_the_query_are_ignored() {
    for (what, alter) in FORGED_REPLIES {
        let spoofed = |query: &[u8]| {
            let forged = alter(Answer::address(66).to(query));
            vec![forged.clone(), forged, Answer::address(1).to(query)]
        };
        let upstream = Upstream::new(spoofed, |_| Vec::new()).await;
        let bench = Bench::new(&[upstream.address]);
        let asked = query(1, "a.test");
        let answer = bench.ask(&asked).await.expect("an answer");
        assert_eq!(answer, Answer::address(1).to(&asked), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn forged_replies_never_reach_the_client() {
    for (what, alter) in FORGED_REPLIES {
        let spoofed = |query: &[u8]| vec![alter(Answer::address(66).to(query))];
        let over_tcp = |query: &[u8]| frame(&alter(Answer::address(66).to(query)));
        let upstream = Upstream::new(spoofed, over_tcp).await;
        let bench = Bench::new(&[upstream.address]);
        for transport in [Transport::Udp, Transport::Tcp] {
            let answer = bench.ask_over(&query(1, "a.test"), transport).await;
            assert!(answer.is_none(), "{what} over {transport:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn replies_from_another_source_address_are_ignored() {
    let upstream = Upstream::silent().await;
    let other = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
    let bench = Bench::new(&[upstream.address]);
    let mut forged_to = 0;
    let flooding = async {
        loop {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let Some(sent) = upstream.seen().pop() else {
                continue;
            };
            // The kernel may have chosen any of thousands of ports, so the ports in use are read from its table.
            for port in ports_towards(upstream.address.port()) {
                let forged = Answer::address(66).to(&sent);
                forged_to += 1;
                // The socket may have been closed since the table was read.
                let _ = other.send_to(&forged, ("127.0.0.1", port)).await;
            }
        }
    };
    let asked = query(1, "a.test");
    tokio::select! {
        answer = bench.ask(&asked) => assert!(answer.is_none()),
        () = flooding => {}
    }
    assert!(forged_to > 0);
}

/// Returns the local ports of the UDP sockets that are connected to `port`.
fn ports_towards(port: u16) -> Vec<u16> {
    let table = std::fs::read_to_string("/proc/net/udp").unwrap_or_default();
    let parse = |address: &str| u16::from_str_radix(address.split_once(':')?.1, 16).ok();
    let local = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (local, remote) = (words.next()?, words.next()?);
        parse(local).filter(|_| parse(remote) == Some(port))
    };
    table.lines().skip(1).filter_map(local).collect()
}

#[tokio::test(start_paused = true)]
async fn ids_differ_from_try_to_try() {
    let upstream = Upstream::silent().await;
    let bench = Bench::new(&[upstream.address]);
    for number in 0..16 {
        bench.ask(&query(7, &format!("n{number}.test"))).await;
    }
    let mut ids: Vec<_> = upstream.seen().iter().map(|q| [q[0], q[1]]).collect();
    // A query to one server is sent five times. Random ids are rarely equal.
    assert_eq!(ids.len(), 16 * 5);
    ids.sort();
    ids.dedup();
    assert!(ids.len() > 72, "{} of 80", ids.len());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_never_answers_takes_the_timeout_and_no_more() {
    let upstream = Upstream::silent().await;
    for transport in [Transport::Udp, Transport::Tcp] {
        for timeout in [Duration::from_millis(100), TIMEOUT] {
            let bench = Bench::with(&[upstream.address], |c| c.timeout = timeout);
            let started = Instant::now();
            let answer = bench.ask_over(&query(1, "a.test"), transport).await;
            assert!(answer.is_none());
            let taken = started.elapsed();
            assert!(taken >= timeout && taken < timeout * 2, "{taken:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn replies_over_tcp_that_lie_about_their_length_are_no_answer() {
    let whole = |query: &[u8]| Answer::of_size(60_000, query).to(query);
    let lies: [(&str, Alter); 4] = [
        ("none", |_| Vec::new()),
        ("promises more", |reply| [&[0xff, 0xff], reply.as_slice()].concat()),
        ("promises less", |reply| [&[0, 20], reply.as_slice()].concat()),
        ("too much", |_| vec![0xff; 100 * 1024]),
    ];
    for (what, lie) in lies {
        let upstream = Upstream::new(|_| Vec::new(), move |q| lie(whole(q))).await;
        let bench = Bench::new(&[upstream.address]);
        let asked = query(1, "a.test");
        let started = Instant::now();
        let answer = bench.ask_over(&asked, Transport::Tcp).await;
        assert!(answer.is_none(), "{what}");
        assert!(started.elapsed() <= TIMEOUT * 2, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_trickling_tcp_reply_takes_no_more_than_the_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
    let bench = Bench::new(&[listener.local_addr().expect("an address")]);
    let trickling = async {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        // Ends when the forwarder closes the connection.
        while stream.write_all(&[1]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    let asked = query(1, "a.test");
    let started = Instant::now();
    let (answer, ()) = tokio::join!(bench.ask_over(&asked, Transport::Tcp), trickling);
    assert!(answer.is_none());
    assert!(started.elapsed() < TIMEOUT + Duration::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn bytes_after_a_complete_reply_over_tcp_are_ignored() {
    let flooding = |query: &[u8]| {
        let mut bytes = frame(&Answer::address(1).to(query));
        bytes.extend(vec![0xff; 100 * 1024]);
        bytes
    };
    let upstream = Upstream::new(|_| Vec::new(), flooding).await;
    let bench = Bench::new(&[upstream.address]);
    let asked = query(1, "a.test");
    let answer = bench.ask_over(&asked, Transport::Tcp).await;
    assert_eq!(answer.expect("an answer"), Answer::address(1).to(&asked));
}

#[tokio::test(start_paused = true)]
async fn a_storm_of_missing_names_takes_no_more_memory_than_allowed() {
    let upstream = Upstream::answering(|_| Answer::nxdomain(600, 600)).await;
    for max_negative_ttl in [Duration::ZERO, Duration::from_secs(60)] {
        let bench = Bench::with(&[upstream.address], |config| {
            config.cache = cache::Config { max_bytes: 16 * 1024, max_negative_ttl, ..STALE_CACHE };
        });
        for number in 0..1000 {
            let asked = query(number, &format!("n{number}.test"));
            assert_eq!(bench.ask(&asked).await.expect("an answer")[3] & 15, 3);
        }
        let (entries, bytes) = bench.forwarder.cache_size();
        assert!(bytes <= 16 * 1024, "{bytes}");
        assert_eq!(entries == 0, max_negative_ttl.is_zero());
    }
}

#[tokio::test(start_paused = true)]
async fn queries_above_the_limit_are_refused_and_leave_nothing_behind() {
    let upstream = Upstream::silent().await;
    let bench = Bench::with(&[upstream.address], |c| c.timeout = Duration::from_secs(1));
    let mut asking = tokio::task::JoinSet::new();
    for number in 0..5000u16 {
        let forwarder = bench.forwarder.clone();
        let asked = Bytes::from(query(number, "a.test"));
        asking.spawn(async move { forwarder.forward(asked, Transport::Udp).await });
    }
    while let Some(answer) = asking.join_next().await {
        assert!(answer.expect("no panic").is_none());
    }
    let refused = "istio_agent_dns_forward_refused_total{reason=\"full\"}";
    assert!(bench.count(refused) >= 5000 - 4096);
    assert_eq!(upstream.seen().len(), 5, "all asked the same");
}

#[tokio::test(start_paused = true)]
async fn a_query_that_returns_to_the_agent_ends_the_forwarding_loop() {
    let own_server = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
    let bench = Bench::new(&[own_server.local_addr().expect("an address")]);
    let serving = async {
        let mut turning = tokio::task::JoinSet::new();
        let mut buffer = [0; 512];
        loop {
            tokio::select! {
                Ok((length, from)) = own_server.recv_from(&mut buffer) => {
                    let forwarder = bench.forwarder.clone();
                    let query = Bytes::copy_from_slice(&buffer[..length]);
                    turning.spawn(async move {
                        (forwarder.forward(query.clone(), Transport::Udp).await, query, from)
                    });
                }
                Some(Ok((answer, query, from))) = turning.join_next() => {
                    let failed = || Answer::rcode(2).to(&query).into();
                    let answer = answer.unwrap_or_else(failed);
                    // The sender of the query may have closed its socket.
                    let _ = own_server.send_to(&answer, from).await;
                }
            }
        }
    };
    let mut serving = std::pin::pin!(serving);
    let server = own_server.local_addr().expect("an address");
    tokio::select! {
        never = &mut serving => never,
        answer = bench.forwarder.probe(server, "a.test") => {
            assert_eq!(answer.unwrap_err().code, Code::DnsLoop);
        }
    }
    let asked = query_with_opt(1, "a.test", 4096, &[]);
    let refused = "istio_agent_dns_forward_refused_total{reason=\"circle\"}";
    let before = bench.count(refused);
    tokio::select! {
        never = serving => never,
        (answer, taken) = bench.timed(&asked) => {
            assert_eq!(answer.expect("a failure")[3] & 15, 2);
            assert!(taken < Duration::from_millis(500), "{taken:?}");
        }
    }
    assert_eq!(bench.count(refused) - before, 1);
}

#[tokio::test(start_paused = true)]
async fn without_servers_a_query_fails_at_once() {
    for parallel in [false, true] {
        for text in ["", "nameserver\n", "nameserver example.com\n", "\0\u{fffd}garbage"] {
            let bench = Bench::reading(text, |c| c.parallel = parallel);
            let (answer, taken) = bench.timed(&query(1, "a.test")).await;
            assert!(answer.is_none(), "{text:?}");
            assert!(taken.is_zero(), "{text:?}: {taken:?}");
        }
        let missing = |c: &mut Config| c.resolv_conf = "/nowhere/resolv.conf".into();
        let bench = Bench::reading("", missing);
        assert!(bench.timed(&query(1, "a.test")).await.1.is_zero());
        let directory = |c: &mut Config| c.resolv_conf = "/".into();
        let bench = Bench::reading("", directory);
        assert!(bench.timed(&query(1, "a.test")).await.1.is_zero());
    }
}

#[tokio::test(start_paused = true)]
async fn the_agents_own_addresses_are_not_used_as_servers() {
    let upstream = Upstream::answering(|_| Answer::address(1)).await;
    let own_server = Upstream::answering(|_| Answer::address(66)).await;
    let bench = Bench::with(&[own_server.address, upstream.address], |config| {
        config.listen_addresses = vec![own_server.address];
    });
    for id in 0..8 {
        assert!(bench.ask(&query(id, "a.test")).await.is_some());
    }
    assert!(own_server.seen().is_empty());
    let bench =
        Bench::with(&[own_server.address], |c| c.listen_addresses = vec![own_server.address]);
    assert!(bench.ask(&query(1, "a.test")).await.is_none());
    assert!(own_server.seen().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_changed_resolv_conf_is_used_and_an_invalid_one_ignored() {
    let old = Upstream::answering(|_| Answer::address(1)).await;
    let new = Upstream::answering(|_| Answer::address(2)).await;
    let bench = Bench::new(&[old.address]);
    let asked = query(1, "a.test");
    // The last byte of the address. The record's first twelve bytes and three of the address precede it.
    let last = |answer: Option<Bytes>| answer.expect("an answer")[asked.len() + 15];
    assert_eq!(last(bench.ask(&asked).await), 1);
    for text in ["", "garbage", "nameserver x\n"] {
        bench.rewrite(text);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(last(bench.ask(&asked).await), 1, "{text:?}");
    }
    bench.rewrite(&resolv_conf(&[new.address]));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(last(bench.ask(&asked).await), 2);
    std::fs::remove_file(bench.file.path()).expect("it is removed");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(last(bench.ask(&asked).await), 2);
}

proptest! {
    #[test]
    fn no_message_makes_the_forwarder_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        cut in 0usize..200,
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    ) {
        if let Some(query) = Query::parse(Bytes::copy_from_slice(&bytes)) {
            let _ = (query.key(Transport::Udp), query.cache_key(), query.message(1));
        }
        let asked = query_with_opt(1, "a.example.test", 1232, &[]);
        let parsed = Query::parse(asked.clone().into()).expect("a query");
        let plain = Query::parse(query(1, "a.example.test").into()).expect("a query");
        let mut reply = Answer { soa: Some((1, 1)), ..Answer::address(1) }.to(&asked);
        for (index, value) in flips {
            let at = index.index(reply.len());
            reply[at] = value;
        }
        reply.truncate(cut.max(12));
        reply[..2].copy_from_slice(&[0, 1]);
        let now = Instant::now();
        let mut cache = cache::Cache::new(STALE_CACHE);
        for query in [&parsed, &plain] {
            if let Some(reply) = Reply::read(&reply, 1, query) {
                let _ = (query.restore(&reply), cache.put(b"key".to_vec(), &reply, now));
                let _ = cache.get(b"key", now);
            }
        }
    }
}
