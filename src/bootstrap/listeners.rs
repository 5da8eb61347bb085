//! The two listeners Envoy has before istiod sends any: metrics and health.
//!
//! Does not hold anything istiod sends.

use serde_json::{Value, json};

use super::Config;

pub fn section(config: &Config) -> Value {
    let wildcard = config.local().wildcard;
    let metrics = Listener {
        port: config.prometheus_port,
        stat_prefix: "stats",
        route: ("/stats/prometheus", "prometheus_stats"),
        filters: ["brotli", "zstd", "gzip"]
            .into_iter()
            .map(compressor)
            .collect(),
    };
    let health = Listener {
        port: config.health_port,
        stat_prefix: "agent",
        route: ("/healthz/ready", "agent"),
        filters: Vec::new(),
    };
    json!([metrics.section(wildcard), health.section(wildcard)])
}

struct Listener {
    port: u16,
    stat_prefix: &'static str,
    /// Path prefix and cluster.
    route: (&'static str, &'static str),
    filters: Vec<Value>,
}

impl Listener {
    fn section(self, host: &str) -> Value {
        json!({
            "name": format!("{host}_{}", self.port),
            "address": { "socket_address": {
                "protocol": "TCP",
                "address": host,
                "port_value": self.port,
            }},
            // A full Envoy must still answer kubelet and Prometheus.
            "ignore_global_conn_limit": true,
            "bypass_overload_manager": true,
            "filter_chains": [{ "filters": [self.connection_manager()] }],
        })
    }

    fn connection_manager(mut self) -> Value {
        let (prefix, cluster) = self.route;
        self.filters.push(json!({
            "name": "envoy.filters.http.router",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
            },
        }));
        json!({
            "name": "envoy.filters.network.http_connection_manager",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.\
                          http_connection_manager.v3.HttpConnectionManager",
                "codec_type": "AUTO",
                "stat_prefix": self.stat_prefix,
                "route_config": { "virtual_hosts": [{
                    "name": "backend",
                    "domains": ["*"],
                    "routes": [{
                        "match": { "prefix": prefix },
                        "route": { "cluster": cluster },
                    }],
                }]},
                "http_filters": self.filters,
            },
        })
    }
}

fn compressor(algorithm: &str) -> Value {
    let message = match algorithm {
        "brotli" => "Brotli",
        "zstd" => "Zstd",
        _ => "Gzip",
    };
    json!({
        "name": format!("envoy.filters.http.compressor.{algorithm}"),
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.compressor.v3.Compressor",
            "compressor_library": {
                "name": format!("stats_{algorithm}"),
                "typed_config": { "@type": format!(
                    "type.googleapis.com/envoy.extensions.compression.{algorithm}.compressor.v3.{message}"
                )},
            },
            "response_direction_config": { "common_config": { "content_type": [
                "text/plain",
                "application/vnd.google.protobuf",
                "application/openmetrics-text",
                "application/openmetrics-protobuf",
            ]}},
        },
    })
}
