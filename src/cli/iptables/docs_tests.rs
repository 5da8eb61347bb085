//! `docs/settings.md` lists the variables of the command, and each of them counts.

use std::fs;

use clap::CommandFactory;

use super::resolver::Resolver;
use super::*;
use crate::cli::Cli;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/settings.md");
const BEGIN: &str = "<!-- istio-iptables: begin -->\n";
const END: &str = "<!-- istio-iptables: end -->\n";

/// Flags without a variable.
const FLAGS_ALONE: [&str; 4] = ["envoy-port", "explain", "verify", "help"];
/// Further variables of flags, which are stronger.
const SECOND: [(&str, &str); 3] = [
    ("redirect-dns", "ISTIO_META_DNS_CAPTURE"),
    ("drop-invalid", "INVALID_DROP"),
    ("dual-stack", "ISTIO_DUAL_STACK"),
];
/// Variables without a flag.
const ALONE: [(&str, &str); 5] = [
    (
        "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR",
        "Loopback range of IPv4 (127.0.0.1/32).",
    ),
    (
        "ISTIO_OUTBOUND_OWNER_GROUPS",
        "Groups whose outbound traffic is captured: a list, or * for all (*).",
    ),
    (
        "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE",
        "Groups whose outbound traffic is not captured when that of all is.",
    ),
    (
        "ENVOY_USER",
        "User whose traffic is not captured unless --proxy-uid is given (istio-proxy).",
    ),
    (
        "DRY_RUN_FILE_PATH",
        "File that a dry run writes the rules to as well.",
    ),
];

/// Variable, flag and meaning.
fn variables() -> Vec<(String, String, String)> {
    let mut cli = Cli::command();
    let command = cli.find_subcommand_mut("istio-iptables").expect("it");
    let flags = command.get_arguments().filter_map(|flag| {
        let long = flag.get_long().filter(|long| !FLAGS_ALONE.contains(long))?;
        let help = flag.get_help()?.to_string();
        let name = match long {
            "protect-admin" => "ISTIO_AGENT_PROTECT_ADMIN".to_owned(),
            long => long.to_uppercase().replace('-', "_"),
        };
        let stronger = SECOND.iter().find(|(flag, _)| *flag == long);
        let name = match stronger {
            None => format!("`{name}`"),
            Some((_, stronger)) => format!("`{stronger}`, else `{name}`"),
        };
        Some((name, format!("`--{long}`"), help))
    });
    let alone = ALONE.map(|(name, help)| (format!("`{name}`"), String::new(), help.to_owned()));
    flags.chain(alone).collect()
}

/// The names in the first column.
fn names() -> Vec<String> {
    let variables = variables().into_iter();
    let names = variables.flat_map(|(names, ..)| {
        let names = names.split('`').skip(1).step_by(2).map(str::to_owned);
        names.collect::<Vec<_>>()
    });
    names.collect()
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
    let mut expected = "\n| variable | flag | meaning |\n|---|---|---|\n".to_owned();
    for (names, flag, help) in variables() {
        let help = help.trim_end_matches('.').replace('|', "\\|");
        expected += &format!("| {names} | {flag} | {help}. |\n");
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

/// Its effect on the settings, if it has one.
#[test]
fn every_variable_of_the_list_counts_and_no_other_is_read() {
    let flags = IptablesFlags::default();
    let read = |name: &str, value: &str| {
        let environment = [(name, value)].into_iter().collect();
        let resolver = Resolver {
            flags: &flags,
            environment: &environment,
        };
        format!("{:?}{:?}", resolver.settings(), resolver.options())
    };
    let without = read("NONE", "");
    for name in names() {
        let counts = ["true", "7", "7s"]
            .iter()
            .any(|value| read(&name, value) != without);
        assert!(counts, "{name}");
    }
    let is_variable = |text: &&str| {
        let is_of_name = |byte: u8| byte.is_ascii_uppercase() || byte == b'_' || byte == b'4';
        text.len() > 3 && text.bytes().all(is_of_name)
    };
    let literals = include_str!("resolver.rs").split('"').filter(is_variable);
    // Where programs are is no setting of the command.
    for name in literals.filter(|name| *name != "PATH") {
        assert!(names().iter().any(|listed| listed == name), "{name}");
    }
}
