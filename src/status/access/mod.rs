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
use crate::problem::{Problem, codes};
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
    /// Returns the text for a caller that is refused.
    pub(super) async fn check(&self, caller: &Caller, head: &Parts) -> Result<(), String> {
        if !caller.is_local() || caller.address.ip() == ENVOY {
            return Err(NOT_LOCAL.to_owned());
        }
        check_names(head)?;
        let Some(users) = self.users.as_ref().map(admitted) else {
            return Ok(());
        };
        let variable = self.variable;
        let problem = match caller.user.get_or_try_init(|| caller.ask()).await {
            Ok(user) if users.contains(user) => return Ok(()),
            Ok(user) => {
                let users: Vec<_> = users.iter().map(ToString::to_string).collect();
                let found = format!("only users {} may send this request", users.join(", "));
                Problem::new(codes::CALLER_REFUSED, format!("user {user}"), found)
                    .remedy(format!("{variable} allows others"))
            }
            Err(error) => Problem::new(codes::CALLER_UNKNOWN, "the kernel", error)
                .remedy(format!("{variable}=any allows every user")),
        };
        Err(format!("{problem}\n"))
    }
}

/// Refuses hosts other than `localhost` and addresses, and origins other than this port.
fn check_names(head: &Parts) -> Result<(), String> {
    let headers = |name| head.headers.get_all(name).into_iter();
    let text = |name| headers(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let of_line = head.uri.authority().map(|name| name.as_str().into());
    if let Some(host) = text(HOST).chain(of_line).find(|host| !is_local_name(host)) {
        return Err(foreign("the host", &host, "localhost or an IP address"));
    }
    let own = head.headers.get(HOST);
    let is_own = |origin: &str| {
        origin
            .strip_prefix("http://")
            .is_some_and(|it| own.is_some_and(|own| own == it))
    };
    match text(ORIGIN).find(|origin| !is_own(origin)) {
        Some(origin) => Err(foreign("the origin", &origin, "the origin of this port")),
        None => Ok(()),
    }
}

fn foreign(subject: &str, found: &str, expected: &'static str) -> String {
    let problem = Problem::value(codes::CALLER_FOREIGN, subject, found, expected);
    format!("{problem}\n")
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
