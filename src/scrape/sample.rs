//! Reads sample lines of an exposition page, as far as merging has to.

use memchr::{memchr2, memrchr};

/// A sample line, taken apart.
#[derive(Debug, PartialEq)]
pub(super) struct Sample<'a> {
    pub name: &'a str,
    /// Names and values as they are written, in order. A metric name in braces is one without a value.
    pub labels: Vec<(&'a str, &'a str)>,
    /// Value, time and exemplar.
    pub rest: &'a str,
}

impl<'a> Sample<'a> {
    /// Returns None where the line is malformed or a label is there twice. Exemplars are not looked at.
    pub(super) fn parse(line: &'a str, may_have_exemplar: bool) -> Option<Self> {
        let (name, rest) = line.split_at(name_length(line));
        let (labels, rest) = match blanks(rest).strip_prefix('{') {
            Some(inner) => Self::labels(inner)?,
            None => (Vec::new(), rest),
        };
        let has_figures = has_figures(rest, may_have_exemplar);
        has_figures.then_some(Self { name, labels, rest })
    }

    /// What the braces hold, and what follows them.
    fn labels(inner: &'a str) -> Option<(Vec<(&'a str, &'a str)>, &'a str)> {
        let mut labels = Vec::new();
        let mut rest = blanks(inner);
        while !rest.starts_with('}') {
            let (label, after) = match rest.strip_prefix('"') {
                Some(quoted) => unquote(quoted)?,
                None => rest.split_at(name_length(rest)),
            };
            let (value, after) = match blanks(after).strip_prefix('=') {
                Some(value) => unquote(blanks(value).strip_prefix('"')?)?,
                None => ("", after),
            };
            if label.is_empty() {
                return None;
            }
            labels.push((label, value));
            rest = blanks(after);
            match rest.strip_prefix(',') {
                Some(after) => rest = blanks(after),
                None if rest.starts_with('}') => {}
                None => return None,
            }
        }
        labels.sort_unstable();
        if labels.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return None;
        }
        Some((labels, &rest[1..]))
    }
}

/// Whether a line whose name has `name` bytes can be a sample, by its figures and the last brace:
/// what braces hold is not looked at.
pub(super) fn is_plausible(line: &str, name: usize, may_have_exemplar: bool) -> bool {
    let rest = &line[name..];
    let figures = if blanks(rest).starts_with('{') {
        memrchr(b'}', rest.as_bytes()).map(|end| &rest[end + 1..])
    } else {
        Some(rest).filter(|rest| name > 0 && rest.starts_with([' ', '\t']))
    };
    !line.starts_with(|first: char| first.is_ascii_digit())
        && figures.is_some_and(|figures| has_figures(figures, may_have_exemplar))
}

/// Whether a text is a number and at most a time.
fn has_figures(text: &str, may_have_exemplar: bool) -> bool {
    let figures = match may_have_exemplar {
        true => text.split('#').next().unwrap_or_default(),
        false => text,
    };
    let mut figures = words(figures);
    let value = figures.next();
    value.is_some_and(is_number) && figures.next().is_none_or(is_number) && figures.next().is_none()
}

/// The words of a text.
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([' ', '\t']).filter(|word| !word.is_empty())
}

/// The length of the name of a metric or label at the beginning of a text.
pub(super) fn name_length(text: &str) -> usize {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':');
    let mut bytes = text.bytes();
    bytes.position(|byte| !is_part(byte)).unwrap_or(text.len())
}

/// The text up to the closing quote, and what follows it.
pub(super) fn unquote(text: &str) -> Option<(&str, &str)> {
    let mut end = 0;
    loop {
        end += memchr2(b'"', b'\\', text.get(end..)?.as_bytes())?;
        if text.as_bytes()[end] == b'"' {
            return Some((&text[..end], &text[end + 1..]));
        }
        end += 1 + text.get(end + 1..)?.chars().next()?.len_utf8();
    }
}

fn blanks(text: &str) -> &str {
    text.trim_start_matches([' ', '\t'])
}

fn is_number(text: &str) -> bool {
    text.parse::<f64>().is_ok()
}
