//! Serves secrets to Envoy (SDS) on a Unix socket, in SotW streams.
//!
//! A [`stream::Stream`] waits for requests and secrets of one Envoy stream; [`sotw::StateOfTheWorld`] is the
//! protocol as a state machine without I/O. The listener has checked the user of the client.

pub mod key_provider;
mod metrics;
mod resource;
mod sotw;
#[cfg(test)]
mod sotw_tests;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_server::{
    SecretDiscoveryService, SecretDiscoveryServiceServer,
};
use futures_util::stream::BoxStream;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use tonic::{Status, Streaming};

use crate::metrics::Registry;
use crate::net::unix_socket::Listener;
use crate::problem::Problem;
use crate::runtime::lifecycle::CancellationToken;
use crate::secrets::Secrets;
use crate::secrets::files::Files;
use metrics::Metrics;
pub use resource::SecretOptions;
pub(crate) use resource::revocation_problem;
use stream::Stream;

/// The largest accepted request, in bytes. Envoy's requests have a few hundred bytes.
const MAX_REQUEST: usize = 4 * 1024 * 1024;

/// The secrets of which Envoy has rejected the last version, by the number of the stream.
pub type Rejections = Arc<Mutex<BTreeMap<u64, Problem>>>;

#[derive(Clone, Debug)]
pub struct Sources {
    pub secrets: Option<Secrets>,
    pub files: Files,
    /// True to serve `default` and `ROOTCA`, too, and not only names that contain paths of files.
    pub serves_workload: bool,
    pub options: SecretOptions,
    pub rejections: Rejections,
}

/// The secret discovery service for one set of secrets.
#[derive(Clone, Debug)]
struct Service {
    sources: Arc<Sources>,
    metrics: Metrics,
    streams: Arc<AtomicU64>,
    /// The number of responses so far, which is a part of each version.
    responses: Arc<AtomicU64>,
}

type Responses<T> = BoxStream<'static, Result<T, Status>>;

pub fn serve(
    listener: Listener,
    sources: Sources,
    registry: &Registry,
    shutdown: CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    let service = Service {
        metrics: Metrics::new(registry, &sources.rejections),
        sources: Arc::new(sources),
        streams: Arc::default(),
        responses: Arc::default(),
    };
    async move {
        let what = if service.sources.serves_workload {
            "workload certificates"
        } else {
            "file certificates only"
        };
        tracing::info!(target: "sds", "Starting SDS grpc server");
        tracing::info!(
            target: "sds",
            "Starting SDS server for {what}, will listen on {:?}",
            listener.path()
        );
        let server =
            SecretDiscoveryServiceServer::new(service).max_decoding_message_size(MAX_REQUEST);
        listener.serve(TowerToHyperService::new(server), shutdown).await;
    }
}

#[tonic::async_trait]
impl SecretDiscoveryService for Service {
    type StreamSecretsStream = Responses<DiscoveryResponse>;
    type DeltaSecretsStream = Responses<DeltaDiscoveryResponse>;

    async fn stream_secrets(
        &self,
        requests: tonic::Request<Streaming<DiscoveryRequest>>,
    ) -> Result<tonic::Response<Self::StreamSecretsStream>, Status> {
        Ok(tonic::Response::new(Box::pin(Stream::new(self).responses(requests.into_inner()))))
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
