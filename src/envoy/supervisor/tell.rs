//! What is said of a restart: in the log, in the report, and in the count of results.
//!
//! Each restart somebody wants has one entry in the report, from the check to its outcome.
//!
//! Does not do anything else.

use std::time::SystemTime;

use super::super::child::Child;
use super::super::handle::{Epoch, Outcome, Restart, Role};
use super::super::hot_restart::Instance;
use super::super::hot_restart::machine::{Method, Verdict};
use super::Supervisor;

impl Supervisor {
    pub(super) fn say_begun(&self, reason: &'static str, method: Option<Method>) {
        let restart = Restart {
            reason,
            when: Some(self.clock.now()),
            method,
            outcome: Outcome::UnderWay,
            problem: None,
        };
        self.publish
            .send_modify(|report| report.last_restart = Some(restart));
    }

    fn is_under_way(&self) -> bool {
        let report = self.publish.borrow();
        let restart = report.last_restart.as_ref();
        restart.is_some_and(|restart| restart.outcome == Outcome::UnderWay)
    }

    pub(super) fn say_checked(&mut self, verdict: Verdict, problem: Option<String>) {
        match verdict {
            Verdict::Unchanged => {
                tracing::info!("nothing has changed for Envoy, which goes on");
                self.conclude(Outcome::Unchanged, "unchanged", None);
            }
            Verdict::Refused => {
                let problem = problem.unwrap_or_default();
                tracing::error!("Envoy is not restarted and serves on: {problem}");
                self.conclude(Outcome::Refused, "refused", Some(problem));
            }
            Verdict::Usable(_) => {}
        }
    }

    pub(super) fn say_abandoned(&mut self, why: &str) {
        if self.is_under_way() {
            tracing::info!("the restart of Envoy under way is given up: {why}");
            self.conclude(Outcome::Abandoned, "abandoned", Some(why.to_owned()));
        }
    }

    pub(super) fn say_failed(&mut self, problem: String) {
        if !self.is_under_way() {
            return; // It has been said.
        }
        tracing::error!(
            "the next Envoy has failed and the one before serves on: {problem}; hot restart cannot \
             be used until an overlapping or a full restart"
        );
        self.conclude(Outcome::Failed, "failed", Some(problem));
    }

    pub(super) fn conclude(&self, outcome: Outcome, result: &str, problem: Option<String>) {
        self.counters.changes.with([result]).inc();
        self.publish.send_modify(|report| {
            if let Some(restart) = &mut report.last_restart {
                restart.outcome = outcome;
                restart.problem = problem;
            }
        });
    }

    /// How the restart under way goes about it. One that nobody wanted begins here.
    pub(super) fn say_method(&self, method: Method) {
        if !self.is_under_way() {
            self.say_begun("the Envoy before died before its time", Some(method));
        }
        self.publish.send_modify(|report| {
            if let Some(restart) = &mut report.last_restart {
                restart.method = Some(method);
            }
        });
    }

    pub(super) fn say_full_restart_is_over(&self) {
        let restart = self.publish.borrow().last_restart.clone();
        let is_full = restart.is_some_and(|restart| restart.method == Some(Method::Full));
        if is_full && self.is_under_way() {
            self.conclude(Outcome::Succeeded, "full", None);
        }
    }

    /// Publishes which Envoy serves.
    pub(super) fn show_current(&self, started: Option<SystemTime>) {
        let (pid, epoch) = (self.child.as_ref().map(Child::pid), self.epoch);
        let resident = self.child.as_ref().map(Child::resident);
        let resident = resident.cloned().unwrap_or_default();
        self.publish.send_modify(|report| {
            report.pid = pid;
            report.rss_bytes = resident;
            report.epoch = epoch;
            report.started = started;
        });
        self.show_epochs();
    }

    /// Publishes which Envoys there are.
    pub(super) fn show_epochs(&self) {
        let epochs = self.epochs.as_ref();
        let beside = |beside: Option<&Instance>, state| {
            beside.map(|beside| Epoch {
                epoch: beside.epoch,
                restart_epoch: beside.run.place,
                pid: beside.child.pid(),
                state,
                started: Some(beside.started),
                config: beside.run.prepared.command.bootstrap.clone(),
            })
        };
        let old = beside(epochs.and_then(|e| e.old.as_ref()), Role::Leaving);
        let next = beside(epochs.and_then(|e| e.next.as_ref()), Role::Next);
        let run = epochs.and_then(|epochs| epochs.serving.as_ref());
        let command = run.map_or(&self.config.command, |run| &run.prepared.command);
        let current = self.child.as_ref().map(|child| Epoch {
            epoch: self.epoch,
            restart_epoch: run.map_or(0, |run| run.place),
            pid: child.pid(),
            state: Role::Current,
            started: self.publish.borrow().started,
            config: command.bootstrap.clone(),
        });
        let all = old.into_iter().chain(current).chain(next).collect();
        self.publish.send_modify(|report| report.epochs = all);
    }
}
