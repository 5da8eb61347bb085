//! Prevents an Envoy that takes over from serving until the agent has checked it.
//!
//! A new Envoy serves, and orders its parent to drain, as soon as all its listeners are ready; this
//! cannot be undone. Envoys that take over from another container therefore have one more listener, without a port,
//! that waits for an extension from this server (`config_discovery` in Envoy's `filter.proto`). The agent sends it once
//! the Envoy has all listeners and secrets of its parent.

use std::path::Path;
use std::pin::Pin;

use envoy_types::pb::envoy::config::core::v3::TypedExtensionConfig;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::extension::v3::extension_config_discovery_service_server::{
    ExtensionConfigDiscoveryService, ExtensionConfigDiscoveryServiceServer,
};
use envoy_types::pb::google::protobuf::Any;
use futures_util::{StreamExt, stream};
use hyper_util::service::TowerToHyperService;
use prost::Message;
use serde::de::Error;
use serde_json::{Map, Value, json};
use tonic::{Request, Response, Status, Streaming};

use crate::bootstrap::clusters;
use crate::envoy::inspect;
use crate::net::unix_socket::Listener;
use crate::runtime::lifecycle::CancellationToken;

/// The name of the listener, the extension and the cluster.
const NAME: &str = inspect::GATE;
const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const FILTER: &str = "type.googleapis.com/envoy.extensions.filters.network.echo.v3.Echo";

/// Serves the extension from when `open` is cancelled, until `shutdown`.
pub async fn serve(listener: Listener, open: CancellationToken, shutdown: CancellationToken) {
    let service = TowerToHyperService::new(ExtensionConfigDiscoveryServiceServer::new(Gate(open)));
    listener.serve(service, shutdown).await;
}

/// Adds the listener, and the cluster of this server, to the bootstrap override (JSON) of an Envoy that takes over.
/// `socket` is the path of this server.
pub fn add_to(bootstrap: Option<&str>, socket: &Path) -> serde_json::Result<String> {
    let mut bootstrap: Map<String, Value> = serde_json::from_str(bootstrap.unwrap_or("{}"))?;
    let cluster = clusters::grpc(NAME, socket);
    // Without a limit, because Envoy serves after it even without the extension.
    let source = json!({
        "resource_api_version": "V3",
        "initial_fetch_timeout": "0s",
        "api_config_source": {
            "api_type": "GRPC",
            "transport_api_version": "V3",
            "grpc_services": [{ "envoy_grpc": { "cluster_name": NAME } }],
        },
    });
    let discovery = json!({ "config_source": source, "type_urls": [FILTER] });
    let listener = json!({
        "name": NAME,
        // An address for documentation (RFC 5737), to which nothing connects.
        "address": { "socket_address": { "address": "192.0.2.1", "port_value": 1 }},
        "bind_to_port": false,
        "filter_chains": [{ "filters": [{ "name": NAME, "config_discovery": discovery }] }],
    });
    // Protobuf's JSON has two spellings of a name, and a document must not have both.
    let is_camel_case = bootstrap.contains_key("staticResources");
    let name = ["static_resources", "staticResources"][usize::from(is_camel_case)];
    let resources = bootstrap.entry(name).or_insert(Value::Null);
    // In Protobuf's JSON, null is an unset field.
    if !resources.is_null() && !resources.is_object() {
        return Err(Error::custom("static_resources is not an object"));
    }
    for (list, item) in [("clusters", cluster), ("listeners", listener)] {
        match resources.get_mut(list).and_then(Value::as_array_mut) {
            Some(items) => items.push(item),
            None => resources[list] = json!([item]),
        }
    }
    serde_json::to_string(&bootstrap)
}

struct Gate(CancellationToken);

type Responses<T> = Pin<Box<dyn tokio_stream::Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl ExtensionConfigDiscoveryService for Gate {
    type StreamExtensionConfigsStream = Responses<DiscoveryResponse>;
    type DeltaExtensionConfigsStream = Responses<DeltaDiscoveryResponse>;

    async fn stream_extension_configs(
        &self,
        requests: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamExtensionConfigsStream>, Status> {
        let open = self.0.clone().cancelled_owned();
        let extension = stream::once(async {
            open.await;
            Ok(extension())
        });
        // The stream ends only when Envoy ends it, because Envoy would open another one.
        let acknowledgments = requests.into_inner().filter_map(async |_| None);
        Ok(Response::new(Box::pin(stream::select(extension, acknowledgments))))
    }

    async fn delta_extension_configs(
        &self,
        _: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaExtensionConfigsStream>, Status> {
        Err(Status::unimplemented("use StreamExtensionConfigs"))
    }

    async fn fetch_extension_configs(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented("use StreamExtensionConfigs"))
    }
}

fn extension() -> DiscoveryResponse {
    let extension = TypedExtensionConfig {
        name: NAME.to_owned(),
        typed_config: Some(Any { type_url: FILTER.to_owned(), value: Vec::new() }),
    };
    DiscoveryResponse {
        version_info: "1".to_owned(),
        nonce: "1".to_owned(),
        type_url: EXTENSION.to_owned(),
        resources: vec![Any { type_url: EXTENSION.to_owned(), value: extension.encode_to_vec() }],
        ..DiscoveryResponse::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listener_is_added_to_a_bootstrap_override() {
        for (before, resources, names) in [
            (None, "/static_resources", &[NAME][..]),
            (Some("{\"node\":{}}"), "/static_resources", &[NAME]),
            (Some("{\"static_resources\":null}"), "/static_resources", &[NAME]),
            (
                Some("{\"staticResources\":{\"listeners\":[{\"name\":\"mine\"}]}}"),
                "/staticResources",
                &["mine", NAME],
            ),
        ] {
            let added = add_to(before, Path::new("/gate")).unwrap();
            let added: Value = serde_json::from_str(&added).unwrap();
            let listeners = added.pointer(&format!("{resources}/listeners")).unwrap();
            let found = listeners.as_array().unwrap().iter();
            let found: Vec<_> = found.map(|it| it["name"].as_str().unwrap()).collect();
            assert_eq!(found, names);
        }
        for invalid in ["[]", "{\"static_resources\":[]}"] {
            assert!(add_to(Some(invalid), Path::new("/gate")).is_err());
        }
    }
}
