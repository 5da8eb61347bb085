//! Configures the services Envoy reports to: their clusters (tracer, metrics, access logs), the tracer until
//! istiod configures another, and statistics sinks.

use serde_json::{Value, json};

use super::clusters::{cluster, http2};
use super::config::Config;
use super::tls;
use crate::net::address;
use crate::proxy_config::tracing::Tracer::{Datadog, Lightstep, Zipkin};
use crate::proxy_config::{RemoteService, TcpKeepalive, TlsSettings, time};

pub(super) fn section(config: &Config) -> Vec<Value> {
    let proxy_config = &config.node.proxy_config;
    let tracer = Tracer::from_config(config).and_then(|tracer| collector(config, &tracer));
    let metrics = metrics_service(config)
        .map(|(address, service)| remote(config, "envoy_metrics_service", &address, service));
    let service = proxy_config.envoy_access_log_service.as_ref();
    let access_log = service.and_then(|it| {
        let address = socket_address(config, &it.address)?;
        Some(remote(config, "envoy_accesslog_service", &address, service))
    });
    [tracer, metrics, access_log].into_iter().flatten().collect()
}

pub(super) struct Tracer<'a> {
    name: &'static str,
    message: &'static str,
    settings: Value,
    cluster: &'static str,
    address: &'a str,
    /// The token of Lightstep, which speaks HTTP/2.
    pub(super) token: Option<&'a str>,
}

impl<'a> Tracer<'a> {
    /// Returns the tracer of ProxyConfig; None if there is none, or one that the bootstrap does not configure.
    pub(super) fn from_config(config: &'a Config) -> Option<Self> {
        Some(match config.node.proxy_config.tracing.as_ref()?.tracer.as_ref()? {
            Zipkin(zipkin) => Self {
                name: "zipkin",
                message: "ZipkinConfig",
                settings: json!({
                    "collector_endpoint": "/api/v2/spans",
                    "collector_endpoint_version": "HTTP_JSON",
                    "trace_id_128bit": true,
                    "shared_span_context": false,
                }),
                cluster: "zipkin",
                address: &zipkin.address,
                token: None,
            },
            Lightstep(lightstep) => Self {
                name: "lightstep",
                message: "LightstepConfig",
                settings: json!({ "access_token_file": config.token_file().to_string_lossy() }),
                cluster: "lightstep",
                address: &lightstep.address,
                token: Some(&lightstep.access_token),
            },
            Datadog(datadog) => Self {
                name: "datadog",
                message: "DatadogConfig",
                settings: json!({ "service_name": config.node.cluster }),
                cluster: "datadog_agent",
                address: &datadog.address,
                token: None,
            },
            _ => return None,
        })
    }

    pub(super) fn section(self) -> Value {
        let mut members = self.settings;
        let message = format!("type.googleapis.com/envoy.config.trace.v3.{}", self.message);
        members["@type"] = message.into();
        members["collector_cluster"] = json!(self.cluster);
        let name = format!("envoy.tracers.{}", self.name);
        json!({ "http": { "name": name, "typed_config": members } })
    }
}

/// Returns the address of the metrics service, which one of two members has, and its settings.
pub(super) fn metrics_service(config: &Config) -> Option<(Value, Option<&RemoteService>)> {
    let proxy_config = &config.node.proxy_config;
    let service = proxy_config.envoy_metrics_service.as_ref();
    let address = service.and_then(|service| socket_address(config, &service.address));
    let older = &proxy_config.envoy_metrics_service_address;
    Some((address.or_else(|| socket_address(config, older))?, service))
}

/// Converts `host:port` to Envoy's form, or an empty text to None. Envoy resolves names.
pub(super) fn socket_address(config: &Config, address: &str) -> Option<Value> {
    let (host, port) = address::split_lenient(address)?;
    let host = match host {
        "$(HOST_IP)" if !config.host_ip.is_empty() => &config.host_ip,
        host => host,
    };
    Some(json!({ "socket_address": { "address": host, "port_value": port } }))
}

fn collector(config: &Config, tracer: &Tracer<'_>) -> Option<Value> {
    let address = socket_address(config, tracer.address)?;
    let is_http2 = tracer.token.is_some();
    let tracing = config.node.proxy_config.tracing.as_ref();
    let tls = tracing.and_then(|tracing| tracing.tls_settings.as_ref());
    let mut cluster = service_cluster(config, tracer.cluster, &address, (tls, "tracer"), is_http2);
    if tracer.name == "zipkin" {
        cluster["dns_refresh_rate"] = json!("30s");
    }
    Some(cluster)
}

fn remote(config: &Config, name: &str, address: &Value, service: Option<&RemoteService>) -> Value {
    let tls = service.and_then(|service| service.tls_settings.as_ref());
    let mut cluster = service_cluster(config, name, address, (tls, name), true);
    if let Some(settings) = service.and_then(|service| service.tcp_keepalive.as_ref()) {
        cluster["upstream_connection_options"] = json!({ "tcp_keepalive": keepalive(settings) });
    }
    cluster
}

fn service_cluster(
    config: &Config,
    name: &str,
    address: &Value,
    (tls, default_sni): (Option<&TlsSettings>, &str),
    is_http2: bool,
) -> Value {
    let mut cluster = cluster(name, "1s", Some(config.families().dns_lookup), address);
    let metadata = &config.node.metadata;
    let socket = tls.and_then(|tls| tls::upstream(tls, metadata, default_sni, is_http2));
    cluster["transport_socket"] = json!(socket);
    if is_http2 {
        http2(&mut cluster);
    }
    cluster
}

/// Lists the statistics sinks: a metrics service, statsd.
pub(super) fn sinks(config: &Config) -> Vec<Value> {
    let metrics = metrics_service(config).map(|_| {
        json!({
            "transport_api_version": "V3",
            "grpc_service": { "envoy_grpc": { "cluster_name": "envoy_metrics_service" } },
            "@type": "type.googleapis.com/envoy.config.metrics.v3.MetricsServiceConfig",
        })
    });
    let address = socket_address(config, &config.node.proxy_config.statsd_udp_address);
    let statsd = address.map(|address| {
        json!({
            "address": address,
            "@type": "type.googleapis.com/envoy.config.metrics.v3.StatsdSink",
        })
    });
    let sinks = [("metrics_service", metrics), ("statsd", statsd)].into_iter();
    let configured = sinks.filter_map(|(name, config)| {
        Some(json!({ "name": format!("envoy.stat_sinks.{name}"), "typed_config": config? }))
    });
    configured.collect()
}

/// Converts the settings to whole seconds, as the kernel has them, and leaves out zero, the kernel's default.
/// The keepalive is on also without members, with the kernel's defaults.
fn keepalive(settings: &TcpKeepalive) -> Value {
    let members = [
        ("keepalive_probes", settings.probes.into()),
        ("keepalive_time", time(settings.time).unwrap_or_default().as_secs()),
        ("keepalive_interval", time(settings.interval).unwrap_or_default().as_secs()),
    ];
    members.into_iter().filter(|it| it.1 != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keepalive_is_in_whole_positive_seconds() {
        for (settings, expected) in [
            (json!({}), json!({})),
            (json!({"time": "0.500s"}), json!({})),
            (
                json!({"probes": 3, "time": "75s", "interval": "10.500s"}),
                json!({
                    "keepalive_probes": 3, "keepalive_time": 75, "keepalive_interval": 10,
                }),
            ),
        ] {
            let settings = crate::proxy_config::from_json(&settings);
            assert_eq!(keepalive(&settings), expected);
        }
    }
}
