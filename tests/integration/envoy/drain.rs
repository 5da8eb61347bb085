//! Tests that no response to a request that Envoy has accepted is lost, whenever the agent is asked to stop.
//!
//! Clients of several kinds send requests to an inbound listener: short and long requests, on new and on
//! reused connections. Every request has a number, which Envoy's access log repeats, so that the responses
//! that the clients got can be compared with the lines of the log. The environment variable `RUNS` sets the
//! number of runs; by default there are a few.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use crate::support::control_plane::ControlPlane;
use crate::support::http::{Backend, connect, get, read_head};
use crate::support::namespace;
use crate::support::pod::{Pod, Settings};
use crate::support::process::{is_alive, running_in};
use crate::support::programs::{envoy_binary, variable};
use crate::support::resources::{answering, cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port};

const RUNS: usize = 6;
/// The number of agents at a time.
const TOGETHER: usize = 3;
const DRAIN: Duration = Duration::from_secs(2);
/// The tolerance for the end of an agent on a busy machine.
const LATE: Duration = Duration::from_secs(3);

/// A kind of client. `takes` is the shortest and the longest time of its requests, and `pause` is the time
/// between two requests, all in milliseconds.
#[derive(Clone, Copy)]
struct Kind {
    takes: (u64, u64),
    pause: u64,
    keeps_connection: bool,
}

const CLIENTS: [Kind; 8] = [
    // Short requests, on a new connection each or on a reused connection.
    Kind { takes: (0, 5), pause: 3, keeps_connection: false },
    Kind { takes: (0, 5), pause: 3, keeps_connection: true },
    Kind { takes: (0, 50), pause: 10, keeps_connection: true },
    // Long requests.
    Kind { takes: (100, 450), pause: 5, keeps_connection: false },
    Kind { takes: (100, 450), pause: 5, keeps_connection: true },
    Kind { takes: (200, 1500), pause: 5, keeps_connection: true },
    // Requests that take longer than the drain.
    Kind { takes: (2000, 4000), pause: 5, keeps_connection: false },
    // A client that is mostly idle.
    Kind { takes: (0, 5), pause: 600, keeps_connection: true },
];

#[derive(Debug, Default)]
struct Figures {
    runs: usize,
    complete: usize,
    /// Complete responses that ended after the drain.
    outlasted: usize,
    /// Requests that Envoy never accepted.
    not_accepted: usize,
    /// The longest time from the signal to the end of an agent.
    longest: Duration,
    announced: Duration,
}

/// The result of a request.
#[derive(Clone, Debug)]
struct Outcome {
    number: u64,
    sent: Instant,
    takes: Duration,
    /// The error of the request, or the wrong response; None after a complete response.
    wrong: Option<String>,
}

#[tokio::test]
async fn no_response_to_an_accepted_request_is_lost_in_a_drain() {
    let Some(binary) = envoy_binary() else { return };
    let runs = variable("RUNS").map_or(RUNS, |runs| runs.to_str().unwrap().parse().unwrap());
    let mut figures = Figures::default();
    let (local, mut running) = (LocalSet::new(), JoinSet::new());
    let mut started = 0;
    while figures.runs < runs {
        while started < runs && running.len() < TOGETHER {
            let binary = binary.clone();
            running.spawn_local_on(async move { run(&binary).await }, &local);
            started += 1;
        }
        let run = local.run_until(running.join_next()).await.unwrap().unwrap();
        figures.runs += 1;
        figures.complete += run.complete;
        figures.outlasted += run.outlasted;
        figures.not_accepted += run.not_accepted;
        figures.longest = figures.longest.max(run.longest);
        figures.announced = run.announced;
    }
    eprintln!("{figures:?}");
    assert!(figures.outlasted > 0, "no request was longer than its drain");
}

/// Checks what the agent logs about a connection or a request that is open when the drain ends.
#[tokio::test]
async fn an_open_stream_delays_envoys_exit_and_an_idle_connection_does_not() {
    let Some(binary) = envoy_binary() else { return };
    for (open, expected) in [
        ("idle", "Envoy has no active requests left"),
        ("request", "Envoy still has 1 active requests"),
        ("bytes", "Envoy still has 1 active requests"),
    ] {
        let (application, http, bytes) =
            (Backend::serving(answer_all).await, free_port(), free_port());
        let control_plane = ControlPlane::of(&[
            cluster("books"),
            endpoints("books", &[application.port]),
            listener("plain", http, "all"),
            tcp_listener("bytes", bytes, "books"),
            routes("all", "books", "0"),
        ])
        .await;
        let settings = Settings {
            envoy: Some(&binary),
            environment: &[("ISTIO_AGENT_LAST_REQUESTS", "500ms")],
        };
        let mut pod = Pod::draining_for("router", "1s", settings, &control_plane);
        pod.serves().await;
        for port in [http, bytes] {
            eventually("a route in force", async || get(port).await.ok()).await;
        }
        let port = if open == "bytes" { bytes } else { http };
        let mut stream = connect(port).await.unwrap();
        answer(&mut stream, "/0/0").await.unwrap();
        if open == "request" {
            let request = b"GET /3600000/0 HTTP/1.1\r\nhost: cart\r\n\r\n";
            stream.write_all(request).await.unwrap();
        }
        pod.agent.signal(Signal::TERM);
        let status = pod.agent.end().await;
        assert_eq!(status.code(), Some(0), "{open}: {status}");
        let log = pod.agent.log();
        assert!(log.contains("long_requests 500ms"), "{open}: {log}");
        for words in ["Envoy has no active requests left", "Envoy still has"] {
            assert_eq!(log.contains(words), expected.contains(words), "{open}: {log}");
        }
    }
}

/// The value of the metric of calls that ask Envoy to drain.
async fn drain_calls(pod: &Pod) -> Option<u64> {
    let metrics = pod.status(Method::GET, "/metrics/agent").await?;
    let mut lines = metrics.lines();
    // It appears with its first value.
    let value = lines.find_map(|line| line.strip_prefix("istio_agent_envoy_drains_total "));
    value.map_or(Some(0), |value| value.parse().ok())
}

/// Starts a pod whose agent knows that Envoy is live: before that, a drain has no delay.
async fn ready(settings: Settings<'_>, control_plane: &ControlPlane) -> Pod {
    let pod = Pod::serving(settings, control_plane).await;
    let is_ready = async || pod.status(Method::GET, "/healthz/ready").await;
    eventually("the pod is ready", is_ready).await;
    eventually("Envoy runs", async || {
        let report = pod.status(Method::GET, "/debug/envoy").await?;
        report.contains("\"state\":\"running\"").then_some(())
    })
    .await;
    pod
}

#[tokio::test]
async fn envoy_accepts_connections_during_the_delay_before_the_drain_of_a_hook() {
    let Some(binary) = envoy_binary() else { return };
    let port = free_port();
    let control_plane = ControlPlane::of(&[answering("all", port)]).await;
    let environment =
        [("ISTIO_AGENT_DRAIN_DELAY", "3s"), ("TERMINATION_GRACE_PERIOD_SECONDS", "60")];
    let settings = Settings { envoy: Some(&binary), environment: &environment };
    let mut pod = ready(settings, &control_plane).await;
    // The hook returns at once, and a second one does not begin the delay again.
    for _ in 0..2 {
        pod.status(Method::POST, "/drain").await.unwrap();
        assert_eq!(drain_calls(&pod).await, Some(0));
        let head = get(port).await.unwrap().to_ascii_lowercase();
        assert!(!head.contains("connection: close"), "{head}");
    }
    eventually("the drain", async || (drain_calls(&pod).await? == 1).then_some(())).await;
    pod.agent.signal(Signal::TERM);
    assert!(pod.agent.end().await.success());
    let log = pod.agent.log();
    assert_eq!(log.matches("Envoy accepts connections for 3.0 s more").count(), 1, "{log}");
    assert_eq!(log.matches("Agent draining Proxy").count(), 0, "{log}");
}

#[tokio::test]
async fn a_signal_after_the_hook_awaits_the_delay_and_quitquitquit_does_not() {
    let Some(binary) = envoy_binary() else { return };
    let control_plane = ControlPlane::of(&[]).await;
    let environment =
        [("ISTIO_AGENT_DRAIN_DELAY", "2s"), ("TERMINATION_GRACE_PERIOD_SECONDS", "60")];
    let settings = Settings { envoy: Some(&binary), environment: &environment };
    let mut pod = ready(settings, &control_plane).await;
    pod.status(Method::POST, "/drain").await.unwrap();
    pod.agent.signal(Signal::TERM);
    assert!(pod.agent.end().await.success());
    let log = pod.agent.log();
    let (delay, drain) = (log.find("for 2.0 s more"), log.find("Agent draining Proxy"));
    assert!(delay.is_some() && delay < drain, "{log}");
    assert_eq!(log.matches("for 2.0 s more").count(), 1, "{log}");
    let mut pod = ready(settings, &control_plane).await;
    pod.status(Method::POST, "/quitquitquit").await.unwrap();
    assert!(pod.agent.end().await.success());
    assert!(!pod.agent.log().contains("for 2.0 s more"));
}

#[tokio::test]
async fn the_delay_before_the_drain_ends_with_the_application() {
    if !namespace::is_inside("drain::the_delay_before_the_drain_ends_with_the_application") {
        return;
    }
    let Some(binary) = envoy_binary() else { return };
    // This process is the application as long as its control plane listens.
    let control_plane = ControlPlane::of(&[]).await;
    let environment =
        [("ISTIO_AGENT_DRAIN_DELAY", "1h"), ("TERMINATION_GRACE_PERIOD_SECONDS", "7200")];
    let settings = Settings { envoy: Some(&binary), environment: &environment };
    let mut pod = ready(settings, &control_plane).await;
    pod.agent.signal(Signal::TERM);
    pod.agent.logs("for 1 h more").await;
    assert!(!pod.agent.log().contains("no application listens"));
    let _dead = control_plane.kill().await;
    pod.agent.logs("no application listens in this pod any more").await;
    assert!(pod.agent.end().await.success());
}

/// Returns a listener that forwards connections to the cluster without parsing their bytes.
fn tcp_listener(name: &str, port: u16, cluster: &str) -> Value {
    let mut listener = listener(name, port, "");
    listener["filter_chains"] = json!([{ "filters": [{
        "name": "envoy.filters.network.tcp_proxy",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
            "stat_prefix": name,
            "cluster": cluster,
        },
    }]}]);
    listener
}

async fn run(binary: &Path) -> Figures {
    let (application, port) = (Backend::serving(answer_all).await, free_port());
    let control_plane = ControlPlane::of(&[
        cluster("books"),
        endpoints("books", &[application.port]),
        logged(listener("plain", port, "all")),
        routes("all", "books", "0"),
    ])
    .await;
    let settings = Settings { envoy: Some(binary), environment: &[] };
    let mut pod = Pod::draining_for("sidecar", "2s", settings, &control_plane);
    pod.serves().await;
    eventually("a route in force", async || get(port).await.ok()).await;
    let envoy = pod.envoy_pid().unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let numbers = Arc::new(AtomicU64::new(1));
    let mut clients = JoinSet::new();
    for kind in CLIENTS {
        clients.spawn(Client::new(kind, port, &numbers).run(is_over.clone()));
    }
    tokio::time::sleep(Duration::from_millis(fastrand::u64(300..1500))).await;
    let asked = Instant::now();
    is_over.store(true, Ordering::Relaxed);
    pod.agent.signal(Signal::TERM);
    let status = pod.agent.end().await;
    let took = asked.elapsed();
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(!is_alive(envoy));
    let left = running_in(&pod.path(""));
    assert!(left.is_empty(), "{left:?} are left");
    let announced = announced(&pod.agent.log());
    assert!(took <= announced, "{took:?}, announced were {announced:?}");
    let longest =
        DRAIN + Duration::from_millis(CLIENTS.map(|kind| kind.takes.1).into_iter().max().unwrap());
    assert!(took >= DRAIN && took <= longest + LATE, "{took:?}");
    let outcomes = clients.join_all().await.concat();
    let log = std::fs::read_to_string(pod.path("access.log")).unwrap();
    let figures = judge(&outcomes, &log, asked);
    Figures { longest: took, announced, ..figures }
}

/// Compares the results of the clients with the lines of Envoy's access log.
fn judge(outcomes: &[Outcome], log: &str, asked: Instant) -> Figures {
    let mut served: BTreeMap<u64, &str> = BTreeMap::new();
    for line in log.lines() {
        let (path, how) = line.split_once(' ').unwrap();
        // The requests that only waited for the route have no number.
        if let Ok(number) = path.rsplit('/').next().unwrap().parse() {
            let other = served.insert(number, how);
            assert_eq!(other, None, "two lines of one request: {line}");
        }
    }
    let mut figures = Figures::default();
    for outcome in outcomes {
        let line = served.remove(&outcome.number);
        match (&outcome.wrong, line) {
            (None, line) => {
                assert_eq!(line, Some("200 -"), "the line of {outcome:?}");
                let end = outcome.sent + outcome.takes;
                figures.outlasted += usize::from(end > asked + DRAIN);
                figures.complete += 1;
            }
            (Some(_), None) => figures.not_accepted += 1,
            (Some(_), Some(line)) => {
                let sent = outcome.sent.duration_since(asked);
                panic!("sent {sent:?} after the signal and lost: {outcome:?}, {line}");
            }
        }
    }
    assert!(served.is_empty(), "Envoy served requests no client sent: {served:?}");
    assert!(figures.complete > 0);
    figures
}

/// Returns the limit of the shutdown, from the log line that announces its steps.
fn announced(log: &str) -> Duration {
    let line = log.lines().find(|line| line.contains("in total")).unwrap();
    let (_, bound) = line.split_once("in total ").unwrap();
    let seconds = bound.split_once("s at most").unwrap().0;
    Duration::from_secs_f64(seconds.parse().unwrap())
}

fn logged(mut listener: Value) -> Value {
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    manager["access_log"] = json!([{
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": "access.log",
            "log_format": { "text_format_source": {
                "inline_string": "%REQ(:PATH)% %RESPONSE_CODE% %RESPONSE_FLAGS%\n",
            }},
        },
    }]);
    listener
}

/// Answers requests with the path `/<milliseconds>/<number>`. A response takes this number of milliseconds
/// and begins after half of them.
async fn answer_all(mut stream: TcpStream) {
    while let Ok(head) = read_head(&mut stream).await {
        let path = head.split(' ').nth(1).unwrap_or_default();
        let takes = path.split('/').nth(1).and_then(|text| text.parse().ok());
        let half = Duration::from_millis(takes.unwrap_or(0)) / 2;
        tokio::time::sleep(half).await;
        let begin = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nwh";
        if stream.write_all(begin).await.is_err() {
            return;
        }
        tokio::time::sleep(half).await;
        if stream.write_all(b"ol").await.is_err() {
            return;
        }
    }
}

struct Client {
    kind: Kind,
    port: u16,
    numbers: Arc<AtomicU64>,
    kept: Option<TcpStream>,
}

impl Client {
    fn new(kind: Kind, port: u16, numbers: &Arc<AtomicU64>) -> Self {
        Self { kind, port, numbers: Arc::clone(numbers), kept: None }
    }

    /// Sends requests until the port is closed, which must not happen before the agent was asked to stop.
    async fn run(mut self, is_over: Arc<AtomicBool>) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        loop {
            let was_over = is_over.load(Ordering::Relaxed);
            let stream = match self.kept.take() {
                Some(stream) => stream,
                None => match connect(self.port).await {
                    Ok(stream) => stream,
                    Err(error) => {
                        assert!(was_over, "before the signal: {error}");
                        return outcomes;
                    }
                },
            };
            let outcome = self.ask(stream).await;
            let is_lost = outcome.wrong.is_some();
            assert!(was_over || is_over.load(Ordering::Relaxed) || !is_lost, "{outcome:?}");
            outcomes.push(outcome);
            tokio::time::sleep(Duration::from_millis(self.kind.pause)).await;
        }
    }

    async fn ask(&mut self, mut stream: TcpStream) -> Outcome {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let (least, most) = self.kind.takes;
        let takes = fastrand::u64(least..=most);
        let path = format!("/{takes}/{number}");
        let sent = Instant::now();
        let answer = answer(&mut stream, &path).await;
        let wrong = match answer {
            Ok(closes) => {
                self.kept = (self.kind.keeps_connection && !closes).then_some(stream);
                None
            }
            Err(wrong) => Some(wrong),
        };
        Outcome { number, sent, takes: Duration::from_millis(takes), wrong }
    }
}

/// Sends a request and reads its response. Returns true if the response is complete and Envoy closes the
/// connection after it; fails if the response is wrong or incomplete.
async fn answer(stream: &mut TcpStream, path: &str) -> Result<bool, String> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: cart\r\n\r\n");
    let failed = |error: std::io::Error| error.to_string();
    stream.write_all(request.as_bytes()).await.map_err(failed)?;
    let head = read_head(stream).await.map_err(failed)?;
    let mut body = [0; 4];
    stream.read_exact(&mut body).await.map_err(failed)?;
    if head.starts_with("HTTP/1.1 200") && body == *b"whol" {
        Ok(head.contains("connection: close"))
    } else {
        Err(head)
    }
}
