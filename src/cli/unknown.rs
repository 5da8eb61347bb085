//! Removes unknown flags from command lines of `proxy`, or without a command, because pilot-agent accepts them
//! there.
//!
//! The word after an unknown flag is its value, unless it is a flag, a command or a node type: `proxy --old
//! router` is a router.

use clap::error::{ContextKind, ErrorKind};
use clap::{ArgMatches, Command};

const NODE_TYPES: &[&str] = &["sidecar", "router", "waypoint", "ztunnel", "agentgateway"];

/// The command that is also a level of the log, so that it is a command at the beginning of a line only.
const DEBUG: &str = "debug";

/// Returns the command of a line, whose first word is the program.
pub(super) fn command(line: &[String], is_command: impl Fn(&str) -> bool) -> Option<&String> {
    let mut words = line.iter().enumerate().skip(1);
    words.find(|(index, word)| is_command(word) && (*index == 1 || *word != DEBUG)).map(|it| it.1)
}

/// Parses the line without unknown flags, if they are tolerated. Also returns these flags as typed, with the
/// nearest known flag.
pub fn parse(
    cli: &mut Command,
    mut line: Vec<String>,
) -> (Result<ArgMatches, clap::Error>, Vec<String>) {
    let commands = cli.get_subcommands().map(Command::get_name);
    let mut words: Vec<_> = commands.chain(["help"]).map(str::to_owned).collect();
    let command = command(&line, |word| words.iter().any(|name| name == word));
    let is_tolerated = command.is_none_or(|name| name == "proxy");
    // The words that are not the value of an unknown flag before them.
    words.retain(|word| word != DEBUG);
    words.extend(NODE_TYPES.iter().map(ToString::to_string));
    let mut unknown = Vec::new();
    loop {
        let result = cli.try_get_matches_from_mut(&line);
        let error = if is_tolerated { result.as_ref().err() } else { None };
        let Some((index, error)) = error.and_then(|it| Some((unknown_flag(it, &line)?, it))) else {
            return (result, unknown);
        };
        let hint = hint(error);
        let flag = line.remove(index);
        let name = flag.split('=').next().unwrap_or(&flag);
        let mut text = format!("{name}{hint}");
        if name == flag
            && line.get(index).is_some_and(|word| !word.starts_with('-') && !words.contains(word))
        {
            // The word may be a secret, so it is not shown.
            line.remove(index);
            text += " and the word after it";
        }
        unknown.push(text);
    }
}

/// Names the known flag that clap finds nearest to an unknown one.
pub(super) fn hint(error: &clap::Error) -> String {
    error.get(ContextKind::SuggestedArg).map_or_else(String::new, |flag| format!(" ({flag}?)"))
}

/// Finds the index of the flag that clap rejects as unknown. clap names a short flag by its first letter only.
fn unknown_flag(error: &clap::Error, line: &[String]) -> Option<usize> {
    let name = error.get(ContextKind::InvalidArg)?.to_string();
    if error.kind() != ErrorKind::UnknownArgument || !name.starts_with('-') {
        return None;
    }
    if name.starts_with("--") {
        return line.iter().position(|word| word.split('=').next() == Some(&name));
    }
    line.iter().position(|word| word.starts_with(&name))
}
