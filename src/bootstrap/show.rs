//! The `bootstrap` command: prints the document or writes it to a file, and has Envoy validate it.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use super::config::Config;
use super::document::document;
use super::file::{Error, write};
use crate::permission::explained;

#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    #[error(transparent)]
    Write(#[from] Error),
    #[error("Envoy refuses the bootstrap ({0})")]
    Refused(ExitStatus),
}

/// The document as text, unless it goes to `output`.
pub fn show(config: &Config, output: Option<&Path>) -> Result<Option<String>, ShowError> {
    let text = format!("{:#}", document(config));
    let Some(path) = output else {
        return Ok(Some(text));
    };
    fs::write(path, text + "\n")
        .map_err(|source| Error::new("write", path, explained(path, source)))?;
    Ok(None)
}

/// Has Envoy validate the bootstrap without running it. Envoy's output goes to standard error.
pub fn validate(
    config: &Config,
    binary: &Path,
    override_json: Option<&str>,
) -> Result<(), ShowError> {
    let directory = std::env::temp_dir().join(format!("pilot-agent-{}", std::process::id()));
    let config = Config {
        directory,
        ..config.clone()
    };
    let written = write(&config)?;
    let override_arguments = override_json
        .into_iter()
        .flat_map(|json| ["--config-yaml", json]);
    let status = Command::new(binary)
        .args(["--mode", "validate", "--allow-unknown-static-fields"])
        .args(["--skip-deprecated-logs", "-l", "warning"])
        .arg("-c")
        .arg(config.file())
        .args(override_arguments)
        .stdin(Stdio::null())
        // Standard output is the bootstrap's.
        .stdout(std::io::stderr())
        .status();
    drop(written);
    fs::remove_dir(&config.directory)
        .map_err(|source| Error::new("remove", &config.directory, source))?;
    let status = status.map_err(|source| Error::new("run", binary, source))?;
    match status.success() {
        true => Ok(()),
        false => Err(ShowError::Refused(status)),
    }
}
