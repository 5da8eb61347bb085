//! Serves secrets to Envoy: Envoy's secret discovery service, state of the world, on a Unix socket.
//!
//! Each stream is a [`stream::Stream`], which decides, and a [`Session`], which awaits: requests
//! before pushes, one response at a time, the newest secret whenever Envoy is ready for one. A
//! stream whose secret is not there yet stays open until it is.
//!
//! Does not know the certificate authority nor files, and does not check who dials: whoever can
//! open the socket gets the key.

mod metrics;
mod secret;
mod stream;
#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_server::{
    SecretDiscoveryService, SecretDiscoveryServiceServer,
};
use hyper_util::service::TowerToHyperService;
use tokio_util::sync::ReusableBoxFuture;
use tonic::{Code, Status, Streaming};

use crate::clock::{Clock, rfc3339};
use crate::lifecycle::CancellationToken;
use crate::metrics::Registry;
use crate::secrets::Secrets;
use crate::unix_socket::Listener;
use metrics::Metrics;
use stream::{Stamp, Stream};

/// The largest request taken. Envoy's have a few hundred bytes.
const LARGEST_REQUEST: usize = 4 * 1024 * 1024;

/// The secret discovery service over one set of secrets.
#[derive(Clone, Debug)]
pub struct Service {
    secrets: Secrets,
    metrics: Metrics,
    streams: Arc<AtomicU64>,
    responses: Arc<AtomicU64>,
}

/// The service, ready for a gRPC server.
pub fn new(secrets: Secrets, registry: &Registry) -> Service {
    Service {
        secrets,
        metrics: Metrics::new(registry),
        streams: Arc::default(),
        responses: Arc::default(),
    }
}

/// Serves `secrets` on `listener` until `shutdown`.
pub fn serve(
    listener: Listener,
    secrets: Secrets,
    registry: &Registry,
    shutdown: CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    let service = new(secrets, registry);
    run(listener, service, shutdown)
}

async fn run(listener: Listener, service: Service, shutdown: CancellationToken) {
    tracing::info!(target: "sds", "Starting SDS grpc server");
    tracing::info!(
        target: "sds",
        "Starting SDS server for workload certificates, will listen on {:?}",
        listener.path()
    );
    let server =
        SecretDiscoveryServiceServer::new(service).max_decoding_message_size(LARGEST_REQUEST);
    listener
        .serve(TowerToHyperService::new(server), |stream| stream, shutdown)
        .await;
}

#[tonic::async_trait]
impl SecretDiscoveryService for Service {
    type StreamSecretsStream = Responses;
    type DeltaSecretsStream = tokio_stream::Empty<Result<DeltaDiscoveryResponse, Status>>;

    async fn stream_secrets(
        &self,
        requests: tonic::Request<Streaming<DiscoveryRequest>>,
    ) -> Result<tonic::Response<Responses>, Status> {
        let id = self.streams.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::info!(target: "ads", "ADS: new connection for node:{id}");
        let session = Session {
            id,
            requests: requests.into_inner(),
            secrets: self.secrets.clone(),
            responses: self.responses.clone(),
            stream: Stream::new(id, self.metrics.clone()),
            metrics: self.metrics.clone(),
        };
        Ok(tonic::Response::new(Responses::new(session)))
    }

    async fn delta_secrets(
        &self,
        _: tonic::Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<tonic::Response<Self::DeltaSecretsStream>, Status> {
        Err(Status::unimplemented("DeltaSecrets not implemented"))
    }

    async fn fetch_secrets(
        &self,
        _: tonic::Request<DiscoveryRequest>,
    ) -> Result<tonic::Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented("FetchSecrets not implemented"))
    }
}

/// What Envoy reads of one stream. The work is done as Envoy asks for the next response, so a
/// stream that is not read holds no more than one.
#[derive(Debug)]
pub struct Responses(Option<ReusableBoxFuture<'static, Option<(Item, Session)>>>);

type Item = Result<DiscoveryResponse, Status>;

impl Responses {
    fn new(session: Session) -> Self {
        Self(Some(ReusableBoxFuture::new(session.next())))
    }
}

impl tokio_stream::Stream for Responses {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
        let Some(next) = &mut self.0 else {
            return Poll::Ready(None);
        };
        match std::task::ready!(next.poll(context)) {
            Some((Ok(response), session)) => {
                next.set(session.next());
                Poll::Ready(Some(Ok(response)))
            }
            Some((Err(status), _)) => {
                self.0 = None;
                Poll::Ready(Some(Err(status)))
            }
            None => {
                self.0 = None;
                Poll::Ready(None)
            }
        }
    }
}

/// One stream's state and what it waits for.
struct Session {
    id: u64,
    requests: Streaming<DiscoveryRequest>,
    secrets: Secrets,
    /// Counts the responses of all streams; part of each version.
    responses: Arc<AtomicU64>,
    stream: Stream,
    metrics: Metrics,
}

impl Session {
    /// The next response or the status the stream ends with; None when Envoy has closed it.
    async fn next(mut self) -> Option<(Item, Self)> {
        loop {
            let state = self.secrets.latest();
            let due = self.stream.due(&state);
            tokio::select! {
                biased;
                request = self.requests.message() => {
                    let applied = match request {
                        Ok(Some(request)) => self.apply(&request),
                        Ok(None) => {
                            tracing::info!(target: "ads", "ADS: \"\" {} terminated", self.id);
                            return None;
                        }
                        Err(status) => Err(status),
                    };
                    if let Err(status) = applied {
                        self.log_end(&status);
                        return Some((Err(status), self));
                    }
                }
                () = std::future::ready(()), if !due.is_empty() => {
                    let response = self.stream.answer(&state, self.stamp());
                    return Some((Ok(response), self));
                }
                () = self.secrets.changed() => {}
            }
        }
    }

    fn apply(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        self.metrics.received(request);
        self.stream.apply(request)?;
        let state = self.secrets.latest();
        if let Some(problem) = &state.problem
            && self.stream.is_kept_waiting(&state)
        {
            tracing::info!(
                target: "sds",
                "stream {} is held open until there is a certificate, next attempt at {}: {}",
                self.id, rfc3339(problem.next_attempt), problem.cause()
            );
        }
        Ok(())
    }

    fn stamp(&self) -> Stamp {
        let count = self.responses.fetch_add(1, Ordering::Relaxed) + 1;
        Stamp {
            version: format!("{}/{count}", rfc3339(Clock::system().now())),
            nonce: random_uuid(),
        }
    }

    fn log_end(&self, status: &Status) {
        let (id, code, message) = (self.id, status.code(), status.message());
        match code {
            // How it looks when Envoy goes away.
            Code::Cancelled | Code::Unavailable | Code::DeadlineExceeded => {
                tracing::info!(target: "ads", "ADS: \"\" {id} terminated {code:?}: {message}");
            }
            _ => {
                self.metrics.internal_errors.inc();
                tracing::error!(
                    target: "ads",
                    "ADS: \"\" {id} terminated with error: {code:?}: {message}"
                );
            }
        }
    }
}

/// A UUID of version 4. It tells responses apart and is no secret.
fn random_uuid() -> String {
    let bits = fastrand::u128(..) & !(0xf << 76) & !(0b11 << 62) | (0x4 << 76) | (0b10 << 62);
    let hex = format!("{bits:032x}");
    [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ]
    .join("-")
}
