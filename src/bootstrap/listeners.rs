//! Static listeners: metrics and health.

use serde_json::{Value, json};

use super::config::{Config, Family};
use super::document::extension;
use super::tls;

const METRICS: &[(&str, &str)] = &[("/stats/prometheus", "prometheus_stats")];
const MERGED_METRICS: &[(&str, &str)] = &[("/stats/prometheus", "agent"), ("/metrics", "agent")];
const HEALTH: &[(&str, &str)] = &[("/healthz/ready", "agent")];
const COMPRESSORS: [(&str, &str); 3] = [("brotli", "Brotli"), ("zstd", "Zstd"), ("gzip", "Gzip")];

pub(super) fn section(config: &Config) -> Value {
    let proxy_config = &config.node.proxy_config;
    let ports = &config.ports;
    let metrics_host = match proxy_config.metadata("METRICS_LOCALHOST_ACCESS_ONLY") {
        Some("true") => |family: Family| family.loopback,
        _ => |family: Family| family.wildcard,
    };
    let families = config.families();
    let everywhere = |port, stat_prefix, routes| Listener {
        port,
        stat_prefix,
        routes,
        host: families.first.wildcard,
        second_host: families.second.map(|family| family.wildcard),
        compressors: &[],
        listener_filter: Value::Null,
        tls: false,
    };
    let metrics = Listener {
        host: metrics_host(families.first),
        second_host: families.second.map(metrics_host),
        compressors: match proxy_config.stats_compression.unwrap_or(true) {
            true => &COMPRESSORS,
            false => &[],
        },
        ..everywhere(ports.prometheus, "stats", METRICS)
    };
    let secure = |port, stat_prefix, routes| Listener {
        // Callers of the mesh know one address only.
        second_host: None,
        listener_filter: extension(
            "envoy.filters.listener.tls_inspector",
            "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector",
            json!({}),
        ),
        tls: true,
        ..everywhere(port, stat_prefix, routes)
    };
    let health = Listener {
        listener_filter: json!(config.health_proxy_protocol.then(proxy_protocol)),
        ..everywhere(ports.health, "agent", HEALTH)
    };
    let listeners = [
        metrics,
        secure(ports.secure_metrics, "secure_stats", METRICS),
        secure(
            ports.secure_merged_metrics,
            "secure_merged_stats",
            MERGED_METRICS,
        ),
        health,
    ];
    let listeners = listeners.iter().filter(|listener| listener.port != 0);
    listeners.map(Listener::section).collect()
}

struct Listener {
    /// Zero is no listener.
    port: u16,
    stat_prefix: &'static str,
    /// Path prefixes and clusters.
    routes: &'static [(&'static str, &'static str)],
    host: &'static str,
    /// Of the other family in a dual-stack pod.
    second_host: Option<&'static str>,
    compressors: &'static [(&'static str, &'static str)],
    listener_filter: Value,
    tls: bool,
}

impl Listener {
    fn section(&self) -> Value {
        let address = |host: &str| {
            json!({ "socket_address": {
                "protocol": "TCP",
                "address": host,
                "port_value": self.port,
            }})
        };
        let second = self.second_host;
        let has_filter = !self.listener_filter.is_null();
        json!({
            "name": format!("{}_{}", self.host, self.port),
            "address": address(self.host),
            // Kubelet and Prometheus get an answer at the connection limit, too.
            "ignore_global_conn_limit": true,
            "bypass_overload_manager": true,
            "additional_addresses": second.map(|host| json!([{ "address": address(host) }])),
            "listener_filters": has_filter.then_some([&self.listener_filter]),
            "filter_chains": [{
                "filter_chain_match": self.tls.then(|| json!({ "transport_protocol": "tls" })),
                "transport_socket": self.tls.then(tls::downstream),
                "filters": [self.connection_manager()],
            }],
        })
    }

    fn connection_manager(&self) -> Value {
        let routes = self.routes.iter().map(|(prefix, cluster)| {
            json!({ "match": { "prefix": prefix }, "route": { "cluster": cluster } })
        });
        let router = "envoy.extensions.filters.http.router.v3.Router";
        let router = extension("envoy.filters.http.router", router, json!({}));
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
