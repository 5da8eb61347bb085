//! Formats a line of the log as text and as JSON.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tracing::Level;
use tracing::field::{Field, Visit};

use super::levels::{DEFAULT, name};
use crate::runtime::clock;

/// The maximum number of bytes of a message or label. A quarter of them is for its end, which says what the
/// agent does next.
const MAX_TEXT: usize = 1024;
/// The target of the agent's own reports, which are never shortened.
pub const UNABRIDGED: &str = "istio_agent::logging::unabridged";

/// Message and labels of an event.
#[derive(Default)]
pub(super) struct Content {
    message: String,
    labels: Vec<(&'static str, Value)>,
    /// True if long texts are not shortened.
    pub(super) is_unabridged: bool,
}

impl Content {
    pub(super) fn new(message: String) -> Self {
        Self { message, ..Self::default() }
    }

    /// Adds the labels of a span around the event.
    pub(super) fn inherit(&mut self, span: &Self) {
        self.labels.extend(span.labels.iter().cloned());
    }

    /// Formats message and labels as one line, with `gap` between them.
    pub(super) fn text(&self, gap: char) -> String {
        let mut text = self.message.clone();
        let mut separator = gap;
        for (name, value) in &self.labels {
            let value = match value {
                Value::String(text) => text.clone(),
                Value::Array(texts) => {
                    let texts: Vec<_> = texts.iter().filter_map(Value::as_str).collect();
                    format!("[{}]", texts.join(" "))
                }
                value => value.to_string(),
            };
            text += &format!("{separator}{name}={value}");
            separator = ' ';
        }
        printable(&text)
    }

    /// Adds a message or label. A long text loses its middle, because another process may have sent parts of it.
    fn add(&mut self, field: &Field, mut value: Value) {
        if let Value::String(text) = &mut value
            && text.len() > MAX_TEXT
            && !self.is_unabridged
        {
            let [begin, end] = [MAX_TEXT / 4 * 3, text.len() - MAX_TEXT / 4]
                .map(|at| (0..=at).rfind(|n| text.is_char_boundary(*n)).unwrap_or(at));
            text.replace_range(begin..end, &format!("[{} bytes left out]", end - begin));
        }
        match (field.name(), value) {
            ("message", Value::String(message)) => self.message = message,
            ("message", value) => self.message = value.to_string(),
            (name, value) => self.labels.push((name, value)),
        }
    }
}

impl Visit for Content {
    /// Records a list of texts as a list, because its debug format is JSON, too.
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        let list = serde_json::from_str::<Vec<String>>(&text);
        self.add(field, list.map_or(text.into(), Value::from));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }
}

pub(super) struct Line {
    pub(super) time: SystemTime,
    pub(super) level: Level,
    pub(super) scope: &'static str,
    pub(super) caller: Option<String>,
    pub(super) content: Content,
}

impl Line {
    pub(super) fn format(&self, json: bool) -> String {
        if json { self.json() } else { self.text() }
    }

    fn text(&self) -> String {
        let mut line = format!("{}\t{}\t", timestamp(self.time), name(self.level));
        if self.scope != DEFAULT {
            line += &format!("{}\t", self.scope);
        }
        if let Some(caller) = &self.caller {
            line += &format!("{caller}\t");
        }
        line + &self.content.text('\t') + "\n"
    }

    fn json(&self) -> String {
        let mut members = Map::new();
        members.insert("level".into(), name(self.level).into());
        members.insert("time".into(), timestamp(self.time).into());
        if self.scope != DEFAULT {
            members.insert("scope".into(), self.scope.into());
        }
        if let Some(caller) = &self.caller {
            members.insert("caller".into(), caller.as_str().into());
        }
        members.insert("msg".into(), self.content.message.as_str().into());
        for (name, value) in &self.content.labels {
            // A label with the name of a column must not replace the column.
            members.entry(*name).or_insert_with(|| value.clone());
        }
        printable(&Value::Object(members).to_string()) + "\n"
    }
}

/// Escapes characters that terminals interpret. A tab is harmless.
pub fn printable(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => line += "\\n",
            '\t' => line.push(c),
            c if is_interpreted(c) => line += &format!("\\u{:04x}", u32::from(c)),
            c => line.push(c),
        }
    }
    line
}

/// Returns true for characters that could change or hide the text next to them: control characters, line separators, and
/// characters that change the direction of text (Unicode's property Bidi_Control).
pub fn is_interpreted(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Formats a time as `YYYY-MM-DDThh:mm:ss.uuuuuuZ`. Times before 1970 become 1970.
pub(super) fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let utc = clock::rfc3339(time.max(UNIX_EPOCH));
    format!("{}.{:06}Z", utc.trim_end_matches('Z'), since.subsec_micros())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn line(scope: &'static str) -> Line {
        Line {
            time: UNIX_EPOCH + Duration::from_micros(1_709_210_096_000_042),
            level: Level::WARN,
            scope,
            caller: None,
            content: Content {
                message: "connected".into(),
                labels: vec![("id", 7.into()), ("istiod.addr", "a:1".into())],
                is_unabridged: false,
            },
        }
    }

    #[test]
    fn text_lines_have_tabs_and_no_scope_for_the_default() {
        assert_eq!(
            line("default").text(),
            "2024-02-29T12:34:56.000042Z\twarn\tconnected\tid=7 istiod.addr=a:1\n"
        );
        assert_eq!(
            line("sds").text(),
            "2024-02-29T12:34:56.000042Z\twarn\tsds\tconnected\tid=7 istiod.addr=a:1\n"
        );
    }

    #[test]
    fn control_and_direction_characters_are_escaped_in_message_and_labels() {
        let mut line = line("sds");
        let hostile = "a\tb\u{1b}[2J\r\n\u{7f}\u{9b}31m ü\u{0}\u{202e}\u{2066}\u{200f}\u{61c}\u{2028}\u{200d}";
        line.content.message = hostile.into();
        line.content.labels = vec![("error", hostile.into())];
        let text = r"[2J\u000d\n\u007f\u009b31m ü\u0000\u202e\u2066\u200f\u061c\u2028";
        // A joiner does not change the direction.
        let text = format!("a\tb\\u001b{text}\u{200d}");
        let line_of_text = line.text();
        assert!(
            line_of_text.ends_with(&format!("\tsds\t{text}\terror={text}\n")),
            "{line_of_text}"
        );
        let json = line.json();
        let is_raw = |c: char| c.is_control() && c != '\n';
        assert!(!json.contains(is_raw), "{json:?}");
        let read: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(read["msg"], hostile);
        assert_eq!(read["error"], hostile);
    }

    #[test]
    fn a_list_is_one_in_json_and_in_brackets_in_text() {
        let mut line = line("default");
        line.content.labels = vec![("ips", serde_json::json!(["10.0.0.1", "fd00::1"]))];
        let text = "connected\tips=[10.0.0.1 fd00::1]\n";
        assert!(line.text().ends_with(text), "{}", line.text());
        let json = r#""ips":["10.0.0.1","fd00::1"]}"#;
        assert!(line.json().trim_end().ends_with(json), "{}", line.json());
    }

    #[test]
    fn json_lines_keep_the_order_of_members() {
        assert_eq!(
            line("sds").json(),
            "{\"level\":\"warn\",\"time\":\"2024-02-29T12:34:56.000042Z\",\"scope\":\"sds\",\
             \"msg\":\"connected\",\"id\":7,\"istiod.addr\":\"a:1\"}\n"
        );
    }

    #[test]
    fn dates_are_right_around_leap_days_and_years() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}
