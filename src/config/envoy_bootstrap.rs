//! Configures Envoy's bootstrap with its node, the bootstrap for gRPC applications, and the detection of the
//! cloud platform.
//!
//! The node has the id, the cluster, the locality and the metadata by which istiod chooses its configuration.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indexmap::IndexSet;
use serde_json::{Map, Number, Value, json};

use super::admin::{self, Unusable};
use super::control_plane::ISTIOD_NAME;
use super::environment as variables;
use super::pod::{NodeType, Pairs};
use super::{IGNORED, Loader};
use crate::bootstrap::metadata::{self, is_left_out};
use crate::bootstrap::node::{Locality, Metadata, Node};
use crate::bootstrap::platform::{self, Platform};
use crate::bootstrap::{self, Ports, StatsConfig, grpc};
use crate::net::address;
use crate::net::unix_socket;
use crate::problem::{Code, Problem};
use crate::proxy_config::proxy_config::{ClusterName, TracingServiceName};
use crate::runtime::duration;
use crate::trust::compliance::Policy;
use crate::{json, version};

const PREFIX: &str = "sidecar.istio.io/";
/// The socket at which the agent serves secrets from files while another process serves the workload's.
const FILES_SOCKET: &str = "./var/run/secrets/credential-uds/files-socket";
/// Envoy's default flush interval.
const FLUSH: Duration = Duration::from_secs(5);

/// The default of `serviceCluster`, which names no workload.
const NO_CLUSTER: &str = "istio-proxy";

/// Labels with the name of a workload, in the order for its cluster. Telemetry has the reverse order.
const NAME_LABELS: [&str; 3] = ["app", "app.kubernetes.io/name", "service.istio.io/canonical-name"];

impl Loader<'_> {
    /// Configures Envoy's bootstrap. Reports values that cannot be used.
    pub(super) fn bootstrap(
        &mut self,
        xds_socket: &Path,
        sds_socket: &Path,
        log_as_json: bool,
    ) -> bootstrap::Config {
        let ports = Ports {
            health: self.get(&variables::ENVOY_STATUS_PORT),
            prometheus: self.get(&variables::ENVOY_PROMETHEUS_PORT),
            secure_metrics: self.port_or_none(&variables::ENVOY_SECURE_METRICS_PORT),
            secure_merged_metrics: self.port_or_none(&variables::ENVOY_SECURE_MERGED_METRICS_PORT),
        };
        let node = self.node(sds_socket, &ports);
        let is_waypoint = self.flags.kind == NodeType::Waypoint;
        let delta = self.get(&variables::ISTIO_DELTA_XDS) || is_waypoint;
        let metadata_discovery = node.is_true("METADATA_DISCOVERY") || is_waypoint;
        if metadata_discovery && !delta {
            self.warn("ISTIO_DELTA_XDS", "false", "true", "the peers' metadata is not discovered");
        }
        let container = self.container();
        let exit_on_zero_connections = self.get(&variables::EXIT_ON_ZERO_ACTIVE_CONNECTIONS);
        let admin_socket = self.admin_socket();
        let strips_fragment = &variables::HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED;
        bootstrap::Config {
            directory: match container.as_str() {
                "" => self.proxy_config.config_path.clone().into(),
                container => Path::new(&self.proxy_config.config_path).join(container),
            },
            revision: None,
            ports,
            xds_socket: unix_socket::container_path(xds_socket, &container),
            sds_socket: unix_socket::container_path(sds_socket, &container),
            files_socket: unix_socket::container_path(Path::new(FILES_SOCKET), &container),
            admin_socket,
            delta,
            metadata_discovery: metadata_discovery && delta,
            dual_stack: self.get(&variables::ISTIO_DUAL_STACK),
            log_as_json,
            health_proxy_protocol: self.get(&variables::ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL),
            exit_on_zero_connections,
            outlier_log_path: Some(self.flags.outlier_log_path.clone()).filter(|p| !p.is_empty()),
            stats: self.stats(exit_on_zero_connections),
            host_ip: self.get(&variables::HOST_IP),
            compliance_fips_140_2: self.policy == Policy::Fips140_2,
            keep_path_fragment: !self.get(strips_fragment),
            load_stats: self.load_stats(&node),
            node,
        }
    }

    /// Returns the name of this container, if two containers of the pod run the agent.
    pub(super) fn container(&mut self) -> String {
        self.get(&variables::ISTIO_AGENT_STANDBY)
    }

    /// Returns the socket of Envoy's admin interface. None for a port.
    fn admin_socket(&mut self) -> Option<PathBuf> {
        match admin::socket(&self.proxy_config, self.env) {
            Ok(socket) => return socket,
            Err(Unusable::Refused(problem)) => self.notes.problems.push(problem),
            Err(Unusable::Ignored(problem)) => self.notes.warnings.push(problem),
        }
        None
    }

    fn port_or_none(&mut self, variable: &variables::Variable<u32>) -> u16 {
        let port = self.get(variable);
        u16::try_from(port).unwrap_or_else(|_| {
            self.problem(variable.row.name, port, "a port, or 0 for none");
            0
        })
    }

    /// Reads Envoy's load reporting service from the node metadata; None if it is not set or invalid.
    fn load_stats(&mut self, node: &Node) -> Option<Value> {
        const NAME: &str = "LOAD_STATS_CONFIG_JSON";
        let text = node.metadata.get(NAME)?.as_str()?;
        if text.is_empty() {
            return None;
        }
        let parsed = serde_json::from_str(text).ok().filter(Value::is_object);
        if parsed.is_none() {
            let subject = format!("ISTIO_META_{NAME}");
            let code = Code::LoadStatsConfigInvalid;
            self.notes.add(Problem::value(code, subject, text, "a JSON object"));
        }
        parsed
    }

    /// Configures the bootstrap of gRPC applications; None if it is switched off.
    pub(super) fn grpc(&self, xds_socket: &Path) -> Option<grpc::Config> {
        Some(grpc::Config {
            path: self.get(&variables::GRPC_XDS_BOOTSTRAP)?,
            xds_socket: xds_socket.to_owned(),
            certificates: self.get(&variables::OUTPUT_CERTS),
        })
    }

    /// Configures the detection of the cloud platform.
    pub(super) fn platform(&self) -> platform::Config {
        let quota_project = self.get(&variables::GCP_QUOTA_PROJECT);
        let zone = self.get(&variables::GCP_ZONE);
        let known = self.get(&variables::GCP_METADATA);
        platform::Config {
            choice: self.get(&variables::CLOUD_PLATFORM),
            gcp: known.map(|known| platform::known_google(known, quota_project, zone)),
            gcp_host: self.get(&variables::GCE_METADATA_HOST),
            root: "/".into(),
            v6: self.addresses.iter().any(IpAddr::is_ipv6),
        }
    }

    /// Configures the statistics a pod adds to the default ones. Annotations win over ProxyConfig.
    fn stats(&mut self, until_idle: bool) -> StatsConfig {
        let matcher = self.proxy_config.proxy_stats_matcher.clone().unwrap_or_default();
        let expected = "a duration from 1ms to less than 5m";
        let flush = self.interval("statsFlushInterval", expected, |flush| {
            flush.is_zero() || (1..300_000).contains(&flush.as_millis())
        });
        let expected = "a multiple of the flush interval";
        let multiple_of = flush.unwrap_or(FLUSH).as_nanos();
        let eviction = self.interval("statsEvictionInterval", expected, |eviction| {
            eviction.as_nanos().is_multiple_of(multiple_of)
        });
        StatsConfig {
            prefixes: self.annotation_or("statsInclusionPrefixes", &matcher.inclusion_prefixes),
            suffixes: self.annotation_or("statsInclusionSuffixes", &matcher.inclusion_suffixes),
            expressions: self.annotation_or("statsInclusionRegexps", &matcher.inclusion_regexps),
            in_flight_expressions: self.request_statistics(until_idle),
            tags: self.tags(),
            buckets: self.buckets(),
            flush,
            eviction,
        }
    }

    fn stats_annotation(&self, name: &str) -> Option<&str> {
        let text = self.annotations.get(&format!("{PREFIX}{name}"))?;
        Some(text.as_str()).filter(|text| !text.is_empty())
    }

    /// Returns the annotation's list, else the setting's.
    fn annotation_or(&self, annotation: &str, setting: &[String]) -> Vec<String> {
        match self.stats_annotation(annotation) {
            Some(list) => list.split(',').map(str::to_owned).collect(),
            None => setting.to_vec(),
        }
    }

    fn tags(&self) -> Vec<String> {
        let annotation = self.stats_annotation("extraStatTags").unwrap_or_default();
        let mut tags: IndexSet<_> = self.proxy_config.extra_stat_tags.iter().cloned().collect();
        tags.extend(annotation.split(',').map(str::to_owned));
        tags.into_iter().filter(|tag| !tag.is_empty()).collect()
    }

    fn buckets(&mut self) -> BTreeMap<String, Vec<Number>> {
        const NAME: &str = "statsHistogramBuckets";
        let text = self.stats_annotation(NAME).unwrap_or("{}").to_owned();
        json::read(&text).unwrap_or_else(|_| {
            let expected = "a JSON object of lists of numbers";
            self.warn(format!("{PREFIX}{NAME}"), &text, expected, IGNORED);
            BTreeMap::new()
        })
    }

    /// Reads an interval; None if it is invalid, or zero, which stands for Envoy's default.
    fn interval(
        &mut self,
        annotation: &str,
        expected: &'static str,
        is_valid: impl Fn(&Duration) -> bool,
    ) -> Option<Duration> {
        let text = self.stats_annotation(annotation)?.to_owned();
        let interval = duration::parse(&text).filter(is_valid);
        if interval.is_none() {
            self.warn(format!("{PREFIX}{annotation}"), text, expected, IGNORED);
        }
        interval.filter(|interval| !interval.is_zero())
    }

    /// Returns the domain in which the pod looks up services.
    pub(super) fn domain(&self) -> String {
        match self.flags.domain.as_str() {
            "" => format!("{}.svc.cluster.local", self.namespace),
            domain => domain.to_owned(),
        }
    }

    /// Configures Envoy's node. Its metadata are the members as given, and those that the agent derives.
    fn node(&mut self, sds_socket: &Path, ports: &Ports) -> Node {
        let name = self.get(&variables::POD_NAME);
        let (raw, static_labels) = self.raw_metadata();
        let domain = self.domain();
        let kind = self.flags.kind;
        let address = self.addresses[0];
        let mut labels = static_labels.clone();
        if let Some(pod_labels) = &self.labels {
            labels.extend(pod_labels.clone());
            // This label changes with every rollout.
            labels.remove("pod-template-hash");
        }
        let locality = Locality::from_labels(&mut labels);
        let static_labels = match self.labels {
            Some(_) => &static_labels,
            None => &labels,
        };
        let cluster = self.cluster(&labels, &raw);
        let members = self.derived_metadata(&raw, sds_socket, ports).into_iter().chain([
            ("LABELS", json!(labels)),
            ("STATIC_LABELS", json!(static_labels)),
            ("NAME", json!(name)),
        ]);
        let mut metadata: Metadata = raw.into_iter().collect();
        if metadata.get("ISTIO_VERSION").is_none_or(is_left_out) {
            match version::istio() {
                Ok(istio) => drop(metadata.insert("ISTIO_VERSION".to_owned(), istio.into())),
                Err(problem) => self.notes.problems.push(problem),
            }
        }
        for (name, value) in members.filter(|(_, value)| !is_left_out(value)) {
            metadata.insert(name.to_owned(), value);
        }
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

    /// Derives members of the metadata. They override members as given, unless they are empty.
    fn derived_metadata(
        &self,
        raw: &Map<String, Value>,
        sds_socket: &Path,
        ports: &Ports,
    ) -> [(&'static str, Value); 16] {
        let addresses: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        let sts_port = Some(self.flags.sts_port).filter(|port| *port != 0);
        let peers = &variables::PEER_METADATA_DISCOVERY;
        let discovers_peers = if self.env.is_set(peers) {
            self.get(peers)
        } else {
            raw.get("ENABLE_HBONE").is_some_and(|value| value == "true")
        };
        let skips_logs = self.get(&variables::ENVOY_SKIP_DEPRECATED_LOGS);
        let exits_if_idle = self.get(&variables::EXIT_ON_ZERO_ACTIVE_CONNECTIONS);

        let merged_metrics = ports.secure_merged_metrics;
        let service_account = self.get(&variables::SERVICE_ACCOUNT);
        let socket_name = sds_socket.file_name().unwrap_or_default().to_string_lossy();
        let mut annotations =
            raw.get("ANNOTATIONS").and_then(Value::as_object).cloned().unwrap_or_default();
        annotations.extend(self.annotations.iter().map(|(name, text)| (name.clone(), json!(text))));
        [
            ("ANNOTATIONS", annotations.into()),
            ("ENVOY_PROMETHEUS_PORT", json!(ports.prometheus)),
            ("ENVOY_SECURE_MERGED_METRICS_PORT", json!(merged_metrics)),
            ("ENVOY_SECURE_METRICS_PORT", json!(ports.secure_metrics)),
            ("ENVOY_SKIP_DEPRECATED_LOGS", json!(skips_logs.then_some("true"))),
            ("ENVOY_STATUS_PORT", json!(ports.health)),
            ("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", json!(exits_if_idle.then_some("true"))),
            ("INSTANCE_IPS", json!(addresses.join(","))),
            ("METADATA_DISCOVERY", json!(discovers_peers.to_string())),
            ("NAMESPACE", json!(self.namespace)),
            ("OUTLIER_LOG_PATH", json!(self.flags.outlier_log_path)),
            ("PILOT_SAN", json!(self.istiod_san().map(|san| [san]))),
            ("PROXY_CONFIG", self.proxy_config.document().into()),
            ("SERVICE_ACCOUNT", json!(service_account)),
            ("STS_PORT", json!(sts_port.map(|port| port.to_string()))),
            ("WORKLOAD_IDENTITY_SOCKET_FILE", json!(socket_name)),
        ]
    }

    fn istiod_san(&self) -> Option<&str> {
        match address::split(&self.proxy_config.discovery_address)? {
            _ if self.proxy_config.is_plaintext() => None,
            ("localhost", _) => Some(ISTIOD_NAME),
            (host, _) => Some(host),
        }
    }

    /// Returns members of node metadata as given: `proxyMetadata`, then `ISTIO_META_*`, then the members of
    /// `ISTIO_METAJSON_*`, each over the one before. Also returns the labels among them.
    fn raw_metadata(&mut self) -> (Map<String, Value>, Pairs) {
        let mut raw = Map::new();
        for (name, value) in &self.proxy_config.proxy_metadata {
            if let Some(name) = name.strip_prefix("ISTIO_META_") {
                raw.insert(name.to_owned(), value.as_str().into());
            }
        }
        for (name, value) in self.env.with_prefix("ISTIO_META_") {
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
                    let problem = Problem::new(Code::SettingReplaced, subject, error);
                    self.notes.warnings.push(problem.consequence(IGNORED));
                }
            }
        }
        // It would make istiod send changes of the name table, which the agent does not support.
        raw.remove("DELTA_NDS");
        let address = self.get(&variables::DNS_PROXY_ADDR);
        if !address.is_empty() {
            raw.insert("DNS_PROXY_ADDR".to_owned(), address.into());
        }
        self.notes.problems.extend(metadata::canonicalize(&mut raw));
        (raw, labels)
    }

    /// Returns the name of Envoy's own cluster: the configured one, else one derived from the workload.
    fn cluster(&self, labels: &Pairs, raw: &Map<String, Value>) -> String {
        let workload = raw.get("WORKLOAD_NAME").and_then(Value::as_str);
        let workload = workload.filter(|name| !name.is_empty());
        // An empty label counts as a name.
        let names: Vec<&str> =
            NAME_LABELS.iter().filter_map(|key| labels.get(*key).map(String::as_str)).collect();
        let canonical = names.last().copied().or(workload);
        let namespace = self.namespace.as_str();
        let configured: &str = match &self.proxy_config.cluster_name {
            Some(ClusterName::TracingServiceName(by)) => match TracingServiceName::try_from(*by) {
                Ok(TracingServiceName::CanonicalNameAndNamespace) if !namespace.is_empty() => {
                    return format!("{}.{namespace}", canonical.unwrap_or(NO_CLUSTER));
                }
                Ok(TracingServiceName::AppLabelAndNamespace) | Err(_) => "",
                Ok(_) => canonical.unwrap_or_default(),
            },
            Some(ClusterName::ServiceCluster(name)) if !name.is_empty() => name,
            _ => &self.flags.service_cluster,
        };
        if !configured.is_empty() && configured != NO_CLUSTER {
            return configured.to_owned();
        }
        match names.first().copied().or(workload) {
            None if namespace.is_empty() => NO_CLUSTER.to_owned(),
            name => format!("{}.{namespace}", name.unwrap_or(NO_CLUSTER)),
        }
    }
}
