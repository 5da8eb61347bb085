//! Envoy's node: id, cluster and the inputs of node metadata.

use std::path::Path;

use serde_json::{Map, Value};

use super::environment as variables;
use super::pod::{self, Pairs};
use super::{Problem, Sources};
use crate::address;
use crate::bootstrap::platform::Platform;
use crate::bootstrap::{metadata, node};
use crate::proxy_config::TracingServiceName;
use crate::version::ISTIO_VERSION;

/// The default of `serviceCluster`, which names no workload.
const NO_CLUSTER: &str = "istio-proxy";

/// Labels with the name of a workload, in the order for its cluster. Telemetry has the reverse order.
const NAME_LABELS: [&str; 3] = [
    "app",
    "app.kubernetes.io/name",
    "service.istio.io/canonical-name",
];

impl Sources<'_> {
    /// The domain in which the pod looks for services.
    pub(super) fn domain(&self) -> String {
        match self.flags.domain.as_str() {
            "" => format!("{}.svc.cluster.local", self.namespace),
            domain => domain.to_owned(),
        }
    }

    pub(super) fn node(&mut self, sds_socket: &Path) -> node::Node {
        let name = self.get(&variables::POD_NAME);
        let (raw, static_labels) = self.raw_metadata();
        let domain = self.domain();
        let hbone = raw.get("ENABLE_HBONE").is_some_and(|value| value == "true");
        let peers = self.env.is_set(&variables::PEER_METADATA_DISCOVERY);
        let address = self.addresses[0];
        node::Node {
            id: pod::node_id(self.flags.kind, address, &name, &self.namespace, &domain),
            cluster: self.cluster(&static_labels, &raw),
            addresses: self.addresses.clone(),
            name,
            namespace: self.namespace.clone(),
            service_account: self.get(&variables::SERVICE_ACCOUNT),
            metadata_discovery: match peers {
                true => self.get(&variables::PEER_METADATA_DISCOVERY),
                false => hbone,
            },
            raw,
            static_labels,
            labels: self.labels.clone(),
            annotations: self.annotations.clone(),
            proxy_config: self.proxy_config.clone(),
            version: ISTIO_VERSION.to_owned(),
            ports: self.ports(),
            istiod_san: self.istiod_san(),
            sds_socket_file: sds_socket
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into(),
            skip_deprecated_logs: self.get(&variables::ENVOY_SKIP_DEPRECATED_LOGS),
            exit_on_zero_connections: self.get(&variables::EXIT_ON_ZERO_ACTIVE_CONNECTIONS),
            outlier_log_path: self.flags.outlier_log_path.clone(),
            platform: Platform::default(),
        }
    }

    fn ports(&mut self) -> node::Ports {
        node::Ports {
            health: self.get(&variables::ENVOY_STATUS_PORT),
            prometheus: self.get(&variables::ENVOY_PROMETHEUS_PORT),
            secure_metrics: self.port_or_none(&variables::ENVOY_SECURE_METRICS_PORT),
            secure_merged_metrics: self.port_or_none(&variables::ENVOY_SECURE_MERGED_METRICS_PORT),
            sts: self.flags.sts_port,
        }
    }

    fn port_or_none(&mut self, variable: &variables::Variable<u32>) -> u16 {
        let port = self.get(variable);
        u16::try_from(port).unwrap_or_else(|_| {
            self.problem(variable.name, &port.to_string(), "a port, or 0 for none");
            0
        })
    }

    fn istiod_san(&self) -> Option<String> {
        let (host, _) = address::split(&self.proxy_config.discovery_address)?;
        let name = if host == "localhost" {
            "istiod.istio-system.svc"
        } else {
            host
        };
        (!self.proxy_config.is_plaintext()).then(|| name.to_owned())
    }

    /// Members of node metadata as given: `proxyMetadata`, then `ISTIO_META_*`, then the members of
    /// `ISTIO_METAJSON_*`, each over the one before. Labels among them are returned apart.
    fn raw_metadata(&mut self) -> (Map<String, Value>, Pairs) {
        let mut raw = Map::new();
        let of_mesh = self.proxy_config.proxy_metadata.iter();
        let of_mesh =
            of_mesh.filter_map(|(k, v)| Some((k.strip_prefix("ISTIO_META_")?, v.0.as_str())));
        for (name, value) in of_mesh.chain(self.env.with_prefix("ISTIO_META_")) {
            raw.insert(name.to_owned(), value.into());
        }
        let mut labels = Pairs::new();
        for (name, text) in self.env.with_prefix("ISTIO_METAJSON_") {
            match serde_json::from_str::<Map<String, Value>>(text) {
                Ok(members) => {
                    if name == "LABELS" {
                        let texts = members.iter().filter_map(|(k, v)| Some((k, v.as_str()?)));
                        labels = texts.map(|(k, v)| (k.clone(), v.to_owned())).collect();
                    }
                    raw.extend(members);
                }
                Err(error) => {
                    let expected = "a JSON object, leaving it out";
                    let subject = format!("ISTIO_METAJSON_{name}");
                    let warning = Problem::new(subject, error.to_string(), expected);
                    self.notes.warnings.push(warning);
                }
            }
        }
        let dns = self.get(&variables::DNS_PROXY_ADDR);
        if !dns.is_empty() {
            raw.insert("DNS_PROXY_ADDR".to_owned(), dns.into());
        }
        for mismatch in metadata::check(&mut raw) {
            let subject = format!("{} of the node metadata", mismatch.name);
            self.problem(&subject, &mismatch.found, mismatch.expected);
        }
        (raw, labels)
    }

    /// The name of Envoy's own cluster: as configured, else after the workload.
    fn cluster(&self, static_labels: &Pairs, raw: &Map<String, Value>) -> String {
        let label = |keys: &[&str]| {
            let of_pod = |key: &&str| self.labels.as_ref().and_then(|labels| labels.get(*key));
            let found = |key: &&str| of_pod(key).or_else(|| static_labels.get(*key));
            keys.iter().find_map(found).cloned()
        };
        let workload = raw.get("WORKLOAD_NAME").and_then(Value::as_str);
        let workload = workload.filter(|name| !name.is_empty()).map(str::to_owned);
        let reversed: Vec<_> = NAME_LABELS.into_iter().rev().collect();
        let canonical = || {
            label(&reversed)
                .or_else(|| workload.clone())
                .unwrap_or_default()
        };
        let namespace = self.namespace.as_str();
        let service_cluster = self.proxy_config.service_cluster.as_ref();
        let configured = match (self.proxy_config.tracing_service_name, namespace) {
            (Some(TracingServiceName::CanonicalNameOnly), _)
            | (Some(TracingServiceName::CanonicalNameAndNamespace), "") => canonical(),
            (Some(TracingServiceName::CanonicalNameAndNamespace), _) => {
                let name = Some(canonical()).filter(|name| !name.is_empty());
                return format!("{}.{namespace}", name.as_deref().unwrap_or(NO_CLUSTER));
            }
            (Some(TracingServiceName::AppLabelAndNamespace), _) => String::new(),
            (None, _) => {
                let cluster = service_cluster.filter(|cluster| !cluster.is_empty());
                cluster.unwrap_or(&self.flags.service_cluster).clone()
            }
        };
        if !configured.is_empty() && configured != NO_CLUSTER {
            return configured;
        }
        match (label(&NAME_LABELS).or(workload), namespace) {
            (None, "") => NO_CLUSTER.to_owned(),
            (name, namespace) => format!("{}.{namespace}", name.as_deref().unwrap_or(NO_CLUSTER)),
        }
    }
}
