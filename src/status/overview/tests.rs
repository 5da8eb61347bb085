//! Tests the overview page of pods in different states, and with hostile input.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::page::{self, page};
use crate::envoy::crash::Crash;
use crate::envoy::handle::{self, State};
use crate::envoy::shutdown::{Plan, Shutdown, Step};
use crate::istiod::status::{Connected, Failure, Status, Tls};
use crate::logging::Entry;
use crate::problem::{Problem, codes};
use crate::report::{Check, Group, Level, PodState, Report};
use crate::secrets::observe::{Certificate, Secret, Snapshot as Certificates};
use crate::xds::observe::{
    AckSnapshot, EndSnapshot, NackSnapshot, PushSnapshot, Snapshot as Discovery, Source,
    StreamSnapshot, TypeSnapshot,
};

const HOSTILE: &str = "\"'><script>alert(1)</script>&<img src=x onerror=alert(2)>";

fn hostile() -> String {
    HOSTILE.to_owned()
}

/// Returns the overview of an agent without Envoy, certificates and discovery streams.
fn empty() -> Value {
    let istiod = Status {
        address: "istiod:15012".to_owned(),
        connected: None,
        dials: 0,
        last_error: None,
        token_expires: None,
    };
    json!({
        "now": "2026-01-31T12:00:00Z",
        "agent": { "node": "node", "version": "1", "uptime_seconds": 1.0 },
        "ready": false,
        "missing": null,
        "envoy": null,
        "istiod": istiod,
        "certificates": null,
        "discovery": discovery(),
        "dns": null,
        "health": null,
        "wasm": null,
        "start_up": [],
        "warnings": [],
    })
}

fn discovery() -> Discovery {
    Discovery {
        streams: 0,
        stream: None,
        last_end: None,
        types: BTreeMap::new(),
        kept: None,
        on_demand: None,
        after_nack: BTreeMap::new(),
        accepted: BTreeMap::new(),
        rejected: BTreeMap::new(),
        served_since: None,
    }
}

/// Renders the page of a pod without findings.
fn page_without_findings(overview: &Value) -> String {
    page(&Report::default(), overview)
}

/// Returns a type whose last response has this version. `ack` and `nack` are the version and time of the last ACK and
/// NACK.
fn type_with_answers(
    version: &str,
    ack: Option<(&str, &str)>,
    nack: Option<(&str, &str)>,
) -> TypeSnapshot {
    TypeSnapshot {
        consumer: None,
        requests: 1,
        responses: 1,
        bytes: 1,
        acks: 1,
        nacks: 1,
        is_rejected: nack.is_some(),
        last_response: Some(PushSnapshot {
            version: version.to_owned(),
            nonce: hostile(),
            resources: 1,
            bytes: 1,
            at: "1".to_owned(),
            age_seconds: 1.0,
            answered: ack.or(nack).is_some(),
            source: Source::Istiod,
        }),
        last_ack: ack.map(|(version, at)| AckSnapshot {
            age_seconds: 0.0,
            version: version.to_owned(),
            at: at.to_owned(),
            after_seconds: 0.002,
        }),
        last_nack: nack.map(|(version, at)| NackSnapshot {
            version: Some(version.to_owned()),
            reason: HOSTILE.to_owned(),
            at: at.to_owned(),
        }),
    }
}

fn report(checks: Vec<Check>) -> Report {
    Report::new("node".to_owned(), vec![Group::new("agent", checks)])
}

fn finding(found: &str) -> Problem {
    Problem::new(codes::AGENT_SILENT, "agent", found)
}

fn with_type(url: &str, found: TypeSnapshot) -> Discovery {
    Discovery { types: BTreeMap::from([(url.to_owned(), found)]), ..discovery() }
}

/// Renders a page with [`HOSTILE`] in place of every text that comes from outside the agent.
fn hostile_page() -> String {
    let istiod = Status {
        address: hostile(),
        connected: Some(Connected {
            peer: hostile(),
            since: hostile(),
            tls: Some(Tls {
                version: Some(hostile()),
                key_exchange: None,
                cipher: Some(hostile()),
                client_certificate: true,
                peer_certificate: None,
            }),
        }),
        dials: 0,
        last_error: Some(Failure {
            at: hostile(),
            problem: Problem::new(codes::ISTIOD_ERROR, hostile(), hostile()),
        }),
        token_expires: Some(hostile()),
    };
    let certificates = Certificates {
        secrets: vec![Secret {
            name: "default",
            served: true,
            renewed_at: Some(hostile()),
            next_renewal: Some(hostile()),
            certificates: vec![certificate(-90.0)],
        }],
        problem: Some(crate::secrets::Failure {
            problem: Problem::new(codes::CERTIFICATE_REQUEST_FAILED, hostile(), hostile()),
            failures: 1,
            since: SystemTime::UNIX_EPOCH,
            next_attempt: SystemTime::UNIX_EPOCH,
        }),
    };
    let mut discovery =
        with_type(HOSTILE, type_with_answers(HOSTILE, None, Some((HOSTILE, HOSTILE))));
    discovery.last_end = Some(EndSnapshot { id: 1, at: hostile(), reason: hostile() });
    let warning = Entry {
        level: "warn",
        scope: "sds",
        code: "",
        message: hostile(),
        times: 2,
        first: hostile(),
        last: hostile(),
    };
    let mut overview = empty();
    overview["agent"] = json!({ "node": HOSTILE, "version": HOSTILE, "uptime_seconds": 1.0 });
    overview["missing"] = HOSTILE.into();
    overview["istiod"] = json!(istiod);
    overview["certificates"] = json!(certificates);
    overview["discovery"] = json!(discovery);
    overview["envoy"] = json!(crashed());
    overview["warnings"] = json!([warning]);
    let doctor = report(vec![Check::with_level(Level::Error, &finding(HOSTILE))]);
    page(&doctor.judged(&PodState::NotReady, None), &overview)
}

fn certificate(remaining_seconds: f64) -> Certificate {
    Certificate {
        serial: hostile(),
        subject: hostile(),
        spiffe_ids: vec![hostile()],
        not_before: hostile(),
        not_after: hostile(),
        remaining_seconds,
    }
}

fn crashed() -> handle::Report {
    handle::Report {
        state: State::Exited,
        last_crash: Some(Crash {
            when: hostile(),
            epoch: 0,
            pid: 7,
            code: None,
            signal: Some(11),
            uptime_seconds: 3.0,
            out_of_memory: None,
            stderr: vec![hostile()],
        }),
        ..handle::Report::default()
    }
}

/// Returns the texts between `<` and `>`, which a browser takes for tags.
fn tags(html: &str) -> Vec<&str> {
    html.split('<').skip(1).filter_map(|rest| rest.split('>').next()).collect()
}

#[test]
fn text_from_outside_is_never_markup() {
    let html = hostile_page();
    let foreign: Vec<_> = tags(&html)
        .into_iter()
        .filter(|tag| {
            let name = tag.trim_start_matches('/').split([' ', '\n']).next();
            matches!(name, Some("script" | "img")) || tag.contains("alert")
        })
        .collect();
    assert!(foreign.is_empty(), "{foreign:?}");
    assert!(html.contains("&lt;script&gt;"));
}

#[test]
fn characters_that_hide_or_turn_text_are_replaced() {
    let mut overview = empty();
    overview["agent"]["node"] = "a\u{202e}b\0c\u{200f}d\u{2066}e\u{1b}f\ng ü".into();
    let html = page_without_findings(&overview);
    let expected = "a\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}e\u{fffd}f\ng ü";
    assert!(html.contains(expected), "{html}");
}

#[test]
fn the_page_loads_and_runs_nothing() {
    for html in [page_without_findings(&empty()), hostile_page()] {
        for needed in ["<script", "<link", "<img", "url(", "@import", "http://", "https://"] {
            assert!(!html.contains(needed), "{needed}");
        }
        assert!(html.contains(r#"<meta http-equiv="refresh" content="5">"#));
    }
}

#[test]
fn the_doctors_verdict_remedy_and_findings_are_at_the_top() {
    let problem = finding("expired 2 s ago");
    let checks = vec![Check::ok("token", "valid"), Check::with_level(Level::Error, &problem)];
    let html = page(&report(checks).judged(&PodState::NotReady, None), &empty());
    let (top, _) = html.split_once("<main>").expect("a main part");
    let found = [
        "<title>not ready: agent: expired 2 s ago [AGENT_SILENT]: node</title>",
        "<p class=\"error\">not ready: agent: expired 2 s ago [AGENT_SILENT]</p>",
        &format!("<p>What to do: {}</p>", problem.remedy),
        &format!("<li><b class=\"error\">error</b> {problem}</li>"),
        "<details><summary>All checks</summary>",
        "<li><b class=\"ok\">ok</b> token: valid</li>",
    ];
    let places: Vec<_> = found.iter().map(|words| top.find(words)).collect();
    assert!(places.is_sorted() && places[0].is_some(), "{places:?}: {top}");
}

#[test]
fn every_figure_has_a_name_and_a_unit() {
    for (name, number, expected) in [
        ("age_seconds", json!(90.0), "1 min 30 s"),
        ("after_ms", json!(0.103), "0 ms"),
        ("rss_bytes", json!(50_000_000), "50.0 MB"),
        ("bytes", json!(1500), "1.5 kB"),
        ("times", json!(2), "2"),
    ] {
        let shown = page::value(name, &number).into_string();
        assert_eq!(shown, expected, "{name}");
    }
}

#[test]
fn values_are_next_to_their_names() {
    let html = hostile_page();
    for words in [
        "<th scope=\"row\">state</th><td>exited</td>",
        "<small>signal</small> 11</span>",
        "<small>level</small> warn</span> <span><small>scope</small> sds</span>",
    ] {
        assert!(html.contains(words), "{words}: {html}");
    }
    let mut overview = empty();
    overview["discovery"] = json!(with_type("a.b/c.Listener", type_with_answers("2", None, None)));
    let html = page_without_findings(&overview);
    assert!(html.contains("<small>Listener</small>"), "{html}");
    let html = page_without_findings(&empty());
    let words = "Recent warnings <a href=\"overview\">JSON</a></h2>none";
    assert!(html.contains(words), "{html}");
}

#[test]
fn a_shutdown_under_way_shows_the_step_it_waits_for() {
    let mut overview = empty();
    let moment = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    overview["envoy"] = json!(handle::Report {
        state: State::Draining,
        ending: Some(Shutdown {
            cause: "received signal: terminated",
            since: moment,
            plan: Plan::default(),
            waits_for: Step::Connections,
            until: moment,
            connections: Some(3),
        }),
        ..handle::Report::default()
    });
    overview["dns"] = json!({ "ready": false });
    let stream = StreamSnapshot {
        id: 2,
        protocol: "delta",
        since: "2026-01-31T12:00:00Z".to_owned(),
        began: tokio::time::Instant::now(),
        connected: false,
        source: Source::Istiod,
    };
    let stream = Some(stream);
    overview["discovery"] = json!(Discovery { stream, ..discovery() });
    let html = page_without_findings(&overview);
    for words in [
        "received signal: terminated",
        "2001-09-09T01:46:40Z",
        "<small>connections</small> 3</span>",
        "DNS <a href=\"ndsz\">JSON</a></h2><table><tr><th scope=\"row\">ready</th><td>no</td>",
    ] {
        assert!(html.contains(words), "{words}: {html}");
    }
}
