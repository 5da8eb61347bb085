//! Builds Envoy's node: id, cluster, locality, and the metadata by which istiod chooses its configuration.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::{Value, json};

use super::metadata;
use super::platform::Platform;
use crate::proxy_config::ProxyConfig;

/// Members of node metadata by name.
pub type Metadata = BTreeMap<String, Value>;

#[derive(Clone, Debug)]
pub struct Node {
    pub id: String,
    pub cluster: String,
    /// Never empty, each once.
    pub addresses: Vec<IpAddr>,
    /// The metadata without the platform's members.
    pub metadata: Metadata,
    /// The locality in the labels of the pod.
    pub locality: Option<Locality>,
    pub proxy_config: ProxyConfig,
    pub platform: Platform,
}

/// The locality of the workload: region, zone and sub-zone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Locality {
    pub region: String,
    pub zone: String,
    pub sub_zone: String,
}

impl Node {
    /// Returns true if the flag `name` of the metadata is true.
    pub(crate) fn is_true(&self, name: &str) -> bool {
        self.metadata.get(name).is_some_and(|value| value == "true")
    }

    /// Returns the locality in the labels, else the platform's.
    pub(super) fn locality(&self) -> &Locality {
        self.locality.as_ref().unwrap_or(&self.platform.locality)
    }

    fn metadata(&self) -> Metadata {
        let mut metadata = self.metadata.clone();
        let platform = &self.platform.metadata;
        if !platform.is_empty() {
            metadata.insert("PLATFORM_METADATA".to_owned(), json!(platform));
        }
        metadata
    }

    /// Returns the metadata of a gRPC application: the members with a type, and the generator.
    pub(super) fn application_metadata(&self) -> Metadata {
        let mut metadata = self.metadata();
        metadata.retain(|name, value| metadata::is_typed(name) && !metadata::is_left_out(value));
        metadata.insert("GENERATOR".to_owned(), json!("grpc"));
        metadata
    }
}

pub(super) fn section(node: &Node) -> Value {
    json!({
        "id": node.id,
        "cluster": node.cluster,
        "locality": node.locality().section(),
        "metadata": node.metadata(),
    })
}

impl Locality {
    /// Reads the pod's locality label, and sets the older label to the same locality.
    pub(crate) fn from_labels(labels: &mut BTreeMap<String, String>) -> Option<Self> {
        let found = labels
            .get("topology.istio.io/locality")
            .or_else(|| labels.get("istio-locality"))
            .filter(|text| !text.is_empty())?;
        // Label values cannot contain a slash, so dots may stand for slashes.
        let text = if found.contains('/') { found.clone() } else { found.replace('.', "/") };
        let mut parts = text.split('/').map(str::to_owned);
        let [region, zone, sub_zone] = [(); 3].map(|()| parts.next().unwrap_or_default());
        labels.insert("istio-locality".to_owned(), text);
        Some(Self { region, zone, sub_zone })
    }

    pub(super) fn section(&self) -> Value {
        let Self { region, zone, sub_zone } = self;
        let parts = [("region", region), ("zone", zone), ("sub_zone", sub_zone)].into_iter();
        parts
            .filter(|(_, part)| !part.is_empty())
            .map(|(name, part)| (name, part.as_str()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_locality_label_gives_up_to_three_parts() {
        for (label, text, expected) in [
            ("istio-locality", "r.z.s", json!({"region": "r", "zone": "z", "sub_zone": "s"})),
            ("topology.istio.io/locality", "r/z.1", json!({"region": "r", "zone": "z.1"})),
            ("istio-locality", "r/z/s/more", json!({"region": "r", "zone": "z", "sub_zone": "s"})),
            ("istio-locality", "", json!({})),
            ("other", "r", json!({})),
        ] {
            let mut labels = BTreeMap::from([(label.to_owned(), text.to_owned())]);
            let locality = Locality::from_labels(&mut labels).unwrap_or_default();
            assert_eq!(locality.section(), expected, "{label}={text}");
        }
    }
}
