//! Connections that want too much, or too little.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Duration, Instant};

use super::*;
use crate::lifecycle::Stop;
use crate::metrics::Registry;
use crate::probe;
use crate::status::tests::{OfReadiness, own_metrics};
use crate::status::{Config, Probers, Scrape, Sources, reply};
use crate::timeline::Timeline;

const READY: &[u8] = b"GET /healthz/ready HTTP/1.1\r\nhost: x\r\n\r\n";

struct Port {
    address: SocketAddr,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

async fn port() -> Port {
    let metrics = Registry::default();
    port_with(own_metrics(metrics.clone()), metrics)
}

fn port_with(scrape: Scrape, metrics: Registry) -> Port {
    let config = Config {
        port: 0,
        metrics_localhost_only: false,
        application: String::new(),
        probers: Probers::default(),
        probes: probe::Config {
            origin: probe::Origin(Ipv4Addr::LOCALHOST.into()),
            offers_http2: true,
            keeps_connections: false,
        },
        grpc_bootstrap: None,
    };
    let sources = Sources {
        timeline: Timeline::start(),
        stop: Stop::new(),
        envoy: None,
        dns_ready: None,
        metrics,
        scrape,
        debug: Vec::new(),
        glance: Arc::new(OfReadiness),
    };
    let listener = bind(0).expect("a port");
    let port = listener.0.local_addr().expect("an address").port();
    let router = Arc::new(Router::new(config, sources).expect("a router"));
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    tasks.spawn(serve(listener, router, stop.clone()));
    Port {
        address: (Ipv4Addr::LOCALHOST, port).into(),
        stop,
        tasks,
    }
}

impl Port {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }
}

/// What comes back for `request`: the status line, or nothing if the connection ends.
async fn asked(stream: &mut TcpStream, request: &[u8]) -> String {
    // It may be closed already, which reading tells.
    let _ = stream.write_all(request).await;
    let mut answer = [0; 1024];
    let length = stream.read(&mut answer).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&answer[..length]).into_owned();
    text.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn both_families_are_served_and_connections_are_kept() {
    let port = port().await;
    let mut stream = port.connect().await;
    for _ in 0..3 {
        assert_eq!(asked(&mut stream, READY).await, "HTTP/1.1 200 OK");
    }
    let v6 = (Ipv6Addr::LOCALHOST, port.address.port());
    // Not every machine has IPv6.
    if let Ok(mut stream) = TcpStream::connect(v6).await {
        assert_eq!(asked(&mut stream, READY).await, "HTTP/1.1 200 OK");
    }
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused() {
    let port = port().await;
    let head = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(LARGEST_HEAD));
    let answer = asked(&mut port.connect().await, head.as_bytes()).await;
    assert!(answer.contains(" 431 ") || answer.is_empty(), "{answer}");
    let answer = asked(&mut port.connect().await, b"nonsense\r\n\r\n").await;
    assert!(answer.contains(" 400 "), "{answer}");
}

#[tokio::test]
async fn who_says_nothing_or_little_is_sent_away_and_who_pauses_is_not() {
    let port = port().await;
    let mut paused = port.connect().await;
    assert_eq!(asked(&mut paused, READY).await, "HTTP/1.1 200 OK");
    let mut silent = port.connect().await;
    let mut slow = port.connect().await;
    slow.write_all(b"GET / HTTP/1.1\r\n").await.expect("sent");
    let mut late = port.connect().await;
    assert_eq!(asked(&mut late, READY).await, "HTTP/1.1 200 OK");
    late.write_all(b"GET /").await.expect("sent");
    tokio::time::pause();
    let before = Instant::now();
    let mut byte = [0; 1024];
    assert_eq!(silent.read(&mut byte).await.unwrap_or_default(), 0);
    assert_eq!(late.read(&mut byte).await.unwrap_or_default(), 0);
    let took = before.elapsed();
    assert!(took >= activity::HEAD - Duration::from_secs(1), "{took:?}");
    assert!(took < 2 * activity::HEAD, "{took:?}");
    tokio::time::resume();
    assert_eq!(asked(&mut paused, READY).await, "HTTP/1.1 200 OK");
    assert!(activity::SILENCE > 10 * activity::HEAD);
}

#[tokio::test]
async fn a_head_that_begins_while_another_request_is_answered_has_no_more_time() {
    let (tell, mut told) = tokio::sync::watch::channel(false);
    let (release, released) = tokio::sync::watch::channel(false);
    let scrape: Scrape = Arc::new(move |_| {
        tell.send_replace(true);
        let mut released = released.clone();
        Box::pin(async move {
            released.wait_for(|is| *is).await.expect("a release");
            reply::bytes(::http::StatusCode::OK, bytes::Bytes::from_static(b"x"))
        })
    });
    let port = port_with(scrape, Registry::default());
    let mut stream = port.connect().await;
    let request = b"GET /stats/prometheus HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request).await.expect("sent");
    told.wait_for(|is| *is).await.expect("asked");
    tokio::time::pause();
    stream.write_all(b"GET /").await.expect("sent");
    tokio::time::sleep(Duration::from_millis(1)).await;
    release.send_replace(true);
    let before = Instant::now();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("an end");
    assert!(answer.ends_with(b"\r\n\r\nx"));
    let took = before.elapsed();
    assert!(took < 2 * activity::HEAD, "{took:?}");
}

/// What is left in buffers of an answer whose reader stops after its first byte, for so long.
async fn left_to_read(port: &Port, stops_for: Duration) -> usize {
    let mut stream = port.connect().await;
    let request = b"GET /stats/prometheus HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request).await.expect("sent");
    stream.read_u8().await.expect("a first byte");
    tokio::time::pause();
    tokio::time::sleep(stops_for).await;
    tokio::time::resume();
    let (mut length, mut bytes) = (0, vec![0; 1 << 20]);
    while length < ANSWER {
        match stream.read(&mut bytes).await {
            Ok(read) if read > 0 => length += read,
            _ => break,
        }
    }
    length
}

const ANSWER: usize = 64 << 20;

#[tokio::test]
async fn who_does_not_read_a_large_answer_is_sent_away_and_who_pauses_is_not() {
    let answer = bytes::Bytes::from(vec![b'#'; ANSWER]);
    let scrape: Scrape = Arc::new(move |_| {
        let answer = answer.clone();
        Box::pin(async move { reply::bytes(::http::StatusCode::OK, answer) })
    });
    let port = port_with(scrape, Registry::default());
    let paused = left_to_read(&port, activity::READING / 2).await;
    assert!(paused >= ANSWER, "{paused}");
    let gone = left_to_read(&port, 2 * activity::READING).await;
    assert!(gone < ANSWER, "{gone}");
}

#[tokio::test]
async fn in_a_flood_of_idle_connections_the_kubelet_gets_through() {
    let port = port().await;
    let mut flood = Vec::new();
    for _ in 0..2 * MOST_CONNECTIONS {
        flood.push(port.connect().await);
        if flood.len() % 100 == 0 {
            let mut kubelet = port.connect().await;
            assert_eq!(asked(&mut kubelet, READY).await, "HTTP/1.1 200 OK");
        }
    }
    let mut kubelet = port.connect().await;
    assert_eq!(asked(&mut kubelet, READY).await, "HTTP/1.1 200 OK");
    let mut byte = [0; 1];
    assert_eq!(flood[0].read(&mut byte).await.unwrap_or_default(), 0);
}

#[tokio::test]
async fn a_taken_port_is_an_error_that_names_it() {
    let taken = bind(0).expect("a port");
    let port = taken.0.local_addr().expect("an address").port();
    let error = bind(port).expect_err("taken");
    let expected = format!("cannot listen on the status port {port}");
    assert_eq!(error.to_string(), expected);
}

#[tokio::test]
async fn the_end_of_the_port_ends_its_connections() {
    let mut port = port().await;
    let mut stream = port.connect().await;
    assert_eq!(asked(&mut stream, READY).await, "HTTP/1.1 200 OK");
    port.stop.cancel();
    assert_eq!(asked(&mut stream, READY).await, "");
    port.tasks
        .join_next()
        .await
        .expect("one")
        .expect("it ended");
}
