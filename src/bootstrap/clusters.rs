//! Static clusters: Envoy itself, the agent, the agent's sockets, and collectors.

use std::path::Path;

use serde_json::{Value, json};

use super::config::{Config, FILES_SOCKET};
use super::services::{self, http2};

/// The name of the cluster Envoy is a member of.
pub(super) const LOCAL_CLUSTER: &str = "local_cluster";

pub(super) fn section(config: &Config) -> Value {
    let host = config.families().first.loopback;
    // Without a status server the port is refused, and so the health listener answers 503.
    let agent_port = config.agent_port.unwrap_or(15020);
    let mut clusters = vec![
        cluster("prometheus_stats", "0.250s", tcp(host, config.admin_port)),
        cluster("agent", "0.250s", tcp(host, agent_port)),
        grpc("sds-grpc", &config.sds_socket),
    ];
    if config.node.raw.contains_key("file-credential") {
        clusters.push(grpc("sds-files-grpc", Path::new(FILES_SOCKET)));
    }
    clusters.push(discovery(grpc("xds-grpc", &config.xds_socket)));
    clusters.extend(services::section(config));
    if config.node.is_true("ENABLE_SELF_DISCOVERY") {
        clusters.push(local_cluster());
    }
    clusters.into()
}

fn cluster(name: &str, connect_timeout: &str, address: Value) -> Value {
    json!({
        "name": name,
        // The semicolon ends the name for the statistics' tag expression.
        "alt_stat_name": format!("{name};"),
        "type": "STATIC",
        "connect_timeout": connect_timeout,
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address } }] }],
        },
    })
}

fn tcp(host: &str, port: u16) -> Value {
    json!({ "socket_address": { "protocol": "TCP", "address": host, "port_value": port } })
}

fn pipe(path: &Path) -> Value {
    json!({ "pipe": { "path": path.to_string_lossy() } })
}

fn grpc(name: &str, socket: &Path) -> Value {
    let mut cluster = cluster(name, "1s", pipe(socket));
    http2(&mut cluster);
    cluster
}

/// The replicas of this workload, for zone-aware routing.
fn local_cluster() -> Value {
    json!({
        "name": LOCAL_CLUSTER,
        "alt_stat_name": format!("{LOCAL_CLUSTER};"),
        "type": "EDS",
        "connect_timeout": "1s",
        "load_balancing_policy": { "policies": [{ "typed_extension_config": {
            "name": "envoy.load_balancing_policies.least_request",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.\
                          least_request.v3.LeastRequest",
                "locality_lb_config": { "zone_aware_lb_config": { "min_cluster_size": "1" } },
            },
        }}]},
        "eds_cluster_config": {
            "eds_config": { "ads": {}, "resource_api_version": "V3" },
            "service_name": LOCAL_CLUSTER,
        },
    })
}

/// Discovery streams are many and long; the default limits are for requests.
fn discovery(mut cluster: Value) -> Value {
    let thresholds = |priority: &str| {
        json!({
            "priority": priority,
            "max_connections": 100_000,
            "max_pending_requests": 100_000,
            "max_requests": 100_000,
        })
    };
    cluster["circuit_breakers"] = json!({
        "thresholds": [thresholds("DEFAULT"), thresholds("HIGH")],
    });
    cluster["upstream_connection_options"] = json!({ "tcp_keepalive": { "keepalive_time": 300 } });
    cluster["max_requests_per_connection"] = json!(1);
    cluster
}
