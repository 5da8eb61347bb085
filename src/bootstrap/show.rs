//! The bootstrap for people: printed or put in a file, and checked by Envoy itself on request.
//!
//! Does not start the agent, and leaves nothing behind but the file that was asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use super::file::failed;
use super::{Config, Error, document, write};

#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    #[error(transparent)]
    Write(#[from] Error),
    #[error("cannot run {} to validate the bootstrap", .binary.display())]
    Run {
        binary: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("Envoy refuses the bootstrap ({0})")]
    Refused(ExitStatus),
}

/// The text, when it goes nowhere else.
pub fn show(config: &Config, output: Option<&Path>) -> Result<Option<String>, ShowError> {
    let text = format!("{:#}", document(config));
    let Some(path) = output else {
        return Ok(Some(text));
    };
    fs::write(path, text + "\n").map_err(|source| failed("write", path, source))?;
    Ok(None)
}

/// Has Envoy load the bootstrap without running it. What Envoy says goes to standard error.
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
    let status = Command::new(binary)
        .args(["--mode", "validate", "--allow-unknown-static-fields"])
        .args(["--skip-deprecated-logs", "-l", "warning"])
        .arg("-c")
        .arg(config.file())
        .args(
            override_json
                .into_iter()
                .flat_map(|json| ["--config-yaml", json]),
        )
        .stdin(Stdio::null())
        // Standard output is the bootstrap's.
        .stdout(std::io::stderr())
        .status();
    drop(written);
    fs::remove_dir(&config.directory)
        .map_err(|source| failed("remove", &config.directory, source))?;
    let status = status.map_err(|source| ShowError::Run {
        binary: binary.to_owned(),
        source,
    })?;
    status
        .success()
        .then_some(())
        .ok_or(ShowError::Refused(status))
}
