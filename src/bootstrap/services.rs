//! Clusters of the services Envoy reports to (a tracer, metrics, access logs), and statistics sinks.

use serde_json::{Value, json};

use super::clusters::{cluster, http2};
use super::config::Config;
use super::tls::{self, Peer};
use super::tracer::Tracer;
use crate::address;
use crate::proxy_config::{RemoteService, TcpKeepalive, TlsSettings, time};

pub(super) fn section(config: &Config) -> Vec<Value> {
    let proxy_config = &config.node.proxy_config;
    let logs = proxy_config.envoy_access_log_service.as_ref();
    let logs = logs.and_then(|logs| Some((socket_address(config, &logs.address)?, Some(logs))));
    let remote = |name, service: Option<(Value, Option<&RemoteService>)>| {
        service.map(|(address, service)| remote(config, name, &address, service))
    };
    Tracer::of(proxy_config)
        .and_then(|tracer| collector(config, &tracer))
        .into_iter()
        .chain(remote("envoy_metrics_service", metrics_service(config)))
        .chain(remote("envoy_accesslog_service", logs))
        .collect()
}

/// The address of the metrics service, given in one of two members, and its settings.
pub(super) fn metrics_service(config: &Config) -> Option<(Value, Option<&RemoteService>)> {
    let proxy_config = &config.node.proxy_config;
    let service = proxy_config.envoy_metrics_service.as_ref();
    let address = service.and_then(|service| socket_address(config, &service.address));
    let older = || socket_address(config, &proxy_config.envoy_metrics_service_address);
    Some((address.or_else(older)?, service))
}

/// Envoy's form of `host:port`; None for an empty one. Envoy resolves names.
pub(super) fn socket_address(config: &Config, address: &str) -> Option<Value> {
    let (host, port) = address::parts(address)?;
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
    let settings = service.and_then(|service| service.tcp_keepalive.as_ref());
    if let Some(settings) = settings {
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
    let socket = |settings| {
        tls::upstream(&Peer {
            settings,
            metadata: &config.node.metadata,
            default_sni,
            http2: is_http2,
        })
    };
    let dns_lookup = config.families().dns_lookup;
    let mut cluster = cluster(name, "1s", Some(dns_lookup), address);
    cluster["transport_socket"] = json!(tls.and_then(socket));
    if is_http2 {
        http2(&mut cluster);
    }
    cluster
}

/// Statistics sinks: a metrics service, statsd.
pub(super) fn sinks(config: &Config) -> Vec<Value> {
    let metrics = metrics_service(config).map(|_| {
        json!({
            "transport_api_version": "V3",
            "grpc_service": { "envoy_grpc": { "cluster_name": "envoy_metrics_service" } },
            "@type": "type.googleapis.com/envoy.config.metrics.v3.MetricsServiceConfig",
        })
    });
    let statsd = socket_address(config, &config.node.proxy_config.statsd_udp_address);
    let statsd = statsd.map(|address| {
        json!({
            "address": address,
            "@type": "type.googleapis.com/envoy.config.metrics.v3.StatsdSink",
        })
    });
    let sinks = [("metrics_service", metrics), ("statsd", statsd)];
    let sinks = sinks.into_iter().filter_map(|(name, config)| {
        Some(json!({ "name": format!("envoy.stat_sinks.{name}"), "typed_config": config? }))
    });
    sinks.collect()
}

/// In whole seconds, as in the kernel; zero is the kernel's default. It is on without any member.
fn keepalive(settings: &TcpKeepalive) -> Value {
    let seconds = |given| time(given).map_or(0, |time| time.as_secs());
    let members = [
        ("keepalive_probes", settings.probes.into()),
        ("keepalive_time", seconds(settings.time)),
        ("keepalive_interval", seconds(settings.interval)),
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
