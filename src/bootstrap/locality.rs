//! The locality of the workload: region, zone and sub-zone.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Locality {
    pub region: String,
    pub zone: String,
    pub sub_zone: String,
}

impl Locality {
    /// Reads the pod's locality label, and adds the older label if it is missing.
    pub(super) fn from_labels(labels: &mut BTreeMap<String, String>) -> Option<Self> {
        let found = labels
            .get("topology.istio.io/locality")
            .or_else(|| labels.get("istio-locality"))
            .filter(|text| !text.is_empty())?;
        let text = if found.contains('/') {
            found.clone()
        } else {
            // A label value cannot hold a slash.
            found.replace('.', "/")
        };
        let mut parts = text.split('/').map(str::to_owned);
        let locality = Self {
            region: parts.next().unwrap_or_default(),
            zone: parts.next().unwrap_or_default(),
            sub_zone: parts.next().unwrap_or_default(),
        };
        labels.insert("istio-locality".to_owned(), text);
        Some(locality)
    }

    pub(super) fn section(&self) -> Value {
        let parts = [
            ("region", &self.region),
            ("zone", &self.zone),
            ("sub_zone", &self.sub_zone),
        ];
        let parts = parts.into_iter().filter(|(_, part)| !part.is_empty());
        let parts: Map<_, _> = parts
            .map(|(name, part)| (name.to_owned(), part.as_str().into()))
            .collect();
        parts.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
            let locality = Locality::from_labels(&mut labels).unwrap_or_default();
            assert_eq!(locality.section(), expected, "{label}={text}");
        }
    }
}
