//! Envoy's node: id, cluster, locality and the metadata istiod decides by.
//!
//! What the agent knows overrides metadata from its environment. Empty members are left out.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::{Map, Value, json};

use super::locality::Locality;
use super::metadata;
use super::platform::Platform;
use crate::proxy_config::ProxyConfig;

/// The sources of the node section.
#[derive(Clone, Debug)]
pub struct Node {
    pub id: String,
    pub cluster: String,
    /// Never empty, each once.
    pub addresses: Vec<IpAddr>,
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    /// Members from the environment and from `proxyMetadata`, after [`metadata::check`].
    pub raw: Map<String, Value>,
    /// Labels from the environment. Labels of the pod override them.
    pub static_labels: BTreeMap<String, String>,
    pub labels: Option<BTreeMap<String, String>>,
    pub annotations: BTreeMap<String, String>,
    pub proxy_config: ProxyConfig,
    pub version: String,
    pub ports: Ports,
    /// Name in istiod's certificate; absent when it has none.
    pub istiod_san: Option<String>,
    pub sds_socket_file: String,
    pub skip_deprecated_logs: bool,
    pub metadata_discovery: bool,
    /// Whether the agent ends when Envoy has no connection left.
    pub exit_on_zero_connections: bool,
    pub outlier_log_path: String,
    pub platform: Platform,
}

/// Ports istiod is told about; zero is none.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    pub health: u16,
    pub prometheus: u16,
    pub secure_metrics: u16,
    pub secure_merged_metrics: u16,
    pub sts: u16,
}

impl Node {
    /// Whether the member `name` of [`Self::raw`] is true.
    pub(super) fn is_true(&self, name: &str) -> bool {
        self.raw.get(name).is_some_and(|value| value == "true")
    }
}

/// The node as Envoy has it.
pub(super) fn section(node: &Node) -> Value {
    let (locality, metadata) = described(node);
    json!({
        "id": node.id,
        "cluster": node.cluster,
        "locality": locality.section(),
        "metadata": metadata,
    })
}

/// Locality and metadata, which share the labels.
pub(super) fn described(node: &Node) -> (Locality, BTreeMap<&str, Value>) {
    let (mut labels, mut static_labels) = (labels(node), node.static_labels.clone());
    let locality = Locality::from_labels(&mut labels);
    if node.labels.is_none() {
        static_labels.clone_from(&labels);
    }
    let locality = locality.unwrap_or_else(|| node.platform.locality.clone());
    (locality, metadata(node, &labels, &static_labels))
}

fn metadata<'n>(
    node: &'n Node,
    labels: &BTreeMap<String, String>,
    static_labels: &BTreeMap<String, String>,
) -> BTreeMap<&'n str, Value> {
    let mut known = agent_members(node);
    known.extend([
        ("ANNOTATIONS", json!(annotations(node))),
        ("LABELS", json!(labels)),
        ("STATIC_LABELS", json!(static_labels)),
        ("PLATFORM_METADATA", json!(node.platform.metadata)),
        ("PROXY_CONFIG", node.proxy_config.document().into()),
        ("NAME", json!(node.name)),
        ("NAMESPACE", json!(node.namespace)),
        ("SERVICE_ACCOUNT", json!(node.service_account)),
    ]);
    let given = node.raw.iter();
    let mut metadata: BTreeMap<&str, Value> = given
        .map(|(name, value)| (name.as_str(), value.clone()))
        .collect();
    metadata
        .entry("ISTIO_VERSION")
        .or_insert_with(|| json!(node.version));
    metadata.extend(known.into_iter().filter(|(_, value)| !is_empty(value)));
    metadata
}

/// Members that the agent decides.
fn agent_members(node: &Node) -> Vec<(&'static str, Value)> {
    let addresses: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
    let when = |flag: bool| if flag { json!("true") } else { Value::Null };
    let sts = Some(node.ports.sts).filter(|port| *port != 0);
    vec![
        ("ENVOY_PROMETHEUS_PORT", json!(node.ports.prometheus)),
        (
            "ENVOY_SECURE_MERGED_METRICS_PORT",
            json!(node.ports.secure_merged_metrics),
        ),
        (
            "ENVOY_SECURE_METRICS_PORT",
            json!(node.ports.secure_metrics),
        ),
        (
            "ENVOY_SKIP_DEPRECATED_LOGS",
            when(node.skip_deprecated_logs),
        ),
        ("ENVOY_STATUS_PORT", json!(node.ports.health)),
        (
            "EXIT_ON_ZERO_ACTIVE_CONNECTIONS",
            when(node.exit_on_zero_connections),
        ),
        ("INSTANCE_IPS", json!(addresses.join(","))),
        (
            "METADATA_DISCOVERY",
            json!(node.metadata_discovery.to_string()),
        ),
        ("OUTLIER_LOG_PATH", json!(node.outlier_log_path)),
        (
            "PILOT_SAN",
            json!(node.istiod_san.as_ref().map(|san| [san])),
        ),
        ("STS_PORT", json!(sts.map(|port| port.to_string()))),
        ("WORKLOAD_IDENTITY_SOCKET_FILE", json!(node.sds_socket_file)),
    ]
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Number(number) => number.as_u64() == Some(0),
        _ => false,
    }
}

/// Annotations of the metadata, overridden by annotations of the pod.
fn annotations(node: &Node) -> Map<String, Value> {
    let given = node.raw.get("ANNOTATIONS").and_then(Value::as_object);
    let mut annotations = given.cloned().unwrap_or_default();
    let of_pod = node.annotations.iter();
    annotations.extend(of_pod.map(|(name, text)| (name.clone(), json!(text))));
    annotations
}

fn labels(node: &Node) -> BTreeMap<String, String> {
    let mut labels = node.static_labels.clone();
    if let Some(of_pod) = &node.labels {
        labels.extend(of_pod.clone());
        // It changes with every rollout.
        labels.remove("pod-template-hash");
    }
    labels
}

/// Metadata of a gRPC application: only members with a type, and the generator.
pub(super) fn application(node: &Node) -> (Locality, BTreeMap<&str, Value>) {
    let (locality, mut metadata) = described(node);
    metadata.retain(|name, value| metadata::is_typed(name) && !is_empty(value));
    metadata.insert("GENERATOR", json!("grpc"));
    (locality, metadata)
}
