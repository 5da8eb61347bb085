//! One dial: the name resolved, its addresses tried one after the other, each through TCP, TLS and
//! the first frame of HTTP/2.
//!
//! Every step ends in time: the whole by [`Limits::total`], one address by [`Limits::per_address`]
//! while others are left to try. Addresses are shuffled, so a fleet spreads over replicas.
//!
//! Does not try again; the worker does.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::connection::{self, About, Connection, Driver, Io, Negotiated, Owned};
use super::tls::{self, TlsError};
use super::tls_stream::TlsStream;
use super::{Config, Security};

/// Bounds of one dial.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub total: Duration,
    /// For one address of several.
    pub per_address: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            total: Duration::from_secs(10),
            per_address: Duration::from_secs(5),
        }
    }
}

/// Why a dial gave no connection.
#[derive(Clone, Debug, thiserror::Error)]
#[error("istiod at {address}: {source}")]
pub struct DialError {
    /// As configured.
    pub address: String,
    pub source: Arc<Cause>,
}

/// What went wrong in a dial.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("cannot resolve the name: {0}")]
    Resolve(#[source] io::Error),
    #[error("the name has no addresses")]
    NoAddress,
    #[error("cannot connect to {to}: {source}")]
    Connect { to: SocketAddr, source: io::Error },
    #[error("timed out after {after:?} {doing}")]
    TimedOut { doing: String, after: Duration },
    #[error("TLS handshake with {to} as {name:?} failed: {source}")]
    Handshake {
        to: SocketAddr,
        name: String,
        source: io::Error,
    },
    #[error("{to} does not offer HTTP/2 over TLS (ALPN)")]
    Alpn { to: SocketAddr },
    #[error("{to} does not speak HTTP/2: {found}")]
    NotHttp2 { to: SocketAddr, found: String },
    #[error("the agent is stopping")]
    Stopping,
}

impl Cause {
    /// Whether the peer ended TLS, as it does when it refuses our certificate. With TLS 1.3 that
    /// comes after the handshake.
    fn is_alert(&self) -> bool {
        const ALERT: &str = "received fatal alert";
        match self {
            Self::Handshake { source, .. } => source.to_string().contains(ALERT),
            Self::NotHttp2 { found, .. } => found.contains(ALERT),
            _ => false,
        }
    }

    /// The cause without the address, which another dial takes from the same name.
    pub(super) fn whoever_answers(&self) -> String {
        match self {
            Self::Connect { to, .. }
            | Self::Handshake { to, .. }
            | Self::Alpn { to }
            | Self::NotHttp2 { to, .. } => self.to_string().replace(&to.to_string(), "istiod"),
            Self::TimedOut { .. } => "timed out".to_owned(),
            Self::Tls(_) | Self::Resolve(_) | Self::NoAddress | Self::Stopping => self.to_string(),
        }
    }
}

pub(super) async fn dial(config: &Config, tasks: Owned) -> Result<(Connection, Driver), Cause> {
    let total = Bound::new(config.limits.total);
    let tls = match &config.security {
        Security::Plaintext => None,
        Security::Tls(tls) => {
            let prepared = total.of("reading certificate files", tls::prepare(tls));
            Some(prepared.await??)
        }
    };
    let mut addresses = resolve(&config.address, total).await?;
    fastrand::shuffle(&mut addresses);
    let mut last = Cause::NoAddress;
    while let Some(to) = addresses.pop() {
        let bound = match addresses.is_empty() {
            true => total,
            false => total.at_most(config.limits.per_address),
        };
        match attempt_as_known(config, to, tls.as_ref(), bound, &tasks).await {
            Ok(open) => return Ok(open),
            Err(cause) => {
                tracing::debug!(target: "xdsproxy", "istiod at {}: {cause}", config.address);
                last = cause;
            }
        }
    }
    Err(last)
}

async fn resolve(address: &str, bound: Bound) -> Result<Vec<SocketAddr>, Cause> {
    if let Ok(literal) = address.parse() {
        return Ok(vec![literal]);
    }
    let found = bound.of("resolving the name", tokio::net::lookup_host(address));
    let mut addresses: Vec<_> = found.await?.map_err(Cause::Resolve)?.collect();
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses)
}

/// With the client certificate, if there is one; without it if istiod refuses that, as one of an
/// earlier root may be in our hands. The token is then what istiod knows us by.
async fn attempt_as_known(
    config: &Config,
    to: SocketAddr,
    tls: Option<&tls::Prepared>,
    bound: Bound,
    tasks: &Owned,
) -> Result<(Connection, Driver), Cause> {
    let encryption = tls.map(|tls| Encryption {
        config: &tls.config,
        name: &tls.name,
        client_certificate: tls.without_client.is_some(),
    });
    let outcome = attempt(config, to, encryption, bound, tasks.clone()).await;
    let Err(cause) = &outcome else {
        return outcome;
    };
    let Some(tls) = tls else {
        return outcome;
    };
    match &tls.without_client {
        Some(without) if cause.is_alert() => {
            tracing::warn!("{cause}; leaving out the client certificate, using token instead");
            let encryption = Encryption {
                config: without,
                name: &tls.name,
                client_certificate: false,
            };
            attempt(config, to, Some(encryption), bound, tasks.clone()).await
        }
        _ => outcome,
    }
}

/// What TLS is spoken.
#[derive(Clone, Copy)]
struct Encryption<'a> {
    config: &'a Arc<ClientConfig>,
    name: &'a ServerName<'static>,
    client_certificate: bool,
}

async fn attempt(
    config: &Config,
    to: SocketAddr,
    tls: Option<Encryption<'_>>,
    bound: Bound,
    tasks: Owned,
) -> Result<(Connection, Driver), Cause> {
    let connecting = bound.of(format!("connecting to {to}"), TcpStream::connect(to));
    let stream = connecting
        .await?
        .and_then(|stream| prepared(stream, config))
        .map_err(|source| Cause::Connect { to, source })?;
    let (io, tls): (Box<dyn Io>, _) = match tls {
        None => (Box::new(stream), None),
        Some(tls) => {
            let doing = format!("in the TLS handshake with {to}");
            let (io, tls) = bound.of(doing, encrypt(stream, to, tls)).await??;
            (io, Some(tls))
        }
    };
    let about = About {
        address: to,
        since: SystemTime::now(),
        tls,
    };
    let opening = connection::open(io, about, config.keepalive, tasks);
    bound
        .of(format!("waiting for {to} to speak HTTP/2"), opening)
        .await?
        .map_err(|found| Cause::NotHttp2 { to, found })
}

/// Unacknowledged bytes end the connection after the keepalive timeout, so a call on a connection
/// that was cut while idle fails soon, although pings wait for their interval.
fn prepared(stream: TcpStream, config: &Config) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    let limit = u32::try_from(config.keepalive.timeout.as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(&stream, limit)?;
    Ok(stream)
}

async fn encrypt(
    stream: TcpStream,
    to: SocketAddr,
    tls: Encryption<'_>,
) -> Result<(Box<dyn Io>, Negotiated), Cause> {
    let connecting = TlsStream::connect(tls.config.clone(), tls.name.clone(), stream);
    let stream = connecting.await.map_err(|source| Cause::Handshake {
        to,
        name: printed(tls.name),
        source,
    })?;
    let session = stream.session();
    if session.alpn_protocol() != Some(b"h2") {
        return Err(Cause::Alpn { to });
    }
    let negotiated = Negotiated {
        version: session.protocol_version(),
        key_exchange: session
            .negotiated_key_exchange_group()
            .map(|group| group.name()),
        cipher: session.negotiated_cipher_suite().map(|suite| suite.suite()),
        client_certificate: tls.client_certificate,
    };
    Ok((Box::new(stream), negotiated))
}

fn printed(name: &ServerName<'_>) -> String {
    name.to_str().into_owned()
}

/// A moment by which something must be done, and how long that was from the start.
#[derive(Clone, Copy)]
struct Bound {
    until: Instant,
    after: Duration,
}

impl Bound {
    fn new(after: Duration) -> Self {
        let until = Instant::now() + after;
        Self { until, after }
    }

    /// This bound, or an earlier one that starts now.
    fn at_most(self, after: Duration) -> Self {
        let other = Self::new(after);
        if other.until < self.until {
            other
        } else {
            self
        }
    }

    async fn of<T>(self, doing: impl Display, work: impl Future<Output = T>) -> Result<T, Cause> {
        let done = tokio::time::timeout_at(self.until, work).await;
        done.map_err(|_| Cause::TimedOut {
            doing: doing.to_string(),
            after: self.after,
        })
    }
}
