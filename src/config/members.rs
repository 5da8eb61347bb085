//! Members of the canonical document as types, and addresses.
//!
//! Does not report anything: the document has been checked.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use serde_json::{Map, Value};

use super::duration;

pub(super) struct Reader<'a>(pub(super) &'a Map<String, Value>);

impl Reader<'_> {
    /// Empty when unset, as the format has it.
    pub(super) fn text(&self, name: &str) -> String {
        let text = self.0.get(name).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    }

    pub(super) fn duration(&self, name: &str) -> Option<Duration> {
        duration::parse(self.0.get(name)?.as_str()?)
    }

    pub(super) fn number<T: TryFrom<u64>>(&self, name: &str) -> Option<T> {
        T::try_from(self.0.get(name)?.as_u64()?).ok()
    }

    pub(super) fn texts(&self, name: &str) -> BTreeMap<String, String> {
        let entries = self.0.get(name).and_then(Value::as_object);
        let texts = entries.into_iter().flatten();
        let texts =
            texts.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
        texts.collect()
    }
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

/// Whether the text is `host:port` with a host that is an IP address or a name DNS can have.
pub(super) fn is_address(address: &str) -> bool {
    split_address(address).is_some_and(|(host, _)| host.parse::<IpAddr>().is_ok() || is_name(host))
}

/// Names may end in a dot. The last label is no number, or the name would be a broken IPv4 address.
fn is_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let top = host.rsplit('.').next().unwrap_or_default();
    let numeric = top.chars().all(|c| c.is_ascii_digit());
    host.len() <= 253 && !numeric && host.split('.').all(is_label)
}

/// Whether the text is one part of a name between dots.
pub(super) fn is_label(label: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let edges = label.starts_with('-') || label.ends_with('-');
    (1..=63).contains(&label.len()) && !edges && label.chars().all(inner)
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

    #[test]
    fn an_address_of_the_configuration_has_a_host_dns_could_know() {
        for good in [
            "a:1",
            "a-1.b.:65535",
            "10.0.0.1:1",
            "[::1]:1",
            "1a:1",
            "a.b2:3",
        ] {
            assert!(is_address(good), "{good}");
        }
        for bad in [
            "a_b:1",
            "-a:1",
            "a-:1",
            "a..b:1",
            "a.1:1",
            "10.0.0:1",
            "[::z]:1",
            "10.0.0.256:1",
        ] {
            assert!(!is_address(bad), "{bad}");
        }
    }
}
