//! Removes secrets from a text: known secrets, private keys, tokens, hashes of passwords, credentials of URLs and
//! of authentication schemes, and values with the name of a secret.

use std::borrow::Cow;

use memchr::memmem::{find, rfind};
use regex::bytes::{Regex, RegexSet};

use super::names::{is_secret, is_standard_header};

pub(super) const REDACTED: &[u8] = b"[redacted]";
/// The shortest known secret that is removed, in bytes. Shorter ones occur in texts by chance.
const MIN_KNOWN: usize = 6;

/// The rules for secrets, applied in this order. The group `secret` is removed; a match without that group
/// is an exception. A rule with `##` has two patterns: the first one finds a name, the second one matches the
/// value that follows it. The second one applies only if the group `name` names a secret, or if the group
/// `header` does not name a standard header. It is tried at the end of the name only, so the time is linear.
const RULES: [&str; 29] = [
    r"(?P<secret>-{4,5} ?BEGIN(?: |\+|%20)[\w +%]{0,40}PRIVATE(?: |\+|%20)KEY(?: BLOCK)? ?-{4,5}.*?(?:-{4,5} ?END[^-]*-{4,5}|\z))",
    // "PRIVATE KEY" in base64.
    r"(?P<secret>[\w+/=-]*(?:UFJJVkFURSBLRV|BSSVZBVEUgS0VZ|QUklWQVRFIEtFW)[\w+/=-]*)",
    // Tokens, a Docker configuration in base64, and hashes of passwords, in known formats.
    r"(?P<secret>eyJ[\w-]*\.[\w.-]+|eyJhdXRo[\w+/=-]{8,})",
    r"(?P<secret>\b(?:(?:A3T|AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{16,}|LTAI\w{12,}|dapi[0-9a-f]{32}|do[opr]_v1_\w{40,}|gh[a-z]_\w{30,}|github_pat_\w+|gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|soat|oas)-[\w-]{16,}|npm_[A-Za-z\d]{36}\b|pypi-[\w-]{30,}|dckr_pat_[\w-]{16,}|hv[sbr]\.[\w-]{20,}|xox[a-z]-[\w-]{10,}|xapp-\d-[\w-]{10,}|[rs]k_(?:live|test)_\w{10,}|whsec_[\w+/=]{16,}|SG\.[\w-]{16,64}\.[\w-]{16,}|sk-(?:[a-z\d]{2,8}-){0,2}[A-Za-z\d]{20,}[\w-]*|hf_\w{30,}|key-[0-9a-f]{32}\b|NRAK-\w{20,}|shp[a-z]{2}_[0-9a-f]{32}|ATATT\w[\w-]{20,}|AGE-SECRET-KEY-\w{20,}|\d{8,10}:AA[\w-]{30,}))",
    r"(?P<secret>\{(?:S?SHA\d{0,3}|S?MD5|CRYPT)\}[\w+/.$]{20,}=*|\$(?:apr1|2[abxy]|[15-7]|y|gy|argon2\w+|pbkdf2[\w-]*)\$[\w./$=,+-]{16,}|\bpbkdf2_\w+\$[\w./$=+]{16,}|\bSCRAM-SHA-\d+\$[\w+/=$:]{20,})",
    // URLs, their queries, and users with passwords; neither digests of images nor ports and paths.
    r#"(?:hooks\.slack\.com/\w+|discord(?:app)?\.com/api/webhooks|webhook\.office\.com/\w+)/(?P<secret>[^\s"'<>\\]+)"#,
    r#"://(?P<secret>[^/?#\s"'<>\\]+)@"#,
    r#"(?i)(?:[?&](?:amp;)?(?:key|code|jwt|sid|session|ticket|[\w-]*subscription-key)|\b(?:sig|signature|x-(?:amz|goog)-[\w-]+))=(?P<secret>[^&\s"'\\<>]+)"#,
    r#"[\w./:%+~-]+@sha(?:256|512):|(?://)?[\w.%+~-]*:\d+/[^\s@]*@|(?:mailto|serviceAccount):[^\s@]*@|(?://[\w.%+~-]*|[\w.%+~-]+):(?P<secret>[^\s/?#"'<>\\][^\s?#"'<>\\]*)@[\w\[(-]"#,
    // Flags of commands, and files of passwords.
    r#"\s(?:-[uU]|--(?:proxy-)?user)[ =]\s*[^\s:"']+:(?P<secret>[^\s"']*[^\s"'\d][^\s"']*)"#,
    r#"\b(?:mysql\w*|mariadb|sshpass|(?:docker|podman|helm registry|az|oc) login)\b[^\n|;]*?\s-p[ =]?(?P<secret>[^\s"'=-][^\s"']*)"#,
    r#"(?:LINE(?:(?:password|bindpw|rootpw|requirepass|masterauth)[ \t]+|[\w.*-]+:(?:\d{2,5}|\*):[\w*-]+:[\w-]+:)|\blogin\s+\S+\s+password[ \t]+)(?P<secret>[^\s:"'\\]+)[ \t]*(?:\\n|\n|$)"#,
    r#"LINE(?:- )?token:[ \t]+(?P<secret>[^\s"'/.\d\\][^\s"'\\]*)[ \t]*(?:\\n|\n|$)"#,
    // A short word in small letters behind a scheme is one of a sentence.
    r"(?i:\b(?:basic|bearer|negotiate|ntlm|apikey)),? +(?P<secret>(?:[A-Za-z][a-z]*[A-Z\d.~+/=_-]|[\d.~+/=_-]|[a-z]{16})[\w.~+/=-]*)",
    r"(?i:\b(?:digest|hawk|oauth|signature|aws4-hmac-\w+)) +(?P<secret>[\w-]+=[^\n]*)",
    r#"(?i:authorization|cookie)=[ \t]*(?P<secret>[^\s"'][^"'\n]*)"#,
    r#"\bkeySEP[\w:.-]+SEP(?:raw_)?value[\\"']*\s*:\s*(?P<secret>QUOTED)"#,
    // In sentences, too, a word with a digit is a token, unless it is a path, a time, a version or a name.
    r#"(?i:\btokens?(?::| is| was))[ \t]*(?:WORD|(?P<secret>(?:[A-Za-z+=_~-][^\s"',;:<>()/]*\d|\d+[^\s"',;:<>()/\d.])[^\s"',;<>()]*))"#,
    r#"(?i:\b(?:tokens?|secrets?|credentials?|passwords?)(?:(?: is| was)? |:))[ \t]*\\*["']?(?:WORD|(?P<secret>[0-9a-f]{16,}|[^\s"',;:<>()/]*(?:\d[^\s"',;:<>()/]*[A-Z_+=~!$%^*#@]|[A-Z_+=~!$%^*#@][^\s"',;:<>()/]*\d)[^\s"',;<>()]*))"#,
    r#"(?:^|[\s"'\[,(])(?:--?|(?:ENV|setenv|setx|set -\w+|configure set) +)NAME##(?: +|\\*["'], *\\*["'])(?P<secret>QUOTED|[^\s"'\\,\]-][^\s"'\\,\]]*)"#,
    // Headers set by Lua, headers and their matchers in messages of Envoy, pairs in its debugging output, XML.
    r#"\b(?:add|append|replace|set)\s*\(\s*\\*["']HEADER\\*["']\s*,\s*##(?P<secret>[^()"'\n]*(?:"[^"\n]*"|'[^'\n]*')[^()\n]*)"#,
    r#"\bheaders?SEPnameSEPHEADER(?:SEPMATCHER)+[\\"']*\s*:\s*##(?P<secret>QUOTED)"#,
    r#"(?:LINE|\()\\*["']NAME\\*["'], *##(?P<secret>QUOTED)"#,
    r#"(?:<|&lt;|\\u003c)[^<>&\\]{0,99}?NAME["']?(?:\s[^<>/&\\]*)?(?:>|&gt;|\\u003e)##(?P<secret>(?:<!\[CDATA\[)?(?:[^<&\\]|\\[nrt]|&(?:amp|quot|apos);)+)(?:<|&lt;|\\u003c)/"#,
    // Values behind names: quoted, in pairs, behind a separator, and the rest of a line. A colon behind some
    // words or a path may be one of a sentence, one before a number is in pages of statistics.
    r#"NAME##(?:SEP(?:(?:raw_)?value|inline_\w+|string_value|MATCHER)){0,6}[\\"'\]]*\s*(?:[=:]{1,2}>?|->)[ \t]*(?P<secret>QUOTED)"#,
    r#"NAME##SEP(?i:value)[\\"']*\s*[=:][ \t]*SCALAR(?P<secret>[^\s"'\\,}][^"\n\\}]*)"#,
    r"NAME##(?:(?:&quot;|\\u0022|%22)\s*(?::|%3A)\s*(?:&quot;|\\u0022|%22)|</\w+>\s*<(?i:\w*value)>)(?P<secret>[^&\\%<]+)",
    r#"NAME##(?:[\\"'\]]*\s*(?::?={1,2}>?|->|%3D)|[\\"'\]]+\s*:)[ \t]*(?P<secret>\[[^\]]*\]?|[^\s,;&"'\\()\[\]{}<>]+)"#,
    r#"(?:\b(?i:tokens?|secrets?|credentials?):|[\w.-]*/[\w.-]+/[\w./-]*:|NAME[ \t]*:[ \t]*)##SCALAR(?P<secret>[\d ]*[^\d\s":](?:=[ \t]*\\*"[^"\n]*"?|[^"\n])*)"#,
];
/// A text in quotes may be one in JSON within a string, which may be one in JSON again.
const PARTS: [&str; 8] = [
    r"SCALAR (?:[|>][+-]?[ \t]*(?:\\n|\n)\s*)?",
    r"LINE (?:\\n|\n|^)\s*",
    r"NAME (?P<name>[\w-]*(?i:pass|pwd|pw|psk|secret|token|credential|key|auth|cookie|session|sessid|bearer|pkcs12|connection.?string|signature|jwks|users|header|mnemonic|id_(?:rsa|dsa|ecdsa|ed25519)|_pat)[\w-]*|\b(?:PAT|pat)\b)",
    r"HEADER (?P<header>[\w:-]+)",
    r"MATCHER (?:\w*(?:match|regex|exact|prefix|suffix|contains)|google_re2|true)",
    r"SEP (?:\\[nrt]|\W){1,99}",
    r"WORD (?:\d{4}-\d\d|(?:[A-Z][A-Za-z]*-?\d{1,5}|[\d.]+[a-z%]{0,3})(?:[\s.,;)]|$))",
    r#"QUOTED (?:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\\"(?:[^"\\]|\\{2,}[^\\])*(?:\\")?|\\+["'][^"']*["']?)"#,
];

/// A pattern, and the pattern of the value that follows it.
type Rule = (Regex, Option<Regex>);

/// The rules that find secrets, and known secrets.
#[allow(missing_debug_implementations)]
pub struct Secrets {
    /// The patterns of all rules in one set, because most texts match none.
    any: RegexSet,
    rules: Vec<Rule>,
}

impl Secrets {
    /// Compiles the rules. Secrets in `known` are removed anywhere, also in JSON, unless they are shorter than six
    /// bytes.
    pub fn new(known: impl IntoIterator<Item = String>) -> Result<Self, regex::Error> {
        let mut forms = Vec::new();
        for text in known {
            let text = text.trim();
            if text.len() >= MIN_KNOWN {
                let in_json = serde_json::Value::from(text).to_string();
                forms.extend([text, &in_json[1..in_json.len() - 1]].map(regex::escape));
            }
        }
        // The longest first, because a secret may be a part of another.
        forms.sort_by_key(|form| std::cmp::Reverse(form.len()));
        let known = (!forms.is_empty()).then(|| format!("(?s-u)(?P<secret>{})", forms.join("|")));
        let parts = || PARTS.iter().filter_map(|part| part.split_once(' '));
        let rules = RULES.map(|rule| {
            let rule = format!("(?s-u){rule}");
            parts().fold(rule, |rule, (name, part)| rule.replace(name, part))
        });
        let rules = Vec::from_iter(known.into_iter().chain(rules));
        let compiled = rules.iter().map(|rule| {
            let (name, value) = rule.split_once("##").unzip();
            let value = value.map(|value| Regex::new(&format!("(?s-u)^{value}")));
            Ok((Regex::new(name.unwrap_or(rule))?, value.transpose()?))
        });
        Ok(Self {
            any: RegexSet::new(rules.iter().map(|rule| rule.replace("##", "")))?,
            rules: compiled.collect::<Result<_, _>>()?,
        })
    }

    /// Removes the secrets of a text.
    pub(super) fn hide<'t>(&self, text: &'t [u8]) -> Cow<'t, [u8]> {
        let found = self.any.matches(text).into_iter();
        found.fold(Cow::Borrowed(text), |text, index| hide(text, &self.rules[index]))
    }
}

fn hide<'t>(text: Cow<'t, [u8]>, (pattern, value): &Rule) -> Cow<'t, [u8]> {
    let (mut out, mut written, mut from) = (Vec::new(), 0, 0);
    while let Some(found) = pattern.captures_at(&text, from) {
        from = found.get_match().end();
        let is_named = match (found.name("name"), found.name("header")) {
            (Some(name), _) => is_secret(name.as_bytes()),
            (_, Some(header)) => !is_standard_header(header.as_bytes()),
            _ => value.is_none(),
        };
        let (start, found) = match value.as_ref().filter(|_| is_named) {
            Some(value) => (from, value.captures(&text[from..])),
            None => (0, Some(found)),
        };
        if let Some(secret) = found.and_then(|found| found.name("secret")) {
            out.extend_from_slice(&text[written..start + secret.start()]);
            out.extend_from_slice(REDACTED);
            from = start + secret.end();
            written = from;
        }
    }
    if written == 0 {
        return text;
    }
    out.extend_from_slice(&text[written..]);
    out.into()
}

/// Returns true if the next line belongs to a private key. `is_in_key` is true if this line does.
pub(super) fn is_in_key(line: &[u8], is_in_key: bool) -> bool {
    let begin = rfind(line, b"-----BEGIN ");
    let last = &line[begin.unwrap_or(0)..];
    let is_of_key = begin.map_or(is_in_key, |_| find(last, b"PRIVATE KEY").is_some());
    is_of_key && find(last, b"-----END ").is_none()
}
