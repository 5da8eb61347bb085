//! Decides about the restart of an Envoy that exited by itself: which exits another Envoy would survive, and the budget
//! of restarts with the pause before each.
//!
//! The first restart follows at once. Later pauses grow, with jitter, until no restart counts against the budget.

use std::time::Duration;

use tokio::time::Instant;

use super::instance::{Ended, INTERRUPTED, KILLED, TERMINATED};
use crate::runtime::backoff::Backoff;
use crate::runtime::duration::rounded;

const FIRST_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// The limit of at most `restarts` restarts within `within`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub restarts: usize,
    pub within: Duration,
}

/// The restarts that count against the budget.
#[derive(Debug)]
pub(super) struct Restarts {
    /// None allows no restart.
    budget: Option<Budget>,
    past: Vec<Instant>,
    backoff: Backoff,
}

impl Restarts {
    pub(super) fn new(budget: Option<Budget>) -> Self {
        Self { budget, past: Vec::new(), backoff: Backoff::new(FIRST_PAUSE, MAX_PAUSE) }
    }

    /// Takes one restart out of the budget and returns the pause before it, or None if Envoy must not be restarted.
    pub(super) fn take(
        &mut self,
        ended: Ended,
        out_of_memory: Option<bool>,
        has_served: bool,
    ) -> Option<Duration> {
        if let Some(reason) = obstacle(ended, out_of_memory, has_served) {
            tracing::warn!("not restarting Envoy: {reason}");
            return None;
        }
        let budget = self.budget?;
        let now = Instant::now();
        self.past.retain(|past| now.duration_since(*past) < budget.within);
        if self.past.len() >= budget.restarts {
            let count = self.past.len();
            let within = rounded(budget.within);
            tracing::error!("Envoy was restarted {count} times within {within}, the limit");
            return None;
        }
        self.past.push(now);
        if self.past.len() > 1 {
            return Some(self.backoff.next_wait());
        }
        self.backoff.reset();
        Some(Duration::ZERO)
    }
}

/// Returns the reason why another Envoy would not survive, or is not wanted.
fn obstacle(ended: Ended, out_of_memory: Option<bool>, has_served: bool) -> Option<&'static str> {
    match (ended, out_of_memory) {
        (Ended::Code(0), _) => Some("it exited by itself with status 0"),
        (Ended::Signal(TERMINATED | INTERRUPTED), _) => Some("another process asked it to exit"),
        _ if !has_served => Some("it has not served"),
        (Ended::Signal(KILLED), Some(true)) => Some("memory was used up"),
        // A restart in place would hide a memory limit that is too low.
        (Ended::Signal(KILLED), None) => {
            Some("memory may have been used up: the kernel's count of kills cannot be read")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRASH: Ended = Ended::Signal(11);

    fn restarts(restarts: usize, within: Duration) -> Restarts {
        Restarts::new(Some(Budget { restarts, within }))
    }

    /// Takes a restart out of the budget for another crash of an Envoy that has served.
    fn crash(restarts: &mut Restarts) -> Option<Duration> {
        restarts.take(CRASH, None, true)
    }

    #[test]
    fn only_an_envoy_that_served_and_crashed_is_started_again() {
        let (signal, code) = (Ended::Signal, Ended::Code);
        let (used_up, enough, unknown) = (Some(true), Some(false), None);
        for (ended, out_of_memory, expected) in [
            (code(0), unknown, false),
            (code(1), unknown, true),
            (code(139), unknown, true),
            (signal(TERMINATED), unknown, false),
            (signal(INTERRUPTED), unknown, false),
            (signal(KILLED), enough, true),
            (signal(KILLED), used_up, false),
            (signal(KILLED), unknown, false),
            (CRASH, unknown, true),
            (CRASH, used_up, true),
            (signal(6), unknown, true),
        ] {
            for (has_served, left) in [(true, 1), (true, 0), (false, 1), (false, 0)] {
                let mut restarts = restarts(left, Duration::from_secs(600));
                let pause = restarts.take(ended, out_of_memory, has_served);
                let expected = expected && has_served && left > 0;
                let case = format!("{ended}, {out_of_memory:?}, {has_served}, {left}");
                assert_eq!(pause, expected.then_some(Duration::ZERO), "{case}");
            }
            let mut off = Restarts::new(None);
            assert_eq!(off.take(ended, out_of_memory, true), None, "{ended}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_window_has_more_restarts_than_the_budget_allows() {
        let within = Duration::from_secs(600);
        let mut restarts = restarts(2, within);
        assert_eq!(crash(&mut restarts), Some(Duration::ZERO));
        tokio::time::advance(Duration::from_secs(300)).await;
        assert!(crash(&mut restarts).is_some_and(|pause| pause <= FIRST_PAUSE));
        assert_eq!(crash(&mut restarts), None);
        tokio::time::advance(Duration::from_secs(300)).await;
        assert!(crash(&mut restarts).is_some());
        assert_eq!(crash(&mut restarts), None);
        tokio::time::advance(within).await;
        assert_eq!(crash(&mut restarts), Some(Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn an_exit_without_a_crash_does_not_use_the_restart_budget() {
        let mut restarts = restarts(1, Duration::from_secs(600));
        assert_eq!(restarts.take(Ended::Code(0), None, true), None);
        assert_eq!(crash(&mut restarts), Some(Duration::ZERO));
    }
}
