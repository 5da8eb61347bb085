//! Sends one discovery request that is as cheap for istiod as possible.
//!
//! The request asks for the endpoints of a cluster that does not exist: istiod answers any name and any kind
//! of proxy with an empty list, without generating clusters or listeners. The node has no metadata
//! by which istiod registers machines (`AUTO_REGISTER_GROUP`, `WorkloadEntry`), so istiod writes nothing
//! to the Kubernetes cluster when the stream opens and ends.

use envoy_types::pb::envoy::config::core::v3::Node as EnvoyNode;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use futures_util::StreamExt;
use http::HeaderValue;
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::bootstrap::node::Node;
use crate::istiod::Config;
use crate::istiod::probe::Probe;

const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const NO_CLUSTER: &str = "outbound|1||istio-agent-doctor.invalid";

/// The metadata that istiod compares with the token, and from which it derives the format of its response.
const METADATA: [&str; 4] = [
    "NAMESPACE",
    "SERVICE_ACCOUNT",
    "CLUSTER_ID",
    "ISTIO_VERSION",
];

/// Sends the request, and returns the version of the response. Waits without a limit.
pub(super) async fn ask(
    probe: Probe,
    config: &Config,
    authorization: Option<HeaderValue>,
    node: &Node,
) -> Result<String, Status> {
    let service = probe.connection.clone().service();
    // The stream stays open until the response arrives.
    let requests = futures_util::stream::once(std::future::ready(request(node)));
    let mut call = tonic::Request::new(requests.chain(futures_util::stream::pending()));
    *call.metadata_mut() = MetadataMap::from_headers(config.headers(authorization));
    let mut client = AggregatedDiscoveryServiceClient::with_origin(service, config.uri("/"));
    let answer = client.stream_aggregated_resources(call).await?;
    match answer.into_inner().message().await? {
        Some(response) => Ok(response.version_info),
        None => Err(Status::ok("the stream ended without an answer")),
    }
}

fn request(node: &Node) -> DiscoveryRequest {
    let field = |name: &str| {
        let text = node.metadata.get(name)?.as_str()?;
        let kind = Some(Kind::StringValue(text.to_owned()));
        Some((name.to_owned(), Value { kind }))
    };
    DiscoveryRequest {
        node: Some(EnvoyNode {
            id: node.id.clone(),
            metadata: Some(Struct {
                fields: METADATA.into_iter().filter_map(field).collect(),
            }),
            ..Default::default()
        }),
        type_url: ENDPOINTS.to_owned(),
        resource_names: vec![NO_CLUSTER.to_owned()],
        ..Default::default()
    }
}
