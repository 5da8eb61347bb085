//! Renders the overview as an HTML page: the doctor's findings, a card for each part of the agent, and the meanings of
//! the codes. It has no scripts, needs no further files, and is reloaded every five seconds unless it is held.

use std::collections::BTreeSet;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value;

use super::cards::View;
use crate::logging::is_interpreted;
use crate::problem::{Code, Level};
use crate::report::Report;

const OTHERS: &str = "debug/overview debug/config debug/log debug/logging debug/scope healthz/ready drain \
                      metrics/agent stats/prometheus";

/// Renders the page. A page that is held does not reload itself, so its folded parts stay open.
pub(super) fn page(doctor: &Report, overview: &Value, is_held: bool) -> String {
    let view = View::new(overview);
    let agent = &overview["agent"];
    let node = linked(agent["node"].as_str().unwrap_or_default());
    let body = html! {
        header {
            h1 { "istio-agent" }
            div { (node) }
            small {
                (view.value("", &agent["version"])) ", up "
                (view.value("uptime_seconds", &agent["uptime_seconds"])) ", seen "
                (overview["now"].as_str().unwrap_or_default()) ", "
                @if is_held { a href="." { "reload" } }
                @else { "reloads every 5 s: " a href="?hold" { "hold" } }
            }
        }
        (diagnosis(doctor))
        main { (view.cards(overview)) }
    };
    let body = body.into_string();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                @if !is_held { meta http-equiv="refresh" content="5"; }
                title { (doctor.verdict) ": " (node) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                (PreEscaped(&body))
                (meanings(&body, is_held))
                footer {
                    "Other pages: "
                    @for path in OTHERS.split(' ') { a href={ "/" (path) } { (path) } " " }
                }
            }
        }
    };
    page.into_string().replace(|c| c != '\n' && is_interpreted(c), "\u{fffd}")
}

/// Renders the doctor's verdict, which names the first finding, its remedy, and the other findings. All checks are
/// folded.
fn diagnosis(report: &Report) -> Markup {
    let findings = report.findings();
    html! {
        div class={ "verdict " (report.level.name()) } {
            h2 { (linked(&report.verdict)) }
            @if let Some(first) = findings.first() && !first.consequence.is_empty() {
                p { (linked(&first.consequence)) }
            }
            p { "What to do: " (linked(&report.remedy)) }
        }
        ul { @for check in findings.iter().skip(1) { li { (line(check.level, &check.sentence())) } } }
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
    html! { (pill(level, &level.name())) " " (linked(text)) }
}

/// Renders a word in the colour of a level.
pub(super) fn pill(level: Level, word: &str) -> Markup {
    html! { b class=(level.name()) { (word) } }
}

/// Renders a text with links from codes to their meanings. The page with these is held, so that they stay in view.
pub(super) fn linked(text: &str) -> Markup {
    html! {
        @for (index, text) in text.split('`').enumerate() {
            @if index % 2 == 1 { code { (text) } } @else {
                @for part in text.split_inclusive(|c| !is_of_code(c)) {
                    @let word = part.trim_end_matches(|c| !is_of_code(c));
                    @if Code::named(word).is_some() { a href={ "?hold#" (word) } { (word) } (part[word.len()..]) }
                    @else { (part) }
                }
            }
        }
    }
}

fn is_of_code(c: char) -> bool {
    c.is_ascii_uppercase() || c == '_'
}

/// Renders the meanings of the codes to which a page links.
fn meanings(page: &str, is_held: bool) -> Markup {
    let codes: BTreeSet<_> =
        page.split("\"?hold#").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    html! {
        @if !codes.is_empty() {
            details open[is_held] {
                summary { "Meanings of the codes" }
                dl {
                    @for code in codes.into_iter().filter_map(Code::named) {
                        dt id=(code.name()) { (code.name()) }
                        dd { (code.cause()) br; (code.consequence()) }
                        dd { "What to do: " (linked(code.remedy())) }
                    }
                }
            }
        }
    }
}
