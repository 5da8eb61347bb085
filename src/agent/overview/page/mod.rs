//! The overview as a page for people: on a phone, on a desk, and in a terminal.
//!
//! Nothing but HTML and a style sheet within it, so it works where neither scripts nor other files
//! do, and asks for itself anew every few seconds. Colours are said in words as well.
//!
//! Does not gather anything.

mod certificates;
mod discovery;
mod process;

use super::html::{Html, Tone};
use super::words::{moment, span};
use super::{Overview, words};
use crate::istiod::status::{Connected, Status, Tls};
use crate::logging::Entry;
use crate::timeline::Reached;

const HEAD: &str = concat!(
    "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n",
    "<meta name=viewport content=\"width=device-width,initial-scale=1\">\n",
    "<meta http-equiv=refresh content=5>\n<style>\n",
    include_str!("style.css"),
    "</style>\n<title>",
);

const LINKS: &str = "<footer class=dim>As JSON: <a href=\"overview\">all of this</a>. Also: \
    <a href=\"../healthz/ready\">readiness</a>, <a href=\"../drain\">the end</a>, \
    <a href=\"../metrics/agent\">metrics of the agent</a>, \
    <a href=\"../stats/prometheus\">metrics of all</a>.</footer>\n";

/// The page.
pub(super) fn page(overview: &Overview) -> String {
    let mut html = Html::default();
    html.markup(HEAD).text(readiness(overview)).markup(": ");
    html.text(&overview.agent.node)
        .markup("</title>\n<h1>istio-agent</h1>\n<div class=dim>");
    html.text(&overview.agent.node).markup("<br>");
    html.text(&overview.agent.version).markup(", up ");
    html.text(&span(overview.agent.uptime_seconds));
    html.markup(", seen ")
        .text(&moment(&overview.now))
        .markup(" UTC</div>\n");
    at_a_glance(&mut html, overview);
    html.markup("<main>\n");
    process::envoy(&mut html, overview);
    istiod(&mut html, &overview.istiod);
    process::end(&mut html, overview.envoy.as_ref());
    certificates::section(&mut html, overview.certificates.as_ref());
    start_up(&mut html, &overview.start_up);
    dns(&mut html, overview);
    discovery::section(&mut html, &overview.discovery);
    warnings(&mut html, &overview.warnings);
    html.markup("</main>\n").markup(LINKS);
    html.into_text()
}

fn readiness(overview: &Overview) -> &'static str {
    if overview.ready { "ready" } else { "not ready" }
}

/// The states of all sections in one place.
fn at_a_glance(html: &mut Html, overview: &Overview) {
    html.markup("<ul class=glance>\n<li>Pod ");
    let tone = if overview.ready {
        Tone::Good
    } else {
        Tone::Bad
    };
    html.badge(tone, readiness(overview));
    if let Some(missing) = &overview.missing {
        html.note(missing);
    }
    html.markup("\n<li>Envoy ");
    process::state(html, overview.envoy.as_ref());
    html.markup("\n<li>istiod ");
    connection(html, overview.istiod.connected.as_ref());
    html.markup("\n<li>Certificate ");
    certificates::state(html, overview.certificates.as_ref());
    html.markup("\n<li>Configuration ");
    discovery::state(html, &overview.discovery);
    html.markup("\n</ul>\n");
}

fn connection(html: &mut Html, connected: Option<&Connected>) {
    match connected {
        Some(_) => html.badge(Tone::Good, "connected"),
        None => html.badge(Tone::Bad, "not connected"),
    };
}

fn istiod(html: &mut Html, status: &Status) {
    html.section("Connection to istiod", "istiod", |html| {
        html.facts(|html| {
            html.fact("State", |html| connection(html, status.connected.as_ref()));
            html.fact("Address", |html| {
                html.text(&status.address);
                if let Some(connected) = &status.connected {
                    html.note(&connected.peer);
                }
            });
            if let Some(connected) = &status.connected {
                html.fact("Since", |html| {
                    html.text(&moment(&connected.since)).markup(" UTC");
                });
                html.fact("TLS", |html| tls(html, connected.tls.as_ref()));
            }
            html.fact("Dials", |html| {
                html.text(&status.dials.to_string());
            });
            if let Some(failure) = &status.last_error {
                html.fact("Last error", |html| {
                    html.text(&failure.error);
                    html.note(&format!("{} UTC", moment(&failure.at)));
                });
            }
        });
    });
}

fn tls(html: &mut Html, tls: Option<&Tls>) {
    let Some(tls) = tls else {
        html.badge(Tone::Warn, "none: plaintext");
        return;
    };
    let known = [&tls.version, &tls.key_exchange, &tls.cipher];
    let known: Vec<_> = known.into_iter().flatten().map(String::as_str).collect();
    html.text(&known.join(", "));
}

fn start_up(html: &mut Html, reached: &[Reached]) {
    let last = reached.last().map_or(1.0, |last| last.after_ms).max(0.001);
    html.section("Start-up", "overview", |html| {
        html.markup("<table class=times>\n");
        for reached in reached {
            html.markup("<tr><th scope=row>").text(reached.milestone);
            html.markup("<td>")
                .text(&format!("{:.1} ms", reached.after_ms));
            html.markup("<td><progress max=100 value=\"");
            html.text(&format!("{:.0}", reached.after_ms / last * 100.0));
            html.markup("\"></progress>\n");
        }
        html.markup("</table>\n");
    });
}

fn dns(html: &mut Html, overview: &Overview) {
    let Some(dns) = &overview.dns else { return };
    html.section("DNS", "ndsz", |html| {
        html.facts(|html| {
            html.fact("Table of names", |html| {
                match dns.ready {
                    true => html.badge(Tone::Good, "received"),
                    false => html.badge(Tone::Warn, "not received yet"),
                };
            });
        });
    });
}

fn warnings(html: &mut Html, entries: &[Entry]) {
    html.wide_section("Recent warnings", "overview", |html| {
        if entries.is_empty() {
            html.markup("<p>")
                .badge(Tone::Good, "none")
                .markup("</p>\n");
            return;
        }
        html.list(&["Last", "Level", "Message"], |html| {
            entries.iter().for_each(|entry| warning(html, entry));
        });
    });
}

fn warning(html: &mut Html, entry: &Entry) {
    html.markup("<tr><td>").text(&moment(&entry.last));
    if entry.times > 1 {
        html.note(&format!(
            "{} times since {}",
            entry.times,
            moment(&entry.first)
        ));
    }
    let tone = match entry.level {
        "error" => Tone::Bad,
        _ => Tone::Warn,
    };
    html.markup("<td>").badge(tone, entry.level);
    html.note(entry.scope);
    html.markup("<td>").text(&entry.message).markup("\n");
}

#[cfg(test)]
mod tests;
