//! Counts failures of the authority in a row, and says how long to wait after each.

use std::time::Duration;

use super::renewal::IssueError;
use super::schedule;
use crate::backoff::Backoff;

/// The failures since the last success.
pub(super) struct Retries {
    pub(super) failures: u32,
    backoff: Backoff,
}

impl Retries {
    pub(super) fn new() -> Self {
        Self {
            failures: 0,
            backoff: Backoff::new(schedule::RETRY_BASE, schedule::RETRY_BASE),
        }
    }

    /// How long to wait after one more failure, with `remaining` of the certificate's life.
    pub(super) fn next_wait(
        &mut self,
        error: &IssueError,
        remaining: Option<Duration>,
    ) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let cap = schedule::retry_cap(remaining);
        self.backoff.set_cap(cap);
        let wait = self.backoff.next_wait();
        // Other failures are retried at the longest wait.
        let wait = match may_pass(error) {
            true => wait,
            false => Backoff::new(cap, cap).next_wait(),
        };
        wait.max(schedule::MIN_WAIT)
    }
}

/// Whether the cause may pass by itself within seconds.
fn may_pass(error: &IssueError) -> bool {
    match error {
        IssueError::Sign(error) => error.may_pass(),
        IssueError::Silent | IssueError::Interrupted(_) => true,
        IssueError::Request(_) | IssueError::Certificate(_) => false,
    }
}
