//! Finds texts in configuration that may name a cluster of istiod.
//!
//! istiod names the cluster of a service `outbound|80|v1|reviews.default.svc.cluster.local`: direction, port, subset
//! (often empty) and host. A resource holds such a name as a whole field, or inside a text: Lua code, JSON, a prefix
//! of statistics. The text alone does not show where the name ends, because the byte after it may be the tag of the
//! next field, and a tag can look like a letter. A [`Mention`] therefore holds all bytes that can belong to the name,
//! and [`Mention::cluster`] compares its beginning with the names that are known.

use std::sync::LazyLock;

use memchr::memmem::Finder;

/// The beginning of the name of a service's cluster.
const PREFIX: &str = "outbound|";

/// The most bytes of a name. Longer names are not loaded on demand.
const MAX_NAME: usize = 512;

/// The number of separators in a name. The next one ends the text, so no byte belongs to more than two texts.
const SEPARATORS: usize = 3;

/// A text that begins with a cluster's name, or looks like it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Mention(Box<str>);

impl Mention {
    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Returns the longest beginning of the text that is a known name.
    pub(super) fn cluster(&self, is_known: impl Fn(&str) -> bool) -> Option<&str> {
        let ends = (self.0.rfind('|')?..self.0.len()).rev();
        ends.filter_map(|last| self.0.get(..=last)).find(|name| is_known(name))
    }
}

impl From<&str> for Mention {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

/// Calls `each` for the text of each mention in `bytes`, in their order.
pub(super) fn find(bytes: &[u8], mut each: impl FnMut(&str)) {
    static FINDER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(PREFIX));
    for start in FINDER.find_iter(bytes) {
        if let Some(text) = leading_text(&bytes[start..]) {
            each(text);
        }
    }
}

/// Returns the bytes at the beginning of `bytes` that can belong to a name. Returns None if they lack a port or a host.
fn leading_text(bytes: &[u8]) -> Option<&str> {
    let mut separators = 0;
    let can_belong = |byte: &&u8| {
        separators += usize::from(**byte == b'|');
        separators <= SEPARATORS && is_name_byte(**byte)
    };
    let length = bytes.iter().take(MAX_NAME).take_while(can_belong).count();
    let text = str::from_utf8(&bytes[..length]).ok()?;
    let mut parts = text.split('|').skip(1);
    let port = parts.next()?;
    let _subset = parts.next()?;
    let host = parts.next()?;
    let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    (is_port && !host.is_empty()).then_some(text)
}

/// Returns whether a name can have this byte. istiod's validation of hosts and subsets allows less, but it can be off.
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_graphic() && !br#""'`\<>(){}[],;="#.contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(bytes: &[u8]) -> Vec<String> {
        let mut texts = Vec::new();
        find(bytes, |text| texts.push(text.to_owned()));
        texts
    }

    #[test]
    fn mentions_are_found_in_all_kinds_of_text() {
        const REVIEWS: &str = "outbound|80|v1|reviews.default.svc.cluster.local";
        let cases: &[(&str, &[&str])] = &[
            ("", &[]),
            (REVIEWS, &[REVIEWS]),
            ("outbound|80||a.b;", &["outbound|80||a.b"]),
            (r#"{"cluster":"outbound|443||a.b","x":1}"#, &["outbound|443||a.b"]),
            (r#"h:httpCall("outbound|80||a.b", {})"#, &["outbound|80||a.b"]),
            (r#"h:httpCall('outbound|80||a.b')"#, &["outbound|80||a.b"]),
            (r#"\"outbound|80||a.b\""#, &["outbound|80||a.b"]),
            ("outbound|80||*.example.com", &["outbound|80||*.example.com"]),
            ("outbound|80||2001:db8::1\n", &["outbound|80||2001:db8::1"]),
            ("outbound|80|v_1|a_b.c-d", &["outbound|80|v_1|a_b.c-d"]),
            ("outbound|80||a outbound|81||b", &["outbound|80||a", "outbound|81||b"]),
            ("outbound|80||aoutbound|81||b", &["outbound|80||aoutbound", "outbound|81||b"]),
            ("outbound|80||a|b", &["outbound|80||a"]),
            ("outbound|80||a\u{e9}", &["outbound|80||a"]),
            ("outbound|80||a\u{7f}", &["outbound|80||a"]),
            ("outbound|", &[]),
            ("outbound|80", &[]),
            ("outbound|80|", &[]),
            ("outbound|80||", &[]),
            ("outbound|80|v1", &[]),
            ("outbound|||a", &[]),
            ("outbound|http||a", &[]),
            ("outbound_.80_._.a.b", &[]),
            ("inbound|80||", &[]),
            ("outbound|outbound|80||a", &["outbound|80||a"]),
        ];
        for (text, expected) in cases {
            assert_eq!(found(text.as_bytes()), *expected, "{text:?}");
        }
    }

    #[test]
    fn a_text_has_at_most_512_bytes() {
        let name = |length: usize| format!("{:a<length$}", "outbound|80||");
        assert_eq!(found(name(512).as_bytes()), [name(512)]);
        assert_eq!(found(name(60_000).as_bytes()), [name(512)]);
        let overlapping = "outbound|8||".repeat(10_000);
        assert!(found(overlapping.as_bytes()).concat().len() <= 2 * overlapping.len());
    }

    #[test]
    fn the_longest_known_name_is_the_cluster() {
        let known = ["outbound|80||a.b", "outbound|80||a.b.c", "outbound|80||x", "outbound|80|"];
        let cases = [
            ("outbound|80||a.b", Some("outbound|80||a.b")),
            ("outbound|80||a.b2", Some("outbound|80||a.b")),
            ("outbound|80||a.b.c", Some("outbound|80||a.b.c")),
            ("outbound|80||a.b.cz:80", Some("outbound|80||a.b.c")),
            ("outbound|80||a", None),
            ("outbound|80|x|a.b", None),
            ("outbound|80||y", None),
        ];
        for (text, expected) in cases {
            let mention = Mention::from(text);
            assert_eq!(mention.cluster(|name| known.contains(&name)), expected, "{text}");
        }
    }
}
