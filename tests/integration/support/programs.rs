//! Programs that variables name or that are in `PATH`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Returns the path of a binary: the value of the variable, or else the binary that cargo has built.
pub fn binary(variable: &str, built: Option<&str>) -> OsString {
    let named = std::env::var_os(variable);
    named
        .or_else(|| built.map(OsString::from))
        .unwrap_or_else(|| panic!("cargo has not built it and {variable} is not set"))
}

/// Returns true if the tested binary is this agent. If it is another agent, prints that `what` is not tested.
pub fn is_this_agent(what: &str) -> bool {
    static OURS: OnceLock<bool> = OnceLock::new();
    let ours = *OURS.get_or_init(|| {
        let agent = binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent")));
        let version = Command::new(agent).arg("version").output().unwrap();
        String::from_utf8_lossy(&version.stdout).contains("istio-agent")
    });
    if !ours {
        eprintln!("AGENT_BIN is another agent: not held to {what}.");
    }
    ours
}

/// Returns the path of Envoy. With None the test must be skipped.
pub fn envoy_binary() -> Option<PathBuf> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = FOUND.get_or_init(find_envoy).clone();
    if found.is_none() {
        let sentence = "There is no Envoy: set ENVOY_BIN to the path of one, or put it on PATH.";
        assert!(variable("CI").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
    }
    found
}

/// Returns the path of Chromium. With None the test must be skipped.
pub fn chromium_binary() -> Option<PathBuf> {
    let found = match variable("CHROMIUM_BIN") {
        Some(path) => vec![path.into()],
        None => on_path(&["chromium", "chromium-browser", "google-chrome"]),
    };
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        let sentence = "There is no Chromium: set CHROMIUM_BIN to the path of one, or install it.";
        assert!(variable("PAGE_TESTS").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
    }
    found
}

/// Returns the path of Docker's registry. With None the test must be skipped.
pub fn registry_binary() -> Option<PathBuf> {
    let found = on_path(&["docker-registry"]);
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        let sentence = "There is no docker-registry: install the package of that name.";
        assert!(variable("REGISTRY_TESTS").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
    }
    found
}

fn on_path(names: &[&str]) -> Vec<PathBuf> {
    let path = variable("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path);
    directories.flat_map(|directory| names.iter().map(move |name| directory.join(name))).collect()
}

fn find_envoy() -> Option<PathBuf> {
    let candidates: Vec<PathBuf> = match variable("ENVOY_BIN") {
        Some(path) => vec![path.into()],
        None => on_path(&["envoy"]),
    };
    let file = candidates.into_iter().find(|path| path.is_file())?;
    // Agents run in other working directories, so a relative path would not work.
    file.canonicalize().ok()
}

pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}
