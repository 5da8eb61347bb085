//! What the rest of the agent may know about Envoy, and ask of it.
//!
//! The one who runs Envoy publishes a [`Report`] whenever something changes; everybody with an
//! [`Envoy`] can read it, wait for the next, or ask for a drain.
//!
//! Does not decide anything.

use std::time::SystemTime;

use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};

use super::admin::Admin;
use super::crash::Crash;
use super::plan::{self, Ending, Plan};

/// Where Envoy is on its way from start to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Not started yet.
    #[default]
    Initial,
    /// The process is there; it does not serve yet.
    Starting,
    Running,
    /// Told to send its clients away, and still serving.
    Draining,
    /// Told to end.
    Stopping,
    /// There is no process.
    Exited,
}

/// What is known about Envoy now.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    pub state: State,
    pub pid: Option<i32>,
    /// How many Envoys this agent has started before this one.
    pub epoch: u32,
    #[serde(serialize_with = "plan::in_utc_if_any")]
    pub started: Option<SystemTime>,
    /// What Envoy held in memory when it was last looked at.
    pub rss_bytes: Option<u64>,
    /// Whether Envoy was told to send its clients away, and will skip its drain at the end.
    pub is_drained: bool,
    /// The steps of an end, from where Envoy is now.
    pub plan: Plan,
    /// The way down, once it has begun.
    pub ending: Option<Ending>,
    /// When the next Envoy starts, while there is none.
    #[serde(serialize_with = "plan::in_utc_if_any")]
    pub restart: Option<SystemTime>,
    /// The last crash, of this agent's Envoys or of the one before.
    pub last_crash: Option<Crash>,
}

impl State {
    pub(super) const ALL: [Self; 6] = [
        Self::Initial,
        Self::Starting,
        Self::Running,
        Self::Draining,
        Self::Stopping,
        Self::Exited,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Initial => "initial",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Draining => "draining",
            Self::Stopping => "stopping",
            Self::Exited => "exited",
        }
    }
}

/// A handle to the running Envoy. Clones share it.
#[derive(Clone, Debug)]
pub struct Envoy {
    admin: Admin,
    report: watch::Receiver<Report>,
    orders: mpsc::Sender<Order>,
}

/// What the one who runs Envoy can be asked for.
#[derive(Debug)]
pub enum Order {
    /// Have Envoy send its clients away but not end, and skip the drain when the end comes. Answered
    /// when Envoy's admin port has, or has failed to.
    Drain(oneshot::Sender<()>),
}

impl Envoy {
    pub fn new(admin: Admin, report: watch::Receiver<Report>, orders: mpsc::Sender<Order>) -> Self {
        Self {
            admin,
            report,
            orders,
        }
    }

    /// The admin port of the Envoy that serves now.
    pub fn admin(&self) -> Admin {
        self.admin
    }

    pub fn report(&self) -> watch::Receiver<Report> {
        self.report.clone()
    }

    /// Has Envoy send its clients away; returns when it has been told, or when there is none.
    pub async fn drain(&self) {
        let (told, answer) = oneshot::channel();
        if self.orders.send(Order::Drain(told)).await.is_ok() {
            // An order dropped unanswered met the end of Envoy.
            let _ = answer.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::envoy::plan::{Plan, Step, WaitsFor};

    #[test]
    fn a_report_is_json_with_moments_in_utc_and_spans_in_seconds() {
        let moment = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let report = Report {
            state: State::Draining,
            pid: Some(42),
            started: Some(moment),
            ending: Some(Ending {
                cause: "received signal: terminated",
                since: moment,
                plan: Plan(vec![Step {
                    waits_for: WaitsFor::DrainTime,
                    at_most: Duration::from_millis(1500),
                }]),
                waits_for: Some(WaitsFor::DrainTime),
                until: Some(moment),
                connections: Some(3),
            }),
            ..Report::default()
        };
        let now = "2001-09-09T01:46:40Z";
        let expected = json!({
            "state": "draining",
            "pid": 42,
            "epoch": 0,
            "started": now,
            "rss_bytes": null,
            "is_drained": false,
            "plan": [],
            "ending": {
                "cause": "received signal: terminated",
                "since": now,
                "plan": [{ "waits_for": "drain_time", "at_most_seconds": 1.5 }],
                "waits_for": "drain_time",
                "until": now,
                "connections": 3,
            },
            "restart": null,
            "last_crash": null,
        });
        assert_eq!(json!(report), expected);
        for state in State::ALL {
            assert_eq!(json!(state), state.name());
        }
    }
}
