//! Probes an application over HTTP, by a TCP connection, or by gRPC's health check.
//!
//! A [`Client`] sends every kind from one source address, which traffic capture leaves alone, and
//! bounds each with the timeout of its [`Probe`]. The [`Outcome`] is a status for the prober and the
//! beginning of the body. One call is one probe; thresholds are the kubelet's.

mod grpc;
mod http;

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use ::http::{HeaderMap, StatusCode};
use bytes::Bytes;

use crate::dial::{self, Dialer};
use crate::http_client::{self, Redirects};
use crate::unverified_tls;

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

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer within {0:?}")]
    Late(Duration),
    #[error(transparent)]
    Connect(#[from] dial::Error),
    #[error(transparent)]
    Http(#[from] http_client::Error),
    #[error(transparent)]
    Grpc(#[from] grpc::Error),
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
    pub async fn probe(&self, probe: &Probe, headers: &HeaderMap) -> Result<Outcome, Error> {
        let end = crate::clock::after(probe.timeout);
        let connect = || self.dialer.connect(&probe.host, probe.port);
        let probing = async {
            match &probe.kind {
                Kind::Http { is_https, path } => {
                    let request = http::request(*is_https, &probe.host, probe.port, path, headers)?;
                    return Ok(http::get(&self.http, request, end).await?);
                }
                Kind::Tcp => drop(connect().await?),
                Kind::Grpc { service } => {
                    grpc::check(connect().await?, service, headers).await?;
                }
            }
            Ok(Outcome {
                status: StatusCode::OK,
                body: Bytes::new(),
            })
        };
        let outcome = tokio::time::timeout_at(end, probing).await;
        outcome.map_err(|_| Error::Late(probe.timeout))?
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
