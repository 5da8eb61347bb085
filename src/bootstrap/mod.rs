//! The document Envoy starts from.
//!
//! Built from typed settings in sections, one file each; written whole or not at all, and removed
//! when [`Written`] is dropped, which is when Envoy has ended.
//!
//! Does not support templates, and does not start Envoy.

pub mod clusters;
pub mod listeners;
pub mod node;
pub mod stats;

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// What differs from one bootstrap to the next. Paths stay as they are: Envoy shares the agent's
/// working directory.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of the file.
    pub directory: PathBuf,
    pub node: node::Node,
    pub xds_socket: PathBuf,
    pub sds_socket: PathBuf,
    /// Whether Envoy asks for changes only.
    pub delta: bool,
    /// Loads Istio's peer metadata extension, which only Istio's Envoy has.
    pub metadata_discovery: bool,
    pub log_as_json: bool,
    pub admin_port: u16,
    /// The agent's own port. None while the status server is switched off.
    pub agent_port: Option<u16>,
    pub health_port: u16,
    pub prometheus_port: u16,
    pub outlier_log_path: Option<String>,
}

/// A bootstrap on disk. Dropping it removes the file.
#[derive(Debug)]
pub struct Written {
    path: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {action} {}", .path.display())]
    Write {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Config {
    /// Where [`write`] puts the file. Without a leading `./`, as pilot-agent has it.
    pub fn file(&self) -> PathBuf {
        let directory = self.directory.strip_prefix("./").unwrap_or(&self.directory);
        directory.join("envoy-rev.json")
    }

    fn local(&self) -> Local {
        Local::of(&self.node.addresses)
    }
}

/// How this pod spells "here" and "everywhere".
#[derive(Clone, Copy, Debug)]
struct Local {
    host: &'static str,
    wildcard: &'static str,
}

impl Local {
    fn of(addresses: &[IpAddr]) -> Self {
        if addresses.iter().all(IpAddr::is_ipv6) {
            Self {
                host: "::1",
                wildcard: "::",
            }
        } else {
            Self {
                host: "127.0.0.1",
                wildcard: "0.0.0.0",
            }
        }
    }
}

/// Writes the bootstrap next to its place and moves it there.
pub fn write(config: &Config) -> Result<Written, Error> {
    let path = config.file();
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| Error::Write {
            action,
            path,
            source,
        }
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&config.directory)
        .map_err(failed("create", &config.directory))?;
    let unfinished = path.with_extension("json.tmp");
    let text = format!("{:#}\n", document(config));
    fs::write(&unfinished, text).map_err(failed("write", &unfinished))?;
    fs::rename(&unfinished, &path).map_err(failed("move the new bootstrap to", &path))?;
    Ok(Written { path })
}

impl Drop for Written {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "cannot remove Envoy's bootstrap");
        }
    }
}

/// The bootstrap as JSON.
pub fn document(config: &Config) -> Value {
    let mut document = json!({
        "application_log_config": log_format(config.log_as_json),
        "node": node::section(&config.node),
        "layered_runtime": runtime(),
        "bootstrap_extensions": extensions(config.metadata_discovery),
        "stats_config": stats::section(config.metadata_discovery),
        "admin": admin(config),
        "dynamic_resources": dynamic_resources(config.delta),
        "static_resources": {
            "clusters": clusters::section(config),
            "listeners": listeners::section(config),
        },
        "overload_manager": overload_manager(),
        "deferred_stat_options": { "enable_deferred_creation_stats": true },
    });
    if let Some(path) = &config.outlier_log_path {
        document["cluster_manager"] = json!({
            "outlier_detection": { "event_log_path": path },
            "enable_deferred_cluster_creation": true,
        });
    }
    document
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

fn runtime() -> Value {
    json!({ "layers": [
        {
            "name": "global config",
            "static_layer": {
                "re2.max_program_size.error_level": "32768",
                "envoy.deprecated_features:envoy.config.listener.v3.Listener.\
                 hidden_envoy_deprecated_use_original_dst": true,
                "envoy.reloadable_features.http_reject_path_with_fragment": false,
                "envoy.reloadable_features.fixed_heap_use_allocated": true,
                "envoy.reloadable_features.coalesce_lb_rebuilds_on_batch_update": false,
            },
        },
        { "name": "admin", "admin_layer": {} },
    ]})
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
            "address": config.local().host,
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

fn overload_manager() -> Value {
    json!({ "resource_monitors": [{
        "name": "envoy.resource_monitors.global_downstream_max_connections",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.resource_monitors.\
                      downstream_connections.v3.DownstreamConnectionsConfig",
            "max_active_downstream_connections": i32::MAX,
        },
    }]})
}

#[cfg(test)]
mod tests;
