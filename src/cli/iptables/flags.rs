//! Defines the flags of `istio-iptables`, and the variables that replace flags.
//!
//! [`arguments`] merges both: a flag that is not given is read from its variables. A variable that does not parse
//! is ignored, as in pilot-agent.

use std::time::Duration;

use clap::{Arg, ArgAction, Args, Command, FromArgMatches};

use crate::capture::config::Settings;
use crate::capture::explain::Flow;
use crate::config::environment::{Environment, Value};
use crate::config::flags::{Flag, parse_bool};
use crate::runtime::duration;
use crate::runtime::lifecycle::BoxError;

/// The settings of the rules, and what to do with them.
#[derive(Args, Clone, Debug)]
#[command(mut_args(switch))]
pub struct IptablesFlags {
    /// Words, which pilot-agent ignores too.
    #[arg(hide = true)]
    ignored: Vec<String>,
    #[command(flatten)]
    pub settings: Settings,
    /// Prints the rules and changes nothing.
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// File that --dry-run writes the rules to, in addition to standard output.
    #[arg(long, value_name = "PATH", default_value_t)]
    pub dry_run_file_path: String,
    /// User whose traffic is not captured if --proxy-uid is empty.
    #[arg(long, value_name = "USER", default_value = "istio-proxy")]
    pub envoy_user: String,
    /// Port that --run-validation connects to.
    #[arg(long, value_name = "PORT", default_value_t = 15002)]
    pub iptables_probe_port: u16,
    /// Time limit of --run-validation.
    #[arg(long, value_name = "DURATION", value_parser = time, default_value = "5s")]
    pub probe_timeout: Duration,
    /// Checks the configuration and sets up nothing. With --verify and --explain, the rules are the rules of
    /// Istio's CNI plugin.
    #[arg(long)]
    pub skip_rule_apply: bool,
    /// Opens a connection to check that traffic is captured, and exits with 126 if not. Run it as --proxy-uid.
    #[arg(long)]
    pub run_validation: bool,
    /// Searches all addresses of the pod for an IPv6 address, instead of the first only.
    #[arg(long)]
    pub dual_stack: bool,
    /// Ignored; accepted for compatibility. Only the CNI plugin enters other namespaces.
    #[arg(long, value_name = "PATH", default_value_t)]
    pub network_namespace: String,
    /// Ignored; accepted for compatibility. Only the CNI plugin uses it.
    #[arg(long)]
    pub cni_mode: bool,
    /// Ignored; accepted for compatibility. Rules that differ are always replaced.
    #[arg(long)]
    pub reconcile: bool,
    /// Removes the rules and does not set up any.
    #[arg(long)]
    pub cleanup_only: bool,
    /// Sets up rules even if they already exist.
    #[arg(long)]
    pub force_apply: bool,
    /// Uses nftables instead of iptables.
    #[arg(long)]
    pub native_nftables: bool,
    /// Prints what the rules do with a flow, and why, and changes nothing. A flow is
    /// out,PROTOCOL,USER[/GROUP],[SOURCE,]ADDRESS:PORT[,INTERFACE] or
    /// in,PROTOCOL,[SOURCE,][ADDRESS:]PORT[,INTERFACE]: out,tcp,1337,10.0.0.5:443.
    #[arg(long, value_name = "FLOW")]
    pub explain: Option<Flow>,
    /// Prints how the live rules differ from the rules of these arguments, and changes nothing. Exits with 3
    /// if traffic may not be captured.
    #[arg(long)]
    pub verify: bool,
}

/// Lets a switch have a value, as in pilot-agent.
fn switch(flag: Arg) -> Arg {
    match flag.get_action() {
        ArgAction::SetTrue => flag
            .action(ArgAction::Set)
            .num_args(0..=1)
            .require_equals(true)
            .default_value("false")
            .default_missing_value("true")
            .hide_default_value(true)
            .value_parser(parse_bool),
        _ => flag,
    }
}

fn time(text: &str) -> Result<Duration, BoxError> {
    duration::parse(text).ok_or_else(|| format!("expected {}", Duration::EXPECTED).into())
}

/// Returns the variables of a flag, the strongest last.
pub(super) fn variables(flag: &str) -> Vec<String> {
    let name = flag.to_uppercase().replace('-', "_");
    let stronger = match flag {
        "envoy-port" | "explain" | "verify" | "help" => return Vec::new(),
        "protect-admin" => return vec![format!("ISTIO_AGENT_{name}")],
        "redirect-dns" => "ISTIO_META_DNS_CAPTURE",
        "drop-invalid" => "INVALID_DROP",
        "dual-stack" => "ISTIO_DUAL_STACK",
        _ => return vec![name],
    };
    vec![name, stronger.to_owned()]
}

/// Names the variables of the flag in its help.
pub(in crate::cli) fn with_variables(flag: Arg) -> Arg {
    let names = flag.get_long().map(variables).unwrap_or_default();
    match flag.get_help() {
        Some(help) if !names.is_empty() => {
            let help = format!("{help} [env: {}]", names.join(", "));
            flag.help(help)
        }
        _ => flag,
    }
}

fn command() -> Command {
    IptablesFlags::augment_args(Command::new("istio-iptables")).args_override_self(true)
}

/// Returns the arguments of variables, and then the given arguments: a later argument replaces an earlier one.
pub(super) fn arguments(given: &[Flag], environment: &Environment) -> Vec<String> {
    let command = command();
    let mut arguments = Vec::new();
    for name in command.get_arguments().filter_map(Arg::get_long) {
        for variable in variables(name) {
            arguments.extend(environment.text(&variable).map(|value| format!("--{name}={value}")));
        }
        for flag in given.iter().filter(|flag| flag.name == name && flag.is_given) {
            arguments.push(format!("--{name}={}", flag.value));
        }
    }
    arguments.retain(|argument| command.clone().try_get_matches_from(["", argument]).is_ok());
    arguments
}

impl IptablesFlags {
    pub(super) fn read(arguments: &[String]) -> Result<Self, clap::Error> {
        let line = [""].into_iter().chain(arguments.iter().map(String::as_str));
        Self::from_arg_matches(&command().try_get_matches_from(line)?)
    }
}
