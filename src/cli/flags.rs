//! The flags of every command, and those of `proxy`.
//!
//! Names, types and defaults are pilot-agent's. Flags it once had, or has for what this agent does
//! not do, are taken so that old command lines still start.
//!
//! Does not act on a flag; [`announce`] says which have no effect.

use std::path::PathBuf;

use clap::Args;

use super::{unknown, version};
use crate::config::environment::Value;
use crate::config::pod::NodeType;
use crate::logging;

/// Logging, for every command.
#[derive(Args, Clone, Debug)]
pub struct LogFlags {
    /// Comma-separated scope:level pairs; a bare level is that of scope default.
    #[arg(long = "log_output_level", global = true, default_value = "")]
    pub output_level: String,
    /// Where log lines go: stdout (the default), stderr or a file. May be repeated.
    #[arg(long = "log_target", global = true, default_value = "stdout")]
    pub target: Vec<String>,
    /// Writes log lines as JSON; Envoy's too.
    #[arg(long = "log_as_json", global = true, num_args = 0..=1, require_equals = true,
          default_value = "false", default_missing_value = "true", value_parser = truth,
          action = clap::ArgAction::Set)]
    pub as_json: bool,
    /// Accepted for compatibility: this agent logs no stack traces.
    #[arg(
        long = "log_stacktrace_level",
        global = true,
        default_value = "default:none"
    )]
    pub stacktrace_level: String,
    /// Comma-separated scopes whose lines name the place in the source; all means every scope.
    #[arg(long = "log_caller", global = true, default_value = "")]
    pub caller: String,
    /// Accepted for compatibility: no line has the scope klog here.
    #[arg(long = "vklog", global = true, default_value_t = 0)]
    pub vklog: i32,
    #[command(flatten)]
    pub rotation: RotationFlags,
}

/// What older releases took to rotate log files by.
#[derive(Args, Clone, Debug)]
pub struct RotationFlags {
    #[arg(long = "log_rotate", global = true, hide = true)]
    path: Option<String>,
    #[arg(long = "log_rotate_max_age", global = true, hide = true)]
    max_age: Option<i64>,
    #[arg(long = "log_rotate_max_size", global = true, hide = true)]
    max_size: Option<i64>,
    #[arg(long = "log_rotate_max_backups", global = true, hide = true)]
    max_backups: Option<i64>,
}

/// Where the mesh file is unless a flag says otherwise.
pub(crate) const MESH_CONFIG: &str = "./etc/istio/config/mesh";

#[derive(Args, Clone, Debug)]
pub struct ProxyFlags {
    /// Kind of node: sidecar, router or waypoint.
    #[arg(value_name = "TYPE", default_value = "sidecar", value_parser = node_type)]
    pub kind: NodeType,
    /// Further words, which pilot-agent ignores too.
    #[arg(hide = true)]
    pub ignored: Vec<String>,
    /// DNS domain of the node.
    #[arg(long, default_value = "")]
    pub domain: String,
    /// MeshConfig file.
    #[arg(long = "meshConfig", default_value = MESH_CONFIG)]
    pub mesh_config: PathBuf,
    /// Service cluster, when the configuration sets an empty one.
    #[arg(long = "serviceCluster", default_value = "istio-proxy")]
    pub service_cluster: String,
    /// Envoy's log level; may name components too.
    #[arg(long = "proxyLogLevel", default_value = "warning")]
    pub proxy_log_level: String,
    /// Envoy's log levels by component.
    #[arg(long = "proxyComponentLogLevel", default_value = "")]
    pub proxy_component_log_level: String,
    /// Envoy's worker threads; 0 leaves it to the configuration.
    #[arg(long, default_value_t = 0)]
    pub concurrency: u32,
    /// Refused unless empty: this agent writes the bootstrap itself.
    #[arg(long = "templateFile", default_value = "")]
    pub template_file: String,
    /// File of Envoy's outlier events.
    #[arg(long = "outlierLogPath", default_value = "")]
    pub outlier_log_path: String,
    /// Accepted for compatibility.
    #[arg(long = "stsPort", default_value_t = 0)]
    pub sts_port: u16,
    /// Accepted for compatibility.
    #[arg(long = "tokenManagerPlugin", default_value = "")]
    pub token_manager_plugin: String,
    /// Accepted for compatibility.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = truth, action = clap::ArgAction::Set)]
    pub profiling: bool,
}

impl LogFlags {
    pub fn options(&self) -> Result<logging::Options, logging::Error> {
        logging::check_levels(&self.stacktrace_level)?;
        Ok(logging::Options::parse(&self.output_level, &self.target)?
            .with_json(self.as_json)
            .with_callers_of(&self.caller))
    }
}

impl RotationFlags {
    /// Names of those that were given.
    fn given(&self) -> impl Iterator<Item = &'static str> {
        [
            ("--log_rotate", self.path.is_some()),
            ("--log_rotate_max_age", self.max_age.is_some()),
            ("--log_rotate_max_size", self.max_size.is_some()),
            ("--log_rotate_max_backups", self.max_backups.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, given)| given.then_some(name))
    }
}

/// Logs every flag with its value, what was left out, and what this program is.
pub fn announce(flags: &ProxyFlags, log: &LogFlags, unknown: &[unknown::Flag]) {
    let values = [
        ("concurrency", flags.concurrency.to_string()),
        ("domain", flags.domain.clone()),
        ("log_as_json", log.as_json.to_string()),
        ("log_caller", log.caller.clone()),
        ("log_output_level", log.output_level.clone()),
        ("log_stacktrace_level", log.stacktrace_level.clone()),
        ("log_target", format!("[{}]", log.target.join(","))),
        ("meshConfig", flags.mesh_config.display().to_string()),
        ("outlierLogPath", flags.outlier_log_path.clone()),
        ("profiling", flags.profiling.to_string()),
        (
            "proxyComponentLogLevel",
            flags.proxy_component_log_level.clone(),
        ),
        ("proxyLogLevel", flags.proxy_log_level.clone()),
        ("serviceCluster", flags.service_cluster.clone()),
        ("stsPort", flags.sts_port.to_string()),
        ("templateFile", flags.template_file.clone()),
        ("tokenManagerPlugin", flags.token_manager_plugin.clone()),
        ("vklog", log.vklog.to_string()),
    ];
    for (name, value) in values {
        tracing::info!("FLAG: --{name}={value:?}");
    }
    for flag in unknown {
        tracing::warn!("ignoring flag {flag}, which this agent does not have");
    }
    for flag in log.rotation.given() {
        tracing::warn!("ignoring flag {flag}: this agent does not rotate log files");
    }
    for word in &flags.ignored {
        tracing::warn!("ignoring {word:?}: one word after proxy is the type of node");
    }
    tracing::info!("Version {}", version::full());
}

fn node_type(text: &str) -> Result<NodeType, String> {
    match text {
        "sidecar" => Ok(NodeType::Sidecar),
        "router" => Ok(NodeType::Router),
        "waypoint" => Ok(NodeType::Waypoint),
        "ztunnel" | "agentgateway" => {
            Err(format!("proxy type {text} is not supported by this agent"))
        }
        _ => Err(format!("invalid proxy Type: {text}")),
    }
}

/// A yes or no in every spelling the environment knows too.
pub(super) fn truth(text: &str) -> Result<bool, String> {
    bool::parse(text).ok_or_else(|| format!("expected {}", bool::EXPECTED))
}
