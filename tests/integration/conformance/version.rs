//! Tests the version that istiod gets, and the output of `version`.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::support::place::ROOT;
use crate::support::programs::{binary, is_this_agent};

const VARIABLE: &str = "ISTIO_META_ISTIO_VERSION";

/// Runs a command of the agent in the program's own folder. Sets [`VARIABLE`], unless `variable` is empty.
fn run(program: &Path, words: &[&str], variable: &str) -> Output {
    let folder = program.parent().unwrap();
    let mut command = Command::new(program);
    command.args(words).current_dir(folder).env_clear().env("CLOUD_PLATFORM", "none");
    if !variable.is_empty() {
        command.env(VARIABLE, variable);
    }
    command.output().unwrap()
}

#[test]
fn istiod_is_told_the_version_of_metadata_image_or_build() {
    if !is_this_agent("the version of its image") {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = folder.path().join("pilot-agent");
    let built = binary("AGENT_BIN", Some(env!("CARGO_BIN_EXE_pilot-agent")));
    std::fs::copy(built, &program).unwrap();
    let root = folder.path().join(ROOT);
    std::fs::create_dir_all(root.parent().unwrap()).unwrap();
    std::fs::write(&root, "").unwrap();
    let file = folder.path().join("pilot-agent.istio-version");
    for (content, variable, expected) in [
        (None, "", "1.31.0"),
        (None, "1.27.1", "1.27.1"),
        (Some("1.28.3\n"), "", "1.28.3"),
        (Some("1.28.3\n"), "1.27.1", "1.27.1"),
    ] {
        if let Some(content) = content {
            std::fs::write(&file, content).unwrap();
        }
        let version = run(&program, &["version", "--output=json"], variable);
        let version: Value = serde_json::from_slice(&version.stdout).unwrap();
        assert_eq!(version["clientVersion"]["version"], expected);
        assert_eq!(version["agentVersion"]["version"], env!("CARGO_PKG_VERSION"));
        let bootstrap = run(&program, &["bootstrap"], variable);
        let bootstrap: Value = serde_json::from_slice(&bootstrap.stdout).unwrap();
        assert_eq!(bootstrap["node"]["metadata"]["ISTIO_VERSION"], expected);
    }
    std::fs::write(&file, "1.28 or so").unwrap();
    for words in [["version"], ["bootstrap"]] {
        let output = run(&program, &words, "");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let expected = "pilot-agent.istio-version is \"1.28 or so\", expected a version such as";
        assert_eq!(output.status.code(), Some(255), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}
