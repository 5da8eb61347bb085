//! Replaces the Envoy that serves while it serves, by Envoy's hot restart.
//!
//! On request, what Envoy starts from is read anew. If it has changed, a successor starts beside the
//! Envoy that serves; when the successor serves itself, the one before is its parent and finishes
//! what it has begun. [`machine`] decides; [`HotRestart`] owns successor, parent and the check under
//! way; [`supervise`] carries out, as a part of the supervisor; [`watch`] orders restarts.

pub(super) mod base_id;
mod check;
pub mod machine;
mod supervise;
pub mod watch;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::admin::Admin;
use super::handle::Restart;
use super::instance::{self, Instance};
use super::launch::{Launch, Prepared};
use super::process::{self, Ended};
use super::supervisor::reached;
use crate::clock;
use crate::lifecycle::{BoxError, with_causes};
use check::Checked;
use machine::Machine;

/// How long it may take to notice that a successor serves, on a machine that is busy.
const NOTICED: Duration = Duration::from_secs(1);

/// How much longer than it should a parent may stay.
const OVERDUE: Duration = Duration::from_secs(10);

/// What the Envoy of an epoch is started from: the first of what the agent was started with, others
/// of what there is now. May block.
pub type Prepare = Arc<dyn Fn(u32) -> Result<Prepared, BoxError> + Send + Sync>;

/// How long the parts of a hot restart may take.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// How long a parent may stay; longer than its drain time. Whole seconds are used.
    pub parent_shutdown: Duration,
    /// Until a successor serves; longer than its own waits for configuration.
    pub live: Duration,
    /// For reading what Envoy starts from, and for Envoy's check of it.
    pub check: Duration,
}

/// Something under way has come to an end.
#[derive(Debug)]
pub(super) enum Progress {
    Checked(Checked),
    Live,
    Deadline,
    SuccessorEnded(Ended),
    ParentEnded(Ended),
}

/// All about hot restarts but the Envoy that serves.
pub(super) struct HotRestart {
    pub(super) is_on: bool,
    pub(super) limits: Limits,
    pub(super) prepare: Prepare,
    machine: Machine,
    /// Why a restart was last wanted.
    reason: &'static str,
    pub(super) last: Option<Restart>,
    /// What has been found usable and is to be started.
    pub(super) prepared: Option<Arc<Prepared>>,
    pub(super) successor: Option<Instance>,
    pub(super) parent: Option<Instance>,
    deadline: Option<Instant>,
    /// When the successor of the parent began to serve, which is when it begins to count the
    /// parent's time.
    serves_since: Option<Instant>,
    /// Whether the Envoy that serves is to be started again as it was.
    pub(super) is_relaunch: bool,
    calls: JoinSet<Progress>,
}

impl HotRestart {
    /// With `limits`, hot restart is on.
    pub(super) fn new(limits: Option<Limits>, prepare: Prepare) -> Self {
        Self {
            is_on: limits.is_some(),
            limits: limits.unwrap_or_default(),
            prepare,
            machine: Machine::new(limits.is_some() && base_id::can_share()),
            reason: "",
            last: None,
            prepared: None,
            successor: None,
            parent: None,
            deadline: None,
            serves_since: None,
            is_relaunch: false,
            calls: JoinSet::new(),
        }
    }

    /// Checks what there is to start beside the Envoy that serves.
    fn check(&mut self, epoch: u32, serving: Option<Launch>, admin: Admin) {
        let limit = self.limits.check;
        let check = check::check(Arc::clone(&self.prepare), epoch, serving, admin);
        self.calls = JoinSet::new();
        self.calls.spawn(async move {
            let checked = tokio::time::timeout(limit, check).await;
            Progress::Checked(match checked {
                Ok(Ok(checked)) => checked,
                Ok(Err(error)) => Checked::Refused(with_causes(error.as_ref())),
                Err(_) => {
                    Checked::Refused(format!("it took longer than {limit:?} to read and check"))
                }
            })
        });
    }

    /// Looks out for the Envoy of this launch.
    fn await_live(&mut self, admin: Admin, launch: &Launch) {
        let epoch = launch.restart_epoch();
        self.deadline = Some(clock::after(self.limits.live));
        self.calls = JoinSet::new();
        self.calls.spawn(async move {
            check::live_at(admin, epoch).await;
            Progress::Live
        });
    }

    /// Gives up what is under way.
    fn drop_calls(&mut self) {
        self.calls = JoinSet::new();
        self.deadline = None;
    }

    /// Waits for what is under way. May be dropped and called again.
    pub(super) async fn progress(&mut self) -> Result<Progress, process::Error> {
        let deadline = self.deadline;
        tokio::select! {
            ended = instance::ended(&mut self.successor) => ended.map(Progress::SuccessorEnded),
            ended = instance::ended(&mut self.parent) => ended.map(Progress::ParentEnded),
            Some(call) = self.calls.join_next() => Ok(call.unwrap_or_else(|error| {
                // The wait for a successor has its deadline.
                Progress::Checked(Checked::Refused(error.to_string()))
            })),
            () = reached(deadline) => {
                self.deadline = None;
                Ok(Progress::Deadline)
            }
        }
    }

    /// The successor serves from now on, and ends its parent in time.
    fn successor_serves(&mut self) {
        let now = Instant::now();
        self.serves_since = Some(now);
        self.deadline = Some(clock::later(now, self.stay()));
    }

    /// How long a parent is left alone.
    fn stay(&self) -> Duration {
        OVERDUE.saturating_add(self.limits.parent_shutdown)
    }

    /// Whether a parent that has ended did so before its successor ended it.
    fn is_early(&self) -> bool {
        let shutdown = Duration::from_secs(self.limits.parent_shutdown.as_secs());
        let serves = self.serves_since.map(|since| since.elapsed());
        serves.is_some_and(|serves| serves.saturating_add(NOTICED) < shutdown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_time_of_a_parent_runs_from_when_its_successor_serves() {
        let second = Duration::from_secs(1);
        let limits = Limits {
            parent_shutdown: second * 60,
            live: second,
            check: second,
        };
        let mut hot_restart = HotRestart::new(Some(limits), Arc::new(|_| Err("nothing".into())));
        assert!(!hot_restart.is_early(), "there is no successor");
        tokio::time::advance(second * 100).await;
        hot_restart.successor_serves();
        assert_eq!(hot_restart.deadline, Some(Instant::now() + second * 70));
        assert!(hot_restart.is_early());
        tokio::time::advance(second * 58).await;
        assert!(hot_restart.is_early());
        tokio::time::advance(second).await;
        assert!(
            !hot_restart.is_early(),
            "a second may have passed unnoticed"
        );
    }
}
