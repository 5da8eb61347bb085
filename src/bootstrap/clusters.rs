//! Static clusters: Envoy itself, the agent, and the agent's two sockets.
//!
//! Does not hold anything istiod sends.

use std::path::Path;

use serde_json::{Value, json};

use super::Config;

pub fn section(config: &Config) -> Value {
    let host = config.local().host;
    // Without a status server the port is refused, and so the health listener answers 503.
    let agent_port = config.agent_port.unwrap_or(15020);
    json!([
        cluster("prometheus_stats", "0.250s", tcp(host, config.admin_port)),
        cluster("agent", "0.250s", tcp(host, agent_port)),
        grpc(cluster("sds-grpc", "1s", pipe(&config.sds_socket))),
        discovery(grpc(cluster("xds-grpc", "1s", pipe(&config.xds_socket)))),
    ])
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

fn grpc(mut cluster: Value) -> Value {
    cluster["typed_extension_protocol_options"] = json!({
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": { "http2_protocol_options": {} },
        },
    });
    cluster
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
