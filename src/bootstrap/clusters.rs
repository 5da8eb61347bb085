//! Configures the static clusters: Envoy itself, the agent, the agent's sockets, and collectors.

use std::path::Path;

use serde_json::{Value, json};

use super::config::Config;
use super::document::extension;
use super::services;

/// The name of the cluster Envoy is a member of.
pub(super) const LOCAL_CLUSTER: &str = "local_cluster";

pub(super) fn section(config: &Config) -> Vec<Value> {
    let proxy_config = &config.node.proxy_config;
    let host = config.families().first.loopback;
    let mut clusters = vec![
        match &config.admin_socket {
            Some(socket) => cluster("prometheus_stats", "0.250s", None, &pipe(socket)),
            None => local("prometheus_stats", host, proxy_config.admin_port()),
        },
        // Without a status server the port is refused, and so the health listener answers 503.
        local("agent", host, proxy_config.agent_port().unwrap_or(15020)),
        grpc("sds-grpc", &config.sds_socket),
    ];
    if config.node.metadata.contains_key("file-credential") {
        clusters.push(grpc("sds-files-grpc", &config.files_socket));
    }
    clusters.push(discovery(&config.xds_socket));
    clusters.extend(services::section(config));
    if config.node.is_true("ENABLE_SELF_DISCOVERY") {
        clusters.push(local_cluster());
    }
    clusters
}

fn local(name: &str, host: &str, port: u16) -> Value {
    let address = json!({ "protocol": "TCP", "address": host, "port_value": port });
    cluster(name, "0.250s", None, &json!({ "socket_address": address }))
}

/// Builds a cluster with one endpoint. Envoy resolves its name among the families of `dns_lookup`.
pub(super) fn cluster(
    name: &str,
    connect_timeout: &str,
    dns_lookup: Option<&str>,
    address: &Value,
) -> Value {
    json!({
        "name": name,
        // The semicolon ends the name for the statistics' tag expression.
        "alt_stat_name": format!("{name};"),
        "type": dns_lookup.map_or("STATIC", |_| "STRICT_DNS"),
        "connect_timeout": connect_timeout,
        "respect_dns_ttl": dns_lookup.map(|_| true),
        "dns_lookup_family": dns_lookup,
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address } }] }],
        },
    })
}

/// Makes Envoy speak HTTP/2 to the cluster.
pub(super) fn http2(cluster: &mut Value) {
    cluster["typed_extension_protocol_options"] = json!({
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": { "http2_protocol_options": {} },
        },
    });
}

/// Builds a cluster of one gRPC server at a Unix socket.
pub fn grpc(name: &str, socket: &Path) -> Value {
    let mut cluster = cluster(name, "1s", None, &pipe(socket));
    http2(&mut cluster);
    cluster
}

fn pipe(socket: &Path) -> Value {
    json!({ "pipe": { "path": socket.to_string_lossy() } })
}

/// Builds the cluster of the agent's xDS socket. Discovery streams are many and long, and the default limits are
/// for requests.
fn discovery(socket: &Path) -> Value {
    let thresholds = ["DEFAULT", "HIGH"].map(|priority| {
        json!({
            "priority": priority,
            "max_connections": 100_000,
            "max_pending_requests": 100_000,
            "max_requests": 100_000,
        })
    });
    let mut cluster = grpc("xds-grpc", socket);
    cluster["circuit_breakers"] = json!({ "thresholds": thresholds });
    cluster["upstream_connection_options"] = json!({ "tcp_keepalive": { "keepalive_time": 300 } });
    cluster["max_requests_per_connection"] = json!(1);
    cluster
}

/// Builds the cluster of this workload's replicas, for zone-aware routing.
fn local_cluster() -> Value {
    json!({
        "name": LOCAL_CLUSTER,
        "alt_stat_name": format!("{LOCAL_CLUSTER};"),
        "type": "EDS",
        "connect_timeout": "1s",
        "load_balancing_policy": { "policies": [{ "typed_extension_config": extension(
            "envoy.load_balancing_policies.least_request",
            "envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest",
            json!({
                "locality_lb_config": { "zone_aware_lb_config": { "min_cluster_size": "1" } },
            }),
        )}]},
        "eds_cluster_config": {
            "eds_config": { "ads": {}, "resource_api_version": "V3" },
            "service_name": LOCAL_CLUSTER,
        },
    })
}
