//! The baselines of the relay, each a process of its own so that its CPU time can be measured: a byte
//! pump that knows only TLS, and a relay that decodes and encodes every message.

use std::path::Path;

use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use hyper_util::rt::TokioIo;
use tokio::net::UnixListener;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use super::peer::{ControlPlane, NAME};

/// Copies bytes between a Unix socket and a TLS connection, HTTP/2 included.
pub async fn pump(socket: &Path, address: &str, root_pem: &str) {
    let listener = UnixListener::bind(socket).expect("a free path");
    while let Ok((mut envoy, _)) = listener.accept().await {
        let mut istiod = ControlPlane::dial(address, root_pem).await.expect("a control plane");
        tokio::task::spawn(async move {
            let _ = tokio::io::copy_bidirectional(&mut envoy, &mut istiod).await;
        });
    }
}

/// Relays by decoding and encoding every message.
pub async fn typed(socket: &Path, address: &str, root_pem: &str) {
    let (address, root_pem) = (address.to_owned(), root_pem.to_owned());
    let connector = tower::service_fn(move |_: http::Uri| {
        let (address, root_pem) = (address.clone(), root_pem.clone());
        async move { ControlPlane::dial(&address, &root_pem).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://istiod.istio-system.svc:15012")
        .initial_stream_window_size(4 * 1024 * 1024)
        .initial_connection_window_size(8 * 1024 * 1024)
        .connect_with_connector_lazy(connector);
    debug_assert_eq!(NAME, "istiod.istio-system.svc");
    let client =
        AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(usize::MAX);
    let service = AggregatedDiscoveryServiceServer::new(Typed(client));
    let listener = UnixListener::bind(socket).expect("a free path");
    Server::builder()
        .add_service(service.max_decoding_message_size(usize::MAX))
        .serve_with_incoming(UnixListenerStream::new(listener))
        .await
        .expect("served");
}

#[derive(Clone)]
struct Typed(AggregatedDiscoveryServiceClient<Channel>);

#[tonic::async_trait]
impl AggregatedDiscoveryService for Typed {
    type StreamAggregatedResourcesStream = Streaming<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = Streaming<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let requests = request.into_inner().filter_map(Result::ok);
        let response = self.0.clone().stream_aggregated_resources(requests).await?;
        Ok(Response::new(response.into_inner()))
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let requests = request.into_inner().filter_map(Result::ok);
        let response = self.0.clone().delta_aggregated_resources(requests).await?;
        Ok(Response::new(response.into_inner()))
    }
}
