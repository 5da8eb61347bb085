//! The aggregated discovery service (ADS) on a Unix socket: SotW and delta.
//!
//! A newer stream of an Envoy replaces its older one, of either protocol, which ends with OK. Two Envoys, as
//! during a hot restart, have a stream each. Other methods are UNIMPLEMENTED. Envoy's request headers
//! are not forwarded to istiod.

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
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::end;
use super::intercept::Interceptors;
use super::observe::Observer;
use super::relay::{self, Relay, ResponseBody, response_body};
use super::{Config, Protocol};
use crate::istiod::Istiod;
use crate::metrics::Registry;
use crate::unix_socket::{Listener, Peer};

/// The discovery service.
#[derive(Clone, Debug)]
pub struct Discovery(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    istiod: Istiod,
    interceptors: Interceptors,
    observer: Observer,
    next_id: AtomicU32,
    /// Stops the relays of the newest streams, one of each Envoy. Held for a swap only.
    newest: Mutex<BTreeMap<Peer, CancellationToken>>,
    relays: TaskTracker,
    shutdown: CancellationToken,
}

impl Discovery {
    pub fn new(
        config: Config,
        istiod: Istiod,
        interceptors: Interceptors,
        registry: &Registry,
        shutdown: CancellationToken,
    ) -> Self {
        Self(Arc::new(Inner {
            config,
            istiod,
            interceptors,
            observer: Observer::new(registry),
            next_id: AtomicU32::new(1),
            newest: Mutex::default(),
            relays: TaskTracker::new(),
            shutdown,
        }))
    }

    /// A handle to what has passed.
    pub fn observer(&self) -> Observer {
        self.0.observer.clone()
    }

    /// Serves Envoy until the shutdown, then waits for the relays to end.
    pub async fn serve(self, listener: Listener) {
        tracing::info!(
            target: "xdsproxy",
            "Initializing with upstream address {:?} and cluster {:?}",
            self.0.istiod.address(),
            self.0.config.cluster_id
        );
        let shutdown = self.0.shutdown.clone();
        listener.serve(self.clone(), shutdown).await;
        self.0.relays.close();
        self.0.relays.wait().await;
    }

    /// Starts a relay for a stream of Envoy.
    fn relay(&self, protocol: Protocol, peer: Peer, requests: Incoming) -> ResponseBody {
        let stop = self.0.shutdown.child_token();
        self.replace_newest(peer, stop.clone());
        let relay = Relay {
            id: self.0.next_id.fetch_add(1, Ordering::Relaxed),
            protocol,
            istiod: self.0.istiod.clone(),
            interceptors: self.0.interceptors.clone(),
            observer: self.0.observer.clone(),
            max_request_bytes: self.0.config.max_request_bytes,
            stop,
        };
        let accepted = match protocol {
            Protocol::Sotw => {
                "accepted XDS connection from Envoy, forwarding to upstream XDS server"
            }
            Protocol::Delta => "accepted delta xds connection from envoy, forwarding to upstream",
        };
        tracing::debug!(target: "xdsproxy", id = relay.id, "{accepted}");
        let (sender, body) = response_body();
        // A relay that has ended counts as stopped, so that the next one replaces nothing.
        let ended = relay.stop.clone().drop_guard();
        self.0.relays.spawn(async move {
            relay::run(relay, requests, sender).await;
            drop(ended);
        });
        body
    }

    fn replace_newest(&self, peer: Peer, stop: CancellationToken) {
        let mut newest = self.0.newest.lock();
        newest.retain(|_, older| !older.is_cancelled());
        if let Some(older) = newest.insert(peer, stop) {
            tracing::warn!(target: "xdsproxy", "registered overlapping stream; closing previous");
            older.cancel();
        }
    }
}

impl hyper::service::Service<Request<Incoming>> for Discovery {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let path = request.uri().path();
        let mut response = match Protocol::from_path(path) {
            Some(protocol) => {
                let peer = request.extensions().get().copied().unwrap_or_default();
                Response::new(self.relay(protocol, peer, request.into_body()))
            }
            None => {
                let status = Status::unimplemented(format!("unknown method {path}"));
                let (sender, body) = response_body();
                let trailers = Frame::trailers(end::trailers(&status));
                let _ = sender.try_send(Ok(trailers)); // There is room for one.
                Response::new(body)
            }
        };
        let kind = HeaderValue::from_static("application/grpc");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        ready(Ok(response))
    }
}
