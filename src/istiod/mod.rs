//! Shares one TLS HTTP/2 connection to istiod between xDS streams and certificate requests.
//!
//! [`Istiod`] is a handle, and its clones share the connection; the future made with it dials while a call
//! waits for a connection. Names, certificate files and the token are read again whenever they are used.

mod connection;
mod dial;
#[cfg(test)]
pub(crate) mod fake;
mod frames;
mod hosts;
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
pub use dial::{Limits, Probe, open_probe};
use hosts::Hosts;
pub(crate) use hosts::MAX_SILENCE;
pub use status::Status;
use status::{Connected, Record};
use worker::{Waiter, Worker};

use crate::metrics::Registry;
use crate::net::dial::proxy::Proxy;
use crate::problem::{self, Problem};
use crate::runtime::clock::rfc3339;
use crate::trust::identity::SpiffeId;
use crate::trust::trust_anchors;

pub type Body = tonic::body::Body;

const USER_AGENT: &str = concat!("istio-agent/", env!("CARGO_PKG_VERSION"));

#[derive(Clone)]
pub struct Config {
    /// `host:port`, resolved again at each dial.
    pub address: String,
    pub proxy: Option<Proxy>,
    pub security: Security,
    pub token: token::Source,
    /// The setting that the address comes from.
    pub setting: &'static str,
    pub identity: SpiffeId,
    /// Headers of every call: `clusterid`, and `XDS_HEADER_*` or `CA_HEADER_*`. Names are lower case.
    pub metadata: Vec<(http::HeaderName, HeaderValue)>,
    pub keepalive: Keepalive,
    pub limits: Limits,
    /// Control planes that are used while this one fails, in this order. Their own `fallbacks` are empty.
    pub fallbacks: Vec<Config>,
}

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

/// The state that handles share with the worker.
#[derive(Debug)]
struct Shared {
    hosts: Hosts,
    token: token::Reader,
    connected: watch::Sender<Option<Connection>>,
    record: Record,
}

impl fmt::Debug for Config {
    /// Leaves out the values of headers, because they may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.metadata.iter().map(|(name, _)| name).collect();
        f.debug_struct("Config")
            .field("address", &self.address)
            .field("metadata", &names)
            .finish_non_exhaustive()
    }
}

/// Returns a handle, and the future that owns the connection. The future ends, and closes the connection,
/// when every handle is dropped or `stop` is cancelled.
pub fn new(
    config: Config,
    registry: &Registry,
    stop: CancellationToken,
) -> (Istiod, impl Future<Output = ()> + Send + 'static + use<>) {
    let (queue, waiters) = mpsc::unbounded_channel();
    let shared = Arc::new(Shared {
        token: token::Reader::new(config.token.clone()),
        hosts: Hosts::new(config),
        connected: watch::Sender::new(None),
        record: Record::new(registry),
    });
    let worker = Worker::new(shared.clone(), waiters);
    let handle = Istiod { shared: shared.clone(), queue };
    let run = async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = worker.run() => {}
        }
        shared.connected.send_replace(None);
    };
    (handle, run)
}

impl Shared {
    /// Returns the connection, unless it is known to be closed.
    fn connection(&self) -> Option<Connection> {
        self.connected.borrow().as_ref().filter(|it| !it.is_closed()).cloned()
    }

    /// Makes the next call dial if this is the current connection. Its streams may finish.
    fn leave(&self, about: &Arc<Connected>) {
        self.leave_if(|current| Arc::ptr_eq(&current.about, about));
    }

    /// Makes the next call dial if `is_left` is true of the current connection.
    fn leave_if(&self, is_left: impl FnOnce(&mut Connection) -> bool) {
        self.connected.send_if_modified(|current| current.take_if(is_left).is_some());
    }
}

impl Istiod {
    /// Returns true if a call needs no dial, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.shared.connection().is_some()
    }

    /// Waits until there is a connection, without a limit. Fails only if the agent is stopping.
    pub async fn connection(&self) -> Result<Connection, Problem> {
        self.wait(false).await
    }

    /// Like [`Istiod::connection`], but fails with the error of the current or next dial.
    pub async fn try_connection(&self) -> Result<Connection, Problem> {
        self.wait(true).await
    }

    /// Waits for a connection; if `once`, fails with the error of the current or next dial.
    async fn wait(&self, once: bool) -> Result<Connection, Problem> {
        if let Some(connection) = self.shared.connection() {
            return Ok(connection);
        }
        let (reply, result) = oneshot::channel();
        // If the worker has ended, the waiter is dropped, and there is no result.
        let _ = self.queue.send(Waiter { once, reply });
        result.await.unwrap_or_else(|_| {
            let found = "not connected, because the agent is stopping";
            Err(self.shared.hosts.current().problem(problem::Code::AgentStopping, found))
        })
    }

    /// Makes a gRPC request for `path` with the configured headers and the token that its file contains now.
    pub fn request(&self, path: &'static str, body: Body) -> http::Request<Body> {
        let mut request = http::Request::new(body);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri(path);
        *request.headers_mut() = self.headers();
        request
    }

    /// Returns the address in use, or dialed next, as configured.
    pub fn address(&self) -> &str {
        &self.shared.hosts.current().address
    }

    pub fn status(&self) -> Status {
        let connection = self.shared.connection();
        let Shared { record, .. } = &*self.shared;
        let claims = self.shared.token.last().claims;
        Status {
            address: self.address().to_owned(),
            connected: connection.map(|connection| connection.about().clone()),
            dials: *record.dials.lock(),
            last_error: record.last_error.lock().clone(),
            outages: record.outages.lock().iter().cloned().collect(),
            token_expires: claims.and_then(|claims| claims.expiry()).map(rfc3339),
        }
    }

    /// Leaves a connection after UNAUTHENTICATED if it was opened without the client certificate, which may
    /// exist by now. Returns true if it did.
    pub(crate) fn leave_if_unauthenticated(
        &self,
        connection: &Connection,
        code: Option<Code>,
    ) -> bool {
        let security = &self.shared.hosts.current().security;
        let leaves = code == Some(Code::Unauthenticated)
            && matches!(security, Security::Tls(tls) if tls.client.is_some())
            && !connection.has_client_certificate();
        if leaves {
            self.shared.leave(&connection.about);
        }
        leaves
    }

    pub(crate) fn has_fallbacks(&self) -> bool {
        self.shared.hosts.has_fallbacks()
    }

    pub(crate) fn record_success(&self, connection: &Connection) {
        self.shared.hosts.record_success(&connection.config);
        self.shared.record.clear_error();
    }

    /// Records that a call on this connection has failed. The next call does not use this connection if the call
    /// `timed_out`, nor if another control plane is in use now. Returns true in the latter case.
    pub(crate) fn record_failure(
        &self,
        connection: &Connection,
        timed_out: bool,
        problem: &Problem,
    ) -> bool {
        let Shared { hosts, record, .. } = &*self.shared;
        record.record_error(problem);
        let has_moved = hosts.record_failure(&connection.config, timed_out, problem);
        self.shared.leave_if(|current| {
            if has_moved {
                Arc::ptr_eq(&current.config, &connection.config)
            } else {
                timed_out && Arc::ptr_eq(&current.about, &connection.about)
            }
        });
        has_moved
    }

    /// Explains a call that ended with this status. `unimplemented` is the code if istiod does not know the
    /// method.
    pub(crate) fn explain(&self, unimplemented: problem::Code, status: &tonic::Status) -> Problem {
        let token = self.shared.token.last();
        refusal::explain(self.shared.hosts.current(), &token, unimplemented, status)
    }

    /// Waits until the file of the token may have changed. Cancel safe.
    pub(crate) async fn token_changed(&self) {
        self.shared.token.changed().await;
    }

    pub(crate) fn uri(&self, path: &'static str) -> Uri {
        self.shared.hosts.current().uri(path)
    }

    pub(crate) fn headers(&self) -> HeaderMap {
        let has_certificate =
            self.shared.connection().is_some_and(|it| it.has_client_certificate());
        self.shared.hosts.current().headers(self.shared.token.authorization(has_certificate))
    }
}

impl Config {
    /// Names the control plane in problems.
    pub fn subject(&self) -> String {
        format!("istiod at {} ({})", self.address, self.setting)
    }

    pub(crate) fn problem(&self, code: problem::Code, found: impl ToString) -> Problem {
        Problem::new(code, self.subject(), found)
    }

    /// Returns why an agent in this container cannot connect: the problem of the roots, or of the token. Blocks.
    pub fn credentials_problem(&self) -> Option<Problem> {
        let Security::Tls(tls) = &self.security else {
            return None;
        };
        if let Err(problem) = trust_anchors::read(&tls.roots) {
            return Some(problem);
        }
        match &self.token {
            token::Source::File(path) if tls.client.is_none() => match token::read(path) {
                Ok(token) => token.claims?.expiry_problem(path),
                Err(problem) => Some(problem),
            },
            _ => None,
        }
    }

    /// Returns the URI of a call: scheme and authority are always the same.
    pub(crate) fn uri(&self, path: &'static str) -> Uri {
        let (scheme, authority) = match &self.security {
            Security::Plaintext => (Scheme::HTTP, self.address.clone()),
            Security::Tls(tls) => (Scheme::HTTPS, bracketed(&tls.server_name)),
        };
        let uri = Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build();
        // An invalid authority cannot be dialed either, so the placeholder is never sent.
        uri.unwrap_or_else(|_| Uri::from_static("http://istiod.invalid/"))
    }

    /// Returns the headers of a call. Configured ones cannot replace gRPC's own.
    pub(crate) fn headers(&self, authorization: Option<HeaderValue>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.metadata {
            headers.append(name, value.clone());
        }
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
        if let Some(value) = authorization {
            headers.insert(header::AUTHORIZATION, value);
        }
        headers
    }
}

/// Puts an IPv6 address into brackets, as in the authority of a URI.
fn bracketed(name: &str) -> String {
    if name.parse::<std::net::Ipv6Addr>().is_ok() { format!("[{name}]") } else { name.to_owned() }
}
