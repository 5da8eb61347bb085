//! Static listeners: metrics and health.

use serde_json::{Value, json};

use super::config::Config;
use super::tls;

pub(super) fn section(config: &Config) -> Value {
    let families = config.families();
    let everywhere = Bind {
        first: families.first.wildcard,
        second: families.second.map(|family| family.wildcard),
    };
    let loopback = Bind {
        first: families.first.loopback,
        second: families.second.map(|family| family.loopback),
    };
    let metrics_at = match config.metrics_localhost_only {
        true => loopback,
        false => everywhere,
    };
    // Callers of the mesh know one address only.
    let first = Bind {
        second: None,
        ..everywhere
    };
    let mut listeners = vec![metrics(config).section(metrics_at)];
    listeners.extend(secure(config).map(|listener| listener.section(first)));
    listeners.push(health(config).section(everywhere));
    listeners.into()
}

fn metrics(config: &Config) -> Listener {
    let mut listener = Listener::new(config.prometheus_port, "stats", METRICS);
    if config.node.proxy_config.stats_compression.unwrap_or(true) {
        listener.filters = COMPRESSORS.map(compressor).into();
    }
    listener
}

fn secure(config: &Config) -> impl Iterator<Item = Listener> {
    [
        (config.secure_metrics_port, "secure_stats", METRICS),
        (
            config.secure_merged_metrics_port,
            "secure_merged_stats",
            MERGED_METRICS,
        ),
    ]
    .into_iter()
    .filter_map(|(port, stat_prefix, routes)| {
        Some(Listener {
            tls: true,
            ..Listener::new(port?, stat_prefix, routes)
        })
    })
}

fn health(config: &Config) -> Listener {
    Listener {
        proxy_protocol: config.health_proxy_protocol,
        ..Listener::new(config.health_port, "agent", &[("/healthz/ready", "agent")])
    }
}

const COMPRESSORS: [(&str, &str); 3] = [("brotli", "Brotli"), ("zstd", "Zstd"), ("gzip", "Gzip")];
const METRICS: &[(&str, &str)] = &[("/stats/prometheus", "prometheus_stats")];
const MERGED_METRICS: &[(&str, &str)] = &[("/stats/prometheus", "agent"), ("/metrics", "agent")];

/// The addresses of a listener.
#[derive(Clone, Copy)]
struct Bind {
    first: &'static str,
    /// Of the other family in a dual-stack pod.
    second: Option<&'static str>,
}

struct Listener {
    port: u16,
    stat_prefix: &'static str,
    /// Path prefixes and clusters.
    routes: &'static [(&'static str, &'static str)],
    /// In front of the router.
    filters: Vec<Value>,
    tls: bool,
    /// Accepts the PROXY protocol of a load balancer, and connections without it.
    proxy_protocol: bool,
}

impl Listener {
    fn new(
        port: u16,
        stat_prefix: &'static str,
        routes: &'static [(&'static str, &'static str)],
    ) -> Self {
        Self {
            port,
            stat_prefix,
            routes,
            filters: Vec::new(),
            tls: false,
            proxy_protocol: false,
        }
    }

    fn section(self, bind: Bind) -> Value {
        let mut listener = json!({
            "name": format!("{}_{}", bind.first, self.port),
            "address": self.address(bind.first),
            // Kubelet and Prometheus get an answer at the connection limit, too.
            "ignore_global_conn_limit": true,
            "bypass_overload_manager": true,
        });
        if let Some(host) = bind.second {
            listener["additional_addresses"] = json!([{ "address": self.address(host) }]);
        }
        if self.tls {
            listener["listener_filters"] = json!([listener_filter(
                "envoy.filters.listener.tls_inspector",
                "tls_inspector.v3.TlsInspector",
            )]);
        }
        if self.proxy_protocol {
            let mut filter = listener_filter(
                "envoy.listener.proxy_protocol",
                "proxy_protocol.v3.ProxyProtocol",
            );
            filter["typed_config"]["allow_requests_without_proxy_protocol"] = json!(true);
            listener["listener_filters"] = json!([filter]);
        }
        listener["filter_chains"] = json!([self.filter_chain()]);
        listener
    }

    fn address(&self, host: &str) -> Value {
        json!({ "socket_address": {
            "protocol": "TCP",
            "address": host,
            "port_value": self.port,
        }})
    }

    fn filter_chain(self) -> Value {
        if !self.tls {
            return json!({ "filters": [self.connection_manager()] });
        }
        json!({
            "filter_chain_match": { "transport_protocol": "tls" },
            "transport_socket": tls::downstream(),
            "filters": [self.connection_manager()],
        })
    }

    fn connection_manager(mut self) -> Value {
        self.filters.push(json!({
            "name": "envoy.filters.http.router",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
            },
        }));
        let routes = self.routes.iter().map(|(prefix, cluster)| {
            json!({ "match": { "prefix": prefix }, "route": { "cluster": cluster } })
        });
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
                    "routes": routes.collect::<Vec<_>>(),
                }]},
                "http_filters": self.filters,
            },
        })
    }
}

fn listener_filter(name: &str, message: &str) -> Value {
    json!({ "name": name, "typed_config": {
        "@type": format!("type.googleapis.com/envoy.extensions.filters.listener.{message}"),
    }})
}

fn compressor((algorithm, message): (&str, &str)) -> Value {
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
