//! `host:port` of a service Envoy calls.
//!
//! An IPv6 host stands in brackets, which are taken off.
//!
//! Does not resolve names: Envoy does.

use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub struct Address {
    pub host: String,
    pub port: u16,
}

#[derive(Debug, thiserror::Error)]
#[error("address {found:?} is not of the form host:port")]
pub struct Unusable {
    found: String,
}

impl TryFrom<String> for Address {
    type Error = Unusable;

    fn try_from(text: String) -> Result<Self, Unusable> {
        split(&text).ok_or(Unusable { found: text })
    }
}

impl Address {
    /// As Envoy's `socket_address`.
    pub(super) fn section(&self) -> Value {
        json!({ "socket_address": { "address": self.host, "port_value": self.port } })
    }

    pub(super) fn resolve_host_ip(&mut self, host_ip: &str) {
        if self.host == "$(HOST_IP)" && !host_ip.is_empty() {
            host_ip.clone_into(&mut self.host);
        }
    }
}

fn split(text: &str) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[') {
        Some(bracketed) => bracketed.strip_suffix(']')?,
        None => Some(host).filter(|host| !host.contains(':'))?,
    };
    let host = Some(host).filter(|host| !host.is_empty())?.to_owned();
    Some(Address { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_a_host_and_a_port() {
        for (text, host, port) in [
            ("zipkin.istio-system:9411", "zipkin.istio-system", 9411),
            ("[fd00::1]:1", "fd00::1", 1),
            ("$(HOST_IP):8126", "$(HOST_IP)", 8126),
        ] {
            let address = Address::try_from(text.to_owned()).expect("an address");
            assert_eq!(
                (address.host.as_str(), address.port),
                (host, port),
                "{text}"
            );
        }
        for text in [
            "",
            "a",
            "a:",
            ":1",
            "a:0",
            "a:65536",
            "fd00::1:1",
            "[fd00::1:1",
        ] {
            assert!(Address::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_host_ip_nobody_knows_stays() {
        let mut address = Address::try_from("$(HOST_IP):1".to_owned()).expect("an address");
        address.resolve_host_ip("");
        assert_eq!(address.host, "$(HOST_IP)");
    }
}
