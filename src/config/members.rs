//! Members of a ProxyConfig, read with types.
//!
//! A member of the wrong type is reported with its document, its value and what was expected, and
//! reading goes on with the next.
//!
//! Does not know which members there are.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value};

use super::{Problem, duration};

/// Members, where each came from, and what is wrong with them.
pub(super) struct Reader<'a> {
    pub(super) members: &'a Map<String, Value>,
    pub(super) origins: &'a BTreeMap<String, String>,
    pub(super) problems: &'a mut Vec<Problem>,
}

impl Reader<'_> {
    /// The member as `take` understands it; a problem when it does not.
    fn member<'m, T>(
        &mut self,
        name: &str,
        expected: &str,
        take: impl Fn(&'m Value) -> Option<T>,
    ) -> Option<T>
    where
        Self: 'm,
    {
        let value = self.members.get(name)?;
        let taken = take(value);
        if taken.is_none() {
            self.problem(name, value.to_string(), expected);
        }
        taken
    }

    fn problem(&mut self, name: &str, found: String, expected: &str) {
        let origin = self.origins.get(name).map_or("ProxyConfig", String::as_str);
        self.problems.push(Problem {
            subject: format!("{name} of {origin}"),
            found,
            expected: expected.to_owned(),
        });
    }

    pub(super) fn text(&mut self, name: &str) -> Option<String> {
        self.member(name, "a string", |v| v.as_str().map(str::to_owned))
    }

    pub(super) fn some_text(&mut self, name: &str) -> String {
        let expected = "a string that is not empty";
        let text = |v: &Value| v.as_str().filter(|s| !s.is_empty()).map(str::to_owned);
        self.member(name, expected, text).unwrap_or_default()
    }

    pub(super) fn duration(&mut self, name: &str, default: Duration) -> Duration {
        let expected = "a duration such as 45s or 1m30s";
        self.member(name, expected, |v| duration::parse(v.as_str()?))
            .unwrap_or(default)
    }

    pub(super) fn whole_seconds(&mut self, name: &str) -> Duration {
        let expected = "a duration of whole seconds, at least 1s";
        let whole = |d: &Duration| d.subsec_nanos() == 0 && !d.is_zero();
        self.member(name, expected, |v| {
            duration::parse(v.as_str()?).filter(whole)
        })
        .unwrap_or_default()
    }

    pub(super) fn address(&mut self, name: &str) -> String {
        let expected = "host:port with a port from 1 to 65535";
        self.member(name, expected, |v| {
            let text = v.as_str()?;
            split_address(text).map(|_| text.to_owned())
        })
        .unwrap_or_default()
    }

    pub(super) fn plaintext(&mut self) -> bool {
        self.member("controlPlaneAuthPolicy", "NONE or MUTUAL_TLS", |v| match v
            .as_str()
            .map_or_else(
                || v.as_i64(),
                |name| match name {
                    "NONE" => Some(0),
                    "MUTUAL_TLS" => Some(1),
                    _ => None,
                },
            )? {
            0 => Some(true),
            1 => Some(false),
            _ => None,
        })
        .unwrap_or_default()
    }

    pub(super) fn port(&mut self, name: &str) -> Option<u16> {
        let port = |v: &Value| u16::try_from(whole_number(v)?).ok().filter(|p| *p != 0);
        self.member(name, "a port from 1 to 65535", port)
    }

    pub(super) fn count(&mut self, name: &str) -> Option<u32> {
        let count = |v: &Value| u32::try_from(whole_number(v)?).ok();
        self.member(name, "a whole number, 0 or more", count)
    }

    /// Only the entry that is no string is shown: the others may be secrets.
    pub(super) fn texts(&mut self, name: &str) -> BTreeMap<String, String> {
        let entries = self.member(name, "an object of strings", Value::as_object);
        let mut texts = BTreeMap::new();
        for (key, value) in entries.into_iter().flatten() {
            match value.as_str() {
                Some(text) => {
                    texts.insert(key.clone(), text.to_owned());
                }
                None => self.problem(name, format!("{key}: {value}"), "an object of strings"),
            }
        }
        texts
    }

    pub(super) fn refuse(&mut self, name: &str, expected: &str) {
        self.member(name, expected, |v| (v.as_str() == Some("")).then_some(()));
    }
}

/// Numbers may be quoted.
fn whole_number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

/// Host and port of `host:port`; an IPv6 host stands in brackets, which are taken off.
pub(super) fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[') {
        Some(bracketed) => bracketed.strip_suffix(']')?,
        None => Some(host).filter(|host| !host.contains(':'))?,
    };
    let named = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    (!host.is_empty() && host.chars().all(named)).then_some((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_addresses_into_host_and_port() {
        assert_eq!(
            split_address("istiod.istio-system.svc:15012"),
            Some(("istiod.istio-system.svc", 15012))
        );
        assert_eq!(split_address("[fd00::1]:1"), Some(("fd00::1", 1)));
        for text in [
            "a",
            "a:",
            "a:0",
            "a:65536",
            ":1",
            "fd00::1:1",
            "a b:1",
            "http://a:1",
        ] {
            assert_eq!(split_address(text), None, "{text}");
        }
    }
}
