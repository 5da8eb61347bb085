//! Writes the lines of one source to the page, and leaves out lines that the page already has.
//!
//! Most lines pass unchanged. A family that is declared already, or has samples already, loses its HELP, TYPE and
//! UNIT lines, and a series that an earlier source has is left out. Malformed lines and lines over 1 MiB are left out
//! and counted, because a scraper refuses the complete page for one of them. The quotes of a text page may contain line
//! feeds: a malformed line is read again together with the lines that close its quotes.
//!
//! The samples of a page in protobuf are collected by [`Families`] in place of lines, with their times and exemplars.
//!
//! If the formats of source and page differ, types and times change as far as a strict parser requires:
//!
//! - A counter of the text format is of type `unknown` in OpenMetrics if its name does not end in `_total`, or
//!   if the name before `_total` is taken.
//! - Exemplars, and types that text does not have, are left out.
//! - Times are left out, because the formats have different units.
//! - Lines of text whose blanks OpenMetrics does not allow are malformed.
//!
//! Names of samples and their values never change.

use std::borrow::Cow;
use std::mem;

use memchr::memchr;

use super::format::Format;
use super::output::Output;
use super::protobuf::Families;
use super::sample::{BLANKS, Names, Sample, line_length, split_name};
use super::seen::Seen;

/// The longest line that passes, in bytes.
const MAX_LINE: usize = 1 << 20;

/// The families whose names have this start and this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden {
    pub start: &'static str,
    pub end: &'static str,
}

impl Hidden {
    pub(super) fn hides(&self, name: &str) -> bool {
        name.starts_with(self.start) && name.ends_with(self.end)
    }
}

#[derive(Default)]
pub(super) struct Lines {
    from: Format,
    to: Format,
    /// The stricter one of the two text formats, which samples must follow.
    grammar: Format,
    /// The samples of a page in protobuf.
    families: Option<Families>,
    hidden: Vec<Hidden>,
    /// The beginning of a line that has not arrived completely, or lines with open quotes.
    partial: Vec<u8>,
    /// The length at which `partial` is read again, if it has line feeds in quotes that are still open. Else 0.
    awaited: usize,
    names: Names,
    /// True if samples of the last name are left out.
    is_hidden: bool,
    /// True if an earlier source has samples of the last name.
    is_known: bool,
    /// True after `# EOF`.
    has_ended: bool,
    pub duplicates: u64,
    pub malformed: u64,
}

/// The decision about a line.
enum Verdict<'l> {
    Drop,
    /// The line that the page shows, without the line feed at its end.
    Show(Cow<'l, str>),
}

use Verdict::{Drop, Show};

impl Lines {
    pub(super) fn new(from: Format, to: Format, hidden: Vec<Hidden>) -> Self {
        let (grammar, families) = match to {
            Format::Protobuf => (from, Some(Families::default())),
            Format::Text | Format::OpenMetrics => (from.max(to), None),
        };
        Self { from, to, grammar, families, hidden, ..Self::default() }
    }

    /// Takes a chunk of the source, and writes the lines that it completes to the page.
    pub(super) fn push(&mut self, chunk: &[u8], seen: &mut Seen, output: &mut Output) {
        let end = memchr(b'\n', chunk).unwrap_or(chunk.len());
        // One byte more than the maximum shows that a line is too long.
        let room = match self.awaited {
            0 => (MAX_LINE + 1).saturating_sub(self.partial.len()),
            _ => end,
        };
        self.partial.extend_from_slice(&chunk[..end.min(room)]);
        self.partial.extend_from_slice(&chunk[end..]);
        let is_due = match self.awaited {
            0 => end < chunk.len(),
            awaited => self.partial.len() >= awaited,
        };
        if is_due {
            let mut lines = mem::take(&mut self.partial);
            let length = self.write_lines(&lines, true, seen, output);
            lines.drain(..length);
            self.partial = lines;
        }
    }

    /// Ends the source. The last line of a complete source may lack its line feed.
    pub(super) fn finish(&mut self, is_complete: bool, seen: &mut Seen, output: &mut Output) {
        let mut lines = mem::take(&mut self.partial);
        if is_complete && lines.last().is_some_and(|last| *last != b'\n') {
            lines.push(b'\n');
        }
        self.write_lines(&lines, false, seen, output);
        if let Some(families) = &mut self.families {
            families.end_family();
            output.write(&families.page);
        }
    }

    /// Writes the complete lines to the page, as far as they belong there, and returns their length. Counts malformed
    /// lines. If it `may_wait`, a line whose quotes are still open stays for a later call.
    fn write_lines(
        &mut self,
        page: &[u8],
        may_wait: bool,
        seen: &mut Seen,
        output: &mut Output,
    ) -> usize {
        // Consecutive lines that do not change are written together; they start at `unwritten`.
        let mut unwritten = 0;
        let mut begin = 0;
        self.awaited = 0;
        while let Some(mut length) = memchr(b'\n', &page[begin..]) {
            let lines = &page[begin..];
            let mut verdict = self.judge(&lines[..length], seen);
            // Only text has line feeds in quotes.
            if verdict.is_none() && self.grammar == Format::Text {
                match line_length(lines) {
                    None if may_wait && lines.len() <= MAX_LINE => {
                        self.awaited = MAX_LINE.min(2 * lines.len());
                        break;
                    }
                    Some(longer) if longer > length => {
                        verdict = self.judge(&lines[..longer], seen);
                        length = verdict.as_ref().map_or(length, |_| longer);
                    }
                    _ => {}
                }
            }
            self.malformed += u64::from(verdict.is_none());
            let end = begin + length + 1;
            let is_unchanged =
                matches!(&verdict, Some(Show(line)) if line.as_bytes() == &lines[..length]);
            if !is_unchanged {
                output.write(&page[unwritten..begin]);
                unwritten = end;
                if let Some(Show(line)) = verdict {
                    output.write(line.as_bytes());
                    output.write(b"\n");
                }
            }
            begin = end;
        }
        output.write(&page[unwritten..begin]);
        if let Some(families) = &mut self.families {
            output.write(&mem::take(&mut families.page));
        }
        begin
    }

    /// Decides about a line without its end, and remembers its family and series. Returns None for a malformed one.
    fn judge<'l>(&mut self, line: &'l [u8], seen: &mut Seen) -> Option<Verdict<'l>> {
        if self.has_ended {
            return Some(Drop);
        }
        let line = str::from_utf8(line).ok().filter(|line| line.len() <= MAX_LINE)?;
        // Prometheus would take blanks before a name for a part of the name.
        let text = line.trim_end_matches('\r').trim_start_matches(BLANKS);
        match text.as_bytes().first() {
            None if self.to == Format::Text => Some(Show(text.into())),
            None => Some(Drop),
            Some(b'#') => self.judge_comment(text, seen),
            Some(_) => self.judge_sample(text, seen),
        }
    }

    /// Decides about a sample. Counts one whose series an earlier source has.
    fn judge_sample<'l>(&mut self, line: &'l str, seen: &mut Seen) -> Option<Verdict<'l>> {
        let mut sample = Sample::parse(line, self.grammar, &mut self.names)?;
        if sample.name != self.names.metric {
            self.names.metric.clear();
            // A name in quotes would be malformed without them.
            if !line.starts_with('{') {
                self.names.metric.push_str(sample.name);
            }
            self.is_known = seen.record_sample_name(sample.name);
            self.is_hidden = self.hides(sample.name);
        }
        if self.is_hidden {
            return Some(Drop);
        }
        if (self.is_known || seen.remembers()) && seen.record_series(&mut sample) {
            self.duplicates += 1;
            return Some(Drop);
        }
        if let Some(families) = &mut self.families {
            families.add(&sample, self.from);
            return Some(Drop);
        }
        // The formats write times differently, and text has no exemplars.
        let time = sample.rest.get(1..).and_then(|rest| rest.find(' '));
        let length = match time {
            Some(time) if self.from != self.to => time + 1,
            _ => sample.rest.len(),
        };
        Some(Show(line[..sample.series.len() + length].into()))
    }

    /// Decides about a line that starts with `#`. Returns None for a malformed one.
    fn judge_comment<'l>(&mut self, line: &'l str, seen: &mut Seen) -> Option<Verdict<'l>> {
        let (keyword, rest) = split_word(&line[1..]);
        let is_metadata = line[1..].starts_with(BLANKS);
        match keyword {
            "EOF" if rest.is_empty() => {
                self.has_ended = self.from == Format::OpenMetrics;
                return Some(Drop);
            }
            "HELP" | "TYPE" if is_metadata => {}
            "UNIT" if is_metadata && self.from == Format::OpenMetrics => {}
            _ if self.to != Format::Text => return Some(Drop),
            // Prometheus stops reading at such a comment.
            _ if line.contains('\0') => return None,
            _ => return Some(Show(line.into())),
        }
        let (name, text) = split_name(rest, ':')?;
        if self.hides(name) {
            return Some(Drop);
        }
        let text = match text.strip_prefix(BLANKS) {
            None if !text.is_empty() => return None,
            Some(help) if keyword == "HELP" => help,
            _ => text.trim_matches(BLANKS),
        };
        let needs_openmetrics = matches!(
            (keyword, text),
            ("UNIT", _) | ("TYPE", "info" | "stateset" | "gaugehistogram")
        );
        if needs_openmetrics && self.from == Format::OpenMetrics && self.to != Format::OpenMetrics {
            return Some(Drop);
        }
        let (shown, text) = self.convert_metadata(keyword, name, text, seen)?;
        if let Some(families) = &mut self.families {
            families.declare(keyword, &shown, text);
            return Some(Drop);
        }
        // Parsers that collect families, such as expfmt, refuse the page for a TYPE line after samples.
        let mut suffixes = match (keyword, self.to) {
            ("TYPE", Format::OpenMetrics) => sample_suffixes(text).iter(),
            (_, Format::OpenMetrics) => ALL_SUFFIXES.iter(),
            (_, Format::Text | Format::Protobuf) => [].iter(),
        };
        if seen.has_samples(name)
            || seen.has_samples(&shown)
            || suffixes.any(|suffix| seen.has_samples(&format!("{shown}{suffix}")))
        {
            return Some(Drop);
        }
        let is_first = seen.declare(keyword, &shown);
        let is_in_earlier_source = seen.record_name(&shown);
        if !is_first || is_in_earlier_source {
            return Some(Drop);
        }
        if let ("TYPE", "histogram" | "summary") = (keyword, text) {
            // For these parsers, the names of the samples are no families of their own any more.
            for suffix in sample_suffixes(text) {
                seen.declare("HELP", &format!("{shown}{suffix}"));
                seen.declare("TYPE", &format!("{shown}{suffix}"));
            }
        }
        let quote = if rest.starts_with('"') { "\"" } else { "" };
        Some(Show(format!("# {keyword} {quote}{shown}{quote} {text}").into()))
    }

    /// Converts name and text of a HELP, TYPE or UNIT line to the format of the page. Returns None for a malformed
    /// line.
    fn convert_metadata<'t>(
        &self,
        keyword: &str,
        name: &'t str,
        text: &'t str,
        seen: &Seen,
    ) -> Option<(Cow<'t, str>, &'t str)> {
        use Format::{OpenMetrics, Text};
        let unchanged = (Cow::Borrowed(name), text);
        // A family in protobuf has the name and type that it has in text.
        let to = if self.to == OpenMetrics { OpenMetrics } else { Text };
        Some(match (keyword, self.from, to) {
            ("HELP", Text, OpenMetrics) => (short_name(name, seen).into(), text),
            ("UNIT", ..) if !text.is_empty() => {
                if !name.strip_suffix(text)?.ends_with('_') {
                    return None;
                }
                unchanged
            }
            ("TYPE", from, to) => match (text, from, to) {
                ("gauge" | "histogram" | "summary", ..) => unchanged,
                ("counter", Text, OpenMetrics) => match short_name(name, seen) {
                    short if short == name => (name.into(), "unknown"),
                    short => (short.into(), text),
                },
                ("counter", OpenMetrics, Text) => (format!("{name}_total").into(), text),
                ("counter", ..) | ("untyped", Text, Text) => unchanged,
                ("untyped", Text, OpenMetrics) => (name.into(), "unknown"),
                ("unknown", OpenMetrics, Text) => (name.into(), "untyped"),
                ("unknown" | "info" | "stateset" | "gaugehistogram", OpenMetrics, _) => unchanged,
                _ => return None,
            },
            _ => unchanged,
        })
    }

    fn hides(&self, name: &str) -> bool {
        self.hidden.iter().any(|family| family.hides(name))
    }
}

/// Returns the OpenMetrics name of a family that may be a counter: without `_total`, unless that is taken.
fn short_name<'t>(name: &'t str, seen: &Seen) -> &'t str {
    name.strip_suffix("_total")
        .filter(|short| !short.is_empty() && !seen.has_type(short))
        .unwrap_or(name)
}

/// All suffixes of [`sample_suffixes`].
const ALL_SUFFIXES: [&str; 8] =
    ["_total", "_created", "_bucket", "_count", "_sum", "_gcount", "_gsum", "_info"];

/// Returns the suffixes by which names of samples differ from the name of their OpenMetrics family of this type.
fn sample_suffixes(kind: &str) -> &'static [&'static str] {
    match kind {
        "counter" => &["_total", "_created"],
        "histogram" => &["_bucket", "_count", "_sum", "_created"],
        "summary" => &["_count", "_sum", "_created"],
        "gaugehistogram" => &["_bucket", "_gcount", "_gsum"],
        "info" => &["_info"],
        _ => &[],
    }
}

/// Splits a text after its first word, and strips the blanks around it.
fn split_word(text: &str) -> (&str, &str) {
    let text = text.trim_start_matches(BLANKS);
    let (word, rest) = text.split_once(BLANKS).unwrap_or((text, ""));
    (word, rest.trim_start_matches(BLANKS))
}

#[cfg(test)]
#[path = "lines_tests.rs"]
mod tests;
