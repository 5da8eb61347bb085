//! What the rules depend on besides settings: the machine's addresses, DNS servers and users.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::capture::config::Host;
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::regular_file;

const RESOLV_CONF: &str = "/etc/resolv.conf";
pub(super) const PASSWD: &str = "/etc/passwd";
pub(super) const GROUP: &str = "/etc/group";
/// No list of users or groups is this large.
const LARGEST_ACCOUNTS: u64 = 16 << 20;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no valid local IP address found")]
    NoAddress,
    #[error("cannot list the addresses of this machine")]
    Addresses(#[source] io::Error),
    #[error("failed to load {RESOLV_CONF}")]
    ResolvConf(#[source] io::Error),
}

/// What the machine says that this runs on.
pub(super) fn host(
    is_dual_stack: bool,
    captures_servers: bool,
    envoy_user: &str,
) -> Result<Host, Error> {
    let interfaces = interfaces()?;
    let addresses = interfaces.iter().map(if_addrs::Interface::ip);
    let has_v6 = has_v6(addresses, is_dual_stack).ok_or(Error::NoAddress)?;
    let nameservers = match captures_servers {
        true => {
            ResolvConf::read(Path::new(RESOLV_CONF))
                .map_err(Error::ResolvConf)?
                .nameservers
        }
        false => Vec::new(),
    };
    Ok(Host {
        has_v6,
        nameservers: nameservers.iter().map(SocketAddr::ip).collect(),
        envoy_uid: uid_of(envoy_user, &accounts(Path::new(PASSWD))),
    })
}

pub(super) fn interfaces() -> Result<Vec<if_addrs::Interface>, Error> {
    if_addrs::get_if_addrs().map_err(Error::Addresses)
}

/// The text of a list of users or groups; empty if it cannot be read.
pub(super) fn accounts(path: &Path) -> String {
    let content = regular_file::read(path, LARGEST_ACCOUNTS).unwrap_or_default();
    String::from_utf8_lossy(&content).into_owned()
}

/// Whether the pod's address is of IPv6: the first one that reaches other hosts or, with dual stack, any.
/// None if there is no such address.
pub(super) fn has_v6(addresses: impl Iterator<Item = IpAddr>, is_dual_stack: bool) -> Option<bool> {
    let is_local = |address: &IpAddr| match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.segments()[0] & 0xff0f == 0xff02,
    };
    let mut families = addresses
        .map(|address| address.to_canonical())
        .filter(|address| !address.is_loopback() && !is_local(address))
        .map(|address| address.is_ipv6());
    let first = families.next()?;
    Some(first || is_dual_stack && families.any(|is_v6| is_v6))
}

/// The number of a user in the text of `/etc/passwd`.
pub(super) fn uid_of(user: &str, passwd: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_named = fields.next() == Some(user);
        fields.nth(1).filter(|_| is_named)?.parse().ok()
    })
}
