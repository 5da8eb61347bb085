//! Serves secrets to Envoy: Envoy's secret discovery service on a Unix socket, as streams of all
//! that is asked for, as streams of changes, and as single answers.
//!
//! A stream consists of a [`session::Session`], which awaits, and one of two forms of the protocol,
//! which decide: [`stream::Stream`] and [`delta::Delta`]. Both look secrets up on a
//! [`secret::Shelf`], behind which are the authority's certificate and those from files.
//!
//! Does not read files, does not know the certificate authority, and does not check who dials: the
//! listener has.

mod delta;
#[cfg(test)]
mod delta_tests;
mod desk;
mod metrics;
pub mod provider;
mod secret;
mod session;
mod stream;
#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_server::{
    SecretDiscoveryService, SecretDiscoveryServiceServer,
};
use hyper_util::service::TowerToHyperService;
use tonic::{Status, Streaming};

use crate::lifecycle::CancellationToken;
use crate::metrics::Registry;
use crate::secrets::Secrets;
use crate::secrets::files::Files;
use crate::unix_socket::Listener;
use delta::Delta;
use desk::{Desk, Waits};
use metrics::Metrics;
pub use secret::Style;
use session::{Protocol, Responses, Talk};
use stream::Stream;

/// The largest request taken. Envoy's have a few hundred bytes.
const LARGEST_REQUEST: usize = 4 * 1024 * 1024;

/// How long a single answer may wait for the certificate.
const FETCH_LIMIT: Duration = Duration::from_secs(10);

/// What is served.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The authority's certificate; None where there is no authority.
    pub secrets: Option<Secrets>,
    pub files: Files,
    /// Whether the workload's own names are served, not only names that say their files.
    pub serves_workload: bool,
    pub style: Style,
}

/// The secret discovery service over one set of secrets.
#[derive(Clone, Debug)]
pub struct Service {
    sources: Sources,
    style: Arc<Style>,
    metrics: Metrics,
    streams: Arc<AtomicU64>,
    responses: Arc<AtomicU64>,
}

/// What a stream answers, one after the other.
pub type BoxStream<T> = Pin<Box<dyn tokio_stream::Stream<Item = Result<T, Status>> + Send>>;

/// The service, ready for a gRPC server.
pub fn new(sources: Sources, registry: &Registry) -> Service {
    Service {
        style: Arc::new(sources.style.clone()),
        sources,
        metrics: Metrics::new(registry),
        streams: Arc::default(),
        responses: Arc::default(),
    }
}

/// Serves secrets on `listener` until `shutdown`.
pub fn serve(
    listener: Listener,
    sources: Sources,
    registry: &Registry,
    shutdown: CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    let service = new(sources, registry);
    run(listener, service, shutdown)
}

async fn run(listener: Listener, service: Service, shutdown: CancellationToken) {
    let what = match service.sources.serves_workload {
        true => "workload certificates",
        false => "file certificates only",
    };
    tracing::info!(target: "sds", "Starting SDS grpc server");
    tracing::info!(
        target: "sds",
        "Starting SDS server for {what}, will listen on {:?}",
        listener.path()
    );
    let server =
        SecretDiscoveryServiceServer::new(service).max_decoding_message_size(LARGEST_REQUEST);
    listener
        .serve(TowerToHyperService::new(server), shutdown)
        .await;
}

#[tonic::async_trait]
impl SecretDiscoveryService for Service {
    type StreamSecretsStream = BoxStream<DiscoveryResponse>;
    type DeltaSecretsStream = BoxStream<DeltaDiscoveryResponse>;

    async fn stream_secrets(
        &self,
        requests: tonic::Request<Streaming<DiscoveryRequest>>,
    ) -> Result<tonic::Response<Self::StreamSecretsStream>, Status> {
        let responses = Responses::new(requests.into_inner(), self.talk::<Stream>());
        Ok(tonic::Response::new(Box::pin(responses)))
    }

    async fn delta_secrets(
        &self,
        requests: tonic::Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<tonic::Response<Self::DeltaSecretsStream>, Status> {
        let responses = Responses::new(requests.into_inner(), self.talk::<Delta>());
        Ok(tonic::Response::new(Box::pin(responses)))
    }

    async fn fetch_secrets(
        &self,
        request: tonic::Request<DiscoveryRequest>,
    ) -> Result<tonic::Response<DiscoveryResponse>, Status> {
        let mut talk = self.talk::<Stream>();
        talk.apply(&request.into_inner())?;
        let complete = async {
            while talk.is_kept_waiting() {
                talk.changed().await;
            }
        };
        // What is there by then is the answer.
        let _ = tokio::time::timeout(FETCH_LIMIT, complete).await;
        match talk.answer() {
            Some(response) => Ok(tonic::Response::new(response)),
            None => Err(absent(&talk.waits())),
        }
    }
}

impl Service {
    /// The state of a new stream.
    fn talk<P: Protocol>(&self) -> Talk<P> {
        let id = self.streams.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::info!(target: "ads", "ADS: new connection for node:{id}");
        let sources = &self.sources;
        let desk = Desk::new(id, self.metrics.clone(), sources.serves_workload);
        Talk::new(
            P::new(desk),
            sources.secrets.clone(),
            sources.files.subscribe(),
            self.style.clone(),
            self.responses.clone(),
        )
    }
}

/// Why a single answer has nothing in it.
fn absent(waits: &Waits) -> Status {
    match &waits.missing {
        Some(problem) => Status::not_found(problem.to_string()),
        None => Status::unavailable("the secret is not there yet"),
    }
}
