//! Secrets inside a text: known ones, private keys, JWTs, credentials of URLs and of the schemes Basic
//! and Bearer, and values whose names say that they are secret.

use std::ops::Range;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use memchr::memmem::{find, rfind};

use super::names::{Member, is_header_of_credentials, is_secret, is_word_of_prose};

pub(super) const REDACTED: &[u8] = b"[redacted]";
/// Shorter ones are in texts by chance.
const SHORTEST_KNOWN: usize = 6;
const SHORTEST_CREDENTIAL: usize = 8;
const LONGEST_LABEL: usize = 40;
/// How far before its value a name is looked for.
const NEAR: usize = 200;

/// The extent of a secret, given the place of its mark, or of a text that is none. Within it no other of
/// its kind is looked for.
type Extent = fn(&[u8], usize) -> Option<(Range<usize>, IsSecret)>;
type IsSecret = bool;

static MARKS: [(&[u8], Extent); 8] = [
    (b"eyJ", jwt),
    (b"-----BEGIN ", private_key),
    // The same in base64.
    (b"LS0tLS1CRUdJTi", encoded_key),
    (b"://", credentials_of_url),
    (b"asic ", credentials),
    (b"earer ", credentials),
    (b"=", value),
    (b":", value),
];

/// A text that is a secret, or a mark, by its place in the table.
struct Pattern {
    text: Vec<u8>,
    mark: Option<usize>,
}

/// Finds secrets.
#[allow(missing_debug_implementations)]
pub struct Secrets {
    /// By their first bytes.
    patterns: Vec<Vec<Pattern>>,
}

impl Secrets {
    /// `known` are found wherever they are, in JSON too, unless they are very short.
    pub fn new(known: impl IntoIterator<Item = String>) -> Self {
        let mut patterns: Vec<_> = (0..=u8::MAX).map(|_| Vec::new()).collect();
        let mut add = |text: &[u8], mark| {
            let text = text.to_vec();
            patterns[usize::from(text[0])].push(Pattern { text, mark });
        };
        for (mark, (text, _)) in MARKS.iter().enumerate() {
            add(text, Some(mark));
        }
        for text in known {
            let text = text.trim();
            if text.len() < SHORTEST_KNOWN {
                continue;
            }
            add(text.as_bytes(), None);
            let in_json = serde_json::Value::from(text).to_string();
            add(&in_json.as_bytes()[1..in_json.len() - 1], None);
        }
        Self { patterns }
    }

    /// Appends the text without its secrets.
    pub(super) fn redact(&self, text: &[u8], out: &mut Vec<u8>) {
        let mut written = 0;
        for range in self.find(text) {
            if range.start >= written {
                out.extend_from_slice(&text[written..range.start]);
                out.extend_from_slice(REDACTED);
            }
            written = written.max(range.end);
        }
        out.extend_from_slice(&text[written..]);
    }

    /// By their starts; they may overlap.
    fn find(&self, text: &[u8]) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        let mut seen = [0; MARKS.len()];
        for (at, byte) in text.iter().enumerate() {
            let patterns = self.patterns[usize::from(*byte)].iter();
            for pattern in patterns.filter(|pattern| text[at..].starts_with(&pattern.text)) {
                let Some(mark) = pattern.mark else {
                    found.push(at..at + pattern.text.len());
                    continue;
                };
                if at >= seen[mark]
                    && let Some((range, is_secret)) = MARKS[mark].1(text, at)
                {
                    seen[mark] = range.end;
                    found.extend(is_secret.then_some(range));
                }
            }
        }
        found.sort_by_key(|range| range.start);
        found
    }
}

/// Whether a private key begins in the text and does not end in it.
pub(super) fn ends_in_key(text: &[u8]) -> bool {
    let begin = rfind(text, b"-----BEGIN ");
    begin.is_some_and(|at| {
        private_key(text, at).is_some() && find(&text[at..], b"-----END ").is_none()
    })
}

pub(super) fn ends_key(text: &[u8]) -> bool {
    find(text, b"-----END ").is_some()
}

fn jwt(text: &[u8], at: usize) -> Option<(Range<usize>, IsSecret)> {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let end = at + run(&text[at..], is_part);
    let first = memchr::memchr(b'.', &text[at..end]);
    Some((at..end, first.is_some_and(|dot| at + dot + 1 < end)))
}

fn private_key(text: &[u8], at: usize) -> Option<(Range<usize>, IsSecret)> {
    let label = at + "-----BEGIN ".len();
    let body = label + find(&text[label..], b"-----")?;
    let is_key = body - label <= LONGEST_LABEL && text[label..body].ends_with(b"PRIVATE KEY");
    let last = |from: usize| {
        let end = from + find(&text[from..], b"-----END ")? + "-----END ".len();
        Some(end + find(&text[end..], b"-----")? + "-----".len())
    };
    is_key.then(|| (at..last(body).unwrap_or(text.len()), true))
}

fn encoded_key(text: &[u8], at: usize) -> Option<(Range<usize>, IsSecret)> {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=-_".contains(&byte);
    let length = run(&text[at..], is_part);
    let decoded = BASE64_STANDARD.decode(&text[at..at + length / 4 * 4]);
    // What cannot be read may be one.
    let is_key = decoded.map_or(true, |decoded| find(&decoded, b"PRIVATE KEY").is_some());
    Some((at..at + length, is_key))
}

fn credentials_of_url(text: &[u8], at: usize) -> Option<(Range<usize>, IsSecret)> {
    let start = at + "://".len();
    let is_part = |byte: u8| !byte.is_ascii_whitespace() && !b"/?#\"'\\<>".contains(&byte);
    let authority = &text[start..start + run(&text[start..], is_part)];
    let length = memchr::memrchr(b'@', authority)?;
    Some((start..start + length, length > 0))
}

/// What follows the name of a scheme.
fn credentials(text: &[u8], at: usize) -> Option<(Range<usize>, IsSecret)> {
    let is_scheme = matches!(text[..at].last(), Some(b'B' | b'b'));
    let start = at + memchr::memchr(b' ', &text[at..])? + 1;
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    let length = run(&text[start..], is_part);
    let is_secret = is_scheme && length >= SHORTEST_CREDENTIAL;
    Some((start..start + length, is_secret))
}

/// The value behind a separator, if the name before it says that it is secret: `token=…`,
/// `"token": "…"`, also in JSON within a string, and `authorization: …`.
fn value(text: &[u8], at: usize) -> Option<(Range<usize>, IsSecret)> {
    let is_colon = text[at] == b':';
    let before = text[..at].trim_ascii_end();
    // `::` separates in pages of Envoy's.
    if is_colon && (before.ends_with(b":") || text[at + 1..].starts_with(b":")) {
        return None;
    }
    let quotes = before
        .iter()
        .rev()
        .take_while(|byte| b"\"'\\".contains(byte));
    let end = before.len() - quotes.count();
    let is_word = |byte: &&u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    let length = text[..end].iter().rev().take_while(is_word).count();
    let name = &text[end - length..end];
    let is_bare = end == before.len();
    let is_named = is_secret(name) && !(is_colon && is_bare && is_word_of_prose(name));
    let is_told = is_colon && follows_secret_name(name, &text[..end - length]);
    if !is_named && !is_told {
        return None;
    }
    let blanks = run(&text[at + 1..], |byte| byte.is_ascii_whitespace());
    let start = at + 1 + blanks;
    let slashes = run(&text[start..], |byte| byte == b'\\');
    if let Some(quote @ (b'"' | b'\'')) = text.get(start + slashes) {
        let start = start + slashes + 1;
        let length = quoted(&text[start..], *quote, slashes);
        return Some((start..start + length, length > 0));
    }
    if !is_named {
        return None;
    }
    let is_last = is_colon && is_bare || is_header_of_credentials(name);
    let length = run(&text[start..], |byte| match is_last {
        true => byte != b'"' && byte != b'\n',
        false => !byte.is_ascii_whitespace() && !b",;&\"'\\()[]{}<>".contains(&byte),
    });
    let value = &text[start..start + length];
    // In pages of statistics.
    let is_count = is_colon && is_bare && value.trim_ascii().iter().all(u8::is_ascii_digit);
    Some((start..start + length, !is_count))
}

/// Whether this is the value of a name or key just before it, as in the messages that Envoy quotes where
/// it refuses them: `key: "authorization" value: "…"`.
fn follows_secret_name(name: &[u8], before: &[u8]) -> bool {
    let member = Member::of(name);
    if !matches!(member, Member::Value | Member::Matcher) {
        return false;
    }
    let near = &before[before.len().saturating_sub(NEAR)..];
    let mut words = near.split(|byte| !byte.is_ascii_alphanumeric() && !b"-_".contains(byte));
    words.any(|word| is_secret(word) || member == Member::Value && word == b"key")
}

/// The length of a text up to the quote that ends it. The one that begins it has so many backslashes
/// before it: none in JSON, one in JSON within a string, three in JSON within a string of that.
fn quoted(text: &[u8], quote: u8, slashes: usize) -> usize {
    for at in memchr::memchr_iter(quote, text) {
        let before = text[..at].iter().rev();
        let count = before.take_while(|byte| **byte == b'\\').count();
        let escaped = 2 * slashes + 1;
        if count & escaped != escaped {
            return at - count.min(slashes);
        }
    }
    text.len()
}

/// The length of the start that consists of such bytes.
pub(super) fn run(text: &[u8], is_part: impl Fn(u8) -> bool) -> usize {
    let mut bytes = text.iter();
    bytes.position(|byte| !is_part(*byte)).unwrap_or(text.len())
}
