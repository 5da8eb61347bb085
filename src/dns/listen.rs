//! Computes the listen addresses of the DNS server from `DNS_PROXY_ADDR` and the pod's resolvers.
//!
//! A captured query is redirected to the loopback address of its family, which is the family of the
//! resolver it was sent to. So `localhost` means the loopback address of each family that a resolver
//! has. An answer must come from the address that was queried. A socket that is bound to all addresses
//! does not ensure that, because the kernel chooses the source by the route back, so "all addresses"
//! become one socket each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// The default of `DNS_PROXY_ADDR`.
pub const DEFAULT: &str = "localhost:15053";

/// Returns the configured address, or [`DEFAULT`] if there is none, or if it has port 53 and the agent is
/// not root.
pub fn configured_address(configured: &str, is_root: bool) -> &str {
    if configured.is_empty() {
        return DEFAULT;
    }
    if configured.ends_with(":53") && !is_root {
        tracing::error!(
            target: "dns",
            "DNS_PROXY_ADDR is {configured}, and only root may listen on port 53; {DEFAULT} is used"
        );
        return DEFAULT;
    }
    configured
}

/// Returns the addresses to listen on, each a host and a port, for the result of [`configured_address`] on a machine
/// that has the addresses `own` besides loopback.
pub fn listen_addresses(address: &str, nameservers: &[IpAddr], own: &[IpAddr]) -> Vec<String> {
    if let Some(port) = address.strip_prefix("localhost:")
        && !nameservers.is_empty()
    {
        let has_v4 = nameservers.iter().any(IpAddr::is_ipv4);
        let has_v6 = nameservers.iter().any(IpAddr::is_ipv6);
        let v4 = has_v4.then(|| format!("127.0.0.1:{port}"));
        let v6 = has_v6.then(|| format!("[::1]:{port}"));
        return v4.into_iter().chain(v6).collect();
    }
    each_address(address, own).unwrap_or_else(|| vec![address.to_owned()])
}

/// Returns an entry for each address of the machine, of both families as in Go, if `address` stands for
/// all of them.
fn each_address(address: &str, own: &[IpAddr]) -> Option<Vec<String>> {
    let (host, port) = address.rsplit_once(':')?;
    // With port 0 each socket would get another port.
    let port = port.parse().ok().filter(|port: &u16| *port != 0)?;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let is_any = bare.parse().is_ok_and(|ip: IpAddr| ip.to_canonical().is_unspecified());
    if !bare.is_empty() && !is_any {
        return None;
    }
    let mut ips = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    ips.extend(own);
    // IPv6 may be disabled, and an address may still be checked for duplicates.
    ips.retain(|ip| UdpSocket::bind((*ip, 0)).is_ok());
    let addresses: Vec<_> = ips.iter().map(|ip| SocketAddr::new(*ip, port).to_string()).collect();
    if addresses.is_empty() { None } else { Some(addresses) }
}

/// Returns whether programs take a server at `address` for the machine's resolver: then they depend on
/// it before istiod has sent a name table.
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
            assert_eq!(configured_address(said, is_root), expected, "{said}");
        }
    }

    #[test]
    fn localhost_listens_on_each_address_family_of_the_resolvers() {
        let v4 = "10.0.0.10";
        let v6 = "fd00::10";
        for (said, resolvers, expected, is_machine_resolver) in [
            ("localhost:15053", &[v4][..], &["127.0.0.1:15053"][..], false),
            ("localhost:15053", &[v6], &["[::1]:15053"], false),
            ("localhost:15053", &[v6, v4, v4], &["127.0.0.1:15053", "[::1]:15053"], false),
            ("localhost:15053", &[], &["localhost:15053"], false),
            ("127.0.0.5:53", &[v6], &["127.0.0.5:53"], true),
        ] {
            let resolvers: Vec<IpAddr> = resolvers.iter().map(|ip| ip.parse().unwrap()).collect();
            let addresses = listen_addresses(said, &resolvers, &[]);
            assert_eq!(addresses, expected, "{said} {resolvers:?}");
            assert_eq!(super::is_machine_resolver(said), is_machine_resolver);
        }
    }

    #[test]
    fn a_wildcard_address_listens_on_each_address_of_the_machine() {
        let own = ["127.0.0.9", "192.0.2.1", "2001:db8::1"].map(|ip| ip.parse().unwrap());
        let has_v6 = UdpSocket::bind("[::1]:0").is_ok();
        let mut all = vec!["127.0.0.1:53", "[::1]:53", "127.0.0.9:53"];
        all.retain(|address| has_v6 || !address.starts_with('['));
        for any in ["0.0.0.0:53", "[::]:53", ":53", "[0:0::0]:53", "[::ffff:0.0.0.0]:53"] {
            assert_eq!(listen_addresses(any, &[], &own), all, "{any}");
        }
        for one in ["0.0.0.0:0", "127.0.0.9:53", "192.0.2.1:53", "[::]"] {
            assert_eq!(listen_addresses(one, &[], &own), [one]);
        }
    }
}
