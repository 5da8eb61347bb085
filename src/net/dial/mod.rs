//! Opens TCP connections by Happy Eyeballs.
//!
//! IPv6 and IPv4 addresses of a name alternate, in random order within a family. Each attempt starts
//! [`ATTEMPT_DELAY`] after the previous one, or as soon as that has failed; the first connection is used. An address
//! that failed or was slow is tried last for [`REMEMBERED`]. The caller limits the time.
//!
//! Source: RFC 8305.

pub mod proxy;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// "Connection Attempt Delay" of RFC 8305, with the recommended value.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// The time for which an address that failed is tried last.
const REMEMBERED: Duration = Duration::from_secs(60);
const MAX_REMEMBERED: usize = 64;

/// Opens connections. Clones share the memory of failures.
#[derive(Clone, Debug, Default)]
pub struct Dialer {
    source: Option<IpAddr>,
    filter: Option<Arc<dyn Filter>>,
    /// The time of the last failure or slow attempt, by address.
    failures: Arc<Mutex<HashMap<SocketAddr, Instant>>>,
}

/// Decides which addresses may be connected to. Each attempt is checked, so a name that resolves to another address
/// later cannot bypass it.
pub trait Filter: fmt::Debug + Send + Sync {
    /// Checks an address. The error says why it is blocked.
    fn check(&self, address: IpAddr) -> Result<(), String>;
}

/// The addresses of one name that are left to try. Dropping it cancels the attempts.
#[derive(Debug)]
pub struct Candidates {
    dialer: Dialer,
    /// The last is tried first.
    left: Vec<SocketAddr>,
    /// The running attempts. A slow one is not cancelled when the next one starts.
    attempts: JoinSet<(SocketAddr, Result<TcpStream, Error>)>,
    pub errors: Vec<Error>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot find the address of {host}")]
    Resolve {
        host: String,
        #[source]
        source: io::Error,
    },
    #[error("{host} has no address")]
    NoAddress { host: String },
    #[error("{host} has no address of the family of the source address {from}")]
    Family { host: String, from: IpAddr },
    #[error("cannot bind the source address {from}, expected it on the loopback interface")]
    Bind {
        from: IpAddr,
        #[source]
        source: io::Error,
    },
    #[error("connection blocked: resolved IP {address} {problem}")]
    Blocked { address: IpAddr, problem: String },
    #[error("cannot connect to {address}")]
    Connect {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// Resolves `host`, a name or an IP address. `localhost` stands for both loopback addresses, without a lookup.
pub async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
    if host == "localhost" {
        let both: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        return Ok(both.map(|address| (address, port).into()).to_vec());
    }
    let resolved = tokio::net::lookup_host((host, port))
        .await
        .map_err(|source| Error::Resolve { host: host.to_owned(), source })?;
    Ok(resolved.collect())
}

impl Dialer {
    /// Binds connections to `source`, and tries addresses of its family only.
    pub fn from_source(source: IpAddr) -> Self {
        Self { source: Some(source), ..Self::default() }
    }

    pub fn with_filter(filter: Arc<dyn Filter>) -> Self {
        Self { filter: Some(filter), ..Self::default() }
    }

    /// Checks an address with the filter, if there is one.
    pub fn check(&self, address: IpAddr) -> Result<(), Error> {
        let checked = self.filter.as_ref().map(|filter| filter.check(address));
        checked.unwrap_or(Ok(())).map_err(|problem| Error::Blocked { address, problem })
    }

    /// Resolves `host` and connects to one of its addresses. Fails with the first error.
    pub async fn connect(&self, host: &str, port: u16) -> Result<TcpStream, Error> {
        let mut candidates = self.candidates(resolve(host, port).await?);
        if let Some((_, stream)) = candidates.connect().await {
            return Ok(stream);
        }
        let host = host.to_owned();
        let none = match self.source {
            Some(from) => Error::Family { host, from },
            None => Error::NoAddress { host },
        };
        Err(candidates.errors.into_iter().next().unwrap_or(none))
    }

    /// Selects and orders resolved addresses. Leaves out duplicates and addresses of another family than the source
    /// address. Alternates between the families, beginning with the family of the first address. Addresses that
    /// failed before come last.
    pub fn candidates(&self, resolved: Vec<SocketAddr>) -> Candidates {
        let is_ipv6_first = resolved.first().is_some_and(SocketAddr::is_ipv6);
        let unique: BTreeSet<_> = resolved
            .into_iter()
            .filter(|to| self.source.is_none_or(|from| from.is_ipv4() == to.is_ipv4()))
            .collect();
        let mut unique = Vec::from_iter(unique);
        fastrand::shuffle(&mut unique);
        let mut failures = self.failures.lock();
        failures.retain(|_, failed_at| failed_at.elapsed() < REMEMBERED);
        // The family of the first address has the even ranks, and the other one the odd ranks.
        let mut next_rank_by_family = [0, 1];
        let mut ranked = Vec::from_iter(unique.into_iter().map(|address| {
            let family = usize::from(address.is_ipv6() != is_ipv6_first);
            let rank = next_rank_by_family[family];
            next_rank_by_family[family] += 2;
            (failures.get(&address).copied(), rank, address)
        }));
        // An address that never failed is None and comes first.
        ranked.sort_unstable();
        Candidates {
            dialer: self.clone(),
            left: ranked.into_iter().rev().map(|(_, _, address)| address).collect(),
            attempts: JoinSet::new(),
            errors: Vec::new(),
        }
    }

    /// Records a failure: `address` is tried last for a while, unless too many are remembered. Call it for failures
    /// after the connection, such as in TLS.
    pub fn record_failure(&self, address: SocketAddr) {
        let mut failures = self.failures.lock();
        if failures.len() < MAX_REMEMBERED {
            failures.insert(address, Instant::now());
        }
    }
}

impl Candidates {
    pub fn is_empty(&self) -> bool {
        self.left.is_empty() && self.attempts.is_empty()
    }

    /// Connects to one of the addresses that are left. Returns None when all of them have failed. Call it again if
    /// the connection cannot be used.
    pub async fn connect(&mut self) -> Option<(SocketAddr, TcpStream)> {
        loop {
            let next = self.left.pop();
            if let Some(address) = next {
                let attempt = attempt(self.dialer.clone(), address);
                self.attempts.spawn(async move { (address, attempt.await) });
            }
            tokio::select! {
                biased;
                ended = self.attempts.join_next() => match ended? {
                    Ok((address, Ok(stream))) => {
                        self.dialer.failures.lock().remove(&address);
                        return Some((address, stream));
                    }
                    Ok((address, Err(error))) => {
                        self.dialer.record_failure(address);
                        self.errors.push(error);
                    }
                    Err(panicked) => tracing::error!("a connection attempt failed: {panicked}"),
                },
                () = sleep(ATTEMPT_DELAY), if !self.left.is_empty() => {
                    next.inspect(|slow| self.dialer.record_failure(*slow));
                }
            }
        }
    }
}

/// Opens a connection to one address, if the filter allows it.
async fn attempt(dialer: Dialer, address: SocketAddr) -> Result<TcpStream, Error> {
    dialer.check(address.ip())?;
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    };
    let socket = socket.map_err(connect_error(address))?;
    if let Some(from) = dialer.source {
        socket.bind((from, 0).into()).map_err(|source| Error::Bind { from, source })?;
    }
    let stream = socket.connect(address).await.map_err(connect_error(address))?;
    stream.set_nodelay(true).map_err(connect_error(address))?;
    Ok(stream)
}

fn connect_error(address: SocketAddr) -> impl Fn(io::Error) -> Error {
    move |source| Error::Connect { address, source }
}

#[cfg(test)]
mod tests;
