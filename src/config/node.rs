//! Envoy's node: id, cluster, locality and the metadata istiod decides by.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::control_plane::ISTIOD_NAME;
use super::environment as variables;
use super::pod::Pairs;
use super::{LEFT_OUT, Loader};
use crate::address;
use crate::bootstrap::Ports;
use crate::bootstrap::metadata::{self, is_empty};
use crate::bootstrap::node::{Locality, Metadata, Node};
use crate::bootstrap::platform::Platform;
use crate::problem::{Problem, codes};
use crate::proxy_config::proxy_config::{ClusterName, TracingServiceName};
use crate::version;

/// The default of `serviceCluster`, which names no workload.
const NO_CLUSTER: &str = "istio-proxy";

/// Labels with the name of a workload, in the order for its cluster. Telemetry has the reverse order.
const NAME_LABELS: [&str; 3] = [
    "app",
    "app.kubernetes.io/name",
    "service.istio.io/canonical-name",
];

impl Loader<'_> {
    /// The domain in which the pod looks for services.
    pub(super) fn domain(&self) -> String {
        match self.flags.domain.as_str() {
            "" => format!("{}.svc.cluster.local", self.namespace),
            domain => domain.to_owned(),
        }
    }

    pub(super) fn node(&mut self, sds_socket: &Path, ports: &Ports) -> Node {
        let name = self.get(&variables::POD_NAME);
        let (raw, static_labels) = self.raw_metadata();
        let domain = self.domain();
        let (kind, address) = (self.flags.kind, self.addresses[0]);
        let cluster = self.cluster(&static_labels, &raw);
        let mut labels = static_labels.clone();
        if let Some(of_pod) = &self.labels {
            labels.extend(of_pod.clone());
            // It changes with every rollout.
            labels.remove("pod-template-hash");
        }
        let locality = Locality::from_labels(&mut labels);
        let static_labels = match self.labels {
            Some(_) => static_labels,
            None => labels.clone(),
        };
        let mut known = self.known_metadata(&raw, sds_socket, ports).to_vec();
        known.extend([
            ("LABELS", json!(labels)),
            ("STATIC_LABELS", json!(static_labels)),
            ("NAME", json!(name)),
        ]);
        let mut metadata: Metadata = raw.into_iter().collect();
        if metadata.get("ISTIO_VERSION").is_none_or(is_empty) {
            match version::istio() {
                Ok(istio) => drop(metadata.insert("ISTIO_VERSION".to_owned(), istio.into())),
                Err(problem) => self.notes.problems.push(problem),
            }
        }
        let known = known.into_iter().filter(|(_, value)| !is_empty(value));
        metadata.extend(known.map(|(name, value)| (name.to_owned(), value)));
        Node {
            id: format!("{kind}~{address}~{name}.{}~{domain}", self.namespace),
            cluster,
            addresses: self.addresses.clone(),
            metadata,
            locality,
            proxy_config: self.proxy_config.clone(),
            platform: Platform::default(),
        }
    }

    /// Members that the agent decides. They override members as given, unless they are empty.
    fn known_metadata(
        &mut self,
        raw: &Map<String, Value>,
        sds_socket: &Path,
        ports: &Ports,
    ) -> [(&'static str, Value); 16] {
        let addresses: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        let when = |is_set: bool| is_set.then_some("true");
        let sts = Some(self.flags.sts_port).filter(|port| *port != 0);
        let peers = &variables::PEER_METADATA_DISCOVERY;
        let discovery = match self.env.is_set(peers) {
            true => self.get(peers),
            false => raw.get("ENABLE_HBONE").is_some_and(|value| value == "true"),
        };
        let skip_logs = self.get(&variables::ENVOY_SKIP_DEPRECATED_LOGS);
        let exit = self.get(&variables::EXIT_ON_ZERO_ACTIVE_CONNECTIONS);
        let socket_name = sds_socket.file_name().unwrap_or_default();
        let annotations = raw.get("ANNOTATIONS").and_then(Value::as_object);
        let mut annotations = annotations.cloned().unwrap_or_default();
        let of_pod = self.annotations.iter();
        annotations.extend(of_pod.map(|(name, text)| (name.clone(), json!(text))));
        [
            ("ANNOTATIONS", annotations.into()),
            ("ENVOY_PROMETHEUS_PORT", json!(ports.prometheus)),
            (
                "ENVOY_SECURE_MERGED_METRICS_PORT",
                json!(ports.secure_merged_metrics),
            ),
            ("ENVOY_SECURE_METRICS_PORT", json!(ports.secure_metrics)),
            ("ENVOY_SKIP_DEPRECATED_LOGS", json!(when(skip_logs))),
            ("ENVOY_STATUS_PORT", json!(ports.health)),
            ("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", json!(when(exit))),
            ("INSTANCE_IPS", json!(addresses.join(","))),
            ("METADATA_DISCOVERY", json!(discovery.to_string())),
            ("NAMESPACE", json!(self.namespace)),
            ("OUTLIER_LOG_PATH", json!(self.flags.outlier_log_path)),
            ("PILOT_SAN", json!(self.istiod_san().map(|san| [san]))),
            ("PROXY_CONFIG", self.proxy_config.document().into()),
            (
                "SERVICE_ACCOUNT",
                json!(self.get(&variables::SERVICE_ACCOUNT)),
            ),
            ("STS_PORT", json!(sts.map(|port| port.to_string()))),
            (
                "WORKLOAD_IDENTITY_SOCKET_FILE",
                json!(socket_name.to_string_lossy()),
            ),
        ]
    }

    pub(super) fn ports(&mut self) -> Ports {
        Ports {
            health: self.get(&variables::ENVOY_STATUS_PORT),
            prometheus: self.get(&variables::ENVOY_PROMETHEUS_PORT),
            secure_metrics: self.port_or_none(&variables::ENVOY_SECURE_METRICS_PORT),
            secure_merged_metrics: self.port_or_none(&variables::ENVOY_SECURE_MERGED_METRICS_PORT),
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
            ISTIOD_NAME
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
            of_mesh.filter_map(|(k, v)| Some((k.strip_prefix("ISTIO_META_")?, v.as_str())));
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
                    let subject = format!("ISTIO_METAJSON_{name}");
                    let problem = Problem::new(codes::SETTING_REPLACED, subject, error);
                    self.notes.warnings.push(problem.consequence(LEFT_OUT));
                }
            }
        }
        // It asks istiod for changes of the name table, which the agent does not take.
        raw.remove("DELTA_NDS");
        let dns = self.get(&variables::DNS_PROXY_ADDR);
        if !dns.is_empty() {
            raw.insert("DNS_PROXY_ADDR".to_owned(), dns.into());
        }
        self.notes.problems.extend(metadata::check(&mut raw));
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
        let canonical = || label(&reversed).or_else(|| workload.clone());
        let namespace = self.namespace.as_str();
        // A label may be empty, and counts then.
        let in_namespace =
            |name: Option<String>| format!("{}.{namespace}", name.as_deref().unwrap_or(NO_CLUSTER));
        let configured = match &self.proxy_config.cluster_name {
            Some(ClusterName::TracingServiceName(by)) => match TracingServiceName::try_from(*by) {
                Ok(TracingServiceName::CanonicalNameAndNamespace) if !namespace.is_empty() => {
                    return in_namespace(canonical());
                }
                Ok(TracingServiceName::AppLabelAndNamespace) | Err(_) => String::new(),
                Ok(_) => canonical().unwrap_or_default(),
            },
            Some(ClusterName::ServiceCluster(name)) if !name.is_empty() => name.clone(),
            _ => self.flags.service_cluster.clone(),
        };
        if !configured.is_empty() && configured != NO_CLUSTER {
            return configured;
        }
        match label(&NAME_LABELS).or(workload) {
            None if namespace.is_empty() => NO_CLUSTER.to_owned(),
            name => in_namespace(name),
        }
    }
}
