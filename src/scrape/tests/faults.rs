//! Tests targets that hang, break off, send too much or do not send a page.

use super::*;

#[tokio::test]
async fn a_failed_source_leaves_the_others_and_is_counted() {
    let envoy = page("text/plain", "envoy 1\n");
    let missing = server(|stream, _| {
        send(stream, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
    });
    for (port, is_seen) in [(closed_port(), true), (missing, true)] {
        let (scrape, registry) = scrape(envoy, &[port]);
        let (_, body) = answered(&scrape, &[]).await;
        let text = String::from_utf8(body).expect("text");
        let series = "istio_agent_scrape_failures_total{type=\"application\"} 1\n";
        assert_eq!(text.contains(series), is_seen);
        assert!(text.ends_with("envoy 1\n"));
        assert_eq!(failures(&registry, "application"), 1);
    }
    let (scrape, registry) = scrape(closed_port(), &[]);
    assert_eq!(scrape_without_agent_metrics(&scrape, &[]).await, "");
    assert_eq!(failures(&registry, "envoy"), 1);
}

/// Starts targets whose responses never end or end early. Returns their names and ports, and the lines
/// of their pages that are merged.
fn endless() -> Vec<(&'static str, u16, &'static str)> {
    let text = || head("text/plain", "");
    let endless = |piece: &'static [u8]| {
        server(move |stream, _| {
            send(stream, head("text/plain", "").as_bytes());
            while send(stream, piece) {}
        })
    };
    vec![
        ("hangs", server(|_, _| thread::park()), ""),
        (
            "hangs in its body",
            server(move |stream, _| {
                send(stream, (text() + "app 1\napp{x=\"1\"} 2\nhal").as_bytes());
                thread::park();
            }),
            "app 1\napp{x=\"1\"} 2\n",
        ),
        (
            "closes early",
            server(move |stream, _| {
                let head = head("text/plain", "content-length: 100\r\n");
                send(stream, (head + "app 1\nhal 4").as_bytes());
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }),
            "app 1\n",
        ),
        (
            "never ends its head",
            server(|stream, _| {
                send(stream, b"HTTP/1.1 200 OK\r\n");
                while send(stream, b"x: y\r\n") {}
            }),
            "",
        ),
        ("never ends its line", endless(&[b'x'; 4096]), ""),
        ("never ends its garbage", endless(b"\x00\xff\n\x80\x81\n"), ""),
    ]
}

/// Starts targets that send responses without a usable page. Returns the same values as [`endless`].
fn unusable() -> Vec<(&'static str, u16, &'static str)> {
    vec![
        (
            "redirects in a loop",
            server(|stream, _| {
                let head = "HTTP/1.1 302 Found\r\nlocation: /again\r\ncontent-length: 0\r\n\r\n";
                send(stream, head.as_bytes());
            }),
            "",
        ),
        (
            "sends a gzip bomb",
            server(|stream, _| {
                // The 65 members have 1 MiB each when decoded, which is 1 MiB more than is decoded of a
                // page.
                let bomb = gzip(&vec![0; 1 << 20]).repeat(65);
                let more = format!("content-encoding: gzip\r\ncontent-length: {}\r\n", bomb.len());
                send(stream, head("text/plain", &more).as_bytes());
                send(stream, &bomb);
            }),
            "",
        ),
        ("serves HTML", page("text/html", "\n<html>\nup 1\n</html>\n"), ""),
        (
            "is no HTTP",
            server(|stream, _| {
                send(stream, b"\x16\x03\x01\x02\x00\x01\x00");
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }),
            "",
        ),
    ]
}

#[tokio::test]
async fn an_endless_or_unusable_source_does_not_drop_the_samples_of_others() {
    let timeout = [("x-prometheus-scrape-timeout-seconds", "0.6")];
    let good = page("text/plain", "good 1\n");
    for (name, bad, left) in endless().into_iter().chain(unusable()) {
        for (envoy, targets, kind, expected) in [
            (good, vec![bad], "application", format!("good 1\n{left}")),
            (bad, vec![good], "envoy", format!("{left}good 1\n")),
            (good, vec![bad, bad], "application", format!("good 1\n{left}")),
        ] {
            let (scrape, registry) = scrape(envoy, &targets);
            let begin = Instant::now();
            let found = scrape_without_agent_metrics(&scrape, &timeout).await;
            let mut found: Vec<_> = found.lines().collect();
            let mut expected: Vec<_> = expected.lines().collect();
            found.sort_unstable();
            expected.sort_unstable();
            assert_eq!(found, expected, "{name}, {kind}");
            assert_eq!(failures(&registry, kind), targets.len() as u64, "{name}, {kind}");
            assert!(begin.elapsed() < Duration::from_millis(1500), "{name}, {kind}");
        }
    }
}

#[tokio::test]
async fn a_target_over_the_limit_is_cut_off_at_a_line() {
    let envoy = page("text/plain", "");
    let line = format!("a{{x=\"{}\"}} 1\n", "y".repeat(90));
    for (lines, more, failed) in [(1000, "", 0), (1000, "\n", 1), (1001, "", 1)] {
        assert_eq!(line.len(), 100);
        let large = page("text/plain", line.repeat(lines) + more);
        let (scrape, registry) = scrape(envoy, &[large, page("text/plain", "b 1\n")]);
        let found = scrape_without_agent_metrics(&scrape, &[]).await;
        assert_eq!(found.len(), 100_004, "{lines}");
        assert_eq!(failures(&registry, "application"), failed);
    }
}

#[tokio::test]
async fn openmetrics_is_aborted_at_a_broken_source_and_complete_otherwise() {
    let cut = |kind: &'static str| {
        server(move |stream, _| {
            let head = head(kind, "content-length: 100\r\n");
            send(stream, (head + "cut 1\nhal 4").as_bytes());
            let _ = stream.shutdown(std::net::Shutdown::Both);
        })
    };
    let text = page("text/plain", "envoy 1\n");
    let whole = page(OPENMETRICS, "a 1\n# EOF\n");
    for (envoy, target, is_whole) in [
        (text, whole, true),
        (closed_port(), whole, true),
        (cut("text/plain"), whole, false),
        (text, cut(OPENMETRICS), false),
        (text, page(OPENMETRICS, "a 1\n"), true),
        (text, cut("text/plain"), true),
    ] {
        let (scrape, _) = scrape(envoy, &[target]);
        let (parts, ()) = Request::get("/metrics").body(()).expect("a request").into_parts();
        let body = scrape.page(parts).await.into_body().collect().await;
        assert_eq!(body.is_ok(), is_whole, "{envoy} and {target}");
    }
}

#[tokio::test]
async fn openmetrics_targets_may_lack_their_end() {
    let envoy = page("text/plain", "envoy 1\n");
    let first = "a 1 1.5 # {x=\"y\"} 1\n";
    let whole = page(OPENMETRICS, format!("{first}# EOF\n"));
    let lines = "# TYPE b_c counter\nb_c_total 1 1.5 # {x=\"y\"} 1\nb_d 2";
    let large: String = (0..50_000).map(|n| format!("b{{n=\"{n}\"}} 1\n")).collect();
    for (body, expected) in [
        (lines.to_owned(), format!("{lines}\n")),
        (String::new(), String::new()),
        ("# EOF\n".to_owned(), String::new()),
        ("b 1\n# eof".to_owned(), "b 1\n".to_owned()),
        ("# TYPE b untyped\nb 1\n".to_owned(), "b 1\n".to_owned()),
        (large.clone(), large),
    ] {
        let begin = &body[..body.len().min(20)];
        let port = page(OPENMETRICS, body.clone());
        for (targets, first) in [(vec![whole, port], first), (vec![port], "")] {
            let (scrape, registry) = scrape_up_to(u64::MAX, envoy, &targets);
            let found = scrape_without_agent_metrics(&scrape, &[]).await;
            let expected = format!("{first}{expected}envoy 1\n# EOF\n");
            assert!(found == expected, "{begin:?}");
            assert_eq!(failures(&registry, "application"), 0, "{begin:?}");
        }
    }
}

#[tokio::test]
async fn a_query_that_envoy_refuses_is_a_failure_of_envoy() {
    let envoy = server(|stream, _| {
        send(stream, b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
    });
    let (scrape, registry) = scrape(envoy, &[page("text/plain", "app 1\n")]);
    assert_eq!(scrape_without_agent_metrics(&scrape, &[]).await, "app 1\n");
    assert_eq!(failures(&registry, "envoy"), 1);
    let client = ready(Ok(Client::default())).boxed();
    let path = "/stats/prometheus?secret".to_owned();
    let target = Target { port: envoy, path, tls: None };
    let mut source = Source::new(client, HeaderMap::new(), Origin::Envoy, &target, 1);
    source.read_head().await;
    let text = source.failure.expect("a problem").to_string();
    let subject = "failed scraping envoy metrics";
    assert!(text.starts_with(subject) && text.contains("the query of the scrape"));
    assert!(!text.contains("secret") && !text.contains("prometheus.io"), "{text}");
}

#[tokio::test]
async fn gzip_of_an_application_is_decoded_as_far_as_it_is_whole() {
    let lines: String = (0..5000).map(|n| format!("a{{n=\"{n}\"}} 1\n")).collect();
    let packed = gzip(lines.as_bytes());
    let half = packed[..packed.len() / 2].to_vec();
    for (body, encoding, failed) in [
        (packed.clone(), "gzip", 0),
        (packed.clone(), "GZip", 0),
        (packed.clone(), "x-gzip, UTF-8", 0),
        (packed.clone(), "none\r\ncontent-encoding: gzip", 0),
        (packed, "br", 1),
        (half, "gzip", 1),
        (b"a 1\n".to_vec(), "gzip", 1),
        (b"a 1\n".to_vec(), "Deflate", 1),
        (b"a 1\n".to_vec(), "identity", 0),
        (b"a 1\n".to_vec(), "text/plain; version=0.0.4", 0),
    ] {
        let port = server(move |stream, _| {
            let length = body.len();
            let more = format!("content-encoding: {encoding}\r\ncontent-length: {length}\r\n");
            let _ = send(stream, head("text/plain", &more).as_bytes()) && send(stream, &body);
        });
        let (scrape, registry) = scrape(closed_port(), &[port]);
        let found = scrape_without_agent_metrics(&scrape, &[]).await;
        assert_eq!(failures(&registry, "application"), failed, "{encoding}");
        let is_prefix = lines.starts_with(&found) || found == "a 1\n";
        assert!(is_prefix && (found.ends_with('\n') || found.is_empty()), "{encoding}");
        let is_plain = encoding == "identity" || encoding.starts_with("text");
        assert_eq!(found == if is_plain { "a 1\n" } else { &lines }, failed == 0);
    }
}
