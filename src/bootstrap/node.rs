//! Who Envoy says it is: id, cluster, locality and the metadata istiod decides by.
//!
//! Does not ask the platform where it runs.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::{Map, Value, json};

/// The sources of the node section.
#[derive(Clone, Debug)]
pub struct Node {
    pub id: String,
    pub cluster: String,
    /// Never empty.
    pub addresses: Vec<IpAddr>,
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    /// Members from the environment and from `proxyMetadata`, untyped.
    pub raw: Map<String, Value>,
    /// Labels given by the environment. Those of the pod win over them.
    pub static_labels: BTreeMap<String, String>,
    pub labels: Option<BTreeMap<String, String>>,
    pub annotations: BTreeMap<String, String>,
    pub proxy_config: Map<String, Value>,
    pub version: String,
    pub ports: Ports,
    /// Name in istiod's certificate; absent when it has none.
    pub istiod_san: Option<String>,
    pub sds_socket_file: String,
    pub skip_deprecated_logs: bool,
    pub metadata_discovery: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Ports {
    pub health: u16,
    pub prometheus: u16,
}

pub fn section(node: &Node) -> Value {
    let mut labels = labels(node);
    let locality = locality(&mut labels);
    json!({
        "id": node.id,
        "cluster": node.cluster,
        "locality": locality,
        "metadata": metadata(node, labels),
    })
}

/// What the agent knows wins over what it was told, and absent is better than empty.
fn metadata(node: &Node, labels: BTreeMap<String, String>) -> Value {
    let addresses: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
    let mut known = vec![
        ("ANNOTATIONS", json!(node.annotations)),
        ("ENVOY_PROMETHEUS_PORT", json!(node.ports.prometheus)),
        ("ENVOY_STATUS_PORT", json!(node.ports.health)),
        ("INSTANCE_IPS", json!(addresses.join(","))),
        ("LABELS", json!(labels)),
        (
            "METADATA_DISCOVERY",
            json!(node.metadata_discovery.to_string()),
        ),
        ("NAME", json!(node.name)),
        ("NAMESPACE", json!(node.namespace)),
        ("PROXY_CONFIG", json!(node.proxy_config)),
        ("SERVICE_ACCOUNT", json!(node.service_account)),
        ("STATIC_LABELS", json!(node.static_labels)),
        ("WORKLOAD_IDENTITY_SOCKET_FILE", json!(node.sds_socket_file)),
    ];
    if node.skip_deprecated_logs {
        known.push(("ENVOY_SKIP_DEPRECATED_LOGS", json!("true")));
    }
    if let Some(san) = &node.istiod_san {
        known.push(("PILOT_SAN", json!([san])));
    }
    let mut metadata: BTreeMap<&str, Value> = node
        .raw
        .iter()
        .map(|(name, value)| (name.as_str(), value.clone()))
        .collect();
    metadata
        .entry("ISTIO_VERSION")
        .or_insert_with(|| json!(node.version));
    metadata.extend(known.into_iter().filter(|(_, value)| !is_empty(value)));
    json!(metadata)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Object(members) => members.is_empty(),
        _ => false,
    }
}

fn labels(node: &Node) -> BTreeMap<String, String> {
    let mut labels = node.static_labels.clone();
    if let Some(of_pod) = &node.labels {
        labels.extend(of_pod.clone());
        // It changes with every rollout and tells nothing.
        labels.remove("pod-template-hash");
    }
    labels
}

/// Region, zone and sub-zone from the pod's locality label, which is left in its old spelling too.
fn locality(labels: &mut BTreeMap<String, String>) -> Value {
    let found = labels
        .get("topology.istio.io/locality")
        .or_else(|| labels.get("istio-locality"))
        .filter(|text| !text.is_empty());
    let Some(found) = found else {
        return json!({});
    };
    let text = if found.contains('/') {
        found.clone()
    } else {
        // A label value cannot hold a slash.
        found.replace('.', "/")
    };
    let parts = ["region", "zone", "sub_zone"]
        .into_iter()
        .zip(text.split('/'));
    let locality: Map<_, _> = parts
        .filter(|(_, part)| !part.is_empty())
        .map(|(name, part)| (name.to_owned(), part.into()))
        .collect();
    labels.insert("istio-locality".to_owned(), text);
    locality.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locality_label_gives_up_to_three_parts() {
        for (label, text, expected) in [
            (
                "istio-locality",
                "r.z.s",
                json!({"region": "r", "zone": "z", "sub_zone": "s"}),
            ),
            (
                "topology.istio.io/locality",
                "r/z.1",
                json!({"region": "r", "zone": "z.1"}),
            ),
            (
                "istio-locality",
                "r/z/s/more",
                json!({"region": "r", "zone": "z", "sub_zone": "s"}),
            ),
            ("istio-locality", "", json!({})),
            ("other", "r", json!({})),
        ] {
            let mut labels = BTreeMap::from([(label.to_owned(), text.to_owned())]);
            assert_eq!(locality(&mut labels), expected, "{label}={text}");
        }
    }
}
