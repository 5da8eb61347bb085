//! When the agent got where on its way from its start to a pod that is ready.
//!
//! Whoever gets somewhere marks it; only the first time counts, so that a second Envoy or another
//! connection does not rewrite how the start went.
//!
//! Does not watch anything itself.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

/// A place on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    SocketsBound,
    EnvoyStarted,
    IstiodConnected,
    FirstCertificate,
    /// Envoy has taken clusters and listeners.
    ConfigReceived,
    EnvoyLive,
    Ready,
}

/// A milestone that has been reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reached {
    pub milestone: &'static str,
    /// Since the start, to the microsecond.
    pub after_ms: f64,
}

/// How the start went so far. Clones share it.
#[derive(Clone, Debug)]
pub struct Timeline {
    start: Instant,
    reached: Arc<[OnceLock<Duration>; Milestone::ALL.len()]>,
}

impl Milestone {
    const ALL: [Self; 7] = [
        Self::SocketsBound,
        Self::EnvoyStarted,
        Self::IstiodConnected,
        Self::FirstCertificate,
        Self::ConfigReceived,
        Self::EnvoyLive,
        Self::Ready,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::SocketsBound => "sockets bound",
            Self::EnvoyStarted => "Envoy started",
            Self::IstiodConnected => "istiod connected",
            Self::FirstCertificate => "first certificate",
            Self::ConfigReceived => "configuration received",
            Self::EnvoyLive => "Envoy live",
            Self::Ready => "ready",
        }
    }
}

impl Timeline {
    /// One that starts now.
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
            reached: Arc::default(),
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub fn mark(&self, milestone: Milestone) {
        self.reached[milestone as usize].get_or_init(|| self.elapsed());
    }

    /// What has been reached, the earliest first.
    pub fn reached(&self) -> Vec<Reached> {
        let times = self.reached.iter().map(OnceLock::get);
        let mut reached: Vec<_> = Milestone::ALL
            .iter()
            .zip(times)
            .filter_map(|(milestone, after)| Some((*after?, milestone.name())))
            .collect();
        reached.sort_by_key(|(after, _)| *after);
        let shown = |(after, milestone): (Duration, _)| Reached {
            milestone,
            after_ms: after.as_micros() as f64 / 1e3,
        };
        reached.into_iter().map(shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn shows_what_was_reached_in_the_order_of_time_and_counts_the_first_time_alone() {
        let timeline = Timeline::start();
        timeline.mark(Milestone::SocketsBound);
        tokio::time::advance(Duration::from_micros(12_500)).await;
        timeline.clone().mark(Milestone::FirstCertificate);
        tokio::time::advance(Duration::from_millis(1)).await;
        timeline.mark(Milestone::EnvoyStarted);
        timeline.mark(Milestone::SocketsBound);
        let reached: Vec<_> = timeline
            .reached()
            .iter()
            .map(|reached| (reached.milestone, reached.after_ms))
            .collect();
        let expected = [
            ("sockets bound", 0.0),
            ("first certificate", 12.5),
            ("Envoy started", 13.5),
        ];
        assert_eq!(reached, expected);
    }

    #[test]
    fn every_milestone_has_a_place_of_its_own() {
        for (index, milestone) in Milestone::ALL.iter().enumerate() {
            assert_eq!(*milestone as usize, index, "{milestone:?}");
        }
    }
}
