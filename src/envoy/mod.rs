//! Runs Envoy: starts it, shuts it down, replaces it, and starts it again if it may.
//!
//! [`new`] returns a handle to it and a future that owns its process. [`machine`] decides what happens
//! next; [`supervisor`] carries it out. The future ends after Envoy has been reaped, or after the
//! kernel failed to kill it.

mod active;
pub mod admin;
pub mod command;
pub mod crash;
pub mod crash_restart;
pub mod handle;
pub mod hot_restart;
pub mod inspect;
mod instance;
pub mod launch;
pub mod machine;
mod output;
pub(crate) mod program;
pub mod shutdown;
mod supervisor;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::lifecycle::{BoxError, Stop, with_causes};
use crate::metrics::{Kind, Registry};
pub use active::statistics;
use admin::Admin;
use command::Command;
use crash_restart::Budget;
use handle::{Envoy, Report, State};
use hot_restart::Prepare;
pub use instance::Ended;
use shutdown::Limits;
use supervisor::Supervisor;

/// Orders that wait for the supervisor; senders of more wait.
const ORDERS: usize = 8;

/// How Envoy is run.
#[derive(Clone, Debug)]
pub struct Config {
    pub command: Command,
    /// Where the record of a crash is kept.
    pub directory: PathBuf,
    pub admin_host: IpAddr,
    pub admin_port: u16,
    /// Longest wait for an answer of the admin port.
    pub admin_call: Duration,
    /// A first Envoy that fails earlier was not able to start.
    pub early: Duration,
    /// Of a sidecar only inbound listeners are drained.
    pub drain_inbound_only: bool,
    pub limits: Limits,
    /// Ports of Envoy's listeners whose connections are not the workload's.
    pub internal_ports: Vec<u16>,
    /// None replaces no Envoy while it serves.
    pub hot_restart: Option<hot_restart::Limits>,
    /// None starts no Envoy again.
    pub restarts: Option<Budget>,
}

/// How the last Envoy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Requested,
    /// A successor in another container has taken over and ended it.
    Superseded,
    ByItself(Ended),
}

/// The future starts Envoy with the inputs of `prepare`, and runs until its last exit; a more urgent `stop` takes
/// fewer steps. Poll it on the main thread, see [`instance`].
pub fn new(
    config: Config,
    prepare: Prepare,
    stop: &Stop,
    metrics: &Registry,
) -> (
    Envoy,
    impl Future<Output = Result<Exit, BoxError>> + Send + 'static,
) {
    let admin = Admin::new(config.admin_host, config.admin_port, config.admin_call);
    let (publish, report) = watch::channel(Report::default());
    let (give, orders) = mpsc::channel(ORDERS);
    publish_state(metrics, report.clone());
    let handle = Envoy::new(admin, report, give);
    let supervisor = Supervisor::new(config, admin, prepare, publish, metrics);
    (handle, supervisor.run(stop.requested(), orders))
}

fn publish_state(metrics: &Registry, report: watch::Receiver<Report>) {
    const HELP: &str = "1 for the state Envoy is in.";
    let name = "istio_agent_envoy_state";
    metrics.computed(name, HELP, Kind::Gauge, &["state"], move |series| {
        let now = report.borrow().state;
        for (state, name) in State::NAMES {
            series(&[name], f64::from(u8::from(state == now)));
        }
    });
}

fn warn(error: &(dyn std::error::Error + 'static), decision: &str) {
    tracing::warn!("{decision}: {}", with_causes(error));
}

#[cfg(test)]
mod tests;
