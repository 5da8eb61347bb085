//! The warnings and errors logged last, for `/debug/overview`.
//!
//! A line that repeats moves to the end and is counted, so that it does not displace others. The
//! number of lines and the length of each are bounded.

use std::collections::VecDeque;

use parking_lot::Mutex;
use serde::Serialize;
use tracing::Level;

use super::line::{Line, level_name, timestamp};

/// How many lines are kept, and how much of each, in characters.
const MOST: usize = 50;
const LONGEST: usize = 1000;

/// A warning or an error, and when it was logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    pub level: &'static str,
    pub scope: &'static str,
    /// With its labels.
    pub message: String,
    pub times: u64,
    pub first: String,
    pub last: String,
}

/// The lines logged last.
#[derive(Debug)]
pub(super) struct Recent(Mutex<VecDeque<Entry>>);

impl Recent {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Adds the line, if it is a warning or an error.
    pub(super) fn add(&self, line: &Line) {
        if line.level > Level::WARN {
            return;
        }
        let (level, scope, time) = (level_name(line.level), line.scope, timestamp(line.time));
        let message: String = line.content.text(' ').chars().take(LONGEST).collect();
        let mut entries = self.0.lock();
        let is_same = |entry: &Entry| {
            (entry.level, entry.scope, &*entry.message) == (level, scope, &*message)
        };
        let earlier = entries.iter().position(is_same);
        let earlier = earlier.and_then(|index| entries.remove(index));
        let (times, first) =
            earlier.map_or_else(|| (0, time.clone()), |entry| (entry.times, entry.first));
        if entries.len() == MOST {
            entries.pop_front();
        }
        entries.push_back(Entry {
            level,
            scope,
            message,
            times: times + 1,
            first,
            last: time,
        });
    }

    /// The newest first.
    pub(super) fn entries(&self) -> Vec<Entry> {
        let entries = self.0.lock();
        entries.iter().rev().cloned().collect()
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
            .map(|entry| {
                (
                    &*entry.message,
                    entry.times,
                    &entry.first[17..19],
                    &entry.last[17..19],
                )
            })
            .collect();
        assert_eq!(shown, [("a", 2, "01", "03"), ("b", 1, "02", "02")]);
    }

    #[test]
    fn the_number_of_lines_and_their_length_are_bounded() {
        let recent = Recent::new();
        for number in 0..2 * MOST {
            add(&recent, &format!("{number} {}", "ü".repeat(LONGEST)), 1);
        }
        let entries = recent.entries();
        assert_eq!(entries.len(), MOST);
        assert!(entries[0].message.starts_with("99 "));
        let is_cut = |entry: &Entry| entry.message.chars().count() == LONGEST;
        assert!(entries.iter().all(is_cut));
    }
}
