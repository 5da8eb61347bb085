//! Connections from a source address of one's own.
//!
//! `localhost` is the loopback address of the source's family, without asking a resolver; of other
//! names the addresses of that family are tried in turn.
//!
//! Does not bound the time: the caller does. `SO_LINGER` stays off, which may block the thread.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::{TcpSocket, TcpStream};

/// The address connections come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(pub IpAddr);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot find the address of {host}")]
    Resolve {
        host: String,
        #[source]
        source: io::Error,
    },
    #[error("{host} has no address of the family of {origin}, from which it is to be asked")]
    Family { host: String, origin: IpAddr },
    #[error("cannot bind {origin}, expected it on the loopback interface")]
    Bind {
        origin: IpAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot connect to {to}")]
    Connect {
        to: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// Connects to the first address of `host` that takes a connection. The error is that of the last.
pub(super) async fn connect(origin: Origin, host: &str, port: u16) -> Result<TcpStream, Error> {
    let mut failed = None;
    for to in addresses(origin, host, port).await? {
        match attempt(origin, to).await {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| Error::Family {
        host: host.to_owned(),
        origin: origin.0,
    }))
}

async fn addresses(origin: Origin, host: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
    let mut found: Vec<SocketAddr> = if let Ok(literal) = host.parse::<IpAddr>() {
        vec![(literal, port).into()]
    } else if host == "localhost" {
        let both: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        both.map(|address| (address, port).into()).to_vec()
    } else {
        let found = tokio::net::lookup_host((host, port)).await;
        let found = found.map_err(|source| Error::Resolve {
            host: host.to_owned(),
            source,
        })?;
        found.collect()
    };
    found.retain(|to| to.is_ipv4() == origin.0.is_ipv4());
    Ok(found)
}

async fn attempt(Origin(origin): Origin, to: SocketAddr) -> Result<TcpStream, Error> {
    let failed = |source| Error::Connect { to, source };
    let socket = match to {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    };
    let socket = socket.map_err(failed)?;
    let bound = socket.bind((origin, 0).into());
    bound.map_err(|source| Error::Bind { origin, source })?;
    let stream = socket.connect(to).await.map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    Ok(stream)
}
