//! Which callers may read the debug pages, and drain or end the agent: local ones, of certain users.
//!
//! The whole pod is local, so the kernel is asked for the user behind a connection. Behind Envoy's own
//! source address may be any client of the pod. A page in a browser, which reaches the port through a
//! forwarded one, has a host name or origin of its own.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use ::http::header::{HOST, ORIGIN};
use ::http::request::Parts;
use ::http::uri::Authority;
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio::time::timeout;

use crate::netlink;
use crate::unix_socket::access::admitted;

pub(super) const NOT_LOCAL: &str = "Only requests from localhost are allowed\n";
/// The source of what Envoy passes on to the pod's ports. That of IPv6, `::6`, is not local.
const ENVOY: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));
/// The kernel answers at once, but it may have to load a module.
const LIMIT: Duration = Duration::from_secs(2);

/// The other side of a connection.
#[derive(Debug)]
pub(super) struct Caller {
    address: SocketAddr,
    /// Address and inode of our side.
    own: io::Result<(SocketAddr, u64)>,
    /// Asked for once.
    user: OnceCell<u32>,
}

impl Caller {
    pub(super) fn new(stream: &TcpStream, from: SocketAddr) -> Self {
        let address = SocketAddr::new(from.ip().to_canonical(), from.port());
        let inode = || io::Result::Ok(rustix::fs::fstat(stream)?.st_ino);
        Self {
            address,
            own: stream.local_addr().and_then(|own| Ok((own, inode()?))),
            user: OnceCell::new(),
        }
    }

    pub(super) fn is_local(&self) -> bool {
        self.address.ip().is_loopback()
    }

    async fn ask(&self) -> io::Result<u32> {
        let (own, inode) = *self.own.as_ref().map_err(io::Error::kind)?;
        let caller = self.address;
        let asking = tokio::task::spawn_blocking(move || {
            let (user, _) = netlink::tcp_owner(caller, own)?;
            // If the connection was reset meanwhile, its port may have been that of another process.
            match netlink::tcp_owner(own, caller)? {
                (_, held) if u64::from(held) == inode => Ok(user),
                _ => Err(io::ErrorKind::NotConnected.into()),
            }
        });
        timeout(LIMIT, asking).await??
    }
}

/// The callers that certain paths are for.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) variable: &'static str,
    /// Besides root and the agent's own; None is every user.
    pub(super) users: Option<BTreeSet<u32>>,
}

impl Access {
    /// What the caller is told if it is refused.
    pub(super) async fn check(&self, caller: &Caller, head: &Parts) -> Result<(), String> {
        if !caller.is_local() || caller.address.ip() == ENVOY {
            return Err(NOT_LOCAL.to_owned());
        }
        check_names(head)?;
        let Some(users) = self.users.as_ref().map(admitted) else {
            return Ok(());
        };
        let variable = self.variable;
        match caller.user.get_or_try_init(|| caller.ask()).await {
            Ok(user) if users.contains(user) => Ok(()),
            Ok(user) => Err(format!(
                "user {user} is refused, expected one of {users:?}, to which {variable} adds\n"
            )),
            Err(error) => Err(format!(
                "refused, as the kernel does not tell the user of this connection ({error}); \
                 {variable}=any admits all users\n"
            )),
        }
    }
}

/// Refuses hosts other than `localhost` and addresses, and origins other than this port.
fn check_names(head: &Parts) -> Result<(), String> {
    let headers = |name| head.headers.get_all(name).into_iter();
    let text = |name| headers(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let of_line = head.uri.authority().map(|name| name.as_str().into());
    if let Some(host) = text(HOST).chain(of_line).find(|host| !is_local_name(host)) {
        return Err(format!(
            "the host is {host:?}, expected localhost or an address\n"
        ));
    }
    let own = head.headers.get(HOST);
    let is_own = |origin: &str| {
        origin
            .strip_prefix("http://")
            .is_some_and(|it| own.is_some_and(|own| own == it))
    };
    match text(ORIGIN).find(|origin| !is_own(origin)) {
        Some(origin) => Err(format!(
            "the origin is {origin:?}, expected that of this port\n"
        )),
        None => Ok(()),
    }
}

fn is_local_name(host: &str) -> bool {
    let host = host.parse::<Authority>();
    host.is_ok_and(|host| {
        let name = host.host().trim_matches(['[', ']']);
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
    })
}

#[cfg(test)]
pub(super) mod tests;
