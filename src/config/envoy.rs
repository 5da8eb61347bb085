//! What Envoy is told: its bootstrap and its command line.
//!
//! Does not write or start anything.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value};

use super::environment as variables;
use super::pod::{self, NodeType, Pairs};
use super::{Problem, Sources, members};
use crate::bootstrap::{self, node};
use crate::cli::version::ISTIO_VERSION;
use crate::envoy::command::{Command, IpVersion, LogLevels};
use crate::envoy::{self, drain};

/// Longest wait for Envoy to answer the drain call.
const DRAIN_CALL: Duration = Duration::from_secs(2);
/// Envoy ends within milliseconds of being asked to, unless it is stuck.
const TERMINATE: Duration = Duration::from_secs(5);
const KILL: Duration = Duration::from_secs(5);

/// What a `serviceCluster` says that says nothing.
const NO_CLUSTER: &str = "istio-proxy";

impl Sources<'_> {
    pub(super) fn bootstrap(
        &mut self,
        xds_socket: &Path,
        sds_socket: &Path,
        log_as_json: bool,
    ) -> bootstrap::Config {
        let delta = self.get(&variables::ISTIO_DELTA_XDS);
        let node = self.node(sds_socket);
        bootstrap::Config {
            directory: self.mesh.config_path.clone().into(),
            xds_socket: xds_socket.to_owned(),
            sds_socket: sds_socket.to_owned(),
            delta,
            metadata_discovery: node.metadata_discovery && delta,
            log_as_json,
            admin_port: self.mesh.admin_port,
            agent_port: self.mesh.status_port,
            health_port: node.ports.health,
            prometheus_port: node.ports.prometheus,
            outlier_log_path: Some(self.flags.outlier_log_path.clone()).filter(|p| !p.is_empty()),
            node,
        }
    }

    pub(super) fn envoy(&mut self, bootstrap: &bootstrap::Config) -> Option<envoy::Config> {
        if self.get(&variables::DISABLE_ENVOY) {
            return None;
        }
        let v6 = self.addresses.iter().all(IpAddr::is_ipv6);
        Some(envoy::Config {
            command: self.command(bootstrap, v6),
            admin_host: if v6 {
                IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])
            } else {
                [127, 0, 0, 1].into()
            },
            admin_port: self.mesh.admin_port,
            drain_inbound_only: self.flags.kind == NodeType::Sidecar,
            drain_call: DRAIN_CALL,
            limits: drain::Limits {
                drain: self.mesh.termination_drain_duration,
                terminate: TERMINATE,
                kill: KILL,
            },
        })
    }

    fn command(&mut self, bootstrap: &bootstrap::Config, v6: bool) -> Command {
        let level = &self.flags.proxy_log_level;
        let (log, dropped) = LogLevels::split(level, &self.flags.proxy_component_log_level);
        self.warnings
            .extend(dropped.into_iter().map(|part| Problem {
                subject: "--proxyLogLevel".to_owned(),
                found: part,
                expected: "a level or component:level, leaving it out".to_owned(),
            }));
        Command {
            binary: self.mesh.binary_path.clone(),
            bootstrap: self
                .mesh
                .custom_bootstrap
                .clone()
                .unwrap_or_else(|| bootstrap.file()),
            drain_time: self.mesh.drain_duration,
            ip_version: if v6 { IpVersion::V6 } else { IpVersion::V4 },
            file_flush_interval: self.mesh.file_flush_interval,
            log,
            skip_deprecated_logs: bootstrap.node.skip_deprecated_logs,
            concurrency: self.mesh.concurrency.filter(|threads| *threads != 0),
        }
    }

    fn node(&mut self, sds_socket: &Path) -> node::Node {
        let name = self.get(&variables::POD_NAME);
        let (raw, static_labels) = self.raw_metadata();
        let labels = self.labels.clone();
        let label = |key: &str| labels.as_ref().unwrap_or(&static_labels).get(key);
        let hbone = raw
            .get("ENABLE_HBONE")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let domain = match self.flags.domain.as_str() {
            "" => format!("{}.svc.cluster.local", self.namespace),
            domain => domain.to_owned(),
        };
        let address = self.addresses[0];
        node::Node {
            id: pod::node_id(self.flags.kind, address, &name, &self.namespace, &domain),
            cluster: self.cluster(label, &raw),
            addresses: self.addresses.clone(),
            name,
            namespace: self.namespace.clone(),
            service_account: self.get(&variables::SERVICE_ACCOUNT),
            metadata_discovery: <bool as variables::Value>::parse(hbone) == Some(true),
            raw,
            static_labels,
            labels,
            annotations: self.annotations.clone(),
            proxy_config: self.mesh.document.clone(),
            version: ISTIO_VERSION.to_owned(),
            ports: node::Ports {
                health: self.get(&variables::ENVOY_STATUS_PORT),
                prometheus: self.get(&variables::ENVOY_PROMETHEUS_PORT),
            },
            istiod_san: self.istiod_san(),
            sds_socket_file: sds_socket
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into(),
            skip_deprecated_logs: self.get(&variables::ENVOY_SKIP_DEPRECATED_LOGS),
        }
    }

    fn istiod_san(&self) -> Option<String> {
        let (host, _) = members::split_address(&self.mesh.discovery_address)?;
        let name = if host == "localhost" {
            "istiod.istio-system.svc"
        } else {
            host
        };
        (!self.mesh.plaintext).then(|| name.to_owned())
    }

    /// Members of node metadata as given: `proxyMetadata`, then `ISTIO_META_*`, then the members of
    /// `ISTIO_METAJSON_*`, each over the one before. Labels among them are returned apart.
    fn raw_metadata(&mut self) -> (Map<String, Value>, Pairs) {
        let mut raw = Map::new();
        let of_mesh = self.mesh.metadata.iter();
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
                Err(error) => self.warnings.push(Problem {
                    subject: format!("ISTIO_METAJSON_{name}"),
                    found: error.to_string(),
                    expected: "a JSON object, leaving it out".to_owned(),
                }),
            }
        }
        (raw, labels)
    }

    /// The name of Envoy's own cluster: as configured, else after the workload.
    fn cluster<'l>(
        &self,
        label: impl Fn(&str) -> Option<&'l String>,
        raw: &Map<String, Value>,
    ) -> String {
        let configured = self.mesh.service_cluster.as_str();
        let configured = if configured.is_empty() {
            &self.flags.service_cluster
        } else {
            configured
        };
        if !configured.is_empty() && configured != NO_CLUSTER {
            return configured.to_owned();
        }
        let workload = raw.get("WORKLOAD_NAME").and_then(Value::as_str);
        let name = [
            "app",
            "app.kubernetes.io/name",
            "service.istio.io/canonical-name",
        ]
        .into_iter()
        .find_map(|key| label(key).map(String::as_str))
        .or(workload.filter(|name| !name.is_empty()));
        match (name, self.namespace.as_str()) {
            (None, "") => NO_CLUSTER.to_owned(),
            (name, namespace) => format!("{}.{namespace}", name.unwrap_or(NO_CLUSTER)),
        }
    }
}
