//! Clusters of the services Envoy reports to: a tracer, metrics, access logs.
//!
//! Does not say what is reported; `tracer` and `sinks` do.

use serde_json::{Value, json};

use super::Config;
use super::address::Address;
use super::clusters::http2;
use super::settings::{Keepalive, RemoteService, TlsSettings};
use super::tls::{self, Peer};
use super::tracer::Tracer;

pub(super) fn section(config: &Config) -> Vec<Value> {
    let settings = &config.settings;
    let metrics = settings.metrics_service();
    let logs = &settings.envoy_access_log_service;
    let logs = logs.address.as_ref().map(|address| (address, logs));
    let remote = |name, service: Option<(&Address, &RemoteService)>| {
        service.map(|(address, service)| remote(config, name, address, service))
    };
    Tracer::of(&settings.tracing)
        .map(|tracer| collector(config, &tracer))
        .into_iter()
        .chain(remote("envoy_metrics_service", metrics))
        .chain(remote("envoy_accesslog_service", logs))
        .collect()
}

fn collector(config: &Config, tracer: &Tracer<'_>) -> Value {
    let (name, address) = (tracer.cluster(), tracer.address());
    let is_http2 = matches!(tracer, Tracer::Lightstep(..));
    let tls = &config.settings.tracing.tls_settings;
    let mut cluster = cluster(config, name, address);
    secure(config, &mut cluster, tls, "tracer", is_http2);
    if is_http2 {
        http2(&mut cluster);
    }
    if matches!(tracer, Tracer::Zipkin(_)) {
        cluster["dns_refresh_rate"] = json!("30s");
    }
    cluster
}

fn remote(config: &Config, name: &str, address: &Address, service: &RemoteService) -> Value {
    let mut cluster = cluster(config, name, address);
    secure(config, &mut cluster, &service.tls_settings, name, true);
    http2(&mut cluster);
    if let Some(keepalive) = keepalive(&service.tcp_keepalive) {
        cluster["upstream_connection_options"] = json!({ "tcp_keepalive": keepalive });
    }
    cluster
}

fn cluster(config: &Config, name: &str, address: &Address) -> Value {
    json!({
        "name": name,
        "alt_stat_name": format!("{name};"),
        "type": "STRICT_DNS",
        "connect_timeout": "1s",
        "respect_dns_ttl": true,
        "dns_lookup_family": config.local().dns_family,
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address.section() } }] }],
        },
    })
}

fn secure(config: &Config, cluster: &mut Value, settings: &TlsSettings, sni: &str, http2: bool) {
    let peer = Peer {
        settings,
        files: &config.client_files,
        default_sni: sni,
        http2,
    };
    if let Some(socket) = tls::upstream(&peer) {
        cluster["transport_socket"] = socket;
    }
}

/// Whole seconds, as the kernel has it; what is not positive is the kernel's default.
fn keepalive(settings: &Keepalive) -> Option<Value> {
    let seconds = |text: &str| text.trim_end_matches('s').split('.').next()?.parse().ok();
    let members = [
        ("keepalive_probes", Some(u64::from(settings.probes))),
        ("keepalive_time", seconds(&settings.time)),
        ("keepalive_interval", seconds(&settings.interval)),
    ];
    let members: serde_json::Map<_, _> = members
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), json!(value.filter(|v| *v > 0)?))))
        .collect();
    (!members.is_empty()).then(|| members.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keepalive_is_in_whole_positive_seconds() {
        for (settings, expected) in [
            (json!({}), None),
            (json!({"time": "0.500s"}), None),
            (
                json!({"probes": 3, "time": "75s", "interval": "10.500s"}),
                Some(json!({
                    "keepalive_probes": 3, "keepalive_time": 75, "keepalive_interval": 10,
                })),
            ),
        ] {
            let settings = serde_json::from_value(settings).expect("settings");
            assert_eq!(keepalive(&settings), expected);
        }
    }
}
