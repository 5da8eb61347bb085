//! Dials istiod once: resolves the name, and tries its addresses through TCP, TLS and the first HTTP/2 frame.
//!
//! A dial, with its TCP connections, is limited by [`Limits::total`]. While there are other addresses to try,
//! the tunnel, TLS and HTTP/2 of one address are limited by [`Limits::per_address`]. The worker retries.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::UnixTime;
use rustls::{CertificateError, ClientConfig, Error};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use super::connection::{self, Connection, Driver, Io};
use super::frames::Loss;
use super::status::{Connected, Tls};
use super::tls;
use super::{Config, Security};
use crate::net::address;
use crate::net::dial::proxy::Proxy;
use crate::net::dial::{self, Dialer};
use crate::net::executor::{ConnectionTasks, Executor};
use crate::problem::{Code, Problem};
use crate::runtime::clock::{self, Clock, rfc3339};
use crate::runtime::duration::{rounded, scaled};
use crate::runtime::lifecycle::with_causes;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub total: Duration,
    /// The limit for tunnel, TLS and HTTP/2 to one address of several.
    pub per_address: Duration,
    /// The least time between the starts of two dials.
    pub least_between: Duration,
    /// The longest time that a wait adds to it. A returning istiod is found within both and the time of one dial.
    pub max_wait: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            total: Duration::from_secs(10),
            per_address: Duration::from_secs(5),
            least_between: Duration::from_secs(1),
            max_wait: Duration::from_secs(1),
        }
    }
}

#[derive(Debug)]
pub(super) struct Failure {
    pub(super) problem: Problem,
    pub(super) timed_out: bool,
    /// True if the peer sent a TLS alert, as it does when it rejects the client certificate. With TLS 1.3 the
    /// alert comes after the handshake.
    is_alert: bool,
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self { problem, timed_out: false, is_alert: false }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Step {
    /// The code of the problem if it times out.
    code: Code,
    /// The action that times out, in the words of the problem.
    action: &'static str,
}

const READ_FILES: Step = Step::new(Code::IstiodTimeout, "reading certificate files");
const RESOLVE: Step = Step::new(Code::IstiodNameNotResolved, "resolving the name");
const CONNECT: Step = Step::new(Code::IstiodNotReachable, "connecting");
const TUNNEL: Step = Step::new(Code::IstiodProxyUnreachable, "waiting for the proxy");
const HANDSHAKE: Step = Step::new(Code::IstiodTimeout, "in the TLS handshake");
const START_HTTP2: Step = Step::new(Code::IstiodTimeout, "waiting for HTTP/2");

impl Step {
    const fn new(code: Code, action: &'static str) -> Self {
        Self { code, action }
    }
}

/// Makes the problem of a step before the connection. With a proxy, this step is about the proxy.
fn unreachable_problem(config: &Config, code: Code, found: String) -> Problem {
    let Some(Proxy { host, port, .. }) = &config.proxy else {
        return config.problem(code, found);
    };
    let found = format!("by the proxy {host}:{port} (HTTPS_PROXY): {found}");
    config.problem(Code::IstiodProxyUnreachable, found)
}

fn connect_failure(config: &Config, error: &dial::Error) -> Failure {
    let code = match error {
        dial::Error::Resolve { .. } | dial::Error::NoAddress { .. } => RESOLVE.code,
        dial::Error::Connect { source, .. } => match source.kind() {
            io::ErrorKind::ConnectionRefused => Code::IstiodConnectionRefused,
            io::ErrorKind::ConnectionReset => Code::IstiodConnectionLost,
            io::ErrorKind::NetworkUnreachable | io::ErrorKind::AddrNotAvailable => {
                Code::IstiodNoRoute
            }
            _ => CONNECT.code,
        },
        _ => CONNECT.code,
    };
    unreachable_problem(config, code, with_causes(error)).into()
}

fn handshake_failure(
    config: &Config,
    tls: &tls::Prepared,
    to: SocketAddr,
    error: &io::Error,
) -> Failure {
    let cause = tls::error(error);
    let (code, found) = match cause {
        Some(Error::InvalidCertificate(refused)) => refused_certificate(tls, refused),
        Some(Error::Other(cause)) => (Code::IstiodCertificateUnusable, cause.to_string()),
        Some(Error::InvalidMessage(_)) => (Code::IstiodNotTls, "it answered without TLS".into()),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            (Code::IstiodTlsRefused, "it closed the connection".to_owned())
        }
        _ => (Code::IstiodTlsRefused, error.to_string()),
    };
    let problem = config.problem(code, format!("TLS handshake with {to} failed: {found}"));
    Failure { is_alert: matches!(cause, Some(Error::AlertReceived(_))), ..problem.into() }
}

fn refused_certificate(tls: &tls::Prepared, refused: &CertificateError) -> (Code, String) {
    use CertificateError as E;
    match refused {
        E::NotValidForNameContext { presented, .. } => {
            // Each name is in Rust's notation, such as DnsName("istiod").
            let names: Vec<_> = presented
                .iter()
                .filter_map(|name| name.trim_end_matches(['"', ')']).rsplit(['"', '(']).next())
                .collect();
            let expected = tls.name.to_str();
            let names = names.join(", ");
            let found = format!("its certificate is not for {expected:?}, but for {names}");
            (Code::IstiodCertificateName, found)
        }
        E::ExpiredContext { time, not_after } => {
            (Code::IstiodCertificateExpired, date_mismatch("expired", *not_after, *time, "ago"))
        }
        E::NotValidYetContext { time, not_before } => {
            let found = date_mismatch("is not valid before", *not_before, *time, "from now");
            (Code::IstiodCertificateNotYetValid, found)
        }
        // The roots of two meshes may have the same name, and then only the signature differs.
        E::UnknownIssuer | E::BadSignature => {
            let found = format!("its certificate is not signed by a root of {}", tls.roots);
            (Code::IstiodCertificateUntrusted, found)
        }
        _ => (Code::IstiodCertificateUnusable, refused.to_string()),
    }
}

fn date_mismatch(what: &str, date: UnixTime, now: UnixTime, side: &str) -> String {
    let apart = rounded(Duration::from_secs(date.as_secs().abs_diff(now.as_secs())));
    let [date, now] = [date, now].map(|time| {
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(time.as_secs()));
        time.map(rfc3339).unwrap_or_default()
    });
    format!("its certificate {what} {date}, {apart} {side}; it is {now} here")
}

/// A separate connection, which is closed when this is dropped.
#[derive(Debug)]
pub struct Probe {
    pub connection: Connection,
    _tasks: ConnectionTasks,
}

/// Opens a connection for the doctor, as the agent does, but within `limit` and without retries.
pub async fn open_probe(config: &Config, limit: Duration) -> Result<Probe, Problem> {
    let tasks = ConnectionTasks::default();
    let mut config = config.clone();
    (config.limits.total, config.limits.per_address) = (limit, scaled(limit, 0.5));
    let (connection, driver) = dial(&config.into(), &Dialer::default(), tasks.executor())
        .await
        .map_err(|failure| failure.problem)?;
    tasks.executor().spawn(async move {
        let _ = driver.run(|| {}).await; // Calls on the connection fail with the reason.
    });
    Ok(Probe { connection, _tasks: tasks })
}

/// Opens a connection to istiod, through the proxy if there is one. Tries all addresses, and records in `dialer`
/// those that fail. Fails with the last failure.
pub(super) async fn dial(
    config: &Arc<Config>,
    dialer: &Dialer,
    executor: Executor,
) -> Result<(Connection, Driver), Failure> {
    let total = Bound::new(config, config.limits.total);
    let tls = match &config.security {
        Security::Plaintext => None,
        Security::Tls(tls) => Some(total.run(READ_FILES, tls::prepare(tls)).await??),
    };
    let (host, port) = host_and_port(config)?;
    let (first_hop, first_hop_port) = match &config.proxy {
        Some(proxy) => (proxy.host.as_str(), proxy.port),
        None => (host, port),
    };
    let addresses = total
        .run(RESOLVE, dial::resolve(first_hop, first_hop_port))
        .await?
        .map_err(|error| connect_failure(config, &error))?;
    let mut candidates = dialer.candidates(addresses);
    let mut last_failure = None;
    while let Some((to, stream)) = total.run(CONNECT, candidates.connect()).await? {
        let bound =
            if candidates.is_empty() { total } else { total.at_most(config.limits.per_address) };
        let attempt = Attempt { config, to, bound, executor: &executor };
        match attempt.open(stream, tls.as_ref()).await {
            Ok(open) => return Ok(open),
            Err(failure) => {
                tracing::debug!(target: "xdsproxy", "{}", failure.problem);
                dialer.record_failure(to);
                last_failure = Some(failure);
            }
        }
    }
    Err(last_failure.unwrap_or_else(|| {
        let no_address = dial::Error::NoAddress { host: first_hop.to_owned() };
        connect_failure(config, &candidates.errors.pop().unwrap_or(no_address))
    }))
}

fn host_and_port(config: &Config) -> Result<(&str, u16), Problem> {
    address::split_lenient(&config.address)
        .ok_or_else(|| config.problem(Code::IstiodAddressInvalid, "it is not host:port"))
}

struct Attempt<'a> {
    config: &'a Arc<Config>,
    to: SocketAddr,
    bound: Bound<'a>,
    executor: &'a Executor,
}

impl Attempt<'_> {
    /// Opens the connection with the client certificate, if there is one, and without it if istiod rejects it,
    /// because an old root may have signed it. istiod then authenticates the token.
    async fn open(
        &self,
        stream: TcpStream,
        tls: Option<&tls::Prepared>,
    ) -> Result<(Connection, Driver), Failure> {
        let stream = self.open_tunnel(stream).await?;
        let Some(tls) = tls else {
            return self.start_http2(Box::new(stream), None).await;
        };
        let outcome = self.open_tls(stream, tls, &tls.config, tls.without_client.is_some()).await;
        match (outcome, &tls.without_client) {
            (Err(failure), Some(without)) if failure.is_alert => {
                let found = failure.problem.found;
                tracing::warn!("{}", self.config.problem(Code::ClientCertificateRefused, found));
                let stream = self
                    .bound
                    .run(CONNECT, TcpStream::connect(self.to))
                    .await?
                    .map_err(|error| self.connect_error(error))?;
                self.open_tls(self.open_tunnel(stream).await?, tls, without, false).await
            }
            (outcome, _) => outcome,
        }
    }

    /// Sets the options of the socket, and requests a tunnel to istiod from the proxy, if there is one.
    async fn open_tunnel(&self, mut stream: TcpStream) -> Result<TcpStream, Failure> {
        self.set_options(&stream)?;
        if let Some(proxy) = &self.config.proxy {
            let (host, port) = host_and_port(self.config)?;
            self.bound.run(TUNNEL, proxy.tunnel(&mut stream, host, port)).await?.map_err(
                |error| {
                    let to = self.to;
                    let found =
                        format!("the proxy {to} (HTTPS_PROXY) does not open a tunnel: {error}");
                    self.config.problem(Code::IstiodProxyRefused, found)
                },
            )?;
        }
        Ok(stream)
    }

    /// Encrypts the stream with this `config` of `tls`, and starts HTTP/2. `client_certificate` is true if the
    /// config has one.
    async fn open_tls(
        &self,
        stream: TcpStream,
        tls: &tls::Prepared,
        config: &Arc<ClientConfig>,
        client_certificate: bool,
    ) -> Result<(Connection, Driver), Failure> {
        let to = self.to;
        let handshake = TlsConnector::from(config.clone()).connect(tls.name.clone(), stream);
        let stream = self
            .bound
            .run(HANDSHAKE, handshake)
            .await?
            .map_err(|error| handshake_failure(self.config, tls, to, &error))?;
        let (_, session) = stream.get_ref();
        if session.alpn_protocol() != Some(b"h2") {
            let found = format!("{to} does not offer HTTP/2 over TLS (ALPN)");
            return Err(self.config.problem(Code::IstiodNotGrpc, found).into());
        }
        let negotiated = Tls::new(session, client_certificate);
        self.start_http2(Box::new(stream), Some(negotiated)).await
    }

    /// Starts HTTP/2, and waits for istiod's settings.
    async fn start_http2(
        &self,
        io: Box<dyn Io>,
        tls: Option<Tls>,
    ) -> Result<(Connection, Driver), Failure> {
        let to = self.to;
        let about = Connected { peer: to.to_string(), since: rfc3339(Clock::system().now()), tls };
        let opening = connection::open(io, about, self.config.clone(), self.executor.clone());
        self.bound.run(START_HTTP2, opening).await?.map_err(|loss| {
            let (code, what) = match loss {
                Loss::Alert(_) => (Code::IstiodTlsRefused, "ended the TLS connection"),
                Loss::NotHttp2(_) => (Code::IstiodNotGrpc, "does not speak HTTP/2"),
                Loss::Ended(_) => (Code::IstiodConnectionLost, "did not start HTTP/2"),
            };
            let problem = self.config.problem(code, format!("{to} {what}: {loss}"));
            Failure { is_alert: matches!(loss, Loss::Alert(_)), ..problem.into() }
        })
    }

    /// Sets options of the socket. With the timeout, unacknowledged bytes close the connection, so a call on a
    /// connection that broke while idle fails soon, although pings wait for their interval.
    fn set_options(&self, stream: &TcpStream) -> Result<(), Failure> {
        let limit = self.config.keepalive.timeout.as_millis();
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        stream
            .set_nodelay(true)
            .and_then(|()| Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, limit)?))
            .map_err(|error| self.connect_error(error))
    }

    fn connect_error(&self, source: io::Error) -> Failure {
        connect_failure(self.config, &dial::Error::Connect { address: self.to, source })
    }
}

/// A deadline, and its distance from the start.
#[derive(Clone, Copy)]
struct Bound<'a> {
    config: &'a Config,
    deadline: Instant,
    limit: Duration,
}

impl<'a> Bound<'a> {
    fn new(config: &'a Config, limit: Duration) -> Self {
        Self { config, deadline: clock::after(limit), limit }
    }

    /// Returns this bound, or an earlier one that starts now.
    fn at_most(self, limit: Duration) -> Self {
        std::cmp::min_by_key(self, Self::new(self.config, limit), |bound| bound.deadline)
    }

    /// Runs a step. Fails with a timeout problem if it outlasts this bound.
    async fn run<T>(self, step: Step, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::time::timeout_at(self.deadline, work).await.map_err(|_| {
            let found = format!("timed out after {} {}", rounded(self.limit), step.action);
            let problem = if [RESOLVE, CONNECT].contains(&step) {
                unreachable_problem(self.config, step.code, found)
            } else {
                self.config.problem(step.code, found)
            };
            Failure { timed_out: true, ..problem.into() }
        })
    }
}
