//! Tests every path of the status port with its methods and callers.

use http_body_util::BodyExt;
use serde_json::Value;

use super::*;
use crate::runtime::lifecycle::Urgency;

const HERE: &str = "127.0.0.1:1";
const THERE: &str = "10.0.0.1:1";

fn merged_metrics() -> Scrape {
    Arc::new(|_| Box::pin(async { plain(StatusCode::OK, "merged 1\n") }))
}

/// Opens a listener for the status port on a free port. Returns the listener and the port.
pub(super) fn any_port() -> (tokio::net::TcpListener, u16) {
    let listener = bind(0).expect("a port");
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    (listener, port)
}

/// Returns a scrape that has only the metrics of the agent itself.
pub(super) fn own_metrics(metrics: Registry) -> Scrape {
    Arc::new(move |_| {
        let metrics = metrics.clone();
        Box::pin(async move { reply::metrics(&metrics) })
    })
}

/// Returns the sources of an agent without Envoy, secrets and DNS, whose istiod is unreachable.
pub(super) fn sources(stop: Stop, scrape: Scrape, metrics: Registry) -> Sources {
    let istiod = crate::istiod::fake::plaintext("127.0.0.1:1");
    let (istiod, _) = crate::istiod::new(istiod, &metrics, CancellationToken::new());
    Sources {
        node: "node".to_owned(),
        istio_version: "1.31.0".to_owned(),
        milestones: Milestones::start(),
        stop,
        hand_over: Arc::new(|| Err("this pod has no standby")),
        envoy: None,
        istiod,
        secrets: None,
        rejections: Rejections::default(),
        discovery: Observer::new(&metrics, None),
        dns: None,
        health: None,
        wasm: None,
        metrics,
        scrape,
        doctor: Arc::new(|_| Box::pin(async { Report::default() })),
        pages: BTreeMap::new(),
    }
}

pub(super) fn config(probers: Probers) -> Config {
    Config {
        has_control: true,
        readiness_query: Duration::from_secs(3),
        port: 15020,
        metrics_localhost_only: false,
        application_host: "127.0.0.1".to_owned(),
        probers,
        probes: probe::Config {
            source: std::net::Ipv4Addr::LOCALHOST.into(),
            offers_http2: true,
            keeps_connections: false,
        },
        grpc_bootstrap: None,
        debug_users: Some(BTreeSet::new()),
        control_users: None,
    }
}

fn router(stop: &Stop, metrics_localhost_only: bool) -> Router {
    let metrics = Registry::default();
    metrics.counter("istio_agent_tests", "Tests.").inc();
    let probers = r#"{"/app-health/a/livez": {"tcpSocket": {"port": 1}}}"#;
    let config =
        Config { metrics_localhost_only, ..config(Probers::parse(probers).expect("probers")) };
    Router::new(config, sources(stop.clone(), merged_metrics(), metrics)).expect("a router")
}

async fn send_request(router: &Router, line: &str, from: &str) -> (u16, String, Response<()>) {
    let (method, path) = line.split_once(' ').expect("method and path");
    let request = Request::builder().method(method).uri(path);
    let request = request.body(()).expect("a request");
    let caller = Caller::of(from, Some(0));
    let (head, body) = router.answer(request, &caller).await.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    let text = String::from_utf8(body.to_vec()).expect("text");
    (head.status.as_u16(), text, Response::from_parts(head, ()))
}

#[tokio::test]
async fn each_path_has_its_methods_and_callers() {
    let router = router(&Stop::new(), false);
    let forbidden = "Only requests from localhost are allowed\n";
    let merged = "merged 1\n";
    let page = "# HELP istio_agent_tests Tests.\n# TYPE istio_agent_tests counter\n\
                istio_agent_tests 1\n";
    let discovery = r#"{"streams":0,"stream":null,"last_end":null,"types":{}}"#;
    for (line, from, status, body) in [
        ("GET /healthz/ready", THERE, 200, ""),
        ("POST /healthz/ready", THERE, 200, ""),
        ("GET /stats/prometheus?x", THERE, 200, merged),
        ("GET /metrics?x", THERE, 200, merged),
        ("GET /metrics/agent", THERE, 200, page),
        ("POST /quitquitquit", THERE, 403, forbidden),
        ("GET /quitquitquit", THERE, 403, forbidden),
        ("GET /quitquitquit", HERE, 405, "Method Not Allowed\n"),
        ("PUT /drain", HERE, 405, "Method Not Allowed\n"),
        ("POST /drain", THERE, 403, forbidden),
        ("POST /drain", HERE, 200, "OK"),
        ("POST /drain", "[::ffff:127.0.0.9]:1", 200, "OK"),
        ("POST /drain", "[::1]:1", 200, "OK"),
        ("POST /drain", "127.0.0.6:1", 403, forbidden),
        ("POST /drain", "[::ffff:127.0.0.6]:1", 403, forbidden),
        ("POST /drain", "[::6]:1", 403, forbidden),
        ("GET /debug/xdsz", "[::6]:1", 403, forbidden),
        ("GET /debug/xdsz", THERE, 403, forbidden),
        ("GET /debug/xdsz", HERE, 200, discovery),
        ("GET /debug/ndsz", HERE, 404, "{}"),
        ("GET /debug/envoy", HERE, 404, "{}"),
        ("GET /debug/log", THERE, 403, forbidden),
        ("GET /debug/x", HERE, 404, "404 page not found\n"),
        ("GET /debug/", THERE, 403, forbidden),
        ("GET /debug/overview", THERE, 403, forbidden),
        ("GET /debug", HERE, 307, "see /debug/\n"),
        ("GET /debug/pprof/", HERE, 404, "404 page not found\n"),
        ("GET /app-health/a/livez", THERE, 500, ""),
        (
            "GET /app-health/a/readyz",
            THERE,
            400,
            "app prober config does not exists for /app-health/a/readyz\n",
        ),
        ("GET /bad-path-should-be-disallowed", THERE, 404, "404 page not found\n"),
        ("GET /", THERE, 404, "404 page not found: see /debug/\n"),
    ] {
        let (found, text, _) = send_request(&router, line, from).await;
        assert_eq!((found, text.as_str()), (status, body), "{line} from {from}");
    }
}

#[tokio::test]
async fn metrics_can_be_restricted_to_loopback() {
    let router = router(&Stop::new(), true);
    for path in ["/metrics", "/metrics/agent", "/stats/prometheus"] {
        let path = &format!("GET {path}");
        assert_eq!(send_request(&router, path, THERE).await.0, 403);
        assert_eq!(send_request(&router, path, HERE).await.0, 200);
    }
}

#[tokio::test]
async fn the_overview_is_html_and_json_and_shows_readiness() {
    let router = router(&Stop::new(), false);
    let (status, json, _) = send_request(&router, "GET /debug/overview", HERE).await;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((status, &json["ready"]), (200, &json!(true)));
    assert_eq!(json["start_up"][0]["milestone"], "ready");
    let (status, html, _) = send_request(&router, "GET /debug/", HERE).await;
    assert_eq!(status, 200);
    let verdict = "<div class=\"verdict skipped\"><h2>ready: no problem found</h2>";
    assert!(html.contains(verdict), "{html}");
    let (_, held, _) = send_request(&router, "GET /debug/?hold", HERE).await;
    assert_ne!(html.contains("http-equiv"), held.contains("http-equiv"));
    assert_eq!(json["doctor"]["verdict"], "ready: no problem found");
}

#[tokio::test]
async fn the_doctors_report_has_the_type_that_the_caller_prefers() {
    let router = router(&Stop::new(), false);
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    for (accept, expected) in [
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        (browser, "text/html; charset=utf-8"),
        ("TEXT/HTML", "text/html; charset=utf-8"),
        ("text/plain", "text/plain; charset=utf-8"),
        ("text/plain, text/html;q=0.2", "text/plain; charset=utf-8"),
        ("application/json, text/html", "application/json"),
        ("image/png", "application/json"),
        (";;,q=x,", "application/json"),
    ] {
        let request = Request::get("/debug/doctor").header("accept", accept);
        let request = request.body(()).expect("a request");
        let caller = Caller::of(HERE, Some(0));
        let answer = router.answer(request, &caller).await;
        assert_eq!(answer.headers()["content-type"], expected, "{accept}");
        let body = answer.into_body().collect().await.expect("a body").to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        assert!(text.contains("ready: no problem found"), "{text}");
    }
    let (_, json, _) = send_request(&router, "GET /debug/doctor", HERE).await;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["verdict"], "ready: no problem found");
}

#[tokio::test]
async fn a_pod_unready_for_an_unknown_reason_is_an_error() {
    let stop = Stop::new();
    let router = router(&stop, false);
    stop.request(Urgency::Drain, "a test");
    let (_, json, _) = send_request(&router, "GET /debug/doctor", HERE).await;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["level"], "error");
    assert_eq!(json["groups"][0]["checks"][0]["code"], "POD_NOT_READY");
    let verdict = json["verdict"].as_str().expect("a verdict");
    assert!(verdict.starts_with("not ready: pod: server is terminated: a test"), "{verdict}");
}

#[tokio::test]
async fn the_html_page_is_not_stored_and_may_run_and_load_nothing() {
    let router = router(&Stop::new(), false);
    let (_, _, head) = send_request(&router, "GET /debug/", HERE).await;
    let header = |name: &str| head.headers()[name].to_str().expect("text").to_owned();
    assert_eq!(header("content-type"), "text/html; charset=utf-8");
    assert_eq!(header("cache-control"), "no-store");
    let policy = header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'; "), "{policy}");
    assert!(!policy.contains("script"), "{policy}");
}

#[tokio::test]
async fn quitting_follows_the_answer_and_makes_the_pod_unready() {
    let stop = Stop::new();
    let router = router(&stop, false);
    let request = Request::post("/quitquitquit").body(()).expect("a request");
    let caller = Caller::of("[::1]:7", Some(0));
    let answer = router.answer(request, &caller).await;
    assert_eq!(stop.requested().borrow().urgency, Urgency::Run);
    let body = answer.into_body().collect().await.expect("a body");
    assert_eq!(body.to_bytes(), "OK");
    assert_eq!(stop.requested().borrow().urgency, Urgency::Terminate);
    let (status, text, _) = send_request(&router, "GET /healthz/ready", THERE).await;
    assert_eq!(status, 503);
    assert_eq!(text, "server is terminated: /quitquitquit called\n");
    let (_, progress, _) = send_request(&router, "GET /drain", HERE).await;
    let progress: Value = serde_json::from_str(&progress).expect("JSON");
    let expected = json!({
        "asked": "terminate",
        "cause": "/quitquitquit called",
        "envoy": null,
    });
    assert_eq!(progress, expected);
}

#[tokio::test]
async fn log_levels_are_listed_and_set_by_callers_on_loopback() {
    let router = router(&Stop::new(), false);
    let remote = "192.0.2.1:9";
    let local = "127.0.0.1:9";
    for (line, from, status, expected) in [
        ("GET /debug/logging", remote, 403, "localhost"),
        ("POST /debug/logging?level=debug", remote, 403, "localhost"),
        ("DELETE /debug/logging", local, 405, "Not Allowed"),
        ("GET /debug/logging?level=loud", local, 200, r#""scope":"sds""#),
        ("POST /debug/logging", local, 400, "does not have a level"),
        ("POST /debug/logging?level=loud", local, 400, "\"loud\", expected debug"),
        ("POST /debug/logging?level=none&for=1s", local, 400, "\"none\", expected debug"),
        ("PUT /debug/logging?level=fatal", local, 400, "\"fatal\", expected debug"),
        ("POST /debug/logging?level=info&scope=x", local, 400, "the scope is \"x\""),
        ("POST /debug/logging?level=info&for=0s", local, 400, "for is \"0s\""),
        ("POST /debug/logging?level=info&for=25h", local, 400, "for is \"25h\""),
        ("POST /debug/logging?level=info&to=x", local, 400, "the query is \"to=x\""),
        ("POST /debug/logging?level=info&level=x", local, 400, "the query is \"level=x\""),
        (
            "PUT /debug/logging?level=warn&scope=gcecred",
            local,
            200,
            r#"{"scope":"gcecred","level":"warn"}"#,
        ),
        (
            "POST /debug/logging?level=debug&for=10m",
            local,
            200,
            r#"{"scope":"gcecred","level":"debug","seconds_left":600.0,"lasting_level":"warn"}"#,
        ),
        (
            "POST /debug/logging?level=info&scope=all",
            local,
            200,
            r#"{"scope":"gcecred","level":"info"}"#,
        ),
    ] {
        let (found, text, _) = send_request(&router, line, from).await;
        assert_eq!(found, status, "{line}: {text}");
        assert!(text.contains(expected), "{line}: {text}");
    }
}
