//! Selects one of several control planes, in order of preference.
//!
//! After [`MAX_FAILURES`] consecutive failures of dials and calls, or one timeout, the next control plane is
//! used; the first one follows the last one. While another one is in use, the first one is dialed again
//! after [`RETURN_AFTER`].

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::Config;
use crate::problem::{Problem, Repetition};
use crate::runtime::clock::after;
use crate::runtime::duration::scaled;

const MAX_FAILURES: u32 = 3;
/// The limit for the first response of a stream if there is another control plane.
pub(crate) const MAX_SILENCE: Duration = Duration::from_secs(15);
pub(super) const RETURN_AFTER: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(super) struct Hosts {
    /// The control planes, at least one.
    configs: Vec<Arc<Config>>,
    state: Mutex<State>,
    /// The switches since the last success.
    switches: Mutex<Repetition>,
}

#[derive(Debug, Default)]
struct State {
    in_use: usize,
    /// The consecutive failures of the one in use.
    failures: u32,
    /// The time of the next dial of the first one, while another one is in use.
    due: Option<Instant>,
}

impl Hosts {
    pub(super) fn new(mut config: Config) -> Self {
        let fallbacks = std::mem::take(&mut config.fallbacks);
        Self {
            configs: std::iter::once(config).chain(fallbacks).map(Arc::new).collect(),
            state: Mutex::default(),
            switches: Mutex::default(),
        }
    }

    pub(super) fn first(&self) -> &Arc<Config> {
        &self.configs[0]
    }

    /// Returns the control plane in use, or dialed next.
    pub(super) fn current(&self) -> &Arc<Config> {
        &self.configs[self.state.lock().in_use]
    }

    pub(super) fn has_fallbacks(&self) -> bool {
        self.configs.len() > 1
    }

    pub(super) fn record_success(&self, config: &Arc<Config>) {
        self.switches.lock().end();
        if Arc::ptr_eq(config, self.current()) {
            self.state.lock().failures = 0;
        }
    }

    /// Records a failed dial of or call to this control plane. Returns true if another one is in use now.
    pub(super) fn record_failure(
        &self,
        config: &Arc<Config>,
        timed_out: bool,
        problem: &Problem,
    ) -> bool {
        // Another one is in use already.
        if !Arc::ptr_eq(config, self.current()) {
            return true;
        }
        let mut state = self.state.lock();
        state.failures += 1;
        if !self.has_fallbacks() || !(timed_out || state.failures >= MAX_FAILURES) {
            return false;
        }
        let in_use = (state.in_use + 1) % self.configs.len();
        let due = if in_use > 0 { Some(state.due.unwrap_or_else(return_time)) } else { None };
        *state = State { in_use, due, ..State::default() };
        let from = &config.address;
        let to = &self.configs[in_use].address;
        let text = format!("switching control plane from {from} to {to}: {problem}");
        match self.switches.lock().failed(problem) {
            Some(count) => tracing::warn!(target: "xdsproxy", "{text}{count}"),
            None => tracing::debug!(target: "xdsproxy", "{text}"),
        }
        true
    }

    pub(super) fn return_to_first(&self) {
        *self.state.lock() = State::default();
    }

    /// Returns the time of the next dial of the first control plane, while another one is in use.
    pub(super) fn due(&self) -> Option<Instant> {
        self.state.lock().due
    }

    /// Sets the next dial of the first control plane to a time after [`RETURN_AFTER`].
    pub(super) fn postpone(&self) {
        self.state.lock().due = Some(return_time());
    }
}

/// Returns the time after [`RETURN_AFTER`] and up to a tenth more, so that agents do not return all at once.
fn return_time() -> Instant {
    after(scaled(RETURN_AFTER, 1.0 + fastrand::f64() / 10.0))
}
