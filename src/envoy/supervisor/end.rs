//! What follows the end of the Envoy that serves: a log line, a record if it was a crash, and perhaps
//! another start.
//!
//! An end is a crash unless it is of the kind the agent was bringing about, or Envoy's status is 0.

use std::time::Duration;

use rustix::process::Signal;
use tokio::task::JoinSet;

use super::super::crash::Crash;
use super::super::instance::{Instance, KILLED};
use super::super::machine::{Event, Phase};
use super::super::output::reason;
use super::super::process::Ended;
use super::super::shutdown::Step;
use super::super::{Error, hot_restart, warn};
use super::Supervisor;

impl Supervisor {
    pub(super) async fn ended(&mut self, ended: Ended) -> Result<Event, Error> {
        self.current.calls = JoinSet::new();
        self.current.deadline = None;
        let is_expected = self.machine.expects_the_end();
        self.restart.last_end = (!is_expected).then_some(ended);
        let mut early = None;
        if let Some(envoy) = self.current.instance.take() {
            let is_first = envoy.epoch == 0;
            early = Some(envoy.uptime()).filter(|up| is_first && *up < self.config.early);
            self.record_end(ended, envoy).await;
        }
        self.restart.pause = Duration::ZERO;
        let may_restart =
            self.is_relaunched_after(ended) || is_expected || self.may_restart(ended, early)?;
        Ok(Event::EnvoyExited { may_restart })
    }

    /// Whether the parent is still leaving, so that its successor is started again at once.
    fn is_relaunched_after(&mut self, ended: Ended) -> bool {
        use hot_restart::machine::Event::{ServingExited, Unready};
        if ended == Ended::Code(0) {
            // It was asked to end, and has ended its parent.
            self.apply_hot_restart(Unready);
        }
        self.abandon("the Envoy that serves has ended");
        self.apply_hot_restart(ServingExited);
        self.hot_restart.is_relaunch
    }

    /// Records a crash. The record goes when an Envoy ends as it was asked to.
    async fn record_end(&self, ended: Ended, mut envoy: Instance) {
        if is_crash(ended, self.machine.phase()) {
            let crash = envoy.crash(ended).await;
            tracing::error!("Envoy crashed: {crash}");
            if let Err(error) = crash.write(&self.config.directory) {
                warn(&error, "the next agent will not know of the crash");
            }
            self.publish
                .send_modify(|report| report.last_crash = Some(crash));
            return;
        }
        envoy.output.last_lines().await;
        if self.machine.expects_the_end() {
            tracing::info!("Envoy exited normally");
            if let Err(error) = Crash::remove(&self.config.directory) {
                warn(&error, "the next agent will name an old crash");
            }
        }
    }

    /// Logs an end that was not requested, and takes another start out of the budget. An end too
    /// `early` for a first start is an error: the next would end like it.
    fn may_restart(&mut self, ended: Ended, early: Option<Duration>) -> Result<bool, Error> {
        if ended == Ended::Code(0) {
            // Another than the agent has asked Envoy to end.
            tracing::warn!("Envoy exited by itself with status 0");
            return Ok(false);
        }
        if let Some(after) = early {
            let report = self.publish.borrow();
            let lines = report.last_crash.as_ref().map(|crash| &*crash.stderr);
            let reason = reason(lines.unwrap_or_default());
            let reason = reason.map_or_else(String::new, |line| format!(": {line}"));
            return Err(Error::AtOnce {
                ended,
                after,
                reason,
            });
        }
        tracing::error!("Envoy exited with error: {ended}");
        Ok(self.restart.take())
    }
}

const TERMINATED: i32 = Signal::TERM.as_raw();

/// Whether neither the agent nor a request to Envoy itself has brought an end about.
fn is_crash(ended: Ended, phase: Phase) -> bool {
    match ended {
        Ended::Code(0) => false,
        Ended::Signal(TERMINATED) => phase < Phase::Shutdown(Step::Termination),
        Ended::Signal(KILLED) => phase < Phase::Shutdown(Step::Kill),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_agents_own_signals_make_no_crash_and_only_from_their_step_on() {
        let (term, kill) = (Ended::Signal(TERMINATED), Ended::Signal(KILLED));
        for (ended, phase, expected) in [
            (Ended::Code(0), Phase::Running, false),
            (Ended::Code(1), Phase::Running, true),
            (Ended::Code(1), Phase::Shutdown(Step::Termination), true),
            (Ended::Signal(11), Phase::Shutdown(Step::Kill), true),
            (term, Phase::Shutdown(Step::Quit), true),
            (term, Phase::Shutdown(Step::Termination), false),
            (term, Phase::Shutdown(Step::Kill), false),
            (kill, Phase::Shutdown(Step::Termination), true),
            (kill, Phase::Shutdown(Step::Kill), false),
        ] {
            assert_eq!(is_crash(ended, phase), expected, "{ended} in {phase:?}");
        }
    }
}
