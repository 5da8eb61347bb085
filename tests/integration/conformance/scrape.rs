//! Tests the merged page of metrics over HTTP: the requests that sources get, and the content of the page.
//!
//! The agent scrapes sources whose responses the test sets byte by byte. Rows that only this agent fulfils are
//! skipped if `AGENT_BIN` names another one.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use crate::support::eventually;
use crate::support::http::ask;
use crate::support::programs::is_this_agent;
use crate::support::prometheus::{Prometheus, Samples};
use crate::support::scraped::{PROTOBUF, Scraped, Source, TEXT, answer_of};

const OM0: &str = "application/openmetrics-text; version=0.0.1; charset=utf-8";
const OM1: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const ASKED_FOR_TEXT: &str = "text/plain;version=0.0.4";
const MIB: usize = 1 << 20;

#[tokio::test]
async fn formats_are_negotiated_separately_with_envoy_and_the_application() {
    let scraped = Scraped::start(1).await;
    let om = "application/openmetrics-text";
    let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                      application/vnd.google.protobuf;proto=x;q=0.55,\
                      text/plain;version=0.0.4;q=0.4,*/*;q=0.2";
    for (accept, envoy, application) in [
        ("", ASKED_FOR_TEXT, ASKED_FOR_TEXT.to_owned()),
        ("*/*", ASKED_FOR_TEXT, ASKED_FOR_TEXT.into()),
        ("application/*", ASKED_FOR_TEXT, format!("{om};version=0.0.1")),
        ("application/vnd.google.protobuf;proto=x;q=0.9", ASKED_FOR_TEXT, ASKED_FOR_TEXT.into()),
        ("text/*", "text/*", "text/*".into()),
        (
            prometheus,
            ASKED_FOR_TEXT,
            format!("{om};escaping=allow-utf-8;version=1.0.0,{ASKED_FOR_TEXT}"),
        ),
    ] {
        let header = match accept {
            "" => String::new(),
            accept => format!("accept: {accept}\r\n"),
        };
        assert_eq!(scraped.page_with(&header).await.status, 200);
        for (source, expected) in [(&scraped.envoy, envoy), (&scraped.targets[0], &*application)] {
            let sent = source.was_sent("accept").unwrap_or_default();
            assert_eq!(formats(&sent), formats(expected), "{accept}");
        }
    }
}

/// Returns the members of an `Accept` header in order, without their weights. A member that equals the one before
/// is left out.
fn formats(accept: &str) -> Vec<Vec<String>> {
    let mut formats: Vec<_> = accept
        .split(',')
        .map(|member| {
            let mut parts: Vec<_> = member.split(';').map(|part| part.trim().to_owned()).collect();
            parts.retain(|part| !part.starts_with("q="));
            parts[1..].sort();
            parts
        })
        .collect();
    formats.dedup();
    formats
}

#[tokio::test]
async fn each_scrape_source_gets_only_the_headers_meant_for_it() {
    let scraped = Scraped::start(1).await;
    let headers = "user-agent: Prometheus/3.0\r\nx-prometheus-scrape-timeout-seconds: 7\r\n\
                   authorization: Bearer x\r\ncookie: x\r\n";
    scraped.page_with(headers).await;
    let (envoy, application) = (&scraped.envoy, &scraped.targets[0]);
    let asked = envoy.last_request();
    assert!(asked.starts_with("GET /stats/prometheus?usedonly&a=b HTTP/1.1\r\n"), "{asked}");
    let asked = application.last_request();
    assert!(asked.starts_with("GET /m?x=y HTTP/1.1\r\n"), "{asked}");
    for source in [envoy, application] {
        for (name, expected) in [
            ("user-agent", Some("Prometheus/3.0")),
            ("x-prometheus-scrape-timeout-seconds", Some("7")),
            ("authorization", None),
            ("cookie", None),
        ] {
            let sent = source.was_sent(name);
            assert_eq!(sent.as_deref(), expected, "{name}");
        }
    }
}

#[tokio::test]
async fn a_single_target_gives_the_page_its_format() {
    let scraped = Scraped::start(1).await;
    let application = &scraped.targets[0];
    for (kind, expected) in [
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", OM1),
        ("application/openmetrics-text; version=0.0.1", OM0),
        ("application/openmetrics-text", OM0),
        ("text/plain; version=0.0.4", TEXT),
        ("text/html", TEXT),
        ("nonsense", TEXT),
    ] {
        let end = if expected == TEXT { "" } else { "# EOF\n" };
        application.has(kind, &format!("# TYPE app gauge\napp 1\n{end}"));
        let page = scraped.page().await;
        page.assert_readable(kind);
        assert_eq!(page.kind(), expected, "{kind}");
        assert_eq!(page.samples(), ["app 1", "envoy 1"], "{kind}");
        assert!(page.text().ends_with(end), "{kind}");
        assert!(page.text().starts_with("# HELP "), "{kind}");
    }
    let scrapes = scraped.page().await.figure("istio_agent_scrapes_total");
    let then = scraped.page().await.figure("istio_agent_scrapes_total");
    assert_eq!(then, scrapes + 1);
}

#[tokio::test]
async fn several_targets_are_merged_in_order_in_the_format_they_share() {
    let scraped = Scraped::start(2).await;
    let (one, two) = (&scraped.targets[0], &scraped.targets[1]);
    let (om, text) = ((OM1, "# EOF\n"), (TEXT, ""));
    for (first, second, expected, ends) in [
        (om, om, OM1, 1),
        ((OM1, "# EOF \t\r\n"), (OM1, "# EOF"), OM1, 1),
        (om, text, TEXT, 0),
        (text, om, TEXT, 0),
        (text, text, TEXT, 0),
        ((OM0, "# EOF\n"), om, TEXT, 0),
    ] {
        let body = |name: &str, end: &str| format!("# TYPE {name} gauge\n{name} 1\n{end}");
        one.has(first.0, &body("one", first.1));
        two.has(second.0, &body("two", second.1));
        let page = scraped.page().await;
        page.assert_readable(expected);
        assert_eq!((page.kind(), page.ends()), (expected, ends), "{first:?}, {second:?}");
        assert_eq!(page.samples(), ["one 1", "two 1", "envoy 1"]);
        assert!(ends == 0 || page.text().ends_with("\n# EOF\n"));
    }
}

#[tokio::test]
async fn a_target_that_fails_leaves_the_others_their_format_and_is_counted() {
    let scraped = Scraped::start(2).await;
    let (one, two) = (&scraped.targets[0], &scraped.targets[1]);
    let refusal = "HTTP/1.1 503 Sorry\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    one.says(refusal);
    two.has(OM1, "# TYPE two gauge\ntwo 1\n# EOF\n");
    let before = scraped.failures("application").await;
    let page = scraped.page().await;
    page.assert_readable("one fails");
    assert_eq!((page.kind(), page.ends()), (OM1, 1));
    assert_eq!(page.samples(), ["two 1", "envoy 1"]);
    // The page counts the failure of its own scrape. `before` includes the failure of the scrape that has read it.
    let series = "istio_agent_scrape_failures_total{type=\"application\"}";
    assert_eq!(page.figure(series), before + 1);
    two.says(refusal);
    scraped.envoy.says(refusal);
    let page = scraped.page().await;
    page.assert_readable("all fail");
    assert_eq!((page.kind(), page.samples().len()), (TEXT, 0));
    assert_eq!(page.figure(series), before + 3);
    assert_eq!(page.figure("istio_agent_scrape_failures_total{type=\"envoy\"}"), 1);
}

#[tokio::test]
async fn redirects_are_followed_and_only_200_is_a_page() {
    let scraped = Scraped::start(1).await;
    let (application, other) = (&scraped.targets[0], Source::start().await);
    other.has(TEXT, "# TYPE other gauge\nother 1\n");
    let to = |status: u16, location: &str| {
        let head = format!("HTTP/1.1 {status} X\r\nlocation: {location}\r\n");
        head + "content-length: 0\r\nconnection: close\r\n\r\n"
    };
    let elsewhere = format!("http://localhost:{}/m", other.port);
    for (answer, expected) in [
        (to(302, &elsewhere), vec!["other 1", "envoy 1"]),
        (to(308, &elsewhere), vec!["other 1", "envoy 1"]),
        (to(302, "/again"), vec!["envoy 1"]),
        (to(204, ""), vec!["envoy 1"]),
        (to(404, ""), vec!["envoy 1"]),
        (to(500, ""), vec!["envoy 1"]),
    ] {
        application.says(answer.as_str());
        let page = scraped.page().await;
        page.assert_readable(&answer);
        assert_eq!(page.samples(), expected, "{answer}");
    }
}

#[tokio::test]
async fn the_page_is_gzip_for_a_scraper_that_accepts_gzip() {
    let scraped = Scraped::start(1).await;
    let mut large = "# TYPE large gauge\n".to_owned();
    for number in 0..5000 {
        large += &format!("large{{n=\"{number}\"}} 1\n");
    }
    scraped.targets[0].has(TEXT, &large);
    let mut rows = vec![
        ("", None),
        ("gzip", Some("gzip")),
        ("deflate, gzip;q=1.0, zstd;q=0.5", Some("gzip")),
        ("br, lz4", None),
    ];
    if is_this_agent("zstd") {
        rows.extend([("zstd", None), ("gzip, zstd", Some("gzip"))]);
    }
    for (accepted, expected) in rows {
        let header = match accepted {
            "" => String::new(),
            accepted => format!("accept-encoding: {accepted}\r\n"),
        };
        let mut page = scraped.page_with(&header).await;
        assert_eq!(page.header("content-encoding"), expected, "{accepted}");
        assert_eq!(page.header("vary"), Some("accept-encoding"), "{accepted}");
        if expected.is_some() {
            let mut plain = Vec::new();
            let mut decoder = flate2::read::GzDecoder::new(&page.raw[..]);
            decoder.read_to_end(&mut plain).unwrap();
            page.raw = plain;
        }
        page.assert_readable(accepted);
        assert_eq!(page.samples().len(), 5001, "{accepted}");
    }
}

/// Returns 64 MiB of zeros, compressed with gzip.
fn bomb() -> Vec<u8> {
    use flate2::{Compression, write::GzEncoder};
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let zeros = vec![0; MIB];
    for _ in 0..64 {
        std::io::Write::write_all(&mut encoder, &zeros).unwrap();
    }
    encoder.finish().unwrap()
}

fn noise(length: usize) -> Vec<u8> {
    let mut noise = vec![0; length];
    fastrand::Rng::with_seed(7).fill(&mut noise);
    noise
}

/// Returns the responses of a hostile source: a name, the bytes, and the number of good samples in them.
fn hostile() -> Vec<(&'static str, Vec<u8>, usize)> {
    let text = |body: &[u8]| answer_of(TEXT, "", body);
    let cut = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 99\r\n\r\napp 1\na";
    let many: String = (0..100_000).map(|n| format!("many{{n=\"{n}\"}} 1\n")).collect();
    let headers = "x-more: y\r\n".repeat(200_000);
    let garbage = [&noise(MIB)[..], b"\napp 1\n"].concat();
    vec![
        ("a page of 100,000 lines", text(many.as_bytes()), 100_000),
        ("noise", text(&garbage), 1),
        ("half a line", text(b"app 1\napp{a=\"b"), 1),
        ("a body cut off", cut.to_vec(), 1),
        ("two families of a name", text(b"# TYPE app gauge\napp 1\n# TYPE app gauge\napp 2\n"), 2),
        (
            "the agent's own family",
            text(
                b"# TYPE istio_agent_scrapes_total gauge\n\
          istio_agent_scrapes_total 7\napp 1\n",
            ),
            1,
        ),
        ("Envoy's family", text(b"# TYPE envoy gauge\nenvoy 7\napp 1\n"), 1),
        ("a bomb", answer_of(TEXT, "content-encoding: gzip\r\n", &bomb()), 0),
        ("a line without an end", text(&vec![b'a'; 4 * MIB]), 0),
        ("headers without an end", answer_of(TEXT, &headers, b"app 1\n"), 0),
        ("no HTTP", b"app 1\n".to_vec(), 0),
        ("nothing", Vec::new(), 0),
    ]
}

#[tokio::test]
async fn a_hostile_source_costs_its_own_samples_and_little_memory() {
    if !is_this_agent("hostile sources") {
        return;
    }
    for targets in [1, 2] {
        let scraped = Scraped::start(targets).await;
        let good = targets - 1;
        scraped.page().await;
        let before = scraped.agent.memory("VmRSS");
        for (what, bytes, samples) in hostile() {
            scraped.targets[0].says(bytes);
            let page = scraped.page_with("x-prometheus-scrape-timeout-seconds: 20\r\n").await;
            page.assert_readable(what);
            // A series that the page has already from an earlier source is left out, so one sample may be missing.
            let most = 1 + good + samples;
            let found = page.samples().len();
            assert!((most - samples.min(1)..=most).contains(&found), "{what}: {found} of {most}");
        }
        let grown = scraped.agent.memory("VmRSS").saturating_sub(before);
        assert!(grown < 24 << 10, "{grown} KiB more");
    }
}

#[tokio::test]
async fn a_source_that_hangs_does_not_exceed_the_timeout_of_the_scraper() {
    if !is_this_agent("what is there comes in time") {
        return;
    }
    let scraped = Scraped::start(1).await;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1000\r\n\r\n";
    for (says, expected) in [
        (String::new(), vec!["envoy 1"]),
        (head.to_owned(), vec!["envoy 1"]),
        (format!("{head}app 1\n"), vec!["app 1", "envoy 1"]),
    ] {
        scraped.targets[0].says_and_holds(&says);
        let begin = Instant::now();
        let page = scraped.page_with("x-prometheus-scrape-timeout-seconds: 1\r\n").await;
        let took = begin.elapsed();
        assert!(took < Duration::from_millis(1500), "{took:?}");
        page.assert_readable(&says);
        assert_eq!(page.samples(), expected, "{says}");
    }
}

#[tokio::test]
async fn a_broken_source_leaves_its_lines_in_text_and_aborts_openmetrics() {
    if !is_this_agent("no series that vanish unnoticed") {
        return;
    }
    let scraped = Scraped::start(1).await;
    let cut = |kind: &str| {
        format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: 99\r\n\r\napp 1\nha 2")
    };
    scraped.targets[0].says(cut(TEXT));
    let page = scraped.page().await;
    page.assert_readable("cut off");
    assert_eq!(page.samples(), ["app 1", "envoy 1"]);
    // The last chunk of a complete response is empty.
    assert!(scraped.raw().await.ends_with("\r\n0\r\n\r\n"));
    scraped.targets[0].says(cut(OM1));
    let found = scraped.raw().await;
    assert!(!found.ends_with("\r\n0\r\n\r\n") && !found.contains("# EOF"), "{found}");
    // A page that only lacks its end is complete.
    scraped.targets[0].says(String::from_utf8(answer_of(OM1, "", b"app 1\n")).unwrap());
    let page = scraped.page().await;
    page.assert_readable("without an end");
    assert_eq!(page.samples(), ["app 1", "envoy 1"]);
    scraped.targets[0].has(TEXT, "app 1\n");
    assert_eq!(scraped.failures("application").await, 3);
}

#[tokio::test]
async fn a_gzip_only_exporter_and_a_registry_written_twice_are_read() {
    if !is_this_agent("gzip that was not asked for") {
        return;
    }
    let scraped = Scraped::start(1).await;
    let registry = "# HELP app A.\n# TYPE app counter\napp{n=\"1\"} 1\n".repeat(2);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut encoder, registry.as_bytes()).unwrap();
    let packed = encoder.finish().unwrap();
    let answer = answer_of(TEXT, "content-encoding: gzip\r\n", &packed);
    scraped.targets[0].says(answer);
    let page = scraped.page().await;
    page.assert_readable("gzip");
    assert_eq!(page.samples(), ["app{n=\"1\"} 1", "app{n=\"1\"} 1", "envoy 1"]);
}

#[tokio::test]
async fn unknown_content_encodings_of_a_page_are_ignored() {
    let scraped = Scraped::start(1).await;
    let rows = ["", "UTF-8", "none", "chunked", "text/plain; version=0.0.4", "identity"];
    for coding in rows {
        let header = format!("content-encoding: {coding}\r\n");
        let body = b"# TYPE site_up gauge\nsite_up{site=\"a\"} 1\nsite_up{site=\"b\"} 0\n";
        scraped.targets[0].says(answer_of(TEXT, &header, body));
        let page = scraped.page().await;
        page.assert_readable(coding);
        let expected = ["site_up{site=\"a\"} 1", "site_up{site=\"b\"} 0", "envoy 1"];
        assert_eq!(page.samples(), expected, "{coding}");
    }
}

#[tokio::test]
async fn a_target_without_eof_loses_no_samples_of_others() {
    if !is_this_agent("valid samples of such a target") {
        return;
    }
    let scraped = Scraped::start(2).await;
    let (one, two) = (&scraped.targets[0], &scraped.targets[1]);
    one.has(OM1, "# TYPE one gauge\none 1\n# EOF\n");
    for (body, left) in [
        ("", None),
        (
            "# TYPE two counter\ntwo_total 1 1.5 # {x=\"y\"} 1\n",
            Some("two_total 1 1.5 # {x=\"y\"} 1"),
        ),
        ("# TYPE two gauge\ntwo 1", Some("two 1")),
    ] {
        two.has(OM1, body);
        let page = scraped.page().await;
        page.assert_readable(body);
        let expected: Vec<_> = ["one 1"].into_iter().chain(left).chain(["envoy 1"]).collect();
        assert_eq!(page.samples(), expected, "{body}");
    }
    assert_eq!(scraped.failures("application").await, 0);
    let head = "content-length: 99\r\nconnection: close\r\n\r\ntwo 1\n";
    two.says(format!("HTTP/1.1 200 OK\r\ncontent-type: {OM1}\r\n{head}"));
    assert!(!scraped.raw().await.contains("# EOF"));
    two.has(OM1, "");
    assert_eq!(scraped.failures("application").await, 1);
}

#[tokio::test]
async fn a_target_that_leads_to_the_agents_own_page_is_asked_once() {
    if !is_this_agent("a loop ends") {
        return;
    }
    let scraped = Scraped::start(1).await;
    let between = Source::start().await;
    let to = |port: u16, path: &str| {
        let head = format!("HTTP/1.1 302 Found\r\nlocation: http://localhost:{port}{path}\r\n");
        head + "content-length: 0\r\nconnection: close\r\n\r\n"
    };
    between.says(to(scraped.port(), "/metrics"));
    for (number, answer) in
        [to(scraped.port(), "/stats/prometheus"), to(between.port, "/m")].into_iter().enumerate()
    {
        scraped.targets[0].says(answer);
        let page = scraped.page().await;
        page.assert_readable("a loop");
        assert_eq!(page.samples(), ["envoy 1"]);
        let times = number as u64 + 1;
        assert_eq!(page.figure("istio_agent_scrapes_total"), times);
        let failures = "istio_agent_scrape_failures_total{type=\"application\"}";
        assert_eq!(page.figure(failures), times);
    }
}

#[tokio::test]
async fn metrics_has_all_sources_and_metrics_agent_only_the_agent() {
    let scraped = Scraped::start(1).await;
    let merged = ask(scraped.port(), "GET /metrics").await.body;
    assert!(merged.contains("\nenvoy 1\n") && merged.contains("\nistio_agent_scrapes_total 1\n"));
    if is_this_agent("a page of the agent alone") {
        let own = ask(scraped.port(), "GET /metrics/agent").await.body;
        assert!(!own.contains("\nenvoy ") && own.contains("\nistio_agent_scrapes_total 1\n"));
    }
}

#[tokio::test]
async fn prometheus_has_all_series_of_the_page() {
    let scraped = Scraped::start(2).await;
    let shared =
        |path: &str| format!("# TYPE shared counter\nshared{{path=\"{path}\"}} 1\nsame 7\n");
    scraped.targets[0].has(TEXT, &shared("/a"));
    scraped.targets[1].has(TEXT, &shared("/b"));
    let Some(prometheus) = Prometheus::scraping(scraped.port(), &[], "") else { return };
    let finds = async |series: &str| {
        eventually(series, async || prometheus.query(series).await).await;
    };
    for series in [
        "envoy",
        "shared{path=\"/a\"}",
        "shared{path=\"/b\"}",
        "same",
        "istio_agent_scrapes_total",
        "up==1",
    ] {
        finds(series).await;
    }
    if is_this_agent("pages with malformed lines") {
        let many: String = (0..40_000).map(|n| format!("many{{n=\"{n}\"}} 1\n")).collect();
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/scrape");
        let read = |path| fs::read_to_string(format!("{golden}/{path}")).unwrap();
        let text = read("malformed/app0.txt") + "text{x=\"a\nb\"} 1\n";
        let metrics = read("malformed_openmetrics/app0.om").replace("# EOF\n", "");
        scraped.envoy.has(TEXT, &read("malformed/envoy"));
        // Both targets use text first, then OpenMetrics, each with a small page and with a large one.
        for (number, (kind, more)) in
            [(TEXT, ""), (TEXT, &many), (OM1, ""), (OM1, &many)].into_iter().enumerate()
        {
            let (body, end) = if kind == TEXT { (&text, "") } else { (&metrics, "# EOF\n") };
            let mark = format!("mark{number}");
            scraped.targets[0].has(kind, &format!("{body}{more}{mark} 1\n{end}"));
            scraped.targets[1].has(kind, &format!("{mark}_too 1\n{end}"));
            let first = if kind == TEXT { "text" } else { "delay_seconds" };
            for series in [first, "site_up", "envoy_up", "envoy_rq_total", "last"] {
                finds(&format!("{series} and on() {mark}")).await;
            }
        }
        scraped.envoy.has(TEXT, "envoy 1\n");
    }
    if is_this_agent("a failed scrape where an OpenMetrics source breaks off") {
        let cut_off = "content-length: 100\r\nconnection: close\r\n\r\n# TYPE shared counter\n";
        for target in &scraped.targets {
            target.says(format!("HTTP/1.1 200 OK\r\ncontent-type: {OM1}\r\n{cut_off}"));
        }
        finds("up==0").await;
    }
}

#[tokio::test]
async fn prometheus_reads_the_same_series_from_text_and_protobuf() {
    if !is_this_agent("pages in protobuf") {
        return;
    }
    let scraped = Scraped::start(3).await;
    // Where the formats of source and page differ, text has no times.
    let job = "  honor_timestamps: false\n";
    let Some(by_text) = Prometheus::scraping(scraped.port(), &[], job) else { return };
    let native = ["--enable-feature=native-histograms"];
    let Some(by_protobuf) = Prometheus::scraping(scraped.port(), &native, job) else { return };
    let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/scrape"));
    let mut cases: Vec<_> =
        fs::read_dir(golden).unwrap().map(|case| case.unwrap().path()).collect();
    cases.sort();
    for (number, case) in cases.iter().enumerate() {
        let pages = [
            ("app0.txt", TEXT),
            ("app0.om", OM1),
            ("app1.txt", TEXT),
            ("app1.om", OM1),
            ("envoy", TEXT),
        ];
        let pages = pages.map(|(name, kind)| (kind, fs::read_to_string(case.join(name)).ok()));
        let mut pages = pages.into_iter().filter_map(|(kind, page)| Some((kind, page?)));
        for target in &scraped.targets {
            let (kind, page) = pages.next().unwrap_or((TEXT, String::new()));
            target.has(kind, &page);
        }
        // A family `mark` with a gauge.
        let mark =
            [b"\x0a\x04mark\x18\x01\x22\x0b\x12\x09\x09", &(number as f64).to_le_bytes()[..]]
                .concat();
        scraped.envoy.has(TEXT, &format!("mark {number}\n"));
        scraped.envoy.has_in_protobuf(&[&[mark.len() as u8], &mark[..]].concat());
        let series = async |prometheus: &Prometheus| {
            eventually("the mark", async || prometheus.query(&format!("mark == {number}")).await)
                .await;
            let all = "{job=\"pod\",__name__!~\"(istio_agent|scrape|up).*\"}";
            normalized(prometheus.query(all).await.expect("series"))
        };
        let (text, protobuf) = (series(&by_text).await, series(&by_protobuf).await);
        assert!(text.len() > 1, "{}", case.display());
        for (series, value) in &text {
            assert_eq!(protobuf.get(series), Some(value), "{}: {series:?}", case.display());
        }
        assert_eq!(text.len(), protobuf.len(), "{}: {protobuf:?}", case.display());
    }
    let format = |format| {
        format!("istio_agent_scrape_format_total{{format=\"{format}\",downgrade=\"false\"}} > 0")
    };
    for name in ["text", "proto"] {
        eventually(name, async || by_text.query(&format(name)).await).await;
    }
}

/// Writes the bounds of buckets and quantiles as Prometheus 3 does. Older releases do so for protobuf only.
fn normalized(samples: Samples) -> Samples {
    let normalized = samples.into_iter().map(|(mut series, value)| {
        for bound in ["le", "quantile"] {
            series.entry(bound.to_owned()).and_modify(|bound| {
                if let Ok(number) = bound.parse::<f64>() {
                    *bound = format!("{number:?}");
                }
            });
        }
        (series, value)
    });
    normalized.collect()
}

#[tokio::test]
async fn a_protobuf_source_that_the_scraper_does_not_accept_is_a_failure() {
    if !is_this_agent("pages in protobuf") {
        return;
    }
    let scraped = Scraped::start(1).await;
    scraped.targets[0].has(PROTOBUF, "");
    let page = scraped.page().await;
    page.assert_readable("unasked");
    assert_eq!((page.kind(), page.samples()), (TEXT, vec!["envoy 1".to_owned()]));
    let downgrade = "istio_agent_scrape_format_total{format=\"text\",downgrade=\"true\"}";
    assert_eq!(page.figure(downgrade), 1);
    assert_eq!(scraped.failures("application").await, 1);
    let accept = "accept: application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited\r\n";
    assert_eq!(scraped.page_with(accept).await.kind(), PROTOBUF.to_lowercase());
    assert_eq!(scraped.failures("application").await, 2);
}
