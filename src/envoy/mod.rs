//! Runs Envoy: starts it, waits for it, brings it down gently, and starts it again if it may.
//!
//! [`new`] gives a handle for everybody and a future that owns the process from start to reaping.
//! What happens next is decided by [`machine`]; [`supervisor`] carries it out. Whatever happens, the
//! future ends only after Envoy has been reaped, or after the kernel failed to kill it.
//!
//! Does not write Envoy's bootstrap.

pub mod admin;
mod calls;
mod child;
pub mod command;
mod connections;
pub mod crash;
pub mod crash_restart;
pub mod handle;
pub mod hot_restart;
pub mod machine;
pub mod memory;
pub mod process;
pub mod reaper;
pub mod requests;
pub mod shutdown;
mod stderr;
mod supervisor;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::lifecycle::{BoxError, Stop};
use crate::metrics::{Kind, Registry};
use admin::Admin;
use command::Command;
use crash_restart::Budget;
use handle::{Envoy, Report, State};
use hot_restart::{HotRestart, Inputs};
use machine::Limits;
use process::Ended;
use supervisor::{Counters, Requests, Supervisor};

/// Orders nobody has come to yet; who gives more waits.
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
    /// Ports of Envoy whose connections are the pod's internal_ports.
    pub internal_ports: Vec<u16>,
    /// None replaces no Envoy while it serves.
    pub hot_restart: Option<hot_restart::Limits>,
    /// None leaves restarts to whoever runs the agent.
    pub restarts: Option<Budget>,
}

/// How Envoy's last end came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Envoy was asked to stop and did.
    Requested,
    /// Envoy ended and nobody had asked.
    ByItself(Ended),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Process(#[from] process::Error),
    #[error(
        "Envoy ended {} ms after its start with {ended}, expected it to stay; its own log says why",
        .after.as_millis()
    )]
    AtOnce { ended: Ended, after: Duration },
    #[error("cannot prepare what Envoy starts from")]
    Inputs {
        #[source]
        source: BoxError,
    },
    #[error("Envoy did not end within {0:?} of being killed")]
    Unkillable(Duration),
}

/// An Envoy yet to be started: by the future, which runs until the end that no restart follows. How
/// urgently `stop` is asked for says how far down its way Envoy is taken at once. Poll the future on
/// the main thread, see [`process`]. With `inputs`, and where it is configured, Envoy can be replaced
/// while it serves.
pub fn new(
    config: Config,
    inputs: Option<Arc<dyn Inputs>>,
    stop: &Stop,
    metrics: &Registry,
) -> (
    Envoy,
    impl Future<Output = Result<Exit, Error>> + Send + 'static,
) {
    let admin = Admin::new(config.admin_host, config.admin_port, config.admin_call);
    let (publish, report) = watch::channel(Report::default());
    let (give, orders) = mpsc::channel(ORDERS);
    show_state(metrics, report.clone());
    let counters = Counters::of(metrics);
    let handle = Envoy::new(admin, report, give);
    let epochs = config.hot_restart.zip(inputs);
    let epochs = epochs.map(|(limits, inputs)| HotRestart::new(limits, inputs));
    let requests = Requests {
        stop: stop.requested(),
        orders,
    };
    let supervisor = Supervisor::new(config, admin, epochs, requests, publish, counters);
    (handle, supervisor.run())
}

fn show_state(metrics: &Registry, report: watch::Receiver<Report>) {
    const HELP: &str = "1 for the state Envoy is in.";
    let name = "istio_agent_envoy_state";
    metrics.computed(name, HELP, Kind::Gauge, &["state"], move |series| {
        let now = report.borrow().state;
        for state in State::ALL {
            series(&[state.name()], f64::from(u8::from(state == now)));
        }
    });
}

#[cfg(test)]
mod tests;
