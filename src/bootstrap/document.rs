//! Assembles the sections of the bootstrap.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::clusters::{self, LOCAL_CLUSTER};
use super::config::Config;
use super::tracer::Tracer;
use super::{listeners, node, runtime, services, stats};
use crate::proxy_config::ProxyConfig;

/// The bootstrap as JSON.
pub fn document(config: &Config) -> Value {
    let mut document = Map::new();
    let mut set = |name: &str, value: Value| drop(document.insert(name.to_owned(), value));
    set("application_log_config", log_format(config.log_as_json));
    set("node", node::section(&config.node));
    set("layered_runtime", runtime::section(config));
    set(
        "bootstrap_extensions",
        extensions(config.metadata_discovery),
    );
    for (name, interval) in [
        ("stats_flush_interval", config.stats.flush),
        ("stats_eviction_interval", config.stats.eviction),
    ] {
        if let Some(interval) = interval {
            set(name, seconds(interval));
        }
    }
    set("stats_config", stats::section(config));
    set("admin", admin(config));
    set("dynamic_resources", dynamic_resources(config.delta));
    let resources = json!({
        "clusters": clusters::section(config),
        "listeners": listeners::section(config),
    });
    set("static_resources", resources);
    set(
        "overload_manager",
        overload_manager(connection_limit(&config.node.proxy_config)),
    );
    if let Some(tracer) = Tracer::of(&config.node.proxy_config) {
        set(
            "tracing",
            tracer.section(&config.token_file(), &config.node.cluster),
        );
    }
    let sinks = services::sinks(config);
    if !sinks.is_empty() {
        set("stats_sinks", sinks.into());
    }
    if let Some(manager) = cluster_manager(config) {
        set("cluster_manager", manager);
    }
    set(
        "deferred_stat_options",
        json!({ "enable_deferred_creation_stats": true }),
    );
    document.into()
}

/// A duration in protobuf's JSON.
fn seconds(duration: Duration) -> Value {
    match duration.subsec_nanos() {
        0 => format!("{}s", duration.as_secs()).into(),
        nanos => format!("{}.{nanos:09}s", duration.as_secs()).into(),
    }
}

fn cluster_manager(config: &Config) -> Option<Value> {
    let mut manager = Map::new();
    let mut set = |name: &str, value: Value| drop(manager.insert(name.to_owned(), value));
    if config.node.is_true("ENABLE_SELF_DISCOVERY") {
        set("local_cluster_name", json!(LOCAL_CLUSTER));
    }
    if let Some(path) = &config.outlier_log_path {
        set("outlier_detection", json!({ "event_log_path": path }));
    }
    if let Some(load_stats) = &config.load_stats {
        set("load_stats_config", load_stats.clone());
    }
    if manager.is_empty() {
        return None;
    }
    manager.insert("enable_deferred_cluster_creation".to_owned(), json!(true));
    Some(manager.into())
}

fn log_format(as_json: bool) -> Value {
    if !as_json {
        let text = "%Y-%m-%dT%T.%fZ\t%l\tenvoy %n %g:%#\t%v\tthread=%t";
        return json!({ "log_format": { "text_format": text } });
    }
    json!({ "log_format": { "json_format": {
        "time": "%Y-%m-%dT%T.%fZ",
        "level": "%l",
        "scope": "envoy %n",
        "msg": "%j",
        "caller": "%g:%#",
        "thread": "%t",
    }}})
}

fn extensions(metadata_discovery: bool) -> Value {
    let typed = |name: &str, type_url: &str, value: Value| {
        json!({ "name": name, "typed_config": {
            "@type": "type.googleapis.com/udpa.type.v1.TypedStruct",
            "type_url": format!("type.googleapis.com/{type_url}"),
            "value": value,
        }})
    };
    let internal_listener = typed(
        "envoy.bootstrap.internal_listener",
        "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
        json!({ "buffer_size_kb": 64 }),
    );
    let mut extensions = vec![internal_listener];
    if metadata_discovery {
        let value = json!({ "config_source": { "ads": {} } });
        let url = "istio.workload.BootstrapExtension";
        extensions.insert(0, typed("metadata_discovery", url, value));
    }
    extensions.into()
}

fn admin(config: &Config) -> Value {
    json!({
        "access_log": [{
            "name": "envoy.access_loggers.file",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                "path": "/dev/null",
            },
        }],
        "profile_path": "/var/lib/istio/data/envoy.prof",
        "address": { "socket_address": {
            "address": config.families().first.loopback,
            "port_value": config.admin_port,
        }},
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

/// How many connections Envoy takes: the first limit that is set in one of three places.
pub(super) fn connection_limit(config: &ProxyConfig) -> i64 {
    let settings = config.connection_settings.as_ref();
    let settings = settings.and_then(|it| it.global_downstream_connection_limit);
    let metadata = config.metadata("ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS");
    let runtime = config
        .runtime_values
        .get("overload.global_downstream_max_connections");
    let texts = [metadata, runtime.map(String::as_str)];
    let texts = texts.into_iter().flatten().flat_map(str::parse);
    let mut limits = settings.map(i64::from).into_iter().chain(texts);
    limits
        .find(|limit| *limit > 0)
        .unwrap_or(i64::from(i32::MAX))
}

fn overload_manager(connections: i64) -> Value {
    json!({ "resource_monitors": [{
        "name": "envoy.resource_monitors.global_downstream_max_connections",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.resource_monitors.\
                      downstream_connections.v3.DownstreamConnectionsConfig",
            "max_active_downstream_connections": connections,
        },
    }]})
}
