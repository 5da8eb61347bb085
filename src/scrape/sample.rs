//! Parses the sample lines of an exposition page, as Prometheus' parsers do.
//!
//! One rule is stricter: a name without braces needs a blank before its value. `disk-0 17` is then an invalid
//! name, not the value -0 of `disk` at the time 17.

use memchr::memchr2;
use smallvec::SmallVec;

use super::format::Format;

pub(super) const BLANKS: [char; 2] = [' ', '\t'];

/// The parts of a sample line.
#[derive(Debug, Default)]
pub(super) struct Sample<'a> {
    pub name: &'a str,
    /// Names and values as they are written, without quotes.
    pub labels: SmallVec<[(&'a str, &'a str); 8]>,
    /// Name and labels as they are written.
    pub series: &'a str,
    /// Value, time and exemplar, unless that is malformed.
    pub rest: &'a str,
}

/// The names of the last valid sample. Most samples repeat them, and they are not checked again.
#[derive(Default)]
pub(super) struct Names {
    pub metric: String,
    /// The first label names without quotes, each with its `=`.
    labels: Vec<String>,
}

impl<'a> Sample<'a> {
    /// Returns None if the line is malformed or repeats a label.
    pub(super) fn parse(line: &'a str, format: Format, names: &mut Names) -> Option<Self> {
        let mut sample = Self::default();
        let after = line.strip_prefix(&names.metric).map(str::as_bytes);
        (sample.name, sample.rest) = line.split_at(match after {
            Some([b'{' | b' ', ..]) => names.metric.len(),
            _ => name_length(line, ':'),
        });
        match skip_blanks(sample.rest, format).strip_prefix('{') {
            Some(inner) => sample.rest = sample.read_labels(inner, format, names)?,
            None if sample.rest.starts_with(BLANKS) => {}
            None => return None,
        }
        sample.series = &line[..line.len() - sample.rest.len()];
        if !are_figures(sample.rest, format) {
            let (figures, exemplar) = sample.rest.split_once(" #")?;
            if format == Format::Text || !are_figures(figures, format) {
                return None;
            }
            if !is_exemplar(exemplar) {
                sample.rest = figures;
            }
        }
        if sample.name.is_empty() { None } else { Some(sample) }
    }

    /// Reads the labels up to the closing brace, and returns what follows it. If there is no name yet, a
    /// string without a value is the name. Returns None if they are malformed or repeat a name. Label names that
    /// are `known` need no check; others replace them.
    fn read_labels(
        &mut self,
        inner: &'a str,
        format: Format,
        known: &mut Names,
    ) -> Option<&'a str> {
        let mut are_known = true;
        let mut rest = skip_blanks(inner, format);
        while !rest.starts_with('}') {
            let (label, after) = match known.labels.get(self.labels.len()) {
                Some(name) if rest.starts_with(name.as_str()) => rest.split_at(name.len() - 1),
                _ => {
                    are_known = false;
                    split_name(rest, '_')?
                }
            };
            let after = skip_blanks(after, format);
            if rest.starts_with('"') && self.name.is_empty() && after.starts_with([',', '}']) {
                (self.name, rest) = (label, after);
            } else {
                let value = skip_blanks(after.strip_prefix('=')?, format);
                let (value, after) = unquote(value.strip_prefix('"')?)?;
                self.labels.push((label, value));
                rest = skip_blanks(after, format);
            }
            rest = match rest.strip_prefix(',') {
                Some(after) => skip_blanks(after, format),
                None if format == Format::Text || rest.starts_with('}') => rest,
                None => return None,
            };
        }
        if !are_known {
            let names = self.labels.iter().map(|(name, _)| *name);
            let mut sorted: Vec<_> = names.clone().chain(["__name__"]).collect();
            sorted.sort_unstable();
            if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
                return None;
            }
            known.labels = names
                .filter(|name| name_length(name, '_') == name.len())
                .take(64)
                .map(|name| format!("{name}="))
                .collect();
        }
        Some(&rest[1..])
    }
}

/// Splits a text after the name at its beginning, whose quotes are removed. Names have ASCII letters, digits,
/// `_` and `more`.
pub(super) fn split_name(text: &str, more: char) -> Option<(&str, &str)> {
    let (name, rest) = match text.strip_prefix('"') {
        Some(quoted) => unquote(quoted).filter(|(name, _)| !name.contains('\0'))?,
        None => text.split_at(name_length(text, more)),
    };
    if name.is_empty() { None } else { Some((name, rest)) }
}

/// Returns the length of the first line of a text page, in which quotes may have line feeds. None if it has no
/// end.
pub(super) fn line_length(page: &[u8]) -> Option<usize> {
    let mut is_quoted = false;
    let mut is_escaped = false;
    page.iter().position(|byte| {
        let is_end = *byte == b'\n' && (!is_quoted || is_escaped);
        is_quoted ^= *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    })
}

/// Returns true for an exemplar without its `#`. It is written like a sample without a name.
fn is_exemplar(text: &str) -> bool {
    let line = format!("exemplar{}", text.strip_prefix(' ').unwrap_or_default());
    let sample = Sample::parse(&line, Format::OpenMetrics, &mut Names::default());
    let figures = sample.map_or("", |sample| &line[sample.series.len()..]);
    line.starts_with("exemplar{")
        && !line.contains('\0')
        && are_figures(figures, Format::OpenMetrics)
}

/// Returns true for a value, or a value and a time.
fn are_figures(text: &str, format: Format) -> bool {
    match (text.strip_prefix(' '), format) {
        (Some(value), _) if is_number(value) => true,
        (after, Format::OpenMetrics) => {
            after.and_then(|text| text.split_once(' ')).is_some_and(|(value, time)| {
                is_number(value) && time.parse().is_ok_and(f64::is_finite)
            })
        }
        (_, Format::Text | Format::Protobuf) => {
            let text = text.trim_matches(BLANKS);
            let (value, time) = text.split_once(BLANKS).unwrap_or((text, "0"));
            let time = time.trim_start_matches(BLANKS);
            is_number(value) && !time.starts_with(['+', '-']) && time.parse::<i64>().is_ok()
        }
    }
}

/// Returns true for a text that Go parses as a number. Unlike Rust, Go refuses NaN with a sign, and numbers that
/// are too large.
fn is_number(text: &str) -> bool {
    text.parse().is_ok_and(|number: f64| {
        if number.is_nan() {
            text.len() == 3
        } else {
            number.is_finite() || !text.contains(char::is_numeric)
        }
    })
}

fn name_length(text: &str, more: char) -> usize {
    if text.starts_with(|first: char| first.is_ascii_digit()) {
        return 0;
    }
    text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != more).unwrap_or(text.len())
}

/// Splits a text at its closing quote.
fn unquote(text: &str) -> Option<(&str, &str)> {
    let mut end = 0;
    loop {
        end += memchr2(b'"', b'\\', text.as_bytes().get(end..)?)?;
        if text.as_bytes()[end] == b'"' {
            return Some((&text[..end], &text[end + 1..]));
        }
        end += 2;
    }
}

/// Skips blanks, which the text format allows nearly everywhere.
fn skip_blanks(text: &str, format: Format) -> &str {
    match text.as_bytes() {
        [b' ' | b'\t', ..] if format == Format::Text => text.trim_start_matches(BLANKS),
        _ => text,
    }
}
