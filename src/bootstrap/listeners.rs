//! Configures the static listeners: metrics and health.

use serde_json::{Value, json};

use super::config::{Config, Families};
use super::document::extension;
use super::tls;

const METRICS: &[(&str, &str)] = &[("/stats/prometheus", "prometheus_stats")];
const MERGED_METRICS: &[(&str, &str)] = &[("/stats/prometheus", "agent"), ("/metrics", "agent")];
const HEALTH: &[(&str, &str)] = &[("/healthz/ready", "agent")];
const COMPRESSORS: &[(&str, &str)] = &[("brotli", "Brotli"), ("zstd", "Zstd"), ("gzip", "Gzip")];

pub(super) fn section(config: &Config) -> Value {
    let proxy_config = &config.node.proxy_config;
    let ports = &config.ports;
    let Families { first, second, .. } = config.families();
    let everywhere = (first.wildcard, second.map(|family| family.wildcard));
    let metrics_hosts = match proxy_config.metadata("METRICS_LOCALHOST_ACCESS_ONLY") {
        Some("true") => (first.loopback, second.map(|family| family.loopback)),
        _ => everywhere,
    };
    // Callers of the mesh know one address only.
    let secure_hosts = (first.wildcard, None);
    let is_compressed = proxy_config.stats_compression.unwrap_or(true);
    let listeners = [
        Listener {
            port: ports.prometheus,
            stat_prefix: "stats",
            routes: METRICS,
            hosts: metrics_hosts,
            compressors: if is_compressed { COMPRESSORS } else { &[] },
            ..Listener::default()
        },
        Listener {
            port: ports.secure_metrics,
            stat_prefix: "secure_stats",
            routes: METRICS,
            hosts: secure_hosts,
            is_tls: true,
            ..Listener::default()
        },
        Listener {
            port: ports.secure_merged_metrics,
            stat_prefix: "secure_merged_stats",
            routes: MERGED_METRICS,
            hosts: secure_hosts,
            is_tls: true,
            ..Listener::default()
        },
        Listener {
            port: ports.health,
            stat_prefix: "agent",
            routes: HEALTH,
            hosts: everywhere,
            accepts_proxy_protocol: config.health_proxy_protocol,
            ..Listener::default()
        },
    ];
    listeners.iter().filter(|listener| listener.port != 0).map(Listener::section).collect()
}

#[derive(Default)]
struct Listener {
    /// Zero leaves the listener out.
    port: u16,
    stat_prefix: &'static str,
    /// Path prefixes and clusters.
    routes: &'static [(&'static str, &'static str)],
    /// The address it binds, and in a dual-stack pod the address of the other family.
    hosts: (&'static str, Option<&'static str>),
    compressors: &'static [(&'static str, &'static str)],
    accepts_proxy_protocol: bool,
    is_tls: bool,
}

impl Listener {
    fn section(&self) -> Value {
        let (host, second_host) = self.hosts;
        let filter = if self.is_tls {
            Some(tls_inspector())
        } else {
            self.accepts_proxy_protocol.then(proxy_protocol)
        };
        json!({
            "name": format!("{host}_{}", self.port),
            "address": self.address(host),
            // Kubelet and Prometheus get an answer at the connection limit, too.
            "ignore_global_conn_limit": true,
            "bypass_overload_manager": true,
            "additional_addresses":
                second_host.map(|host| json!([{ "address": self.address(host) }])),
            "listener_filters": filter.map(|filter| [filter]),
            "filter_chains": [{
                "filter_chain_match": self.is_tls.then(|| json!({ "transport_protocol": "tls" })),
                "transport_socket": self.is_tls.then(tls::downstream),
                "filters": [self.connection_manager()],
            }],
        })
    }

    fn address(&self, host: &str) -> Value {
        let address = json!({ "protocol": "TCP", "address": host, "port_value": self.port });
        json!({ "socket_address": address })
    }

    fn connection_manager(&self) -> Value {
        let routes = self.routes.iter().map(|(prefix, cluster)| {
            json!({ "match": { "prefix": prefix }, "route": { "cluster": cluster } })
        });
        let message = "envoy.extensions.filters.http.router.v3.Router";
        let router = extension("envoy.filters.http.router", message, json!({}));
        let filters = self.compressors.iter().map(compressor).chain([router]);
        extension(
            "envoy.filters.network.http_connection_manager",
            "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            json!({
                "codec_type": "AUTO",
                "stat_prefix": self.stat_prefix,
                "route_config": { "virtual_hosts": [{
                    "name": "backend",
                    "domains": ["*"],
                    "routes": routes.collect::<Vec<_>>(),
                }]},
                "http_filters": filters.collect::<Vec<_>>(),
            }),
        )
    }
}

fn tls_inspector() -> Value {
    extension(
        "envoy.filters.listener.tls_inspector",
        "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector",
        json!({}),
    )
}

/// Accepts the PROXY protocol of a load balancer, and connections without it.
fn proxy_protocol() -> Value {
    extension(
        "envoy.listener.proxy_protocol",
        "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol",
        json!({ "allow_requests_without_proxy_protocol": true }),
    )
}

fn compressor((algorithm, message): &(&str, &str)) -> Value {
    let library = extension(
        &format!("stats_{algorithm}"),
        &format!("envoy.extensions.compression.{algorithm}.compressor.v3.{message}"),
        json!({}),
    );
    extension(
        &format!("envoy.filters.http.compressor.{algorithm}"),
        "envoy.extensions.filters.http.compressor.v3.Compressor",
        json!({
            "compressor_library": library,
            "response_direction_config": { "common_config": { "content_type": [
                "text/plain",
                "application/vnd.google.protobuf",
                "application/openmetrics-text",
                "application/openmetrics-protobuf",
            ]}},
        }),
    )
}
