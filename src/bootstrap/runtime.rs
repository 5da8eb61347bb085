//! Sets Envoy's runtime values: those Istio needs, overridden by the user's.

use serde_json::{Value, json};

use super::config::Config;

pub(super) fn section(config: &Config) -> Value {
    json!({ "layers": [
        { "name": "global config", "static_layer": values(config) },
        { "name": "admin", "admin_layer": {} },
    ]})
}

/// Returns the values by name. Null stands for a value of Istio that the user removes.
fn values(config: &Config) -> Value {
    let mut values = json!({
        "re2.max_program_size.error_level": "32768",
        "envoy.deprecated_features:envoy.config.listener.v3.Listener.hidden_envoy_deprecated_use_original_dst": true,
        "envoy.reloadable_features.http_reject_path_with_fragment": false,
        "envoy.reloadable_features.fixed_heap_use_allocated": true,
        "envoy.reloadable_features.coalesce_lb_rebuilds_on_batch_update": false,
    });
    if config.compliance_fips_140_2 {
        values["envoy.reloadable_features.google_grpc_disable_tls_13"] = json!(true);
    }
    if config.keep_path_fragment {
        let feature = "http_strip_fragment_from_path_unsafe_if_disabled";
        values[format!("envoy.reloadable_features.{feature}")] = json!("false");
    }
    for (name, text) in &config.node.proxy_config.runtime_values {
        values[name] = match text.as_str() {
            "" => Value::Null,
            text => text.parse().map_or_else(|_| json!(text), Value::Bool),
        };
    }
    values
}
