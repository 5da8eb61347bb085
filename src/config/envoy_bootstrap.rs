//! The configuration of Envoy's bootstrap, of the bootstrap for gRPC applications, and of the cloud
//! platform.

use std::net::IpAddr;
use std::path::Path;

use serde_json::Value;

use super::Sources;
use super::environment as variables;
use super::pod::NodeType;
use crate::bootstrap::{self, ClientFiles, grpc, node, platform};
use crate::compliance::Policy;

impl Sources<'_> {
    pub(super) fn bootstrap(
        &mut self,
        xds_socket: &Path,
        sds_socket: &Path,
        log_as_json: bool,
    ) -> bootstrap::Config {
        let node = self.node(sds_socket);
        let waypoint = self.flags.kind == NodeType::Waypoint;
        let delta = self.get(&variables::ISTIO_DELTA_XDS) || waypoint;
        let port = |port: u16| Some(port).filter(|port| *port != 0);
        bootstrap::Config {
            directory: self.proxy_config.config_path.clone().into(),
            revision: None,
            xds_socket: xds_socket.to_owned(),
            sds_socket: sds_socket.to_owned(),
            delta,
            metadata_discovery: self.metadata_discovery(&node, delta, waypoint),
            dual_stack: self.get(&variables::ISTIO_DUAL_STACK),
            log_as_json,
            admin_port: self.proxy_config.admin_port(),
            agent_port: self.proxy_config.agent_port(),
            health_port: node.ports.health,
            health_proxy_protocol: self.get(&variables::ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL),
            prometheus_port: node.ports.prometheus,
            metrics_localhost_only: self.proxy_config.metadata("METRICS_LOCALHOST_ACCESS_ONLY")
                == Some("true"),
            secure_metrics_port: port(node.ports.secure_metrics),
            secure_merged_metrics_port: port(node.ports.secure_merged_metrics),
            outlier_log_path: Some(self.flags.outlier_log_path.clone()).filter(|p| !p.is_empty()),
            stats: self.stats(node.exit_on_zero_connections),
            host_ip: self.get(&variables::HOST_IP),
            client_files: client_files(&node),
            compliance_fips_140_2: self.policy == Policy::Fips140_2,
            keep_path_fragment: !self
                .get(&variables::HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED),
            load_stats: self.load_stats(&node),
            node,
        }
    }

    /// Peer metadata discovery needs delta xDS.
    fn metadata_discovery(&mut self, node: &node::Node, delta: bool, waypoint: bool) -> bool {
        let wanted = node.metadata_discovery || waypoint;
        if wanted && !delta {
            let expected = "true for the discovery of peers' metadata, going on without it";
            self.warn("ISTIO_DELTA_XDS", "false", expected);
        }
        wanted && delta
    }

    fn load_stats(&mut self, node: &node::Node) -> Option<Value> {
        const NAME: &str = "LOAD_STATS_CONFIG_JSON";
        let text = node
            .raw
            .get(NAME)?
            .as_str()
            .filter(|text| !text.is_empty())?;
        let parsed = serde_json::from_str(text).ok().filter(Value::is_object);
        if parsed.is_none() {
            self.problem(&format!("ISTIO_META_{NAME}"), text, "a JSON object");
        }
        parsed
    }

    /// The bootstrap of gRPC applications; None when it is switched off.
    pub(super) fn grpc(&mut self, xds_socket: &Path) -> Option<grpc::Config> {
        let path = self.get(&variables::GRPC_XDS_BOOTSTRAP);
        let certificates = self.get(&variables::OUTPUT_CERTS);
        (!path.is_empty()).then(|| grpc::Config {
            path: path.into(),
            xds_socket: xds_socket.to_owned(),
            certificates: Some(certificates)
                .filter(|path| !path.is_empty())
                .map(Into::into),
        })
    }

    /// How to find the cloud platform.
    pub(super) fn platform(&mut self) -> platform::Config {
        let choice = self.get(&variables::CLOUD_PLATFORM);
        let known = self.get(&variables::GCP_METADATA);
        let (quota, zone) = (
            self.get(&variables::GCP_QUOTA_PROJECT),
            self.get(&variables::GCP_ZONE),
        );
        let host = self.get(&variables::GCE_METADATA_HOST);
        let gcp = platform::StaticGcp::parse(&known, quota, zone);
        if gcp.is_none() && !known.is_empty() {
            let expected = "project|number|cluster|location, going on without it";
            self.warn("GCP_METADATA", known, expected);
        }
        platform::Config {
            choice: platform::Choice::parse(&choice),
            gcp,
            gcp_host: Some(host).filter(|host| !host.is_empty()),
            root: "/".into(),
            v6: self.addresses.iter().any(IpAddr::is_ipv6),
        }
    }
}

fn client_files(node: &node::Node) -> ClientFiles {
    let path = |name: &str| {
        let text = node.raw.get(name).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    ClientFiles {
        certificate: path("TLS_CLIENT_CERT_CHAIN"),
        key: path("TLS_CLIENT_KEY"),
        roots: path("TLS_CLIENT_ROOT_CERT"),
    }
}
