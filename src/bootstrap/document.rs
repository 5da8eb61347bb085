//! Assembles the sections of the bootstrap.

use serde_json::{Map, Value, json};

use super::clusters::{self, LOCAL_CLUSTER};
use super::config::Config;
use super::services::{self, Tracer};
use super::{listeners, node, stats};
use crate::json;
use crate::proxy_config::ProxyConfig;
use crate::runtime::duration;

/// Builds the bootstrap.
pub fn document(config: &Config) -> Value {
    let tracer = Tracer::from_config(config);
    let sinks = services::sinks(config);
    let document = json!({
        "application_log_config": { "log_format": log_format(config.log_as_json) },
        "node": {},
        "layered_runtime": { "layers": [
            { "name": "global config", "static_layer": runtime_values(config) },
            { "name": "admin", "admin_layer": {} },
        ]},
        "bootstrap_extensions": extensions(config.metadata_discovery),
        "stats_flush_interval": config.stats.flush.map(duration::seconds),
        "stats_eviction_interval": config.stats.eviction.map(duration::seconds),
        "stats_config": stats::section(config),
        "admin": admin(config),
        "dynamic_resources": dynamic_resources(config.delta),
        "static_resources": {
            "clusters": clusters::section(config),
            "listeners": listeners::section(config),
        },
        "overload_manager": { "resource_monitors": [extension(
            "envoy.resource_monitors.global_downstream_max_connections",
            "envoy.extensions.resource_monitors.downstream_connections.v3.\
             DownstreamConnectionsConfig",
            json!({
                "max_active_downstream_connections": connection_limit(&config.node.proxy_config),
            }),
        )]},
        "tracing": tracer.map(Tracer::section),
        "stats_sinks": (!sinks.is_empty()).then_some(sinks),
        "cluster_manager": cluster_manager(config),
        "deferred_stat_options": { "enable_deferred_creation_stats": true },
    });
    let mut document = without_nulls(document);
    // It is added last, because members of node metadata may be null.
    document["node"] = node::section(&config.node);
    document
}

/// Returns Envoy's runtime values: those Istio needs, overridden by the user's. Null stands for a value of Istio
/// that the user removes.
fn runtime_values(config: &Config) -> Value {
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
        const NAME: &str =
            "envoy.reloadable_features.http_strip_fragment_from_path_unsafe_if_disabled";
        values[NAME] = json!("false");
    }
    for (name, text) in &config.node.proxy_config.runtime_values {
        values[name] = match text.as_str() {
            "" => Value::Null,
            text => text.parse().map_or_else(|_| json!(text), Value::Bool),
        };
    }
    values
}

/// Removes members and items that are null: sections write null for a member that they leave out.
pub(super) fn without_nulls(mut value: Value) -> Value {
    json::remove_null(&mut value);
    value
}

/// Configures an extension of Envoy by a message with these members.
pub(super) fn extension(name: &str, message: &str, members: Value) -> Value {
    let mut typed_config = Map::new();
    typed_config.insert("@type".to_owned(), format!("type.googleapis.com/{message}").into());
    if let Value::Object(members) = members {
        typed_config.extend(members);
    }
    json!({ "name": name, "typed_config": typed_config })
}

fn cluster_manager(config: &Config) -> Option<Value> {
    let local_cluster = config.node.is_true("ENABLE_SELF_DISCOVERY");
    let path = config.outlier_log_path.as_ref();
    if !local_cluster && path.is_none() && config.load_stats.is_none() {
        return None;
    }
    Some(json!({
        "local_cluster_name": local_cluster.then_some(LOCAL_CLUSTER),
        "outlier_detection": path.map(|path| json!({ "event_log_path": path })),
        "load_stats_config": config.load_stats,
        "enable_deferred_cluster_creation": true,
    }))
}

fn log_format(as_json: bool) -> Value {
    if !as_json {
        return json!({ "text_format": "%Y-%m-%dT%T.%fZ\t%l\tenvoy %n %g:%#\t%v\tthread=%t" });
    }
    json!({ "json_format": {
        "time": "%Y-%m-%dT%T.%fZ",
        "level": "%l",
        "scope": "envoy %n",
        "msg": "%j",
        "caller": "%g:%#",
        "thread": "%t",
    }})
}

fn extensions(metadata_discovery: bool) -> Value {
    json!([
        metadata_discovery.then(|| typed_struct(
            "metadata_discovery",
            "istio.workload.BootstrapExtension",
            json!({ "config_source": { "ads": {} } }),
        )),
        typed_struct(
            "envoy.bootstrap.internal_listener",
            "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
            json!({ "buffer_size_kb": 64 }),
        ),
    ])
}

/// Configures an extension by a message in a `TypedStruct`.
fn typed_struct(name: &str, message: &str, value: Value) -> Value {
    let type_url = format!("type.googleapis.com/{message}");
    extension(name, "udpa.type.v1.TypedStruct", json!({ "type_url": type_url, "value": value }))
}

fn admin(config: &Config) -> Value {
    json!({
        "access_log": [extension(
            "envoy.access_loggers.file",
            "envoy.extensions.access_loggers.file.v3.FileAccessLog",
            json!({ "path": "/dev/null" }),
        )],
        "profile_path": "/var/lib/istio/data/envoy.prof",
        "address": match &config.admin_socket {
            // Read and write for the owner only.
            Some(socket) => json!({ "pipe": { "path": socket.to_string_lossy(), "mode": 0o600 } }),
            None => json!({ "socket_address": {
                "address": config.families().first.loopback,
                "port_value": config.node.proxy_config.admin_port(),
            }}),
        },
    })
}

fn dynamic_resources(delta: bool) -> Value {
    let from_ads = json!({
        "ads": {},
        // Envoy waits for istiod rather than start empty.
        "initial_fetch_timeout": "0s",
        "resource_api_version": "V3",
    });
    json!({
        "lds_config": from_ads,
        "cds_config": from_ads,
        "ads_config": {
            "api_type": if delta { "DELTA_GRPC" } else { "GRPC" },
            "set_node_on_first_message_only": true,
            "transport_api_version": "V3",
            "grpc_services": [{ "envoy_grpc": { "cluster_name": "xds-grpc" } }],
        },
    })
}

/// Returns how many connections Envoy accepts: the first limit that is set in one of three places.
pub(super) fn connection_limit(config: &ProxyConfig) -> i64 {
    let settings = config.connection_settings.as_ref();
    let setting = settings.and_then(|it| it.global_downstream_connection_limit).map(i64::from);
    let metadata = config.metadata("ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS");
    let runtime = config.runtime_values.get("overload.global_downstream_max_connections");
    let texts = [metadata, runtime.map(String::as_str)];
    let [metadata, runtime] = texts.map(|text| text?.parse().ok());
    let mut limits = [setting, metadata, runtime].into_iter().flatten();
    limits.find(|limit| *limit > 0).unwrap_or(i32::MAX.into())
}
