//! Flags of `proxy` that this agent does not have.
//!
//! They are taken out before `clap` sees the line. An unknown flag takes the word behind it along,
//! as its value, unless that word is a flag or a node type: `proxy --old router` is a router.
//!
//! Does not judge the values of flags it knows.

use clap::Command;

const NODE_TYPES: &[&str] = &["sidecar", "router", "waypoint", "ztunnel", "agentgateway"];

/// The line without unknown flags of `proxy`, and their names.
pub fn split(line: Vec<String>, cli: &Command) -> (Vec<String>, Vec<String>) {
    let Some(proxy) = cli.find_subcommand("proxy").filter(|_| is_proxy(&line)) else {
        return (line, Vec::new());
    };
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
        match takes_word(name, proxy, cli) {
            Some(takes_word) => {
                let takes_word = takes_word && !word.contains('=');
                known.push(word);
                known.extend(words.next_if(|_| takes_word));
            }
            None => {
                unknown.push(name.to_owned());
                let has_value = word.contains('=');
                words.next_if(|next| {
                    !has_value && !next.starts_with('-') && !NODE_TYPES.contains(&next.as_str())
                });
            }
        }
    }
    (known, unknown)
}

/// Whether the command is `proxy`. Flags and their values may stand before it, so any place counts.
fn is_proxy(line: &[String]) -> bool {
    line.iter().skip(1).any(|word| word == "proxy")
}

/// `--name` of `--name` and `--name=value`.
fn flag_name(word: &str) -> Option<&str> {
    let is_flag = word.starts_with('-') && word.len() > 1;
    is_flag.then(|| word.split('=').next().unwrap_or(word))
}

/// Whether the flag takes the next word as its value; nothing when there is no such flag.
fn takes_word(name: &str, proxy: &Command, cli: &Command) -> Option<bool> {
    if matches!(name, "-h" | "--help") {
        return Some(false);
    }
    let long = name.strip_prefix("--")?;
    let flag = proxy
        .get_arguments()
        .chain(cli.get_arguments())
        .find(|flag| flag.get_long() == Some(long))?;
    Some(!flag.is_require_equals_set())
}
