//! Renders the overview as an HTML page: the doctor's findings, then the JSON as tables. It has no scripts, needs
//! no further files, and is reloaded every five seconds.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value;

use crate::logging::is_interpreted;
use crate::report::{Level, Report};
use crate::runtime::duration::rounded_seconds;

/// The sections: the title, the member of the overview, and the path of the same data as JSON.
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

pub(super) fn page(doctor: &Report, overview: &Value) -> String {
    let agent = &overview["agent"];
    let node = value("", &agent["node"]);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                meta http-equiv="refresh" content="5";
                title { (doctor.verdict) ": " (node) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                h1 { "istio-agent" }
                div.dim {
                    (node) br;
                    (value("", &agent["version"])) ", up "
                    (value("uptime_seconds", &agent["uptime_seconds"])) ", seen " (value("", &overview["now"]))
                }
                (diagnosis(doctor))
                main {
                    @for (title, member, path) in SECTIONS {
                        @if !overview[member].is_null() {
                            section { h2 { (title) " " a href=(path) { "JSON" } } (section(&overview[member])) }
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
    let hides_text = |c| c != '\n' && is_interpreted(c);
    page.into_string().replace(hides_text, "\u{fffd}")
}

/// Renders the doctor's verdict, its remedy, and the findings. The other checks are folded.
fn diagnosis(report: &Report) -> Markup {
    html! {
        p class=(report.level.name()) { (report.verdict) }
        p { "What to do: " (report.remedy) }
        ul { @for check in report.findings() { li { (line(check.level, &check.sentence())) } } }
        details {
            summary { "All checks" }
            @for group in &report.groups {
                h2 { (group.name) }
                ul { @for check in &group.checks { li { (line(check.level, &check.sentence())) } } }
            }
        }
    }
}

fn line(level: Level, text: &str) -> Markup {
    html! { b class=(level.name()) { (level.name()) } " " (text) }
}

/// Renders a section: its members as rows, without null members.
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

/// Renders a value in a row. Elements of lists, and objects in objects, begin a line.
pub(super) fn value(name: &str, value: &Value) -> Markup {
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
            Some(seconds) if name.ends_with("_seconds") => html! { (rounded_seconds(seconds)) },
            Some(ms) if name.ends_with("_ms") => html! { (rounded_seconds(ms / 1e3)) },
            Some(bytes) if name.ends_with("bytes") && bytes < 1e6 => {
                html! { (format!("{:.1} kB", bytes / 1e3)) }
            }
            Some(bytes) if name.ends_with("bytes") => html! { (format!("{:.1} MB", bytes / 1e6)) },
            _ => html! { (number.to_string()) },
        },
    }
}

/// Converts a member's name to words without its unit, and a type URL to its last part.
fn title(name: &str) -> String {
    let last = name.rsplit(['.', '/']).next().unwrap_or(name);
    let mut units = ["_seconds", "_ms", "_bytes"].iter();
    let without_unit = units.find_map(|unit| last.strip_suffix(unit));
    without_unit.unwrap_or(last).replace('_', " ")
}
