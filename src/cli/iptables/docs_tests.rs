//! `docs/settings.md` lists the variables of the command, and each of them counts.

use std::fs;

use clap::CommandFactory;

use super::flags::variables;
use super::*;
use crate::cli::Cli;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/settings.md");
const BEGIN: &str = "<!-- istio-iptables: begin -->\n";
const END: &str = "<!-- istio-iptables: end -->\n";

/// Variables, flag, default and meaning.
fn settings() -> Vec<(Vec<String>, [String; 3])> {
    let mut cli = Cli::command();
    let command = cli.find_subcommand_mut("istio-iptables").expect("it");
    let flags = command.get_arguments().filter_map(|flag| {
        let long = flag.get_long()?;
        let (variables, help) = (variables(long), flag.get_help()?.to_string());
        let help = help.split(" [env: ").next()?.to_owned();
        let default = flag.get_default_values().iter();
        let default = default.filter_map(|default| default.to_str());
        let default = default.filter(|text| !["", "false"].contains(text));
        let default = default.map(|text| format!("`{text}`")).collect();
        (!variables.is_empty()).then(|| (variables, [format!("`--{long}`"), default, help]))
    });
    flags.collect()
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "how a developer asks for an update"
)]
fn the_documentation_lists_every_variable_as_it_is() {
    let page = fs::read_to_string(FILE).expect("docs/settings.md");
    let (head, rest) = page.split_once(BEGIN).expect("where the list begins");
    let (list, tail) = rest.split_once(END).expect("where the list ends");
    let mut expected = "\n| variable | flag | default | meaning |\n|---|---|---|---|\n".to_owned();
    for (names, [flag, default, help]) in settings() {
        let names: Vec<_> = names.iter().rev().map(|name| format!("`{name}`")).collect();
        let names = names.join(", else ");
        let help = help.trim_end_matches('.').replace('|', "\\|");
        expected += &format!("| {names} | {flag} | {default} | {help}. |\n");
    }
    expected.push('\n');
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(FILE, format!("{head}{BEGIN}{expected}{END}{tail}")).expect("written");
    } else {
        assert!(
            list == expected,
            "docs/settings.md is out of date: run this test with UPDATE_GOLDEN=1"
        );
    }
}

#[test]
fn every_variable_of_the_list_counts() {
    let read = |name: &str, value: &str| {
        let environment = [(name, value)].into_iter().collect();
        let arguments = flags::arguments(&[], &environment);
        format!("{:?}", IptablesFlags::read(&arguments))
    };
    let without = read("NONE", "");
    for name in settings().into_iter().flat_map(|(names, _)| names) {
        let counts = ["true", "7", "7s"]
            .iter()
            .any(|value| read(&name, value) != without);
        assert!(counts, "{name}");
    }
}
