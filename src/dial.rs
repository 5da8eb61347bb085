//! Opens TCP connections by Happy Eyeballs.
//!
//! The addresses of a name are tried in alternation between IPv6 and IPv4 and in random order within
//! a family. Each attempt starts [`ATTEMPT_DELAY`] after the one before it, or as soon as that has
//! failed; the first connection wins. An address that failed or was slow is tried last for
//! [`REMEMBERED`].
//!
//! The caller bounds the time: dropping a future cancels its attempts. Names are resolved on tokio's
//! blocking threads.
//!
//! Source: RFC 8305.

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
/// How long a failure counts against an address.
const REMEMBERED: Duration = Duration::from_secs(60);
const MOST_REMEMBERED: usize = 64;

/// Opens connections. Clones share the memory of failures.
#[derive(Clone, Debug, Default)]
pub struct Dialer {
    source: Option<IpAddr>,
    failures: Arc<Mutex<Vec<(SocketAddr, Instant)>>>,
}

/// The addresses of one name that are left to try.
#[derive(Debug)]
pub struct Candidates {
    dialer: Dialer,
    /// The last is tried first.
    left: Vec<SocketAddr>,
    /// Why the others gave no connection, in the order in which they failed.
    pub failed: Vec<Error>,
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
    #[error("cannot connect to {address}")]
    Connect {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// Finds the addresses of `host`, a name or an IP address. `localhost` is both loopback addresses
/// without a lookup.
pub async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
    if let Ok(literal) = host.parse::<IpAddr>() {
        return Ok(vec![(literal, port).into()]);
    }
    if host == "localhost" {
        let both: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        return Ok(both.map(|address| (address, port).into()).to_vec());
    }
    match tokio::net::lookup_host((host, port)).await {
        Ok(found) => Ok(found.collect()),
        Err(source) => Err(Error::Resolve {
            host: host.to_owned(),
            source,
        }),
    }
}

impl Dialer {
    /// Binds connections to `source`, and tries addresses of its family only.
    pub fn from_source(source: IpAddr) -> Self {
        Self {
            source: Some(source),
            ..Self::default()
        }
    }

    /// Resolves `host` and connects to one of its addresses. The error is that of the address that
    /// failed first.
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
        Err(candidates.failed.into_iter().next().unwrap_or(none))
    }

    /// Puts resolved addresses into the order in which they are tried.
    pub fn candidates(&self, found: Vec<SocketAddr>) -> Candidates {
        let is_preferred = found.first().map(SocketAddr::is_ipv6);
        let usable = |to: &SocketAddr| {
            self.source
                .is_none_or(|from| from.is_ipv4() == to.is_ipv4())
        };
        let mut unique: Vec<_> = found.into_iter().filter(usable).collect();
        unique.sort_unstable();
        unique.dedup();
        fastrand::shuffle(&mut unique);
        let (first, second): (Vec<_>, Vec<_>) = unique
            .into_iter()
            .partition(|address| Some(address.is_ipv6()) == is_preferred);
        let ranked = first
            .into_iter()
            .enumerate()
            .map(|(rank, address)| (2 * rank, address));
        let second = second.into_iter().enumerate();
        let mut ranked: Vec<_> = ranked
            .chain(second.map(|(rank, address)| (2 * rank + 1, address)))
            .map(|(rank, address)| (self.last_failure(address), rank, address))
            .collect();
        // An address that never failed is None and comes first.
        ranked.sort_unstable();
        Candidates {
            dialer: self.clone(),
            left: ranked
                .into_iter()
                .rev()
                .map(|(_, _, address)| address)
                .collect(),
            failed: Vec::new(),
        }
    }

    /// Has `address` tried last for a while. For failures after the connection, such as in TLS.
    pub fn failed(&self, address: SocketAddr) {
        let mut failures = self.failures.lock();
        failures.retain(|(failed, since)| *failed != address && since.elapsed() < REMEMBERED);
        if failures.len() == MOST_REMEMBERED {
            failures.remove(0);
        }
        failures.push((address, Instant::now()));
    }

    fn connected(&self, address: SocketAddr) {
        self.failures
            .lock()
            .retain(|(failed, _)| *failed != address);
    }

    fn last_failure(&self, address: SocketAddr) -> Option<Instant> {
        let failures = self.failures.lock();
        let (_, since) = failures.iter().find(|(failed, _)| *failed == address)?;
        (since.elapsed() < REMEMBERED).then_some(*since)
    }
}

impl Candidates {
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Connects to one of the addresses that are left. None when all of them have failed; call it
    /// again where a connection turns out to be of no use.
    pub async fn connect(&mut self) -> Option<(SocketAddr, TcpStream)> {
        let mut attempts = JoinSet::new();
        let mut under_way = Vec::new();
        loop {
            if let Some(address) = self.left.pop() {
                let attempt = attempt(self.dialer.source, address);
                attempts.spawn(async move { (address, attempt.await) });
                under_way.push(address);
            }
            tokio::select! {
                biased;
                ended = attempts.join_next() => match ended? {
                    Ok((address, Ok(stream))) => {
                        self.dialer.connected(address);
                        under_way.retain(|other| *other != address);
                        // Slower than this one, and tried after those not tried yet.
                        self.left.splice(..0, under_way);
                        return Some((address, stream));
                    }
                    Ok((address, Err(error))) => {
                        self.dialer.failed(address);
                        under_way.retain(|other| *other != address);
                        self.failed.push(error);
                    }
                    Err(panicked) => tracing::error!("a connection attempt failed: {panicked}"),
                },
                () = sleep(ATTEMPT_DELAY), if !self.left.is_empty() => {
                    if let Some(slow) = under_way.last() {
                        self.dialer.failed(*slow);
                    }
                }
            }
        }
    }
}

async fn attempt(from: Option<IpAddr>, address: SocketAddr) -> Result<TcpStream, Error> {
    let failed = |source| Error::Connect { address, source };
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    };
    let socket = socket.map_err(failed)?;
    if let Some(from) = from {
        let bound = socket.bind((from, 0).into());
        bound.map_err(|source| Error::Bind { from, source })?;
    }
    let stream = socket.connect(address).await.map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts
            .iter()
            .map(|text| text.parse().expect("an address"))
            .collect()
    }

    /// In the order in which they are tried.
    fn order(dialer: &Dialer, texts: &[&str]) -> Vec<SocketAddr> {
        dialer
            .candidates(addresses(texts))
            .left
            .into_iter()
            .rev()
            .collect()
    }

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        (listener, address)
    }

    /// An address whose port refuses connections.
    async fn refusing() -> SocketAddr {
        listener().await.1
    }

    /// A socket whose queue is full, so that connections to it are neither accepted nor refused.
    fn unresponsive() -> (Vec<rustix::fd::OwnedFd>, SocketAddr) {
        use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
        let socket = |flags| net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
        let full = socket(SocketFlags::empty()).expect("a socket");
        net::bind(&full, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("bound");
        net::listen(&full, 0).expect("listens");
        let address: SocketAddr = net::getsockname(&full)
            .expect("a name")
            .try_into()
            .expect("an address");
        let mut sockets = vec![full];
        for _ in 0..4 {
            let client = socket(SocketFlags::NONBLOCK).expect("a socket");
            let _ = net::connect(&client, &address);
            sockets.push(client);
        }
        (sockets, address)
    }

    #[test]
    fn families_alternate_and_the_resolvers_first_comes_first() {
        let found = [
            "[::1]:1",
            "[::2]:1",
            "[::3]:1",
            "127.0.0.1:1",
            "127.0.0.2:1",
            "[::1]:1",
        ];
        for _ in 0..20 {
            let families: Vec<_> = order(&Dialer::default(), &found)
                .iter()
                .map(SocketAddr::is_ipv6)
                .collect();
            assert_eq!(families, [true, false, true, false, true]);
        }
    }

    #[test]
    fn replicas_are_tried_in_random_order() {
        let found = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];
        let mut first: Vec<_> = (0..200)
            .map(|_| order(&Dialer::default(), &found)[0])
            .collect();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_failed_is_tried_last_for_a_minute() {
        let dialer = Dialer::default();
        let found = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];
        dialer.clone().failed(addresses(&found)[0]);
        tokio::time::advance(Duration::from_secs(1)).await;
        dialer.failed(addresses(&found)[1]);
        for _ in 0..20 {
            assert_eq!(
                order(&dialer, &found),
                addresses(&["10.0.0.3:1", "10.0.0.1:1", "10.0.0.2:1"])
            );
        }
        tokio::time::advance(REMEMBERED).await;
        assert!((0..200).any(|_| order(&dialer, &found)[0] != addresses(&found)[2]));
        for port in 0..1000 {
            dialer.failed(([10, 0, 0, 1], port).into());
        }
        assert_eq!(dialer.failures.lock().len(), MOST_REMEMBERED);
    }

    #[tokio::test]
    async fn the_next_address_is_tried_when_one_refuses() {
        let (_listener, good) = listener().await;
        let bad = refusing().await;
        let dialer = Dialer::default();
        dialer.failed(good);
        let mut candidates = dialer.candidates(vec![bad, good]);
        let (address, _stream) = candidates.connect().await.expect("a connection");
        assert_eq!(address, good);
        assert_eq!(candidates.failed.len(), 1);
        assert_eq!(
            candidates.failed[0].to_string(),
            format!("cannot connect to {bad}")
        );
        assert!(dialer.last_failure(bad).is_some());
        assert!(dialer.last_failure(good).is_none());
        assert!(candidates.connect().await.is_none());
    }

    #[tokio::test]
    async fn an_address_that_does_not_respond_costs_a_quarter_of_a_second_once() {
        let (_listener, good) = listener().await;
        let (_sockets, slow) = unresponsive();
        let dialer = Dialer::default();
        dialer.failed(good);
        let start = Instant::now();
        let mut candidates = dialer.candidates(vec![slow, good]);
        let (address, _stream) = candidates.connect().await.expect("a connection");
        assert_eq!(address, good);
        assert!(start.elapsed() >= ATTEMPT_DELAY);
        assert_eq!(candidates.left, [slow]);
        assert_eq!(dialer.candidates(vec![slow, good]).left, [slow, good]);
        let again = timeout(ATTEMPT_DELAY, candidates.connect()).await;
        assert!(again.is_err(), "{again:?}");
    }

    #[tokio::test]
    async fn a_source_address_is_bound_and_decides_the_family() {
        let (listener, address) = listener().await;
        let dialer = Dialer::from_source(Ipv4Addr::new(127, 0, 0, 6).into());
        let connected = dialer.connect("localhost", address.port());
        let (stream, accepted) = tokio::join!(connected, listener.accept());
        assert_eq!(
            accepted.expect("a connection").1,
            stream.expect("connected").local_addr().expect("an address")
        );
        for (host, from, expected) in [
            (
                "::1",
                [127, 0, 0, 6],
                "::1 has no address of the family of the source address 127.0.0.6",
            ),
            (
                "127.0.0.1",
                [192, 0, 2, 1],
                "cannot bind the source address 192.0.2.1, expected it on the loopback interface",
            ),
        ] {
            let dialer = Dialer::from_source(IpAddr::from(from));
            let error = dialer
                .connect(host, address.port())
                .await
                .expect_err("an error");
            assert_eq!(error.to_string(), expected);
        }
    }

    #[tokio::test]
    async fn a_name_without_address_is_an_error_that_names_it() {
        let error = Dialer::default().connect("no such name", 1).await;
        let error = error.expect_err("an error").to_string();
        assert_eq!(error, "cannot find the address of no such name");
    }
}
