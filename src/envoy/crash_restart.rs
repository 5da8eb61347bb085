//! The budget of restarts for an Envoy that ended by itself, and the pause before each.
//!
//! The pause grows, with jitter, and is short again when the budget is whole again.

use std::time::Duration;

use tokio::time::Instant;

use super::process::Ended;
use crate::backoff::Backoff;

const FIRST_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// At most `restarts` within `within`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub restarts: usize,
    pub within: Duration,
}

/// What is left of a budget, and the next restart.
#[derive(Debug)]
pub(super) struct Restarts {
    /// How the last Envoy ended by itself, while there is none.
    pub(super) last_end: Option<Ended>,
    pub(super) pause: Duration,
    /// None allows no restart.
    budget: Option<Budget>,
    past: Vec<Instant>,
    backoff: Backoff,
}

impl Restarts {
    pub(super) fn new(budget: Option<Budget>) -> Self {
        Self {
            last_end: None,
            pause: Duration::ZERO,
            budget,
            past: Vec::new(),
            backoff: Backoff::new(FIRST_PAUSE, MAX_PAUSE),
        }
    }

    /// Takes one restart out of the budget and sets the pause before it. False if none is left.
    pub(super) fn take(&mut self) -> bool {
        let Some(budget) = self.budget else {
            return false;
        };
        let now = Instant::now();
        self.past
            .retain(|past| now.duration_since(*past) < budget.within);
        if self.past.len() >= budget.restarts {
            tracing::error!(
                "Envoy was restarted {} times within {:?}, which is all the budget allows",
                self.past.len(),
                budget.within
            );
            return false;
        }
        if self.past.is_empty() {
            self.backoff.reset();
        }
        self.past.push(now);
        self.pause = self.backoff.next_wait();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn allows_as_many_restarts_as_the_budget_in_any_stretch() {
        let within = Duration::from_secs(600);
        let mut restarts = Restarts::new(Some(Budget {
            restarts: 2,
            within,
        }));
        assert!(restarts.take() && restarts.pause <= FIRST_PAUSE);
        tokio::time::advance(Duration::from_secs(300)).await;
        assert!(restarts.take() && restarts.pause <= FIRST_PAUSE * 2);
        assert!(!restarts.take());
        tokio::time::advance(Duration::from_secs(300)).await;
        assert!(restarts.take());
        assert!(!restarts.take());
        tokio::time::advance(within).await;
        assert!(restarts.take() && restarts.pause <= FIRST_PAUSE);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_budget_there_is_no_restart() {
        assert!(!Restarts::new(None).take());
    }
}
