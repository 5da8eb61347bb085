//! Takes unknown flags out of a command line where pilot-agent accepts them: of `proxy`, and without a
//! command.
//!
//! The word after an unknown flag is taken as its value, unless it is a flag, a command or a node type:
//! `proxy --old router` is a router.

use std::fmt;

use clap::Command;

const NODE_TYPES: &[&str] = &["sidecar", "router", "waypoint", "ztunnel", "agentgateway"];

/// An unknown flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flag {
    pub name: String,
    /// Whether it took the word behind it along. The word may be anything, so it is not kept.
    pub took_a_word: bool,
}

impl fmt::Display for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.took_a_word {
            f.write_str(" and the word behind it")?;
        }
        Ok(())
    }
}

/// The line without unknown flags, where they are tolerated, and these flags.
pub fn split(line: Vec<String>, cli: &Command) -> (Vec<String>, Vec<Flag>) {
    let sieve = Sieve::new(cli);
    let (known, unknown) = sieve.split(line.clone());
    let tolerated = match sieve.command(&known) {
        Some(name) => name == "proxy",
        None => true,
    };
    if tolerated {
        (known, unknown)
    } else {
        (line, Vec::new())
    }
}

struct Sieve<'a> {
    cli: &'a Command,
    proxy: Option<&'a Command>,
}

impl<'a> Sieve<'a> {
    fn new(cli: &'a Command) -> Self {
        Self {
            cli,
            proxy: cli.find_subcommand("proxy"),
        }
    }

    fn split(&self, line: Vec<String>) -> (Vec<String>, Vec<Flag>) {
        let (mut known, mut unknown) = (Vec::new(), Vec::new());
        let mut words = line.into_iter().peekable();
        while let Some(word) = words.next() {
            if word == "--" {
                known.push(word);
                known.extend(words);
                break;
            }
            let Some(name) = flag_name(&word) else {
                known.push(word);
                continue;
            };
            let has_value = word.contains('=');
            if let Some(takes_word) = self.takes_word(name) {
                known.push(word);
                known.extend(words.next_if(|_| takes_word && !has_value));
            } else {
                let name = name.to_owned();
                let taken = words.next_if(|next| !has_value && self.may_be_a_value(next));
                let took_a_word = taken.is_some();
                unknown.push(Flag { name, took_a_word });
            }
        }
        (known, unknown)
    }

    /// The first word that is neither a flag nor the value of one, on a line of known flags.
    fn command<'l>(&self, line: &'l [String]) -> Option<&'l str> {
        let mut words = line.iter().skip(1);
        while let Some(word) = words.next() {
            let Some(name) = flag_name(word) else {
                return Some(word);
            };
            if !word.contains('=') && self.takes_word(name) == Some(true) {
                words.next();
            }
        }
        None
    }

    fn may_be_a_value(&self, word: &str) -> bool {
        let is_command = self.cli.find_subcommand(word).is_some() || word == "help";
        !word.starts_with('-') && !is_command && !NODE_TYPES.contains(&word)
    }

    /// Whether the flag takes the next word as its value; nothing when there is no such flag.
    fn takes_word(&self, name: &str) -> Option<bool> {
        if matches!(name, "-h" | "--help") {
            return Some(false);
        }
        let long = name.strip_prefix("--")?;
        let of_proxy = self.proxy.into_iter().flat_map(Command::get_arguments);
        let flag = of_proxy
            .chain(self.cli.get_arguments())
            .find(|flag| flag.get_long() == Some(long))?;
        Some(!flag.is_require_equals_set())
    }
}

/// `--name` of `--name` and `--name=value`.
fn flag_name(word: &str) -> Option<&str> {
    let is_flag = word.starts_with('-') && word.len() > 1;
    is_flag.then(|| word.split('=').next().unwrap_or(word))
}
