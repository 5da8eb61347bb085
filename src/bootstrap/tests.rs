//! The bootstrap against documents kept in `tests/golden/bootstrap`; `UPDATE_GOLDEN=1` rewrites
//! them.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::cli::{self, Command};
use crate::config::environment::Environment;

/// The configuration of a golden case: its flags, its variables and its files.
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
    let root = case.join("input");
    crate::config::load(&flags, &typed.cli.log, &env, &root).expect("a good configuration")
}

fn check(name: &str) {
    let case = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/bootstrap")
        .join(name);
    let found = format!("{:#}\n", document(&config(&case).bootstrap));
    let expected = case.join("expected.json");
    if golden_update() {
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

#[expect(
    clippy::disallowed_methods,
    reason = "a switch of the tests, not of the agent"
)]
fn golden_update() -> bool {
    std::env::var_os("UPDATE_GOLDEN").is_some()
}

#[test]
fn a_sidecar_has_the_bootstrap_its_chart_settings_ask_for() {
    check("sidecar");
}

#[test]
fn a_router_on_ipv6_binds_ipv6_and_logs_json_when_told_to() {
    check("router_v6_json");
}

#[test]
fn the_file_is_written_whole_and_removed_when_envoy_has_ended() {
    let root = TempDir::new().expect("a directory");
    let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bootstrap/sidecar");
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
    let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bootstrap/sidecar");
    let config = config(&case).bootstrap;
    assert_eq!(config.file(), Path::new("etc/istio/proxy/envoy-rev.json"));
    assert_eq!(config.xds_socket, Path::new("./etc/istio/proxy/XDS"));
}
