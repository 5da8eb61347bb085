//! Parses the command line, with pilot-agent's commands and flags, and implements the small commands.
//!
//! [`parse`] is the entry. [`unknown::parse`] removes flags of `proxy` that this agent does not have, so that an
//! injection template of another version still starts; they are reported by name. `clap` parses the rest. Every
//! other command refuses unknown flags.

pub mod completion;
pub mod doctor;
pub mod iptables;
pub mod request;
pub mod scope;
pub mod show;
pub mod support_bundle;
pub mod unknown;
pub mod version;
pub mod wait;

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::environment::{self, Environment};
use crate::config::flags::{self, Flag, LogFlags, ProxyFlags};
use crate::net::http_client::{self, Client, Redirects};

const FAILING_POD: &str =
    "To find out why a pod fails: kubectl exec POD -c istio-proxy -- pilot-agent doctor";

/// Istio agent.
#[derive(Clone, Debug, Parser)]
#[command(name = "pilot-agent", args_override_self = true, after_help = FAILING_POD)]
#[command(mut_args(quiet), mut_subcommands(|command| command.mut_args(quiet)))]
pub struct Cli {
    /// Prints build information, like the command version.
    #[arg(long)]
    version: bool,
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
    /// Prints the effective configuration and the origin of each value.
    Config(show::ConfigFlags),
    /// Prints Envoy's bootstrap and starts nothing.
    Bootstrap(show::BootstrapFlags),
    /// Finds out why this sidecar does not work. Exits with 1 for warnings, 2 for errors, 4 without permission.
    Doctor(doctor::DoctorFlags),
    /// Reports, for pod manifests, where this agent differs from pilot-agent. Exits with 1 for warnings, 2 for errors.
    Preflight(show::PreflightFlags),
    /// Prints a Sidecar resource with only the services that this workload uses.
    Scope(scope::ScopeFlags),
    /// Collects data for a bug report, without secrets, in a .tar.gz.
    SupportBundle(support_bundle::SupportBundleFlags),
    /// Prints a debug page of the agent, such as xdsz or overview.
    Debug(request::DebugFlags),
    /// Sends an HTTP request to a port of the agent or of Envoy.
    Request(request::RequestFlags),
    /// Waits until no other container of the pod runs Envoy, and then runs it as that one did.
    Standby,
    /// Waits until Envoy is ready.
    Wait(wait::WaitFlags),
    /// Prints build information.
    Version(version::VersionFlags),
    /// Prints a completion script for a shell.
    Completion(completion::CompletionFlags),
    /// Sets up traffic capture: the rules that send a pod's traffic to Envoy.
    #[command(name = "istio-iptables", mut_args(iptables::flags::with_variables))]
    Iptables(Box<iptables::IptablesFlags>),
    /// Removes traffic capture, like istio-iptables --cleanup-only.
    #[command(name = "istio-clean-iptables", mut_args(iptables::flags::with_variables))]
    CleanIptables(Box<iptables::IptablesFlags>),
}

/// The format of a report.
#[derive(Args, Clone, Debug)]
pub struct FormatFlags {
    /// Output format.
    #[arg(short, long, value_parser = ["text", "json"], default_value = "text")]
    output: String,
    /// Prints JSON, like -o json.
    #[arg(long)]
    json: bool,
}

impl FormatFlags {
    pub fn is_json(&self) -> bool {
        self.json || self.output == "json"
    }
}

/// A parsed command line.
#[derive(Clone, Debug)]
pub struct ParsedLine {
    pub cli: Cli,
    /// The flags of the command.
    pub flags: Vec<Flag>,
    /// The unknown flags of `proxy`, which were removed before the line was parsed.
    pub unknown_flags: Vec<String>,
}

/// The reason why no command runs: the line is invalid, or asks for help, whose text this is.
#[derive(Debug)]
pub enum ParseError {
    Help(String),
    Invalid(String),
}

/// Parses a command line, whose first word is the program.
pub fn parse(line: impl IntoIterator<Item = String>) -> Result<ParsedLine, ParseError> {
    let mut command = Cli::command();
    let (matches, unknown_flags) = unknown::parse(&mut command, line.into_iter().collect());
    match matches.and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches))) {
        Ok((mut cli, matches)) => {
            if cli.version {
                cli.command = Some(Command::Version(version::VersionFlags::default()));
            }
            let flags = matches.subcommand().and_then(|(name, matches)| {
                Some(flags::values(command.find_subcommand(name)?, matches))
            });
            Ok(ParsedLine { cli, flags: flags.unwrap_or_default(), unknown_flags })
        }
        Err(error) if error.use_stderr() => Err(ParseError::Invalid(one_sentence(&error))),
        Err(help) => Err(ParseError::Help(help.to_string())),
    }
}

/// Returns true if the command of a line prints data that others read. The first word is the program.
pub fn prints_data(line: &[String]) -> bool {
    const OTHERS: [&str; 6] =
        ["proxy", "request", "standby", "wait", "istio-iptables", "istio-clean-iptables"];
    let commands = Cli::command();
    let command = unknown::command(line, |word| commands.find_subcommand(word).is_some());
    command.is_some_and(|command| !OTHERS.contains(&command.as_str()))
}

/// Returns true if levels may be coloured on standard output.
pub fn has_colours(environment: &Environment) -> bool {
    let is_plain = environment.text("NO_COLOR").is_some_and(|text| !text.is_empty());
    !is_plain && io::stdout().is_terminal() && environment.text("TERM") != Some("dumb")
}

/// Colours the level with which a line of a report begins. The line must be printable.
pub fn coloured(line: &str) -> String {
    let word = line.strip_prefix("  ").unwrap_or(line).split(' ').next().unwrap_or_default();
    let colours = [("error", 31), ("warning", 33), ("ok", 32), ("skipped", 2)];
    match colours.iter().find(|(level, _)| *level == word) {
        Some((_, colour)) => line.replacen(word, &format!("\x1b[{colour}m{word}\x1b[0m"), 1),
        None => line.to_owned(),
    }
}

/// Prints a line on standard error, if that is a terminal and `work` takes more than a second.
pub async fn with_progress<T>(line: &str, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(Duration::from_secs(1), &mut work).await {
        return done;
    }
    let mut stderr = io::stderr();
    if stderr.is_terminal() {
        let _ = writeln!(stderr, "{line}"); // The terminal may be gone.
    }
    work.await
}

/// Hides an empty default in the help.
fn quiet(flag: Arg) -> Arg {
    match flag.get_default_values() {
        [default] if default.is_empty() => flag.hide_default_value(true),
        _ => flag,
    }
}

/// Logs each flag with its value, and the flags and words without effect.
pub fn announce(flags: &[Flag], unknown: &[String], ignored: &[String]) {
    for flag in flags {
        if !flag.is_hidden && flag.name != "type" {
            tracing::info!("FLAG: --{}={:?}", flag.name, flag.value);
        }
    }
    for flag in unknown {
        tracing::warn!("ignoring flag {flag}, which this agent does not have");
    }
    for Flag { name, .. } in flags {
        if name.starts_with("log_rotate") {
            tracing::warn!("ignoring flag --{name}: this agent does not rotate log files");
        }
    }
    for word in ignored {
        tracing::warn!("ignoring {word:?}: one word after proxy is the type of node");
    }
}

/// Returns a client that follows redirects.
fn redirected() -> Client {
    Client::new(http_client::Config {
        redirects: Redirects::Follow,
        ..http_client::Config::default()
    })
}

/// Ignores the error of writing to a pipe that its reader has closed, as `head` does once it has read enough.
pub fn ignore_closed_pipe(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

pub fn help() -> String {
    Cli::command().render_help().to_string()
}

/// Formats clap's error in one sentence, with pilot-agent's text if it has one, and with the nearest name.
fn one_sentence(error: &clap::Error) -> String {
    let argument = error.get(ContextKind::InvalidArg);
    let word = argument.or(error.get(ContextKind::InvalidSubcommand)).map(ToString::to_string);
    let word = word.unwrap_or_default();
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let mut text = format!("unknown command {word:?} for \"pilot-agent\"");
            if let Some(names) = error.get(ContextKind::SuggestedSubcommand) {
                let names = names.to_string().replace(", ", "\n\t");
                text += &format!("\n\nDid you mean this?\n\t{names}\n");
            }
            text
        }
        ErrorKind::UnknownArgument if word.starts_with('-') => {
            format!("unknown flag: {word}{}", unknown::hint(error))
        }
        ErrorKind::UnknownArgument => format!("unexpected word {word:?}"),
        ErrorKind::MissingRequiredArgument => format!("expected {word}"),
        _ => match error.get(ContextKind::ValidValue) {
            Some(values) => format!("{}, expected {values}", first_line(&error.to_string())),
            None => first_line(&error.to_string()),
        },
    }
}

fn first_line(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let sentence = first.strip_prefix("error: ").unwrap_or(first);
    // The texts of our own parsers are complete sentences.
    let without_subject = ["'[TYPE]': ", "'--output <OUTPUT>': "]
        .iter()
        .find_map(|subject| Some(sentence.split_once(subject)?.1));
    without_subject.unwrap_or(sentence).to_owned()
}

#[cfg(test)]
mod fake_server;
#[cfg(test)]
mod injection_tests;
#[cfg(test)]
mod man_tests;
#[cfg(test)]
mod tests;
