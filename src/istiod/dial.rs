//! One dial: resolves the name, and tries its addresses through TCP, TLS and the first HTTP/2 frame.
//!
//! Every step is bounded: the whole by [`Limits::total`], one address by [`Limits::per_address`]
//! while others are left to try. Retries are the worker's.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::{CertificateError, ClientConfig};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use super::connection::{self, Connection, Driver, Io};
use super::status::{Connected, Tls};
use super::tls;
use super::{Config, Security};
use crate::address;
use crate::clock::{self, Clock, rfc3339};
use crate::dial::{self, Dialer};
use crate::executor::Executor;
use crate::lifecycle::with_causes;

/// Where a refusal is explained.
pub const LOG: &str = "istiod logs why: kubectl logs -n istio-system deployment/istiod";

/// Bounds of dials.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub total: Duration,
    /// For one address of several.
    pub per_address: Duration,
    /// Between the starts of two dials.
    pub least_between: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            total: Duration::from_secs(10),
            per_address: Duration::from_secs(5),
            least_between: Duration::from_secs(1),
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
    #[error("{0}")]
    Tls(String),
    #[error("{address:?} is no address, expected host:port")]
    Address { address: String },
    #[error("{}", with_causes(.0))]
    Connect(dial::Error),
    #[error("timed out after {after:?} {doing}")]
    TimedOut { doing: String, after: Duration },
    #[error("the proxy {to} gives no connection to {address}: {source}")]
    Proxy {
        to: SocketAddr,
        address: String,
        source: io::Error,
    },
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

    /// What an operator may do about it.
    pub fn remedy(&self) -> &'static str {
        const RUNNING: &str =
            "is istiod ready, and is it its port? kubectl get pods,endpoints -n istio-system";
        const NAME: &str = "look at the pod's resolvers in /etc/resolv.conf, and whether the service \
                            is there: kubectl get service -n istio-system";
        const POLICY: &str =
            "a NetworkPolicy, a firewall or a security group may drop packets to it";
        match self {
            Self::Connect(dial::Error::Connect { source, .. }) => match source.kind() {
                io::ErrorKind::ConnectionRefused => RUNNING,
                io::ErrorKind::NetworkUnreachable | io::ErrorKind::AddrNotAvailable => {
                    "the pod needs an address of that family, or the name others"
                }
                _ => POLICY,
            },
            Self::Connect(dial::Error::Resolve { .. } | dial::Error::NoAddress { .. }) => NAME,
            Self::TimedOut { doing, .. } if doing.starts_with("resolving") => NAME,
            Self::TimedOut { doing, .. } if doing.starts_with("connecting") => POLICY,
            Self::TimedOut { .. } => RUNNING,
            Self::Proxy { .. } => {
                "allow it in the proxy, or name istiod in NO_PROXY so that it is dialed directly"
            }
            Self::Handshake { source, .. } => {
                match source.get_ref().and_then(|error| error.downcast_ref()) {
                    Some(rustls::Error::InvalidCertificate(refused)) => of_certificate(refused),
                    Some(rustls::Error::InvalidMessage(_)) => {
                        "it is not istiod's TLS port (15012); for plaintext (15010) set \
                         controlPlaneAuthPolicy: NONE"
                    }
                    Some(rustls::Error::AlertReceived(_)) => LOG,
                    // It says what to do.
                    Some(rustls::Error::Other(_)) => "",
                    _ => RUNNING,
                }
            }
            Self::Alpn { .. } | Self::NotHttp2 { .. } => {
                "it is not istiod's gRPC port (15012, or 15010 in plaintext): look at \
                 discoveryAddress, and at load balancers between, which must pass HTTP/2"
            }
            Self::Tls(_) | Self::Address { .. } | Self::Connect(_) | Self::Stopping => "",
        }
    }

    /// The cause without the address, which is another at another dial of the same name.
    pub(super) fn without_address(&self) -> String {
        match self {
            Self::Connect(dial::Error::Connect { address: to, .. })
            | Self::Handshake { to, .. }
            | Self::Alpn { to }
            | Self::NotHttp2 { to, .. } => self.to_string().replace(&to.to_string(), "istiod"),
            Self::TimedOut { .. } => "timed out".to_owned(),
            _ => self.to_string(),
        }
    }
}

fn of_certificate(refused: &CertificateError) -> &'static str {
    use CertificateError as E;
    match refused {
        E::NotValidForName | E::NotValidForNameContext { .. } => {
            "set discoveryAddress to one of the certificate's names, or ISTIOD_SAN to the name expected"
        }
        E::NotValidYet | E::NotValidYetContext { .. } | E::Expired | E::ExpiredContext { .. } => {
            "compare the clock of this machine (date -u) with that of others; else renew istiod's \
             certificate, or the authority's that signed it"
        }
        _ => {
            "compare the roots for istiod with the config map istio-ca-root-cert of its cluster; \
             discoveryAddress may lead to another mesh, or through what ends TLS"
        }
    }
}

/// Opens a connection. `dialer` remembers addresses that failed.
pub(super) async fn dial(
    config: &Arc<Config>,
    dialer: &Dialer,
    executor: Executor,
) -> Result<(Connection, Driver), Cause> {
    let total = Bound::new(config.limits.total);
    let tls = match &config.security {
        Security::Plaintext => None,
        Security::Tls(tls) => {
            let prepared = total.of("reading certificate files", tls::prepare(tls));
            Some(prepared.await?.map_err(Cause::Tls)?)
        }
    };
    let (host, port) = host_and_port(&config.address)?;
    let (next, next_port) = match &config.proxy {
        Some(proxy) => (proxy.host.as_str(), proxy.port),
        None => (host, port),
    };
    let found = total.of("resolving the name", dial::resolve(next, next_port));
    let mut candidates = dialer.candidates(found.await?.map_err(Cause::Connect)?);
    let mut last = None;
    while let Some((to, stream)) = total
        .of(format!("connecting to {next}"), candidates.connect())
        .await?
    {
        let bound = match candidates.is_empty() {
            true => total,
            false => total.at_most(config.limits.per_address),
        };
        let attempt = Attempt {
            config,
            to,
            bound,
            executor: &executor,
        };
        match attempt.open(stream, tls.as_ref()).await {
            Ok(open) => return Ok(open),
            Err(cause) => {
                tracing::debug!(target: "xdsproxy", "istiod at {}: {cause}", config.address);
                dialer.failed(to);
                last = Some(cause);
            }
        }
    }
    let host = next.to_owned();
    let failed = candidates.failed.pop();
    Err(last.unwrap_or(Cause::Connect(
        failed.unwrap_or(dial::Error::NoAddress { host }),
    )))
}

fn host_and_port(address: &str) -> Result<(&str, u16), Cause> {
    address::parts(address).ok_or_else(|| Cause::Address {
        address: address.to_owned(),
    })
}

/// What is tried with one address.
struct Attempt<'a> {
    config: &'a Arc<Config>,
    to: SocketAddr,
    bound: Bound,
    executor: &'a Executor,
}

impl Attempt<'_> {
    /// With the client certificate, if there is one; without it if istiod refuses that, as it may be
    /// one of an earlier root. istiod then authenticates the token.
    async fn open(
        &self,
        stream: TcpStream,
        tls: Option<&tls::Prepared>,
    ) -> Result<(Connection, Driver), Cause> {
        let stream = self.tunnel(stream).await?;
        let Some(tls) = tls else {
            return self.speak(Box::new(self.prepare(stream)?), None).await;
        };
        let has_client = tls.without_client.is_some();
        let outcome = self.open_tls(stream, tls, &tls.config, has_client).await;
        match (outcome, &tls.without_client) {
            (Err(cause), Some(without)) if cause.is_alert() => {
                tracing::warn!("{cause}; leaving out the client certificate, using token instead");
                let doing = format!("connecting to {}", self.to);
                let stream = self.bound.of(doing, TcpStream::connect(self.to)).await?;
                let stream = stream.map_err(|source| self.failed(source))?;
                let stream = self.tunnel(stream).await?;
                self.open_tls(stream, tls, without, false).await
            }
            (outcome, _) => outcome,
        }
    }

    /// Has the proxy, if there is one, lead the connection to istiod.
    async fn tunnel(&self, mut stream: TcpStream) -> Result<TcpStream, Cause> {
        if let Some(proxy) = &self.config.proxy {
            let (to, address) = (self.to, &self.config.address);
            let (host, port) = host_and_port(address)?;
            let doing = format!("waiting for the proxy {to}");
            let led = proxy.tunnel(&mut stream, host, port);
            let led = self.bound.of(doing, led).await?;
            led.map_err(|source| Cause::Proxy {
                to,
                address: address.clone(),
                source,
            })?;
        }
        Ok(stream)
    }

    async fn open_tls(
        &self,
        stream: TcpStream,
        tls: &tls::Prepared,
        config: &Arc<ClientConfig>,
        client_certificate: bool,
    ) -> Result<(Connection, Driver), Cause> {
        let to = self.to;
        let stream = self.prepare(stream)?;
        let connecting = TlsConnector::from(config.clone()).connect(tls.name.clone(), stream);
        let doing = format!("in the TLS handshake with {to}");
        let stream = self.bound.of(doing, connecting).await?;
        let stream = stream.map_err(|source| Cause::Handshake {
            to,
            name: tls.name.to_str().into_owned(),
            source,
        })?;
        let (_, session) = stream.get_ref();
        if session.alpn_protocol() != Some(b"h2") {
            return Err(Cause::Alpn { to });
        }
        let negotiated = Tls::new(session, client_certificate);
        self.speak(Box::new(stream), Some(negotiated)).await
    }

    async fn speak(
        &self,
        io: Box<dyn Io>,
        tls: Option<Tls>,
    ) -> Result<(Connection, Driver), Cause> {
        let to = self.to;
        let about = Connected {
            peer: to.to_string(),
            since: rfc3339(Clock::system().now()),
            tls,
        };
        let opening = connection::open(io, about, self.config.clone(), self.executor.clone());
        let doing = format!("waiting for {to} to speak HTTP/2");
        let opened = self.bound.of(doing, opening).await?;
        opened.map_err(|found| Cause::NotHttp2 { to, found })
    }

    /// Unacknowledged bytes end the connection after the keepalive timeout, so a call on a connection
    /// that was cut while idle fails soon, although pings wait for their interval.
    fn prepare(&self, stream: TcpStream) -> Result<TcpStream, Cause> {
        let limit = self.config.keepalive.timeout.as_millis();
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        stream
            .set_nodelay(true)
            .and_then(|()| Ok(rustix::net::sockopt::set_tcp_user_timeout(&stream, limit)?))
            .map_err(|source| self.failed(source))?;
        Ok(stream)
    }

    fn failed(&self, source: io::Error) -> Cause {
        let address = self.to;
        Cause::Connect(dial::Error::Connect { address, source })
    }
}

/// A moment by which something must be done, and how long that was from the start.
#[derive(Clone, Copy)]
struct Bound {
    until: Instant,
    after: Duration,
}

impl Bound {
    fn new(after: Duration) -> Self {
        let until = clock::after(after);
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
