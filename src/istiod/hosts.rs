//! Several control planes in order of preference, and which of them is in use.
//!
//! After [`MOST_FAILURES`] failed dials in a row the next one is dialed, after the last the first. While
//! another one is in use, the first is due again after [`RETURN_AFTER`].

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::Config;
use crate::clock::after;
use crate::duration::scaled;

const MOST_FAILURES: u32 = 3;
pub(super) const RETURN_AFTER: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(super) struct Hosts {
    /// Not empty.
    configs: Vec<Arc<Config>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    in_use: usize,
    /// Of the one in use, in a row.
    failures: u32,
    /// When the first is due, while another one is in use.
    due: Option<Instant>,
}

impl Hosts {
    pub(super) fn new(mut config: Config) -> Self {
        let others = std::mem::take(&mut config.others);
        let configs = std::iter::once(config).chain(others);
        Self {
            configs: configs.map(Arc::new).collect(),
            state: Mutex::default(),
        }
    }

    pub(super) fn first(&self) -> &Arc<Config> {
        &self.configs[0]
    }

    /// The one in use, or dialed next.
    pub(super) fn current(&self) -> &Arc<Config> {
        &self.configs[self.state.lock().in_use]
    }

    pub(super) fn succeeded(&self) {
        self.state.lock().failures = 0;
    }

    pub(super) fn failed(&self) {
        let mut state = self.state.lock();
        state.failures += 1;
        if state.failures == MOST_FAILURES {
            state.failures = 0;
            state.in_use = (state.in_use + 1) % self.configs.len();
            match state.in_use {
                0 => state.due = None,
                _ => drop(state.due.get_or_insert_with(later)),
            }
        }
    }

    pub(super) fn return_to_first(&self) {
        *self.state.lock() = State::default();
    }

    /// When the first should be tried, while another one is in use.
    pub(super) fn due(&self) -> Option<Instant> {
        self.state.lock().due
    }

    pub(super) fn postpone(&self) {
        self.state.lock().due = Some(later());
    }
}

/// Up to a tenth later, so that agents do not return all at once.
fn later() -> Instant {
    after(scaled(RETURN_AFTER, 1.0 + fastrand::f64() / 10.0))
}
