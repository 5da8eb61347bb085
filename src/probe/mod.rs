//! Asks an application whether it is well: over HTTP, by a TCP connection, or by gRPC's health
//! check.
//!
//! A [`Client`] sends every kind from one [`Origin`], the source address that traffic capture leaves
//! alone, and bounds each with the timeout of its [`Probe`]. The answer is an [`Outcome`]: a status
//! for whoever asked, and what of the body is worth passing on.
//!
//! Does not repeat or count: one call is one look.

mod connect;
mod grpc;
mod http;
mod tls;

use std::fmt;
use std::time::Duration;

use ::http::{HeaderMap, StatusCode};
use bytes::Bytes;

pub use connect::Origin;
use http::Pool;

/// What to ask, and how long that may take.
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

/// What an application said.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    pub status: StatusCode,
    /// The beginning of the body.
    pub body: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer within {0:?}")]
    Late(Duration),
    #[error(transparent)]
    Connect(#[from] connect::Error),
    #[error(transparent)]
    Http(#[from] http::Error),
    #[error(transparent)]
    Grpc(#[from] grpc::Error),
}

/// How probes are sent.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub origin: Origin,
    /// Whether HTTP/2 is offered to applications with TLS.
    pub offers_http2: bool,
    /// Whether HTTP connections are kept for the next probe of the same application.
    pub keeps_connections: bool,
}

/// Sends probes.
pub struct Client {
    origin: Origin,
    tls: tls::Connector,
    pool: Option<Pool>,
}

impl Client {
    pub fn new(config: Config) -> Result<Self, rustls::Error> {
        Ok(Self {
            origin: config.origin,
            tls: tls::connector(config.offers_http2)?,
            pool: config.keeps_connections.then(Pool::default),
        })
    }

    /// Asks once. `headers` are those of the HTTP request; gRPC takes the user agent among them.
    pub async fn ask(&self, probe: &Probe, headers: &HeaderMap) -> Result<Outcome, Error> {
        let end = tokio::time::Instant::now() + probe.timeout;
        let asked = async {
            match &probe.kind {
                Kind::Http { is_https, path } => {
                    let get = http::Get::new(*is_https, &probe.host, probe.port, path, headers)?;
                    self.get(get, end).await
                }
                Kind::Tcp => {
                    connect::connect(self.origin, &probe.host, probe.port).await?;
                    Ok(Outcome::from(StatusCode::OK))
                }
                Kind::Grpc { service } => {
                    let stream = connect::connect(self.origin, &probe.host, probe.port).await?;
                    grpc::check(stream, service, headers).await?;
                    Ok(Outcome::from(StatusCode::OK))
                }
            }
        };
        let asked = tokio::time::timeout_at(end, asked).await;
        asked.map_err(|_| Error::Late(probe.timeout))?
    }
}

impl From<StatusCode> for Outcome {
    fn from(status: StatusCode) -> Self {
        let body = Bytes::new();
        Self { status, body }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
