//! Secrets inside a text: known ones, private keys, tokens, hashes of passwords, credentials of URLs and
//! of authentication schemes, and values whose names say that they are secret.

use std::borrow::Cow;

use memchr::memmem::{find, rfind};
use regex::bytes::{Captures, Regex, RegexBuilder, RegexSet, RegexSetBuilder};

use super::names::{is_secret, is_standard_header};

pub(super) const REDACTED: &[u8] = b"[redacted]";
/// Shorter ones are in texts by chance.
const MIN_KNOWN: usize = 6;

/// What is secret, applied one after the other: the group `secret`, or the whole where there is no such
/// group. A match without it is an exception. The group `name` has to be the name of a secret, the group
/// `header` that of a header that is not a standard one. Capital letters stand for [`PARTS`].
const PATTERNS: [&str; 16] = [
    r"-----BEGIN [\w ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [^-]*-----|\z)",
    // "PRIVATE KEY" in base64.
    r"[\w+/=-]*(?:UFJJVkFURSBLRV|BSSVZBVEUgS0VZ|QUklWQVRFIEtFW)[\w+/=-]*",
    // Tokens and hashes of passwords in known formats.
    r"eyJ[\w-]*\.[\w.-]+|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bgh[a-z]_\w{30,}|\bgithub_pat_\w+",
    r"\bglpat-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|\b[rs]k_live_\w{10,}|\bhvs\.[\w-]{20,}",
    r"\{SHA\}[\w+/]{20,}=*|\$(?:apr1|2[abxy]|[1567]|argon2\w+)\$[\w./$=,+-]{16,}",
    // URLs, their queries, and users with passwords; neither digests of images nor ports and paths.
    r#"://(?P<secret>[^/?#\s"'<>\\]+)@"#,
    r#"(?i)[?&](?:amp;)?(?:sig|signature|key|code|[\w-]*subscription-key|x-(?:amz|goog)-[\w-]+)=(?P<secret>[^&\s"'\\<>]+)"#,
    r#"[\w./:%+~-]+@sha(?:256|512):|(?://)?[\w.%+~-]*:\d+/[^\s@]*@|(?:mailto|serviceAccount):[^\s@]*@|(?://[\w.%+~-]*|[\w.%+~-]+):(?P<secret>[^\s/?#"'<>\\][^\s?#"'<>\\]*)@[\w\[(-]"#,
    // Flags of commands.
    r#"\s(?:-u|--user)[ =]\s*[^\s:"']+:(?P<secret>[^\s"']*[^\s"'\d][^\s"']*)"#,
    r#"[\s"'\[,]--?NAME(?: +|\\*["'], *\\*["'])(?P<secret>[^\s"'\\,\]-][^\s"'\\,\]]*)"#,
    // A word in small letters behind a scheme is one of a sentence.
    r"(?i:\b(?:basic|bearer|negotiate)) +(?P<secret>(?:[A-Za-z][a-z]*[A-Z\d.~+/=_-]|[\d.~+/=_-])[\w.~+/=-]*)",
    // Headers set by Lua, and headers and their matchers in messages of Envoy.
    r#"\b(?:add|append|replace|set)\s*\(\s*\\*["']HEADER\\*["']\s*,\s*(?P<secret>[^()"'\n]*(?:"[^"\n]*"|'[^'\n]*')[^()\n]*)"#,
    r#"(?:\bkeySEP[\w:.-]+SEP(?:raw_)?value|\bheaders?SEPnameSEPHEADER(?:SEPMATCHER)+)[\\"']*\s*:\s*(?P<secret>QUOTED)"#,
    // Values behind names: quoted, behind a separator, and the rest of a line. A colon behind some words
    // may be one of a sentence, one before a number is in pages of statistics.
    r#"NAME(?:SEP(?:(?:raw_)?value|inline_\w+|string_value|MATCHER))*[\\"'\]]*\s*[=:][ \t]*(?P<secret>QUOTED)"#,
    r#"NAME(?:[\\"'\]]*\s*=|[\\"'\]]+\s*:)[ \t]*(?P<secret>\[[^\]]*\]?|[^\s,;&"'\\()\[\]{}<>]+)"#,
    r#"\b(?i:tokens?|secrets?|credentials?):|NAME:[ \t]*(?P<secret>[\d ]*[^\d\s":][^"\n]*)"#,
];
/// A text in quotes may be one in JSON within a string, which may be one in JSON again.
const PARTS: [(&str, &str); 5] = [
    (
        "NAME",
        r"(?P<name>[\w-]*(?i:pass|pwd|secret|token|credential|key|auth|cookie|session|pkcs12|connection.?string|jwks|users|header)[\w-]*)",
    ),
    ("HEADER", r"(?P<header>[\w:-]+)"),
    (
        "MATCHER",
        r"(?:\w*(?:match|regex|exact|prefix|suffix|contains)|google_re2|true)",
    ),
    ("SEP", r"(?:\\n|\W)+"),
    (
        "QUOTED",
        r#"(?:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\\"(?:[^"\\]|\\{2,}[^\\])*(?:\\")?|\\+["'][^"']*["']?)"#,
    ),
];

/// Finds secrets.
#[allow(missing_debug_implementations)]
pub struct Secrets {
    /// Most texts match none.
    any: RegexSet,
    each: Vec<Regex>,
}

impl Secrets {
    /// `known` are found wherever they are, in JSON too, unless they are very short.
    pub fn new(known: impl IntoIterator<Item = String>) -> Result<Self, regex::Error> {
        let mut forms = Vec::new();
        for text in known {
            let text = text.trim();
            if text.len() >= MIN_KNOWN {
                let in_json = serde_json::Value::from(text).to_string();
                forms.extend([text, &in_json[1..in_json.len() - 1]].map(regex::escape));
            }
        }
        // One may be a part of another.
        forms.sort_by_key(|form| std::cmp::Reverse(form.len()));
        let mut patterns = PATTERNS
            .map(|pattern| {
                PARTS.iter().fold(pattern.to_owned(), |all, (name, part)| {
                    all.replace(name, part)
                })
            })
            .to_vec();
        if !forms.is_empty() {
            patterns.insert(0, forms.join("|"));
        }
        let each = patterns.iter().map(|pattern| {
            let mut builder = RegexBuilder::new(pattern);
            builder.unicode(false).dot_matches_new_line(true).build()
        });
        let mut any = RegexSetBuilder::new(&patterns);
        Ok(Self {
            any: any.unicode(false).dot_matches_new_line(true).build()?,
            each: each.collect::<Result<_, _>>()?,
        })
    }

    /// The text without its secrets.
    pub(super) fn hide<'t>(&self, text: &'t [u8]) -> Cow<'t, [u8]> {
        let found = self.any.matches(text).into_iter();
        found.fold(Cow::Borrowed(text), |text, index| {
            hide(text, &self.each[index])
        })
    }
}

fn hide<'t>(text: Cow<'t, [u8]>, pattern: &Regex) -> Cow<'t, [u8]> {
    let has_group = pattern
        .capture_names()
        .flatten()
        .any(|name| name == "secret");
    let (mut out, mut written, mut from) = (Vec::new(), 0, 0);
    while let Some(found) = pattern.captures_at(&text, from) {
        let name = found.name("name").or(found.name("header"));
        let secret = match has_group {
            true => found.name("secret").filter(|_| is_named_secret(&found)),
            false => found.get(0),
        };
        match secret {
            Some(secret) => {
                out.extend_from_slice(&text[written..secret.start()]);
                out.extend_from_slice(REDACTED);
                written = secret.end();
                from = written;
            }
            // Behind a name that is none, there may be another.
            None => from = name.unwrap_or(found.get_match()).end(),
        }
    }
    match written {
        0 => text,
        _ => {
            out.extend_from_slice(&text[written..]);
            out.into()
        }
    }
}

fn is_named_secret(found: &Captures<'_>) -> bool {
    let is =
        |group, test: fn(&[u8]) -> bool| found.name(group).is_none_or(|name| test(name.as_bytes()));
    is("name", is_secret) && is("header", |name| !is_standard_header(name))
}

/// Whether a private key begins in the text and does not end in it.
pub(super) fn ends_in_key(text: &[u8]) -> bool {
    let begin = rfind(text, b"-----BEGIN ");
    let last = begin.map_or(&[][..], |begin| &text[begin..]);
    find(last, b"PRIVATE KEY").is_some() && find(last, b"-----END ").is_none()
}
