//! Tests the overview page of pods in different states, and with hostile input.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::cards::View;
use super::page::page;
use crate::envoy::crash::Crash;
use crate::envoy::handle::{self, State};
use crate::envoy::shutdown::{Plan, Shutdown, Step};
use crate::istiod::status::{Connected, Failure, Status, Tls};
use crate::logging::Entry;
use crate::problem::{Code, Level, Problem};
use crate::report::{Check, Group, PodState, Report};
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
        outages: Vec::new(),
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
        write_failure: None,
        on_demand: None,
        after_nack: BTreeMap::new(),
        accepted: BTreeMap::new(),
        rejected: BTreeMap::new(),
        served_since: None,
    }
}

/// Renders the page of a pod without findings.
fn page_without_findings(overview: &Value) -> String {
    page(&Report::default(), overview, false)
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
    Problem::new(Code::AgentSilent, "agent", found)
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
            problem: Problem::new(Code::IstiodError, hostile(), hostile()),
        }),
        outages: Vec::new(),
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
            problem: Problem::new(Code::CertificateRequestFailed, hostile(), hostile()),
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
    page(&doctor.judged(&PodState::NotReady, None), &overview, false)
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
    let html = page(&report(checks).judged(&PodState::NotReady, None), &empty(), false);
    let code = "<a href=\"?hold#AGENT_SILENT\">AGENT_SILENT</a>";
    let (top, _) = html.split_once("<main>").expect("a main part");
    let found = [
        "<title>not ready: agent: expired 2 s ago [AGENT_SILENT]: node</title>",
        "<div class=\"verdict error\">",
        &format!("<h2>not ready: agent: expired 2 s ago [{code}]</h2>"),
        &format!("<p>{}</p>", problem.consequence),
        "<p>What to do: run <code>doctor</code> again; ",
        "<ul></ul>",
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
        let shown = View::new(&empty()).value(name, &number).into_string();
        assert_eq!(shown, expected, "{name}");
    }
}

#[test]
fn values_are_next_to_their_names() {
    let html = hostile_page();
    for words in [
        "<th scope=\"row\">state</th><td>exited</td>",
        "<small>signal</small> 11</span>",
        "<th scope=\"row\">scope</th><td>sds</td>",
    ] {
        assert!(html.contains(words), "{words}: {html}");
    }
    let mut overview = empty();
    overview["discovery"] = json!(with_type("a.b/c.Listener", type_with_answers("2", None, None)));
    let html = page_without_findings(&overview);
    assert!(html.contains("<td>Listener</td>"), "{html}");
    let html = page_without_findings(&empty());
    let words = "Recent warnings<a href=\"overview\">JSON</a></h2>none";
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
        problem: None,
    };
    let stream = Some(stream);
    overview["discovery"] = json!(Discovery { stream, ..discovery() });
    let html = page_without_findings(&overview);
    for words in [
        "received signal: terminated",
        "2001-09-09T01:46:40Z",
        "<small>connections</small> 3</span>",
        "DNS<a href=\"ndsz\">JSON</a></h2><table><tr><th scope=\"row\">ready</th><td>no</td>",
    ] {
        assert!(html.contains(words), "{words}: {html}");
    }
}

/// Returns a page of 12:00:00 whose overview has this part.
fn page_with(pointer: &str, part: Value) -> String {
    let mut overview = empty();
    overview["agent"]["uptime_seconds"] = json!(1000.0);
    *overview.pointer_mut(pointer).expect("the part") = part;
    page_without_findings(&overview)
}

#[test]
fn times_are_relative_with_the_absolute_time_behind() {
    for (time, expected) in [
        ("2026-01-31T11:58:30Z", "1 min 30 s ago <time>2026-01-31T11:58:30Z</time>"),
        ("2026-01-31T14:00:00Z", "in 2 h <time>2026-01-31T14:00:00Z</time>"),
        ("2026-01-31T11:59:59.7Z", "1.0 s ago <time>2026-01-31T11:59:59.7Z</time>"),
        ("soon", "soon"),
    ] {
        let html = page_with("/istiod/token_expires", time.into());
        let row = format!("<th scope=\"row\">token expires</th><td>{expected}</td>");
        assert!(html.contains(&row), "{row}: {html}");
    }
}

#[test]
fn outages_are_placed_on_a_line_from_the_start_to_now() {
    let outages = json!([
        { "since": "2026-01-31T11:55:00Z", "until": null, "code": "ISTIOD_ERROR" },
        { "since": "2026-01-31T10:00:00Z", "until": "2026-01-31T11:45:00Z", "code": "ISTIOD_ERROR" },
    ]);
    let mut istiod = empty()["istiod"].clone();
    istiod["outages"] = outages;
    let html = page_with("/istiod", istiod);
    for words in [
        "<i class=\"error\" style=\"left:70.0%;width:30.0%\"></i>",
        "<i class=\"error\" style=\"left:0.0%;width:10.0%\"></i>",
        "<time>2026-01-31T11:55:00Z</time> not over <a href=\"?hold#ISTIOD_ERROR\">",
        "<time>2026-01-31T10:00:00Z</time> for 1 h 45 min <a href=\"?hold#ISTIOD_ERROR\">",
        "<span>16 min 40 s ago</span>now",
        "<dt id=\"ISTIOD_ERROR\">",
    ] {
        assert!(html.contains(words), "{words}: {html}");
    }
}

#[test]
fn the_bar_of_a_certificate_shows_its_past_life() {
    for (begin, end, width, word) in [
        ("2026-01-31T11:00:00Z", "2026-01-31T15:00:00Z", "25.0", "ok\">expires"),
        ("2026-01-31T10:00:00Z", "2026-01-31T11:00:00Z", "100.0", "error\">expired"),
        ("2026-01-31T13:00:00Z", "2026-01-31T14:00:00Z", "0.0", "ok\">expires"),
        ("?", "?", "100.0", "error\">expired"),
    ] {
        let certificate =
            Certificate { not_before: begin.into(), not_after: end.into(), ..certificate(0.0) };
        let secrets = json!([{ "name": "default", "certificates": [certificate] }]);
        let html = page_with("/certificates", json!({ "secrets": secrets }));
        for words in [format!("left:0.0%;width:{width}%"), format!("<b class=\"{word}</b>")] {
            assert!(html.contains(&words), "{words}: {html}");
        }
        assert!(!html.contains("renewal"), "a certificate that another process renews: {html}");
    }
}

#[test]
fn each_type_has_the_state_of_its_last_response() {
    let (early, late) = ("2026-01-31T11:00:00Z", "2026-01-31T11:30:00Z");
    for (ack, nack, expected) in [
        (None, None, "warning\">not answered"),
        (Some(("a/8", early)), None, "ok\">accepted"),
        (Some(("a/8", early)), Some(("a/9", late)), "error\">rejected"),
        (Some(("a/8", late)), Some(("a/9", late)), "error\">rejected"),
        (Some(("a/9", late)), Some(("a/8", late)), "ok\">accepted"),
        (Some(("a/9", late)), Some(("a/8", early)), "ok\">accepted"),
        (None, Some(("a/9", early)), "error\">rejected"),
    ] {
        let discovery = with_type("a.b/c.Listener", type_with_answers("a/9", ack, nack));
        let html = page_with("/discovery", json!(discovery));
        let age = if ack.is_none() { "" } else { " ago" };
        let (_, row) = html.split_once("<td>Listener</td><td>1</td><td>9</td>").expect("a row");
        let (ack, state) = row.split_once("</td>").expect("a cell");
        assert!(ack.ends_with(age), "{ack}");
        assert!(state.starts_with(&format!("<td><b class=\"{expected}</b>")), "{state}");
    }
}

#[test]
fn a_held_page_is_not_reloaded_and_links_back() {
    let html = page(&Report::default(), &empty(), true);
    assert!(!html.contains("http-equiv"), "{html}");
    assert!(html.contains("<a href=\".\">reload</a>"), "{html}");
    let html = page_without_findings(&empty());
    assert!(html.contains("<a href=\"?hold\">hold</a>"), "{html}");
}

#[test]
fn the_standby_and_clusters_on_demand_have_cards() {
    let mut overview = empty();
    overview["discovery"]["on_demand"] = json!({ "known": 400, "sent": 100, "used": 7 });
    for (waits, word) in [
        (json!(null), "warning\">no standby"),
        (json!({ "name": "b", "hindrance": null }), "ok\">can take over"),
        (json!({ "name": "b", "hindrance": "HOT" }), "warning\">cannot take over"),
    ] {
        overview["standby"] = json!({ "serves": "a", "waits": waits });
        let html = page_without_findings(&overview);
        for words in [
            "Envoy has 100 of 400 clusters.",
            "style=\"left:0.0%;width:25.0%\"",
            "<th scope=\"row\">used</th><td>7</td>",
            &format!("<h2>Standby<b class=\"{word}</b>"),
        ] {
            assert!(html.contains(words), "{words}: {html}");
        }
    }
}
