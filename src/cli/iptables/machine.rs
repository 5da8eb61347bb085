//! What the rules depend on besides settings: the machine's addresses, DNS servers and users.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use crate::capture::config::{Config, Host, OwnerGroups};
use crate::capture::program;
use crate::capture::rules::{Family, Id, Owner};
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::problem::Problem;
use crate::regular_file;

const RESOLV_CONF: &str = "/etc/resolv.conf";
pub(super) const PASSWD: &str = "/etc/passwd";
pub(super) const GROUP: &str = "/etc/group";
/// No list of users or groups is this large.
const LARGEST_ACCOUNTS: u64 = 16 << 20;
/// Time limit of the name service.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no valid local IP address found")]
    NoAddress,
    #[error("cannot list the addresses of this machine")]
    Addresses(#[source] io::Error),
    #[error("failed to load {RESOLV_CONF}")]
    ResolvConf(#[source] io::Error),
}

/// What the machine says that this runs on, and the family of its first address.
pub(super) fn host(
    is_dual_stack: bool,
    captures_servers: bool,
    envoy_user: &str,
) -> Result<(Host, Family), Error> {
    let interfaces = interfaces()?;
    let addresses = interfaces.iter().map(if_addrs::Interface::ip);
    let (first, has_v6) = families(addresses, is_dual_stack).ok_or(Error::NoAddress)?;
    let nameservers = match captures_servers {
        true => {
            ResolvConf::read(Path::new(RESOLV_CONF))
                .map_err(Error::ResolvConf)?
                .nameservers
        }
        false => Vec::new(),
    };
    let host = Host {
        has_v6,
        nameservers: captured(&nameservers),
        envoy_uid: uid_of(envoy_user, &accounts(Path::new(PASSWD))),
    };
    Ok((host, first))
}

pub(super) fn interfaces() -> Result<Vec<if_addrs::Interface>, Error> {
    if_addrs::get_if_addrs().map_err(Error::Addresses)
}

/// The text of a list of users or groups; empty if it cannot be read.
pub(super) fn accounts(path: &Path) -> String {
    let content = regular_file::read(path, LARGEST_ACCOUNTS).unwrap_or_default();
    String::from_utf8_lossy(&content).into_owned()
}

/// The family of the pod's address, the first one that reaches other hosts, and whether it has one of
/// IPv6: this one or, with dual stack, any. None if there is no such address.
pub(super) fn families(
    addresses: impl Iterator<Item = IpAddr>,
    is_dual_stack: bool,
) -> Option<(Family, bool)> {
    let is_local = |address: &IpAddr| match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.segments()[0] & 0xff0f == 0xff02,
    };
    let mut families = addresses
        .map(|address| address.to_canonical())
        .filter(|address| !address.is_loopback() && !is_local(address))
        .map(|address| match address {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        });
    let first = families.next()?;
    let has_other = is_dual_stack && families.any(|family| family == Family::V6);
    Some((first, first == Family::V6 || has_other))
}

/// The addresses of servers at port 53, the only one that is captured.
pub(super) fn captured(servers: &[SocketAddr]) -> Vec<IpAddr> {
    let captured = servers.iter().filter(|server| server.port() == 53);
    captured.map(SocketAddr::ip).collect()
}

/// The number of a user in the text of `/etc/passwd`.
pub(super) fn uid_of(user: &str, passwd: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_named = fields.next() == Some(user);
        fields.nth(1).filter(|_| is_named)?.parse().ok()
    })
}

/// Names of users and groups that neither this machine's files nor its name service know.
pub(super) async fn unknown_names(config: &Config) -> Vec<Problem> {
    let (OwnerGroups::AllBut(groups) | OwnerGroups::Only(groups)) = &config.owner_groups;
    let groups = groups.iter().cloned().map(Owner::Group);
    let mut unknown = Vec::new();
    for owner in config.proxies().chain(groups) {
        let (kind, database, name) = match &owner {
            Owner::User(Id::Name(name)) => ("user", "passwd", name),
            Owner::Group(Id::Name(name)) => ("group", "group", name),
            _ => continue,
        };
        let mut is_known = number(&owner).is_some();
        if !is_known {
            let found = program::run("getent", &[database, name], "", LIMIT).await;
            is_known = found.is_ok();
        }
        if !is_known {
            let expected = format!("the name of a {kind} of this machine");
            unknown.push(Problem::new(
                format!("a {kind} of these arguments"),
                name,
                expected,
            ));
        }
    }
    unknown
}

/// The number of a user or group that has a name.
pub(super) fn number(owner: &Owner) -> Option<u32> {
    let (path, id) = match owner {
        Owner::User(id) => (PASSWD, id),
        Owner::Group(id) => (GROUP, id),
    };
    match id {
        Id::Name(name) => uid_of(name, &accounts(Path::new(path))),
        Id::Numbers(_) => None,
    }
}
