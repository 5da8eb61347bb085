//! Reports Envoy's state to the rest of the agent, and passes orders to the supervisor.
//!
//! The supervisor publishes a [`Report`] with every change. Clones of [`Envoy`] read it and order a drain or restart.

use std::path::PathBuf;
use std::time::SystemTime;

use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};

use super::admin::Admin;
use super::command::Takeover;
use super::crash::Crash;
use super::shutdown::{Plan, Shutdown, in_utc_if_any};
use crate::files::regular_file;
use crate::metrics;
use crate::problem::{Code, Problem};
use crate::runtime::clock::{self, Clock};
use crate::runtime::lifecycle::BoxError;

/// The most processes from a wrapper to its Envoy.
const MAX_ANCESTORS: usize = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    #[default]
    Initial,
    /// The process runs, but does not serve yet.
    Starting,
    Running,
    /// Envoy still serves, and asks its clients to leave.
    Draining,
    Stopping,
    Exited,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub state: State,
    pub pid: Option<i32>,
    /// The number of Envoys that this agent has started before the current one.
    pub epoch: u32,
    #[serde(serialize_with = "in_utc_if_any")]
    pub started: Option<SystemTime>,
    /// Resident memory; only in a report from [`Envoy::snapshot`].
    pub rss_bytes: Option<u64>,
    /// True after a drain order: the shutdown then has no drain.
    pub is_drained: bool,
    pub plan: Plan,
    pub ending: Option<Shutdown>,
    /// The start of the next Envoy, during the pause after an exit.
    #[serde(serialize_with = "in_utc_if_any")]
    pub restart: Option<SystemTime>,
    /// The running Envoys: parent, current one and successor.
    #[serde(rename = "epochs")]
    pub running: Vec<RunningEnvoy>,
    pub last_restart: Option<Restart>,
    /// The reason why the current Envoy runs without hot restart, if that is configured.
    pub hot_restart_problem: Option<String>,
    /// The last crash of an Envoy of this agent or of the previous one.
    pub last_crash: Option<Crash>,
}

#[derive(Clone, Debug, Serialize)]
pub struct RunningEnvoy {
    /// The number of Envoys that this agent has started before this one.
    pub epoch: u32,
    /// Envoy's own number, `--restart-epoch`.
    pub restart_epoch: u32,
    pub pid: i32,
    pub state: Role,
    #[serde(serialize_with = "clock::in_utc")]
    pub started: SystemTime,
    pub config: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The successor, which does not serve yet.
    Next,
    Current,
    /// The parent, which finishes its requests.
    Leaving,
}

#[derive(Clone, Debug, Serialize)]
pub struct Restart {
    pub reason: &'static str,
    #[serde(serialize_with = "clock::in_utc")]
    pub when: SystemTime,
    /// None until the inputs have been validated.
    pub method: Option<Method>,
    pub outcome: Outcome,
    /// The reason for a restart without success.
    pub problem: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The successor takes the sockets over from its parent.
    Hot,
    /// The next Envoy starts after the exit of the previous one.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    UnderWay,
    Succeeded,
    Unchanged,
    /// The inputs could not be used.
    Refused,
    /// The successor did not start, did not serve in time, or exited before.
    Failed,
    /// The current Envoy has exited, drains, or must stop. Unless the agent stops, the restart is tried again when an
    /// Envoy serves.
    Abandoned,
}

impl Report {
    /// Returns the restart epoch of the current Envoy, 0 if none runs.
    pub fn restart_epoch(&self) -> u32 {
        let current = self.running.iter().find(|envoy| envoy.state == Role::Current);
        current.map_or(0, |envoy| envoy.restart_epoch)
    }

    /// Returns the reason why no Envoy accepts traffic.
    pub fn problem(&self) -> Option<Problem> {
        let (code, found) = match (self.state, &self.last_crash) {
            (State::Starting | State::Running, _) => return None,
            (State::Initial, _) => (Code::EnvoyNotStarted, "it has not been started yet"),
            (State::Draining | State::Stopping, _) => {
                let cause = self.ending.as_ref().map(|it| it.cause);
                (Code::EnvoyStopping, cause.unwrap_or("a request to drain"))
            }
            (State::Exited, None) => (Code::EnvoyExited, "it exited with status 0"),
            (State::Exited, Some(crash)) => return Some(crash.problem()),
        };
        Some(Problem::new(code, "Envoy", found))
    }
}

impl Restart {
    pub(super) fn begin(reason: &'static str) -> Self {
        Self {
            reason,
            when: Clock::system().now(),
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
    /// Drain Envoy now, and not again at its shutdown. The sender is used when Envoy's admin port has responded or
    /// failed; it is dropped when Envoy has exited.
    Drain(oneshot::Sender<()>),
    /// Replace Envoy if its inputs have changed. The report contains the outcome.
    Restart { reason: &'static str },
    /// Let a successor in another container start. The reply is its takeover, or the reason for a refusal.
    Lend(oneshot::Sender<Result<Takeover, BoxError>>),
    /// Take the base id back: that successor has exited without taking over.
    Reclaim,
    /// Become the parent of that successor, which has taken over and will end Envoy.
    Supersede,
    /// Allow restarts: the parent in another container has exited.
    ParentExited,
}

impl Envoy {
    pub fn new(admin: Admin, report: watch::Receiver<Report>, orders: mpsc::Sender<Order>) -> Self {
        Self { admin, report, orders }
    }

    pub fn admin(&self) -> Admin {
        self.admin.clone()
    }

    pub fn report(&self) -> watch::Receiver<Report> {
        self.report.clone()
    }

    /// Returns the last report, with Envoy's resident memory.
    pub fn snapshot(&self) -> Report {
        let mut report = self.report.borrow().clone();
        report.rss_bytes = report.pid.and_then(|pid| {
            let status = regular_file::read_kernel(format!("/proc/{pid}/status")).ok()?;
            metrics::process::parse_size(&status, "VmRSS:")
        });
        report
    }

    /// Returns true for the process of an Envoy, and for one that it has started, because a wrapper may run Envoy.
    pub fn has_started(&self, pid: i32) -> bool {
        let report = self.report.borrow();
        let mut ancestors =
            std::iter::successors(Some(pid), |pid| parent_of(*pid)).take(MAX_ANCESTORS);
        ancestors.any(|pid| report.running.iter().any(|envoy| envoy.pid == pid))
    }

    /// Drains Envoy. Returns after Envoy has been asked, or if no Envoy runs.
    pub async fn drain(&self) {
        let (sender, drained) = oneshot::channel();
        self.order(Order::Drain(sender)).await;
        // The supervisor drops the sender if there is nothing to drain.
        let _ = drained.await;
    }

    pub async fn lend(&self) -> Result<Takeover, BoxError> {
        let (sender, lent) = oneshot::channel();
        self.order(Order::Lend(sender)).await;
        lent.await.unwrap_or_else(|_| Err("Envoy has ended".into()))
    }

    pub async fn order(&self, order: Order) {
        // It fails after the supervisor has ended.
        let _ = self.orders.send(order).await;
    }
}

/// Returns the parent of a process. Source: proc_pid_stat(5).
fn parent_of(pid: i32) -> Option<i32> {
    let stat = regular_file::read_kernel(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program is in parentheses, and may contain some.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::envoy::shutdown::{Plan, PlannedStep, Step};

    #[test]
    fn an_envoy_is_a_process_of_the_agent_or_one_below() {
        let mut wrapper = std::process::Command::new("sh");
        wrapper.args(["-c", "sh -c 'echo $$; read _'; true"]);
        let pipe = std::process::Stdio::piped;
        let mut wrapper = wrapper.stdin(pipe()).stdout(pipe()).spawn().unwrap();
        let mut line = String::new();
        let output = wrapper.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).unwrap();
        let (below, pid): (i32, _) = (line.trim().parse().unwrap(), wrapper.id() as i32);
        assert_ne!(below, pid);
        let running = |pid| RunningEnvoy {
            epoch: 0,
            restart_epoch: 0,
            pid,
            state: Role::Current,
            started: SystemTime::UNIX_EPOCH,
            config: PathBuf::new(),
        };
        let report = Report { running: vec![running(pid)], ..Report::default() };
        let admin = Admin::new([127, 0, 0, 1].into(), 1, Duration::ZERO);
        let (orders, (_sender, report)) = (mpsc::channel(1).0, watch::channel(report));
        let envoy = Envoy::new(admin, report, orders);
        let own = std::process::id() as i32;
        for (pid, expected) in [(pid, true), (below, true), (own, false), (1, false), (0, false)] {
            assert_eq!(envoy.has_started(pid), expected, "{pid}");
        }
        drop(wrapper.stdin.take());
        wrapper.wait().unwrap();
    }

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
            running: vec![RunningEnvoy {
                epoch: 2,
                restart_epoch: 1,
                pid: 42,
                state: Role::Current,
                started: moment,
                config: "etc/istio/proxy/envoy-rev2.json".into(),
            }],
            last_restart: Some(Restart {
                reason: "received signal: hangup",
                when: moment,
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
            "hot_restart_problem": null,
            "last_crash": null,
        });
        assert_eq!(json!(report), expected);
        for (state, name) in State::NAMES {
            assert_eq!(json!(state), name);
        }
    }
}
