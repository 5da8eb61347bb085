//! Takes unknown flags out of a command line where pilot-agent accepts them: of `proxy`, and without a
//! command.
//!
//! The word after an unknown flag is taken as its value, unless it is a flag, a command or a node type:
//! `proxy --old router` is a router.

use clap::error::{ContextKind, ErrorKind};
use clap::{ArgMatches, Command};

const NODE_TYPES: &[&str] = &["sidecar", "router", "waypoint", "ztunnel", "agentgateway"];

/// Reads the line without unknown flags, where they are tolerated. Returns them as well, as typed, with the
/// nearest one.
pub fn parse(
    cli: &mut Command,
    mut line: Vec<String>,
) -> (Result<ArgMatches, clap::Error>, Vec<String>) {
    let commands = cli.get_subcommands().map(Command::get_name);
    let commands: Vec<_> = commands.chain(["help"]).map(str::to_owned).collect();
    let command = line.iter().skip(1).find(|word| commands.contains(word));
    let is_tolerated = command.is_none_or(|name| name == "proxy");
    let may_be_a_value = |word: &String| {
        let is_named = commands.contains(word) || NODE_TYPES.contains(&word.as_str());
        !word.starts_with('-') && !is_named
    };
    let mut unknown = Vec::new();
    loop {
        let result = cli.try_get_matches_from_mut(&line);
        let error = result.as_ref().err().filter(|_| is_tolerated);
        let Some(at) = error.and_then(|error| place_of_unknown(error, &line)) else {
            return (result, unknown);
        };
        let hint = error.map(hint).unwrap_or_default();
        let flag = line.remove(at);
        let (name, has_value) = match flag.split_once('=') {
            Some((name, _)) => (name.to_owned(), true),
            None => (flag, false),
        };
        let mut name = name + &hint;
        if !has_value && line.get(at).is_some_and(may_be_a_value) {
            // The word may be anything, so it is not shown.
            line.remove(at);
            name += " and the word behind it";
        }
        unknown.push(name);
    }
}

/// The known flag that clap finds nearest to an unknown one.
pub(super) fn hint(error: &clap::Error) -> String {
    let nearest = error.get(ContextKind::SuggestedArg);
    nearest.map_or_else(String::new, |flag| format!(" ({flag}?)"))
}

/// The place of the flag that clap refuses as unknown. It names a short one by its first letter.
fn place_of_unknown(error: &clap::Error, line: &[String]) -> Option<usize> {
    let name = error.get(ContextKind::InvalidArg)?.to_string();
    if error.kind() != ErrorKind::UnknownArgument || !name.starts_with('-') {
        return None;
    }
    let is_long = name.starts_with("--");
    line.iter().position(|word| match is_long {
        true => word.split('=').next() == Some(&name),
        false => word.starts_with(&name),
    })
}
