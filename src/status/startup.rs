//! Records start-up milestones: when the agent bound its sockets, Envoy had its configuration, and so on until the
//! pod was ready. Only the first time counts, so a second Envoy does not change them.

use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch as channel;
use tokio::time::Instant;

pub const SOCKETS_BOUND: &str = "sockets bound";
/// The milestone that Envoy has accepted clusters and listeners.
pub(super) const CONFIG_RECEIVED: &str = "configuration received";
pub(super) const ENVOY_LIVE: &str = "Envoy live";
/// The milestone that the pod is ready. Only the status port marks it.
pub const READY: &str = "ready";

/// A milestone that has been reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reached {
    pub milestone: &'static str,
    /// The time since the agent's start, to the microsecond.
    pub after_ms: f64,
}

/// The milestones reached so far. Clones share them.
#[derive(Clone, Debug)]
pub struct Milestones {
    start: Instant,
    reached: channel::Sender<Vec<Reached>>,
}

impl Milestones {
    /// Starts to measure time.
    pub fn start() -> Self {
        Self { start: Instant::now(), reached: channel::Sender::default() }
    }

    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Records a milestone. Returns true the first time.
    pub fn mark(&self, milestone: &'static str) -> bool {
        self.reached.send_if_modified(|reached| {
            let is_first = !has(reached, milestone);
            if is_first {
                let after_ms = self.elapsed().as_micros() as f64 / 1e3;
                reached.push(Reached { milestone, after_ms });
            }
            is_first
        })
    }

    /// Waits for a milestone.
    pub async fn wait_for(&self, milestone: &'static str) {
        let mut reached = self.reached.subscribe();
        // It does not fail, because this is the sender.
        let _ = reached.wait_for(|reached| has(reached, milestone)).await;
    }

    /// Returns the milestones that have been reached, the earliest first.
    pub fn reached(&self) -> Vec<Reached> {
        self.reached.borrow().clone()
    }
}

fn has(reached: &[Reached], milestone: &str) -> bool {
    reached.iter().any(|known| known.milestone == milestone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn milestones_are_in_the_order_of_time_and_the_first_time_counts() {
        let milestones = Milestones::start();
        milestones.mark(SOCKETS_BOUND);
        tokio::time::advance(Duration::from_micros(12_500)).await;
        milestones.clone().mark(CONFIG_RECEIVED);
        tokio::time::advance(Duration::from_millis(1)).await;
        milestones.mark(ENVOY_LIVE);
        milestones.mark(SOCKETS_BOUND);
        let reached: Vec<_> = milestones
            .reached()
            .iter()
            .map(|reached| (reached.milestone, reached.after_ms))
            .collect();
        let expected =
            [("sockets bound", 0.0), ("configuration received", 12.5), ("Envoy live", 13.5)];
        assert_eq!(reached, expected);
    }
}
