//! Tests merged pages of servers on real sockets.

mod faults;
mod tls;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use http::Request;
use proptest::prelude::*;

use super::*;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Starts a server on this machine that calls `serve` with the connection for each request. Returns its
/// port.
fn server(serve: impl Fn(&mut TcpStream, &str) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = listener.local_addr().expect("bound").port();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, serve) = (stream.expect("accepted"), serve.clone());
            thread::spawn(move || {
                while let Some(request) = request(&mut stream) {
                    serve(&mut stream, &request);
                }
            });
        }
    });
    port
}

fn request(stream: &mut TcpStream) -> Option<String> {
    let mut text = Vec::new();
    let mut byte = [0];
    while !text.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        text.push(byte[0]);
    }
    String::from_utf8(text).ok()
}

/// Writes to a client. Returns false if the client has closed its connection.
fn send(stream: &mut TcpStream, data: &[u8]) -> bool {
    stream.write_all(data).is_ok()
}

fn head(kind: &str, more: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{more}\r\n")
}

fn gzip(page: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(page).expect("encoded");
    encoder.finish().expect("encoded")
}

/// Starts a server that sends this page for each request. Returns its port.
fn page(kind: &'static str, body: impl Into<Vec<u8>>) -> u16 {
    let body = body.into();
    server(move |stream, _| {
        let head = head(kind, &format!("content-length: {}\r\n", body.len()));
        let _ = send(stream, head.as_bytes()) && send(stream, &body);
    })
}

#[tokio::test]
async fn a_page_whose_answer_only_go_reads_is_merged() {
    let application = server(|stream, _| {
        let large = "y".repeat(1_000_000);
        let head = format!("HTTP/1.0 200 OK\r\nfolded: a\r\n b\r\nlarge : {large}\r\n");
        let _ = send(stream, head.as_bytes()) && send(stream, b"\r\napp 1\n");
    });
    let (scrape, _) = scrape(closed_port(), &[application]);
    assert!(scrape_without_agent_metrics(&scrape, &[]).await.contains("app 1\n"));
}

/// Returns a port without a listener.
fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    listener.local_addr().expect("bound").port()
}

fn scrape(envoy: u16, targets: &[u16]) -> (Scrape, Registry) {
    scrape_up_to(100_000, envoy, targets)
}

fn scrape_up_to(limit: u64, envoy: u16, targets: &[u16]) -> (Scrape, Registry) {
    let registry = Registry::default();
    let config = Config {
        envoy_port: Some(envoy),
        hidden: Vec::new(),
        targets: targets
            .iter()
            .map(|port| Target { port: *port, path: "/metrics".to_owned(), tls: None })
            .collect(),
        limit,
        timeout: Duration::from_secs(10),
    };
    (Scrape::new(config, registry.clone()), registry)
}

async fn answered(scrape: &Scrape, headers: &[(&str, &str)]) -> (HeaderMap, Vec<u8>) {
    let mut request = Request::get("/stats/prometheus?usedonly&filter=a%20b");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let (parts, ()) = request.body(()).expect("a request").into_parts();
    let (answer, body) = scrape.page(parts).await.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    (answer.headers, body.to_vec())
}

/// Scrapes, and returns the page without the agent's own metrics.
async fn scrape_without_agent_metrics(scrape: &Scrape, headers: &[(&str, &str)]) -> String {
    let (_, body) = answered(scrape, headers).await;
    let text = String::from_utf8(body).expect("text");
    let lines = text.split_inclusive('\n');
    lines.filter(|line| !line.contains("istio_agent_")).collect()
}

fn failures(registry: &Registry, kind: &str) -> u64 {
    let text = registry.render();
    let series = format!("istio_agent_scrape_failures_total{{type=\"{kind}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(series.as_str()));
    line.map_or(0, |number| number.parse().expect("a number"))
}

#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "how an update is asked for")]
async fn merged_pages_equal_the_golden_files() {
    let cases = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/scrape");
    let mut count = 0;
    for case in fs::read_dir(cases).expect("cases") {
        let case = case.expect("a case").path();
        let file = |name: &str| fs::read(case.join(name)).ok();
        let envoy = page("text/plain; version=0.0.4", file("envoy").expect("Envoy's page"));
        let mut targets = Vec::new();
        for number in 0.. {
            let text = file(&format!("app{number}.txt")).map(|body| page("text/plain", body));
            let metrics = file(&format!("app{number}.om")).map(|body| page(OPENMETRICS, body));
            match text.or(metrics) {
                Some(port) => targets.push(port),
                None => break,
            }
        }
        let (scrape, _) = scrape(envoy, &targets);
        let (headers, body) = answered(&scrape, &[]).await;
        let is_text = headers[CONTENT_TYPE].to_str().expect("text").starts_with("text");
        let name = if is_text { "expected.txt" } else { "expected.om" };
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(case.join(name), &body).expect("written");
        }
        let expected = file(name).expect("what is expected");
        let found = String::from_utf8(body).expect("text");
        assert_eq!(found, String::from_utf8_lossy(&expected), "{}", case.display());
        count += 1;
    }
    assert!(count > 0 && Path::new(cases).is_dir());
}

#[tokio::test]
async fn the_agents_process_metrics_do_not_replace_those_of_the_application() {
    let page = page("text/plain", "# TYPE process_open_fds gauge\nprocess_open_fds 7\n");
    let (scrape, registry) = scrape(closed_port(), &[page]);
    crate::metrics::process::publish(&registry);
    let expected = "# TYPE process_open_fds gauge\nprocess_open_fds 7\n";
    assert_eq!(scrape_without_agent_metrics(&scrape, &[]).await, expected);
}

/// Starts a source that sends an empty page. Returns its port, and a receiver of its requests.
fn recording_source() -> (u16, std::sync::mpsc::Receiver<String>) {
    let (asked, hears) = std::sync::mpsc::channel();
    let tell = std::sync::Mutex::new(asked);
    let port = server(move |stream, request| {
        let told = tell.lock().expect("unpoisoned").send(request.to_owned());
        told.expect("heard");
        send(stream, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
    });
    (port, hears)
}

#[tokio::test]
async fn requests_to_sources_have_only_the_documented_headers_of_the_scraper() {
    let (port, hears) = recording_source();
    let (scrape, _) = scrape(port, &[]);
    let headers = [
        ("accept", "*/*"),
        ("user-agent", "Prometheus/3"),
        ("x-prometheus-scrape-timeout-seconds", "10"),
        ("x-istio-agent-scraped-by", "7"),
        ("authorization", "Bearer secret"),
    ];
    answered(&scrape, &headers).await;
    let request = hears.recv().expect("a request");
    let mut lines: Vec<_> = request.trim_end().split("\r\n").collect();
    lines.sort_unstable();
    let host = format!("host: localhost:{port}");
    let own = format!("x-istio-agent-scraped-by: {}", scrape.id.to_str().expect("text"));
    let mut expected = vec![
        "GET /stats/prometheus?usedonly&filter=a%20b HTTP/1.1",
        "accept-encoding: identity",
        "accept: text/plain;version=0.0.4;q=0.1",
        &host,
        "user-agent: Prometheus/3",
        "x-istio-agent-scraped-by: 7",
        &own,
        "x-prometheus-scrape-timeout-seconds: 10",
    ];
    expected.sort_unstable();
    assert_eq!(lines, expected);
}

#[tokio::test]
async fn a_scrape_that_comes_from_the_agent_itself_asks_no_source() {
    let (port, hears) = recording_source();
    let (scrape, registry) = scrape(port, &[]);
    let (own, value) = (scrape.id.clone(), HeaderValue::from_static("7"));
    for (agents, is_own) in [
        (vec![&value], false),
        (vec![&own], true),
        (vec![&own, &value], true),
        (vec![&value, &own], true),
    ] {
        let mut request = Request::get("/metrics").body(()).expect("a request");
        for agent in agents {
            request.headers_mut().append(SCRAPED_BY_HEADER, agent.clone());
        }
        let answer = scrape.page(request.into_parts().0).await;
        assert_eq!(answer.status() == StatusCode::LOOP_DETECTED, is_own);
        assert_eq!(hears.try_recv().is_err(), is_own);
    }
    assert!(registry.render().contains("istio_agent_scrapes_total 1\n"));
}

#[tokio::test]
async fn malformed_lines_are_left_out_of_large_pages_of_any_source() {
    let many: String = (0..40_000).map(|n| format!("many{{n=\"{n}\"}} 1\n")).collect();
    let bad = "bad{x=\"1\" 1\nbad{x} 1\nbad{1x=\"1\"} 1\nbad{x=\"1\",x=\"1\"} 1\n{x=\"1\"} 1\n\
               bad 1 1.5\nbad 1 -5\n# TYPE bad-name gauge\nbad-name 1\n# TYPE bad gauge gauge\n";
    let large = page("text/plain", [bad, &many, bad].concat());
    let small = page("text/plain", [bad, "small 1\n", bad].concat());
    for (envoy, target, expected) in
        [(large, small, format!("small 1\n{many}")), (small, large, format!("{many}small 1\n"))]
    {
        let (scrape, registry) = scrape_up_to(u64::MAX, envoy, &[target]);
        assert_eq!(scrape_without_agent_metrics(&scrape, &[]).await, expected);
        let rendered = registry.render();
        for source in ["envoy", "application"] {
            let counted = format!("malformed_lines_total{{source=\"{source}\"}} 20\n");
            assert!(rendered.contains(&counted), "{rendered}");
        }
    }
}

#[tokio::test]
async fn a_connection_serves_the_next_scrape_and_is_replaced_when_closed() {
    let connections = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = connections.clone();
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = listener.local_addr().expect("bound").port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let mut stream = stream.expect("accepted");
            // The connection is closed after two requests.
            for _ in 0..2 {
                if request(&mut stream).is_some() {
                    send(&mut stream, b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\na 1\n");
                }
            }
        }
    });
    let (scrape, registry) = scrape(port, &[]);
    for _ in 0..5 {
        assert_eq!(scrape_without_agent_metrics(&scrape, &[]).await, "a 1\n");
    }
    assert_eq!(connections.load(std::sync::atomic::Ordering::SeqCst), 3);
    assert_eq!(failures(&registry, "envoy"), 0);
}

#[tokio::test]
async fn a_last_family_that_exactly_fills_the_buffer_is_sent() {
    let envoy = page("text/plain", "");
    let line = format!("a{{x=\"{}\"}} 1\n", "y".repeat(90));
    // Chunks of 32 KiB are sent. The sizes of these pages are close to one and to two chunks.
    for lines in [325, 326, 327, 651, 652, 653] {
        let large = page("text/plain", line.repeat(lines));
        let (scrape, _) = scrape(envoy, &[large, page("text/plain", "b 1\n")]);
        let found = scrape_without_agent_metrics(&scrape, &[]).await;
        assert_eq!(found.len(), lines * line.len() + 4, "{lines}");
    }
}

#[test]
fn a_scrape_takes_a_little_less_than_the_scrapers_time() {
    let (scrape, _) = scrape(1, &[]);
    for (header, expected) in [
        (None, 9500),
        (Some("10"), 9500),
        (Some("0.5"), 475),
        (Some("0.02"), 19),
        (Some("soon"), 9500),
        (Some("-1"), 9500),
        (Some("NaN"), 9500),
        (Some("1e300"), 3_420_000),
    ] {
        let value = header.map(|value| (TIMEOUT_HEADER, HeaderValue::from_static(value)));
        let headers = value.into_iter().collect();
        assert_eq!(scrape.time_limit(&headers).as_millis(), expected, "{header:?}");
    }
}

proptest! {
    #[test]
    fn a_timeout_of_any_text_is_within_the_limit(text in "-?[0-9]{1,30}|[0-9]{1,3}[.e]-?[0-9]{1,3}|[ -~]{0,8}") {
        let value = HeaderValue::try_from(text).expect("a header");
        let (scrape, _) = scrape(1, &[]);
        prop_assert!(scrape.time_limit(&HeaderMap::from_iter([(TIMEOUT_HEADER, value)])) < MAX_TIMEOUT);
    }
}

/// Starts a server that sends a page of so many lines, in 20 pieces within `time`. Returns its port.
fn slow(lines: usize, time: Duration) -> u16 {
    const PIECES: u32 = 20;
    let lines: Vec<_> = (0..lines).map(|n| format!("slow{{n=\"{n}\"}} 1\n")).collect();
    server(move |stream, _| {
        let length: usize = lines.iter().map(String::len).sum();
        let head = head("text/plain", &format!("content-length: {length}\r\n"));
        send(stream, head.as_bytes());
        for piece in lines.chunks(lines.len().div_ceil(PIECES as usize)) {
            thread::sleep(time / PIECES);
            send(stream, piece.concat().as_bytes());
        }
    })
}

#[tokio::test]
async fn a_large_slow_page_comes_last_with_the_remaining_time() {
    let timeout = [("x-prometheus-scrape-timeout-seconds", "3")];
    for lines in [200, 100_000] {
        let envoy = slow(lines, Duration::from_millis(2400));
        let targets = [page("text/plain", "a 1\n"), page("text/plain", "b 1\n")];
        let (scrape, registry) = scrape(envoy, &targets);
        let found = scrape_without_agent_metrics(&scrape, &timeout).await;
        assert!(found.starts_with("a 1\nb 1\nslow{n=\"0\"} 1\n"), "{lines}");
        assert_eq!(found.lines().count(), lines + 2);
        assert_eq!(failures(&registry, "envoy"), 0);
    }
}

#[tokio::test]
async fn a_slow_target_gets_its_share_and_a_late_one_the_rest() {
    let timeout = [("x-prometheus-scrape-timeout-seconds", "3")];
    let large: String = (0..50_000).map(|n| format!("e{{n=\"{n}\"}} 1\n")).collect();
    let late = server(|stream, _| {
        thread::sleep(Duration::from_millis(2400));
        let head = head("text/plain", "content-length: 7\r\n");
        send(stream, (head + "late 1\n").as_bytes());
    });
    let slow = slow(20, Duration::from_millis(2000));
    for (target, lines, is_last) in [(slow, 20, false), (late, 1, true)] {
        let (scrape, registry) = scrape(page("text/plain", large.clone()), &[target]);
        let found = scrape_without_agent_metrics(&scrape, &timeout).await;
        assert_eq!(found.lines().count(), 50_000 + lines);
        assert_eq!(found.ends_with("late 1\n"), is_last);
        assert_eq!(failures(&registry, "application"), 0);
    }
}
