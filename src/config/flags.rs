//! Defines the flags of every command, and the flags of `proxy`.
//!
//! Names, types and defaults are pilot-agent's. Flags of its older releases, and flags without an effect
//! here, are accepted so that old command lines still start. [`values`] lists the flags of a command line.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Args, Command, ValueEnum};

use super::environment::Value;
use super::pod::NodeType;
use crate::problem::Problem;
use crate::runtime::lifecycle::BoxError;
use crate::{logging, spelling};

/// Logging, for every command.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logging")]
pub struct LogFlags {
    /// Comma-separated scope:level pairs. A level without a scope applies to the scope default.
    #[arg(long = "log_output_level", global = true, default_value = "")]
    pub output_level: String,
    /// Destination of log lines: stdout, stderr or a file. May be repeated.
    #[arg(long = "log_target", global = true, default_value = "stdout")]
    pub target: Vec<String>,
    /// Writes log lines as JSON, including Envoy's.
    #[arg(long = "log_as_json", global = true, num_args = 0..=1, require_equals = true,
          default_value = "false", default_missing_value = "true", value_parser = parse_bool,
          action = ArgAction::Set)]
    pub as_json: bool,
    /// Ignored; accepted for compatibility. This agent does not log stack traces.
    #[arg(long = "log_stacktrace_level", global = true, default_value = "default:none")]
    pub stacktrace_level: String,
    /// Comma-separated scopes whose log lines include the source location; all means every scope.
    #[arg(long = "log_caller", global = true, default_value = "")]
    pub caller: String,
    /// Ignored; accepted for compatibility. This agent does not use klog.
    #[arg(long = "vklog", global = true, default_value_t = 0)]
    pub vklog: i32,
    // Flags of older releases for the rotation of log files.
    #[arg(long = "log_rotate", global = true, hide = true)]
    pub rotate: Option<String>,
    #[arg(long = "log_rotate_max_age", global = true, hide = true)]
    pub rotate_max_age: Option<i64>,
    #[arg(long = "log_rotate_max_size", global = true, hide = true)]
    pub rotate_max_size: Option<i64>,
    #[arg(long = "log_rotate_max_backups", global = true, hide = true)]
    pub rotate_max_backups: Option<i64>,
}

pub(super) const MESH_CONFIG: &str = "./etc/istio/config/mesh";

#[derive(Args, Clone, Debug)]
pub struct ProxyFlags {
    /// Node type: sidecar, router or waypoint.
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
    /// Service cluster, if the configuration sets an empty one.
    #[arg(long = "serviceCluster", default_value = "istio-proxy")]
    pub service_cluster: String,
    /// Envoy's log level. May also set levels of components.
    #[arg(long = "proxyLogLevel", default_value = "warning")]
    pub proxy_log_level: String,
    /// Comma-separated component:level pairs of Envoy.
    #[arg(long = "proxyComponentLogLevel", default_value = "")]
    pub proxy_component_log_level: String,
    /// Number of Envoy's worker threads. If 0, the configuration decides.
    #[arg(long, default_value_t = 0)]
    pub concurrency: u32,
    /// Must be empty, because this agent writes the bootstrap itself.
    #[arg(long = "templateFile", default_value = "")]
    pub template_file: String,
    /// File that Envoy writes outlier detection events to.
    #[arg(long = "outlierLogPath", default_value = "")]
    pub outlier_log_path: String,
    /// Ignored; accepted for compatibility.
    #[arg(long = "stsPort", default_value_t = 0)]
    pub sts_port: u16,
    /// Ignored; accepted for compatibility.
    #[arg(long = "tokenManagerPlugin", default_value = "")]
    pub token_manager_plugin: String,
    /// Ignored; accepted for compatibility.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub profiling: bool,
}

impl LogFlags {
    /// Checks the flags.
    pub fn options(&self) -> Result<logging::Options, Problem> {
        logging::Levels::parse(&self.stacktrace_level)?;
        Ok(logging::Options {
            levels: logging::Levels::parse(&self.output_level)?,
            targets: self.target.clone(),
            json: self.as_json,
            callers: self.caller.clone(),
        })
    }
}

/// A flag of a command line with its value.
#[derive(Clone, Debug)]
pub struct Flag {
    pub name: String,
    /// The value, in brackets if the flag may be repeated.
    pub value: String,
    pub is_given: bool,
    /// True if the flag is not documented.
    pub is_hidden: bool,
}

/// Lists the flags of `command` with their values, by name. The node type counts as a flag.
pub fn values(command: &Command, matches: &ArgMatches) -> Vec<Flag> {
    let flags = command.get_arguments().filter_map(|flag| {
        let id = flag.get_id().as_str();
        let values = matches.try_get_raw(id).ok()??.map(|value| value.to_string_lossy());
        let value = values.collect::<Vec<_>>().join(",");
        Some(Flag {
            name: flag.get_long().unwrap_or("type").to_owned(),
            value: match flag.get_action() {
                ArgAction::Append => format!("[{value}]"),
                _ => value,
            },
            is_given: matches.value_source(id) == Some(ValueSource::CommandLine),
            is_hidden: flag.is_hide_set(),
        })
    });
    let mut sorted: Vec<_> = flags.collect();
    sorted.sort_by(|one, other| one.name.cmp(&other.name));
    sorted
}

fn node_type(text: &str) -> Result<NodeType, BoxError> {
    if ["ztunnel", "agentgateway"].contains(&text) {
        return Err(format!("proxy type {text} is not supported by this agent").into());
    }
    NodeType::from_str(text, false).map_err(|_| {
        let known = NodeType::value_variants().iter().map(ToString::to_string);
        format!("invalid proxy Type: {text}{}", spelling::hint(text, "", known)).into()
    })
}

/// Parses a boolean in every spelling that variables have.
pub fn parse_bool(text: &str) -> Result<bool, BoxError> {
    bool::parse(text).ok_or_else(|| format!("expected {}", bool::EXPECTED).into())
}

/// Reads the words after `proxy`.
#[cfg(test)]
pub(crate) fn parse(words: &str) -> (ProxyFlags, LogFlags, Vec<Flag>) {
    use clap::FromArgMatches;
    let mut proxy = LogFlags::augment_args(ProxyFlags::augment_args(Command::new("proxy")));
    let words = std::iter::once("proxy").chain(words.split_whitespace());
    let matches = proxy.try_get_matches_from_mut(words).expect("flags");
    let flags = ProxyFlags::from_arg_matches(&matches).expect("flags of proxy");
    let log = LogFlags::from_arg_matches(&matches).expect("flags of logging");
    (flags, log, values(&proxy, &matches))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_has_its_value_and_whether_it_is_given() {
        let line = "router --concurrency 2 --proxyLogLevel=warning --log_rotate /x";
        let (.., flags) = parse(line);
        let find = |name: &str| {
            let flag = flags.iter().find(|flag| flag.name == name);
            flag.map(|flag| (flag.value.as_str(), flag.is_given, flag.is_hidden))
        };
        assert_eq!(find("type"), Some(("router", true, false)));
        assert_eq!(find("concurrency"), Some(("2", true, false)));
        assert_eq!(find("proxyLogLevel"), Some(("warning", true, false)));
        assert_eq!(find("meshConfig"), Some((MESH_CONFIG, false, false)));
        assert_eq!(find("log_target"), Some(("[stdout]", false, false)));
        assert_eq!(find("log_rotate"), Some(("/x", true, true)));
        assert_eq!(find("log_rotate_max_age"), None);
    }
}
