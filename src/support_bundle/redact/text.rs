//! Secrets inside a text: known ones, private keys, tokens, hashes of passwords, credentials of URLs and
//! of authentication schemes, and values whose names say that they are secret.

use std::borrow::Cow;
use std::ops::Range;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use memchr::memmem::{Finder, find, rfind};
use regex::bytes::{Captures, Regex, RegexBuilder};

use super::names::{Member, is_secret, is_standard_header};

pub(super) const REDACTED: &[u8] = b"[redacted]";
/// Shorter ones are in texts by chance.
const MIN_KNOWN: usize = 6;
/// How far before its value a name is looked for.
const NEAR: usize = 200;
/// A colon behind these may be one of a sentence.
const PROSE: &str = "token tokens secret secrets credential credentials";

/// What is secret, or group 1 of it: private keys; tokens and hashes of passwords in known formats; URLs
/// and their queries; the password of `-u user:…`, where that is no group.
const SECRETS: [&str; 9] = [
    r"-----BEGIN [\w ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?s:.*?)(?:-----END [^-]*-----|\z)",
    r"eyJ[\w-]*\.[\w.-]+",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bgh[a-z]_\w{30,}|\bgithub_pat_\w+",
    r"\bglpat-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|\b[rs]k_live_\w{10,}|\bhvs\.[\w-]{20,}",
    r"\{SHA\}[\w+/]{20,}=*|\$(?:apr1|2[abxy]|[1567]|argon2\w+)\$[\w./$=,+-]{16,}",
    r#"://([^/?#\s"'<>\\]+)@"#,
    r#"(?i)[?&](?:amp;)?(?:sig|signature|key|code|[\w-]*subscription-key)=([^&\s"'\\<>]+)"#,
    r#"(?i)[?&](?:amp;)?x-(?:amz|goog)-[\w-]+=([^&\s"'\\<>]+)"#,
    r#"\s(?:-u|--user)[ =]\s*[^\s:"']+:([^\s"']*[^\s"'\d][^\s"']*)"#,
];

/// The secret in a match, if it has one. The search goes on behind it, else behind group 1.
type Extent = fn(&[u8], &Captures<'_>) -> Option<Range<usize>>;

const EXTENTS: [(Extent, &str); 6] = [
    (encoded_key, r"LS0tLS1CRUdJTi[\w+/=-]*"),
    (
        credentials,
        r"(?i)\b(?:basic|bearer|negotiate) +([\w.~+/=-]{8,})",
    ),
    (password, PASSWORD),
    (flag, FLAG),
    (call, CALL),
    (
        value,
        r#"((?:\\n)?([\w-]+)([\\"'\]]*)\s*[=:])[ \t]*(\\*)(["'\[]?)"#,
    ),
];
const PASSWORD: &str = r#"(?://[\w.%+~-]*|[\w.%+~-]+):([^\s/?#"'<>\\][^\s?#"'<>\\]*)@([\w\[(-]+)"#;
const FLAG: &str =
    r#"(?i)[\s"'\[,]--?([a-z][\w-]*)(?: +|\\*["'], *\\*["'])([^\s"'\\,\]-][^\s"'\\,\]]*)"#;
const CALL: &str = r#"\b(?:add|append|replace|set)\s*\(\s*\\*["']([\w:-]+)\\*["']\s*,\s*((?:\\*"[^"\n]*"|\\*'[^'\n]*'|[^()"'\n])*)"#;

/// Finds secrets.
#[allow(missing_debug_implementations)]
pub struct Secrets {
    known: Vec<Finder<'static>>,
    /// All patterns in one, as most texts have none.
    any: Regex,
    patterns: Vec<(Regex, Extent)>,
}

impl Secrets {
    /// `known` are found wherever they are, in JSON too, unless they are very short.
    pub fn new(known: impl IntoIterator<Item = String>) -> Result<Self, regex::Error> {
        let mut forms = Vec::new();
        for text in known {
            let text = text.trim().to_owned();
            if text.len() >= MIN_KNOWN {
                let in_json = serde_json::Value::from(&*text).to_string();
                forms.push(in_json[1..in_json.len() - 1].to_owned());
                forms.push(text);
            }
        }
        // One may be a part of another.
        forms.sort_by_key(|form| std::cmp::Reverse(form.len()));
        let secrets = SECRETS.iter().map(|pattern| (group as Extent, *pattern));
        let all: Vec<_> = secrets.chain(EXTENTS).collect();
        let any: Vec<_> = all
            .iter()
            .map(|(_, pattern)| format!("(?:{pattern})"))
            .collect();
        let compile = |pattern: &str| RegexBuilder::new(pattern).unicode(false).build();
        let patterns = all
            .iter()
            .map(|(extent, pattern)| Ok((compile(pattern)?, *extent)));
        Ok(Self {
            any: compile(&any.join("|"))?,
            known: forms
                .iter()
                .map(|form| Finder::new(form).into_owned())
                .collect(),
            patterns: patterns.collect::<Result<_, _>>()?,
        })
    }

    /// The text without what is known.
    pub(super) fn hide_known<'t>(&self, text: &'t [u8]) -> Cow<'t, [u8]> {
        self.known.iter().fold(Cow::Borrowed(text), |text, known| {
            hide(text, |text, from| {
                let start = from + known.find(&text[from..])?;
                let end = start + known.needle().len();
                Some((Some(start..end), end))
            })
        })
    }

    /// The text without what looks like a secret.
    pub(super) fn hide_patterns<'t>(&self, text: Cow<'t, [u8]>) -> Cow<'t, [u8]> {
        if !self.any.is_match(&text) {
            return text;
        }
        self.patterns.iter().fold(text, |text, (regex, extent)| {
            hide(text, |text, from| {
                let found = regex.captures_at(text, from)?;
                let secret = extent(text, &found);
                let whole = found.get_match();
                let next = match &secret {
                    Some(secret) => secret.end.max(from + 1),
                    None => found.get(1).unwrap_or(whole).end().max(whole.start() + 1),
                };
                Some((secret, next))
            })
        })
    }
}

/// Replaces what `find` finds from a place on; it says where to go on.
fn hide<'t>(
    text: Cow<'t, [u8]>,
    find: impl Fn(&[u8], usize) -> Option<(Option<Range<usize>>, usize)>,
) -> Cow<'t, [u8]> {
    let (mut out, mut written, mut from) = (Vec::new(), 0, 0);
    while let Some((secret, next)) = (from < text.len()).then(|| find(&text, from)).flatten() {
        if let Some(secret) = secret.filter(|secret| !secret.is_empty()) {
            out.extend_from_slice(&text[written..secret.start]);
            out.extend_from_slice(REDACTED);
            written = secret.end;
        }
        from = next;
    }
    match written {
        0 => text,
        _ => {
            out.extend_from_slice(&text[written..]);
            out.into()
        }
    }
}

/// Whether a private key begins in the text and does not end in it.
pub(super) fn ends_in_key(text: &[u8]) -> bool {
    let begin = rfind(text, b"-----BEGIN ");
    let last = begin.map_or(&[][..], |begin| &text[begin..]);
    find(last, b"PRIVATE KEY").is_some() && find(last, b"-----END ").is_none()
}

fn group(_: &[u8], found: &Captures<'_>) -> Option<Range<usize>> {
    Some(found.get(1).unwrap_or(found.get_match()).range())
}

fn encoded_key(_: &[u8], found: &Captures<'_>) -> Option<Range<usize>> {
    let text = found.get_match();
    let whole_groups = &text.as_bytes()[..text.len() / 4 * 4];
    let decoded = BASE64_STANDARD.decode(whole_groups);
    // What cannot be read may be one.
    let is_key = decoded.map_or(true, |decoded| find(&decoded, b"PRIVATE KEY").is_some());
    is_key.then(|| text.range())
}

fn credentials(_: &[u8], found: &Captures<'_>) -> Option<Range<usize>> {
    let secret = found.get(1)?;
    let is_word = secret.as_bytes().iter().all(u8::is_ascii_alphabetic);
    let prose = [&b"auth"[..], b"Auth", b"credential"];
    let is_prose = is_word
        && prose
            .iter()
            .any(|start| secret.as_bytes().starts_with(start));
    (!is_prose).then(|| secret.range())
}

/// The one of a user at a host, neither the tag of an image before its digest, nor a port and a path.
fn password(_: &[u8], found: &Captures<'_>) -> Option<Range<usize>> {
    let secret = found.get(1)?;
    let starts = [&b"mailto:"[..], b"serviceAccount:"];
    let is_address = starts.iter().any(|start| found[0].starts_with(start));
    let is_digest = found[2].starts_with(b"sha256") || found[2].starts_with(b"sha512");
    let mut parts = secret.as_bytes().splitn(2, |byte| *byte == b'/');
    let is_number = parts
        .next()
        .is_some_and(|part| part.iter().all(u8::is_ascii_digit));
    let is_port = is_number && parts.next().is_some();
    (!is_address && !is_digest && !is_port).then(|| secret.range())
}

/// The value behind a flag of a command, `--token …`.
fn flag(_: &[u8], found: &Captures<'_>) -> Option<Range<usize>> {
    is_secret(&found[1])
        .then(|| found.get(2))?
        .map(|value| value.range())
}

/// The texts a header is set to, as in `headers():add("x-key", "…")`.
fn call(_: &[u8], found: &Captures<'_>) -> Option<Range<usize>> {
    let value = found.get(2)?;
    let has_text = memchr::memchr2(b'"', b'\'', value.as_bytes()).is_some();
    (has_text && !is_standard_header(&found[1])).then(|| value.range())
}

/// The value behind a separator, if the name before it says that it is secret: `token=…`,
/// `"token": "…"`, also in JSON within a text, and `authorization: …`.
fn value(text: &[u8], found: &Captures<'_>) -> Option<Range<usize>> {
    let (separated, name) = (found.get(1)?, &found[2]);
    let is_colon = separated.as_bytes().ends_with(b":");
    // `::` separates in pages of Envoy's.
    if is_colon && text[separated.end()..].starts_with(b":") {
        return None;
    }
    let is_bare = is_colon && found[3].is_empty();
    let member = Member::of(name);
    let is_prose = is_bare
        && PROSE
            .split(' ')
            .any(|word| name.eq_ignore_ascii_case(word.as_bytes()));
    let is_named = matches!(member, Member::Secret { .. }) && !is_prose;
    let mut start = found.get_match().end();
    let mut opening = &found[5];
    if text[..start].ends_with(b"[") && text[start - 1..].starts_with(REDACTED) {
        (start, opening) = (start - 1, b"");
    }
    let rest = &text[start..];
    let length = match opening {
        [quote @ (b'"' | b'\'')] => {
            let is_secret =
                is_named || is_colon && follows_secret_name(member, &text[..separated.start()]);
            is_secret.then(|| quoted(rest, *quote, found[4].len()))?
        }
        _ if !is_named => return None,
        // A list.
        b"[" => memchr::memchr(b']', rest).unwrap_or(rest.len()),
        _ if is_bare || member == (Member::Secret { is_whole: false }) => {
            memchr::memchr2(b'"', b'\n', rest).unwrap_or(rest.len())
        }
        _ => {
            let is_end =
                |byte: &u8| byte.is_ascii_whitespace() || b",;&\"'\\()[]{}<>".contains(byte);
            rest.iter().position(is_end).unwrap_or(rest.len())
        }
    };
    // In pages of statistics.
    let is_count = is_bare && rest[..length].trim_ascii().iter().all(u8::is_ascii_digit);
    (!is_count).then_some(start..start + length)
}

/// Whether this is the value of a name or key just before it, as in the messages that Envoy quotes where
/// it refuses them: `key: "authorization" value: "…"`.
fn follows_secret_name(member: Member, before: &[u8]) -> bool {
    if !matches!(member, Member::Value | Member::Matcher) {
        return false;
    }
    let near = &before[before.len().saturating_sub(NEAR)..];
    let words = near.split(|byte| !byte.is_ascii_alphanumeric() && !b"-_".contains(byte));
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    let has = |word: &[u8]| words.contains(&word);
    let header = words.windows(2).rfind(|pair| pair[0] == b"name");
    let is_header = has(b"header") || has(b"headers");
    words.iter().any(|word| is_secret(word))
        || member == Member::Value && has(b"key")
        || is_header && header.is_some_and(|pair| !is_standard_header(pair[1]))
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
