//! Marks when the rooms first got where a start leads.
//!
//! Rooms do not know of each other's way, so it is watched from here: each publishes what it has
//! anyway. What readiness knows, the status port marks itself.
//!
//! Does not act on any of it.

use super::overview::Rooms;
use crate::timeline::Milestone;

/// Watches until all is reached, and never ends.
pub(super) fn watch(rooms: &Rooms) -> impl Future<Output = ()> + Send + use<> {
    let timeline = rooms.timeline.clone();
    let mut connection = rooms.istiod.watch();
    let secrets = rooms.secrets.clone();
    let report = rooms.envoy.as_ref().map(|envoy| envoy.report());
    async move {
        let connected = async {
            if connection.wait_for(Option::is_some).await.is_ok() {
                timeline.mark(Milestone::IstiodConnected);
            }
        };
        let certified = async {
            let Some(mut secrets) = secrets else { return };
            while secrets.latest().workload.is_none() {
                secrets.changed().await;
            }
            timeline.mark(Milestone::FirstCertificate);
        };
        let started = async {
            let Some(mut report) = report else { return };
            if report.wait_for(|report| report.pid.is_some()).await.is_ok() {
                timeline.mark(Milestone::EnvoyStarted);
            }
        };
        tokio::join!(connected, certified, started);
        std::future::pending().await
    }
}
