//! Renders the cards of the overview page. Each shows what an operator looks at first; all members of its part are
//! folded.

use maud::{Markup, html};
use prost_types::Timestamp;
use serde_json::Value;

use super::page::{linked, pill};
use crate::problem::Level;
use crate::runtime::duration::rounded_seconds;

/// The cards: the title, the JSON pointer of the part, the path of the same data as JSON, and the pointers of the
/// members above the folded ones.
const CARDS: [(&str, &str, &str, &str); 11] = [
    ("Connection to istiod", "/istiod", "istiod", "/connected/since /address /token_expires"),
    ("Discovery (xDS)", "/discovery", "xdsz", "/stream/since /served_since"),
    ("Clusters on demand", "/discovery/on_demand", "xdsz", "/used /pinned /held /absent"),
    ("Certificates", "/certificates", "certs", "/problem/code /problem/next_attempt"),
    ("Envoy", "/envoy", "envoy", "/started /rss_bytes /ending /last_restart /last_crash/when"),
    ("Standby", "/standby", "standby", "/serves /waits /last"),
    ("Start-up", "/start_up", "overview", ""),
    ("DNS", "/dns", "ndsz", ""),
    ("Workload", "/health", "health", ""),
    ("Wasm modules", "/wasm", "wasm", ""),
    ("Recent warnings", "/warnings", "overview", ""),
];
/// The member of the overview for the two containers of a pod.
pub(super) const PAIR: &str = "standby";
/// The longest time line, in seconds.
const MAX_TIME_LINE: f64 = 86_400.0;
/// The most certificates of a secret that have a bar.
const MAX_BARS: usize = 3;

/// The time of the page, to which times are relative, and the agent's uptime, in seconds.
pub(super) struct View {
    now: f64,
    uptime: f64,
}

impl View {
    pub(super) fn new(overview: &Value) -> Self {
        Self {
            now: seconds(&overview["now"]),
            uptime: overview["agent"]["uptime_seconds"].as_f64().unwrap_or_default(),
        }
    }

    pub(super) fn cards(&self, overview: &Value) -> Markup {
        let parts = CARDS.map(|card| (card, overview.pointer(card.1).unwrap_or(&Value::Null)));
        html! {
            @for ((title, pointer, path, rows), part) in parts.iter().filter(|(_, part)| !part.is_null()) {
                section {
                    h2 { (title) (state(pointer, part)) a href=(path) { "JSON" } }
                    (self.figure(pointer, part))
                    @if !rows.is_empty() {
                        table {
                            @for row in rows.split(' ') { (self.row(row, part.pointer(row).unwrap_or(&Value::Null))) }
                        }
                        details { summary { "Details" } (self.members(part)) }
                    }
                }
            }
        }
    }

    /// Renders the part of a card above the rows. Without rows this is all of the card.
    fn figure(&self, pointer: &str, part: &Value) -> Markup {
        match pointer {
            "/istiod" => self.outages(list(&part["outages"])),
            "/discovery" => self.types(part),
            "/discovery/on_demand" => {
                let [sent, known] = ["sent", "known"].map(|it| part[it].as_f64().unwrap_or(0.0));
                let share = (0.0, sent / known.max(1.0), Level::Ok);
                html! { "Envoy has " (sent) " of " (known) " clusters." (bar(Level::Skipped, [share])) }
            }
            "/certificates" => self.certificates(list(&part["secrets"])),
            "/envoy" | "/standby" => html! {},
            "/warnings" => self.warnings(list(part)),
            _ => self.members(part),
        }
    }

    /// Renders a part: its members as rows, without null members.
    fn members(&self, part: &Value) -> Markup {
        let Some(members) = part.as_object() else {
            return self.value("", part);
        };
        html! { table { @for (name, member) in members { (self.row(name, member)) } } }
    }

    fn row(&self, name: &str, member: &Value) -> Markup {
        html! {
            @if !member.is_null() { tr { th scope="row" { (title(name)) } td { (self.value(name, member)) } } }
        }
    }

    /// Renders a value in a row. Elements of lists, and objects in objects, begin a line.
    pub(super) fn value(&self, name: &str, value: &Value) -> Markup {
        match value {
            Value::Object(members) => html! {
                @for (name, member) in members.iter().filter(|(_, member)| !member.is_null()) {
                    @let named = html! { small { (title(name)) } " " (self.value(name, member)) };
                    @if member.is_object() { div { (named) } } @else { span { (named) } " " }
                }
            },
            Value::Array(elements) => html! {
                @if elements.is_empty() { "none" }
                @for element in elements { div { (self.value(name, element)) } }
            },
            Value::Bool(is_so) => html! { (if *is_so { "yes" } else { "no" }) },
            Value::String(text) if text.parse::<Timestamp>().is_ok() => {
                html! { (self.relative(value)) " " time { (text) } }
            }
            Value::String(text) => linked(text),
            Value::Null => html! {},
            Value::Number(number) => match number.as_f64() {
                Some(seconds) if name.ends_with("_seconds") => html! { (rounded_seconds(seconds)) },
                Some(ms) if name.ends_with("_ms") => html! { (rounded_seconds(ms / 1e3)) },
                Some(bytes) if name.ends_with("bytes") => {
                    let (size, unit) = if bytes < 1e6 { (1e3, "kB") } else { (1e6, "MB") };
                    html! { (format!("{:.1} {unit}", bytes / size)) }
                }
                _ => html! { (number.to_string()) },
            },
        }
    }

    fn relative(&self, time: &Value) -> Markup {
        let age = self.now - seconds(time);
        let length = rounded_seconds(age.abs().max(1.0));
        html! { @if age < 0.0 { "in " (length) } @else { (length) " ago" } }
    }

    /// Renders a time line of the times without a successful call to istiod, and a line for each.
    fn outages(&self, outages: &[Value]) -> Markup {
        let length = self.uptime.clamp(1.0, MAX_TIME_LINE);
        let place = |time: f64| 1.0 - (self.now - time) / length;
        let spans = outages.iter().map(|it| match (seconds(&it["since"]), &it["until"]) {
            (since, Value::Null) => (since, self.now),
            (since, until) => (since, seconds(until)),
        });
        let parts = spans.clone().map(|(since, until)| (place(since), place(until), Level::Error));
        html! {
            (bar(Level::Ok, parts))
            small.ends { span { (rounded_seconds(length)) " ago" } "now" }
            @for (outage, (since, until)) in outages.iter().zip(spans) {
                div {
                    (pill(Level::Error, "outage")) " " (self.value("", &outage["since"])) " "
                    @if outage["until"].is_null() { "not over" } @else { "for " (rounded_seconds(until - since)) }
                    " " (self.value("", &outage["code"]))
                }
            }
        }
    }

    /// Renders a row for each type. A version of istiod ends with the number of the push.
    fn types(&self, discovery: &Value) -> Markup {
        html! {
            table.rows {
                tr { @for head in ["type", "resources", "version", "last ACK", "state"] { th { (head) } } }
                @for (url, seen) in discovery["types"].as_object().into_iter().flatten() {
                    @let response = &seen["last_response"];
                    // Only delta responses are followed, so the number of accepted resources may be 0.
                    @let accepted = discovery["accepted"].get(url).filter(|count| **count != 0);
                    @let version = response["version"].as_str().and_then(|it| it.rsplit('/').next());
                    tr {
                        td { (title(url)) }
                        td { (self.value("", accepted.unwrap_or(&response["resources"]))) }
                        td { (version.unwrap_or_default()) }
                        td { @if let Some(at) = seen["last_ack"].get("at") { (self.relative(at)) } }
                        td { (answer(seen)) }
                    }
                }
            }
        }
    }

    /// Renders the lives of certificates as bars, whose filled parts have passed.
    fn certificates(&self, secrets: &[Value]) -> Markup {
        html! {
            @for secret in secrets {
                @let certificates = list(&secret["certificates"]);
                @let is_workload = secret["name"] == "default";
                h3 {
                    (if is_workload { "Workload certificate " } else { "Root certificates " })
                    @if certificates.is_empty() { (pill(Level::Warning, "none")) }
                    @else if is_workload && !secret["next_renewal"].is_null() {
                        @let due = &secret["next_renewal"];
                        small { (if seconds(due) < self.now { "renewal due " } else { "renewal " }) (self.relative(due)) }
                    }
                }
                @for it in certificates.iter().take(MAX_BARS) {
                    @let [begin, end] = ["not_before", "not_after"].map(|name| seconds(&it[name]));
                    @let level = if end < self.now { Level::Error } else { Level::Ok };
                    @let passed = (0.0, (self.now - begin) / (end - begin).max(1.0), level);
                    p { (self.value("", it["spiffe_ids"].get(0).unwrap_or(&it["subject"]))) }
                    (bar(Level::Skipped, [passed]))
                    (pill(level, if end < self.now { "expired" } else { "expires" })) " "
                    (self.value("", &it["not_after"]))
                }
                @if certificates.len() > MAX_BARS { " and " (certificates.len() - MAX_BARS) " more" }
            }
        }
    }

    /// Renders a line for each code, or for each text without one; the whole text is folded.
    fn warnings(&self, warnings: &[Value]) -> Markup {
        html! {
            @if warnings.is_empty() { "none" }
            @for warning in warnings {
                @let level = if warning["level"] == "error" { Level::Error } else { Level::Warning };
                details.line {
                    summary {
                        (pill(level, &level.name())) " " (self.value("", &warning["code"])) " "
                        small { (self.value("", &warning["times"])) "×, " (self.relative(&warning["last"])) } " "
                        @if warning["code"] == "" { (self.value("", &warning["message"])) }
                    }
                    (self.members(warning))
                }
            }
        }
    }
}

/// Renders the state of a part, which stands next to the title.
fn state(pointer: &str, part: &Value) -> Markup {
    let word = part["state"].as_str().unwrap_or_default();
    let (level, word) = match pointer {
        "/istiod" if !part["connected"].is_null() => (Level::Ok, "connected"),
        "/istiod" if part["last_error"].is_null() => (Level::Skipped, "not connected"),
        "/istiod" => (Level::Error, "not connected"),
        "/envoy" if word == "running" => (Level::Ok, word),
        "/envoy" if word == "exited" => (Level::Error, word),
        "/envoy" => (Level::Warning, word),
        "/standby" if part["waits"].is_null() => (Level::Warning, "no standby"),
        "/standby" if part["waits"]["hindrance"].is_null() => (Level::Ok, "can take over"),
        "/standby" => (Level::Warning, "cannot take over"),
        "/discovery" if !part["served_since"].is_null() => (Level::Warning, "stored configuration"),
        _ => return html! {},
    };
    pill(level, word)
}

/// Renders whether the last response of a type was accepted.
fn answer(seen: &Value) -> Markup {
    let response = &seen["last_response"];
    let nack = &seen["last_nack"];
    let order = seconds(&nack["at"]).total_cmp(&seconds(&seen["last_ack"]["at"]));
    let is_latest = order.is_gt() || order.is_eq() && nack["version"] == response["version"];
    let (level, word) = match response["answered"].as_bool() {
        None => (Level::Skipped, "no response"),
        Some(false) => (Level::Warning, "not answered"),
        Some(true) if !nack.is_null() && is_latest => (Level::Error, "rejected"),
        Some(true) => (Level::Ok, "accepted"),
    };
    pill(level, word)
}

/// Renders a bar with coloured parts, each from a begin to an end between 0 and 1.
fn bar(base: Level, parts: impl IntoIterator<Item = (f64, f64, Level)>) -> Markup {
    html! {
        div class={ "bar " (base.name()) } {
            @for (begin, end, level) in parts {
                @let [begin, end] = [begin, end].map(|it| it.clamp(0.0, 1.0) * 100.0);
                i class=(level.name()) style=(format!("left:{begin:.1}%;width:{:.1}%", end - begin)) {}
            }
        }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Reads a time as seconds of Unix time; anything else is 0.
fn seconds(time: &Value) -> f64 {
    match time.as_str().map(str::parse::<Timestamp>) {
        Some(Ok(time)) => time.seconds as f64,
        _ => 0.0,
    }
}

/// Converts a member's name or pointer to words without its unit, and a type URL to its last part.
fn title(name: &str) -> String {
    let last = name.strip_prefix('/').or(name.rsplit(['.', '/']).next()).unwrap_or(name);
    let without_unit = ["_seconds", "_ms", "_bytes"].iter().find_map(|it| last.strip_suffix(it));
    without_unit.unwrap_or(last).replace(['_', '/'], " ")
}
