//! Tests the connections of the status port: idle, half-closed and slow ones, and their end.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Duration, Instant};

use super::*;
use crate::metrics::Registry;
use crate::runtime::lifecycle::Stop;
use crate::status::tests::{any_port, config, own_metrics, sources};
use crate::status::{Probers, Scrape, reply};

const READY: &[u8] = b"GET /healthz/ready HTTP/1.1\r\nhost: x\r\n\r\n";

struct Port {
    address: SocketAddr,
    stop_accepting: StopAccepting,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

async fn port() -> Port {
    let metrics = Registry::default();
    port_with(own_metrics(metrics.clone()), metrics)
}

fn port_with(scrape: Scrape, metrics: Registry) -> Port {
    let sources = sources(Stop::new(), scrape, metrics);
    let config = config(Probers::default());
    let (listener, port) = any_port();
    let router = Arc::new(Router::new(config, sources).expect("a router"));
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let stop_accepting = StopAccepting::default();
    tasks.spawn(serve(listener, UNREAD_LIMIT, router, stop_accepting.clone(), stop.clone()));
    Port { address: (Ipv4Addr::LOCALHOST, port).into(), stop_accepting, stop, tasks }
}

impl Port {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }
}

/// Sends a request. Returns the status line of the response, or an empty text if the connection has ended.
async fn send_request(stream: &mut TcpStream, request: &[u8]) -> String {
    // The connection may be closed already; the read below finds this out.
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
        assert_eq!(send_request(&mut stream, READY).await, "HTTP/1.1 200 OK");
    }
    let v6 = (Ipv6Addr::LOCALHOST, port.address.port());
    // Not every machine has IPv6.
    if let Ok(mut stream) = TcpStream::connect(v6).await {
        assert_eq!(send_request(&mut stream, READY).await, "HTTP/1.1 200 OK");
    }
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused() {
    let port = port().await;
    let head = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(MAX_HEAD));
    let answer = send_request(&mut port.connect().await, head.as_bytes()).await;
    assert!(answer.contains(" 431 ") || answer.is_empty(), "{answer}");
    let answer = send_request(&mut port.connect().await, b"nonsense\r\n\r\n").await;
    assert!(answer.contains(" 400 "), "{answer}");
}

#[tokio::test]
async fn a_connection_with_a_late_head_is_closed_before_an_idle_one() {
    let port = port().await;
    let mut idle = port.connect().await;
    assert_eq!(send_request(&mut idle, READY).await, "HTTP/1.1 200 OK");
    let mut late = port.connect().await;
    assert_eq!(send_request(&mut late, READY).await, "HTTP/1.1 200 OK");
    late.write_all(b"GET /").await.expect("sent");
    let mut silent = port.connect().await;
    let mut slow = port.connect().await;
    slow.write_all(b"GET / HTTP/1.1\r\n").await.expect("sent");
    tokio::time::pause();
    let before = Instant::now();
    let mut byte = [0; 1024];
    for (closed, limit) in [(&mut silent, FIRST_HEAD), (&mut slow, FIRST_HEAD), (&mut late, IDLE)] {
        assert_eq!(closed.read(&mut byte).await.unwrap_or_default(), 0);
        let took = before.elapsed();
        let second = Duration::from_secs(1);
        assert!(limit - second < took && took < limit + second, "{took:?}");
        if limit == FIRST_HEAD {
            assert_eq!(send_request(&mut idle, READY).await, "HTTP/1.1 200 OK");
        }
    }
    assert_eq!(idle.read(&mut byte).await.unwrap_or_default(), 0);
}

#[tokio::test]
async fn an_answer_may_take_longer_than_the_idle_limit() {
    let scrape: Scrape = Arc::new(move |_| {
        Box::pin(async move {
            sleep(2 * IDLE).await;
            reply::with(::http::StatusCode::OK, "x", &[])
        })
    });
    let port = port_with(scrape, Registry::default());
    let mut stream = port.connect().await;
    tokio::time::pause();
    let request = b"GET /stats/prometheus HTTP/1.1\r\nhost: x\r\n\r\n";
    assert_eq!(send_request(&mut stream, request).await, "HTTP/1.1 200 OK");
}

/// `nc -N` and some scripts shut down their sending side after the request.
#[tokio::test]
async fn a_half_closed_connection_gets_its_answer_and_is_closed() {
    let scrape: Scrape = Arc::new(move |_| {
        Box::pin(async move {
            sleep(FIRST_HEAD / 2).await;
            reply::with(::http::StatusCode::OK, "page", &[])
        })
    });
    let port = port_with(scrape, Registry::default());
    tokio::time::pause();
    for request in [
        "GET /healthz/ready HTTP/1.0\r\n\r\n",
        "GET /stats/prometheus HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST /stats/prometheus HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nno",
    ] {
        let mut stream = port.connect().await;
        stream.write_all(request.as_bytes()).await.expect("sent");
        stream.shutdown().await.expect("half closed");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        assert!(answer.contains(" 200 OK\r\n"), "{request}: {answer}");
        assert_eq!(answer.contains("page"), request.contains("stats"), "{answer}");
    }
    for unfinished in ["", "GET /healthz/ready HTTP/1.1\r\nhost:"] {
        let mut stream = port.connect().await;
        stream.write_all(unfinished.as_bytes()).await.expect("sent");
        stream.shutdown().await.expect("half closed");
        let before = Instant::now();
        let _ = stream.read_to_end(&mut Vec::new()).await;
        assert!(before.elapsed() < FIRST_HEAD / 2, "{unfinished:?}");
    }
}

/// The limit for unread responses in these tests. [`UNREAD`] is too long for a test.
const UNREAD_LIMIT: Duration = Duration::from_secs(2);

/// Requests a response of [`ANSWER`] bytes, and pauses after its first byte. Returns the number of bytes that arrive
/// after the pause.
async fn read_after_pause(port: &Port, pause: Duration) -> usize {
    let mut stream = port.connect().await;
    let request = b"GET /stats/prometheus HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request).await.expect("sent");
    stream.read_u8().await.expect("a first byte");
    sleep(pause).await;
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
async fn a_connection_whose_client_does_not_read_the_answer_is_closed() {
    let answer = bytes::Bytes::from(vec![b'#'; ANSWER]);
    let scrape: Scrape = Arc::new(move |_| {
        let answer = answer.clone();
        Box::pin(async move { reply::with(::http::StatusCode::OK, answer, &[]) })
    });
    let port = port_with(scrape, Registry::default());
    let after_a_pause = read_after_pause(&port, UNREAD_LIMIT / 4).await;
    assert!(after_a_pause >= ANSWER, "{after_a_pause}");
    let too_late = read_after_pause(&port, 3 * UNREAD_LIMIT).await;
    assert!(too_late < ANSWER, "{too_late}");
}

#[tokio::test]
async fn the_end_of_the_port_ends_its_connections() {
    let mut port = port().await;
    let mut stream = port.connect().await;
    assert_eq!(send_request(&mut stream, READY).await, "HTTP/1.1 200 OK");
    port.stop.cancel();
    assert_eq!(send_request(&mut stream, READY).await, "");
    port.tasks.join_next().await.expect("one").expect("it ended");
}

#[tokio::test]
async fn a_handed_over_port_answers_one_more_request_on_each_open_connection() {
    let port = port().await;
    let mut streams = [port.connect().await, port.connect().await];
    assert_eq!(send_request(&mut streams[0], READY).await, "HTTP/1.1 200 OK");
    port.stop_accepting.begin().await;
    for stream in &mut streams {
        assert_eq!(send_request(stream, READY).await, "HTTP/1.1 200 OK");
        assert_eq!(send_request(stream, READY).await, "");
    }
    assert!(TcpStream::connect(port.address).await.is_err());
}

#[test]
fn other_paths_are_redirected_to_the_canonical_one() {
    for (path, expected) in [
        ("/healthz/ready", None),
        ("/", None),
        ("/app-health/", None),
        ("/app-health", Some("/app-health/")),
        ("/app-lifecycle?a", Some("/app-lifecycle/?a")),
        ("/debug", Some("/debug/")),
        ("/debug/", None),
        ("//debug/envoy", Some("/debug/envoy")),
        ("/debug/../drain?x=%2e", Some("/drain?x=%2e")),
        ("/./stats//prometheus", Some("/stats/prometheus")),
        ("/../..", Some("/")),
        ("/drain//", Some("/drain/")),
    ] {
        let uri = path.parse().expect("a path");
        assert_eq!(canonical_target(&uri).as_deref(), expected, "{path}");
    }
}
