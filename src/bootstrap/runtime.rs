//! Envoy's runtime switches: those Istio needs, and those the user sets.
//!
//! Does not check that Envoy knows a key.

use serde_json::{Map, Value, json};

use super::Config;

pub(super) fn section(config: &Config) -> Value {
    json!({ "layers": [
        { "name": "global config", "static_layer": switches(config) },
        { "name": "admin", "admin_layer": {} },
    ]})
}

/// Istio's switches, and the user's over them.
fn switches(config: &Config) -> Map<String, Value> {
    let mut switches = of_istio(config);
    for (name, value) in &config.node.proxy_config.runtime_values {
        let value = match value.as_str() {
            // The way to take a switch back.
            "" => {
                switches.shift_remove(name);
                continue;
            }
            "true" => json!(true),
            "false" => json!(false),
            text => json!(text),
        };
        switches.insert(name.clone(), value);
    }
    switches
}

fn of_istio(config: &Config) -> Map<String, Value> {
    let mut switches = Map::new();
    let mut set = |name: &str, value: Value| switches.insert(name.to_owned(), value);
    set("re2.max_program_size.error_level", json!("32768"));
    set(
        "envoy.deprecated_features:envoy.config.listener.v3.Listener.\
         hidden_envoy_deprecated_use_original_dst",
        json!(true),
    );
    let feature = |name: &str| format!("envoy.reloadable_features.{name}");
    set(&feature("http_reject_path_with_fragment"), json!(false));
    set(&feature("fixed_heap_use_allocated"), json!(true));
    set(
        &feature("coalesce_lb_rebuilds_on_batch_update"),
        json!(false),
    );
    if config.compliance_fips_140_2 {
        set(&feature("google_grpc_disable_tls_13"), json!(true));
    }
    if config.keep_path_fragment {
        let name = feature("http_strip_fragment_from_path_unsafe_if_disabled");
        set(&name, json!("false"));
    }
    switches
}
