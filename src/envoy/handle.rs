//! What the rest of the agent may know about Envoy, and ask of it.
//!
//! The one who runs Envoy publishes a [`Report`] whenever something changes; everybody with an
//! [`Envoy`] can read it, wait for the next, or ask for a drain.
//!
//! Does not decide anything.

use std::path::PathBuf;
use std::time::SystemTime;

use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};

use super::admin::Admin;
use super::crash::Crash;
use super::hot_restart::machine::Method;
use super::memory::Resident;
use super::shutdown::{self, Plan, Shutdown};

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
    #[serde(serialize_with = "shutdown::in_utc_if_any")]
    pub started: Option<SystemTime>,
    /// What Envoy holds in memory. It is looked at when somebody shows it.
    pub rss_bytes: Resident,
    /// Whether Envoy was told to send its clients away, and will skip its drain at the end.
    pub is_drained: bool,
    /// The steps of an end, from where Envoy is now.
    pub plan: Plan,
    /// The way down, once it has begun.
    pub ending: Option<Shutdown>,
    /// When the next Envoy starts, while there is none.
    #[serde(serialize_with = "shutdown::in_utc_if_any")]
    pub restart: Option<SystemTime>,
    /// Every Envoy there is, the one that serves among them.
    pub epochs: Vec<Epoch>,
    /// How the last restart somebody wanted went.
    pub last_restart: Option<Restart>,
    /// The last crash, of this agent's Envoys or of the one before.
    pub last_crash: Option<Crash>,
}

/// One of the Envoys there are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Epoch {
    /// Its number among all of this agent.
    pub epoch: u32,
    /// Its number among those that took over from each other, which Envoy goes by.
    pub restart_epoch: u32,
    pub pid: i32,
    pub state: Role,
    #[serde(serialize_with = "shutdown::in_utc_if_any")]
    pub started: Option<SystemTime>,
    pub config: PathBuf,
}

/// What an Envoy is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The next: it does not serve yet.
    Next,
    Current,
    /// It has been replaced, and finishes what it has begun.
    Leaving,
}

/// A restart somebody wanted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Restart {
    /// Why, in the words of who wanted it last.
    pub reason: &'static str,
    #[serde(serialize_with = "shutdown::in_utc_if_any")]
    pub when: Option<SystemTime>,
    /// None before it is known whether there is anything to start.
    pub method: Option<Method>,
    pub outcome: Outcome,
    /// What stood in its way.
    pub problem: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    UnderWay,
    Succeeded,
    /// There was nothing new to start.
    Unchanged,
    /// What was there to start could not be used.
    Refused,
    /// The next Envoy did not get as far as serving.
    Failed,
    /// The Envoy that serves has ended first, drains, or is to end.
    Abandoned,
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
    /// Replace Envoy by one that starts from what there is now, if that has changed.
    Restart { reason: &'static str },
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

    /// Notes how much memory Envoy holds, for the record of a crash. To be called when the agent is
    /// awake anyway.
    pub fn look_at_memory(&self) {
        self.report.borrow().rss_bytes.look();
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

impl Envoy {
    /// Has Envoy replaced if what it starts from has changed. The report tells how it went.
    pub async fn restart(&self, reason: &'static str) {
        // Whoever runs Envoy has ended, and Envoy with it.
        let _ = self.orders.send(Order::Restart { reason }).await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::envoy::shutdown::{Plan, PlannedStep, Step};

    #[test]
    fn a_report_is_json_with_moments_in_utc_and_spans_in_seconds() {
        let moment = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let report = Report {
            state: State::Draining,
            pid: Some(42),
            started: Some(moment),
            ending: Some(Shutdown {
                cause: "received signal: terminated",
                since: moment,
                plan: Plan(vec![PlannedStep {
                    waits_for: Step::DrainTime,
                    at_most: Duration::from_millis(1500),
                }]),
                waits_for: Some(Step::DrainTime),
                until: Some(moment),
                connections: Some(3),
            }),
            epochs: vec![Epoch {
                epoch: 2,
                restart_epoch: 1,
                pid: 42,
                state: Role::Current,
                started: Some(moment),
                config: "etc/istio/proxy/envoy-rev2.json".into(),
            }],
            last_restart: Some(Restart {
                reason: "received signal: hangup",
                when: Some(moment),
                method: Some(Method::Hot),
                outcome: Outcome::UnderWay,
                problem: None,
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
            "epochs": [{
                "epoch": 2,
                "restart_epoch": 1,
                "pid": 42,
                "state": "current",
                "started": now,
                "config": "etc/istio/proxy/envoy-rev2.json",
            }],
            "last_restart": {
                "reason": "received signal: hangup",
                "when": now,
                "method": "hot",
                "outcome": "under_way",
                "problem": null,
            },
            "last_crash": null,
        });
        assert_eq!(json!(report), expected);
        for state in State::ALL {
            assert_eq!(json!(state), state.name());
        }
    }
}
