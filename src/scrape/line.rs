//! One line of an exposition page, taken apart.
//!
//! Both formats share their grammar but for details: where blanks may stand, what a time is, and
//! what may follow. What is read is checked as the strictest reader would; text that only needs
//! other blanks comes out in their least form, so that it suits both formats.
//!
//! Does not know what belongs together.

use std::borrow::Cow;

use super::scan;

/// The two formats pages come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    OpenMetrics,
}

/// What a line says.
#[derive(Debug, PartialEq)]
pub(super) enum Line<'a> {
    /// Blank, or a comment for people.
    Nothing,
    End,
    Help(&'a str, &'a str),
    Type(&'a str, &'a str),
    Unit(&'a str, &'a str),
    Sample(Sample<'a>),
}

#[derive(Debug, PartialEq)]
pub(super) struct Sample<'a> {
    /// Without quotes, with its escapes.
    pub name: &'a str,
    /// `a="b",c="d"`.
    pub labels: Cow<'a, str>,
    pub value: &'a str,
    pub time: Option<&'a str>,
    /// As it was, without the `#`.
    pub exemplar: Option<&'a str>,
}

/// Reads a line without its end. None is no line of the format.
pub(super) fn parse(line: &[u8], format: Format) -> Option<Line<'_>> {
    let is_text = |byte: &u8| !matches!(byte, b'\r' | b' ' | b'\t');
    let end = line.iter().rposition(is_text).map_or(0, |last| last + 1);
    let start = blanks(std::str::from_utf8(&line[..end]).ok()?);
    match start.strip_prefix('#') {
        Some(" EOF") if format == Format::OpenMetrics => Some(Line::End),
        Some(comment) => metadata(comment),
        None if start.is_empty() => Some(Line::Nothing),
        None => sample(start, format).map(Line::Sample),
    }
}

/// Whether a name may stand without quotes.
pub(super) fn is_plain(name: &str) -> bool {
    !name.is_empty() && name_length(name, true) == name.len()
}

/// The labels of `a="b",c="d"`, in order.
pub(super) fn labels(text: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((name, value, after)) = label(rest) {
        found.push((name, value));
        rest = after.strip_prefix(',').unwrap_or(after);
    }
    found
}

fn metadata(comment: &str) -> Option<Line<'_>> {
    let words = blanks(comment);
    let (keyword, rest) = word(words);
    let make = match keyword {
        _ if words.len() == comment.len() => return Some(Line::Nothing),
        "HELP" => Line::Help,
        "TYPE" => Line::Type,
        "UNIT" => Line::Unit,
        _ => return Some(Line::Nothing),
    };
    let (name, text) = match rest.strip_prefix('"') {
        Some(quoted) => {
            let end = quoted_length(quoted)?;
            (&quoted[..end], &quoted[end + 1..])
        }
        None => word(rest),
    };
    let usable = rest.starts_with('"') && !name.is_empty() || is_plain(name);
    usable.then(|| make(name, blanks(text)))
}

fn sample(line: &str, format: Format) -> Option<Sample<'_>> {
    let (name, rest) = line.split_at(name_length(line, true));
    let (inner, rest) = match blanks(rest).strip_prefix('{') {
        Some(rest) => inner(rest)?,
        None if blanks(rest).len() == rest.len() => return None,
        None => (Inner::default(), rest),
    };
    let name = match (name, inner.name) {
        ("", Some(name)) => name,
        (name, None) if !name.is_empty() => name,
        _ => return None,
    };
    let divided = match format {
        Format::OpenMetrics => rest.split_once(" # "),
        Format::Text => None,
    };
    let (figures, exemplar) = match divided {
        Some((figures, exemplar)) => (figures, Some(exemplar).filter(|text| is_exemplar(text))),
        None => (rest, None),
    };
    let (value, rest) = word(blanks(figures));
    let (time, rest) = word(rest);
    let time = Some(time).filter(|time| !time.is_empty());
    let is_good = is_number(value)
        && rest.is_empty()
        && time.is_none_or(|time| match format {
            Format::Text => time.parse::<i64>().is_ok(),
            Format::OpenMetrics => time.parse::<f64>().is_ok_and(f64::is_finite),
        });
    is_good.then_some(Sample {
        name,
        labels: inner.labels,
        value,
        time,
        exemplar,
    })
}

#[derive(Default)]
struct Inner<'a> {
    name: Option<&'a str>,
    labels: Cow<'a, str>,
}

/// What stands in braces, and what follows them.
fn inner(text: &str) -> Option<(Inner<'_>, &str)> {
    let mut name = None;
    let mut rest = blanks(text);
    if let Some(quoted) = rest.strip_prefix('"') {
        let end = quoted_length(quoted)?;
        let after = blanks(&quoted[end + 1..]);
        // A quoted label follows by `=`, a name does not.
        if !after.starts_with('=') {
            name = Some(&quoted[..end]).filter(|name| !name.is_empty());
            name?;
            rest = blanks(after.strip_prefix(',').unwrap_or(after));
        }
    }
    let begin = rest;
    let mut names = Vec::with_capacity(32);
    let mut is_least = true;
    let mut end = begin;
    let after = loop {
        if let Some(after) = rest.strip_prefix('}') {
            break after;
        }
        let (label, _, after) = label(rest)?;
        end = after;
        is_least &= (rest.as_bytes().get(label.len()) == Some(&b'='))
            && !after.starts_with([' ', '\t'])
            && rest.as_bytes().get(label.len() + 1) == Some(&b'"');
        names.push(label);
        rest = blanks(after);
        if let Some(next) = rest.strip_prefix(',') {
            is_least &= !next.starts_with([' ', '\t']);
            rest = blanks(next);
        } else if !rest.starts_with('}') {
            return None;
        }
    };
    let written = &begin[..begin.len() - end.len()];
    let labels = match is_least {
        true => Cow::Borrowed(written),
        false => Cow::Owned(least(written)),
    };
    is_each_once(&mut names).then_some((Inner { name, labels }, after))
}

/// `name="value"` and what follows; a name that needs quotes comes with them.
fn label(text: &str) -> Option<(&str, &str, &str)> {
    let length = match text.strip_prefix('"') {
        Some(quoted) => quoted_length(quoted)? + 2,
        None => name_length(text, false),
    };
    let (name, rest) = text.split_at(length);
    let value = blanks(blanks(rest).strip_prefix('=')?).strip_prefix('"')?;
    let end = quoted_length(value)?;
    (length > 0).then_some((name, &value[..end], &value[end + 1..]))
}

/// Labels without blanks between them.
fn least(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((name, value, after)) = label(rest) {
        if !out.is_empty() {
            out.push(',');
        }
        out.extend([name, "=\"", value, "\""]);
        rest = blanks(blanks(after).trim_start_matches(','));
    }
    out
}

fn is_each_once(names: &mut [&str]) -> bool {
    // As many as fit are told apart by what costs least to look at.
    const FEW: usize = 32;
    if names.len() > FEW {
        names.sort_unstable();
        return names.windows(2).all(|pair| pair[0] != pair[1]);
    }
    let mut marks = [0; FEW];
    for (index, name) in names.iter().enumerate() {
        let mark = mark(name);
        let same = marks[..index].iter().zip(&*names);
        if same
            .into_iter()
            .any(|(other, known)| *other == mark && known == name)
        {
            return false;
        }
        marks[index] = mark;
    }
    true
}

/// The same for names that are, and mostly another for others.
fn mark(name: &str) -> u32 {
    let bytes = name.as_bytes();
    let byte = |index: usize| bytes.get(index).copied().unwrap_or_default();
    let length = bytes.len();
    let last = byte(length.saturating_sub(1));
    u32::from_be_bytes([
        (length % 256) as u8,
        byte(length / 2),
        byte(length / 3),
        last,
    ])
}

fn is_exemplar(text: &str) -> bool {
    const LONGEST: usize = 128;
    let Some((inner, rest)) = text.strip_prefix('{').and_then(inner) else {
        return false;
    };
    let (value, rest) = word(blanks(rest));
    let (time, rest) = word(rest);
    let length: usize = labels(&inner.labels)
        .iter()
        .map(|(name, value)| name.chars().count() + value.chars().count())
        .sum();
    inner.name.is_none()
        && length <= LONGEST
        && is_number(value)
        && (time.is_empty() || time.parse::<f64>().is_ok_and(f64::is_finite))
        && rest.is_empty()
}

fn is_number(text: &str) -> bool {
    text.parse::<f64>().is_ok()
}

/// The bytes of names.
const IN_NAME: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < table.len() {
        // The index of a table of all bytes is one.
        let character = byte as u8;
        table[byte] = character.is_ascii_alphanumeric() || character == b'_';
        byte += 1;
    }
    table
};

/// How much of the text is a name, in which colons may stand or not.
fn name_length(text: &str, colons: bool) -> usize {
    let is_part = |byte: u8| IN_NAME[usize::from(byte)] || colons && byte == b':';
    match text.bytes().next() {
        Some(first) if !first.is_ascii_digit() => text
            .bytes()
            .position(|byte| !is_part(byte))
            .unwrap_or(text.len()),
        _ => 0,
    }
}

/// How far it is to the closing quote. None when there is none. Prometheus takes a backslash before
/// anything, and as itself before what is no escape.
fn quoted_length(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut end = 0;
    loop {
        end += scan::position(&bytes[end..], |byte| byte == b'"' || byte == b'\\')?;
        if bytes[end] == b'"' {
            return Some(end);
        }
        bytes.get(end + 1)?;
        end += 2;
    }
}

/// The text up to a blank, and what follows the blanks.
fn word(text: &str) -> (&str, &str) {
    let end = text.bytes().position(|byte| is_blank(&byte));
    let end = end.unwrap_or(text.len());
    (&text[..end], blanks(&text[end..]))
}

fn blanks(text: &str) -> &str {
    // There mostly are none, or one.
    let count = text.bytes().take_while(is_blank).count();
    &text[count..]
}

fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_apart_into_its_least_form() {
        for (line, name, labels, value, time) in [
            ("a 1", "a", "", "1", None),
            ("a{} +Inf 5", "a", "", "+Inf", Some("5")),
            (
                "a:b{c=\"}, \\\"\"} 1e3",
                "a:b",
                "c=\"}, \\\"\"",
                "1e3",
                None,
            ),
            (
                "a { b = \"c\" , d=\"é\", }\tNaN  7 \r",
                "a",
                "b=\"c\",d=\"é\"",
                "NaN",
                Some("7"),
            ),
            ("{\"x.y\", b=\"c\"} 1", "x.y", "b=\"c\"", "1", None),
            ("a{\"b.c\"=\"d\"} 1", "a", "\"b.c\"=\"d\"", "1", None),
            ("a{b=\"c\",} 1", "a", "b=\"c\"", "1", None),
        ] {
            let Some(Line::Sample(sample)) = parse(line.as_bytes(), Format::Text) else {
                panic!("{line} is a sample");
            };
            let found = (
                sample.name,
                sample.labels.as_ref(),
                sample.value,
                sample.time,
            );
            assert_eq!(found, (name, labels, value, time), "{line}");
        }
    }

    #[test]
    fn what_is_no_line_is_found_out() {
        for line in [
            "a",
            "a ",
            "1a 1",
            "a{b} 1",
            "a{b=c} 1",
            "a{b=\"c} 1",
            "a{b=\"c\"",
            "a{b=\"\\\"} 1",
            "a{b=\"1\" c=\"2\"} 1",
            "a{b=\"1\",b=\"2\"} 1",
            "a one",
            "a 1 1.5",
            "a 1 2 3",
            "{} 1",
            "a 1 # {b=\"c\"} 1",
            "# TYPE 1a counter",
            "# HELP",
            "<html>",
            "a\0 1",
            "a{\"b\"} 1",
        ] {
            assert_eq!(parse(line.as_bytes(), Format::Text), None, "{line}");
        }
        assert_eq!(parse(b"a{b=\"\xff\"} 1", Format::Text), None);
    }

    #[test]
    fn comments_are_nothing_and_metadata_is_read() {
        for (line, expected) in [
            ("", Line::Nothing),
            ("#", Line::Nothing),
            ("# a comment", Line::Nothing),
            ("#TYPE a counter", Line::Nothing),
            ("# TYPE a  counter", Line::Type("a", "counter")),
            ("# HELP a  Two  words.", Line::Help("a", "Two  words.")),
            ("# HELP a", Line::Help("a", "")),
            ("# TYPE \"a.b\" gauge", Line::Type("a.b", "gauge")),
        ] {
            assert_eq!(
                parse(line.as_bytes(), Format::Text),
                Some(expected),
                "{line}"
            );
        }
        assert_eq!(parse(b"# EOF\r", Format::OpenMetrics), Some(Line::End));
        assert_eq!(parse(b"# EOF", Format::Text), Some(Line::Nothing));
    }

    #[test]
    fn an_exemplar_nobody_would_read_is_left_out() {
        for (line, expected) in [
            ("a_total 1 # {t=\"x\"} 0.5 1.5", Some("{t=\"x\"} 0.5 1.5")),
            ("a_total 1 1.5 # {} 1", Some("{} 1")),
            ("a_total 1 # {t=x} 0.5", None),
            ("a_total 1 # {t=\"x\"}", None),
        ] {
            let Some(Line::Sample(sample)) = parse(line.as_bytes(), Format::OpenMetrics) else {
                panic!("{line} is a sample");
            };
            assert_eq!(sample.exemplar, expected, "{line}");
        }
    }
}
