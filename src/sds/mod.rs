//! Secret discovery service (SDS) for Envoy on a Unix socket: SotW streams, delta streams, and single
//! fetches.
//!
//! A [`stream::Stream`] does the awaiting for one Envoy stream; [`sotw::StateOfTheWorld`] and
//! [`delta::Delta`] are the two variants of the protocol, as state machines without I/O. The listener
//! has checked which user dials.

mod consumers;
mod context;
mod delta;
#[cfg(test)]
mod delta_tests;
pub mod key_provider;
mod metrics;
mod names;
mod resource;
mod sotw;
#[cfg(test)]
mod sotw_tests;
mod stream;
#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
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
pub use consumers::{Consumer, Consumers};
use delta::Delta;
use metrics::Metrics;
pub use resource::SecretOptions;
use sotw::StateOfTheWorld;
use stream::{Stream, Waits};

/// The largest request taken. Envoy's have a few hundred bytes.
const MAX_REQUEST: usize = 4 * 1024 * 1024;

/// How long a fetch may wait for the secret.
const FETCH_LIMIT: Duration = Duration::from_secs(10);

/// What is served.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The authority's certificate; None where there is no authority.
    pub secrets: Option<Secrets>,
    pub files: Files,
    /// Whether `default` and `ROOTCA` are served, or only names that carry paths of files.
    pub serves_workload: bool,
    pub options: SecretOptions,
}

/// The secret discovery service over one set of secrets.
#[derive(Clone, Debug)]
pub struct Service {
    sources: Arc<Sources>,
    metrics: Metrics,
    /// Counts streams; each has its number.
    streams: Arc<AtomicU64>,
    /// Counts responses; part of each version.
    responses: Arc<AtomicU64>,
    consumers: Consumers,
}

/// The responses of one stream.
pub type BoxStream<T> = Pin<Box<dyn tokio_stream::Stream<Item = Result<T, Status>> + Send>>;

/// The service, ready for a gRPC server.
pub fn new(sources: Sources, registry: &Registry) -> Service {
    Service {
        sources: Arc::new(sources),
        metrics: Metrics::new(registry),
        streams: Arc::default(),
        responses: Arc::default(),
        consumers: Consumers::default(),
    }
}

/// Serves secrets on `listener` until `shutdown`.
pub fn serve(
    listener: Listener,
    sources: Sources,
    registry: &Registry,
    shutdown: CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    new(sources, registry).serve(listener, shutdown)
}

impl Service {
    pub fn consumers(&self) -> Consumers {
        self.consumers.clone()
    }

    /// Serves secrets on `listener` until `shutdown`.
    pub async fn serve(self, listener: Listener, shutdown: CancellationToken) {
        let what = match self.sources.serves_workload {
            true => "workload certificates",
            false => "file certificates only",
        };
        tracing::info!(target: "sds", "Starting SDS grpc server");
        tracing::info!(
            target: "sds",
            "Starting SDS server for {what}, will listen on {:?}",
            listener.path()
        );
        let server = SecretDiscoveryServiceServer::new(self).max_decoding_message_size(MAX_REQUEST);
        let server = TowerToHyperService::new(server);
        listener.serve(server, shutdown).await;
    }
}

#[tonic::async_trait]
impl SecretDiscoveryService for Service {
    type StreamSecretsStream = BoxStream<DiscoveryResponse>;
    type DeltaSecretsStream = BoxStream<DeltaDiscoveryResponse>;

    async fn stream_secrets(
        &self,
        requests: tonic::Request<Streaming<DiscoveryRequest>>,
    ) -> Result<tonic::Response<Self::StreamSecretsStream>, Status> {
        let responses = Stream::<StateOfTheWorld>::new(self).responses(requests.into_inner());
        Ok(tonic::Response::new(Box::pin(responses)))
    }

    async fn delta_secrets(
        &self,
        requests: tonic::Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<tonic::Response<Self::DeltaSecretsStream>, Status> {
        let responses = Stream::<Delta>::new(self).responses(requests.into_inner());
        Ok(tonic::Response::new(Box::pin(responses)))
    }

    async fn fetch_secrets(
        &self,
        request: tonic::Request<DiscoveryRequest>,
    ) -> Result<tonic::Response<DiscoveryResponse>, Status> {
        let mut stream = Stream::<StateOfTheWorld>::new(self);
        stream.apply(&request.into_inner())?;
        let complete = async {
            while let Waits {
                authority: true, ..
            }
            | Waits { reading: true, .. } = stream.waits()
            {
                stream.changed().await;
            }
        };
        // The answer is what is there by then.
        let _ = tokio::time::timeout(FETCH_LIMIT, complete).await;
        match (stream.answer(), stream.waits().error) {
            (Some(response), _) => Ok(tonic::Response::new(response)),
            (None, Some(error)) => Err(Status::not_found(error.to_string())),
            (None, None) => Err(Status::unavailable("the secret is not there yet")),
        }
    }
}
