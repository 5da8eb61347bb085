//! The bootstrap against documents kept in `tests/golden/bootstrap`; `UPDATE_GOLDEN=1` rewrites
//! them. With `ENVOY_BIN`, Envoy itself says what it thinks of them.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::cli::{self, Command};
use crate::config::environment::Environment;
use crate::config::interfaces::Interface;

/// The configuration of a golden case: its flags, its variables, its interfaces and its files.
fn config(case: &Path) -> crate::config::Config {
    let read = |name: &str| fs::read_to_string(case.join("input").join(name)).expect("an input");
    let line = format!("pilot-agent {}", read("flags").trim());
    let typed = cli::parse(line.split_whitespace().map(str::to_owned)).expect("flags");
    let Some(Command::Proxy(flags)) = typed.cli.command else {
        panic!("{case:?} is about another command");
    };
    let env = read("env");
    let env: Environment = env
        .lines()
        .filter_map(|line| line.split_once('='))
        .collect();
    let interfaces = read("interfaces");
    let interfaces = interfaces
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, address)| Interface {
            name: name.to_owned(),
            address: address.parse().expect("an address"),
        });
    let root = case.join("input");
    let interfaces = Ok(interfaces.collect());
    crate::config::load_with(&flags, &typed.cli.log, &env, &root, interfaces)
        .unwrap_or_else(|problems| panic!("{}: {problems:?}", case.display()))
}

fn case(name: &str) -> PathBuf {
    cases().join(name)
}

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bootstrap")
}

fn names() -> Vec<String> {
    let entries = fs::read_dir(cases()).expect("cases");
    let names = entries.map(|entry| entry.expect("a case").file_name());
    let mut names: Vec<_> = names
        .map(|name| name.into_string().expect("text"))
        .collect();
    names.sort();
    names
}

fn check(name: &str) {
    let case = case(name);
    let found = format!("{:#}\n", document(&config(&case).bootstrap));
    let expected = case.join("expected.json");
    if switch("UPDATE_GOLDEN").is_some() {
        fs::write(&expected, &found).expect("the golden file is written");
    }
    let expected = fs::read_to_string(&expected).unwrap_or_default();
    let lines = found.lines().zip(expected.lines()).enumerate();
    for (index, (found, expected)) in lines {
        assert_eq!(
            found,
            expected,
            "{name} line {}; UPDATE_GOLDEN=1 accepts it",
            index + 1
        );
    }
    assert_eq!(
        found.len(),
        expected.len(),
        "{name}; UPDATE_GOLDEN=1 accepts it"
    );
}

/// An environment variable of the tests, not of the agent.
#[expect(
    clippy::disallowed_methods,
    reason = "tests have switches of their own"
)]
fn switch(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name)
}

#[test]
fn every_case_has_the_bootstrap_it_had() {
    for name in names() {
        check(&name);
    }
}

#[test]
fn envoy_takes_every_bootstrap_it_has_the_extensions_for() {
    let Some(envoy) = switch("ENVOY_BIN") else {
        return;
    };
    let mut refused = Vec::new();
    for name in names() {
        let config = config(&case(&name)).bootstrap;
        if let Err(error) = validate_stock(&config, Path::new(&envoy)) {
            refused.push(format!("{name}: {error}"));
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

/// A stock Envoy lacks Istio's own extension, and a tracer that was given up.
fn validate_stock(config: &Config, envoy: &Path) -> Result<(), show::ShowError> {
    let needs_istios =
        config.metadata_discovery || config.settings.tracing.lightstep.address.is_some();
    if needs_istios {
        return Ok(());
    }
    show::validate(config, envoy, None)
}

#[test]
fn the_file_is_written_whole_and_removed_when_envoy_has_ended() {
    let root = TempDir::new().expect("a directory");
    let case = case("sidecar");
    let mut config = config(&case).bootstrap;
    config.directory = root.path().join("etc/istio/proxy");
    let written = write(&config).expect("written");
    let path = config.file();
    let text = fs::read_to_string(&path).expect("the file");
    let parsed: Value = serde_json::from_str(&text).expect("strict JSON");
    assert_eq!(parsed, document(&config));
    assert_eq!(fs::read_dir(&config.directory).expect("listed").count(), 1);
    drop(written);
    assert!(!path.exists());
}

#[test]
fn the_default_file_is_where_pilot_agent_puts_it() {
    let case = case("sidecar");
    let config = config(&case).bootstrap;
    assert_eq!(config.file(), Path::new("etc/istio/proxy/envoy-rev.json"));
    assert_eq!(config.xds_socket, Path::new("./etc/istio/proxy/XDS"));
}
