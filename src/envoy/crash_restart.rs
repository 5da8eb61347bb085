//! The budget of restarts for an Envoy that ended by itself, and the pause before each.
//!
//! The pause grows, with jitter, and is short again when the budget is whole again.

use std::time::Duration;

use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::duration::approximate;

const FIRST_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// At most `restarts` within `within`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub restarts: usize,
    pub within: Duration,
}

/// What is left of a budget.
#[derive(Debug)]
pub(super) struct Restarts {
    /// None allows no restart.
    budget: Option<Budget>,
    past: Vec<Instant>,
    backoff: Backoff,
}

impl Restarts {
    pub(super) fn new(budget: Option<Budget>) -> Self {
        Self {
            budget,
            past: Vec::new(),
            backoff: Backoff::new(FIRST_PAUSE, MAX_PAUSE),
        }
    }

    /// Takes one restart out of the budget and returns the pause before it. None if none is left.
    pub(super) fn take(&mut self) -> Option<Duration> {
        let budget = self.budget?;
        let now = Instant::now();
        self.past
            .retain(|past| now.duration_since(*past) < budget.within);
        if self.past.len() >= budget.restarts {
            let (count, within) = (self.past.len(), approximate(budget.within.as_secs_f64()));
            tracing::error!("Envoy was restarted {count} times within {within}, the limit");
            return None;
        }
        if self.past.is_empty() {
            self.backoff.reset();
        }
        self.past.push(now);
        Some(self.backoff.next_wait())
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
        assert!(restarts.take().is_some_and(|pause| pause <= FIRST_PAUSE));
        tokio::time::advance(Duration::from_secs(300)).await;
        assert!(
            restarts
                .take()
                .is_some_and(|pause| pause <= FIRST_PAUSE * 2)
        );
        assert!(restarts.take().is_none());
        tokio::time::advance(Duration::from_secs(300)).await;
        assert!(restarts.take().is_some());
        assert!(restarts.take().is_none());
        tokio::time::advance(within).await;
        assert!(restarts.take().is_some_and(|pause| pause <= FIRST_PAUSE));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_budget_there_is_no_restart() {
        assert!(Restarts::new(None).take().is_none());
    }
}
