//! Every page, its methods, and who may see it.

use ::http::HeaderValue;
use http_body_util::BodyExt;
use serde_json::json;

use super::*;
use crate::lifecycle::Urgency;

const HERE: &str = "127.0.0.1:1";
const THERE: &str = "10.0.0.1:1";

fn merged_metrics() -> Scrape {
    Arc::new(|_| Box::pin(async { plain(StatusCode::OK, "merged 1\n") }))
}

/// A page of all metrics that holds the agent's own alone.
pub(super) fn own_metrics(metrics: Registry) -> Scrape {
    Arc::new(move |_| {
        let metrics = metrics.clone();
        Box::pin(async move { reply::metrics(&metrics) })
    })
}

/// A page that holds nothing but readiness.
pub(super) struct OfReadiness;

impl Glance for OfReadiness {
    fn json(&self, ready: Ready) -> serde_json::Value {
        json!({ "missing": ready.err() })
    }

    fn html(&self, ready: Ready) -> String {
        format!("<p>{ready:?}")
    }
}

fn router(stop: &Stop, metrics_localhost_only: bool) -> Router {
    let metrics = Registry::default();
    metrics.counter("istio_agent_tests", "Tests.").inc();
    let probers = r#"{"/app-health/a/livez": {"tcpSocket": {"port": 1}}}"#;
    let config = Config {
        port: 15020,
        metrics_localhost_only,
        application: "127.0.0.1".to_owned(),
        probers: Probers::parse(probers).expect("probers"),
        probes: probe::Config {
            origin: probe::Origin(std::net::Ipv4Addr::LOCALHOST.into()),
            offers_http2: true,
            keeps_connections: false,
        },
        grpc_bootstrap: None,
    };
    let sources = Sources {
        timeline: Timeline::start(),
        stop: stop.clone(),
        envoy: None,
        dns_ready: None,
        metrics: metrics.clone(),
        scrape: merged_metrics(),
        debug: vec![Page {
            path: "/debug/x",
            content: Arc::new(|| Some(json!({ "a": 1 }))),
        }],
        glance: Arc::new(OfReadiness),
    };
    Router::new(config, sources).expect("a router")
}

async fn asked(router: &Router, line: &str, from: &str) -> (u16, String, Response<()>) {
    let (method, path) = line.split_once(' ').expect("method and path");
    let request = Request::builder().method(method).uri(path);
    let request = request.body(()).expect("a request");
    let from = from.parse().expect("an address");
    let (head, body) = router.answer(request, from).await.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    let text = String::from_utf8(body.to_vec()).expect("text");
    (head.status.as_u16(), text, Response::from_parts(head, ()))
}

#[tokio::test]
async fn each_page_answers_whom_and_as_it_should() {
    let router = router(&Stop::new(), false);
    let forbidden = "Only requests from localhost are allowed\n";
    let merged = "merged 1\n";
    let page = "# HELP istio_agent_tests Tests.\n# TYPE istio_agent_tests counter\n\
                istio_agent_tests 1\n";
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
        ("GET /debug/x", THERE, 403, forbidden),
        ("GET /debug/x", HERE, 200, r#"{"a":1}"#),
        ("GET /debug/", THERE, 403, forbidden),
        ("GET /debug/", HERE, 200, "<p>Ok(())"),
        ("GET /debug/overview", THERE, 403, forbidden),
        ("GET /debug/overview", HERE, 200, r#"{"missing":null}"#),
        ("GET /debug", HERE, 301, "see /debug/\n"),
        ("GET /debug/pprof/", HERE, 404, "404 page not found\n"),
        ("GET /app-health/a/livez", THERE, 500, ""),
        (
            "GET /app-health/a/readyz",
            THERE,
            400,
            "app prober config does not exists for /app-health/a/readyz\n",
        ),
        (
            "GET /bad-path-should-be-disallowed",
            THERE,
            404,
            "404 page not found\n",
        ),
        ("GET /", THERE, 404, "404 page not found\n"),
    ] {
        let (found, text, _) = asked(&router, line, from).await;
        assert_eq!((found, text.as_str()), (status, body), "{line} from {from}");
    }
}

#[tokio::test]
async fn metrics_can_be_kept_on_this_machine() {
    let router = router(&Stop::new(), true);
    for path in ["/metrics", "/metrics/agent", "/stats/prometheus"] {
        let path = &format!("GET {path}");
        assert_eq!(asked(&router, path, THERE).await.0, 403);
        assert_eq!(asked(&router, path, HERE).await.0, 200);
    }
}

#[tokio::test]
async fn errors_are_text_and_other_spellings_are_redirected() {
    let router = router(&Stop::new(), false);
    let (_, _, head) = asked(&router, "GET /nothing", HERE).await;
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    assert_eq!(head.headers()["content-type"], text);
    assert_eq!(head.headers()["x-content-type-options"], "nosniff");
    let (status, _, head) = asked(&router, "GET //debug/x?y", THERE).await;
    assert_eq!(
        (status, &head.headers()["location"]),
        (301, &HeaderValue::from_static("/debug/x?y"))
    );
}

#[tokio::test]
async fn the_page_for_people_runs_and_loads_nothing_and_is_never_old() {
    let router = router(&Stop::new(), false);
    let (_, _, head) = asked(&router, "GET /debug/", HERE).await;
    let header = |name: &str| head.headers()[name].to_str().expect("text").to_owned();
    assert_eq!(header("content-type"), "text/html; charset=utf-8");
    assert_eq!(header("cache-control"), "no-store");
    let policy = header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'; "), "{policy}");
    assert!(!policy.contains("script"), "{policy}");
}

#[tokio::test]
async fn the_agent_quits_once_the_answer_is_sent_and_is_not_ready_then() {
    let stop = Stop::new();
    let router = router(&stop, false);
    let request = Request::post("/quitquitquit").body(()).expect("a request");
    let from = "[::1]:7".parse().expect("an address");
    let answer = router.answer(request, from).await;
    assert_eq!(stop.requested().borrow().urgency, Urgency::Run);
    let body = answer.into_body().collect().await.expect("a body");
    assert_eq!(body.to_bytes(), "OK");
    assert_eq!(stop.requested().borrow().urgency, Urgency::Terminate);
    let (status, text, _) = asked(&router, "GET /healthz/ready", THERE).await;
    assert_eq!(status, 503);
    assert_eq!(text, "server is terminated: /quitquitquit called\n");
    let (_, progress, _) = asked(&router, "GET /drain", HERE).await;
    let progress: serde_json::Value = serde_json::from_str(&progress).expect("JSON");
    let expected = json!({
        "asked": "terminate",
        "cause": "/quitquitquit called",
        "envoy": null,
    });
    assert_eq!(progress, expected);
}
