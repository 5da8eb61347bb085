//! Secrets inside a text: known ones, private keys, tokens, hashes of passwords, credentials of URLs and
//! of authentication schemes, and values whose names say that they are secret.

use std::borrow::Cow;

use memchr::memmem::{find, rfind};
use regex::bytes::{Regex, RegexSet};

use super::names::{is_secret, is_standard_header};

pub(super) const REDACTED: &[u8] = b"[redacted]";
/// Shorter ones are in texts by chance.
const MIN_KNOWN: usize = 6;

/// What is secret, applied one after the other: the group `secret`. A match without it is an exception.
/// The group `name` has to be the name of a secret, the group `header` that of a header that is not a
/// standard one. Capital letters stand for [`PARTS`].
const PATTERNS: [&str; 17] = [
    r"(?P<secret>-----BEGIN [\w ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [^-]*-----|\z))",
    // "PRIVATE KEY" in base64.
    r"(?P<secret>[\w+/=-]*(?:UFJJVkFURSBLRV|BSSVZBVEUgS0VZ|QUklWQVRFIEtFW)[\w+/=-]*)",
    // Tokens and hashes of passwords in known formats.
    r"(?P<secret>eyJ[\w-]*\.[\w.-]+|\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{35}|gh[a-z]_\w{30,}|github_pat_\w+))",
    r"(?P<secret>\b(?:glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|[rs]k_live_\w{10,}|hvs\.[\w-]{20,}))",
    r"(?P<secret>\{SHA\}[\w+/]{20,}=*|\$(?:apr1|2[abxy]|[1567]|argon2\w+)\$[\w./$=,+-]{16,})",
    // URLs, their queries, and users with passwords; neither digests of images nor ports and paths.
    r#"://(?P<secret>[^/?#\s"'<>\\]+)@"#,
    r#"(?i)[?&](?:amp;)?(?:sig|signature|key|code|[\w-]*subscription-key|x-(?:amz|goog)-[\w-]+)=(?P<secret>[^&\s"'\\<>]+)"#,
    r#"[\w./:%+~-]+@sha(?:256|512):|(?://)?[\w.%+~-]*:\d+/[^\s@]*@|(?:mailto|serviceAccount):[^\s@]*@|(?://[\w.%+~-]*|[\w.%+~-]+):(?P<secret>[^\s/?#"'<>\\][^\s?#"'<>\\]*)@[\w\[(-]"#,
    // Flags of commands.
    r#"\s(?:-u|--user)[ =]\s*[^\s:"']+:(?P<secret>[^\s"']*[^\s"'\d][^\s"']*)"#,
    r#"[\s"'\[,]--?NAME(?: +|\\*["'], *\\*["'])(?P<secret>[^\s"'\\,\]-][^\s"'\\,\]]*)"#,
    // A short word in small letters behind a scheme is one of a sentence.
    r"(?i:\b(?:basic|bearer|negotiate)) +(?P<secret>(?:[A-Za-z][a-z]*[A-Z\d.~+/=_-]|[\d.~+/=_-]|[a-z]{16})[\w.~+/=-]*)",
    // Headers set by Lua, and headers and their matchers in messages of Envoy.
    r#"\b(?:add|append|replace|set)\s*\(\s*\\*["']HEADER\\*["']\s*,\s*(?P<secret>[^()"'\n]*(?:"[^"\n]*"|'[^'\n]*')[^()\n]*)"#,
    r#"(?:\bkeySEP[\w:.-]+SEP(?:raw_)?value|\bheaders?SEPnameSEPHEADER(?:SEPMATCHER)+)[\\"']*\s*:\s*(?P<secret>QUOTED)"#,
    // Values behind names: quoted, behind a separator, and the rest of a line. A colon behind some words
    // may be one of a sentence, one before a number is in pages of statistics.
    r#"NAME(?:SEP(?:(?:raw_)?value|inline_\w+|string_value|MATCHER))*[\\"'\]]*\s*[=:][ \t]*(?P<secret>QUOTED)"#,
    r#"(?i:authorization|cookie)=[ \t]*(?P<secret>[^\s"'][^"'\n]*)"#,
    r#"NAME(?:[\\"'\]]*\s*=|[\\"'\]]+\s*:)[ \t]*(?P<secret>\[[^\]]*\]?|[^\s,;&"'\\()\[\]{}<>]+)"#,
    r#"\b(?i:tokens?|secrets?|credentials?):|NAME[ \t]*:[ \t]*(?P<secret>[\d ]*[^\d\s":][^"\n]*)"#,
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
        let known = format!("(?P<secret>{})", forms.join("|"));
        let known = (!forms.is_empty()).then_some(known);
        let patterns = known.into_iter().chain(PATTERNS.map(|pattern| {
            let mut whole = format!("(?s-u){pattern}");
            for (name, part) in PARTS {
                whole = whole.replace(name, part);
            }
            whole
        }));
        let patterns: Vec<_> = patterns.collect();
        let each = patterns.iter().map(|pattern| Regex::new(pattern));
        Ok(Self {
            any: RegexSet::new(&patterns)?,
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
    let (mut out, mut written, mut from) = (Vec::new(), 0, 0);
    while let Some(found) = pattern.captures_at(&text, from) {
        let (name, header) = (found.name("name"), found.name("header"));
        let is_named = name.is_none_or(|name| is_secret(name.as_bytes()))
            && header.is_none_or(|header| !is_standard_header(header.as_bytes()));
        match found.name("secret").filter(|_| is_named) {
            Some(secret) => {
                out.extend_from_slice(&text[written..secret.start()]);
                out.extend_from_slice(REDACTED);
                written = secret.end();
                from = written;
            }
            // Behind a name that is none, there may be another.
            None => from = name.or(header).unwrap_or(found.get_match()).end(),
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

/// Whether a private key begins in the text and does not end in it.
pub(super) fn ends_in_key(text: &[u8]) -> bool {
    let begin = rfind(text, b"-----BEGIN ");
    let last = begin.map_or(&[][..], |begin| &text[begin..]);
    find(last, b"PRIVATE KEY").is_some() && find(last, b"-----END ").is_none()
}
