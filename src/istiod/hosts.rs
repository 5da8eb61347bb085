//! Several control planes in order of preference, and the one in use.
//!
//! After [`MOST_FAILURES`] failed dials in a row the next one is dialed, after the last the first. While
//! another one is in use, the first is due again after [`RETURN_AFTER`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::Config;

pub(super) const MOST_FAILURES: u32 = 3;
pub(super) const RETURN_AFTER: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(super) struct Hosts {
    /// Not empty.
    configs: Vec<Arc<Config>>,
    in_use: AtomicUsize,
}

impl Hosts {
    pub(super) fn new(mut config: Config) -> Self {
        let others = std::mem::take(&mut config.others);
        let configs = std::iter::once(config).chain(others);
        Self {
            configs: configs.map(Arc::new).collect(),
            in_use: AtomicUsize::new(0),
        }
    }

    pub(super) fn first(&self) -> &Arc<Config> {
        &self.configs[0]
    }

    /// The one in use, or dialed next.
    pub(super) fn current(&self) -> &Arc<Config> {
        &self.configs[self.in_use.load(Ordering::Relaxed)]
    }
}

/// Decides which one is in use.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) hosts: Arc<Hosts>,
    /// Of the current one, in a row.
    failures: u32,
    /// When the first is due, while another one is in use.
    due: Option<Instant>,
}

impl Choice {
    pub(super) fn new(hosts: Arc<Hosts>) -> Self {
        Self {
            hosts,
            failures: 0,
            due: None,
        }
    }

    pub(super) fn succeeded(&mut self) {
        self.failures = 0;
    }

    pub(super) fn failed(&mut self) {
        self.failures += 1;
        if self.failures < MOST_FAILURES {
            return;
        }
        self.failures = 0;
        let next = (self.hosts.in_use.load(Ordering::Relaxed) + 1) % self.hosts.configs.len();
        self.hosts.in_use.store(next, Ordering::Relaxed);
        match next {
            0 => self.due = None,
            1 => self.postpone(),
            _ => {}
        }
    }

    pub(super) fn return_to_first(&mut self) {
        self.hosts.in_use.store(0, Ordering::Relaxed);
        self.failures = 0;
        self.due = None;
    }

    /// Has the first be due later, by up to a tenth so that agents do not return all at once.
    pub(super) fn postpone(&mut self) {
        let wait = RETURN_AFTER.mul_f64(1.0 + fastrand::f64() / 10.0);
        self.due = Some(Instant::now() + wait);
    }

    /// Waits until the first is due. Cancel safe.
    pub(super) fn first_is_due(&self) -> impl Future<Output = ()> + use<> {
        let due = self.due;
        async move {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        }
    }
}
