//! Probes an application with an HTTP request, a TCP connection, or gRPC's health check.
//!
//! A [`Client`] connects from one source address, whose traffic is not captured, and limits each probe by
//! the timeout of its [`Probe`]. The [`Outcome`] is a status for the prober and the beginning of the body.
//! One call is one probe; the kubelet applies the thresholds.

use std::error::Error as StdError;
use std::net::IpAddr;
use std::time::Duration;
use std::{fmt, io};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, StatusCode, Uri, header};
use hyper::client::conn::http2::handshake;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::net::dial::Dialer;
use crate::net::executor::ConnectionTasks;
use crate::net::http_client::{self, Redirects};
use crate::net::unverified_tls;
use crate::problem::{Code, Problem};
use crate::proto::grpc_health_v1::HealthCheckRequest;
use crate::proto::grpc_health_v1::health_check_response::ServingStatus;
use crate::proto::grpc_health_v1::health_client::HealthClient;
use crate::runtime::clock::after;
use crate::runtime::duration::rounded;
use crate::runtime::lifecycle::{BoxError, with_causes};

/// The maximum number of bytes of a body that an outcome has.
const MAX_BODY: usize = 10 << 10;
/// The time before the end of the timeout at which reading the body ends, so that the status arrives in time.
const RESERVE: Duration = Duration::from_millis(1);

/// Headers that are not forwarded, because they describe one connection or the body of the original request.
const NOT_COPIED: [&str; 9] = [
    "connection",
    "content-length",
    "http2-settings",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
/// The maximum size of the response of a gRPC health check, in bytes. The response consists of one number.
const MAX_ANSWER: usize = 4 << 10;

/// The target, kind and timeout of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    pub host: String,
    pub port: u16,
    pub kind: Kind,
    pub timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A GET of the path, which may have a query.
    Http {
        is_https: bool,
        path: String,
    },
    Tcp,
    /// A health check of the service, or with an empty name of the server.
    Grpc {
        service: String,
    },
}

/// The application's response.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    pub status: StatusCode,
    /// The first 10 KiB of the body.
    pub body: Bytes,
}

/// The settings of a [`Client`].
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The source address of connections. Applications are probed at addresses of its family.
    pub source: IpAddr,
    /// True to offer HTTP/2 to applications with TLS.
    pub offers_http2: bool,
    /// True to reuse HTTP connections for the next probe of the same application.
    pub keeps_connections: bool,
}

/// Sends probes.
#[derive(Debug)]
pub struct Client {
    dialer: Dialer,
    http: http_client::Client,
}

impl Client {
    pub fn new(config: Config) -> Result<Self, rustls::Error> {
        let dialer = Dialer::from_source(config.source);
        let http = http_client::Client::new(http_client::Config {
            dialer: dialer.clone(),
            tls: Some(unverified_tls::config(config.offers_http2)?),
            redirects: Redirects::SameHost,
            keeps_connections: config.keeps_connections,
            ..http_client::Config::default()
        });
        Ok(Self { dialer, http })
    }

    /// Probes once. `headers` are sent with an HTTP request; gRPC sends the user agent among them.
    pub async fn probe(&self, probe: &Probe, headers: &HeaderMap) -> Result<Outcome, Problem> {
        let end = after(probe.timeout);
        let (code, found) = match timeout_at(end, self.send(probe, headers, end)).await {
            Ok(Ok(outcome)) => return Ok(outcome),
            Ok(Err(error)) => (code(error.as_ref()), with_causes(error.as_ref())),
            Err(_) => (Code::ProbeLate, format!("no answer within {}", rounded(probe.timeout))),
        };
        Err(Problem::new(code, probe, found))
    }

    /// Sends a probe. `end` only limits the reading of an HTTP body.
    async fn send(
        &self,
        probe: &Probe,
        headers: &HeaderMap,
        end: Instant,
    ) -> Result<Outcome, BoxError> {
        if let Kind::Http { is_https, path } = &probe.kind {
            let scheme = if *is_https { "https" } else { "http" };
            let request = http_request(url(scheme, probe, path)?, headers);
            return Ok(get(&self.http, request, end).await?);
        }
        let stream = self.dialer.connect(&probe.host, probe.port).await?;
        if let Kind::Grpc { service } = &probe.kind {
            check_health(stream, probe, service, headers).await?;
        }
        Ok(Outcome { status: StatusCode::OK, body: Bytes::new() })
    }
}

/// Returns the code of a closed port if a cause of the error is a refused connection, otherwise a general code.
fn code(error: &(dyn StdError + 'static)) -> Code {
    match error.downcast_ref::<io::Error>().map(io::Error::kind) {
        Some(io::ErrorKind::ConnectionRefused) => Code::ProbePortClosed,
        _ => error.source().map_or(Code::ProbeFailed, code),
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Http { path, .. } => write!(f, "HTTP {path}"),
            Kind::Tcp => write!(f, "TCP"),
            Kind::Grpc { service } => write!(f, "gRPC {service}"),
        }?;
        write!(f, " at port {}", self.port)
    }
}

/// Returns the URL of a probe.
fn url(scheme: &str, probe: &Probe, path: &str) -> Result<Uri, http_client::Error> {
    let mut host = probe.host.clone();
    if host.contains(':') {
        host = format!("[{host}]");
    }
    let slash = if path.starts_with('/') { "" } else { "/" };
    let url = format!("{scheme}://{host}:{}{slash}{path}", probe.port);
    url.parse().map_err(|_| http_client::Error::Url { found: url })
}

fn http_request(url: Uri, headers: &HeaderMap) -> Request<Bytes> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = url;
    *request.headers_mut() = headers.clone();
    for name in NOT_COPIED {
        request.headers_mut().remove(name);
    }
    request
}

/// Sends an HTTP request. A redirect to another host is a success; any other status is the outcome, even if the
/// body cannot be read.
async fn get(
    client: &http_client::Client,
    request: Request<Bytes>,
    end: Instant,
) -> Result<Outcome, http_client::Error> {
    let (head, mut body) = client.send(request).await?.into_parts();
    let mut beginning = BytesMut::new();
    let reading = async {
        if body.read_into(&mut beginning, MAX_BODY).await.is_ok() {
            body.discard().await;
        }
    };
    let _ = timeout_at(end.checked_sub(RESERVE).unwrap_or(end), reading).await; // The status counts.
    let body = beginning.freeze();
    let mut status = head.status;
    if status.is_redirection() {
        status = StatusCode::OK;
    }
    Ok(Outcome { status, body })
}

/// Calls gRPC's health check once, in plaintext. Fails unless the response is SERVING.
async fn check_health(
    stream: TcpStream,
    probe: &Probe,
    service: &str,
    headers: &HeaderMap,
) -> Result<(), BoxError> {
    let tasks = ConnectionTasks::default();
    let (mut sender, connection) = handshake(tasks.executor(), TokioIo::new(stream))
        .await
        .map_err(|error| format!("the application does not speak HTTP/2: {error}"))?;
    // An error of the connection also fails the call.
    tasks.executor().spawn(async { drop(connection.await) });
    let mut request = tonic::Request::new(HealthCheckRequest { service: service.to_owned() });
    let agent = headers.get(header::USER_AGENT);
    if let Some(agent) = agent.and_then(|agent| agent.as_bytes().try_into().ok()) {
        request.metadata_mut().insert("user-agent", agent);
    }
    let origin = url("http", probe, "")?;
    let channel = tower::service_fn(move |request| sender.send_request(request));
    let answer = HealthClient::with_origin(channel, origin)
        .max_decoding_message_size(MAX_ANSWER)
        .check(request)
        .await
        .map_err(|status| format!("the health check failed: {status}"))?
        .into_inner();
    let found = match ServingStatus::try_from(answer.status) {
        Ok(ServingStatus::Serving) => return Ok(()),
        Ok(other) => other.as_str_name().to_owned(),
        Err(_) => answer.status.to_string(),
    };
    Err(format!("the application answers {found}, expected SERVING").into())
}

#[cfg(test)]
mod tests;
