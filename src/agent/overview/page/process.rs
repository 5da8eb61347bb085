//! Envoy itself, and its way down.
//!
//! Does not show what Envoy said before it crashed; that is in the JSON.

use super::Overview;
use super::words::{moment, size, span};
use crate::agent::overview::html::{Html, Tone};
use crate::clock::rfc3339;
use crate::envoy::crash::Crash;
use crate::envoy::handle::{Report, State};
use crate::envoy::shutdown::{Shutdown, Step};

/// The state in a word.
pub(super) fn state(html: &mut Html, envoy: Option<&Report>) {
    match envoy.map(|envoy| envoy.state) {
        None => html.badge(Tone::Plain, "not run by the agent"),
        Some(State::Running) => html.badge(Tone::Good, "running"),
        Some(State::Initial) => html.badge(Tone::Warn, "not started yet"),
        Some(State::Starting) => html.badge(Tone::Warn, "starting"),
        Some(State::Draining) => html.badge(Tone::Warn, "draining"),
        Some(State::Stopping) => html.badge(Tone::Warn, "stopping"),
        Some(State::Exited) => html.badge(Tone::Bad, "exited"),
    };
}

pub(super) fn envoy(html: &mut Html, overview: &Overview) {
    let Some(envoy) = &overview.envoy else { return };
    html.section("Envoy", "envoy", |html| {
        html.facts(|html| {
            html.fact("State", |html| state(html, Some(envoy)));
            fact(html, "Uptime", overview.envoy_uptime_seconds.map(span));
            fact(html, "Process", envoy.pid.map(|pid| format!("pid {pid}")));
            fact(html, "Memory", envoy.rss_bytes.look().map(size));
            fact(html, "Restarts", Some(envoy.epoch.to_string()));
            fact(html, "Next start", envoy.restart.map(utc));
            html.fact("Last crash", |html| crash(html, envoy.last_crash.as_ref()));
        });
    });
}

fn crash(html: &mut Html, crash: Option<&Crash>) {
    match crash {
        Some(crash) => {
            html.badge(Tone::Bad, &crash.to_string());
            html.note(&format!("{} UTC, pid {}", moment(&crash.when), crash.pid));
        }
        None => {
            html.text("none");
        }
    }
}

/// Drains, and what the end looks like or will look like.
pub(super) fn end(html: &mut Html, envoy: Option<&Report>) {
    let Some(envoy) = envoy else { return };
    html.section("Drain and end", "../drain", |html| {
        html.facts(|html| {
            html.fact("State", |html| {
                let (tone, words) = match (&envoy.ending, envoy.is_drained) {
                    (Some(_), _) => (Tone::Warn, "ending"),
                    (None, true) => (Tone::Warn, "clients sent away, no drain at the end"),
                    (None, false) => (Tone::Good, "nobody has asked for a drain or an end"),
                };
                html.badge(tone, words);
            });
            if let Some(ending) = &envoy.ending {
                under_way(html, ending);
            }
            let has_plan = !envoy.plan.0.is_empty();
            let plan = has_plan.then(|| envoy.plan.to_string());
            fact(html, "Steps of an end", plan);
        });
    });
}

fn under_way(html: &mut Html, ending: &Shutdown) {
    fact(html, "Why", Some(ending.cause.to_owned()));
    fact(html, "Since", Some(utc(ending.since)));
    fact(
        html,
        "Waits for",
        ending.waits_for.map(|step| step.to_string()),
    );
    fact(html, "No later than", ending.until.map(utc));
    let counted = match ending.waits_for {
        Some(Step::LongRequests) => "Requests",
        _ => "Connections",
    };
    let left = ending.connections.map(|count| count.to_string());
    fact(html, counted, left);
}

fn fact(html: &mut Html, name: &'static str, value: Option<String>) {
    if let Some(value) = value {
        html.fact(name, |html| {
            html.text(&value);
        });
    }
}

fn utc(time: std::time::SystemTime) -> String {
    format!("{} UTC", moment(&rfc3339(time)))
}
