//! The document Envoy starts from.
//!
//! Built from typed settings in sections, one file each; written whole or not at all, and removed
//! when [`Written`] is dropped, which is when Envoy has ended. Beside it: the bootstrap of gRPC
//! applications ([`grpc`]), and what the cloud tells about the machine ([`platform`]).
//!
//! Does not support templates, and does not start Envoy.

mod clusters;
mod file;
pub mod grpc;
mod listeners;
mod locality;
pub mod metadata;
pub mod node;
pub mod platform;
mod runtime;
mod services;
pub mod show;
mod sinks;
pub mod stats;
pub mod tls;
mod tracer;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value, json};

pub use clusters::FILES_SOCKET;
pub use file::{Error, Written, write};
use tracer::Tracer;

use crate::proxy_config::ProxyConfig;

/// What differs from one bootstrap to the next. Paths stay as they are: Envoy shares the agent's
/// working directory.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of the file.
    pub directory: PathBuf,
    /// Of which Envoy it is, where several have files of their own.
    pub revision: Option<u32>,
    pub node: node::Node,
    pub xds_socket: PathBuf,
    pub sds_socket: PathBuf,
    /// Whether Envoy asks for changes only.
    pub delta: bool,
    /// Loads Istio's peer metadata extension, which only Istio's Envoy has.
    pub metadata_discovery: bool,
    /// Whether Envoy binds both families in a pod that has both.
    pub dual_stack: bool,
    pub log_as_json: bool,
    pub admin_port: u16,
    /// The agent's own port. None while the status server is switched off.
    pub agent_port: Option<u16>,
    pub health_port: u16,
    pub health_proxy_protocol: bool,
    pub prometheus_port: u16,
    pub metrics_localhost_only: bool,
    /// Envoy's metrics for callers of the mesh.
    pub secure_metrics_port: Option<u16>,
    /// Those of Envoy, the agent and the workload for callers of the mesh.
    pub secure_merged_metrics_port: Option<u16>,
    pub outlier_log_path: Option<String>,
    /// Replaces `$(HOST_IP)` in addresses of collectors, unless it is empty.
    pub host_ip: String,
    pub stats: stats::Choice,
    pub client_files: tls::ClientFiles,
    pub compliance_fips_140_2: bool,
    pub keep_path_fragment: bool,
    /// Where Envoy reports its load to.
    pub load_stats: Option<Value>,
}

impl Config {
    /// Where [`write`] puts the file. Without a leading `./`, as pilot-agent has it.
    pub fn file(&self) -> PathBuf {
        self.in_directory(&format!("envoy-rev{}.json", self.revision_text()))
    }

    /// Where Envoy's admin port is.
    pub fn admin_host(&self) -> IpAddr {
        if self.local().host == V6.host {
            Ipv6Addr::LOCALHOST.into()
        } else {
            Ipv4Addr::LOCALHOST.into()
        }
    }

    fn in_directory(&self, name: &str) -> PathBuf {
        let directory = self.directory.strip_prefix("./").unwrap_or(&self.directory);
        directory.join(name)
    }

    fn token_file(&self) -> PathBuf {
        let revision = self.revision_text();
        self.in_directory(&format!("lightstep_access_token{revision}.txt"))
    }

    fn revision_text(&self) -> String {
        self.revision.map(|n| n.to_string()).unwrap_or_default()
    }

    fn local(&self) -> Local {
        Local::of(&self.node.addresses, self.dual_stack)
    }
}

/// How this pod spells "here" and "everywhere".
#[derive(Clone, Copy, Debug)]
struct Local {
    host: &'static str,
    wildcard: &'static str,
    /// Families Envoy asks name servers for.
    dns_family: &'static str,
    /// The other family, in a pod with two.
    more: Option<Spelling>,
}

#[derive(Clone, Copy, Debug)]
struct Spelling {
    host: &'static str,
    wildcard: &'static str,
}

const V4: Spelling = Spelling {
    host: "127.0.0.1",
    wildcard: "0.0.0.0",
};
const V6: Spelling = Spelling {
    host: "::1",
    wildcard: "::",
};

impl Local {
    fn of(addresses: &[IpAddr], dual_stack: bool) -> Self {
        let any_v4 = addresses.iter().any(IpAddr::is_ipv4);
        let any_v6 = addresses.iter().any(IpAddr::is_ipv6);
        let first_v6 = match addresses.first() {
            Some(IpAddr::V6(first)) => !first.is_unicast_link_local(),
            _ => false,
        };
        let (spelling, dns_family, more) = match (any_v4, any_v6) {
            (true, true) if dual_stack && first_v6 => (V6, "ALL", Some(V4)),
            (true, true) if dual_stack => (V4, "ALL", Some(V6)),
            (false, true) => (V6, "V6_ONLY", None),
            _ => (V4, "V4_ONLY", None),
        };
        Self {
            host: spelling.host,
            wildcard: spelling.wildcard,
            dns_family,
            more,
        }
    }
}

/// The bootstrap as JSON.
pub fn document(config: &Config) -> Value {
    let mut document = Map::new();
    let mut set = |name: &str, value: Value| drop(document.insert(name.to_owned(), value));
    set("application_log_config", log_format(config.log_as_json));
    set("node", node::section(&config.node));
    set("layered_runtime", runtime::section(config));
    set(
        "bootstrap_extensions",
        extensions(config.metadata_discovery),
    );
    for (name, interval) in [
        ("stats_flush_interval", config.stats.flush),
        ("stats_eviction_interval", config.stats.eviction),
    ] {
        if let Some(interval) = interval {
            set(name, seconds(interval));
        }
    }
    set("stats_config", stats::section(&stats_sources(config)));
    set("admin", admin(config));
    set("dynamic_resources", dynamic_resources(config.delta));
    let resources = json!({
        "clusters": clusters::section(config),
        "listeners": listeners::section(config),
    });
    set("static_resources", resources);
    set(
        "overload_manager",
        overload_manager(connection_limit(&config.node.proxy_config)),
    );
    if let Some(tracer) = Tracer::of(&config.node.proxy_config) {
        set(
            "tracing",
            tracer.section(&config.token_file(), &config.node.cluster),
        );
    }
    let sinks = sinks::section(config);
    if !sinks.is_empty() {
        set("stats_sinks", sinks.into());
    }
    if let Some(manager) = cluster_manager(config) {
        set("cluster_manager", manager);
    }
    set(
        "deferred_stat_options",
        json!({ "enable_deferred_creation_stats": true }),
    );
    document.into()
}

fn stats_sources(config: &Config) -> stats::Sources<'_> {
    stats::Sources {
        choice: &config.stats,
        addresses: &config.node.addresses,
        metadata_discovery: config.metadata_discovery,
        active_connections: config.node.exit_on_zero_connections,
    }
}

/// A duration as protobuf reads it.
fn seconds(duration: Duration) -> Value {
    match duration.subsec_nanos() {
        0 => format!("{}s", duration.as_secs()).into(),
        nanos => format!("{}.{nanos:09}s", duration.as_secs()).into(),
    }
}

fn cluster_manager(config: &Config) -> Option<Value> {
    let mut manager = Map::new();
    let mut set = |name: &str, value: Value| drop(manager.insert(name.to_owned(), value));
    if config.node.is_true("ENABLE_SELF_DISCOVERY") {
        set("local_cluster_name", json!(clusters::OWN));
    }
    if let Some(path) = &config.outlier_log_path {
        set("outlier_detection", json!({ "event_log_path": path }));
    }
    if let Some(load_stats) = &config.load_stats {
        set("load_stats_config", load_stats.clone());
    }
    if manager.is_empty() {
        return None;
    }
    manager.insert("enable_deferred_cluster_creation".to_owned(), json!(true));
    Some(manager.into())
}

fn log_format(as_json: bool) -> Value {
    if !as_json {
        let text = "%Y-%m-%dT%T.%fZ\t%l\tenvoy %n %g:%#\t%v\tthread=%t";
        return json!({ "log_format": { "text_format": text } });
    }
    json!({ "log_format": { "json_format": {
        "time": "%Y-%m-%dT%T.%fZ",
        "level": "%l",
        "scope": "envoy %n",
        "msg": "%j",
        "caller": "%g:%#",
        "thread": "%t",
    }}})
}

fn extensions(metadata_discovery: bool) -> Value {
    let typed = |name: &str, type_url: &str, value: Value| {
        json!({ "name": name, "typed_config": {
            "@type": "type.googleapis.com/udpa.type.v1.TypedStruct",
            "type_url": format!("type.googleapis.com/{type_url}"),
            "value": value,
        }})
    };
    let internal_listener = typed(
        "envoy.bootstrap.internal_listener",
        "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
        json!({ "buffer_size_kb": 64 }),
    );
    let mut extensions = vec![internal_listener];
    if metadata_discovery {
        let value = json!({ "config_source": { "ads": {} } });
        let url = "istio.workload.BootstrapExtension";
        extensions.insert(0, typed("metadata_discovery", url, value));
    }
    extensions.into()
}

fn admin(config: &Config) -> Value {
    json!({
        "access_log": [{
            "name": "envoy.access_loggers.file",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                "path": "/dev/null",
            },
        }],
        "profile_path": "/var/lib/istio/data/envoy.prof",
        "address": { "socket_address": {
            "address": config.local().host,
            "port_value": config.admin_port,
        }},
    })
}

fn dynamic_resources(delta: bool) -> Value {
    let from_ads = json!({
        "ads": {},
        // Envoy waits for istiod rather than start empty.
        "initial_fetch_timeout": "0s",
        "resource_api_version": "V3",
    });
    json!({
        "lds_config": from_ads,
        "cds_config": from_ads,
        "ads_config": {
            "api_type": if delta { "DELTA_GRPC" } else { "GRPC" },
            "set_node_on_first_message_only": true,
            "transport_api_version": "V3",
            "grpc_services": [{ "envoy_grpc": { "cluster_name": "xds-grpc" } }],
        },
    })
}

/// How many connections Envoy takes: the first limit that is set in one of three places.
fn connection_limit(config: &ProxyConfig) -> i64 {
    let settings = config.connection_settings.as_ref();
    let settings = settings.and_then(|it| it.global_downstream_connection_limit);
    let metadata = config.metadata("ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS");
    let runtime = config
        .runtime_values
        .get("overload.global_downstream_max_connections");
    let texts = [metadata, runtime.map(String::as_str)];
    let texts = texts.into_iter().flatten().flat_map(str::parse);
    let mut limits = settings.map(i64::from).into_iter().chain(texts);
    limits
        .find(|limit| *limit > 0)
        .unwrap_or(i64::from(i32::MAX))
}

fn overload_manager(connections: i64) -> Value {
    json!({ "resource_monitors": [{
        "name": "envoy.resource_monitors.global_downstream_max_connections",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.resource_monitors.\
                      downstream_connections.v3.DownstreamConnectionsConfig",
            "max_active_downstream_connections": connections,
        },
    }]})
}

#[cfg(test)]
mod tests;
