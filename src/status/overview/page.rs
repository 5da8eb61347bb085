//! The overview as an HTML page: the states in colour and in words, then the JSON as tables. It has no
//! scripts, needs no further files, and is reloaded every five seconds.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::{Value, json};

use super::Overview;
use crate::duration::approximate;
use crate::xds::observe::Source;

/// Classes of the style sheet.
const GOOD: &str = "good";
const WARN: &str = "warn";
const BAD: &str = "bad";
const PLAIN: &str = "plain";

/// Title, member of the overview, and path of the same as JSON.
const SECTIONS: [(&str, &str, &str); 9] = [
    ("Envoy", "envoy", "envoy"),
    ("Connection to istiod", "istiod", "istiod"),
    ("Certificates", "certificates", "certs"),
    ("Start-up", "start_up", "overview"),
    ("DNS", "dns", "ndsz"),
    ("Workload", "health", "health"),
    ("Wasm modules", "wasm", "wasm"),
    ("Discovery (xDS)", "discovery", "xdsz"),
    ("Recent warnings", "warnings", "overview"),
];

/// Class, words, and what is to be known besides.
type Shown = (&'static str, String, Option<String>);

pub(super) fn page(overview: &Overview) -> String {
    let agent = &overview.agent;
    let members = json!(overview);
    let states = [
        ("Pod", pod(overview)),
        ("istiod", istiod(overview)),
        ("Certificate", certificate(overview)),
        ("Configuration", configuration(overview)),
    ];
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                meta http-equiv="refresh" content="5";
                title { (pod(overview).1) ": " (agent.node) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                h1 { "istio-agent" }
                div.dim {
                    (agent.node) br;
                    (agent.version) ", up " (approximate(agent.uptime_seconds)) ", seen " (overview.now)
                }
                ul.states {
                    @for (name, (class, words, note)) in &states {
                        li {
                            (name) " " b class=(class) { (words) }
                            @if let Some(note) = note { " " small { (note) } }
                        }
                    }
                }
                main {
                    @for (title, member, path) in SECTIONS {
                        @if !members[member].is_null() {
                            section { h2 { (title) " " a href=(path) { "JSON" } } (section(&members[member])) }
                        }
                    }
                }
                footer.dim {
                    "As JSON: " a href="overview" { "all of this" } ". Also: "
                    a href="../healthz/ready" { "readiness" } ", "
                    a href="../drain" { "drain" } ", "
                    a href="../metrics/agent" { "the agent's metrics" } ", "
                    a href="../stats/prometheus" { "merged metrics" } "."
                }
            }
        }
    };
    // Control characters, and those that turn the direction of text, could hide what is beside them.
    let is_hidden = |character: char| {
        (character.is_control() && character != '\n')
            || matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    page.into_string().replace(is_hidden, "\u{fffd}")
}

fn pod(overview: &Overview) -> Shown {
    match overview.ready {
        true => (GOOD, "ready".to_owned(), None),
        false => (BAD, "not ready".to_owned(), overview.missing.clone()),
    }
}

fn istiod(overview: &Overview) -> Shown {
    let status = &overview.istiod;
    let (class, words) = match status.connected {
        Some(_) => (GOOD, "connected"),
        None => (BAD, "not connected"),
    };
    let failure = status.last_error.as_ref();
    let note = failure.map(|failure| format!("{}: {}", failure.at, failure.problem));
    (class, words.to_owned(), note)
}

/// The life left of the workload certificate.
fn certificate(overview: &Overview) -> Shown {
    let Some(snapshot) = &overview.certificates else {
        return (PLAIN, "served by another process".to_owned(), None);
    };
    let failure = snapshot.problem.as_ref();
    let note = failure.map(|failure| format!("no new certificate: {}", failure.problem));
    let leaf = snapshot
        .secrets
        .first()
        .and_then(|secret| secret.certificates.first());
    let (class, words) = match leaf.map(|leaf| leaf.remaining_seconds) {
        None => (BAD, "none yet".to_owned()),
        Some(left) if left <= 0.0 => (BAD, format!("expired {} ago", approximate(-left))),
        Some(left) if note.is_some() => (WARN, format!("{} left", approximate(left))),
        Some(left) => (GOOD, format!("{} left", approximate(left))),
    };
    (class, words, note)
}

/// Whether Envoy has accepted the last response of every type.
fn configuration(overview: &Overview) -> Shown {
    let snapshot = &overview.discovery;
    let types: Vec<_> = snapshot.types.values().collect();
    let refused = types.iter().filter(|of_type| of_type.is_refused());
    let reasons: Vec<_> = refused
        .filter_map(|of_type| Some(of_type.last_nack.as_ref()?.reason.as_str()))
        .collect();
    if !reasons.is_empty() {
        return (BAD, "NACK".to_owned(), Some(reasons.join("; ")));
    }
    let answers = types
        .iter()
        .filter_map(|of_type| of_type.last_response.as_ref());
    let (class, words) = match answers.clone().any(|last| last.answered) {
        true => (GOOD, "accepted"),
        false => (WARN, "none yet"),
    };
    let note = match &snapshot.stream {
        None => "no stream of Envoy",
        Some(stream) if stream.source == Source::Kept => "last known good, istiod is unreachable",
        Some(stream) if !stream.connected => "stream waits for istiod",
        Some(_) => return (class, words.to_owned(), None),
    };
    (class, words.to_owned(), Some(note.to_owned()))
}

/// A section: its members as rows, without those that are null.
fn section(members: &Value) -> Markup {
    let Some(members) = members.as_object() else {
        return value("", members);
    };
    html! {
        table {
            @for (name, member) in members.iter().filter(|(_, member)| !member.is_null()) {
                tr { th scope="row" { (title(name)) } td { (value(name, member)) } }
            }
        }
    }
}

/// A value in a row. Elements of lists, and objects in objects, begin a line.
fn value(name: &str, value: &Value) -> Markup {
    match value {
        Value::Object(members) => html! {
            @for (name, member) in members.iter().filter(|(_, member)| !member.is_null()) {
                @let named = html! { small { (title(name)) } " " (self::value(name, member)) };
                @if member.is_object() { div { (named) } } @else { span { (named) } " " }
            }
        },
        Value::Array(elements) => html! {
            @if elements.is_empty() { "none" }
            @for element in elements { div { (self::value(name, element)) } }
        },
        Value::Bool(is_so) => html! { (if *is_so { "yes" } else { "no" }) },
        Value::String(text) => html! { (text) },
        Value::Null => html! {},
        Value::Number(number) => match number.as_f64() {
            Some(seconds) if name.ends_with("_seconds") => html! { (approximate(seconds)) },
            _ => html! { (number.to_string()) },
        },
    }
}

/// A member's name in words, and a type URL's last part.
fn title(name: &str) -> String {
    let name = name.rsplit(['.', '/']).next().unwrap_or(name);
    name.trim_end_matches("_seconds").replace('_', " ")
}
