//! Passes the lines of one source on, and leaves out what the page has already.
//!
//! Lines pass as they are. A family that is declared already loses its HELP, TYPE and UNIT lines, and
//! a series that an earlier source has is left out. Malformed lines and those over 1 MiB are left
//! out and counted, as a scraper refuses the whole page for one of them.
//!
//! Where the formats of source and page differ, types and times change as far as a strict parser
//! insists: a counter of the text format whose name does not end in `_total`, or whose name before
//! that is taken, is of type `unknown` in OpenMetrics; text has no exemplars, no types beyond its own
//! and its times in other units, so they are left out. Names of samples and their values never change.

use std::borrow::Cow;
use std::mem;

use memchr::{memchr, memchr_iter};

use super::Hidden;
use super::page::Output;
use super::sample::{Sample, is_plausible, name_length, unquote, words};
use super::seen::Seen;

/// Longest line that passes.
const MAX_LINE: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    OpenMetrics,
}

pub(super) struct Lines {
    from: Format,
    to: Format,
    hidden: Vec<Hidden>,
    /// Whether all of each line is checked, which takes too long for large pages.
    is_thorough: bool,
    /// The beginning of a line whose end is still to come.
    partial: Vec<u8>,
    /// Whether the line that is to end is longer than [`MAX_LINE`].
    is_too_long: bool,
    /// The name of the last sample.
    name: String,
    named: Named,
    /// Whether `# EOF` was there.
    pub has_ended: bool,
    pub duplicates: u64,
    pub malformed: u64,
}

/// What applies to all samples of a name.
#[derive(Clone, Copy)]
enum Named {
    Hidden,
    /// An earlier source has samples of that name.
    Known,
    New,
}

/// What becomes of a line.
#[derive(Debug, PartialEq)]
enum Verdict {
    Pass,
    Drop,
    /// The line instead, with its end.
    Replace(String),
}

use Verdict::{Drop, Pass, Replace};

impl Lines {
    pub(super) fn new(from: Format, to: Format, hidden: Vec<Hidden>, is_thorough: bool) -> Self {
        Self {
            from,
            to,
            hidden,
            is_thorough,
            partial: Vec::new(),
            is_too_long: false,
            name: String::new(),
            named: Named::New,
            has_ended: false,
            duplicates: 0,
            malformed: 0,
        }
    }

    pub(super) fn push(&mut self, chunk: &[u8], seen: &mut Seen, output: &mut Output) {
        let Some(first) = memchr(b'\n', chunk) else {
            return self.hold(chunk);
        };
        let mut lines = chunk;
        if self.is_too_long || !self.partial.is_empty() {
            let (end, rest) = chunk.split_at(first + 1);
            self.hold(end);
            let line = mem::take(&mut self.partial);
            self.is_too_long = false;
            self.pass(&line, seen, output);
            lines = rest;
        }
        let passed = self.pass(lines, seen, output);
        self.hold(&lines[passed..]);
    }

    /// Ends the source. The last line of a whole one may lack its end, which in OpenMetrics only
    /// `# EOF` can be.
    pub(super) fn finish(&mut self, is_whole: bool, seen: &mut Seen, output: &mut Output) {
        let is_last_line = self.from == Format::Text || self.partial.starts_with(b"# EOF");
        if is_whole && is_last_line && !self.partial.is_empty() {
            self.push(b"\n", seen, output);
        }
    }

    fn hold(&mut self, part: &[u8]) {
        if self.is_too_long || part.is_empty() {
            return;
        }
        if self.partial.len() + part.len() > MAX_LINE + 1 {
            self.partial = Vec::new();
            self.is_too_long = true;
            self.malformed += 1;
            return;
        }
        self.partial.reserve_exact(part.len());
        self.partial.extend_from_slice(part);
    }

    /// Passes the lines on that a chunk has the ends of. Returns where they end.
    fn pass(&mut self, chunk: &[u8], seen: &mut Seen, output: &mut Output) -> usize {
        // Lines that pass as they are, from here on, are handed on together.
        let (mut passing, mut begin) = (0, 0);
        for end in memchr_iter(b'\n', chunk) {
            let verdict = self.judge(&chunk[begin..end], seen);
            if verdict != Pass {
                output.write(&chunk[passing..begin]);
                passing = end + 1;
            }
            if let Replace(line) = verdict {
                output.write(line.as_bytes());
            }
            begin = end + 1;
        }
        output.write(&chunk[passing..begin]);
        begin
    }

    /// Decides about a line without its end.
    fn judge(&mut self, line: &[u8], seen: &mut Seen) -> Verdict {
        if self.has_ended {
            return Drop;
        }
        let verdict = match std::str::from_utf8(line) {
            Ok(line) if line.len() <= MAX_LINE => self.judge_text(line, seen),
            _ => None,
        };
        verdict.unwrap_or_else(|| {
            self.malformed += 1;
            Drop
        })
    }

    /// Returns None for a malformed line.
    fn judge_text(&mut self, line: &str, seen: &mut Seen) -> Option<Verdict> {
        let text = line.trim_end_matches('\r');
        let verdict = match text.trim_start_matches([' ', '\t']) {
            "" if self.to == Format::OpenMetrics => Drop,
            "" => Pass,
            text if text.starts_with('#') => self.comment(text, seen)?,
            text => self.sample(text, seen)?,
        };
        Some(match verdict {
            Pass if text.len() < line.len() => Replace(format!("{text}\n")),
            verdict => verdict,
        })
    }

    fn sample(&mut self, line: &str, seen: &mut Seen) -> Option<Verdict> {
        let length = self.name.len();
        let is_same = length > 0
            && line.starts_with(&self.name)
            && matches!(line.as_bytes().get(length), Some(b'{' | b' ' | b'\t'));
        if !is_same {
            self.name.clear();
            self.name.push_str(&line[..name_length(line)]);
        }
        let may_have_exemplar = self.from == Format::OpenMetrics;
        if !is_plausible(line, self.name.len(), may_have_exemplar) {
            // What applies to the name is not known yet.
            self.name.clear();
            return None;
        }
        if !is_same {
            self.named = match seen.name(&self.name) {
                _ if self.is_hidden(&self.name) => Named::Hidden,
                true => Named::Known,
                false => Named::New,
            };
        }
        let becomes_text = self.from == Format::OpenMetrics && self.to == Format::Text;
        match self.named {
            Named::Hidden => return Some(Drop),
            Named::New if !becomes_text && !self.is_thorough && !seen.remembers() => {
                return Some(Pass);
            }
            _ => {}
        }
        let sample = Sample::parse(line, may_have_exemplar)?;
        if seen.series(&sample) {
            self.duplicates += 1;
            return Some(Drop);
        }
        Some(match becomes_text {
            true => as_text(line, sample.rest),
            false => Pass,
        })
    }

    /// Decides about a line that starts with `#`.
    fn comment(&mut self, line: &str, seen: &mut Seen) -> Option<Verdict> {
        let (keyword, rest) = word(&line[1..]);
        let is_metadata = line[1..].starts_with([' ', '\t']);
        match keyword {
            "EOF" if rest.is_empty() => {
                self.has_ended = self.from == Format::OpenMetrics;
                return Some(Drop);
            }
            "HELP" | "TYPE" if is_metadata => {}
            "UNIT" if is_metadata && self.from == Format::OpenMetrics => {}
            _ if self.to == Format::OpenMetrics => return Some(Drop),
            _ => return Some(Pass),
        }
        let (name, text) = match rest.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => word(rest),
        };
        if name.is_empty() {
            return None;
        }
        if self.is_hidden(name) {
            return Some(Drop);
        }
        let text = text.trim_start_matches([' ', '\t']);
        let Some((shown, shown_text)) = self.metadata(keyword, name, text, seen)? else {
            return Some(Drop);
        };
        // Both are noted.
        if !seen.declare(keyword, &shown) | seen.name(&shown) {
            return Some(Drop);
        }
        if shown == name && shown_text == text {
            return Some(Pass);
        }
        let quote = if rest.starts_with('"') { "\"" } else { "" };
        Some(Replace(format!(
            "# {keyword} {quote}{shown}{quote} {shown_text}\n"
        )))
    }

    /// Name and text of a HELP, TYPE or UNIT line in the format of the page. Inside, None stands for a
    /// line that format has no place for; outside, for a type unknown to the source's own.
    #[expect(clippy::option_option, reason = "the two mean different things")]
    fn metadata<'t>(
        &self,
        keyword: &str,
        name: &'t str,
        text: &'t str,
        seen: &Seen,
    ) -> Option<Option<(Cow<'t, str>, &'t str)>> {
        use Format::{OpenMetrics, Text};
        let as_it_is = (Cow::Borrowed(name), text);
        let shown = match (keyword, self.from, self.to) {
            ("HELP", Text, OpenMetrics) => (short_name(name, seen).into(), text),
            ("UNIT", _, Text) => return Some(None),
            ("TYPE", from, to) => match (text, from, to) {
                ("gauge" | "histogram" | "summary", ..) => as_it_is,
                ("counter", Text, OpenMetrics) => match short_name(name, seen) {
                    short if short == name => (name.into(), "unknown"),
                    short => (short.into(), text),
                },
                ("counter", OpenMetrics, Text) => (format!("{name}_total").into(), text),
                ("counter", ..) | ("untyped", Text, Text) => as_it_is,
                ("untyped", Text, OpenMetrics) => (name.into(), "unknown"),
                ("unknown", OpenMetrics, Text) => (name.into(), "untyped"),
                ("info" | "stateset" | "gaugehistogram", OpenMetrics, Text) => return Some(None),
                ("unknown" | "info" | "stateset" | "gaugehistogram", OpenMetrics, _) => as_it_is,
                _ => return None,
            },
            _ => as_it_is,
        };
        Some(Some(shown))
    }

    fn is_hidden(&self, name: &str) -> bool {
        let mut hidden = self.hidden.iter();
        hidden.any(|family| name.starts_with(family.start) && name.ends_with(family.end))
    }
}

/// The name in OpenMetrics of a family that may be a counter: without `_total`, unless that is taken.
fn short_name<'t>(name: &'t str, seen: &Seen) -> &'t str {
    let short = name.strip_suffix("_total");
    short
        .filter(|short| !short.is_empty() && !seen.has_type(short))
        .unwrap_or(name)
}

/// A sample of OpenMetrics as one of text, which has no exemplars and other times: without both.
fn as_text(line: &str, rest: &str) -> Verdict {
    let series = &line[..line.len() - rest.len()];
    let figures = rest.split('#').next().unwrap_or_default();
    let mut words = words(figures);
    let value = words.next().unwrap_or_default();
    match words.next().is_none() && figures.len() == rest.len() {
        true => Pass,
        false => Replace(format!("{series} {value}\n")),
    }
}

/// The first word of a text, and what follows it.
fn word(text: &str) -> (&str, &str) {
    let text = text.trim_start_matches([' ', '\t']);
    let (word, rest) = text.split_once([' ', '\t']).unwrap_or((text, ""));
    (word, rest.trim_start_matches([' ', '\t']))
}

#[cfg(test)]
#[path = "lines_tests.rs"]
mod tests;
