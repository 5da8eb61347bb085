//! Where Envoy pushes statistics: a metrics service, statsd.
//!
//! Does not decide which statistics there are.

use serde_json::{Value, json};

use super::settings::Settings;

pub(super) fn section(settings: &Settings) -> Vec<Value> {
    let metrics = settings.metrics_service().map(|_| {
        let service = json!({
            "transport_api_version": "V3",
            "grpc_service": { "envoy_grpc": { "cluster_name": "envoy_metrics_service" } },
        });
        sink("metrics_service", "MetricsServiceConfig", service)
    });
    let statsd = settings.statsd_udp_address.as_ref().map(|address| {
        let address = json!({ "address": address.section() });
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
