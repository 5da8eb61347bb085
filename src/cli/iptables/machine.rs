//! What the rules depend on besides settings: the machine's addresses, DNS servers and users.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use super::IptablesFlags;
use crate::address::Cidr;
use crate::capture;
use crate::capture::config::{Config, Host, OwnerGroups};
use crate::capture::program;
use crate::capture::rules::{Family, Id};
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::problem::{Problem, codes};
use crate::regular_file;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// No list of users or groups is this large.
const MAX_ACCOUNTS: u64 = 16 << 20;
/// Time limit of the name service.
const LIMIT: Duration = Duration::from_secs(10);

/// What the machine says that this runs on, and the family of its first address.
pub(super) fn host(flags: &IptablesFlags) -> Result<(Host, Family), Problem> {
    let interfaces = interfaces()?;
    let addresses = interfaces.iter().map(if_addrs::Interface::ip);
    let families = families(addresses, flags.dual_stack);
    let (first, has_v6) = families.ok_or_else(|| {
        let found = "no valid local IP address found";
        Problem::new(codes::CAPTURE_NO_ADDRESS, "pod", found)
    })?;
    let settings = &flags.settings;
    let servers = match settings.redirect_dns && !settings.capture_all_dns {
        true => ResolvConf::read(Path::new(RESOLV_CONF))?.nameservers,
        false => Vec::new(),
    };
    let host = Host {
        has_v6,
        nameservers: captured(&servers),
        envoy_uid: field(&accounts("passwd"), 0, &flags.envoy_user, 2),
    };
    Ok((host, first))
}

pub(super) fn interfaces() -> Result<Vec<if_addrs::Interface>, Problem> {
    let failed = |error| capture::problem(codes::INTERFACES_UNREADABLE, "interfaces", error);
    if_addrs::get_if_addrs().map_err(failed)
}

/// The text of a list of users (`passwd`) or groups (`group`); empty if it cannot be read.
pub(super) fn accounts(database: &str) -> String {
    let path = Path::new("/etc").join(database);
    let content = regular_file::read(&path, MAX_ACCOUNTS).unwrap_or_default();
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
        .map(|address| Cidr::from(address).family());
    let first = families.next()?;
    let has_other = is_dual_stack && families.any(|family| family == Family::V6);
    Some((first, first == Family::V6 || has_other))
}

/// The addresses of servers at port 53, the only one that is captured.
pub(super) fn captured(servers: &[SocketAddr]) -> Vec<IpAddr> {
    let captured = servers.iter().filter(|server| server.port() == 53);
    captured.map(SocketAddr::ip).collect()
}

/// A field of the user or group that has this text as another: 0 is the name, 2 the number, 3 the
/// number of a user's group.
pub(super) fn field(accounts: &str, key: usize, text: &str, wanted: usize) -> Option<u32> {
    let mut lines = accounts.lines().map(|line| line.split(':'));
    let mut line = lines.find(|line| line.clone().nth(key) == Some(text))?;
    line.nth(wanted)?.parse().ok()
}

/// Replaces names of users and groups by their numbers. Returns those that have none.
pub(super) async fn resolve(config: &mut Config) -> Vec<Problem> {
    let (OwnerGroups::AllBut(groups) | OwnerGroups::Only(groups)) = &mut config.owner_groups;
    let users = config.uids.iter_mut().map(|id| ("user", "passwd", id));
    let groups = config.gids.iter_mut().chain(groups);
    let groups = groups.map(|id| ("group", "group", id));
    let mut unknown = Vec::new();
    for (kind, database, id) in users.chain(groups) {
        *id = numbered(database, id.clone()).await;
        if let Id::Name(name) = id {
            let subject = format!("a {kind} of these arguments");
            let expected = format!("the name of a {kind} of this machine");
            let code = codes::CAPTURE_OPTION_INVALID;
            unknown.push(Problem::value(code, subject, name, expected));
        }
    }
    unknown
}

/// The number in place of a name, if this machine's file or its name service knows it.
pub(super) async fn numbered(database: &str, id: Id) -> Id {
    let Id::Name(name) = &id else {
        return id;
    };
    let mut number = field(&accounts(database), 0, name, 2);
    if number.is_none() {
        let found = program::run("getent", &[database, name], "", LIMIT).await;
        let found = found.unwrap_or_default();
        let mut fields = found.split(|byte| *byte == b':');
        number = fields
            .nth(2)
            .and_then(|number| str::from_utf8(number).ok()?.parse().ok());
    }
    number.map_or(id, Id::from)
}
