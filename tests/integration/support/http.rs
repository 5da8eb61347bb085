//! A small HTTP client and server that can send any bytes, and load that counts its failures and successes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::pki_types::PrivatePkcs8KeyDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::{local, soon, until};

/// The time after which an attempt of a load counts as failed.
const LIMIT: Duration = Duration::from_secs(10);

/// The pause between two attempts of a load, which leaves the processor to Envoy and the agent.
const PAUSE: Duration = Duration::from_millis(2);

/// An application that serves until it is dropped.
pub struct Backend {
    pub port: u16,
    _serving: JoinSet<()>,
}

impl Backend {
    /// Starts an application that responds to each request with 200.
    pub async fn start() -> Self {
        Self::serving(answer_all).await
    }

    /// Starts an application that serves each connection with `serve`.
    pub async fn serving<F>(serve: fn(TcpStream) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self::of(TcpListener::bind(local(0)).await.unwrap(), serve)
    }

    /// Starts an application on a listener. It responds with 200, and with the client's address in the header
    /// `x-client`.
    pub fn naming_clients(listener: std::net::TcpListener) -> Self {
        listener.set_nonblocking(true).unwrap();
        Self::of(TcpListener::from_std(listener).unwrap(), answer_with_client)
    }

    fn of<F>(listener: TcpListener, serve: fn(TcpStream) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let port = listener.local_addr().unwrap().port();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream));
            }
        });
        Self { port, _serving: serving }
    }
}

async fn answer_all(stream: TcpStream) {
    answer(stream, "").await;
}

async fn answer_with_client(stream: TcpStream) {
    let client = stream.peer_addr().unwrap().ip().to_canonical();
    answer(stream, &format!("x-client: {client}\r\n")).await;
}

async fn answer(mut stream: TcpStream, headers: &str) {
    while read_head(&mut stream).await.is_ok() {
        let answer = format!("HTTP/1.1 200 OK\r\n{headers}content-length: 2\r\n\r\nok");
        if stream.write_all(answer.as_bytes()).await.is_err() {
            break;
        }
    }
}

/// Sends a request for `/`, and returns the head of the response. Fails with the head of a response other than 200.
pub async fn exchange(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> Result<String, String> {
    request(stream, "cart", "/").await
}

/// Sends a request for a path of a host, and returns like [`exchange`].
pub async fn request(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    host: &str,
    path: &str,
) -> Result<String, String> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n");
    let failed = |error: std::io::Error| format!("exchange: {error}");
    stream.write_all(request.as_bytes()).await.map_err(failed)?;
    let head = read_head(stream).await.map_err(failed)?;
    if !head.starts_with("HTTP/1.1 200") {
        return Err(head);
    }
    let length = header(&head, "content-length").unwrap_or("0");
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).await.map_err(failed)?;
    Ok(head)
}

/// Sends a request on a new connection, and returns like [`exchange`].
pub async fn get(port: u16) -> Result<String, String> {
    exchange(&mut connect(port).await?).await
}

pub async fn connect(port: u16) -> Result<TcpStream, String> {
    let failed = |error: std::io::Error| format!("connect: {error}");
    let stream = TcpStream::connect(local(port)).await.map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    Ok(stream)
}

pub fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.find(|(found, _)| *found == name).map(|(_, value)| value)
}

pub async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> std::io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

/// An action that a load repeats.
pub trait Attempt: Send + 'static {
    /// Acts once. Returns the kind of a success, by which [`Tally`] counts, or the reason of a failure.
    fn attempt(&mut self) -> impl Future<Output = Result<String, String>> + Send;
}

/// A request to a port on a new connection each time. Successes are counted by the route's mark (`x-mark`).
pub struct Fresh(pub u16);

impl Attempt for Fresh {
    async fn attempt(&mut self) -> Result<String, String> {
        get(self.0).await.map(|head| mark(&head))
    }
}

/// A request to a port on the same connection each time. A closed connection is a failure; the next request opens
/// another one.
pub struct Lasting(u16, Option<TcpStream>);

impl Lasting {
    pub fn new(port: u16) -> Self {
        Self(port, None)
    }
}

impl Attempt for Lasting {
    async fn attempt(&mut self) -> Result<String, String> {
        let stream = match &mut self.1 {
            Some(stream) => stream,
            none => none.insert(connect(self.0).await?),
        };
        let result = exchange(stream).await;
        if result.is_err() {
            self.1 = None;
        }
        result.map(|head| mark(&head))
    }
}

fn mark(head: &str) -> String {
    header(head, "x-mark").unwrap_or_default().to_owned()
}

/// The results of a load so far.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub failures: Vec<String>,
    /// The number of successes of each kind.
    pub successes: BTreeMap<String, usize>,
}

impl Tally {
    fn add(&mut self, outcome: Result<String, String>) {
        match outcome {
            Ok(kind) => *self.successes.entry(kind).or_default() += 1,
            Err(failure) => self.failures.push(failure),
        }
    }

    pub fn attempts(&self) -> usize {
        self.failures.len() + self.successes.values().sum::<usize>()
    }
}

/// A load: workers that repeat their attempts until it is dropped.
#[derive(Default)]
pub struct Load {
    workers: JoinSet<()>,
    tally: Arc<Mutex<Tally>>,
}

impl Load {
    #[must_use]
    pub fn with(mut self, mut attempt: impl Attempt) -> Self {
        let tally = Arc::clone(&self.tally);
        self.workers.spawn(async move {
            loop {
                let done = tokio::time::timeout(LIMIT, attempt.attempt()).await;
                let outcome = done.unwrap_or_else(|_| Err(format!("no end within {LIMIT:?}")));
                tally.lock().unwrap().add(outcome);
                tokio::time::sleep(PAUSE).await;
            }
        });
        self
    }

    /// Waits until the load has made this many attempts in all.
    pub async fn wait_for_attempts(&self, attempts: usize) {
        until("more attempts", || self.tally().attempts() >= attempts).await;
    }

    pub fn tally(&self) -> Tally {
        self.tally.lock().unwrap().clone()
    }

    /// Asserts that every attempt has succeeded, and that there was one.
    pub fn assert_flawless(&self) -> Tally {
        let tally = self.tally();
        assert!(tally.attempts() > 0, "the load has made no attempt");
        assert!(
            tally.failures.is_empty(),
            "{} of {} failed, the first with {:?}",
            tally.failures.len(),
            tally.attempts(),
            tally.failures[0]
        );
        tally
    }
}

#[test]
#[should_panic(expected = "no attempt")]
fn a_load_without_an_attempt_is_not_flawless() {
    Load::default().assert_flawless();
}

/// A response: status, header lines in lower case, and body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// Sends a request on a new connection, and returns the response. `line` is method and path.
pub async fn ask(port: u16, line: &str) -> Answer {
    ask_with(port, line, "").await
}

/// Sends a request with further header lines, each of which ends with CRLF.
pub async fn ask_with(port: u16, line: &str, headers: &str) -> Answer {
    try_ask(port, line, headers).await.expect("an answer")
}

/// Sends a request to a port on which no process may listen. Returns None without a response.
pub async fn try_ask(port: u16, line: &str, headers: &str) -> Option<Answer> {
    let exchange = async {
        let mut stream = TcpStream::connect(local(port)).await.ok()?;
        let host = format!("host: localhost:{port}\r\n");
        let request = format!("{line} HTTP/1.1\r\n{host}{headers}connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some(Answer {
            status: head.split(' ').nth(1)?.parse().ok()?,
            head: head.to_ascii_lowercase(),
            body: body.to_owned(),
        })
    };
    soon(exchange).await
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A server that responds to each path with a status, header lines and a body, or never if its function returns None.
pub struct Server {
    pub port: u16,
    pub requests: watch::Receiver<Vec<String>>,
    _serving: JoinSet<()>,
}

impl Server {
    pub async fn start(
        port: u16,
        answer: impl Fn(&str) -> Option<(u16, String, String)> + Send + Sync + 'static,
    ) -> Self {
        Self::serve(port, None, answer).await
    }

    /// Starts a server with TLS, a self-signed certificate, and a free port.
    pub async fn tls(
        answer: impl Fn(&str) -> Option<(u16, String, String)> + Send + Sync + 'static,
    ) -> Self {
        let own = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key.into())
            .unwrap();
        Self::secured(config, answer).await
    }

    /// Starts a server with these TLS settings and a free port.
    pub async fn secured(
        config: rustls::ServerConfig,
        answer: impl Fn(&str) -> Option<(u16, String, String)> + Send + Sync + 'static,
    ) -> Self {
        Self::serve(0, Some(Arc::new(config).into()), answer).await
    }

    async fn serve(
        port: u16,
        tls: Option<TlsAcceptor>,
        answer: impl Fn(&str) -> Option<(u16, String, String)> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(local(port)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, requests) = watch::channel(Vec::new());
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut hung = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                let mut stream: Box<dyn Stream> = match &tls {
                    None => Box::new(stream),
                    Some(tls) => match tls.accept(stream).await {
                        Ok(stream) => Box::new(stream),
                        Err(_) => continue, // The client may have closed the connection.
                    },
                };
                let Ok(request) = read_head(&mut stream).await else {
                    continue; // The client may have closed the connection.
                };
                let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
                sender.send_modify(|requests| requests.push(request));
                let Some((status, headers, body)) = answer(&path) else {
                    hung.push(stream);
                    continue;
                };
                let length = body.len();
                let head = format!("HTTP/1.1 {status} X\r\n{headers}content-length: {length}");
                let text = format!("{head}\r\nconnection: close\r\n\r\n{body}");
                let _ = stream.write_all(text.as_bytes()).await; // The client may not read it.
                let _ = stream.shutdown().await;
            }
        });
        Self { port, requests, _serving: serving }
    }
}
