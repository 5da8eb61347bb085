//! What Envoy starts from: at the start, and read anew for a hot restart.
//!
//! [`Inputs`] writes the bootstrap for the Envoy of an epoch, after the first from a configuration read
//! anew. A change of what cannot change while the agent runs is refused.

use std::sync::{Arc, OnceLock};

use super::envoy_user;
use super::sds_socket::Detected;
use serde_json::Value;

use crate::bootstrap::{self, platform::Platform};
use crate::config::{Config, Problem, Unusable};
use crate::envoy::hot_restart::Lent;
use crate::envoy::launch::Prepared;
use crate::lifecycle::BoxError;
use crate::permission::problem;
use crate::problem::{Code, codes};
use crate::regular_file::{self, MAX_SETTINGS};

/// Reads the configuration anew. May block.
/// Problems with files that Envoy can start without.
const LOST_FILE: [&Code; 2] = [codes::BOOTSTRAP_OVERRIDE_UNREADABLE, codes::FILE_UNREADABLE];

pub type Load = Arc<dyn Fn() -> Result<Config, Vec<Problem>> + Send + Sync>;

/// Gives the effective configuration as JSON. May block.
pub type Report = Arc<dyn Fn() -> Value + Send + Sync>;

/// What the agent was started with, to be read again.
#[allow(missing_debug_implementations)]
pub struct Settings {
    pub load: Load,
    pub report: Report,
}

/// Loads and prepares what an Envoy starts from.
pub(crate) struct Inputs {
    first: Config,
    load: Load,
    /// Who serves secrets, which does not change.
    detected: Detected,
    platform: OnceLock<Platform>,
    /// What the first Envoy continues, and its bootstrap override, if it takes over from one in another container.
    adopted: OnceLock<(Lent, String)>,
}

impl Inputs {
    pub(super) fn new(first: Config, load: Load, detected: Detected) -> Self {
        Self {
            first,
            load,
            detected,
            platform: OnceLock::new(),
            adopted: OnceLock::new(),
        }
    }

    /// Must be called once, before the first epoch starts.
    pub(crate) fn set_platform(&self, platform: Platform) {
        // A second time would say the same.
        let _ = self.platform.set(platform);
    }

    /// Has the first Envoy take over from one in another container. Must be called once, before it starts.
    pub(super) fn adopt(&self, lent: Lent, override_json: String) {
        // It is called once.
        let _ = self.adopted.set((lent, override_json));
    }

    /// Writes what the Envoy of this epoch starts from: the first as the configuration was when the
    /// agent started, others as it is now. May block.
    pub(crate) fn prepare(&self, epoch: u32) -> Result<Prepared, BoxError> {
        if epoch == 0 {
            let mut prepared = self.write(&self.first, epoch)?;
            if let Some((lent, override_json)) = self.adopted.get().cloned() {
                prepared.continues = Some(lent);
                // It is not part of the digest: the next Envoy needs no such override, and is not another one without it.
                prepared.command.override_json = Some(override_json);
            }
            return Ok(prepared);
        }
        let config = (self.load)().map_err(Unusable)?;
        self.check(&config)?;
        self.write(&config, epoch)
    }

    fn write(&self, config: &Config, epoch: u32) -> Result<Prepared, BoxError> {
        let envoy = config.envoy.as_ref();
        let envoy = envoy.ok_or_else(|| fixed_error("DISABLE_ENVOY"))?;
        let mut command = envoy.command.clone();
        // Only a hot restart compares what is read with what was.
        let is_compared = envoy.hot_restart.is_some();
        if config.has_custom_bootstrap {
            let path = &command.bootstrap;
            let read = is_compared.then(|| regular_file::read(path, MAX_SETTINGS));
            let read = read.transpose();
            let document = read.map_err(|error| problem("read the bootstrap", path, error))?;
            return Ok(Prepared::new(command, &document.unwrap_or_default(), None));
        }
        let mut bootstrap = config.bootstrap.clone();
        bootstrap.node.platform = self.platform.get().cloned().unwrap_or_default();
        self.detected.add_to(&mut bootstrap, &config.sds_socket);
        let document = is_compared.then(|| bootstrap::document(&bootstrap).to_string());
        bootstrap.revision = is_compared.then_some(epoch);
        let written = bootstrap::write(&bootstrap)?;
        if let Some(user) = command.user {
            envoy_user::admit(user, &written.files, []);
        }
        command.bootstrap = bootstrap.file();
        let document = document.unwrap_or_default();
        Ok(Prepared::new(
            command,
            document.as_bytes(),
            Some(Box::new(written)),
        ))
    }

    /// Refuses changes of what is fixed, and files that were good and are not any more.
    fn check(&self, config: &Config) -> Result<(), String> {
        let first = &self.first;
        let mut settings = fixed(first).into_iter().zip(fixed(config));
        if let Some(((what, _), _)) = settings.find(|(then, now)| then != now) {
            return Err(fixed_error(what));
        }
        // A file that cannot be used is tolerated at the start, but not if it was good then.
        let lost = config.warnings.iter().find(|warning| {
            let was_lost =
                |first: &Problem| (first.code, &first.subject) == (warning.code, &warning.subject);
            LOST_FILE.contains(&warning.code) && !first.warnings.iter().any(was_lost)
        });
        match lost {
            Some(lost) => Err(format!(
                "could be used when the agent started, but cannot be used now: {lost}"
            )),
            None => Ok(()),
        }
    }
}

fn fixed_error(what: &str) -> String {
    format!("{what} cannot change while the agent runs")
}

/// Ports and paths that other parts of the agent or Envoy rely on, by the names of their settings.
fn fixed(config: &Config) -> [(&'static str, String); 6] {
    let ports = &config.bootstrap.ports;
    let proxy_config = &config.bootstrap.node.proxy_config;
    [
        ("statusPort", format!("{:?}", proxy_config.agent_port())),
        ("ENVOY_STATUS_PORT", ports.health.to_string()),
        ("ENVOY_PROMETHEUS_PORT", ports.prometheus.to_string()),
        ("proxyAdminPort", proxy_config.admin_port().to_string()),
        ("configPath", format!("{:?}", config.xds_socket)),
        (
            "WORKLOAD_IDENTITY_SOCKET_FILE",
            format!("{:?}", config.sds_socket),
        ),
    ]
}

#[cfg(test)]
mod tests;
