//! Parses addresses of the form `host:port`, and ranges of addresses. An IPv6 host stands in brackets,
//! which are removed.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustls::pki_types::DnsName;

/// A range of addresses as it was written: the bits after the prefix are not cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    pub address: IpAddr,
    pub prefix: u8,
}

/// Splits an address into host and port. The host may be any text that is not empty, such as `$(HOST_IP)`.
pub fn split_lenient(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[') {
        Some(bracketed) => bracketed.strip_suffix(']')?,
        None => Some(host).filter(|host| !host.contains(':'))?,
    };
    (!host.is_empty()).then_some((host, port))
}

/// Splits an address into host and port, if the host has only characters that occur in names and IP addresses.
pub fn split(address: &str) -> Option<(&str, u16)> {
    split_lenient(address).filter(|(host, _)| host.chars().all(is_allowed))
}

fn is_allowed(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-._:%".contains(c)
}

/// Returns true if the text is `host:port` with a host that is an IP address or a DNS name.
pub fn is_valid(address: &str) -> bool {
    split(address).is_some_and(|(host, _)| host.parse::<IpAddr>().is_ok() || is_name(host))
}

/// Returns true for a DNS name, which may end in a dot. Its last label is not a number, because the name would be an
/// invalid IPv4 address.
fn is_name(host: &str) -> bool {
    !host.contains('_') && DnsName::try_from(host).is_ok()
}

/// Returns true if a host, with or without brackets, is an address of this machine, its link or a private
/// network, and false for a name.
pub fn is_private(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    match address.map(|address| address.to_canonical()) {
        Ok(IpAddr::V4(v4)) => v4.is_private() || v4.is_loopback() || v4.is_link_local(),
        Ok(IpAddr::V6(v6)) => {
            v6.is_unique_local() || v6.is_loopback() || v6.is_unicast_link_local()
        }
        Err(_) => false,
    }
}

impl Cidr {
    pub const fn single(address: IpAddr) -> Self {
        Self { address, prefix: if address.is_ipv4() { 32 } else { 128 } }
    }

    /// Clears all bits after the prefix.
    pub fn masked(&self) -> Self {
        let address = match self.address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix));
                Ipv4Addr::from_bits(address.to_bits() & mask.unwrap_or(0)).into()
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix));
                Ipv6Addr::from_bits(address.to_bits() & mask.unwrap_or(0)).into()
            }
        };
        Self { address, ..*self }
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        let other = Self { address, ..*self };
        self.address.is_ipv4() == address.is_ipv4() && other.masked() == self.masked()
    }

    /// Reads `address/prefix`. Returns None for an address alone, and for a prefix with a sign or leading zeros.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, digits) = text.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let prefix: u8 = digits.parse().ok()?;
        let max = Self::single(address).prefix;
        (prefix <= max && digits == prefix.to_string()).then_some(Self { address, prefix })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_split_into_host_and_port() {
        assert_eq!(
            split("istiod.istio-system.svc:15012"),
            Some(("istiod.istio-system.svc", 15012))
        );
        assert_eq!(split("[fd00::1]:1"), Some(("fd00::1", 1)));
        assert_eq!(split_lenient("[$(HOST_IP)]:8126"), Some(("$(HOST_IP)", 8126)));
        for text in [
            "a",
            "a:",
            "a:0",
            "a:65536",
            ":1",
            "fd00::1:1",
            "[fd00::1:1",
            "a b:1",
            "$(HOST_IP):1",
            "http://a:1",
        ] {
            assert_eq!(split(text), None, "{text}");
        }
    }

    #[test]
    fn private_addresses_are_distinguished_from_public_addresses_and_names() {
        for private in [
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "127.0.0.1",
            "169.254.169.254",
            "[::1]",
            "::ffff:10.0.0.1",
            "fd00::1",
            "[fe80::1]",
        ] {
            assert!(is_private(private), "{private}");
        }
        for other in ["8.8.8.8", "100.64.0.1", "0.0.0.0", "[2001:db8::1]", "localhost", ""] {
            assert!(!is_private(other), "{other}");
        }
    }

    #[test]
    fn a_valid_address_has_an_ip_address_or_a_dns_name() {
        for good in ["a:1", "a-1.b.:65535", "10.0.0.1:1", "[::1]:1", "1a:1", "a.b2:3"] {
            assert!(is_valid(good), "{good}");
        }
        for bad in
            ["a_b:1", "-a:1", "a-:1", "a..b:1", "a.1:1", "10.0.0:1", "[::z]:1", "10.0.0.256:1"]
        {
            assert!(!is_valid(bad), "{bad}");
        }
    }

    #[test]
    fn a_mask_clears_the_bits_behind_the_prefix() {
        for (text, masked) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("10.1.2.3/0", "0.0.0.0/0"),
            ("10.1.2.3/32", "10.1.2.3/32"),
            ("2001:db8::1/32", "2001:db8::/32"),
            ("::1/0", "::/0"),
            ("::1/128", "::1/128"),
        ] {
            let range = Cidr::parse(text).expect(text);
            assert_eq!(range.masked().to_string(), masked);
        }
    }

    #[test]
    fn a_cidr_keeps_its_host_bits_and_malformed_cidrs_are_refused() {
        for text in ["10.1.2.3/8", "0.0.0.0/0", "::1/128", "2001:db8::1/32"] {
            assert_eq!(Cidr::parse(text).map(|cidr| cidr.to_string()).as_deref(), Some(text));
        }
        for text in [
            "",
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/08",
            "10.0.0.0/+8",
            "10.0.0/8",
            "010.0.0.0/8",
            "::1/129",
            "fe80::1%eth0/64",
            "*",
            "10.0.0.0/8/8",
            "10.0.0.0/8 ",
        ] {
            assert_eq!(Cidr::parse(text), None, "{text}");
        }
    }
}
