//! An agent that merges the metrics of an Envoy and applications. The test decides about each byte of their responses.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::http::{read_head, try_ask};
use super::place::Place;
use super::process::Process;
use super::{eventually, free_port, local, local_istiod, soon};

pub const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub const PROTOBUF: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";

/// The bytes that a source sends. If `holds` is true, it leaves the connection open afterwards.
#[derive(Clone, Default)]
struct Says {
    bytes: Vec<u8>,
    /// What a client gets that accepts protobuf, if it differs.
    protobuf: Option<Vec<u8>>,
    holds: bool,
}

/// A server of Envoy's or an application's metrics.
pub struct Source {
    pub port: u16,
    says: Arc<Mutex<Says>>,
    requests: Arc<Mutex<Vec<String>>>,
    _serving: JoinSet<()>,
}

impl Source {
    pub async fn start() -> Self {
        let listener = TcpListener::bind(local(free_port())).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (says, requests) = (Arc::<Mutex<Says>>::default(), Arc::default());
        let mut serving = JoinSet::new();
        let (says_now, noted) = (Arc::clone(&says), Arc::clone(&requests));
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let says = Arc::clone(&says_now);
                connections.spawn(answer(stream, says, Arc::clone(&noted)));
            }
        });
        Self { port, says, requests, _serving: serving }
    }

    pub fn says(&self, bytes: impl Into<Vec<u8>>) {
        *self.says.lock().unwrap() = Says { bytes: bytes.into(), ..Says::default() };
    }

    pub fn says_and_holds(&self, bytes: &str) {
        *self.says.lock().unwrap() = Says { bytes: bytes.into(), holds: true, ..Says::default() };
    }

    /// Sets a complete response with status 200.
    pub fn has(&self, kind: &str, body: &str) {
        self.says(answer_of(kind, "", body.as_bytes()));
    }

    /// Sets a page for clients that accept protobuf, beside the page that others get.
    pub fn has_in_protobuf(&self, body: &[u8]) {
        self.says.lock().unwrap().protobuf = Some(answer_of(PROTOBUF, "", body));
    }

    pub fn last_request(&self) -> String {
        self.requests.lock().unwrap().last().unwrap().clone()
    }

    /// Returns a header of the last request.
    pub fn was_sent(&self, name: &str) -> Option<String> {
        let request = self.last_request();
        let mut fields = request.lines().filter_map(|line| line.split_once(": "));
        let field = fields.find(|(found, _)| found.eq_ignore_ascii_case(name));
        field.map(|(_, value)| value.to_owned())
    }
}

async fn answer(mut stream: TcpStream, says: Arc<Mutex<Says>>, noted: Arc<Mutex<Vec<String>>>) {
    let Ok(request) = read_head(&mut stream).await else {
        return;
    };
    let accepts_protobuf = request.contains("application/vnd.google.protobuf");
    noted.lock().unwrap().push(request);
    let says = says.lock().unwrap().clone();
    let bytes = says.protobuf.filter(|_| accepts_protobuf).unwrap_or(says.bytes);
    // A client that does not want the complete response may have closed the connection.
    if stream.write_all(&bytes).await.is_ok() && says.holds {
        std::future::pending::<()>().await;
    }
}

pub fn answer_of(kind: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{headers}content-length: {length}\r\n\
         connection: close\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// An agent whose Envoy and applications are sources that the test controls.
pub struct Scraped {
    pub envoy: Source,
    pub targets: Vec<Source>,
    /// The agent. Fields are dropped in order, so it ends before the directory of `place` is removed.
    pub agent: Process,
    place: Place,
}

pub struct Page {
    pub status: u16,
    head: String,
    pub raw: Vec<u8>,
}

impl Scraped {
    pub async fn start(targets: usize) -> Self {
        let envoy = Source::start().await;
        envoy.has(TEXT, "# TYPE envoy gauge\nenvoy 1\n");
        let mut sources = Vec::new();
        for number in 0..targets {
            let source = Source::start().await;
            source.has(TEXT, &format!("# TYPE app{number} gauge\napp{number} 1\n"));
            sources.push(source);
        }
        let entry = |source: &Source| json!({ "port": source.port.to_string(), "path": "/m?x=y" });
        let annotations = match &sources[..] {
            [one] => entry(one),
            several => json!({ "targets": several.iter().map(entry).collect::<Vec<_>>() }),
        };
        let place = Place::with_envoy(&local_istiod().await)
            .set("ENVOY_PROMETHEUS_PORT", &envoy.port.to_string())
            .set("ISTIO_PROMETHEUS_ANNOTATIONS", &annotations.to_string());
        let agent = place.start_only();
        eventually("a status port", async || {
            try_ask(place.status_port(), "GET /nothing", "").await
        })
        .await;
        Self { envoy, targets: sources, place, agent }
    }

    pub async fn page(&self) -> Page {
        self.page_with("").await
    }

    /// Scrapes with further header lines. The request is HTTP/1.0, so that the body of the response is not chunked.
    pub async fn page_with(&self, headers: &str) -> Page {
        let exchange = async {
            let address = local(self.place.status_port());
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = format!("GET /stats/prometheus?usedonly&a=b HTTP/1.0\r\n{headers}\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            answer
        };
        let answer = soon(exchange).await;
        let end = answer.windows(4).position(|part| part == b"\r\n\r\n");
        let (head, body) = answer.split_at(end.expect("a head") + 4);
        let head = String::from_utf8(head.to_vec()).unwrap().to_lowercase();
        Page { status: head.split(' ').nth(1).unwrap().parse().unwrap(), head, raw: body.to_vec() }
    }

    /// Returns the port with the merged page.
    pub fn port(&self) -> u16 {
        self.place.status_port()
    }

    /// Scrapes over HTTP/1.1, and returns the bytes of the response until the connection is closed or reset. They may
    /// be incomplete or none.
    pub async fn raw(&self) -> String {
        let mut stream = TcpStream::connect(local(self.port())).await.unwrap();
        let request = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut answer = Vec::new();
        let _ = soon(stream.read_to_end(&mut answer)).await; // It may be reset.
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Scrapes, and returns the agent's number of failed scrapes of this kind.
    pub async fn failures(&self, kind: &str) -> u64 {
        let page = self.page().await;
        page.figure(&format!("istio_agent_scrape_failures_total{{type=\"{kind}\"}}"))
    }
}

impl Page {
    pub fn text(&self) -> String {
        String::from_utf8(self.raw.clone()).expect("a page of text")
    }

    pub fn kind(&self) -> &str {
        self.header("content-type").expect("a type")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(found, _)| *found == name).map(|(_, v)| v)
    }

    pub fn figure(&self, series: &str) -> u64 {
        let text = self.text();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(series));
        lines.next().map_or(0, |rest| rest.trim().parse().unwrap())
    }

    /// Returns the samples without those of the agent.
    pub fn samples(&self) -> Vec<String> {
        let text = self.text();
        let samples = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let samples = samples.filter(|line| !line.starts_with("istio_agent_"));
        let mut samples: Vec<_> = samples.map(str::to_owned).collect();
        // pilot-agent writes Envoy's samples first, and this agent writes them last.
        samples.sort_by_key(|sample| sample.starts_with("envoy"));
        samples
    }

    pub fn ends(&self) -> usize {
        self.text().matches("# EOF").count()
    }

    /// Asserts that the page is complete, that no family is declared twice, and that it has the agent's samples.
    pub fn assert_readable(&self, what: &str) {
        assert_eq!(self.status, 200, "{what}");
        let text = self.text();
        assert!(text.ends_with('\n'), "{what}: no line feed at the end");
        let mut types = BTreeSet::new();
        for line in text.lines() {
            if let Some(family) = line.strip_prefix("# TYPE ") {
                let name = family.split(' ').next().unwrap();
                assert!(types.insert(name.to_owned()), "{what}: two families {name}");
            }
        }
        assert!(text.contains("\nistio_agent_scrapes_total "), "{what}: {text}");
    }
}
