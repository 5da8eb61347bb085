//! Where the DNS server listens, from `DNS_PROXY_ADDR` and the resolvers of the pod.
//!
//! Captured queries are redirected to the loopback address of the family they were sent in, which
//! is the resolver's. So `localhost` means that address of each family a resolver has. An answer
//! must come from the address that was asked, which a socket bound to all of them does not see to:
//! the kernel picks one by the way back. So "all addresses" is a socket for each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Where DNS is answered by default.
pub const DEFAULT: &str = "localhost:15053";

/// The address, unless it has port 53 and the agent is not root.
pub fn address(said: &str, is_root: bool) -> &str {
    if said.is_empty() {
        return DEFAULT;
    }
    if said.ends_with(":53") && !is_root {
        tracing::error!(
            target: "dns",
            "DNS_PROXY_ADDR is {said}, and only root may listen on port 53; {DEFAULT} is used"
        );
        return DEFAULT;
    }
    said
}

/// Where to listen, host and port each, for `address`, of [`address`], on a machine with its `own`
/// addresses beside those of loopback.
pub fn listen(address: &str, nameservers: &[IpAddr], own: &[IpAddr]) -> Vec<String> {
    let port = address.strip_prefix("localhost:");
    let v4 = nameservers.iter().any(IpAddr::is_ipv4);
    let v6 = nameservers.iter().any(IpAddr::is_ipv6);
    match port {
        Some(port) if v4 || v6 => {
            let v4 = v4.then(|| format!("127.0.0.1:{port}"));
            let v6 = v6.then(|| format!("[::1]:{port}"));
            v4.into_iter().chain(v6).collect()
        }
        _ => each(address, own).unwrap_or_else(|| vec![address.to_owned()]),
    }
}

/// An address for each of the machine's, of both families as in Go, if all are meant.
fn each(address: &str, own: &[IpAddr]) -> Option<Vec<String>> {
    let (host, port) = address.rsplit_once(':')?;
    // Without a number each would get another one.
    let port = port.parse().ok().filter(|port: &u16| *port != 0)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_any = |ip: IpAddr| ip.to_canonical().is_unspecified();
    if !host.is_empty() && !host.parse().is_ok_and(is_any) {
        return None;
    }
    let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let all = loopback.into_iter().chain(own.iter().copied());
    // There may be no IPv6, or an address that is still checked for duplicates.
    let usable = all.filter(|ip| UdpSocket::bind((*ip, 0)).is_ok());
    let text = |ip| SocketAddr::new(ip, port).to_string();
    let addresses: Vec<_> = usable.map(text).collect();
    Some(addresses).filter(|found| !found.is_empty())
}

/// Whether a server at `address` is what programs take for the machine's resolver: they depend on it
/// before istiod has sent a name table.
pub fn is_machine_resolver(address: &str) -> bool {
    address.ends_with(":53")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_privileged_port_is_for_root() {
        for (said, is_root, expected) in [
            ("", true, DEFAULT),
            ("127.0.0.1:53", true, "127.0.0.1:53"),
            ("127.0.0.1:53", false, DEFAULT),
            ("127.0.0.1:5353", false, "127.0.0.1:5353"),
        ] {
            assert_eq!(address(said, is_root), expected, "{said}");
        }
    }

    #[test]
    fn localhost_is_each_family_a_resolver_has() {
        let v4 = "10.0.0.10";
        let v6 = "fd00::10";
        for (said, resolvers, expected, is_machine_resolver) in [
            (
                "localhost:15053",
                &[v4][..],
                &["127.0.0.1:15053"][..],
                false,
            ),
            ("localhost:15053", &[v6], &["[::1]:15053"], false),
            (
                "localhost:15053",
                &[v6, v4, v4],
                &["127.0.0.1:15053", "[::1]:15053"],
                false,
            ),
            ("localhost:15053", &[], &["localhost:15053"], false),
            ("127.0.0.5:53", &[v6], &["127.0.0.5:53"], true),
        ] {
            let resolvers: Vec<IpAddr> = resolvers.iter().map(|ip| ip.parse().unwrap()).collect();
            let addresses = listen(said, &resolvers, &[]);
            assert_eq!(addresses, expected, "{said} {resolvers:?}");
            assert_eq!(super::is_machine_resolver(said), is_machine_resolver);
        }
    }

    #[test]
    fn all_addresses_are_each_of_them_that_the_machine_has() {
        let own = ["127.0.0.9", "192.0.2.1", "2001:db8::1"].map(|ip| ip.parse().unwrap());
        let has_v6 = UdpSocket::bind("[::1]:0").is_ok();
        let mut all = vec!["127.0.0.1:53", "[::1]:53", "127.0.0.9:53"];
        all.retain(|address| has_v6 || !address.starts_with('['));
        for any in [
            "0.0.0.0:53",
            "[::]:53",
            ":53",
            "[0:0::0]:53",
            "[::ffff:0.0.0.0]:53",
        ] {
            assert_eq!(listen(any, &[], &own), all, "{any}");
        }
        for one in ["0.0.0.0:0", "127.0.0.9:53", "192.0.2.1:53", "[::]"] {
            assert_eq!(listen(one, &[], &own), [one]);
        }
    }
}
