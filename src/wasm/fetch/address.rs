//! Keeps fetches away from addresses that are no module servers: link-local ones, the metadata services
//! of clouds among them, and the networks of `BLOCKED_CIDRS_IN_WASM_FETCH`.

use std::net::{IpAddr, Ipv6Addr};

use crate::address::Cidr;
use crate::dial::Filter;

/// Metadata services outside the link-local networks: of Alibaba Cloud and of AWS.
const METADATA: [Cidr; 2] = [
    Cidr::v4(100, 100, 100, 200, 32),
    Cidr {
        address: IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0)),
        prefix: 32,
    },
];

/// The filter of addresses.
#[derive(Clone, Debug)]
pub(super) struct Blocked(pub(super) Vec<Cidr>);

impl Filter for Blocked {
    fn check(&self, address: IpAddr) -> Result<(), String> {
        // An IPv4 address written as IPv6 is the same destination.
        let address = address.to_canonical();
        let is_link_local = match address {
            IpAddr::V4(v4) => v4.is_link_local() || v4.octets()[..3] == [224, 0, 0],
            // fe80::/10, and multicast of link-local scope
            IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.segments()[0] & 0xff0f == 0xff02,
        };
        let contains = |network: &&Cidr| network.contains(address);
        if is_link_local {
            Err("is link-local".to_owned())
        } else if METADATA.iter().any(|network| contains(&network)) {
            Err("is a known cloud metadata address".to_owned())
        } else if let Some(network) = self.0.iter().find(contains) {
            Err(format!("is in blocked CIDR range {network}"))
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn link_local_metadata_and_configured_addresses_are_blocked() {
        let networks = ["10.1.0.0/16", "fd12::/16", "8.8.8.8/32", "::/128"];
        let networks = networks.map(|text| Cidr::parse(text).expect("a network"));
        let blocked = Blocked(networks.to_vec());
        for (address, expected) in [
            ("169.254.169.254", Err("is link-local")),
            ("::ffff:169.254.1.1", Err("is link-local")),
            ("fe80::1", Err("is link-local")),
            ("febf::1", Err("is link-local")),
            ("fec0::1", Ok(())),
            ("224.0.0.251", Err("is link-local")),
            ("224.0.1.1", Ok(())),
            ("ff02::1", Err("is link-local")),
            ("ff05::1", Ok(())),
            ("100.100.100.200", Err("is a known cloud metadata address")),
            ("100.100.100.201", Ok(())),
            ("fd00:ec2::254", Err("is a known cloud metadata address")),
            ("10.1.2.3", Err("is in blocked CIDR range 10.1.0.0/16")),
            (
                "::ffff:10.1.2.3",
                Err("is in blocked CIDR range 10.1.0.0/16"),
            ),
            ("10.2.0.1", Ok(())),
            ("fd12:1::1", Err("is in blocked CIDR range fd12::/16")),
            ("8.8.8.8", Err("is in blocked CIDR range 8.8.8.8/32")),
            ("127.0.0.1", Ok(())),
            ("::1", Ok(())),
            ("192.168.1.1", Ok(())),
        ] {
            let found = blocked.check(address.parse().expect("an address"));
            assert_eq!(found, expected.map_err(str::to_owned), "{address}");
        }
        let all = Blocked(vec![Cidr::parse("0.0.0.0/0").expect("a network")]);
        assert!(all.check(Ipv4Addr::LOCALHOST.into()).is_err());
    }
}
