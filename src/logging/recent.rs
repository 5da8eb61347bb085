//! Stores the latest log lines: warnings and errors for `/debug/overview`, and all lines for `/debug/log`.

use std::collections::VecDeque;

use parking_lot::Mutex;
use serde::Serialize;
use tracing::Level;

use super::levels::name;
use super::line::{Line, timestamp};
use crate::problem::Code;

/// The maximum number of warnings and errors that are stored.
const MAX_ENTRIES: usize = 50;
/// The maximum number of characters of each of them.
const MAX_MESSAGE: usize = 1000;
/// The maximum number of bytes of all lines.
const MAX_BYTES: usize = 64 << 10;

/// A warning or an error, with the times when it was logged first and last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    pub level: &'static str,
    pub scope: &'static str,
    /// The code of the problem that the line reports. Empty without one.
    pub code: &'static str,
    /// Message and labels.
    pub message: String,
    pub times: u64,
    pub first: String,
    pub last: String,
}

/// The warnings and errors logged last. Lines with the same code, or the same text if they have none, are
/// one entry with a count, so that they do not displace others.
#[derive(Debug)]
pub(crate) struct Recent(Mutex<VecDeque<Entry>>);

impl Recent {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Adds the line, if it is a warning or an error.
    pub(super) fn add(&self, line: &Line) {
        if line.level > Level::WARN {
            return;
        }
        let level = name(line.level);
        let scope = line.scope;
        let time = timestamp(line.time);
        let message: String = line.content.text(' ').chars().take(MAX_MESSAGE).collect();
        let code = code_of(&message).map_or("", |code| code.name());
        let mut entries = self.0.lock();
        let same = entries.iter().position(|entry| {
            (entry.level, entry.scope, entry.code) == (level, scope, code)
                && (!code.is_empty() || entry.message == message)
        });
        let earlier = same.and_then(|index| entries.remove(index));
        let (times, first) =
            earlier.map_or_else(|| (0, time.clone()), |entry| (entry.times, entry.first));
        if entries.len() == MAX_ENTRIES {
            entries.pop_front();
        }
        entries.push_back(Entry {
            level,
            scope,
            code,
            message,
            times: times + 1,
            first,
            last: time,
        });
    }

    /// Returns the entries, the newest first.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        self.0.lock().iter().rev().cloned().collect()
    }
}

/// Finds the last code in a message. Labels may follow it.
pub fn code_of(message: &str) -> Option<Code> {
    message.rsplit('[').find_map(|part| Code::named(part.split(']').next().unwrap_or_default()))
}

/// The lines logged last, as text.
pub(crate) struct LastLines(Mutex<VecDeque<u8>>);

impl LastLines {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Adds a line, and removes the oldest ones beyond 64 KiB. A longer line removes all, and is not added.
    pub(super) fn add(&self, line: &str) {
        let mut lines = self.0.lock();
        while !lines.is_empty() && lines.len() + line.len() > MAX_BYTES {
            let end = lines.iter().position(|byte| *byte == b'\n');
            let length = end.map_or(lines.len(), |end| end + 1);
            lines.drain(..length);
        }
        if line.len() <= MAX_BYTES {
            lines.extend(line.as_bytes());
        }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(self.0.lock().make_contiguous()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::logging::line::Content;

    fn add(recent: &Recent, message: &str, second: u64) {
        recent.add(&Line {
            time: UNIX_EPOCH + Duration::from_secs(second),
            level: Level::WARN,
            scope: "sds",
            caller: None,
            content: Content::new(message.to_owned()),
        });
    }

    #[test]
    fn a_line_that_repeats_is_one_entry_and_the_newest() {
        let recent = Recent::new();
        for (message, time) in [("a", 1), ("b", 2), ("a", 3)] {
            add(&recent, message, time);
        }
        let entries = recent.entries();
        let shown: Vec<_> = entries
            .iter()
            .map(|entry| (&*entry.message, entry.times, &entry.first[17..19], &entry.last[17..19]))
            .collect();
        assert_eq!(shown, [("a", 2, "01", "03"), ("b", 1, "02", "02")]);
    }

    #[test]
    fn lines_with_the_same_code_are_one_entry_with_the_last_text() {
        let recent = Recent::new();
        for (message, time) in [
            ("a: 1 s [LOG_SILENT]", 1),
            ("[AGENT_SILENT] and [LOG_SILENT] next attempt [in 2 s]", 2),
            ("a [UNKNOWN_CODE]", 3),
            ("b [UNKNOWN_CODE]", 4),
        ] {
            add(&recent, message, time);
        }
        let entries = recent.entries();
        let shown = entries.iter().map(|entry| (entry.code, entry.times));
        let expected = [("", 1), ("", 1), ("LOG_SILENT", 2)];
        assert_eq!(Vec::from_iter(shown), expected);
        assert!(entries[2].message.ends_with("[in 2 s]"));
    }

    #[test]
    fn the_number_of_lines_and_their_length_are_bounded() {
        let recent = Recent::new();
        for number in 0..2 * MAX_ENTRIES {
            add(&recent, &format!("{number} {}", "ü".repeat(MAX_MESSAGE)), 1);
        }
        let entries = recent.entries();
        assert_eq!(entries.len(), MAX_ENTRIES);
        assert!(entries[0].message.starts_with("99 "));
        let is_cut = |entry: &Entry| entry.message.chars().count() == MAX_MESSAGE;
        assert!(entries.iter().all(is_cut));
    }

    #[test]
    fn the_last_64_kib_of_whole_lines_are_kept() {
        let lines = LastLines::new();
        for number in 0..10_000 {
            lines.add(&format!("line {number}\n"));
        }
        lines.add(&"x".repeat(MAX_BYTES + 1));
        let text = lines.text();
        assert!(text.is_empty());
        for number in 0..10_000 {
            lines.add(&format!("line {number}\n"));
        }
        let text = lines.text();
        assert!(text.len() <= MAX_BYTES && text.len() > MAX_BYTES - 20, "{}", text.len());
        assert!(text.ends_with("line 9998\nline 9999\n"));
        assert!(text.starts_with("line "));
        assert!(lines.0.lock().capacity() <= MAX_BYTES);
    }
}
