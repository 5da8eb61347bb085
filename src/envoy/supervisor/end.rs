//! What is said and kept of an Envoy that has ended, and whether another may follow.
//!
//! An end is a crash unless it is of the kind the agent was bringing about, or Envoy went in peace. A
//! crash leaves a record; an end that was asked for, and no crash, takes an old record away.
//!
//! Does not start the next one.

use std::time::Duration;

use tokio::task::JoinSet;

use super::super::calls::warn;
use super::super::child::{Child, KILLED};
use super::super::crash::Crash;
use super::super::machine::{Event, Phase};
use super::super::memory::Resident;
use super::super::process::Ended;
use super::super::{Error, hot_restart};
use super::Supervisor;

impl Supervisor {
    pub(super) async fn ended(&mut self, ended: Ended) -> Result<Event, Error> {
        self.calls = JoinSet::new();
        self.deadline = None;
        let is_wanted = self.machine.expects_the_end();
        self.last_end = (!is_wanted).then_some(ended);
        let uptime = match self.child.take() {
            Some(child) => self.take_leave(ended, child).await,
            None => Duration::ZERO,
        };
        self.publish.send_modify(|report| {
            report.pid = None;
            report.rss_bytes = Resident::default();
        });
        self.show_epochs();
        let is_relaunched = self.is_relaunched_after(ended);
        let may_restart = if is_wanted || is_relaunched {
            self.pause = Duration::ZERO;
            true
        } else {
            self.by_itself(ended, uptime)?
        };
        Ok(Event::EnvoyExited { may_restart })
    }

    /// Whether the Envoy before is still leaving, so that its successor is started again at once.
    fn is_relaunched_after(&mut self, ended: Ended) -> bool {
        if ended == Ended::Code(0) {
            // It was asked to end, and has sent the one before away.
            self.apply(hot_restart::machine::Event::Unready);
        }
        self.abandon("the Envoy that serves has ended");
        self.apply(hot_restart::machine::Event::ServingExited);
        self.epochs
            .as_ref()
            .is_some_and(|epochs| epochs.is_relaunch)
    }

    /// Keeps what is to be kept of an Envoy that has ended; returns how long it lived.
    async fn take_leave(&self, ended: Ended, mut child: Child) -> Duration {
        let uptime = child.uptime();
        let stderr = child.finish().await;
        if is_crash(ended, self.machine.phase()) {
            self.record(child.crash(ended, self.clock.now(), stderr));
        } else if self.machine.expects_the_end() {
            tracing::info!("Envoy exited normally");
            self.forget();
        }
        uptime
    }

    /// Logs an end nobody asked for and says whether another start may follow. An end too early for
    /// a first start is an error: the next would end like it.
    fn by_itself(&mut self, ended: Ended, after: Duration) -> Result<bool, Error> {
        if ended == Ended::Code(0) {
            // Somebody has asked Envoy, and not the agent.
            tracing::warn!("Envoy exited by itself with status 0");
            return Ok(false);
        }
        if after < self.config.early && self.epoch == 0 {
            return Err(Error::AtOnce { ended, after });
        }
        tracing::error!("Envoy exited with error: {ended}");
        let pause = self.restarts.take();
        self.pause = pause.unwrap_or_default();
        Ok(pause.is_some())
    }

    fn record(&self, crash: Crash) {
        tracing::error!("Envoy crashed: {crash}");
        if let Err(error) = crash.write(&self.config.directory) {
            warn(&error, "the next agent will not know of the crash");
        }
        self.publish
            .send_modify(|report| report.last_crash = Some(crash));
    }

    /// The next Envoy's previous one will be this one, which ended well.
    fn forget(&self) {
        if let Err(error) = Crash::remove(&self.config.directory) {
            warn(&error, "the next agent will name an old crash");
        }
    }
}

const TERMINATED: i32 = 15;

/// Whether an end is none that the agent, or somebody else by Envoy's own means, has brought about.
fn is_crash(ended: Ended, phase: Phase) -> bool {
    match ended {
        Ended::Code(0) => false,
        Ended::Signal(TERMINATED) => phase < Phase::Terminating,
        Ended::Signal(KILLED) => phase < Phase::Killing,
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
            (Ended::Code(1), Phase::Terminating, true),
            (Ended::Signal(11), Phase::Killing, true),
            (term, Phase::Quitting, true),
            (term, Phase::Terminating, false),
            (term, Phase::Killing, false),
            (kill, Phase::Terminating, true),
            (kill, Phase::Killing, false),
        ] {
            assert_eq!(is_crash(ended, phase), expected, "{ended} in {phase:?}");
        }
    }
}
