//! Where Envoy pushes statistics: a metrics service, statsd.
//!
//! Does not decide which statistics there are.

use serde_json::{Value, json};

use super::Config;
use super::services::{metrics_service, socket_address};

pub(super) fn section(config: &Config) -> Vec<Value> {
    let metrics = metrics_service(config).map(|_| {
        let service = json!({
            "transport_api_version": "V3",
            "grpc_service": { "envoy_grpc": { "cluster_name": "envoy_metrics_service" } },
        });
        sink("metrics_service", "MetricsServiceConfig", service)
    });
    let statsd = socket_address(config, &config.node.proxy_config.statsd_udp_address);
    let statsd = statsd.map(|address| {
        let address = json!({ "address": address });
        sink("statsd", "StatsdSink", address)
    });
    metrics.into_iter().chain(statsd).collect()
}

fn sink(name: &str, message: &str, mut members: Value) -> Value {
    members["@type"] = json!(format!(
        "type.googleapis.com/envoy.config.metrics.v3.{message}"
    ));
    json!({ "name": format!("envoy.stat_sinks.{name}"), "typed_config": members })
}
