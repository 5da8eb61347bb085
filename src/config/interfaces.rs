//! The network interfaces of this machine that are up, by index, with their reachable addresses.

use std::io;
use std::net::IpAddr;

/// An address of an interface. An interface with several addresses is listed several times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub address: IpAddr,
}

pub(super) fn of_this_machine() -> io::Result<Vec<Interface>> {
    let mut found = if_addrs::get_if_addrs()?;
    found.sort_by_key(|interface| interface.index);
    let up = found.into_iter().filter(if_addrs::Interface::is_oper_up);
    let addresses = up.map(|interface| Interface {
        address: interface.ip().to_canonical(),
        name: interface.name,
    });
    Ok(addresses
        .filter(|interface| is_reachable(interface.address))
        .collect())
}

fn is_reachable(address: IpAddr) -> bool {
    let is_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !is_local && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reachable_addresses_count() {
        for (address, reachable) in [
            ("10.0.0.1", true),
            ("fd00::1", true),
            ("127.0.0.1", false),
            ("169.254.1.1", false),
            ("fe80::1", false),
            ("::1", false),
            ("0.0.0.0", false),
        ] {
            let address = address.parse().expect("an address");
            assert_eq!(is_reachable(address), reachable, "{address}");
        }
    }

    #[test]
    fn interfaces_of_this_machine_are_listed() {
        let interfaces = of_this_machine().expect("interfaces");
        assert!(
            interfaces
                .iter()
                .all(|interface| !interface.name.is_empty())
        );
    }
}
