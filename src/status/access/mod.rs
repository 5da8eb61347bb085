//! Decides which callers may read the debug pages, and drain or end the agent: local ones, of certain users.
//!
//! All processes of the pod are local, so the kernel is asked for the user of a connection. A connection from
//! Envoy's own source address may carry a request of any client of the pod, so it is refused. A page in a browser,
//! which reaches the port by port forwarding, is recognized by its host name or origin.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use ::http::header::{HOST, HeaderName, HeaderValue, ORIGIN};
use ::http::request::Parts;
use ::http::uri::Authority;
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio::time::timeout;

use crate::net::netlink;
use crate::net::unix_socket::access::with_agent_and_root;
use crate::problem::{Code, Problem};

/// The source address of connections from Envoy to the pod's ports. That of IPv6, `::6`, is not local.
const ENVOY: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));
/// The limit of a query to the kernel, which answers at once unless it has to load a module.
const LIMIT: Duration = Duration::from_secs(2);

/// The other side of a connection.
#[derive(Debug)]
pub(super) struct Caller {
    address: SocketAddr,
    /// Address and inode of the agent's side.
    own: io::Result<(SocketAddr, u64)>,
    /// The user, once it is known.
    user: OnceCell<u32>,
}

impl Caller {
    pub(super) fn new(stream: &TcpStream, from: SocketAddr) -> Self {
        Self {
            address: SocketAddr::new(from.ip().to_canonical(), from.port()),
            own: stream.local_addr().and_then(|own| Ok((own, rustix::fs::fstat(stream)?.st_ino))),
            user: OnceCell::new(),
        }
    }

    pub(super) fn is_local(&self) -> bool {
        self.address.ip().is_loopback()
    }

    /// Queries the kernel for the user of the caller's socket.
    async fn query_user(&self) -> io::Result<u32> {
        let (own, inode) = *self.own.as_ref().map_err(io::Error::kind)?;
        let caller = self.address;
        let query = tokio::task::spawn_blocking(move || {
            let (user, _) = netlink::tcp_socket_owner(caller, own)?;
            // If the connection was reset meanwhile, another process may have got its port.
            match netlink::tcp_socket_owner(own, caller)? {
                (_, present) if u64::from(present) == inode => Ok(user),
                _ => Err(io::ErrorKind::NotConnected.into()),
            }
        });
        timeout(LIMIT, query).await??
    }
}

/// The reason why a request is refused, for the caller.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error("Only requests from localhost are allowed")]
    NotLocal,
    #[error(transparent)]
    Problem(#[from] Problem),
}

/// The users that may request certain paths.
#[derive(Debug)]
pub(super) struct Access {
    /// The variable that sets the users.
    pub(super) variable: &'static str,
    /// Users in addition to root and the agent's own; None admits every user.
    pub(super) users: Option<BTreeSet<u32>>,
}

impl Access {
    /// Fails if a request is refused.
    pub(super) async fn check(&self, caller: &Caller, head: &Parts) -> Result<(), Refused> {
        if !caller.is_local() || caller.address.ip() == ENVOY {
            return Err(Refused::NotLocal);
        }
        check_names(head)?;
        let Some(users) = self.users.as_ref().map(with_agent_and_root) else {
            return Ok(());
        };
        let variable = self.variable;
        let problem = match caller.user.get_or_try_init(|| caller.query_user()).await {
            Ok(user) if users.contains(user) => return Ok(()),
            Ok(user) => {
                let users: Vec<_> = users.iter().map(ToString::to_string).collect();
                let found = format!("only users {} may send this request", users.join(", "));
                Problem::new(Code::CallerRefused, format!("user {user}"), found)
                    .remedy(format!("{variable} allows others"))
            }
            Err(error) => Problem::new(Code::CallerUnknown, "the kernel", error)
                .remedy(format!("{variable}=any allows every user")),
        };
        Err(problem.into())
    }
}

/// Refuses hosts other than `localhost` and addresses, and origins other than this port.
fn check_names(head: &Parts) -> Result<(), Problem> {
    let code = Code::CallerForeign;
    let in_request_line = head.uri.authority().map(|name| name.as_str().into());
    let mut hosts = values(head, HOST).chain(in_request_line);
    if let Some(host) = hosts.find(|host| !is_local_name(host)) {
        return Err(Problem::value(code, "the host", &host, "localhost or an IP address"));
    }
    let own = head.headers.get(HOST).map(HeaderValue::as_bytes);
    for origin in values(head, ORIGIN) {
        let host = origin.strip_prefix("http://").map(str::as_bytes);
        if host.is_none() || host != own {
            return Err(Problem::value(code, "the origin", &origin, "the origin of this port"));
        }
    }
    Ok(())
}

/// Returns the values of a header.
fn values(head: &Parts, name: HeaderName) -> impl Iterator<Item = Cow<'_, str>> {
    head.headers.get_all(name).into_iter().map(|value| String::from_utf8_lossy(value.as_bytes()))
}

fn is_local_name(host: &str) -> bool {
    host.parse::<Authority>().is_ok_and(|host| {
        let name = host.host().trim_matches(['[', ']']);
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
    })
}

#[cfg(test)]
pub(super) mod tests;
