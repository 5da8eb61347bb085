//! What the user may type: pilot-agent's commands and flags.
//!
//! `clap` reads what is left after [`unknown::split`] took out flags of `proxy` that this agent does
//! not have, so that an injection template of another version still starts. They are reported by
//! name. Every other command refuses what it does not know. The small commands live here whole, and
//! need nothing of the agent's configuration.
//!
//! Does not start anything: `main` does.

pub mod absent;
pub mod completion;
pub mod config;
pub mod flags;
mod http;
pub mod request;
pub mod show;
pub mod unknown;
pub mod version;
pub mod wait;

use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};

use crate::config::environment;
pub use flags::{LogFlags, ProxyFlags, announce};

/// Istio agent.
#[derive(Clone, Debug, Parser)]
#[command(name = "pilot-agent", args_override_self = true)]
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
    /// Prints the effective configuration and where each value is from.
    Config(config::ConfigFlags),
    /// Prints the bootstrap Envoy would be started with, and starts nothing.
    Bootstrap(show::BootstrapFlags),
    /// Makes an HTTP request to one of the agent's or Envoy's own ports.
    Request(request::RequestFlags),
    /// Waits until Envoy is ready.
    Wait(wait::WaitFlags),
    /// Prints build information.
    Version(version::VersionFlags),
    /// Prints a script that completes this program's command lines.
    Completion(completion::CompletionFlags),
    /// Not part of this agent yet: sets up traffic capture.
    #[command(name = absent::IPTABLES)]
    Iptables(absent::Words),
    /// Not part of this agent yet: takes traffic capture down.
    #[command(name = absent::CLEAN_IPTABLES)]
    CleanIptables(absent::Words),
    #[command(name = absent::COLLATERAL, hide = true)]
    Collateral(absent::Words),
}

/// What was typed, with the flags of `proxy` nobody knows taken out.
#[derive(Clone, Debug)]
pub struct Typed {
    pub cli: Cli,
    pub unknown_flags: Vec<unknown::Flag>,
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

/// clap's report without its decoration, in pilot-agent's words where people look for them.
fn one_sentence(error: &clap::Error) -> String {
    let word = match error.get(ContextKind::InvalidArg) {
        Some(invalid) => invalid.to_string(),
        None => error
            .get(ContextKind::InvalidSubcommand)
            .map(ToString::to_string)
            .unwrap_or_default(),
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => format!("unknown command {word:?} for \"pilot-agent\""),
        ErrorKind::UnknownArgument => match word.starts_with('-') {
            true => format!("unknown flag: {word}"),
            false => format!("unexpected word {word:?}"),
        },
        ErrorKind::MissingRequiredArgument => format!("expected {word}"),
        _ => first_line(&error.to_string()),
    }
}

fn first_line(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let sentence = first.strip_prefix("error: ").unwrap_or(first);
    // Our own sentence about these says it all.
    let own = ["'[TYPE]': ", "'--output <OUTPUT>': "]
        .iter()
        .find_map(|subject| Some(sentence.split_once(subject)?.1));
    own.unwrap_or(sentence).to_owned()
}

#[cfg(test)]
mod answers;
#[cfg(test)]
mod injected;
#[cfg(test)]
mod tests;
