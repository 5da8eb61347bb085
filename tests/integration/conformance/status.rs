//! Tests the status port over HTTP: paths, application probes and readiness.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::http::{Server, ask, ask_with, try_ask};
use crate::support::place::Place;
use crate::support::process::Process;
use crate::support::programs::is_this_agent;
use crate::support::{eventually, free_port, local, local_istiod, soon, until};

const CONFIGURED: &str =
    "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n";
const LIVE: &str = "server.state: 0\nlistener_manager.workers_started: 1\n";

/// Returns a place, and the scripted admin port of its Envoy with a sender for its statistics. The port hangs while
/// they are None.
async fn with_admin() -> (Place, watch::Sender<Option<String>>, Server) {
    let (says, heard) = watch::channel(Some(String::new()));
    let admin = Server::start(free_port(), move |path| {
        let stats = path.starts_with("/stats?usedonly&filter=");
        let said = heard.borrow().clone();
        said.map(|said| (200, String::new(), if stats { said } else { "OK".into() }))
    })
    .await;
    let place = Place::with_envoy(&local_istiod().await)
        .proxy("proxyAdminPort", json!(admin.port))
        .proxy("terminationDrainDuration", json!("2s"));
    (place, says, admin)
}

async fn started(place: &Place) -> Process {
    let agent = place.start_only();
    agent_answers(place).await;
    agent
}

async fn agent_answers(place: &Place) {
    let port = place.status_port();
    eventually("an answer", async || try_ask(port, "GET /nothing", "").await).await;
}

async fn wait_for_readiness(place: &Place, status: u16) {
    eventually(&format!("readiness {status}"), async || {
        let answer = ask(place.status_port(), "GET /healthz/ready").await;
        (answer.status == status).then_some(())
    })
    .await;
}

#[tokio::test]
async fn every_path_has_its_status_and_body() {
    let place = Place::of(&local_istiod().await);
    let _agent = started(&place).await;
    let port = place.status_port();
    wait_for_readiness(&place, 200).await;
    for (line, status, body) in [
        ("GET /healthz/ready", 200, Some("")),
        ("POST /healthz/ready", 200, Some("")),
        ("HEAD /healthz/ready", 200, Some("")),
        ("GET /stats/prometheus", 200, None),
        ("GET /stats/prometheus?usedonly", 200, None),
        ("GET /metrics", 200, None),
        ("GET /metrics?usedonly", 200, None),
        ("GET /metrics/agent", 200, None),
        ("GET /quitquitquit", 405, Some("Method Not Allowed\n")),
        ("PUT /drain", 405, Some("Method Not Allowed\n")),
        ("POST /drain", 200, Some("OK")),
        ("GET /healthz/ready", 200, Some("")),
        (
            "GET /app-health/cart/livez",
            400,
            Some("app prober config does not exists for /app-health/cart/livez\n"),
        ),
        ("GET /app-lifecycle/cart/prestopz", 400, None),
        ("GET /bad-path-should-be-404", 404, Some("404 page not found\n")),
        ("GET /healthz/ready/", 404, None),
        ("GET /", 404, None),
        ("GET //healthz/ready", 307, None),
        ("GET /app-health", 307, None),
        ("GET /debug", 307, None),
        ("GET /debug/", 200, None),
        ("GET /debug/overview", 200, None),
    ] {
        let is_ours =
            ["POST /drain", "GET /metrics/agent"].contains(&line) || line.starts_with("GET /debug");
        if is_ours && !is_this_agent(line) {
            continue;
        }
        let answer = ask(port, line).await;
        assert_eq!(answer.status, status, "{line}: {answer:?}");
        if let Some(body) = body {
            assert_eq!(answer.body, body, "{line}");
        }
    }
    let missing = ask(port, "GET /nothing").await;
    assert!(missing.head.contains("x-content-type-options: nosniff"));
    assert!(missing.head.contains("content-type: text/plain; charset=utf-8"));
    let moved = ask(port, "GET //healthz/ready?y").await;
    let location = "\r\nlocation: /healthz/ready?y\r\n";
    assert!(moved.head.contains(location), "{moved:?}");
    if is_this_agent("GET /drain and the overview") {
        let drain = ask(port, "GET /drain").await;
        let drain: Value = serde_json::from_str(&drain.body).unwrap();
        assert_eq!(drain["asked"], "run");
        let overview = ask(port, "GET /debug/overview").await;
        let overview: Value = serde_json::from_str(&overview.body).unwrap();
        assert_eq!(overview["ready"], true);
        assert!(overview["envoy"].is_null(), "{overview}");
        let milestones = overview["start_up"].as_array().unwrap();
        let named = |name: &str| milestones.iter().any(|each| each["milestone"] == name);
        assert!(named("sockets bound") && named("ready"), "{milestones:?}");
        let page = ask(port, "GET /debug/").await;
        assert!(page.body.starts_with("<!DOCTYPE html>"), "{page:?}");
    }
}

#[tokio::test]
async fn quitquitquit_is_answered_and_ends_the_agent_with_or_without_envoy() {
    let without = Place::of(&local_istiod().await);
    let (with, says, _admin) = with_admin().await;
    says.send_replace(Some(format!("{CONFIGURED}{LIVE}")));
    let mut places = vec![with];
    if is_this_agent("an end without Envoy") {
        places.push(without);
    }
    for place in places {
        let agent = started(&place).await;
        wait_for_readiness(&place, 200).await;
        let answer = ask(place.status_port(), "POST /quitquitquit").await;
        assert_eq!((answer.status, answer.body.as_str()), (200, "OK"));
        let (code, log) = agent.ends().await;
        assert_eq!(code, 0, "{log}");
        assert!(try_ask(place.status_port(), "GET /metrics", "").await.is_none());
    }
}

#[tokio::test]
async fn an_unready_pod_names_the_reason_until_it_is_ready() {
    if !is_this_agent("a body that says what is missing") {
        return;
    }
    let (place, says, admin) = with_admin().await;
    let agent = started(&place).await;
    let port = place.status_port();
    for (stats, expected) in [
        (String::new(), "config not received from XDS server (is Istiod running?)"),
        (
            "cluster_manager.cds.update_success: 1\n".to_owned(),
            "config not fully received from XDS server: cds updates: 1 successful, 0 rejected",
        ),
        (
            "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_rejected: 2\n"
                .to_owned(),
            "config received from XDS server, but was rejected",
        ),
        (CONFIGURED.to_owned(), "server.state is not yet updated"),
        (
            format!("{CONFIGURED}server.state: 0\n"),
            "listener_manager.workers_started is not yet updated",
        ),
        (
            format!("{CONFIGURED}server.state: 2\nlistener_manager.workers_started: 1\n"),
            "server is not live, current state is: PRE_INITIALIZING",
        ),
        (
            format!("{CONFIGURED}server.state: 0\nlistener_manager.workers_started: 0\n"),
            "workers have not yet started",
        ),
    ] {
        says.send_replace(Some(stats));
        eventually(expected, async || {
            let answer = ask(port, "GET /healthz/ready").await;
            assert_eq!(answer.status, 503);
            answer.body.contains(expected).then_some(())
        })
        .await;
    }
    says.send_replace(Some(format!("{CONFIGURED}{LIVE}")));
    wait_for_readiness(&place, 200).await;
    agent.logs("Envoy proxy is NOT ready: config not").await;
    agent.logs("Envoy proxy is ready").await;
    agent.logs("Readiness succeeded in").await;
    let page = ask(port, "GET /metrics").await.body;
    assert!(page.contains("\nistio_agent_startup_duration_seconds "), "{page}");

    // The agent does not ask an Envoy again that was ready once.
    says.send_replace(None);
    let asked = admin.requests.borrow().len();
    for _ in 0..3 {
        assert_eq!(ask(port, "GET /healthz/ready").await.status, 200);
    }
    assert_eq!(admin.requests.borrow().len(), asked);
}

#[tokio::test]
async fn a_terminating_agent_keeps_its_port_and_is_not_ready() {
    if !is_this_agent("a port that stays to the end") {
        return;
    }
    let (place, says, _admin) = with_admin().await;
    says.send_replace(Some(format!("{CONFIGURED}{LIVE}")));
    let agent = started(&place).await;
    wait_for_readiness(&place, 200).await;
    agent.terminate();
    wait_for_readiness(&place, 503).await;
    let answer = ask(place.status_port(), "GET /healthz/ready").await;
    assert_eq!(answer.body, "server is terminated: received signal: terminated\n");
    assert_eq!(ask(place.status_port(), "GET /metrics").await.status, 200);
    let drain = ask(place.status_port(), "GET /drain").await;
    let drain: Value = serde_json::from_str(&drain.body).unwrap();
    assert_eq!(drain["asked"], "drain");
    let plan = &drain["envoy"]["ending"]["plan"];
    let drain_time = &plan[1]["at_most_seconds"];
    let last_requests = &plan[2]["at_most_seconds"];
    assert_eq!(drain_time.as_f64().zip(last_requests.as_f64()), Some((1.5, 0.5)));
    let (code, log) = agent.ends().await;
    assert_eq!(code, 0, "{log}");
}

#[tokio::test]
async fn a_hung_admin_port_makes_the_pod_unready_without_delaying_answers() {
    if !is_this_agent("one question for a whole crowd") {
        return;
    }
    let (place, says, admin) = with_admin().await;
    says.send_replace(None);
    let agent = started(&place).await;
    let port = place.status_port();
    let mut crowd = JoinSet::new();
    for _ in 0..20 {
        crowd.spawn(async move { ask(port, "GET /healthz/ready").await });
    }
    for answer in crowd.join_all().await {
        assert_eq!(answer.status, 503);
    }
    // Other requests are answered although the admin port hangs.
    assert_eq!(ask(port, "GET /metrics").await.status, 200);
    assert!(admin.requests.borrow().len() < 20);
    assert!(agent.is_running());
    says.send_replace(Some(format!("{CONFIGURED}{LIVE}")));
    wait_for_readiness(&place, 200).await;
}

#[tokio::test]
async fn drain_drains_envoy_and_does_not_change_readiness() {
    let (place, says, admin) = with_admin().await;
    says.send_replace(Some(format!("{CONFIGURED}{LIVE}")));
    let _agent = started(&place).await;
    wait_for_readiness(&place, 200).await;
    let answer = ask(place.status_port(), "POST /drain").await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "OK"));
    let requests = admin.requests.borrow().clone();
    let drains = requests.iter().filter(|request| request.starts_with("POST /drain_listeners?"));
    assert_eq!(drains.count(), 1, "{requests:?}");
    assert_eq!(ask(place.status_port(), "GET /healthz/ready").await.status, 200);
    if is_this_agent("/debug/envoy") {
        let report = ask(place.status_port(), "GET /debug/envoy").await;
        let report: Value = serde_json::from_str(&report.body).unwrap();
        assert!(report["state"].is_string(), "{report}");
    }
}

#[tokio::test]
async fn a_status_port_in_use_ends_the_agent_before_envoy_starts() {
    if !is_this_agent("an end without a port") {
        return;
    }
    let place = Place::with_envoy(&local_istiod().await);
    let other = std::net::TcpListener::bind(("0.0.0.0", place.status_port())).unwrap();
    let (code, log) = place.ends().await;
    assert_eq!(code, 255, "{log}");
    let expected = format!("status port {}", place.status_port());
    assert!(log.contains(&expected) && log.contains("[STATUS_PORT_TAKEN]"), "{log}");
    assert!(!place.path("etc/istio/proxy/arguments").exists());
    drop(other);
}

#[tokio::test]
async fn an_annotation_disables_the_port() {
    let place = Place::of(&local_istiod().await);
    let annotation = "status.sidecar.istio.io/port=\"0\"\n";
    place.write("etc/istio/pod/annotations", annotation);
    let _agent = place.start().await;
    assert!(try_ask(place.status_port(), "GET /metrics", "").await.is_none());
}

#[tokio::test]
async fn invalid_probers_end_the_agent_with_every_problem() {
    let istiod = local_istiod().await;
    for (probers, expected) in [
        ("invalid-prober", "failed to decode"),
        (r#"{"/app-health/a/other": {}}"#, "invalid path"),
        (
            r#"{"/app-health/a/livez": {"httpGet": null}}"#,
            "invalid prober type, must be one of type httpGet, tcpSocket or gRPC",
        ),
        (
            r#"{"/app-health/a/livez": {"exec": {}}}"#,
            "invalid prober type, must be one of type httpGet, tcpSocket or gRPC",
        ),
        (r#"{"/app-health/a/livez": {"httpGet": {"port": "http"}}}"#, "the port must be int type"),
    ] {
        let place = Place::of(&istiod).set("ISTIO_KUBE_APP_PROBERS", probers);
        let (code, log) = place.ends().await;
        assert_eq!(code, 255, "{log}");
        assert!(log.contains(expected), "{expected} is not in {log}");
    }
}

#[tokio::test]
async fn answers_of_the_application_are_passed_back() {
    let app = Server::start(free_port(), |path| {
        let to = |location: &str| Some((302, format!("location: {location}\r\n"), String::new()));
        match path {
            "/hello/sunnyvale" => Some((200, String::new(), "welcome".into())),
            "/redirect" => to("/hello/sunnyvale"),
            "/redirect-loop" => to("/redirect-loop"),
            "/redirect-away" => to("http://example.com/"),
            "/hang" => None,
            status => {
                let status = status.trim_start_matches('/').parse().unwrap_or(404);
                Some((status, String::new(), String::new()))
            }
        }
    })
    .await;
    let closed = free_port();
    let http = |path: &str, port: u16| {
        let header = json!([{ "name": "x-never", "value": "added" }]);
        let get = json!({ "path": path, "port": port, "httpHeaders": header });
        json!({ "httpGet": get, "timeoutSeconds": 5 })
    };
    let probers = json!({
        "/app-health/hello/livez": http("hello/sunnyvale", app.port),
        "/app-health/redirect/livez": http("/redirect", app.port),
        "/app-health/loop/livez": http("/redirect-loop", app.port),
        "/app-health/away/livez": http("/redirect-away", app.port),
        "/app-health/s304/livez": http("/304", app.port),
        "/app-health/s418/readyz": http("/418", app.port),
        "/app-health/s503/startupz": http("/503", app.port),
        "/app-lifecycle/hello/prestopz": http("/hello/sunnyvale", app.port),
        "/app-health/closed/livez": http("/", closed),
        "/app-health/hang/livez": { "httpGet": { "path": "/hang", "port": app.port } },
        "/app-health/tcp/livez": { "tcpSocket": { "port": app.port } },
        "/app-health/tcp/readyz": { "tcpSocket": { "port": closed } },
        "/app-health/grpc/livez": { "gRPC": { "port": closed, "service": null } },
    });
    let place = Place::of(&local_istiod().await)
        .set("INSTANCE_IP", "127.0.0.1")
        .set("ISTIO_KUBE_APP_PROBERS", &probers.to_string());
    let _agent = started(&place).await;
    for (path, status, body) in [
        ("/app-health/hello/livez", 200, "welcome"),
        ("/app-health/redirect/livez", 200, "welcome"),
        ("/app-health/loop/livez", 500, ""),
        ("/app-health/away/livez", 200, ""),
        ("/app-health/s304/livez", 200, ""),
        ("/app-health/s418/readyz", 418, ""),
        ("/app-health/s503/startupz", 503, ""),
        ("/app-lifecycle/hello/prestopz", 200, "welcome"),
        ("/app-health/closed/livez", 500, ""),
        ("/app-health/hang/livez", 500, ""),
        ("/app-health/tcp/livez", 200, ""),
        ("/app-health/tcp/readyz", 500, ""),
        ("/app-health/grpc/livez", 500, ""),
    ] {
        let answer = ask(place.status_port(), &format!("GET {path}")).await;
        assert_eq!((answer.status, answer.body.as_str()), (status, body), "{path}");
    }
    let before = app.requests.borrow().len();
    let headers = "x-twice: 1\r\nx-twice: 2\r\nuser-agent: kube-probe/1.30\r\n";
    ask_with(place.status_port(), "GET /app-health/hello/livez?q", headers).await;
    let request = app.requests.borrow()[before].to_ascii_lowercase();
    assert!(request.starts_with("get /hello/sunnyvale http/1.1\r\n"), "{request}");
    for line in [
        "x-twice: 1\r\nx-twice: 2\r\n".to_owned(),
        "user-agent: kube-probe/1.30\r\n".to_owned(),
        format!("host: localhost:{}\r\n", app.port),
        "connection: close\r\n".to_owned(),
    ] {
        assert!(request.contains(&line), "{line} is not in {request}");
    }
    assert!(!request.contains("x-never"), "{request}");
}

#[tokio::test]
async fn a_flood_of_idle_connections_does_not_lock_out_the_kubelet() {
    if !is_this_agent("a bound on connections") {
        return;
    }
    let place = Place::of(&local_istiod().await);
    let agent = started(&place).await;
    agent.limit_open_files(400);
    let address = local(place.status_port());
    let mut flood = Vec::new();
    for _ in 0..600 {
        flood.push(soon(TcpStream::connect(address)).await.unwrap());
    }
    assert_eq!(ask(place.status_port(), "GET /metrics").await.status, 200);
    let mut closed = 0;
    for stream in &mut flood {
        let mut byte = [0; 1];
        closed += usize::from(stream.try_read(&mut byte).is_ok());
    }
    assert!(closed >= 300, "{closed} of 600 have been closed");
    let mut endless = TcpStream::connect(address).await.unwrap();
    endless.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let line = [b'x'; 1024];
    while endless.write_all(&line).await.is_ok() {}
    let mut rest = Vec::new();
    let _ = endless.read_to_end(&mut rest).await; // The connection may have been reset.
    until("an agent that runs", || agent.is_running()).await;
    assert_eq!(ask(place.status_port(), "GET /metrics").await.status, 200);
}

/// Raises the limit of open files of this process to the maximum, and returns the limit.
fn most_descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    // If this fails, the present limit is enough for a smaller flood.
    let _ = setrlimit(Resource::Nofile, raised);
    let current = getrlimit(Resource::Nofile).current;
    current.map_or(usize::MAX, |most| usize::try_from(most).unwrap())
}

#[tokio::test]
async fn ten_thousand_idle_connections_cost_little_memory() {
    if !is_this_agent("a bound on connections") {
        return;
    }
    let place = Place::of(&local_istiod().await);
    let agent = started(&place).await;
    let port = place.status_port();
    ask(port, "GET /metrics").await;
    let before = agent.memory("VmRSS");
    let wanted = 10_000.min(most_descriptors().saturating_sub(1000));
    let mut flood = Vec::new();
    for number in 1..=wanted {
        flood.push(soon(TcpStream::connect(local(port))).await.unwrap());
        if number % 1000 == 0 {
            let begin = Instant::now();
            assert_eq!(ask(port, "GET /metrics").await.status, 200);
            let took = begin.elapsed();
            assert!(took < Duration::from_secs(1), "{took:?} among {number}");
        }
    }
    let grown = agent.memory("VmRSS").saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB more for {wanted} connections");
    let held = agent.open_files();
    assert!(held < 400, "{held} of {wanted} connections are held");
}

#[tokio::test]
async fn clients_that_send_slowly_do_not_lock_out_the_kubelet() {
    if !is_this_agent("late heads") {
        return;
    }
    let place = Place::of(&local_istiod().await);
    let _agent = started(&place).await;
    let port = place.status_port();
    let mut crowd = JoinSet::new();
    let begin = Instant::now();
    for _ in 0..200 {
        crowd.spawn(async move {
            let mut stream = TcpStream::connect(local(port)).await.unwrap();
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nx: ").await; // The loop below notices the end.
            while stream.write_all(b"y").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
    }
    while !crowd.is_empty() {
        let asked = Instant::now();
        assert_eq!(ask(port, "GET /metrics").await.status, 200);
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(20), "{} are still there", crowd.len());
        while crowd.try_join_next().is_some() {}
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_head_over_the_limit_is_refused_and_others_are_not() {
    let place = Place::of(&local_istiod().await);
    let _agent = started(&place).await;
    let port = place.status_port();
    let header = |length| format!("x: {}\r\n", "y".repeat(length));
    let answer = ask_with(port, "GET /metrics", &header(32 << 10)).await;
    assert_eq!(answer.status, 200);
    // The refusal may be lost because the client is still sending the rest of the head when the agent closes the
    // connection.
    let refused = try_ask(port, "GET /metrics", &header(2 << 20)).await;
    assert!(refused.is_none_or(|answer| answer.status == 431));
    assert_eq!(ask(port, "GET /metrics").await.status, 200);
}
