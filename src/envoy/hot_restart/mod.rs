//! From one Envoy to the next while both run: on request, what Envoy starts from is read anew, and
//! if it has changed the next Envoy takes over from the one that serves.
//!
//! [`Inputs`] reads; [`machine`] decides; [`HotRestart`] owns the Envoys that do not serve, the next and
//! the old one, and the checks under way. The supervisor owns the one that serves, and carries out
//! what the machine says. Each Envoy has a file of its own, which goes with it.
//!
//! Does not notice changes; who does orders a restart.

pub(super) mod base_id;
mod check;
pub mod machine;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::admin::Admin;
use super::child::Child;
use super::command::Command;
use super::process::{self, Ended};
use super::reaper::Children;
use crate::lifecycle::BoxError;
use base_id::BaseId;
use check::Check;
use machine::{Event, Machine, Verdict};

/// How long it may take to notice that a next Envoy serves, on a machine that is busy.
const NOTICED: Duration = Duration::from_secs(1);

/// How long the parts of a change may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long an old Envoy may stay; longer than its drain time. Whole seconds are used.
    pub parent_shutdown: Duration,
    /// Until the next Envoy serves; longer than its own waits for configuration.
    pub live: Duration,
    /// For reading the inputs and Envoy's opinion on them.
    pub check: Duration,
}

/// What Envoys are started from.
pub trait Inputs: Send + Sync {
    /// As they were when the agent started.
    fn first(&self) -> Result<Prepared, BoxError>;
    /// As they are now, for the Envoy of this number. May block.
    fn read(&self, number: u32) -> Result<Prepared, BoxError>;
}

/// All that one Envoy needs, on disk and ready.
pub struct Prepared {
    pub command: Command,
    /// The same for two that would run alike.
    pub digest: Vec<u8>,
    /// Removes what is on disk when dropped.
    pub files: Option<Box<dyn Send + Sync>>,
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("bootstrap", &self.command.bootstrap)
            .finish_non_exhaustive()
    }
}

/// What an Envoy was started on.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) prepared: Arc<Prepared>,
    /// None of an Envoy that shares nothing.
    pub(super) base: Option<Arc<BaseId>>,
    /// Its number in its line.
    pub(super) place: u32,
}

/// An Envoy that does not serve, yet or any more.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) child: Child,
    pub(super) run: Launch,
    /// Its number among all of this agent.
    pub(super) epoch: u32,
    pub(super) started: SystemTime,
}

/// How something under way has ended.
#[derive(Debug)]
pub(super) enum Progress {
    /// With the reason, where what was read cannot be used.
    Checked(Verdict, Option<String>),
    Live,
    Deadline,
    NextEnded(Ended),
    OldEnded(Ended),
}

#[derive(Debug)]
enum Call {
    Checked(Box<check::Checked>),
    Live,
}

/// Everything about changes but the Envoy that serves.
pub(super) struct HotRestart {
    pub(super) limits: Limits,
    pub(super) inputs: Arc<dyn Inputs>,
    pub(super) machine: Machine,
    /// What the one that serves runs on.
    pub(super) serving: Option<Launch>,
    /// What has been found good and is to be started.
    pub(super) prepared: Option<Prepared>,
    pub(super) next: Option<Instance>,
    pub(super) old: Option<Instance>,
    pub(super) deadline: Option<Instant>,
    /// When the one that took over from the old one began to serve, which is when Envoy begins to
    /// count the old one's time.
    pub(super) serves_since: Option<Instant>,
    /// Whether the Envoy started next takes its predecessor's place in the line.
    pub(super) is_relaunch: bool,
    calls: JoinSet<Call>,
}

impl HotRestart {
    pub(super) fn new(limits: Limits, inputs: Arc<dyn Inputs>) -> Self {
        Self {
            limits,
            inputs,
            machine: Machine::new(base_id::can_share()),
            serving: None,
            prepared: None,
            next: None,
            old: None,
            deadline: None,
            serves_since: None,
            is_relaunch: false,
            calls: JoinSet::new(),
        }
    }

    /// Finds out whether there is something to start as the Envoy of this number.
    pub(super) fn check(&mut self, number: u32, admin: Admin, own: Children) {
        let check = Check {
            inputs: Arc::clone(&self.inputs),
            serving: self.serving.clone(),
            number,
            admin,
            limit: self.limits.check,
            own,
        };
        self.calls = JoinSet::new();
        self.calls
            .spawn(async move { Call::Checked(Box::new(check.run().await)) });
    }

    /// Looks out for the Envoy at this place of its line.
    pub(super) fn await_live(&mut self, admin: Admin, place: u32) {
        self.deadline = Some(Instant::now() + self.limits.live);
        self.calls = JoinSet::new();
        self.calls.spawn(async move {
            check::live_at(admin, place).await;
            Call::Live
        });
    }

    /// Gives up what is under way.
    pub(super) fn drop_calls(&mut self) {
        self.calls = JoinSet::new();
        self.deadline = None;
    }

    /// Waits for what is under way. May be dropped and called again.
    pub(super) async fn news(&mut self) -> Result<Progress, process::Error> {
        let deadline = self.deadline;
        tokio::select! {
            ended = ended(&mut self.next) => ended.map(Progress::NextEnded),
            ended = ended(&mut self.old) => ended.map(Progress::OldEnded),
            Some(call) = self.calls.join_next() => Ok(self.called(call)),
            () = super::supervisor::reached(deadline) => {
                self.deadline = None;
                Ok(Progress::Deadline)
            }
        }
    }

    fn called(&mut self, call: Result<Call, JoinError>) -> Progress {
        match call {
            Ok(Call::Live) => Progress::Live,
            Ok(Call::Checked(checked)) => {
                self.prepared = checked.prepared;
                Progress::Checked(checked.verdict, checked.reason)
            }
            // Looking out ends at its deadline.
            Err(error) => Progress::Checked(Verdict::Refused, Some(error.to_string())),
        }
    }

    /// The successor of the old one serves from now on, which is sent away in time.
    pub(super) fn successor_serves(&mut self, stay: Duration) {
        let now = Instant::now();
        self.serves_since = Some(now);
        self.deadline = Some(now + stay);
    }

    /// Whether the old one, which has ended, did so before its successor has sent it away.
    pub(super) fn is_early(&self) -> bool {
        let shutdown = Duration::from_secs(self.limits.parent_shutdown.as_secs());
        let serves = self.serves_since.map(|since| since.elapsed() + NOTICED);
        serves.is_some_and(|serves| serves < shutdown)
    }
}

impl Progress {
    pub(super) fn event(&self, early: bool) -> Event {
        match self {
            Self::Checked(verdict, _) => Event::Checked(*verdict),
            Self::Live => Event::Live,
            Self::Deadline => Event::Deadline,
            Self::NextEnded(_) => Event::NextExited,
            Self::OldEnded(_) => Event::OldExited { early },
        }
    }
}

impl Instance {
    /// Ends it now and waits until it has, but not for ever.
    pub(super) async fn end(mut self, limit: Duration) {
        self.child.process.kill();
        let ended = tokio::time::timeout(limit, self.child.process.ended()).await;
        if ended.is_err() {
            let pid = self.child.pid();
            tracing::error!("Envoy {pid} did not end within {limit:?} of being killed; leaving it");
        }
    }
}

async fn ended(beside: &mut Option<Instance>) -> Result<Ended, process::Error> {
    match beside {
        Some(beside) => beside.child.process.ended().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Inputs for Nothing {
        fn first(&self) -> Result<Prepared, BoxError> {
            Err("nothing".into())
        }

        fn read(&self, _: u32) -> Result<Prepared, BoxError> {
            self.first()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_an_old_envoy_runs_from_when_its_successor_serves() {
        let second = Duration::from_secs(1);
        let limits = Limits {
            parent_shutdown: second * 60,
            live: second,
            check: second,
        };
        let mut epochs = HotRestart::new(limits, Arc::new(Nothing));
        assert!(!epochs.is_early(), "nobody serves whom it would surprise");
        tokio::time::advance(second * 100).await;
        epochs.successor_serves(second * 70);
        assert_eq!(epochs.deadline, Some(Instant::now() + second * 70));
        assert!(epochs.is_early());
        tokio::time::advance(second * 58).await;
        assert!(epochs.is_early());
        tokio::time::advance(second).await;
        assert!(!epochs.is_early(), "it may have taken a second to notice");
    }
}
