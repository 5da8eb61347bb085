//! The hall: runs Envoy on its bootstrap.

use crate::bootstrap;
use crate::cli::ExitCode;
use crate::config::Config;
use crate::envoy::{self, Exit};
use crate::lifecycle::{self, BoxError};

/// Runs until Envoy has ended.
pub async fn run(config: Config) -> Result<ExitCode, BoxError> {
    let (urgency, watching) = lifecycle::signals()?;
    let Some(envoy) = config.envoy else {
        return Ok(ExitCode::Success);
    };
    let _written = bootstrap::write(&config.bootstrap)?;
    let exit = tokio::select! {
        exit = envoy::run(envoy, urgency) => exit?,
        () = watching => Exit::Requested,
    };
    Ok(match exit {
        Exit::Requested => ExitCode::Success,
        Exit::ByItself(ended) => ExitCode::of_envoy(ended.code()),
    })
}
