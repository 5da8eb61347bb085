//! Shares one TLS HTTP/2 connection to istiod between xDS streams and certificate requests.
//!
//! [`Istiod`] is a cheap handle; the future made with it dials while a call waits for a connection.
//! Names, certificate files and the token are read again whenever they are used.

mod connection;
mod dial;
#[cfg(test)]
pub(crate) mod fake;
mod frames;
mod hosts;
pub mod probe;
pub mod refusal;
pub mod status;
pub mod tls;
pub mod token;
mod worker;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Scheme;
use http::{HeaderMap, HeaderValue, Method, Uri, header};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tonic::Code;

pub use connection::Connection;
pub use dial::Limits;
use hosts::Hosts;
pub(crate) use hosts::MAX_SILENCE;
use status::{Record, Status};
use worker::{Waiter, Worker};

use crate::clock::rfc3339;
use crate::dial::proxy::Proxy;
use crate::identity::SpiffeId;
use crate::metrics::Registry;
use crate::problem::{self, Problem, codes};

/// The body of a request to istiod.
pub type Body = tonic::body::Body;

const USER_AGENT: &str = concat!("istio-agent/", env!("CARGO_PKG_VERSION"));

/// Where istiod is and how to speak to it.
#[derive(Clone)]
pub struct Config {
    /// `host:port`, resolved again at each dial.
    pub address: String,
    /// The proxy that leads there.
    pub proxy: Option<Proxy>,
    pub security: Security,
    pub token: token::Source,
    /// What sets the address.
    pub setting: &'static str,
    /// The caller, as the agent's settings name it.
    pub identity: SpiffeId,
    /// Headers of every call: `clusterid`, and `XDS_HEADER_*` or `CA_HEADER_*`. Names are lower case.
    pub metadata: Vec<(http::HeaderName, HeaderValue)>,
    pub keepalive: Keepalive,
    pub limits: Limits,
    /// Control planes that are used while this one fails, in this order. They have no others.
    pub others: Vec<Config>,
}

/// What protects the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    Plaintext,
    Tls(tls::Config),
}

/// HTTP/2 pings on a connection with open streams.
#[derive(Clone, Copy, Debug)]
pub struct Keepalive {
    pub interval: Duration,
    pub timeout: Duration,
}

/// A handle to the connection to istiod.
#[derive(Clone, Debug)]
pub struct Istiod {
    shared: Arc<Shared>,
    queue: mpsc::UnboundedSender<Waiter>,
}

#[derive(Debug)]
struct Shared {
    hosts: Arc<Hosts>,
    token: token::Reader,
    connected: watch::Sender<Option<Connection>>,
    record: Record,
}

impl fmt::Debug for Config {
    /// Names the headers only, as their values may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.metadata.iter().map(|(name, _)| name).collect();
        f.debug_struct("Config")
            .field("address", &self.address)
            .field("security", &self.security)
            .field("token", &self.token)
            .field("metadata", &names)
            .field("keepalive", &self.keepalive)
            .field("limits", &self.limits)
            .field("others", &self.others)
            .finish()
    }
}

/// The future that owns the connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection to istiod is closed because the agent is stopping")]
pub struct Closed;

/// A handle, and the future that owns the connection. That ends, and the connection with it, when
/// every handle is dropped or `stop` is cancelled.
pub fn new(
    config: Config,
    registry: &Registry,
    stop: CancellationToken,
) -> (Istiod, impl Future<Output = ()> + Send + 'static + use<>) {
    let token = token::Reader::new(config.token.clone());
    let hosts = Arc::new(Hosts::new(config));
    let (queue, waiters) = mpsc::unbounded_channel();
    let connected = watch::Sender::new(None);
    let record = Record::new(registry);
    let worker = Worker::new(hosts.clone(), waiters, connected.clone(), record.clone());
    let shared = Arc::new(Shared {
        token,
        hosts,
        connected: connected.clone(),
        record,
    });
    let run = async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = worker.run() => {}
        }
        connected.send_replace(None);
    };
    (Istiod { shared, queue }, run)
}

impl Istiod {
    /// Waits until there is a connection, for as long as it takes.
    pub async fn connection(&self) -> Result<Connection, Closed> {
        match self.wait(false).await {
            Some(Ok(connection)) => Ok(connection),
            // Errors are only for `try_connection`.
            Some(Err(_)) | None => Err(Closed),
        }
    }

    /// Like [`Istiod::connection`], but gives up with the error of the dial that is under way or
    /// comes next.
    pub async fn try_connection(&self) -> Result<Connection, Problem> {
        self.wait(true).await.unwrap_or_else(|| {
            let config = self.shared.hosts.current();
            Err(config.problem(
                codes::AGENT_STOPPING,
                "not connected, because the agent is stopping",
            ))
        })
    }

    async fn wait(&self, once: bool) -> Option<Result<Connection, Problem>> {
        if let Some(connection) = worker::current(&self.shared.connected) {
            return Some(Ok(connection));
        }
        let (reply, answer) = oneshot::channel();
        self.queue.send(Waiter { once, reply }).ok()?;
        answer.await.ok()
    }

    /// A gRPC call of `path` with everything but the message: the configured headers and the token as
    /// its file holds it now.
    pub fn request(&self, path: &'static str, body: Body) -> http::Request<Body> {
        let mut request = http::Request::new(body);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri(path);
        *request.headers_mut() = self.headers();
        request
    }

    /// The address in use, or dialed next, as configured.
    pub fn address(&self) -> &str {
        &self.shared.hosts.current().address
    }

    /// The connection now, and the dials so far.
    pub fn status(&self) -> Status {
        let connection = worker::current(&self.shared.connected);
        let (dials, last_error) = self.shared.record.latest();
        let claims = self.shared.token.last().claims;
        Status {
            address: self.address().to_owned(),
            connected: connection.map(|connection| connection.about().clone()),
            dials,
            last_error,
            token_expires: claims.and_then(|claims| claims.expiry()).map(rfc3339),
        }
    }

    /// Leaves a connection after UNAUTHENTICATED if it was opened without the client certificate,
    /// which may have come since. Returns whether it did.
    pub(crate) fn leave_if_unauthenticated(
        &self,
        connection: &Connection,
        code: Option<Code>,
    ) -> bool {
        let is_configured = match &self.shared.hosts.current().security {
            Security::Plaintext => false,
            Security::Tls(tls) => tls.client.is_some(),
        };
        let leaves = code == Some(Code::Unauthenticated)
            && is_configured
            && !connection.has_client_certificate();
        if leaves {
            self.leave(connection);
        }
        leaves
    }

    /// Has the next call dial anew. Streams on this connection may finish.
    pub(crate) fn leave(&self, connection: &Connection) {
        worker::forget(&self.shared.connected, &connection.identity());
    }

    /// Whether there is more than one control plane.
    pub(crate) fn has_others(&self) -> bool {
        self.shared.hosts.has_others()
    }

    /// Records that a call on this connection was answered as it should.
    pub(crate) fn answered(&self, connection: &Connection) {
        self.shared.hosts.answered(&connection.config);
        self.shared.record.answered();
    }

    /// Records that a call on this connection has failed, or was not answered at all. Returns whether
    /// another control plane is in use now.
    pub(crate) fn failed(
        &self,
        connection: &Connection,
        is_silent: bool,
        problem: &Problem,
    ) -> bool {
        let shared = &self.shared;
        shared.record.failed(problem);
        let hosts = &shared.hosts;
        let has_moved = hosts.failed(&connection.config, is_silent, problem);
        // Streams on it may finish.
        let is_left = |current: &mut Connection| match has_moved {
            true => Arc::ptr_eq(&current.config, &connection.config),
            false => is_silent && current.is(&connection.identity()),
        };
        let connected = &shared.connected;
        connected.send_if_modified(|current| current.take_if(is_left).is_some());
        has_moved
    }

    /// The problem with a call that ended with this status.
    pub(crate) fn explain(
        &self,
        unimplemented: &'static problem::Code,
        status: &tonic::Status,
    ) -> Problem {
        let (config, token) = (self.shared.hosts.current(), self.shared.token.last());
        refusal::explain(config, &token, unimplemented, status)
    }

    /// Waits until the file of the token may have changed. Cancel safe.
    pub(crate) async fn token_changed(&self) {
        self.shared.token.changed().await;
    }

    /// Scheme and authority of every call, with a path.
    pub(crate) fn uri(&self, path: &'static str) -> Uri {
        self.shared.hosts.current().uri(path)
    }

    /// Headers of every call. Configured ones cannot replace gRPC's own.
    pub(crate) fn headers(&self) -> HeaderMap {
        let connection = worker::current(&self.shared.connected);
        let has_certificate = connection.is_some_and(|it| it.has_client_certificate());
        let authorization = self.shared.token.authorization(has_certificate);
        self.shared.hosts.current().headers(authorization)
    }
}

impl Config {
    /// The control plane, in problems.
    pub fn subject(&self) -> String {
        format!("istiod at {} ({})", self.address, self.setting)
    }

    /// A problem with this control plane.
    pub(crate) fn problem(&self, code: &'static problem::Code, found: impl ToString) -> Problem {
        Problem::new(code, self.subject(), found)
    }

    /// Scheme and authority of every call, with a path.
    pub(crate) fn uri(&self, path: &'static str) -> Uri {
        let (scheme, authority) = match &self.security {
            Security::Plaintext => (Scheme::HTTP, self.address.clone()),
            Security::Tls(tls) => (Scheme::HTTPS, bracketed(&tls.server_name)),
        };
        let builder = Uri::builder().scheme(scheme).authority(authority);
        // An invalid authority cannot be dialed either, so the placeholder never leaves the agent.
        let uri = builder.path_and_query(path).build();
        uri.unwrap_or_else(|_| Uri::from_static("http://istiod.invalid/"))
    }

    /// Headers of every call. Configured ones cannot replace gRPC's own.
    pub(crate) fn headers(&self, authorization: Option<HeaderValue>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.metadata {
            headers.append(name, value.clone());
        }
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        let grpc = HeaderValue::from_static("application/grpc");
        headers.insert(header::CONTENT_TYPE, grpc);
        headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
        if let Some(value) = authorization {
            headers.insert(header::AUTHORIZATION, value);
        }
        headers
    }
}

/// An IPv6 address stands in brackets in an authority.
fn bracketed(name: &str) -> String {
    match name.parse::<std::net::Ipv6Addr>() {
        Ok(_) => format!("[{name}]"),
        Err(_) => name.to_owned(),
    }
}
