//! Implements the `bootstrap` command: prints the document or writes it to a file, and has Envoy validate it.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use super::config::Config;
use super::document::document;
use super::file::write;
use crate::envoy::program;
use crate::files::permission;
use crate::problem::{Code, Problem};

/// Returns the document as text, or writes it to `output`.
pub fn show(config: &Config, output: Option<&Path>) -> Result<Option<String>, Problem> {
    let text = format!("{:#}", document(config));
    let Some(path) = output else {
        return Ok(Some(text));
    };
    fs::write(path, text + "\n")
        .map_err(|error| permission::problem("write the file", path, error))?;
    Ok(None)
}

/// Runs Envoy to validate the bootstrap, without serving. Envoy's output goes to standard error.
pub fn validate(
    config: &Config,
    binary: &Path,
    override_json: Option<&str>,
) -> Result<(), Problem> {
    let directory = std::env::temp_dir().join(format!("pilot-agent-{}", std::process::id()));
    let config = Config { directory, ..config.clone() };
    let written = write(&config)?;
    let override_arguments = override_json.map(|json| ["--config-yaml", json]);
    let mut envoy = Command::new(binary);
    envoy
        .args(["--mode", "validate", "--allow-unknown-static-fields"])
        .args(["--skip-deprecated-logs", "-l", "warning"])
        .arg("-c")
        .arg(config.file())
        .args(override_arguments.iter().flatten())
        .stdin(Stdio::null())
        // Standard output is the bootstrap's.
        .stdout(io::stderr());
    let ran = program::check_runnable(binary).and_then(|()| envoy.status());
    drop(written);
    let directory = &config.directory;
    fs::remove_dir(directory)
        .map_err(|error| permission::problem("remove the directory", directory, error))?;
    let status = ran.map_err(|error| program::problem(binary, &error))?;
    if status.success() {
        return Ok(());
    }
    let found = format!("it refuses the bootstrap ({status})");
    Err(Problem::new(Code::EnvoyBootstrapRefused, "Envoy", found))
}
