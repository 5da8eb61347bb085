//! What is known of this pod: its addresses, its node id, its labels and annotations.
//!
//! Labels and annotations come from files Kubernetes writes, one `key="value"` per line. A line
//! that cannot be read is a warning and costs that line only.
//!
//! Does not look at network interfaces: without `INSTANCE_IP` the node has the loopback address.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use super::Problem;

pub type Pairs = BTreeMap<String, String>;

/// What kind of Envoy this is; the first part of the node id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeType {
    Sidecar,
    Router,
}

impl fmt::Display for NodeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sidecar => "sidecar",
            Self::Router => "router",
        })
    }
}

/// The addresses of the node, the most important first. Never empty.
pub fn addresses(instance_ip: &str, warnings: &mut Vec<Problem>) -> Vec<IpAddr> {
    if let Ok(address) = instance_ip.parse() {
        return vec![address];
    }
    if !instance_ip.is_empty() {
        warnings.push(Problem {
            subject: "INSTANCE_IP".to_owned(),
            found: instance_ip.to_owned(),
            expected: "an IP address, using 127.0.0.1".to_owned(),
        });
    }
    vec![Ipv4Addr::LOCALHOST.into()]
}

/// `<type>~<address>~<pod>.<namespace>~<domain>`.
pub fn node_id(
    kind: NodeType,
    address: IpAddr,
    pod: &str,
    namespace: &str,
    domain: &str,
) -> String {
    format!("{kind}~{address}~{pod}.{namespace}~{domain}")
}

/// The pairs of a downward API file, or nothing when there is no such file.
pub fn read_pairs(path: &Path, warnings: &mut Vec<Problem>) -> Option<Pairs> {
    match std::fs::read_to_string(path) {
        Ok(text) => Some(parse_pairs(&text, path, warnings)),
        Err(error) => {
            if error.kind() != std::io::ErrorKind::NotFound {
                warnings.push(Problem {
                    subject: path.display().to_string(),
                    found: error.to_string(),
                    expected: "a readable file, going on without it".to_owned(),
                });
            }
            None
        }
    }
}

fn parse_pairs(text: &str, path: &Path, warnings: &mut Vec<Problem>) -> Pairs {
    let mut pairs = Pairs::new();
    for (index, line) in text.lines().enumerate() {
        let Some((key, quoted)) = line.split_once('=') else {
            continue;
        };
        match unquote(quoted) {
            Some(value) => {
                pairs.insert(key.to_owned(), value);
            }
            None => warnings.push(Problem {
                subject: format!("{} line {}", path.display(), index + 1),
                found: line.to_owned(),
                expected: "key=\"value\", skipping the line".to_owned(),
            }),
        }
    }
    pairs
}

/// The text of a Go string literal in double or back quotes.
fn unquote(literal: &str) -> Option<String> {
    if let Some(raw) = literal.strip_prefix('`') {
        return raw
            .strip_suffix('`')
            .filter(|raw| !raw.contains('`'))
            .map(str::to_owned);
    }
    let body = literal.strip_prefix('"')?.strip_suffix('"')?;
    let mut bytes = Vec::with_capacity(body.len());
    let mut chars = body.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => return None,
            '\\' => unescape(&mut chars, &mut bytes)?,
            c => push_char(c, &mut bytes),
        }
    }
    String::from_utf8(bytes).ok()
}

/// Appends the character of a `\u` or `\U` escape.
fn push_number(code: u32, bytes: &mut Vec<u8>) -> Option<()> {
    push_char(char::from_u32(code)?, bytes);
    Some(())
}

fn push_char(c: char, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
}

/// What follows a backslash. `\x` and octal escapes name bytes, `\u` and `\U` characters.
fn unescape(chars: &mut std::str::Chars<'_>, bytes: &mut Vec<u8>) -> Option<()> {
    let simple = match chars.next()? {
        'a' => 7,
        'b' => 8,
        'f' => 12,
        'n' => b'\n',
        'r' => b'\r',
        't' => b'\t',
        'v' => 11,
        '\\' => b'\\',
        '"' => b'"',
        'x' => u8::try_from(number(chars, 2, 16)?).ok()?,
        'u' => return push_number(number(chars, 4, 16)?, bytes),
        'U' => return push_number(number(chars, 8, 16)?, bytes),
        first @ '0'..='7' => {
            let rest = number(chars, 2, 8)?;
            u8::try_from(first.to_digit(8)? * 64 + rest).ok()?
        }
        _ => return None,
    };
    bytes.push(simple);
    Some(())
}

fn number(chars: &mut std::str::Chars<'_>, digits: usize, radix: u32) -> Option<u32> {
    (0..digits).try_fold(0u32, |value, _| {
        Some(value.wrapping_mul(radix) | chars.next()?.to_digit(radix)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_go_string_literals() {
        for (literal, text) in [
            (r#""plain""#, "plain"),
            (r#""a\nb\t\"c\"\\""#, "a\nb\t\"c\"\\"),
            (r#""\u00e9\x41\101""#, "éAA"),
            (r#""\xc3\xa9""#, "é"),
            ("`raw\\n`", "raw\\n"),
            (r#""""#, ""),
        ] {
            assert_eq!(unquote(literal).as_deref(), Some(text), "{literal}");
        }
        for literal in [
            "plain",
            "\"",
            "\"a",
            r#""\q""#,
            r#""\xff""#,
            r#""\u12""#,
            "\"a\"b\"",
        ] {
            assert_eq!(unquote(literal), None, "{literal}");
        }
    }

    #[test]
    fn one_bad_line_does_not_discard_the_file() {
        let mut warnings = Vec::new();
        let text = "app=\"shop\"\nbroken=shop\nno equals sign\nversion=\"v1=2\"\n";
        let pairs = parse_pairs(text, Path::new("labels"), &mut warnings);
        assert_eq!(pairs.len(), 2);
        assert_eq!(pairs["version"], "v1=2");
        assert_eq!(warnings.len(), 1);
        assert_eq!(warnings[0].subject, "labels line 2");
    }

    #[test]
    fn the_node_id_has_four_parts() {
        let address = addresses("10.1.1.0", &mut Vec::new())[0];
        assert_eq!(
            node_id(
                NodeType::Sidecar,
                address,
                "v0",
                "default",
                "default.svc.cluster.local"
            ),
            "sidecar~10.1.1.0~v0.default~default.svc.cluster.local"
        );
    }

    #[test]
    fn an_unusable_instance_ip_is_a_warning() {
        let mut warnings = Vec::new();
        assert_eq!(addresses("pod", &mut warnings)[0].to_string(), "127.0.0.1");
        assert_eq!(warnings.len(), 1);
        assert_eq!(
            addresses("FD00::1", &mut warnings)[0].to_string(),
            "fd00::1"
        );
    }
}
