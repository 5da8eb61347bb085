//! Carries out what the machine of hot restarts decides, as a part of the supervisor.
//!
//! Each step is logged, counted and published here.

use std::sync::Arc;
use std::time::Duration;

use super::Progress;
use super::base_id::BaseId;
use super::check::Checked;
use super::machine::{Action, Event, Phase, Verdict};
use crate::envoy::Error;
use crate::envoy::admin::DrainCall;
use crate::envoy::command::Mode;
use crate::envoy::handle::{Method, Outcome, Restart};
use crate::envoy::instance::Instance;
use crate::envoy::launch::{Launch, Prepared};
use crate::envoy::machine as life;
use crate::envoy::supervisor::Supervisor;
use crate::lifecycle::with_causes;

/// How long a parent may take to end after its successor has ended as it was asked to.
const FOLLOWS: Duration = Duration::from_secs(1);

impl Supervisor {
    pub(in crate::envoy) fn want_restart(&mut self, reason: &'static str) {
        if !self.hot_restart.is_on {
            tracing::warn!("not restarting Envoy ({reason}): hot restart is not configured");
            return;
        }
        if self.hot_restart.machine.phase() != Phase::Idle {
            tracing::info!("Envoy is to be restarted ({reason}) after the change under way");
        }
        self.hot_restart.reason = reason;
        self.apply_hot_restart(Event::Wanted);
    }

    /// Tells the machine what an event in the life of the Envoy that serves means for a restart.
    pub(in crate::envoy) fn after(&mut self, event: life::Event) {
        let phase = self.machine.phase();
        let event = match event {
            life::Event::Live if phase == life::Phase::Running => {
                self.serves();
                Event::Ready
            }
            life::Event::StopRequested(_) => {
                self.abandon("Envoy is to end");
                // A full restart has got further than that.
                self.conclude(Outcome::Abandoned, Some("Envoy is to end".to_owned()));
                Event::Stop
            }
            _ if phase != life::Phase::Running => Event::Unready,
            _ => return,
        };
        self.apply_hot_restart(event);
    }

    /// An Envoy that was started after another has ended serves.
    fn serves(&mut self) {
        let hot = &mut self.hot_restart;
        let launch = self.current.launch.as_ref();
        let base_id = launch.and_then(|launch| launch.base_id.as_ref()?.get());
        if hot.is_on && base_id.is_none() {
            tracing::warn!("Envoys cannot share memory here: a restart will be a full one");
            hot.machine.apply(Event::Unshared);
        }
        if hot.machine.phase() == Phase::Leaving {
            hot.successor_serves();
        }
        let method = hot.last.as_ref().and_then(|last| last.method);
        if method == Some(Method::Full) {
            self.conclude(Outcome::Succeeded, None);
        }
    }

    /// Gives up what is checked, or started beside the Envoy that serves.
    pub(in crate::envoy) fn abandon(&mut self, why: &str) {
        let hot = &mut self.hot_restart;
        match hot.machine.phase() {
            Phase::Checking => hot.drop_calls(),
            Phase::Starting | Phase::Failing => {}
            Phase::Idle | Phase::Leaving | Phase::Clearing => return,
        }
        hot.prepared = None;
        self.conclude(Outcome::Abandoned, Some(why.to_owned()));
    }

    /// Something under way has come to an end. Returns what that means for the Envoy that serves.
    pub(in crate::envoy) async fn progressed(&mut self, progress: Progress) -> Option<life::Event> {
        let hot = &mut self.hot_restart;
        let event = match progress {
            Progress::Checked(checked) => Event::Checked(self.checked(checked)),
            Progress::Live => Event::Live,
            Progress::Deadline => {
                if hot.successor.is_some() {
                    let problem = format!("it did not serve within {:?}", hot.limits.live);
                    self.conclude(Outcome::Failed, Some(problem));
                }
                Event::Deadline
            }
            Progress::SuccessorEnded(ended) => {
                hot.drop_calls();
                let reason = reason(hot.successor.take()).await;
                let problem = format!("it ended before it served ({ended}): {reason}");
                self.conclude(Outcome::Failed, Some(problem));
                Event::SuccessorExited
            }
            Progress::ParentEnded(ended) => {
                hot.deadline = None;
                let early = hot.is_early();
                let parent = hot.parent.take();
                let epoch = parent.as_ref().map_or(0, |parent| parent.epoch);
                reason(parent).await;
                tracing::info!("Envoy epoch {epoch} has left: {ended}");
                Event::ParentExited { early }
            }
        };
        self.apply_hot_restart(event)
    }

    fn checked(&mut self, checked: Checked) -> Verdict {
        match checked {
            Checked::Unchanged => {
                self.conclude(Outcome::Unchanged, None);
                Verdict::Unchanged
            }
            Checked::Refused(problem) => {
                self.conclude(Outcome::Refused, Some(problem));
                Verdict::Refused
            }
            Checked::Usable { is_live, prepared } => {
                if self.machine.phase() == life::Phase::Running {
                    self.hot_restart.prepared = Some(prepared);
                } else {
                    self.abandon("the Envoy that serves drains or has ended");
                }
                Verdict::Usable { is_live }
            }
        }
    }

    /// Has the machine decide and does as it says. Returns what it wants of the Envoy that serves.
    pub(in crate::envoy) fn apply_hot_restart(&mut self, event: Event) -> Option<life::Event> {
        match self.hot_restart.machine.apply(event) {
            Action::Nothing => {}
            Action::Relaunch => self.relaunch(),
            Action::Check => self.check(),
            Action::Start => {
                if let Err(error) = self.start_successor() {
                    self.conclude(Outcome::Failed, Some(with_causes(&error)));
                    return self.apply_hot_restart(Event::SuccessorExited);
                }
            }
            Action::KillSuccessor => kill(self.hot_restart.successor.as_ref()),
            Action::KillParent => kill(self.hot_restart.parent.as_ref()),
            Action::Promote => self.promote(),
            Action::Replace(end_by) => {
                tracing::warn!(
                    "Envoy is replaced by a full restart: it ends, then the next starts"
                );
                self.begin_restart(Method::Full);
                return Some(life::Event::Replace(end_by));
            }
        }
        None
    }

    fn check(&mut self) {
        let reason = self.hot_restart.reason;
        tracing::info!("checking what Envoy would start from now ({reason})");
        self.hot_restart.last = Some(Restart::begun(reason, self.clock.now()));
        let serving = self.current.launch.clone();
        self.hot_restart.check(self.count, serving, self.admin);
    }

    fn start_successor(&mut self) -> Result<(), Error> {
        let parent_shutdown = self.hot_restart.limits.parent_shutdown;
        let prepared = self.hot_restart.prepared.take();
        let (Some(prepared), Some(serving)) = (prepared, &self.current.launch) else {
            return Ok(());
        };
        let launch = serving.successor(prepared, parent_shutdown);
        let epoch = self.count;
        tracing::info!("starting Envoy epoch {epoch}, which takes the sockets over (hot restart)");
        let successor = self.spawn(launch)?;
        self.hot_restart.await_live(self.admin, &successor.launch);
        self.hot_restart.successor = Some(successor);
        self.begin_restart(Method::Hot);
        Ok(())
    }

    /// The launch of an Envoy that takes over from none, with a base id where there can be one.
    pub(in crate::envoy) fn first_launch(&self, prepared: Arc<Prepared>) -> Launch {
        let base_id = self.hot_restart.machine.can_share.then(|| {
            let file = format!("envoy-base-id{}", self.count);
            let user = self.config.command.user;
            Arc::new(BaseId::new(self.config.directory.join(file), user))
        });
        let mode = base_id.as_ref().map_or(Mode::Alone, |base_id| Mode::First {
            base_id_file: base_id.file().to_owned(),
            parent_shutdown: self.hot_restart.limits.parent_shutdown,
        });
        Launch {
            prepared,
            base_id,
            mode,
        }
    }

    /// The successor serves; the Envoy before is its parent.
    fn promote(&mut self) {
        let hot = &mut self.hot_restart;
        hot.drop_calls();
        let (successor, parent) = (hot.successor.take(), self.current.instance.take());
        let (Some(successor), Some(parent)) = (successor, parent) else {
            return;
        };
        hot.successor_serves();
        let stay = hot.stay();
        let (epoch, parent_epoch) = (successor.epoch, parent.epoch);
        hot.parent = Some(parent);
        self.set_current(successor);
        tracing::info!("Envoy epoch {epoch} serves; epoch {parent_epoch} leaves within {stay:?}");
        self.conclude(Outcome::Succeeded, None);
        if self.machine.is_drained() {
            self.call_drain(DrainCall::Stay);
        }
    }

    /// The Envoy that serves has ended, and is started again as it was.
    fn relaunch(&mut self) {
        let hot = &mut self.hot_restart;
        // Until it serves; from then on the parent's time begins anew.
        hot.deadline = Some(crate::clock::after(
            hot.limits.live.saturating_add(hot.stay()),
        ));
        hot.serves_since = None;
        hot.is_relaunch = true;
        tracing::warn!("the Envoy before still lives, so its successor starts again at once");
    }

    /// Ends the Envoys that are left when none is to serve any more.
    pub(in crate::envoy) async fn end_others(&mut self) {
        let limit = self.config.limits.kill;
        self.hot_restart.drop_calls();
        if let Some(successor) = self.hot_restart.successor.take() {
            successor.end(limit).await;
        }
        if let Some(mut parent) = self.hot_restart.parent.take() {
            // Its successor has ended it.
            let ended = tokio::time::timeout(FOLLOWS, parent.process.ended()).await;
            if ended.is_err() {
                parent.end(limit).await;
            }
        }
        self.publish_instances();
    }

    /// A restart goes about it in this way. One that was not wanted begins here.
    fn begin_restart(&mut self, method: Method) {
        let last = self.hot_restart.last.take().filter(Restart::is_under_way);
        let now = self.clock.now();
        let mut restart =
            last.unwrap_or_else(|| Restart::begun("the Envoy before died before its time", now));
        restart.method = Some(method);
        self.hot_restart.last = Some(restart);
    }

    /// Ends the restart under way, if there is one.
    fn conclude(&mut self, outcome: Outcome, problem: Option<String>) {
        let last = self.hot_restart.last.as_mut();
        let Some(restart) = last.filter(|restart| restart.is_under_way()) else {
            return;
        };
        let why = problem.as_deref().unwrap_or_default();
        let result = match outcome {
            Outcome::UnderWay => return,
            Outcome::Succeeded if restart.method == Some(Method::Hot) => "hot",
            Outcome::Succeeded => "full",
            Outcome::Unchanged => {
                tracing::info!("nothing has changed for Envoy, which goes on");
                "unchanged"
            }
            Outcome::Refused => {
                tracing::error!("Envoy is not restarted and serves on: {why}");
                "refused"
            }
            Outcome::Failed => {
                tracing::error!(
                    "the next Envoy has failed and the one before serves on: {why}; hot restart \
                     cannot be used until a full restart"
                );
                "failed"
            }
            Outcome::Abandoned => {
                tracing::info!("the restart of Envoy under way is given up: {why}");
                "abandoned"
            }
        };
        restart.outcome = outcome;
        restart.problem = problem;
        self.counters.hot_restarts.with([result]).inc();
    }
}

/// Why an Envoy has ended, once all of its standard error is copied.
async fn reason(instance: Option<Instance>) -> String {
    match instance {
        Some(mut instance) => instance.output.reason().await,
        None => String::new(),
    }
}

fn kill(instance: Option<&Instance>) {
    if let Some(instance) = instance {
        tracing::warn!("killing Envoy epoch {}", instance.epoch);
        instance.process.kill();
    }
}
