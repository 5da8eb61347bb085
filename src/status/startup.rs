//! Start-up milestones: when the agent bound its sockets, Envoy started, and so on until the pod was
//! ready.
//!
//! Only the first time counts, so a second Envoy or another connection to istiod does not rewrite
//! how the start went.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::Sources;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    SocketsBound,
    EnvoyStarted,
    IstiodConnected,
    FirstCertificate,
    /// Envoy has accepted clusters and listeners.
    ConfigReceived,
    EnvoyLive,
    Ready,
}

/// A milestone that has been reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reached {
    pub milestone: &'static str,
    /// Since the agent's start, to the microsecond.
    pub after_ms: f64,
}

/// The milestones reached so far. Clones share them.
#[derive(Clone, Debug)]
pub struct Milestones {
    start: Instant,
    reached: Arc<[OnceLock<Duration>; NAMES.len()]>,
}

/// In the order of [`Milestone`].
const NAMES: [&str; 7] = [
    "sockets bound",
    "Envoy started",
    "istiod connected",
    "first certificate",
    "configuration received",
    "Envoy live",
    "ready",
];

impl Milestones {
    /// Counts from now.
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
        let mut reached: Vec<_> = NAMES
            .into_iter()
            .zip(times)
            .filter_map(|(name, after)| Some((*after?, name)))
            .collect();
        reached.sort_by_key(|(after, _)| *after);
        let reached = reached.into_iter().map(|(after, milestone)| Reached {
            milestone,
            after_ms: after.as_micros() as f64 / 1e3,
        });
        reached.collect()
    }
}

/// Marks what Envoy's supervisor, the connection to istiod and the secrets publish. Readiness marks
/// the later milestones.
pub(super) async fn watch(sources: &Sources) {
    let milestones = &sources.milestones;
    let connected = async {
        let mut connection = sources.istiod.watch();
        if connection.wait_for(Option::is_some).await.is_ok() {
            milestones.mark(Milestone::IstiodConnected);
        }
    };
    let certified = async {
        let Some(mut secrets) = sources.secrets.clone() else {
            return;
        };
        while secrets.latest().workload.is_none() {
            secrets.changed().await;
        }
        milestones.mark(Milestone::FirstCertificate);
    };
    let started = async {
        let Some(envoy) = &sources.envoy else { return };
        let mut report = envoy.report();
        if report.wait_for(|report| report.pid.is_some()).await.is_ok() {
            milestones.mark(Milestone::EnvoyStarted);
        }
    };
    tokio::join!(connected, certified, started);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn milestones_are_in_the_order_of_time_and_the_first_time_counts() {
        let milestones = Milestones::start();
        milestones.mark(Milestone::SocketsBound);
        tokio::time::advance(Duration::from_micros(12_500)).await;
        milestones.clone().mark(Milestone::FirstCertificate);
        tokio::time::advance(Duration::from_millis(1)).await;
        milestones.mark(Milestone::EnvoyStarted);
        milestones.mark(Milestone::SocketsBound);
        let reached: Vec<_> = milestones
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
    fn every_milestone_has_its_own_name() {
        for (milestone, name) in [
            (Milestone::SocketsBound, "sockets bound"),
            (Milestone::EnvoyStarted, "Envoy started"),
            (Milestone::IstiodConnected, "istiod connected"),
            (Milestone::FirstCertificate, "first certificate"),
            (Milestone::ConfigReceived, "configuration received"),
            (Milestone::EnvoyLive, "Envoy live"),
            (Milestone::Ready, "ready"),
        ] {
            assert_eq!(NAMES[milestone as usize], name);
        }
    }
}
