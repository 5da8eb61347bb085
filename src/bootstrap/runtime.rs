//! Envoy's runtime values: what Istio needs, overridden by the user's.

use serde_json::{Map, Value, json};

use super::config::Config;

pub(super) fn section(config: &Config) -> Value {
    json!({ "layers": [
        { "name": "global config", "static_layer": values(config) },
        { "name": "admin", "admin_layer": {} },
    ]})
}

fn values(config: &Config) -> Map<String, Value> {
    let mut values = Map::new();
    let mut set = |name: &str, value: Value| values.insert(name.to_owned(), value);
    set("re2.max_program_size.error_level", json!("32768"));
    set(
        "envoy.deprecated_features:envoy.config.listener.v3.Listener.\
         hidden_envoy_deprecated_use_original_dst",
        json!(true),
    );
    let strip_fragment = "http_strip_fragment_from_path_unsafe_if_disabled";
    for (is_set, feature, value) in [
        (true, "http_reject_path_with_fragment", json!(false)),
        (true, "fixed_heap_use_allocated", json!(true)),
        (true, "coalesce_lb_rebuilds_on_batch_update", json!(false)),
        (
            config.compliance_fips_140_2,
            "google_grpc_disable_tls_13",
            json!(true),
        ),
        (config.keep_path_fragment, strip_fragment, json!("false")),
    ] {
        if is_set {
            set(&format!("envoy.reloadable_features.{feature}"), value);
        }
    }
    for (name, value) in &config.node.proxy_config.runtime_values {
        let value = match value.as_str() {
            // An empty text removes a value of Istio.
            "" => {
                values.shift_remove(name);
                continue;
            }
            "true" => json!(true),
            "false" => json!(false),
            text => json!(text),
        };
        values.insert(name.clone(), value);
    }
    values
}
