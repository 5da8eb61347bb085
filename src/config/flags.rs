//! The flags of every command, and the flags of `proxy`.
//!
//! Names, types and defaults are pilot-agent's. Flags of its older releases, and flags without an effect
//! here, are accepted so that old command lines still start.

use std::path::PathBuf;

use clap::{Args, Command};

use super::environment::Value;
use super::pod::NodeType;
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

/// Flags of older releases for the rotation of log files.
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

/// The default path of the mesh file.
pub(super) const MESH_CONFIG: &str = "./etc/istio/config/mesh";

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
        logging::Options::parse(&self.output_level, &self.target, self.as_json, &self.caller)
    }
}

/// A flag with its value.
#[derive(Clone, Debug)]
pub struct Flag {
    pub name: &'static str,
    pub value: String,
}

impl Flag {
    fn new(name: &'static str, value: impl ToString) -> Self {
        let value = value.to_string();
        Self { name, value }
    }

    /// Whether the value is the one of a command line without the flag.
    pub fn is_default(&self) -> bool {
        let proxy = ProxyFlags::augment_args(Command::new("proxy"));
        let mut known = proxy.get_arguments();
        let flag = known.find(|flag| flag.get_long() == Some(self.name));
        // The type of node has no name on the command line.
        let flag = flag.or_else(|| proxy.get_arguments().find(|flag| flag.get_id() == "kind"));
        let default = flag.and_then(|flag| flag.get_default_values().first());
        default.and_then(|default| default.to_str()) == Some(self.value.as_str())
    }
}

impl ProxyFlags {
    /// The flags of `proxy` by name, without the type of node.
    pub fn values(&self) -> Vec<Flag> {
        vec![
            Flag::new("concurrency", self.concurrency),
            Flag::new("domain", &self.domain),
            Flag::new("meshConfig", self.mesh_config.display()),
            Flag::new("outlierLogPath", &self.outlier_log_path),
            Flag::new("profiling", self.profiling),
            Flag::new("proxyComponentLogLevel", &self.proxy_component_log_level),
            Flag::new("proxyLogLevel", &self.proxy_log_level),
            Flag::new("serviceCluster", &self.service_cluster),
            Flag::new("stsPort", self.sts_port),
            Flag::new("templateFile", &self.template_file),
            Flag::new("tokenManagerPlugin", &self.token_manager_plugin),
        ]
    }

    /// The type of node, named as in reports.
    pub fn node_type(&self) -> Flag {
        Flag::new("type", self.kind)
    }
}

impl LogFlags {
    /// The flags of logging by name.
    pub fn values(&self) -> Vec<Flag> {
        vec![
            Flag::new("log_as_json", self.as_json),
            Flag::new("log_caller", &self.caller),
            Flag::new("log_output_level", &self.output_level),
            Flag::new("log_stacktrace_level", &self.stacktrace_level),
            Flag::new("log_target", format!("[{}]", self.target.join(","))),
            Flag::new("vklog", self.vklog),
        ]
    }
}

impl RotationFlags {
    /// Names of the flags that were given.
    pub fn given(&self) -> impl Iterator<Item = &'static str> {
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

/// A boolean in every spelling a variable may have.
pub fn truth(text: &str) -> Result<bool, String> {
    bool::parse(text).ok_or_else(|| format!("expected {}", bool::EXPECTED))
}

/// Reads the words behind `proxy`.
#[cfg(test)]
pub(crate) fn parse(words: &str) -> (ProxyFlags, LogFlags) {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        proxy: ProxyFlags,
        #[command(flatten)]
        log: LogFlags,
    }
    let words = std::iter::once("proxy").chain(words.split_whitespace());
    let line = <Line as clap::Parser>::parse_from(words);
    (line.proxy, line.log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_flags_differ_from_their_defaults() {
        let (flags, _) = parse("router --concurrency 2 --proxyLogLevel=warning");
        let all = flags.values().into_iter().chain([flags.node_type()]);
        let given = all.filter(|flag| !flag.is_default());
        let given: Vec<_> = given.map(|flag| (flag.name, flag.value)).collect();
        let expected = [
            ("concurrency", "2".to_owned()),
            ("type", "router".to_owned()),
        ];
        assert_eq!(given, expected);
    }
}
