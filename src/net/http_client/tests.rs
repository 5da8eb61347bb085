//! Tests the client with servers that send fixed responses.

use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Method, StatusCode};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::*;

const LIMIT: Duration = Duration::from_secs(5);

/// A server that stops when it is dropped.
struct Server {
    url: String,
    connections: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Server {
    /// Starts a server that sends `answers` in turn on each connection, one for each request, then
    /// closes the connection.
    async fn start(answers: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/a", listener.local_addr().expect("an address"));
        let answers: Vec<_> = answers.iter().map(|answer| (*answer).to_owned()).collect();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = connections.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut streams = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                streams.spawn(serve(stream, answers.clone()));
            }
        });
        Self { url, connections, _tasks: tasks }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

/// Sends a response to each request. The text `REQUEST` in a response stands for the request. Instead
/// of an empty response nothing is sent, and the connection stays open.
async fn serve(mut stream: impl AsyncRead + AsyncWrite + Unpin, answers: Vec<String>) {
    for answer in answers {
        let mut request = vec![0; 4096];
        match stream.read(&mut request).await {
            Ok(length) if length > 0 => request.truncate(length),
            _ => return,
        }
        if answer.is_empty() {
            std::future::pending::<()>().await;
        }
        let request = String::from_utf8_lossy(&request).into_owned();
        let answer = answer.replace("REQUEST", &request);
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}

fn get(url: &str) -> Request<Bytes> {
    let request = Request::builder().uri(url);
    request.body(Bytes::new()).expect("a request")
}

async fn fetch(client: &Client, url: &str) -> Result<Response<Bytes>, Error> {
    client.fetch(get(url), LIMIT, 1 << 20).await
}

fn keeping() -> Client {
    Client::new(Config { keeps_connections: true, ..Config::default() })
}

#[tokio::test]
async fn a_request_has_path_host_and_body_and_closes_its_connection() {
    let server = Server::start(&["HTTP/1.1 200 OK\r\n\r\nREQUEST"]).await;
    let mut request = get(&format!("{}?b=c", server.url));
    *request.method_mut() = Method::POST;
    *request.body_mut() = Bytes::from_static(b"hello");
    let answer = Client::default().fetch(request, LIMIT, 1000).await;
    let text = String::from_utf8(answer.expect("an answer").body().to_vec()).expect("text");
    let host = server.url.trim_start_matches("http://").trim_end_matches("/a");
    assert!(text.starts_with("POST /a?b=c HTTP/1.1\r\n"), "{text}");
    assert!(text.contains(&format!("host: {host}\r\n")), "{text}");
    assert!(text.contains("connection: close\r\n"), "{text}");
    assert!(text.ends_with("\r\n\r\nhello"), "{text}");
}

#[tokio::test]
async fn unusual_heads_are_read() {
    let headers: String = (0..20_000).map(|index| format!("x-{index}: y\r\n")).collect();
    let large = format!("large: {}\r\n", "y".repeat(1_000_000));
    let value = "y".repeat(1_000_000);
    for (head, name, expected) in [
        ("folded: a\r\n b\r\n", "folded", "a  b"),
        ("space : a\r\n", "space", "a"),
        ("bad name: a\r\ngood: b\r\n", "good", "b"),
        (&headers, "x-19999", "y"),
        (&large, "large", &value),
    ] {
        let answer = format!("HTTP/1.1 200 OK\r\n{head}content-length: 0\r\n\r\n");
        let server = Server::start(&[&answer]).await;
        let answer = fetch(&Client::default(), &server.url).await.expect("an answer");
        let value = answer.headers()[name].to_str().expect("text");
        let value: Vec<_> = value.split_whitespace().collect();
        assert_eq!(value, expected.split_whitespace().collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn answers_beyond_the_limits_are_errors() {
    let head = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "y".repeat(1100 << 10));
    let body = format!("HTTP/1.1 200 OK\r\n\r\n{}", "y".repeat(2 << 20));
    for (answer, expected) in [
        (head.as_str(), "failed before the end of the answer"),
        (&body, "has more than 1048576 bytes"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nOK", "failed before the end of the answer"),
        ("nonsense\r\n\r\n", "failed before the end of the answer"),
    ] {
        let server = Server::start(&[answer]).await;
        let found = match fetch(&Client::default(), &server.url).await {
            Ok(answer) => answer.status().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(found.contains(expected), "{found}, expected {expected}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_deadline_covers_head_and_body() {
    for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nOK"] {
        let server = Server::start(&[answer, ""]).await;
        let request = get(&server.url);
        let error = Client::default().fetch(request, LIMIT, 1000).await;
        let error = error.expect_err("an error").to_string();
        assert!(error.ends_with("within 5s"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_request_closes_its_connection() {
    for client in [Client::default(), keeping()] {
        for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nOK"] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let url = format!("http://{}/", listener.local_addr().expect("an address"));
            let serving = async {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                let mut request = [0; 4096];
                let length = stream.read(&mut request).await.expect("a request");
                assert!(length > 0);
                let written = stream.write_all(answer.as_bytes()).await;
                written.expect("written");
                stream.read(&mut request).await
            };
            let serving = timeout(LIMIT * 2, serving);
            let (fetched, end) = tokio::join!(fetch(&client, &url), serving);
            assert!(matches!(fetched, Err(Error::Late { .. })), "{fetched:?}");
            assert!(matches!(end, Ok(Ok(0) | Err(_))), "{end:?}");
        }
    }
}

#[tokio::test]
async fn a_connection_is_kept_when_its_answer_was_read_to_the_end() {
    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK";
    for (client, connections) in [(Client::default(), 3), (keeping(), 1)] {
        let server = Server::start(&[ANSWER; 4]).await;
        for _ in 0..3 {
            fetch(&client, &server.url).await.expect("an answer");
        }
        assert_eq!(server.connections(), connections);
        let unread = client.send(get(&server.url)).await.expect("an answer");
        // Dropping an unread response closes its connection.
        drop(unread);
        fetch(&client, &server.url).await.expect("an answer");
        assert_eq!(server.connections(), connections + if connections == 1 { 1 } else { 2 });
    }
}

#[tokio::test]
async fn a_kept_connection_that_the_server_closed_is_replaced() {
    let server = Server::start(&["HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK"]).await;
    let client = keeping();
    for connections in 1..=3 {
        fetch(&client, &server.url).await.expect("an answer");
        assert_eq!(server.connections(), connections);
    }
}

#[tokio::test]
async fn a_request_that_fails_on_a_new_connection_is_sent_once() {
    let server = Server::start(&["HTTP/1.1 2"]).await;
    for connections in 1..=2 {
        let fetched = fetch(&keeping(), &server.url).await;
        assert!(matches!(fetched, Err(Error::Broken { .. })), "{fetched:?}");
        assert_eq!(server.connections(), connections);
    }
}

#[tokio::test]
async fn a_connection_that_was_idle_for_90_s_is_not_used_again() {
    let server = Server::start(&["HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK"; 3]).await;
    let client = keeping();
    for (idle, connections) in [(0, 1), (89, 1), (90, 2)] {
        // The clock is paused between two requests only: a paused clock advances by itself while a
        // request waits, and would end the request by its time limit.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(idle)).await;
        tokio::time::resume();
        fetch(&client, &server.url).await.expect("an answer");
        assert_eq!(server.connections(), connections, "after {idle} s");
    }
}

#[tokio::test]
async fn at_most_32_idle_connections_are_kept() {
    // The body is larger than what is read before the caller asks for it, so each connection stays in
    // use until its body is collected.
    let body = "y".repeat(256 << 10);
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let server = Server::start(&[&answer, &answer]).await;
    let client = keeping();
    let mut connections = 0;
    for kept in [0, 32] {
        let mut answers = Vec::new();
        for _ in 0..40 {
            answers.push(client.send(get(&server.url)).await.expect("an answer"));
        }
        connections += 40 - kept;
        assert_eq!(server.connections(), connections);
        for mut answer in answers {
            let read = answer.body_mut().collect(body.len()).await;
            assert_eq!(read.expect("a body"), body);
        }
        // The task of each connection returns it to the pool.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn redirects_are_followed_as_configured() {
    let target = Server::start(&["HTTP/1.1 200 OK\r\n\r\nREQUEST"]).await;
    let escaped = target.url.clone() + "/café 1";
    let other = target.url.replace("127.0.0.1", "localhost");
    for (redirects, location, expected) in [
        (Redirects::Return, &target.url, "302"),
        (Redirects::SameHost, &target.url, "200"),
        (Redirects::SameHost, &escaped, "200"),
        (Redirects::SameHost, &other, "302"),
        (Redirects::SameHost, &"ftp://127.0.0.1/".to_owned(), "302"),
        (Redirects::SameHost, &"mailto:a@b".to_owned(), "302"),
        (Redirects::SameHost, &String::new(), "302"),
        (Redirects::Follow, &String::new(), "302"),
        (Redirects::Follow, &"mailto:a@b".to_owned(), "expected a path or a URL"),
        (Redirects::Follow, &other, "200"),
        (Redirects::Follow, &"loop".to_owned(), "stopped after 10 redirects"),
        (Redirects::Follow, &"http://[".to_owned(), "expected a path or a URL"),
        (Redirects::Follow, &"https://h/".to_owned(), "is not a URL that can be requested"),
    ] {
        let answer = format!("HTTP/1.1 302 Found\r\nlocation: {location}\r\n\r\nbody");
        let server = Server::start(&[&answer]).await;
        let client = Client::new(Config { redirects, ..Config::default() });
        let mut request = get(&server.url);
        let host = HeaderValue::from_static("cart");
        request.headers_mut().insert(header::HOST, host);
        let found = match client.fetch(request, LIMIT, 1000).await {
            Ok(answer) if answer.status() == StatusCode::OK => {
                let text = String::from_utf8_lossy(answer.body()).into_owned();
                assert!(text.contains("host: ") && !text.contains("cart"), "{text}");
                "200".to_owned()
            }
            Ok(answer) => answer.status().as_u16().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(found.contains(expected), "{redirects:?} {location}: {found}");
    }
}

#[tokio::test]
async fn a_proxy_gets_whole_urls_and_its_credentials_and_tunnels_requests() {
    let server = Server::start(&["HTTP/1.1 200 OK\r\n\r\nREQUEST"]).await;
    let address = server.url.trim_start_matches("http://");
    let proxy = Proxy::parse(&format!("u:p@{address}"));
    let through = |dialer: Dialer| {
        Client::new(Config {
            dialer,
            tls: Some(crate::net::unverified_tls::config(false).expect("TLS")),
            proxies: Proxies { http: proxy.clone(), https: proxy.clone(), excluded: String::new() },
            ..Config::default()
        })
    };
    let client = through(Dialer::default());
    let answer = fetch(&client, "http://modules.test/a?b").await;
    let text = String::from_utf8(answer.expect("an answer").body().to_vec()).expect("text");
    assert!(text.starts_with("GET http://modules.test/a?b HTTP/1.1\r\n"), "{text}");
    assert!(text.contains("\r\nproxy-authorization: Basic dTpw\r\n"), "{text}");
    assert!(text.contains("\r\nhost: modules.test\r\n"), "{text}");
    let error = fetch(&client, "http://127.0.0.1:1/").await.expect_err("direct");
    assert!(error.to_string().starts_with("cannot connect to 127.0.0.1:1"), "{error}");
    // The response to CONNECT is a success, but the bytes after it are not TLS.
    let error = fetch(&client, "https://modules.test/").await.expect_err("no TLS");
    assert!(matches!(error, Error::Tls { .. }), "{error}");
    let refusing = Server::start(&["HTTP/1.1 403 Forbidden\r\n\r\n"]).await;
    let refusing = refusing.url.trim_start_matches("http://").to_owned();
    for (proxy, expected) in [(refusing.as_str(), "403"), ("127.0.0.1:1", "cannot connect")] {
        let proxies = Proxies { https: Proxy::parse(proxy), ..Proxies::default() };
        let client = Client::new(Config { proxies, ..(*client.config).clone() });
        let error = fetch(&client, "https://modules.test/").await;
        let text = crate::runtime::lifecycle::with_causes(&error.expect_err("refused"));
        let began = text.contains("refused a connection to modules.test: ");
        assert!(began && text.contains(expected), "{text}");
    }
}

#[derive(Debug)]
struct NoMetadata;

impl dial::Filter for NoMetadata {
    fn check(&self, address: std::net::IpAddr) -> Result<(), String> {
        let is_metadata = address.to_string().starts_with("169.254.");
        (!is_metadata).then_some(()).ok_or_else(|| "is blocked".to_owned())
    }
}

#[tokio::test]
async fn a_proxy_is_not_asked_for_a_blocked_address() {
    let server = Server::start(&["HTTP/1.1 200 OK\r\n\r\n"]).await;
    let proxy = Proxy::parse(&server.url);
    let client = Client::new(Config {
        dialer: Dialer::with_filter(Arc::new(NoMetadata)),
        proxies: Proxies { http: proxy, ..Proxies::default() },
        ..Config::default()
    });
    assert!(fetch(&client, "http://10.0.0.1/").await.is_ok());
    for url in ["http://169.254.169.254/", "http://169.254.169.254:8080/a"] {
        let error = fetch(&client, url).await.expect_err("blocked");
        assert!(error.to_string().contains("connection blocked"), "{error}");
    }
}

#[test]
fn a_url_has_a_host_and_may_leave_out_the_rest() {
    for url in ["http://localhost:15021/x", "http://[::1]/?y=z", "http://127.0.0.2"] {
        assert!(http_url(url).is_ok(), "{url}");
    }
    for url in ["", "localhost:15021", "https://localhost/", "/path", "http:///x", "http://a/b c"] {
        let error = http_url(url).expect_err(url);
        assert!(matches!(error, Error::Url { .. }), "{error}");
    }
}

#[tokio::test]
async fn requests_to_unusable_addresses_are_errors() {
    for url in ["/path", "https://localhost/", "ftp://localhost/", "localhost:15021"] {
        let error = fetch(&Client::default(), url).await.expect_err("an error");
        assert!(matches!(error, Error::Url { .. }), "{url}: {error}");
    }
    let refused = fetch(&Client::default(), "http://127.0.0.1:1/").await;
    let error = refused.expect_err("an error").to_string();
    assert_eq!(error, "cannot connect to 127.0.0.1:1");
}
