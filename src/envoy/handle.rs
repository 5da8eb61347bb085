//! Reports Envoy's state to the rest of the agent, and takes its orders.
//!
//! The supervisor publishes a [`Report`] with every change. Clones of [`Envoy`] read it and order a drain or restart.

use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};

use super::admin::Admin;
use super::crash::Crash;
use super::hot_restart::Lent;
use super::shutdown::{Plan, Shutdown, in_utc_if_any};
use crate::metrics;
use crate::problem::{Problem, codes};

/// Where Envoy is on its way from start to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    #[default]
    Initial,
    /// The process is there; it does not serve yet.
    Starting,
    Running,
    /// Its clients are asked to leave; it still serves.
    Draining,
    Stopping,
    Exited,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub state: State,
    pub pid: Option<i32>,
    /// How many Envoys this agent has started before this one.
    pub epoch: u32,
    #[serde(serialize_with = "in_utc_if_any")]
    pub started: Option<SystemTime>,
    /// Resident memory; only in a report from [`Envoy::snapshot`].
    pub rss_bytes: Option<u64>,
    /// Whether a drain was ordered, so that the shutdown has none.
    pub is_drained: bool,
    /// The steps of a shutdown, from where Envoy is now.
    pub plan: Plan,
    pub ending: Option<Shutdown>,
    /// When the next Envoy starts, while there is none.
    #[serde(serialize_with = "in_utc_if_any")]
    pub restart: Option<SystemTime>,
    pub epochs: Vec<Epoch>,
    /// The last restart that was wanted.
    pub last_restart: Option<Restart>,
    /// The last crash, of this agent's Envoys or of the one before.
    pub last_crash: Option<Crash>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Epoch {
    /// How many Envoys this agent has started before this one.
    pub epoch: u32,
    /// Envoy's own number of it, `--restart-epoch`.
    pub restart_epoch: u32,
    pub pid: i32,
    pub state: Role,
    #[serde(serialize_with = "in_utc_if_any")]
    pub started: Option<SystemTime>,
    pub config: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The successor, which does not serve yet.
    Next,
    Current,
    /// The parent, which finishes what it has begun.
    Leaving,
}

/// A restart of an Envoy that serves.
#[derive(Clone, Debug, Serialize)]
pub struct Restart {
    pub reason: &'static str,
    #[serde(serialize_with = "in_utc_if_any")]
    pub when: Option<SystemTime>,
    /// None before it is known whether there is anything to start.
    pub method: Option<Method>,
    pub outcome: Outcome,
    /// What stood in its way.
    pub problem: Option<String>,
}

/// How one Envoy follows another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The successor takes the sockets over from its parent.
    Hot,
    /// The next Envoy starts when the one before has ended.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    UnderWay,
    Succeeded,
    Unchanged,
    /// What was there to start could not be used.
    Refused,
    /// The successor ended before it served.
    Failed,
    /// The Envoy that serves has ended first, drains, or is to end.
    Abandoned,
}

impl Report {
    /// Tells why no Envoy takes traffic.
    pub fn problem(&self) -> Option<Problem> {
        let (code, found) = match (self.state, &self.last_crash) {
            (State::Starting | State::Running, _) => return None,
            (State::Initial, _) => (codes::ENVOY_NOT_STARTED, "it has not been started yet"),
            (State::Draining | State::Stopping, _) => {
                let cause = self.ending.as_ref().map(|it| it.cause);
                (codes::ENVOY_STOPPING, cause.unwrap_or("a request to drain"))
            }
            (State::Exited, None) => (codes::ENVOY_EXITED, "it exited with status 0"),
            (State::Exited, Some(crash)) => return Some(crash.problem()),
        };
        Some(Problem::new(code, "Envoy", found))
    }
}

impl Restart {
    pub(super) fn begun(reason: &'static str, now: SystemTime) -> Self {
        Self {
            reason,
            when: Some(now),
            method: None,
            outcome: Outcome::UnderWay,
            problem: None,
        }
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.outcome == Outcome::UnderWay
    }
}

impl State {
    /// All states, with their names in JSON and metrics.
    pub(super) const NAMES: [(Self, &'static str); 6] = [
        (Self::Initial, "initial"),
        (Self::Starting, "starting"),
        (Self::Running, "running"),
        (Self::Draining, "draining"),
        (Self::Stopping, "stopping"),
        (Self::Exited, "exited"),
    ];
}

/// A handle to the running Envoy. Clones share it.
#[derive(Clone, Debug)]
pub struct Envoy {
    admin: Admin,
    report: watch::Receiver<Report>,
    orders: mpsc::Sender<Order>,
}

#[derive(Debug)]
pub enum Order {
    /// Drain Envoy now, and not again at its shutdown. Answered when Envoy's admin port has answered
    /// or failed; dropped when Envoy has ended.
    Drain(oneshot::Sender<()>),
    /// Replace Envoy by one that starts from what there is now, if that has changed.
    Restart { reason: &'static str },
    /// Let a successor in another container start. Answered with what it continues, or why it cannot.
    Lend(oneshot::Sender<Result<Lent, String>>),
    /// That successor is gone, and has not taken over.
    Reclaim,
    /// That successor has taken over: Envoy is its parent, and ends when it is told to by it.
    Supersede,
    /// The parent in another container has ended.
    ParentEnded,
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

    pub fn snapshot(&self) -> Report {
        let report = self.report.borrow().clone();
        let resident = |pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            metrics::process::memory(&status, "VmRSS:")
        };
        Report {
            rss_bytes: report.pid.and_then(resident),
            ..report
        }
    }

    /// Drains Envoy; returns when Envoy has been asked, or when there is none.
    pub async fn drain(&self) {
        let (asked, answer) = oneshot::channel();
        if self.orders.send(Order::Drain(asked)).await.is_ok() {
            let _ = answer.await; // An error is the end of Envoy.
        }
    }

    /// Lets a successor in another container start.
    pub async fn lend(&self) -> Result<Lent, String> {
        let (asked, answer) = oneshot::channel();
        let gone = || "Envoy has ended".to_owned();
        let sent = self.orders.send(Order::Lend(asked)).await;
        sent.map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Gives an order that has no answer.
    pub async fn order(&self, order: Order) {
        // An error is the end of Envoy.
        let _ = self.orders.send(order).await;
    }

    /// Has Envoy replaced if what it starts from has changed. The report tells the outcome.
    pub async fn restart(&self, reason: &'static str) {
        // An error is the end of Envoy.
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
    fn a_report_is_json_with_times_in_utc_and_durations_in_seconds() {
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
                waits_for: Step::DrainTime,
                until: moment,
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
        for (state, name) in State::NAMES {
            assert_eq!(json!(state), name);
        }
    }
}
