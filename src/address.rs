//! Addresses of the form `host:port`. An IPv6 host stands in brackets, which are taken off.

use std::net::IpAddr;

/// Host and port. The host may be any text that is not empty, such as `$(HOST_IP)`.
pub fn parts(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[') {
        Some(bracketed) => bracketed.strip_suffix(']')?,
        None => Some(host).filter(|host| !host.contains(':'))?,
    };
    (!host.is_empty()).then_some((host, port))
}

/// Host and port, if the host has only letters that occur in names and addresses.
pub fn split(address: &str) -> Option<(&str, u16)> {
    let is_named = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    parts(address).filter(|(host, _)| host.chars().all(is_named))
}

/// Whether the text is `host:port` with a host that is an IP address or a DNS name.
pub fn is_valid(address: &str) -> bool {
    split(address).is_some_and(|(host, _)| host.parse::<IpAddr>().is_ok() || is_name(host))
}

/// A name may end in a dot. The last label is not a number, or the name would be a broken IPv4 address.
fn is_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let top = host.rsplit('.').next().unwrap_or_default();
    let numeric = top.chars().all(|c| c.is_ascii_digit());
    host.len() <= 253 && !numeric && host.split('.').all(is_label)
}

/// Whether the text is one label of a DNS name.
pub fn is_label(label: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let edges = label.starts_with('-') || label.ends_with('-');
    (1..=63).contains(&label.len()) && !edges && label.chars().all(inner)
}

/// Whether a host, with or without brackets, is an address of this machine, its link or a private
/// network. A name is not.
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
        assert_eq!(parts("[$(HOST_IP)]:8126"), Some(("$(HOST_IP)", 8126)));
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
    fn private_addresses_are_told_from_public_ones_and_names() {
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
        for other in [
            "8.8.8.8",
            "100.64.0.1",
            "0.0.0.0",
            "[2001:db8::1]",
            "localhost",
            "",
        ] {
            assert!(!is_private(other), "{other}");
        }
    }

    #[test]
    fn a_valid_address_has_an_ip_address_or_a_dns_name() {
        for good in [
            "a:1",
            "a-1.b.:65535",
            "10.0.0.1:1",
            "[::1]:1",
            "1a:1",
            "a.b2:3",
        ] {
            assert!(is_valid(good), "{good}");
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
            assert!(!is_valid(bad), "{bad}");
        }
    }
}
