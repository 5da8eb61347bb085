//! Probes an application over HTTP, by a TCP connection, or by gRPC's health check.
//!
//! A [`Client`] sends every kind from one source address, which traffic capture leaves alone, and
//! bounds each with the timeout of its [`Probe`]. The [`Outcome`] is a status for the prober and the
//! beginning of the body. One call is one probe; thresholds are the kubelet's.

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

use crate::clock::after;
use crate::dial::Dialer;
use crate::duration::rounded;
use crate::executor::ConnectionTasks;
use crate::http_client::{self, Redirects};
use crate::lifecycle::{BoxError, with_causes};
use crate::problem::{Code, Problem, codes};
use crate::proto::grpc_health_v1::HealthCheckRequest;
use crate::proto::grpc_health_v1::health_check_response::ServingStatus;
use crate::proto::grpc_health_v1::health_client::HealthClient;
use crate::unverified_tls;

/// What of a body is passed on.
const MAX_BODY: usize = 10 << 10;
/// Time kept back from reading the body, so that the status arrives within the probe's timeout.
const RESERVE: Duration = Duration::from_millis(1);

/// They are about one connection, or about a body that is not passed on.
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
/// More than the one number an answer consists of.
const MAX_ANSWER: usize = 4 << 10;

/// What to probe, and how long that may take.
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

/// The application's answer.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    pub status: StatusCode,
    /// The first 10 KiB of the body.
    pub body: Bytes,
}

/// How probes are sent.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The source address of connections. Applications are probed at addresses of its family.
    pub source: IpAddr,
    /// Whether HTTP/2 is offered to applications with TLS.
    pub offers_http2: bool,
    /// Whether HTTP connections are kept for the next probe of the same application.
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
        let connect = || self.dialer.connect(&probe.host, probe.port);
        let probing = async {
            match &probe.kind {
                Kind::Http { is_https, path } => {
                    let scheme = if *is_https { "https" } else { "http" };
                    let request = http_request(url(scheme, probe, path)?, headers);
                    return Ok(get(&self.http, request, end).await?);
                }
                Kind::Tcp => drop(connect().await?),
                Kind::Grpc { service } => check(connect().await?, probe, service, headers).await?,
            }
            Ok::<_, BoxError>(Outcome {
                status: StatusCode::OK,
                body: Bytes::new(),
            })
        };
        let (code, found) = match timeout_at(end, probing).await {
            Ok(Ok(outcome)) => return Ok(outcome),
            Ok(Err(error)) => (code(error.as_ref()), with_causes(error.as_ref())),
            Err(_) => {
                let limit = rounded(probe.timeout);
                (codes::PROBE_LATE, format!("no answer within {limit}"))
            }
        };
        Err(Problem::new(code, probe, found))
    }
}

fn code(error: &(dyn StdError + 'static)) -> &'static Code {
    match error.downcast_ref::<io::Error>().map(io::Error::kind) {
        Some(io::ErrorKind::ConnectionRefused) => codes::PROBE_PORT_CLOSED,
        _ => error.source().map_or(codes::PROBE_FAILED, code),
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

/// The address of a probe.
fn url(scheme: &str, probe: &Probe, path: &str) -> Result<Uri, http_client::Error> {
    let Probe { host, port, .. } = probe;
    let host = match host.contains(':') {
        true => format!("[{host}]"),
        false => host.to_owned(),
    };
    let slash = if path.starts_with('/') { "" } else { "/" };
    let url = format!("{scheme}://{host}:{port}{slash}{path}");
    url.parse()
        .map_err(|_| http_client::Error::Url { found: url })
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

/// A redirect to another host counts as success. Every other status is the outcome, whatever happens to
/// the body.
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
    let status = match head.status.is_redirection() {
        true => StatusCode::OK,
        false => head.status,
    };
    let body = beginning.freeze();
    Ok(Outcome { status, body })
}

/// Succeeds when the service says that it serves. It is one call in plaintext on a connection of its own.
async fn check(
    io: TcpStream,
    to: &Probe,
    service: &str,
    headers: &HeaderMap,
) -> Result<(), BoxError> {
    let tasks = ConnectionTasks::default();
    let handshake = handshake(tasks.executor(), TokioIo::new(io)).await;
    let failed = |error| format!("the application does not speak HTTP/2: {error}");
    let (mut sender, connection) = handshake.map_err(failed)?;
    // The call learns of an error.
    tasks.executor().spawn(async { drop(connection.await) });
    let mut request = tonic::Request::new(HealthCheckRequest {
        service: service.to_owned(),
    });
    let agent = headers
        .get(header::USER_AGENT)
        .map(|agent| agent.as_bytes());
    if let Some(agent) = agent.and_then(|agent| agent.try_into().ok()) {
        request.metadata_mut().insert("user-agent", agent);
    }
    let origin = url("http", to, "")?;
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
