//! Tests that `docs/settings.md` lists the variables of `istio-iptables`, and that each has an effect.

use clap::CommandFactory;

use super::flags::variables;
use super::*;
use crate::cli::Cli;
use crate::config::environment::docs_tests::assert_generated;

/// Returns the variables of each flag, with the name, default and meaning of the flag.
fn settings() -> Vec<(Vec<String>, [String; 3])> {
    let mut cli = Cli::command();
    let command = cli.find_subcommand_mut("istio-iptables").expect("it");
    let flags = command.get_arguments().filter_map(|flag| {
        let long = flag.get_long()?;
        let (variables, help) = (variables(long), flag.get_help()?.to_string());
        let help = help.split(" [env: ").next()?.to_owned();
        let defaults = flag.get_default_values().iter();
        let default = defaults
            .filter_map(|value| value.to_str())
            .filter(|text| !["", "false"].contains(text))
            .map(|text| format!("`{text}`"))
            .collect();
        (!variables.is_empty()).then(|| (variables, [format!("`--{long}`"), default, help]))
    });
    flags.collect()
}

#[test]
fn settings_md_lists_every_variable_of_istio_iptables() {
    let mut expected = "\n| variable | flag | default | meaning |\n|---|---|---|---|\n".to_owned();
    for (names, [flag, default, help]) in settings() {
        let quoted: Vec<_> = names.iter().rev().map(|name| format!("`{name}`")).collect();
        let names = quoted.join(", else ");
        let help = help.trim_end_matches('.').replace('|', "\\|");
        expected += &format!("| {names} | {flag} | {default} | {help}. |\n");
    }
    expected.push('\n');
    assert_generated("settings.md", "istio-iptables", &expected);
}

#[test]
fn every_documented_variable_of_istio_iptables_has_an_effect() {
    let read = |name: &str, value: &str| {
        let environment = [(name, value)].into_iter().collect();
        let arguments = flags::arguments(&[], &environment);
        format!("{:?}", IptablesFlags::read(&arguments))
    };
    let without = read("NONE", "");
    for name in settings().into_iter().flat_map(|(names, _)| names) {
        let counts = ["true", "7", "7s"].iter().any(|value| read(&name, value) != without);
        assert!(counts, "{name}");
    }
}
