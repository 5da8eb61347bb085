//! Reads what the rules depend on besides settings: the machine's addresses, DNS servers, users and groups.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use super::IptablesFlags;
use crate::capture;
use crate::capture::config::{Config, Host, Selection};
use crate::capture::rules::{Family, Id};
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::files::regular_file;
use crate::net::address::Cidr;
use crate::problem::{Code, Problem};
use crate::program;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Maximum size of a list of users or groups, in bytes. Real lists are smaller.
const MAX_ACCOUNTS: u64 = 16 << 20;
/// Time limit of the name service.
const LIMIT: Duration = Duration::from_secs(10);

/// Reads the properties of this machine, and the family of its first address.
pub(super) fn host(flags: &IptablesFlags) -> Result<(Host, Family), Problem> {
    let addresses = interfaces()?.into_iter().map(|interface| interface.ip());
    let (first, has_v6) = families(addresses, flags.dual_stack).ok_or_else(|| {
        Problem::new(Code::CaptureNoAddress, "pod", "no valid local IP address found")
    })?;
    let mut nameservers = Vec::new();
    if flags.settings.redirect_dns && !flags.settings.capture_all_dns {
        nameservers = captured(&ResolvConf::read(Path::new(RESOLV_CONF))?.nameservers);
    }
    let host = Host {
        has_v6,
        nameservers,
        envoy_uid: field(&accounts("passwd"), 0, &flags.envoy_user, 2),
    };
    Ok((host, first))
}

pub(super) fn interfaces() -> Result<Vec<if_addrs::Interface>, Problem> {
    if_addrs::get_if_addrs()
        .map_err(|error| capture::problem(Code::InterfacesUnreadable, "interfaces", error))
}

/// Reads a list of users (`passwd`) or groups (`group`). Returns an empty text if it is unreadable.
pub(super) fn accounts(database: &str) -> String {
    let path = Path::new("/etc").join(database);
    String::from_utf8_lossy(&regular_file::read(&path, MAX_ACCOUNTS).unwrap_or_default()).into()
}

/// Returns the family of the pod's address, which is the first one that reaches other hosts, and true if the pod
/// has an IPv6 address: this one or, with dual stack, any. Returns None if there is no such address.
pub(super) fn families(
    addresses: impl Iterator<Item = IpAddr>,
    is_dual_stack: bool,
) -> Option<(Family, bool)> {
    let mut families = addresses
        .map(|address| address.to_canonical())
        .filter(|address| !address.is_loopback() && !is_link_local(*address))
        .map(|address| Cidr::single(address).family());
    let first = families.next()?;
    let has_other = is_dual_stack && families.any(|family| family == Family::V6);
    Some((first, first == Family::V6 || has_other))
}

/// Returns true for the addresses, also for multicast, that are valid on one link only.
fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.segments()[0] & 0xff0f == 0xff02,
    }
}

/// Returns the addresses of servers at port 53, which is the only port that is captured.
pub(super) fn captured(servers: &[SocketAddr]) -> Vec<IpAddr> {
    servers.iter().filter(|server| server.port() == 53).map(SocketAddr::ip).collect()
}

/// Looks up a user or group by the text of its field `key`, and returns its field `wanted`. Field 0 is the name,
/// 2 the number, 3 the number of a user's group.
pub(super) fn field(accounts: &str, key: usize, text: &str, wanted: usize) -> Option<u32> {
    let mut lines = accounts.lines().map(|line| line.split(':'));
    lines.find(|line| line.clone().nth(key) == Some(text))?.nth(wanted)?.parse().ok()
}

/// Replaces names of users and groups by their numbers. Returns a problem for each unknown name.
pub(super) async fn resolve(config: &mut Config) -> Vec<Problem> {
    let (Selection::AllBut(groups) | Selection::Only(groups)) = &mut config.owner_groups;
    let users = config.uids.iter_mut().map(|id| ("user", "passwd", id));
    let groups = config.gids.iter_mut().chain(groups).map(|id| ("group", "group", id));
    let mut unknown = Vec::new();
    for (kind, database, id) in users.chain(groups) {
        *id = numbered(database, id.clone()).await;
        if let Id::Name(name) = id {
            let subject = format!("the {kind} in the arguments");
            let expected = format!("the name of a {kind} of this machine");
            unknown.push(Problem::value(Code::CaptureOptionInvalid, subject, name, expected));
        }
    }
    unknown
}

/// Replaces a name by its number, if this machine's file or its name service knows the name.
pub(super) async fn numbered(database: &str, id: Id) -> Id {
    let Id::Name(name) = &id else {
        return id;
    };
    let mut number = field(&accounts(database), 0, name, 2);
    if number.is_none() {
        let output = program::run("getent", &[database, name], "", LIMIT).await.unwrap_or_default();
        number = String::from_utf8_lossy(&output).split(':').nth(2).and_then(|id| id.parse().ok());
    }
    number.map_or(id, Id::from)
}
