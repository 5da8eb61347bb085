//! The inputs of a hot restart: configuration, bootstrap and command line, read again while the agent
//! runs, and the watch that requests a restart.
//!
//! [`Inputs`] loads the configuration as at the start and writes the bootstrap of an epoch. What
//! cannot change while the agent runs is refused. [`changes`] requests a restart on SIGHUP and when
//! one of the files changes.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aws_lc_rs::digest::{self, SHA256};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::envoy_user;
use super::sds_socket::Detected;
use crate::bootstrap::{self, platform::Platform};
use crate::config::{Config, Problem, Unusable, is_lost_file};
use crate::envoy::command::Command;
use crate::envoy::handle::Envoy;
use crate::envoy::hot_restart::{self, Prepared};
use crate::file_watch::FileWatch;
use crate::lifecycle::BoxError;

/// Files that change together, such as those of one volume, are read once.
const SETTLES: Duration = Duration::from_secs(2);

/// Loads the configuration. May block.
pub type Load = Arc<dyn Fn() -> Result<Config, Vec<Problem>> + Send + Sync>;

/// Loads and prepares what an Envoy starts from.
pub(crate) struct Inputs {
    first: Config,
    load: Load,
    /// Who serves secrets, which does not change.
    detected: Detected,
    platform: OnceLock<Platform>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{what} cannot change while the agent runs")]
    Fixed { what: &'static str },
    #[error("{0}, which was good when the agent started")]
    Worse(Problem),
    #[error("cannot read the bootstrap {}", .path.display())]
    Custom {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Inputs {
    /// None if hot restart is off.
    pub(super) fn of(config: &Config, load: Load, detected: Detected) -> Option<Self> {
        config.envoy.as_ref()?.hot_restart?;
        Some(Self {
            first: config.clone(),
            load,
            detected,
            platform: OnceLock::new(),
        })
    }

    /// Must be called once, before the first epoch starts.
    pub(crate) fn set_platform(&self, platform: Platform) {
        // A second time would say the same.
        let _ = self.platform.set(platform);
    }

    /// Writes the bootstrap of an epoch.
    fn prepare(&self, config: &Config, number: u32) -> Result<Prepared, BoxError> {
        let envoy = config.envoy.as_ref();
        let envoy = envoy.ok_or(Error::Fixed {
            what: "DISABLE_ENVOY",
        })?;
        let mut bootstrap = config.bootstrap.clone();
        bootstrap.node.platform = self.platform.get().cloned().unwrap_or_default();
        self.detected.add_to(&mut bootstrap.node);
        let mut command = envoy.command.clone();
        let (document, files) = if config.has_custom_bootstrap {
            let path = command.bootstrap.clone();
            let read = fs::read(&path);
            let document = read.map_err(|source| Error::Custom { path, source })?;
            (document, None)
        } else {
            let document = bootstrap::document(&bootstrap).to_string().into_bytes();
            bootstrap.revision = Some(number);
            let written = bootstrap::write(&bootstrap)?;
            if let Some(user) = command.user {
                envoy_user::admit(user, written.files(), []);
            }
            (document, Some(Box::new(written) as Box<dyn Send + Sync>))
        };
        let digest = digest_of(&document, &command);
        if !config.has_custom_bootstrap {
            command.bootstrap = bootstrap.file();
        }
        Ok(Prepared {
            command,
            digest,
            files,
        })
    }

    /// Refuses changes of ports and paths that other parts of the agent or Envoy rely on.
    fn check(&self, config: &Config) -> Result<(), Error> {
        let first = &self.first;
        let of = |config: &Config| {
            let bootstrap = &config.bootstrap;
            [
                bootstrap.agent_port,
                Some(bootstrap.health_port),
                Some(bootstrap.prometheus_port),
            ]
        };
        let [agent, health, prometheus] = std::array::from_fn(|at| of(first)[at] == of(config)[at]);
        let fixed = [
            ("statusPort", agent),
            ("ENVOY_STATUS_PORT", health),
            ("ENVOY_PROMETHEUS_PORT", prometheus),
            (
                "proxyAdminPort",
                first.bootstrap.admin_port == config.bootstrap.admin_port,
            ),
            ("configPath", first.xds_socket == config.xds_socket),
            (
                "WORKLOAD_IDENTITY_SOCKET_FILE",
                first.sds_socket == config.sds_socket,
            ),
        ];
        if let Some((what, _)) = fixed.into_iter().find(|(_, is_same)| !is_same) {
            return Err(Error::Fixed { what });
        }
        // A file that cannot be used is tolerated at the start, but not if it was good then.
        let was_lost = |lost: &Problem| {
            let same = |warning: &Problem| is_lost_file(warning) && warning.subject == lost.subject;
            first.warnings.iter().any(same)
        };
        let lost = config.warnings.iter().filter(|w| is_lost_file(w));
        match lost.into_iter().find(|lost| !was_lost(lost)) {
            Some(lost) => Err(Error::Worse(lost.clone())),
            None => Ok(()),
        }
    }
}

impl hot_restart::Inputs for Inputs {
    fn first(&self) -> Result<Prepared, BoxError> {
        self.prepare(&self.first, 0)
    }

    fn read(&self, number: u32) -> Result<Prepared, BoxError> {
        let config = (self.load)().map_err(Unusable)?;
        self.check(&config)?;
        self.prepare(&config, number)
    }
}

/// Equal for equal bootstraps, command lines and programs.
fn digest_of(document: &[u8], command: &Command) -> Vec<u8> {
    let mut context = digest::Context::new(&SHA256);
    context.update(document);
    for word in command.arguments() {
        context.update(word.as_bytes());
        context.update(&[0]);
    }
    context.update(format!("{:?}", command.environment()).as_bytes());
    context.update(program(&command.binary).as_bytes());
    context.finish().as_ref().to_vec()
}

/// Tells a program from another at the same path. A name without a path gives an empty text.
fn program(path: &Path) -> String {
    fs::metadata(path).map_or_else(
        |_| String::new(),
        |file| {
            let modified = (file.mtime(), file.mtime_nsec());
            format!("{} {} {modified:?} {}", file.dev(), file.ino(), file.len())
        },
    )
}

/// Requests a restart on SIGHUP, and when one of the files changes. The signal is caught from the
/// call on; the future never ends.
pub(crate) fn changes(
    envoy: Envoy,
    files: &[PathBuf],
) -> io::Result<impl Future<Output = ()> + Send + use<>> {
    let hangups = signal(SignalKind::hangup())?;
    let files = files.to_vec();
    let watch = watch(&files);
    Ok(async move { tokio::join!(on_hangup(hangups, &envoy), on_change(watch, &files, &envoy)).0 })
}

fn watch(files: &[PathBuf]) -> io::Result<FileWatch> {
    let watch = FileWatch::new()?;
    for file in files {
        log_failure(watch.watch(file), file);
    }
    Ok(watch)
}

/// Watches the files again, as their links may lead elsewhere.
async fn watch_all(watch: &Arc<FileWatch>, files: &[PathBuf]) -> io::Result<()> {
    for file in files {
        // The file system may block.
        let (watch, path) = (watch.clone(), file.clone());
        let watched = tokio::task::spawn_blocking(move || watch.watch(&path)).await?;
        log_failure(watched, file);
    }
    Ok(())
}

fn log_failure(watched: io::Result<()>, file: &Path) {
    if let Err(error) = watched {
        tracing::debug!(%error, file = %file.display(), "not watching all of a file's way");
    }
}

async fn on_hangup(mut hangups: Signal, envoy: &Envoy) {
    while hangups.recv().await.is_some() {
        envoy.restart("received signal: hangup").await;
    }
}

async fn on_change(watch: io::Result<FileWatch>, files: &[PathBuf], envoy: &Envoy) {
    let failed = async {
        let watch = Arc::new(watch?);
        loop {
            watch.changed().await?;
            tokio::time::sleep(SETTLES).await;
            // Changes until now are about to be read.
            while let Ok(more) = tokio::time::timeout(Duration::ZERO, watch.changed()).await {
                more?;
            }
            watch_all(&watch, files).await?;
            envoy.restart("a file has changed").await;
        }
    };
    let failed: io::Result<Infallible> = failed.await;
    let Err(error) = failed;
    tracing::warn!(%error, "cannot watch what Envoy starts from; waiting for SIGHUP alone");
}

#[cfg(test)]
mod tests;
