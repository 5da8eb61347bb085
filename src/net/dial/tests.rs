use tokio::net::TcpListener;
use tokio::time::timeout;

use super::*;

fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|text| text.parse().expect("an address")).collect()
}

/// Returns the addresses in the order in which they are tried.
fn order(dialer: &Dialer, texts: &[&str]) -> Vec<SocketAddr> {
    dialer.candidates(addresses(texts)).left.into_iter().rev().collect()
}

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

/// Returns an address that refuses connections, because its listener is dropped.
async fn refusing() -> SocketAddr {
    listener().await.1
}

/// Returns the address of a listener whose queue is full, so that connections are neither accepted nor refused,
/// and the sockets that keep the queue full.
fn unresponsive() -> (Vec<rustix::fd::OwnedFd>, SocketAddr) {
    use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
    let socket = |flags| net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
    let full = socket(SocketFlags::empty()).expect("a socket");
    net::bind(&full, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("bound");
    net::listen(&full, 0).expect("listens");
    let address: SocketAddr =
        net::getsockname(&full).expect("a name").try_into().expect("an address");
    let mut sockets = vec![full];
    for _ in 0..4 {
        let client = socket(SocketFlags::NONBLOCK).expect("a socket");
        let _ = net::connect(&client, &address);
        sockets.push(client);
    }
    (sockets, address)
}

#[test]
fn families_alternate_and_the_resolvers_first_comes_first() {
    let found = ["[::1]:1", "[::2]:1", "[::3]:1", "127.0.0.1:1", "127.0.0.2:1", "[::1]:1"];
    for _ in 0..20 {
        let families: Vec<_> =
            order(&Dialer::default(), &found).iter().map(SocketAddr::is_ipv6).collect();
        assert_eq!(families, [true, false, true, false, true]);
    }
}

#[test]
fn replicas_are_tried_in_random_order() {
    let found = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];
    let mut first: Vec<_> = (0..200).map(|_| order(&Dialer::default(), &found)[0]).collect();
    first.sort_unstable();
    first.dedup();
    assert_eq!(first.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn an_address_that_failed_is_tried_last_for_a_minute() {
    let dialer = Dialer::default();
    let found = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];
    dialer.clone().record_failure(addresses(&found)[0]);
    tokio::time::advance(Duration::from_secs(1)).await;
    dialer.record_failure(addresses(&found)[1]);
    for _ in 0..20 {
        assert_eq!(order(&dialer, &found), addresses(&["10.0.0.3:1", "10.0.0.1:1", "10.0.0.2:1"]));
    }
    tokio::time::advance(REMEMBERED).await;
    assert!((0..200).any(|_| order(&dialer, &found)[0] != addresses(&found)[2]));
    for port in 0..1000 {
        dialer.record_failure(([10, 0, 0, 1], port).into());
    }
    assert_eq!(dialer.failures.lock().len(), MAX_REMEMBERED);
}

#[tokio::test]
async fn the_next_address_is_tried_when_one_refuses() {
    let (_listener, good) = listener().await;
    let bad = refusing().await;
    let dialer = Dialer::default();
    dialer.record_failure(good);
    // The recorded failure makes `good` the last candidate.
    let mut candidates = dialer.candidates(vec![bad, good]);
    let (address, _stream) = candidates.connect().await.expect("a connection");
    assert_eq!(address, good);
    assert_eq!(candidates.errors.len(), 1);
    assert_eq!(candidates.errors[0].to_string(), format!("cannot connect to {bad}"));
    let failed: Vec<_> = dialer.failures.lock().keys().copied().collect();
    assert_eq!(failed, [bad]);
    assert!(candidates.connect().await.is_none());
}

#[tokio::test]
async fn a_silent_address_costs_a_quarter_of_a_second_once() {
    let (_listener, good) = listener().await;
    let (_sockets, slow) = unresponsive();
    let dialer = Dialer::default();
    dialer.record_failure(good);
    let start = Instant::now();
    // The recorded failure makes `good` the last candidate.
    let mut candidates = dialer.candidates(vec![slow, good]);
    let (address, _stream) = candidates.connect().await.expect("a connection");
    assert_eq!(address, good);
    assert!(start.elapsed() >= ATTEMPT_DELAY);
    assert!(!candidates.is_empty());
    assert_eq!(dialer.candidates(vec![slow, good]).left, [slow, good]);
    let again = timeout(ATTEMPT_DELAY, candidates.connect()).await;
    assert!(again.is_err(), "{again:?}");
}

#[tokio::test]
async fn a_source_address_is_bound_and_decides_the_family() {
    let (listener, address) = listener().await;
    let dialer = Dialer::from_source(Ipv4Addr::new(127, 0, 0, 6).into());
    let connected = dialer.connect("localhost", address.port());
    let (stream, accepted) = tokio::join!(connected, listener.accept());
    assert_eq!(
        accepted.expect("a connection").1,
        stream.expect("connected").local_addr().expect("an address")
    );
    for (host, from, expected) in [
        ("::1", [127, 0, 0, 6], "::1 has no address of the family of the source address 127.0.0.6"),
        (
            "127.0.0.1",
            [192, 0, 2, 1],
            "cannot bind the source address 192.0.2.1, expected it on the loopback interface",
        ),
    ] {
        let dialer = Dialer::from_source(IpAddr::from(from));
        let error = dialer.connect(host, address.port()).await.expect_err("an error");
        assert_eq!(error.to_string(), expected);
    }
}

#[tokio::test]
async fn a_name_without_address_is_an_error_that_names_it() {
    let error = Dialer::default().connect("no such name", 1).await;
    let error = error.expect_err("an error").to_string();
    assert_eq!(error, "cannot find the address of no such name");
}

/// A filter that refuses IPv6 addresses.
#[derive(Debug)]
struct Ipv4Only;

impl Filter for Ipv4Only {
    fn check(&self, address: IpAddr) -> Result<(), String> {
        let refused = address.is_ipv6();
        (!refused).then_some(()).ok_or("is blocked".to_owned())
    }
}

#[tokio::test]
async fn the_filter_is_asked_at_each_attempt_and_other_addresses_are_tried() {
    let dialer = Dialer::with_filter(Arc::new(Ipv4Only));
    let (listener, open) = listener().await;
    let blocked = SocketAddr::from((Ipv6Addr::LOCALHOST, open.port()));
    let mut candidates = dialer.candidates(vec![blocked, open]);
    let (address, _) = candidates.connect().await.expect("a connection");
    assert_eq!(address, open);
    let error = dialer.connect("::1", open.port()).await.expect_err("blocked");
    assert_eq!(error.to_string(), "connection blocked: resolved IP ::1 is blocked");
    drop(listener);
}
