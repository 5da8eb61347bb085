//! The aggregated discovery service (ADS) on a Unix socket: SotW and delta.
//!
//! A newer stream of an Envoy replaces its older one, of either protocol, which ends with OK. Two Envoys,
//! as during a hot restart, have a stream each. Other clients, such as gRPC applications, may have
//! [`MAX_OTHER_CLIENT_STREAMS`] streams at once; a further one ends with RESOURCE_EXHAUSTED. An Envoy of another
//! container counts as another client: a header lets it wait for istiod like an own one, but its configuration is not
//! stored. The memory for requests of other clients is bounded, whatever their headers say. Every stream reports the
//! health of the workload. Other methods are UNIMPLEMENTED. Request headers are not forwarded to istiod.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response};
use http_body::Frame;
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::Protocol;
use super::end;
use super::interceptor::Interceptors;
use super::ledger::Ledger;
use super::observe::Observer;
use super::relay::{self, Health, RelayConfig, ResponseBody, response_body};
use crate::istiod::Istiod;
use crate::metrics::Registry;
use crate::net::unix_socket::{Listener, Peer};

/// The most streams that clients other than Envoy may have at once.
pub const MAX_OTHER_CLIENT_STREAMS: usize = 64;

/// Envoy sets this header in the calls that it originates; gRPC libraries do not.
const ENVOY_HEADER: &str = "x-envoy-internal";

/// The function that returns true if a process is an Envoy of this agent.
pub type IsOwnEnvoy = Arc<dyn Fn(i32) -> bool + Send + Sync>;

/// The connections to istiod that streams are relayed on.
#[derive(Clone, Debug)]
pub struct Upstream {
    pub envoy: Istiod,
    /// A separate connection for other clients. Streams that such clients do not read fill its window only.
    pub other_clients: Istiod,
}

/// Settings of the discovery service, and the parts of the agent that it uses.
#[allow(missing_debug_implementations)]
pub struct Config {
    /// The largest request accepted from Envoy, in bytes (`ISTIO_GPRC_MAXRECVMSGSIZE`).
    ///
    /// The first delta request after a reconnect names every resource Envoy has. In large meshes it exceeds
    /// pilot-agent's 4 MiB, after which pilot-agent's Envoy can never connect again.
    pub max_request_bytes: usize,
    /// `clusterid`, for the log line that announces the relay.
    pub cluster_id: String,
    /// Stores the responses that Envoy accepts, if configured.
    pub ledger: Option<Ledger>,
    pub upstream: Upstream,
    pub is_own_envoy: IsOwnEnvoy,
    pub interceptors: Interceptors,
    /// The health of the workload, if streams report it.
    pub health: Option<Health>,
    pub shutdown: CancellationToken,
}

/// The discovery service.
#[derive(Clone)]
#[allow(missing_debug_implementations)]
pub struct Discovery(Arc<Inner>);

struct Inner {
    config: Config,
    observer: Observer,
    next_id: AtomicU32,
    /// Stops the relay of each Envoy's newest stream, by pid. The lock is held for a swap only.
    newest: Mutex<BTreeMap<i32, CancellationToken>>,
    other_clients: Arc<Semaphore>,
    /// Bounds the memory for the requests of all other clients.
    memory: Arc<Semaphore>,
    relays: TaskTracker,
}

impl Discovery {
    pub fn new(config: Config, registry: &Registry) -> Self {
        Self(Arc::new(Inner {
            observer: Observer::new(registry, config.ledger.clone()),
            config,
            next_id: AtomicU32::new(1),
            newest: Mutex::default(),
            other_clients: Arc::new(Semaphore::new(MAX_OTHER_CLIENT_STREAMS)),
            memory: Arc::new(Semaphore::new(relay::MAX_QUEUED)),
            relays: TaskTracker::new(),
        }))
    }

    /// Returns the record of requests and responses.
    pub fn observer(&self) -> Observer {
        self.0.observer.clone()
    }

    /// Serves clients until the shutdown, then waits for the relays to end.
    pub async fn serve(self, listener: Listener) {
        let config = &self.0.config;
        let address = config.upstream.envoy.address();
        let cluster = &config.cluster_id;
        tracing::info!(target: "xdsproxy", "Initializing with upstream address {address:?} and cluster {cluster:?}");
        listener.serve(self.clone(), config.shutdown.clone()).await;
        self.0.relays.close();
        self.0.relays.wait().await;
    }

    /// Starts a relay for a stream. Ends the stream if other clients have too many.
    fn start_relay(&self, protocol: Protocol, request: Request<Incoming>) -> ResponseBody {
        let config = &self.0.config;
        let stop = config.shutdown.child_token();
        let peer: Peer = request.extensions().get().copied().unwrap_or_default();
        let own_envoy = peer.pid().filter(|pid| (config.is_own_envoy)(*pid));
        // Every client can send the header, so nothing that concerns other streams depends on it.
        let is_envoy = own_envoy.is_some() || request.headers().contains_key(ENVOY_HEADER);
        let (istiod, permit) = if let Some(pid) = own_envoy {
            self.replace_newest(pid, stop.clone());
            (&config.upstream.envoy, None)
        } else if let Ok(permit) = self.0.other_clients.clone().try_acquire_owned() {
            (&config.upstream.other_clients, Some(permit))
        } else {
            let found =
                format!("{MAX_OTHER_CLIENT_STREAMS} streams of clients other than Envoy are open");
            tracing::debug!(target: "xdsproxy", "refusing another: {found}");
            return status_body(&Status::resource_exhausted(found));
        };
        let store = config.ledger.as_ref().zip(own_envoy);
        let relay_config = RelayConfig {
            id: self.0.next_id.fetch_add(1, Ordering::Relaxed),
            protocol,
            istiod: istiod.clone(),
            is_envoy,
            shared_memory: own_envoy.is_none().then(|| self.0.memory.clone()),
            interceptors: config.interceptors.clone(),
            observer: self.0.observer.clone(),
            max_request_bytes: config.max_request_bytes,
            health: config.health.clone(),
            store: store.and_then(|(store, pid)| store.envoy_cache(pid, protocol)),
            stop,
        };
        let accepted = match protocol {
            Protocol::Sotw => {
                "accepted XDS connection from Envoy, forwarding to upstream XDS server"
            }
            Protocol::Delta => "accepted delta xds connection from envoy, forwarding to upstream",
        };
        tracing::debug!(target: "xdsproxy", id = relay_config.id, "{accepted}");
        let (sender, body) = response_body();
        // The end of a relay cancels its token, so that the next stream does not count as overlapping.
        let ended = relay_config.stop.clone().drop_guard();
        self.0.relays.spawn(async move {
            relay::serve_stream(relay_config, request.into_body(), sender).await;
            drop((ended, permit));
        });
        body
    }

    /// Remembers how to stop the newest stream of an Envoy, and stops its older one.
    fn replace_newest(&self, pid: i32, stop: CancellationToken) {
        let mut newest = self.0.newest.lock();
        newest.retain(|_, older| !older.is_cancelled());
        if let Some(older) = newest.insert(pid, stop) {
            tracing::warn!(target: "xdsproxy", "registered overlapping stream; closing previous");
            older.cancel();
        }
    }
}

/// Returns the body of a stream that ends at once with this status.
fn status_body(status: &Status) -> ResponseBody {
    let (sender, body) = response_body();
    let trailers = Frame::trailers(end::trailers(status));
    let _ = sender.try_send(Ok(trailers)); // A new body has room for one frame.
    body
}

impl hyper::service::Service<Request<Incoming>> for Discovery {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let path = request.uri().path();
        let body = match Protocol::from_path(path) {
            Some(protocol) => self.start_relay(protocol, request),
            None => status_body(&Status::unimplemented(format!("unknown method {path}"))),
        };
        let mut response = Response::new(body);
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        ready(Ok(response))
    }
}
