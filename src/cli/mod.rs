//! What the user may type: pilot-agent's commands and flags.
//!
//! `clap` reads what is left after [`unknown::split`] took out flags of `proxy` that this agent does
//! not have, so that an injection template of another version still starts. They are reported by
//! name. Every other command refuses what it does not know.
//!
//! Does not act on anything: `main` does.

pub mod unknown;
pub mod version;

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::config::environment;
use crate::config::pod::NodeType;
use crate::logging;

/// Istio agent.
#[derive(Clone, Debug, Parser)]
#[command(name = "pilot-agent", disable_help_subcommand = true)]
pub struct Cli {
    #[command(flatten)]
    pub log: LogFlags,
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Runs the agent and Envoy.
    #[command(after_help = environment::reference())]
    Proxy(ProxyFlags),
    /// Prints the bootstrap Envoy would be started with, and starts nothing.
    Bootstrap(BootstrapFlags),
    /// Prints build information.
    Version(version::VersionFlags),
}

/// Logging, for every command.
#[derive(Args, Clone, Debug)]
pub struct LogFlags {
    /// Comma-separated scope:level pairs; a bare level is that of scope default.
    #[arg(long = "log_output_level", global = true, default_value = "")]
    pub output_level: String,
    /// Where log lines go: stdout, stderr or a file. May be repeated.
    #[arg(long = "log_target", global = true)]
    pub target: Vec<String>,
    /// Writes log lines as JSON; Envoy's too.
    #[arg(long = "log_as_json", global = true, num_args = 0..=1, require_equals = true,
          default_value = "false", default_missing_value = "true", action = clap::ArgAction::Set)]
    pub as_json: bool,
    /// Accepted for compatibility: this agent logs no stack traces.
    #[arg(
        long = "log_stacktrace_level",
        global = true,
        default_value = "default:none"
    )]
    pub stacktrace_level: String,
    /// Accepted for compatibility: this agent logs no callers.
    #[arg(long = "log_caller", global = true, default_value = "")]
    pub caller: String,
    /// Accepted for compatibility.
    #[arg(long = "vklog", global = true, default_value = "0")]
    pub vklog: i32,
}

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
    #[arg(long = "meshConfig", default_value = "./etc/istio/config/mesh")]
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
          default_missing_value = "true", action = clap::ArgAction::Set)]
    pub profiling: bool,
}

#[derive(Args, Clone, Debug)]
pub struct BootstrapFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    /// File the bootstrap goes to, instead of standard output.
    #[arg(long)]
    pub output: Option<PathBuf>,
    /// Has Envoy check the bootstrap.
    #[arg(long)]
    pub validate: bool,
}

/// What was typed, with the flags of `proxy` nobody knows taken out.
#[derive(Clone, Debug)]
pub struct Typed {
    pub cli: Cli,
    pub unknown_flags: Vec<String>,
}

/// Why the command line was not understood, or the help that was asked for.
#[derive(Debug)]
pub enum Refused {
    Help(String),
    Error(String),
}

/// Reads a command line, whose first word is the program.
pub fn parse(line: impl IntoIterator<Item = String>) -> Result<Typed, Refused> {
    let (known, unknown_flags) = unknown::split(line.into_iter().collect(), &Cli::command());
    match Cli::try_parse_from(known) {
        Ok(cli) => Ok(Typed { cli, unknown_flags }),
        Err(error) if error.use_stderr() => Err(Refused::Error(one_sentence(&error))),
        Err(help) => Err(Refused::Help(help.to_string())),
    }
}

/// The help of the program as a whole.
pub fn help() -> String {
    Cli::command().render_help().to_string()
}

impl LogFlags {
    pub fn options(&self) -> Result<logging::Options, logging::Error> {
        logging::Options::parse(&self.output_level, &self.target, self.as_json)
    }
}

/// Logs every flag with its value, what was left out, and what this program is.
pub fn announce(flags: &ProxyFlags, log: &LogFlags, unknown: &[String]) {
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

/// The first line of clap's report, without its decoration.
fn one_sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let sentence = first.strip_prefix("error: ").unwrap_or(first);
    // Our own sentence about the type says it all.
    let own = sentence.split_once("'[TYPE]': ").map(|(_, own)| own);
    own.unwrap_or(sentence).to_owned()
}

/// Exit codes of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitCode {
    Success,
    /// Any error of a command, as pilot-agent has it.
    CommandFailed,
    /// Envoy ended by itself, with this code or, for signal n, 128 + n.
    Envoy(u8),
}

impl ExitCode {
    /// The code of an Envoy that ended by itself.
    pub fn of_envoy(code: u8) -> Self {
        if code == 0 {
            Self::Success
        } else {
            Self::Envoy(code)
        }
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(match code {
            ExitCode::Success => 0,
            ExitCode::CommandFailed => 255,
            ExitCode::Envoy(code) => code,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(line: &str) -> Result<Typed, Refused> {
        parse(line.split(' ').map(str::to_owned))
    }

    fn proxy(line: &str) -> (ProxyFlags, LogFlags, Vec<String>) {
        let typed = typed(line).expect("the line is understood");
        match typed.cli.command {
            Some(Command::Proxy(flags)) => (flags, typed.cli.log, typed.unknown_flags),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn understands_what_the_injector_passes() {
        let (flags, log, unknown) = proxy(
            "pilot-agent proxy sidecar --domain shop.svc.cluster.local --proxyLogLevel=warning \
             --proxyComponentLogLevel=misc:error --log_output_level=default:info --log_as_json \
             --stsPort=1 --concurrency 2",
        );
        assert_eq!(flags.kind, NodeType::Sidecar);
        assert_eq!(flags.domain, "shop.svc.cluster.local");
        assert_eq!(flags.proxy_component_log_level, "misc:error");
        assert_eq!(flags.concurrency, 2);
        assert_eq!(log.output_level, "default:info");
        assert!(log.as_json);
        assert!(unknown.is_empty());
    }

    #[test]
    fn an_unknown_flag_of_proxy_is_reported_and_never_costs_the_type() {
        for line in [
            "pilot-agent proxy --old router",
            "pilot-agent proxy router --old",
            "pilot-agent proxy --old=1 router",
            "pilot-agent proxy --old value router",
        ] {
            let (flags, _, unknown) = proxy(line);
            assert_eq!(flags.kind, NodeType::Router, "{line}");
            assert_eq!(unknown, ["--old"], "{line}");
        }
    }

    #[test]
    fn refuses_with_one_sentence() {
        for (line, sentence) in [
            ("pilot-agent proxy gateway", "invalid proxy Type: gateway"),
            (
                "pilot-agent proxy ztunnel",
                "proxy type ztunnel is not supported",
            ),
            ("pilot-agent proxy --concurrency x", "--concurrency"),
            ("pilot-agent frobnicate", "frobnicate"),
            ("pilot-agent version --old", "--old"),
        ] {
            match typed(line) {
                Err(Refused::Error(text)) => assert!(text.contains(sentence), "{text}"),
                other => panic!("{line}: {other:?}"),
            }
        }
    }

    #[test]
    fn booleans_take_a_value_only_after_an_equals_sign() {
        let (flags, ..) = proxy("pilot-agent proxy --profiling=false");
        assert!(!flags.profiling);
        let (flags, ..) = proxy("pilot-agent proxy --profiling router");
        assert!(flags.profiling);
        assert_eq!(flags.kind, NodeType::Router);
    }
}
