//! The overview as an HTML page: no scripts, no further files, reloaded every five seconds. Every
//! colour is also said in words.

use maud::{DOCTYPE, Markup, PreEscaped, Render, html};

use super::{Overview, Wasm, discovery};
use crate::clock::rfc3339;
use crate::duration::approximate;
use crate::envoy::handle::{Report, State};
use crate::envoy::shutdown::Step;
use crate::istiod::status::{Status, Tls};
use crate::logging::Entry;
use crate::secrets::observe::{Certificate, Secret, Snapshot};

/// A bundle of roots may be long; the JSON has all.
const MAX_CERTIFICATES: usize = 5;

/// Classes of the style sheet.
pub(super) const GOOD: &str = "good";
pub(super) const WARN: &str = "warn";
pub(super) const BAD: &str = "bad";
const PLAIN: &str = "plain";

pub(super) fn page(overview: &Overview) -> String {
    let agent = &overview.agent;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                meta http-equiv="refresh" content="5";
                title { (readiness(overview)) ": " (agent.node) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                h1 { "istio-agent" }
                div.dim {
                    (agent.node) br;
                    (agent.version) ", up " (approximate(agent.uptime_seconds)) ", seen " (overview.now)
                }
                (states(overview))
                main { (sections(overview)) }
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

fn readiness(overview: &Overview) -> &'static str {
    if overview.ready { "ready" } else { "not ready" }
}

/// The state of every section in one place.
fn states(overview: &Overview) -> Markup {
    let class = if overview.ready { GOOD } else { BAD };
    html! {
        ul.states {
            li {
                "Pod " (badge(class, readiness(overview)))
                @if let Some(missing) = &overview.missing { (note(missing)) }
            }
            li { "Envoy " (envoy_state(overview.envoy.as_ref())) }
            li { "istiod " (istiod_state(&overview.istiod)) }
            li { "Certificate " (certificate_state(overview.certificates.as_ref())) }
            li { "Configuration " (discovery::state(&overview.discovery)) }
        }
    }
}

fn sections(overview: &Overview) -> Markup {
    let envoy = overview.envoy.as_ref();
    html! {
        @if let Some(envoy) = envoy { (envoy_section(envoy, overview.envoy_uptime_seconds)) }
        (istiod_section(&overview.istiod))
        @if let Some(envoy) = envoy { (drain_section(envoy)) }
        @if let Some(snapshot) = &overview.certificates { (certificates(snapshot)) }
        (start_up(overview))
        @if let Some(dns) = &overview.dns {
            (facts("DNS", "ndsz", html! {
                @if dns.ready { (fact("Name table", Some(badge(GOOD, "received")))) }
                @else { (fact("Name table", Some(badge(WARN, "not received yet")))) }
            }))
        }
        @if let Some(health) = &overview.health {
            (facts("Workload", "health", html! {
                (fact("Check", Some(health.check)))
                @match &*health.verdict().borrow() {
                    None => (fact("State", Some(badge(WARN, "not checked yet")))),
                    Some(Ok(())) => (fact("State", Some(badge(GOOD, "healthy")))),
                    Some(Err(problem)) => {
                        (fact("State", Some(html! { (badge(BAD, "unhealthy")) (note(problem)) })))
                    }
                }
            }))
        }
        @if let Some(wasm) = overview.wasm.as_ref().and_then(wasm_section) { (wasm) }
        (discovery::section(&overview.discovery))
        (warnings(&overview.warnings))
    }
}

/// A state in colour and in words.
pub(super) fn badge(class: &str, words: impl Render) -> Markup {
    html! { b class=(class) { (words) } }
}

/// Small letters after a space.
pub(super) fn note(text: impl Render) -> Markup {
    html! { " " small { (text) } }
}

/// How wide a section is.
#[derive(Clone, Copy)]
pub(super) enum Width {
    Column,
    Page,
}

/// A card with a link to its source as JSON.
pub(super) fn card(width: Width, title: &str, json: &str, content: Markup) -> Markup {
    let is_wide = matches!(width, Width::Page);
    html! {
        section.wide[is_wide] { h2 { (title) " " a href=(json) { "JSON" } } (content) }
    }
}

/// A table with a row of headings.
pub(super) fn list(headings: &[&str], rows: Markup) -> Markup {
    html! {
        table.list {
            tr { @for heading in headings { th scope="col" { (heading) } } }
            (rows)
        }
    }
}

/// A section of facts.
fn facts(title: &str, json: &str, rows: Markup) -> Markup {
    card(Width::Column, title, json, html! { table.facts { (rows) } })
}

/// A row of a table of facts, if there is a value.
fn fact(name: &str, value: Option<impl Render>) -> Markup {
    html! {
        @if let Some(value) = value { tr { th scope="row" { (name) } td { (value) } } }
    }
}

fn envoy_state(envoy: Option<&Report>) -> Markup {
    match envoy.map(|envoy| envoy.state) {
        None => badge(PLAIN, "not run by the agent"),
        Some(State::Running) => badge(GOOD, "running"),
        Some(State::Initial) => badge(WARN, "not started yet"),
        Some(State::Starting) => badge(WARN, "starting"),
        Some(State::Draining) => badge(WARN, "draining"),
        Some(State::Stopping) => badge(WARN, "stopping"),
        Some(State::Exited) => badge(BAD, "exited"),
    }
}

fn envoy_section(envoy: &Report, uptime: Option<f64>) -> Markup {
    let rows = html! {
        (fact("State", Some(envoy_state(Some(envoy)))))
        (fact("Uptime", uptime.map(approximate)))
        (fact("Process", envoy.pid.map(|pid| format!("pid {pid}"))))
        (fact("Memory", envoy.rss_bytes.map(size)))
        (fact("Restarts", Some(envoy.epoch)))
        (fact("Next start", envoy.restart.map(rfc3339)))
        (fact("Last crash", envoy.last_crash.as_ref().map(|crash| html! {
            (badge(BAD, crash.to_string())) (note(format!("{}, pid {}", crash.when, crash.pid)))
        })))
    };
    facts("Envoy", "envoy", rows)
}

fn drain_section(envoy: &Report) -> Markup {
    let state = match (&envoy.ending, envoy.is_drained) {
        (Some(_), _) => badge(WARN, "shutting down"),
        (None, true) => badge(WARN, "drained, no drain at the shutdown"),
        (None, false) => badge(GOOD, "none requested"),
    };
    let plan = (!envoy.plan.0.is_empty()).then(|| envoy.plan.to_string());
    let rows = html! {
        (fact("State", Some(state)))
        @if let Some(ending) = &envoy.ending {
            (fact("Cause", Some(ending.cause)))
            (fact("Since", Some(rfc3339(ending.since))))
            (fact("Waits for", Some(ending.waits_for.to_string())))
            (fact("No later than", Some(rfc3339(ending.until))))
            @if ending.waits_for == Step::LongRequests {
                (fact("Requests", ending.connections))
            } @else { (fact("Connections", ending.connections)) }
        }
        (fact("Steps of a shutdown", plan))
    };
    facts("Drain and shutdown", "../drain", rows)
}

fn istiod_state(status: &Status) -> Markup {
    match status.connected {
        Some(_) => badge(GOOD, "connected"),
        None => badge(BAD, "not connected"),
    }
}

fn istiod_section(status: &Status) -> Markup {
    let connected = status.connected.as_ref();
    let rows = html! {
        (fact("State", Some(istiod_state(status))))
        (fact("Address", Some(html! {
            (status.address)
            @if let Some(connected) = connected { (note(&connected.peer)) }
        })))
        (fact("Since", connected.map(|connected| &connected.since)))
        (fact("TLS", connected.map(|connected| tls(connected.tls.as_ref()))))
        (fact("Dials", Some(status.dials)))
        (fact("Last error", status.last_error.as_ref().map(|failure| html! {
            (failure.error) (note(&failure.at))
        })))
    };
    facts("Connection to istiod", "istiod", rows)
}

fn tls(tls: Option<&Tls>) -> Markup {
    let Some(tls) = tls else {
        return badge(WARN, "none: plaintext");
    };
    let known = [&tls.version, &tls.key_exchange, &tls.cipher];
    let known: Vec<_> = known.into_iter().flatten().map(String::as_str).collect();
    html! { (known.join(", ")) }
}

/// The life left of the workload certificate.
fn certificate_state(snapshot: Option<&Snapshot>) -> Markup {
    let Some(snapshot) = snapshot else {
        return badge(PLAIN, "served by another process");
    };
    let workload = snapshot.secrets.first();
    match workload.and_then(|secret| secret.certificates.first()) {
        Some(leaf) => life(leaf, snapshot.problem.is_some()),
        None => badge(BAD, "none yet"),
    }
}

fn certificates(snapshot: &Snapshot) -> Markup {
    let content = html! {
        @if let Some(problem) = &snapshot.problem {
            p {
                (badge(BAD, "no new certificate")) " " (problem.error)
                (note(format!("{} in a row, next attempt {}", problem.failures, problem.next_attempt)))
            }
        }
        (list(&["Secret", "Left", "Expires"], html! {
            @for secret in &snapshot.secrets { (secret_rows(secret, snapshot.problem.is_some())) }
        }))
    };
    card(Width::Column, "Certificates", "certs", content)
}

fn secret_rows(secret: &Secret, renewal_fails: bool) -> Markup {
    let certificates = &secret.certificates;
    html! {
        @if certificates.is_empty() {
            tr { td { (secret.name) } td { (badge(BAD, "not there yet")) } td {} }
        }
        @for (index, certificate) in certificates.iter().take(MAX_CERTIFICATES).enumerate() {
            @let renewal = secret.next_renewal.as_ref().filter(|_| index == 0);
            tr {
                td {
                    (secret.name)
                    @if certificate.spiffe_ids.is_empty() { (note(&certificate.subject)) }
                    @else { (note(certificate.spiffe_ids.join(" "))) }
                }
                td { (life(certificate, renewal_fails)) }
                td data-of="Expires" {
                    (certificate.not_after)
                    @if let Some(renewal) = renewal { (note(format!("renewal {renewal}"))) }
                }
            }
        }
        @if certificates.len() > MAX_CERTIFICATES {
            tr { td { "and " (certificates.len() - MAX_CERTIFICATES) " more" } td {} td {} }
        }
    }
}

fn life(certificate: &Certificate, renewal_fails: bool) -> Markup {
    let left = certificate.remaining_seconds;
    if left <= 0.0 {
        return badge(BAD, format!("expired {} ago", approximate(-left)));
    }
    let class = if renewal_fails { WARN } else { GOOD };
    badge(class, format!("{} left", approximate(left)))
}

fn start_up(overview: &Overview) -> Markup {
    let reached = &overview.start_up;
    let last = reached.last().map_or(1.0, |last| last.after_ms).max(0.001);
    let content = html! {
        table.times {
            @for reached in reached {
                tr {
                    th scope="row" { (reached.milestone) }
                    td { (format!("{:.1} ms", reached.after_ms)) }
                    td { progress max="100" value=(format!("{:.0}", reached.after_ms / last * 100.0)) {} }
                }
            }
        }
    };
    card(Width::Column, "Start-up", "overview", content)
}

fn warnings(entries: &[Entry]) -> Markup {
    let rows = html! {
        @for entry in entries {
            @let class = if entry.level == "error" { BAD } else { WARN };
            tr {
                td {
                    (entry.last)
                    @if entry.times > 1 {
                        (note(format!("{} times since {}", entry.times, entry.first)))
                    }
                }
                td { (badge(class, entry.level)) (note(entry.scope)) }
                td { (entry.message) }
            }
        }
    };
    let content = match entries.is_empty() {
        true => html! { p { (badge(GOOD, "none")) } },
        false => list(&["Last", "Level", "Message"], rows),
    };
    card(Width::Page, "Recent warnings", "overview", content)
}

/// It is left out where there are no modules.
fn wasm_section(snapshot: &Wasm) -> Option<Markup> {
    let Wasm {
        resources,
        fetching,
    } = snapshot;
    if resources.is_empty() && fetching.is_empty() {
        return None;
    }
    let content = html! {
        (list(&["Module", "State", "Size"], html! {
            @for url in fetching {
                tr { td { (url) } td { (badge(WARN, "under way")) } td {} }
            }
            @for resource in resources {
                tr {
                    td { (resource.name) (note(&resource.url)) }
                    td {
                        @if let Some(error) = &resource.error {
                            (badge(BAD, "missing")) (note(error))
                        } @else {
                            (badge(GOOD, "in use"))
                        }
                        " for " (approximate(resource.age_seconds))
                        @if let Some(left) = resource.retry_seconds {
                            (note(format!("next attempt in {}", approximate(left))))
                        }
                        @if let Some(sha256) = &resource.sha256 { (note(sha256)) }
                    }
                    td { @if let Some(bytes) = resource.size_bytes { (size(bytes)) } }
                }
            }
        }))
    };
    Some(card(Width::Page, "Wasm modules", "wasm", content))
}

pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

/// `1 type`, `2 types`.
pub(super) fn counted(count: usize, noun: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{s}")
}

/// The abbreviation of a resource type's discovery service, and the type's last name.
pub(super) fn resource_type(url: &str) -> (Option<&'static str>, &str) {
    let name = url.rsplit(['.', '/']).next().unwrap_or(url);
    let short = match name {
        "Cluster" => Some("CDS"),
        "ClusterLoadAssignment" => Some("EDS"),
        "Listener" => Some("LDS"),
        "RouteConfiguration" => Some("RDS"),
        "ScopedRouteConfiguration" => Some("SRDS"),
        "Secret" => Some("SDS"),
        "TypedExtensionConfig" => Some("ECDS"),
        "NameTable" => Some("NDS"),
        "ProxyConfig" => Some("PCDS"),
        _ => None,
    };
    (short, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        for (bytes, expected) in [
            (0, "0 B"),
            (1_023, "1023 B"),
            (1_536, "1.5 KiB"),
            (3 << 20, "3.0 MiB"),
        ] {
            assert_eq!(size(bytes), expected);
        }
    }

    #[test]
    fn known_types_have_the_abbreviation_of_their_discovery_service() {
        let known = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
        assert_eq!(resource_type(known), (Some("CDS"), "Cluster"));
        assert_eq!(resource_type("odd/one"), (None, "one"));
        assert_eq!(resource_type(""), (None, ""));
    }
}
