//! Defines the inputs of the bootstrap.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Number, Value};

use super::node::Node;

/// Settings that differ from one bootstrap to the next. Paths may be relative: Envoy shares the agent's working
/// directory.
#[derive(Clone, Debug)]
pub struct Config {
    pub directory: PathBuf,
    /// The epoch of Envoy, if hot restarts give each epoch its own file.
    pub revision: Option<u32>,
    pub node: Node,
    pub ports: Ports,
    pub xds_socket: PathBuf,
    pub sds_socket: PathBuf,
    /// The socket of secrets in files, while another process serves the workload's secrets.
    pub files_socket: PathBuf,
    /// The socket of Envoy's admin interface, in place of `proxyAdminPort`.
    pub admin_socket: Option<PathBuf>,
    pub delta: bool,
    /// Loads Istio's peer metadata extension, which only Istio's Envoy has.
    pub metadata_discovery: bool,
    /// Binds both families in a pod that has both.
    pub dual_stack: bool,
    pub log_as_json: bool,
    pub health_proxy_protocol: bool,
    /// Keeps the statistic of open connections, because the agent exits when Envoy has none left.
    pub exit_on_zero_connections: bool,
    pub outlier_log_path: Option<String>,
    /// Replaces `$(HOST_IP)` in addresses of collectors, unless it is empty.
    pub host_ip: String,
    pub stats: StatsConfig,
    pub compliance_fips_140_2: bool,
    pub keep_path_fragment: bool,
    /// Envoy's load reporting service.
    pub load_stats: Option<Value>,
}

/// The ports of Envoy's static listeners; zero is none.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    pub health: u16,
    pub prometheus: u16,
    /// Envoy's metrics for callers of the mesh.
    pub secure_metrics: u16,
    /// Metrics of Envoy, the agent and the workload for callers of the mesh.
    pub secure_merged_metrics: u16,
}

impl Config {
    /// Returns the path of the file. It has no leading `./`, like pilot-agent's.
    pub fn file(&self) -> PathBuf {
        self.in_directory("envoy-rev", ".json")
    }

    pub fn admin_host(&self) -> IpAddr {
        match self.families().first {
            V6 => Ipv6Addr::LOCALHOST.into(),
            _ => Ipv4Addr::LOCALHOST.into(),
        }
    }

    pub(super) fn token_file(&self) -> PathBuf {
        self.in_directory("lightstep_access_token", ".txt")
    }

    fn in_directory(&self, start: &str, end: &str) -> PathBuf {
        let directory = self.directory.strip_prefix("./").unwrap_or(&self.directory);
        let revision = self.revision.map(|n| n.to_string()).unwrap_or_default();
        directory.join(format!("{start}{revision}{end}"))
    }

    /// Chooses the families Envoy binds and resolves, by the addresses of the pod.
    pub(super) fn families(&self) -> Families {
        let addresses = &self.node.addresses;
        let any_v4 = addresses.iter().any(IpAddr::is_ipv4);
        let any_v6 = addresses.iter().any(IpAddr::is_ipv6);
        let first_v6 = matches!(
            addresses.first(),
            Some(IpAddr::V6(first)) if !first.is_unicast_link_local()
        );
        let (first, dns_lookup, second) = match (any_v4, any_v6) {
            (true, true) if self.dual_stack && first_v6 => (V6, "ALL", Some(V4)),
            (true, true) if self.dual_stack => (V4, "ALL", Some(V6)),
            (false, true) => (V6, "V6_ONLY", None),
            _ => (V4, "V4_ONLY", None),
        };
        Families { first, second, dns_lookup }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Families {
    pub(super) first: Family,
    /// The other family in a dual-stack pod.
    pub(super) second: Option<Family>,
    /// Envoy's name for the families it resolves.
    pub(super) dns_lookup: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Family {
    pub(super) loopback: &'static str,
    pub(super) wildcard: &'static str,
}

const V4: Family = Family { loopback: "127.0.0.1", wildcard: "0.0.0.0" };
const V6: Family = Family { loopback: "::1", wildcard: "::" };

/// Statistics the user wants beyond Istio's.
#[derive(Clone, Debug, Default)]
pub struct StatsConfig {
    /// Prefixes of names, which may contain `{pod_ip}`.
    pub prefixes: Vec<String>,
    pub suffixes: Vec<String>,
    pub expressions: Vec<String>,
    /// Expressions of the statistics by which the agent knows that no request is in flight.
    pub in_flight_expressions: Vec<String>,
    pub tags: Vec<String>,
    /// Bounds of buckets by prefix of the name.
    pub buckets: BTreeMap<String, Vec<Number>>,
    pub flush: Option<Duration>,
    pub eviction: Option<Duration>,
}
