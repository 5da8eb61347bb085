//! Prepares the inputs of each Envoy: its command and its bootstrap.
//!
//! [`Inputs::prepare`] writes the bootstrap of the next Envoy. After the first Envoy it reads the configuration
//! again, and rejects changes of settings that cannot change while the agent runs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use serde_json::Value;

use super::envoy_user;
use super::sds_socket::Detected;
use crate::bootstrap::{self, platform::Platform};
use crate::config::{Config, Unusable};
use crate::envoy::command::Takeover;
use crate::envoy::launch::Prepared;
use crate::files::permission::problem;
use crate::files::regular_file::{self, MAX_SETTINGS};
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::BoxError;
use crate::xds::CHANGING_METADATA;

/// Problems of files without which Envoy can start.
const UNREADABLE_FILE: [Code; 2] = [Code::BootstrapOverrideUnreadable, Code::FileUnreadable];

/// Reads the configuration again. May block.
pub(crate) type Load = Arc<dyn Fn() -> Result<Config, Vec<Problem>> + Send + Sync>;

/// Returns the effective configuration as JSON. May block.
pub(crate) type EffectiveConfig = Arc<dyn Fn() -> Value + Send + Sync>;

/// Reads the settings with which the agent was started again.
#[allow(missing_debug_implementations)]
pub struct Settings {
    pub load: Load,
    pub report: EffectiveConfig,
}

/// Prepares the inputs of Envoys.
pub(crate) struct Inputs {
    first: Config,
    load: Load,
    /// The owner of the SDS socket, which does not change.
    detected: Detected,
    platform: OnceLock<Platform>,
    /// The number of the next bootstrap file; the first one has 0. An earlier file is kept while an Envoy may start from
    /// it.
    next_revision: AtomicU32,
    /// The hot-restart state and the bootstrap override of a first Envoy that takes over from one in another container.
    adopted: OnceLock<(Takeover, String)>,
}

impl Inputs {
    pub(crate) fn new(first: Config, load: Load, detected: Detected) -> Self {
        Self {
            first,
            load,
            detected,
            platform: OnceLock::new(),
            next_revision: AtomicU32::new(1),
            adopted: OnceLock::new(),
        }
    }

    /// Must be called once, before the first Envoy starts.
    pub(crate) fn set_platform(&self, platform: Platform) {
        // A second call would have the same platform.
        let _ = self.platform.set(platform);
    }

    /// Makes the first Envoy take over from one in another container. Must be called once, before it starts.
    pub(super) fn adopt(&self, takeover: Takeover, override_json: String) {
        // An agent takes over at most once.
        let _ = self.adopted.set((takeover, override_json));
    }

    /// Prepares the inputs of an Envoy: the first one, number 0, by the configuration at the agent's start, later ones by
    /// the current configuration. Fails if that cannot be used. May block.
    pub(crate) fn prepare(&self, epoch: u32) -> Result<Prepared, BoxError> {
        if epoch == 0 {
            let mut prepared = self.write(&self.first, epoch)?;
            if let Some((takeover, override_json)) = self.adopted.get().cloned() {
                prepared.takeover = Some(takeover);
                // The override is not part of the digest, because the next Envoy does not need it, and its inputs
                // have not changed without it.
                prepared.command.override_json = Some(override_json);
            }
            return Ok(prepared);
        }
        let config = (self.load)().map_err(Unusable)?;
        self.check(&config)?;
        self.write(&config, epoch)
    }

    /// Writes the bootstrap, unless the user has a custom one. With hot restart, each call after the first Envoy writes
    /// its own file.
    fn write(&self, config: &Config, epoch: u32) -> Result<Prepared, BoxError> {
        let Some(envoy) = &config.envoy else {
            return Err(fixed_error("DISABLE_ENVOY").into());
        };
        let mut command = envoy.command.clone();
        // Only a hot restart compares the new inputs with the inputs of the current Envoy.
        let is_compared = envoy.hot_restart.is_some();
        if config.has_custom_bootstrap {
            let path = &command.bootstrap;
            let document = if is_compared {
                regular_file::read(path, MAX_SETTINGS)
                    .map_err(|error| problem("read the bootstrap", path, error))?
            } else {
                Default::default()
            };
            return Ok(Prepared::new(command, &document, "", None));
        }
        let mut bootstrap = config.bootstrap.clone();
        bootstrap.node.platform = self.platform.get().cloned().unwrap_or_default();
        self.detected.add_to(&mut bootstrap, &config.sds_socket);
        let (document, metadata) = if is_compared {
            let mut document = bootstrap::document(&bootstrap);
            let metadata = take_changing_metadata(&mut document);
            bootstrap.revision = Some(match epoch {
                0 => 0,
                _ => self.next_revision.fetch_add(1, Ordering::Relaxed),
            });
            (document.to_string(), metadata)
        } else {
            Default::default()
        };
        let written = bootstrap::write(&bootstrap)?;
        if let Some(user) = command.user {
            envoy_user::give_files(user, &written.files);
        }
        command.bootstrap = bootstrap.file();
        Ok(Prepared::new(command, document.as_bytes(), &metadata, Some(Box::new(written))))
    }

    /// Rejects changes of fixed settings, and files that were usable at the agent's start and are not any more.
    fn check(&self, config: &Config) -> Result<(), BoxError> {
        let first = &self.first;
        if let Some(((name, _), _)) =
            fixed(first).into_iter().zip(fixed(config)).find(|(before, now)| before != now)
        {
            return Err(fixed_error(name).into());
        }
        // A file that cannot be used is tolerated only if it could not be used at the start either.
        let lost = config.warnings.iter().find(|warning| {
            let is_same =
                |first: &Problem| (first.code, &first.subject) == (warning.code, &warning.subject);
            UNREADABLE_FILE.contains(&warning.code) && !first.warnings.iter().any(is_same)
        });
        match lost {
            Some(lost) => {
                Err(format!("could be used when the agent started, but cannot be used now: {lost}")
                    .into())
            }
            None => Ok(()),
        }
    }
}

/// Removes the members of the node's metadata for which Envoy is not restarted, and returns them as text.
fn take_changing_metadata(document: &mut Value) -> String {
    let metadata = document.pointer_mut("/node/metadata").and_then(Value::as_object_mut);
    let taken = metadata.map(|metadata| CHANGING_METADATA.map(|name| metadata.shift_remove(name)));
    format!("{taken:?}")
}

fn fixed_error(setting: &str) -> String {
    format!("{setting} cannot change while the agent runs")
}

/// Returns the ports and paths that other parts of the agent or Envoy depend on, by the names of their settings.
fn fixed(config: &Config) -> [(&'static str, String); 6] {
    let ports = &config.bootstrap.ports;
    let proxy_config = &config.bootstrap.node.proxy_config;
    [
        ("statusPort", format!("{:?}", proxy_config.agent_port())),
        ("ENVOY_STATUS_PORT", ports.health.to_string()),
        ("ENVOY_PROMETHEUS_PORT", ports.prometheus.to_string()),
        ("proxyAdminPort", proxy_config.admin_port().to_string()),
        ("configPath", format!("{:?}", config.xds_socket)),
        ("WORKLOAD_IDENTITY_SOCKET_FILE", format!("{:?}", config.sds_socket)),
    ]
}

#[cfg(test)]
mod tests;
