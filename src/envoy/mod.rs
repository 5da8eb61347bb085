//! Runs Envoy: starts it, shuts it down, replaces it, and restarts it after a crash.
//!
//! [`new`] returns a handle to Envoy and a future that owns its process. [`machine`] decides what happens
//! next; [`supervisor`] carries it out. The future ends after Envoy has been reaped, or after the
//! kernel failed to kill it.

mod active_requests;
pub mod admin;
mod admin_socket;
mod base_id;
pub mod command;
pub mod crash;
pub mod handle;
pub mod hot_restart;
pub mod inspect;
mod instance;
pub mod launch;
pub mod machine;
mod output;
pub(crate) mod program;
pub mod restart_budget;
pub mod shutdown;
mod supervisor;

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;

use crate::metrics::{Kind, Registry};
use crate::runtime::lifecycle::{BoxError, Stop, with_causes};
pub use active_requests::statistics;
use admin::Admin;
use command::Command;
use handle::{Envoy, Report, State};
use hot_restart::Prepare;
pub use instance::Ended;
use restart_budget::Budget;
use shutdown::Limits;
use supervisor::Supervisor;

#[derive(Clone, Debug)]
pub struct Config {
    pub command: Command,
    /// The directory of the crash record.
    pub directory: PathBuf,
    /// The directory below which hot restart sockets are created. Containers that take over from each other share it.
    pub shared_directory: PathBuf,
    pub admin: Admin,
    /// A first Envoy that crashes within this time has failed to start.
    pub early: Duration,
    /// True for a sidecar: its outbound listeners are not drained.
    pub drain_inbound_only: bool,
    pub limits: Limits,
    /// Ports of the pod's own listeners, whose connections do not delay a shutdown.
    pub internal_ports: Vec<u16>,
    /// None disables restarts of a serving Envoy.
    pub hot_restart: Option<hot_restart::Limits>,
    /// None disables restarts after a crash.
    pub restarts: Option<Budget>,
}

/// The cause of the last Envoy's exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Requested,
    /// A successor in another container has taken over.
    Superseded,
    ByItself(Ended),
}

/// Creates the handle and the future. The future starts Envoy with the inputs of `prepare` and runs until the last
/// exit; a more urgent `stop` takes fewer steps. Poll it on the main thread, see [`instance`].
pub fn new(
    config: Config,
    prepare: Prepare,
    stop: &Stop,
    metrics: &Registry,
) -> (Envoy, impl Future<Output = Result<Exit, BoxError>> + Send + 'static) {
    let (envoy, supervisor) = Supervisor::new(config, prepare, stop, metrics);
    publish_state(metrics, envoy.report());
    (envoy, supervisor.run())
}

fn publish_state(metrics: &Registry, report: watch::Receiver<Report>) {
    const HELP: &str = "1 for the state Envoy is in.";
    let name = "istio_agent_envoy_state";
    metrics.computed(name, HELP, Kind::Gauge, &["state"], move |series| {
        let current = report.borrow().state;
        for (state, name) in State::NAMES {
            series(&[name], f64::from(u8::from(state == current)));
        }
    });
}

fn warn(error: &(dyn std::error::Error + 'static), decision: &str) {
    tracing::warn!("{decision}: {}", with_causes(error));
}

#[cfg(test)]
mod tests;
