//! Relays xDS between Envoy and istiod, SotW and delta.
//!
//! Envoy opens an ADS stream on a Unix socket ([`server`]); the agent opens one of the same kind to
//! istiod and ties the two ([`relay`], [`stream`]). Messages are not decoded ([`wire`], [`request`],
//! [`response`]): requests pass one by one, so that the agent's own can be put between them; responses
//! are cut through while their bytes arrive, unless their type is intercepted or withheld
//! ([`intercept`]). [`observe`] records requests and responses. When a stream ends, Envoy sends its
//! subscriptions again. [`liveness`] finds streams that no longer work. The [`ledger`] follows what
//! Envoy has accepted, and stores it on disk if configured.

mod end;
pub mod interceptor;
pub mod ledger;
mod liveness;
mod metrics;
pub mod observe;
mod on_demand;
mod phase;
pub(crate) mod relay;
pub mod request;
pub mod response;
mod running_interceptors;
pub mod server;
mod stream;
pub mod wire;

/// The types of responses that the relay or the store treats specially.
const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";
const ROUTES: &str = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";
const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const WORKLOAD: &str = "type.googleapis.com/istio.workload.Workload";

/// Members of the node's metadata that change while a pod lives, and that an Envoy need not have to continue: network
/// plugins annotate a pod after its start, and a cloud's metadata service may answer late. Labels that do not change are
/// in `STATIC_LABELS`, too.
pub const CHANGING_METADATA: [&str; 3] = ["ANNOTATIONS", "LABELS", "PLATFORM_METADATA"];

/// The two forms of the aggregated discovery service.
///
/// Source: `envoy/service/discovery/v3/ads.proto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// State of the world: each response holds all resources of its type.
    Sotw,
    /// Each response holds the changed and removed resources.
    Delta,
}

impl Protocol {
    /// Returns the protocol of a gRPC path.
    pub fn from_path(path: &str) -> Option<Self> {
        [Self::Sotw, Self::Delta].into_iter().find(|protocol| protocol.path() == path)
    }

    /// Returns the gRPC path of the stream.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Sotw => {
                "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
            }
            Self::Delta => {
                "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"
            }
        }
    }

    /// Returns the word that pilot-agent's log lines put before a noun: none, or `delta `.
    pub(crate) const fn log_prefix(self) -> &'static str {
        match self {
            Self::Sotw => "",
            Self::Delta => "delta ",
        }
    }
}
