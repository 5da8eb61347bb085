//! Replaces the current Envoy while it serves, by Envoy's hot restart.
//!
//! On request, the inputs are read again. If they have changed, a successor starts next to the current Envoy; once
//! it is live, the previous Envoy is its parent and finishes its requests. [`machine`] decides; [`HotRestart`]
//! carries it out, and owns successor, parent and the running check. The supervisor owns the current Envoy. Each
//! step is logged, counted and published. [`watch`] orders restarts.

pub mod machine;
pub mod watch;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::OptionFuture;
use http::{Method as HttpMethod, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::admin::Admin;
use super::command::Mode;
use super::handle::{Method, Outcome, Restart};
use super::instance::{self, Ended, Instance};
use super::launch::{BaseId, Launch, Prepared, can_share};
use super::machine as life;
use super::supervisor::Current;
use crate::clock::{self, Clock};
use crate::duration::rounded;
use crate::lifecycle::{BoxError, with_causes};
use crate::metrics::{Counters, Registry};
use crate::problem::{Problem, codes};
use machine::{Action, Event, Machine, Phase};

/// How long it may take to notice that a successor serves, on a machine that is busy.
const NOTICED: Duration = Duration::from_secs(1);

/// How much longer than it should a parent may stay.
const OVERDUE: Duration = Duration::from_secs(10);

/// How long a parent may take to end after its successor has ended as it was asked to.
const FOLLOWS: Duration = Duration::from_secs(1);

/// How often a successor is asked whether it serves.
const LIVE_PERIOD: Duration = Duration::from_millis(25);

/// Returns the inputs of an epoch: for the first one the inputs of the agent's start, otherwise the current inputs. May
/// block.
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

/// What a successor in another container continues.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Lent {
    pub base_id: u32,
    /// Of the successor.
    pub restart_epoch: u32,
}

/// Something under way has come to an end.
#[derive(Debug)]
pub(super) enum Progress {
    /// The check found what serves already.
    Unchanged,
    /// What the check has read cannot be used, for this reason.
    Refused(String),
    /// The check found something to start.
    Usable {
        /// Whether the Envoy that serves has answered at its admin port.
        is_live: bool,
        prepared: Arc<Prepared>,
    },
    Live,
    Deadline,
    SuccessorEnded(Ended),
    ParentEnded(Ended),
}

/// All about hot restarts but the Envoy that serves.
pub(super) struct HotRestart {
    is_on: bool,
    limits: Limits,
    prepare: Prepare,
    admin: Admin,
    /// Where Envoy writes its base id.
    directory: PathBuf,
    machine: Machine,
    /// Why a restart was last wanted.
    reason: &'static str,
    pub(super) last: Option<Restart>,
    /// What has been found usable and is to be started.
    prepared: Option<Arc<Prepared>>,
    pub(super) successor: Option<Instance>,
    pub(super) parent: Option<Instance>,
    deadline: Option<Instant>,
    /// When the successor of the parent began to serve, and to count the parent's time.
    serves_since: Option<Instant>,
    calls: JoinSet<Progress>,
    results: Counters<1>,
}

impl HotRestart {
    /// With `limits`, hot restart is on.
    pub(super) fn new(
        limits: Option<Limits>,
        directory: PathBuf,
        admin: Admin,
        prepare: Prepare,
        metrics: &Registry,
    ) -> Self {
        Self {
            is_on: limits.is_some(),
            limits: limits.unwrap_or_default(),
            prepare,
            admin,
            directory,
            machine: Machine::new(limits.is_some() && can_share()),
            reason: "",
            last: None,
            prepared: None,
            successor: None,
            parent: None,
            deadline: None,
            serves_since: None,
            calls: JoinSet::new(),
            results: metrics.counters(
                "istio_agent_envoy_hot_restarts_total",
                "Restarts of an Envoy that serves, by how they went.",
                &["result"],
            ),
        }
    }

    /// Lets a successor in another container start, until it is reclaimed or has taken over.
    pub(super) fn lend(&mut self, current: &mut Current) -> Result<Lent, String> {
        let launch = current.launch.as_ref();
        let lent = launch.and_then(|launch| {
            Some(Lent {
                base_id: launch.base_id.as_ref()?.get()?,
                restart_epoch: launch.restart_epoch() + 1,
            })
        });
        let lent = lent.ok_or("Envoy runs without hot restart")?;
        self.apply(Event::Lend, current);
        match self.machine.phase() {
            Phase::Lent => Ok(lent),
            Phase::Idle if current.machine.phase() != life::Phase::Running => {
                Err("Envoy does not serve".to_owned())
            }
            Phase::Idle => Err("an earlier successor of Envoy has failed, and Envoy must be restarted before the next".to_owned()),
            _ => Err("Envoy is being replaced, or its parent has not ended".to_owned()),
        }
    }

    /// The successor in another container has exited.
    pub(super) fn reclaim(&mut self, current: &mut Current) {
        if self.machine.phase() != Phase::Lent {
            return;
        }
        let base_id = current.launch.as_ref().and_then(|it| it.base_id.as_ref());
        let cleared = base_id.map(|base_id| base_id.clear_mark());
        if let Some(Err(error)) = &cleared {
            tracing::warn!(%error, "no handover is possible until Envoy restarts: its shared memory cannot be written");
        }
        let is_clear = matches!(cleared, Some(Ok(())));
        self.apply(Event::Reclaim { is_clear }, current);
    }

    /// The parent in another container has ended.
    pub(super) fn parent_ended(&mut self, current: &mut Current) -> Option<life::Event> {
        let launch = current.launch.as_ref();
        if let Some(base_id) = launch.and_then(|launch| launch.base_id.as_ref()) {
            base_id.set_lent(false);
        }
        let early = self.is_early();
        self.apply(Event::ParentExited { early }, current)
    }

    pub(super) fn want(&mut self, reason: &'static str, current: &mut Current) {
        if !self.is_on {
            tracing::warn!("not restarting Envoy ({reason}): hot restart is not configured");
            return;
        }
        if self.machine.phase() != Phase::Idle {
            tracing::info!("Envoy will be restarted ({reason}) after the current change");
        }
        self.reason = reason;
        self.apply(Event::Wanted, current);
    }

    /// Tells the machine what an event in the life of the Envoy that serves means for a restart.
    pub(super) fn after(&mut self, event: life::Event, current: &mut Current) {
        let phase = current.machine.phase();
        let event = match event {
            life::Event::Live if phase == life::Phase::Running => Event::Ready {
                shares_memory: self.serves(current),
            },
            life::Event::StopRequested(_) => {
                self.abandon("Envoy stops");
                Event::Stop
            }
            _ if phase != life::Phase::Running => Event::Unready,
            _ => return,
        };
        self.apply(event, current);
    }

    /// Concludes a full restart whose Envoy is live. Returns whether it can share memory with a successor.
    fn serves(&mut self, current: &Current) -> bool {
        let launch = current.launch.as_ref();
        let base_id = launch.and_then(|launch| launch.base_id.as_ref()?.get());
        if self.is_on && base_id.is_none() {
            tracing::warn!("no shared memory, using full restarts");
        }
        if self.machine.phase() == Phase::Leaving && self.serves_since.is_none() {
            self.successor_serves();
        }
        let method = self.last.as_ref().and_then(|last| last.method);
        if method == Some(Method::Full) {
            self.conclude(Outcome::Succeeded, None);
        }
        base_id.is_some()
    }

    /// The Envoy that serves has ended.
    pub(super) fn serving_ended(&mut self, current: &mut Current) {
        // In phase Idle it ends for a full restart, which goes on.
        if self.machine.phase() != Phase::Idle {
            self.abandon("the current Envoy has exited");
        }
        self.apply(Event::ServingExited, current);
    }

    /// Gives up the restart under way. A check goes on, to no effect.
    fn abandon(&mut self, why: &str) {
        self.prepared = None;
        self.conclude(Outcome::Abandoned, Some(why.to_owned()));
    }

    /// Something under way has come to an end. Returns what that means for the Envoy that serves.
    pub(super) async fn progressed(
        &mut self,
        progress: Progress,
        current: &mut Current,
    ) -> Option<life::Event> {
        let event = match progress {
            Progress::Unchanged => {
                self.conclude(Outcome::Unchanged, None);
                Event::NothingToStart
            }
            Progress::Refused(problem) => {
                self.conclude(Outcome::Refused, Some(problem));
                Event::NothingToStart
            }
            Progress::Usable { is_live, prepared } => {
                if current.machine.phase() == life::Phase::Running {
                    self.prepared = Some(prepared);
                } else {
                    self.abandon("the current Envoy drains or has exited");
                }
                Event::Usable { is_live }
            }
            Progress::Live => Event::Live,
            Progress::Deadline => {
                if self.successor.is_some() {
                    let limit = rounded(self.limits.live);
                    let problem = format!("the new Envoy did not serve within {limit}");
                    self.conclude(Outcome::Failed, Some(problem));
                }
                Event::Deadline
            }
            Progress::SuccessorEnded(ended) => {
                self.drop_calls();
                let reason = reason(self.successor.take()).await;
                let problem = format!("the new Envoy exited before it served ({ended}): {reason}");
                self.conclude(Outcome::Failed, Some(problem));
                Event::SuccessorExited
            }
            Progress::ParentEnded(ended) => {
                self.deadline = None;
                let early = self.is_early();
                let parent = self.parent.take();
                let epoch = parent.as_ref().map_or(0, |parent| parent.epoch);
                reason(parent).await;
                tracing::info!("Envoy epoch {epoch} has exited: {ended}");
                Event::ParentExited { early }
            }
        };
        self.apply(event, current)
    }

    /// Has the machine decide and does as it says. Returns what it wants of the Envoy that serves.
    fn apply(&mut self, event: Event, current: &mut Current) -> Option<life::Event> {
        match self.machine.apply(event) {
            Action::Nothing => {}
            Action::Check => self.check(current),
            Action::Start => {
                if let Err(error) = self.start_successor(current) {
                    self.conclude(Outcome::Failed, Some(error.to_string()));
                    return self.apply(Event::SuccessorExited, current);
                }
            }
            Action::KillSuccessor => kill(self.successor.as_ref()),
            Action::KillParent => kill(self.parent.as_ref()),
            Action::Promote => return self.promote(current),
            Action::Replace(end_by) => {
                tracing::warn!("full restart of Envoy: it stops before the next Envoy starts");
                self.begin_restart(Method::Full);
                return Some(life::Event::Replace(end_by));
            }
        }
        None
    }

    fn start_successor(&mut self, current: &mut Current) -> Result<(), Problem> {
        let prepared = self.prepared.take();
        let (Some(prepared), Some(serving)) = (prepared, &current.launch) else {
            return Ok(());
        };
        let launch = serving.successor(prepared, self.limits.parent_shutdown);
        let epoch = current.count;
        tracing::info!("starting Envoy epoch {epoch}, which takes over the sockets (hot restart)");
        let successor = current.spawn(launch)?;
        let (admin, restart_epoch) = (self.admin, successor.launch.restart_epoch());
        self.drop_calls();
        self.deadline = Some(clock::after(self.limits.live));
        self.calls.spawn(async move {
            until_serves(admin, restart_epoch).await;
            Progress::Live
        });
        self.successor = Some(successor);
        self.begin_restart(Method::Hot);
        Ok(())
    }

    /// The launch of an Envoy that takes over from none, with a base id where there can be one.
    pub(super) fn next_launch(&mut self, current: &mut Current) -> Result<Launch, BoxError> {
        let last = current.launch.take().map(|launch| launch.prepared);
        // What was found usable and not started beside another is started now.
        let prepared = match self.prepared.take().or(last) {
            Some(prepared) => prepared,
            None => (self.prepare)(0)?.into(),
        };
        if let Some(lent) = prepared.continues.filter(|_| current.count == 0) {
            self.machine.begin_with_parent();
            let file = self.directory.join("envoy-base-id");
            let base_id = BaseId::adopted(file, lent.base_id)?;
            let mode = Mode::Next {
                base_id: lent.base_id,
                epoch: lent.restart_epoch,
                parent_shutdown: self.limits.parent_shutdown,
            };
            return Ok(Launch {
                prepared,
                base_id: Some(Arc::new(base_id)),
                mode,
            });
        }
        let base_id = self.machine.can_share.then(|| {
            let file = format!("envoy-base-id{}", current.count);
            let user = prepared.command.user;
            Arc::new(BaseId::new(self.directory.join(file), user))
        });
        let mode = base_id.as_ref().map_or(Mode::Alone, |base_id| Mode::First {
            base_id_file: base_id.file.clone(),
            parent_shutdown: self.limits.parent_shutdown,
        });
        Ok(Launch {
            prepared,
            base_id,
            mode,
        })
    }

    /// The successor serves; the Envoy before is its parent.
    fn promote(&mut self, current: &mut Current) -> Option<life::Event> {
        self.drop_calls();
        let (successor, parent) = (self.successor.take()?, current.instance.take()?);
        self.successor_serves();
        let stay = rounded(self.stay());
        let (epoch, parent_epoch) = (successor.epoch, parent.epoch);
        self.parent = Some(parent);
        current.set(successor);
        tracing::info!("Envoy epoch {epoch} is live; epoch {parent_epoch} exits within {stay}");
        self.conclude(Outcome::Succeeded, None);
        let is_drained = current.machine.is_drained();
        is_drained.then_some(life::Event::DrainOrdered)
    }

    /// Ends the Envoys that are left when none is to serve any more.
    pub(super) async fn end(&mut self, limit: Duration) {
        self.drop_calls();
        if let Some(successor) = self.successor.take() {
            successor.end(limit).await;
        }
        if let Some(mut parent) = self.parent.take() {
            // Its successor has ended it.
            let ended = tokio::time::timeout(FOLLOWS, parent.ended()).await;
            if ended.is_err() {
                parent.end(limit).await;
            }
        }
    }

    /// A restart goes about it in this way. One that was not wanted begins here.
    fn begin_restart(&mut self, method: Method) {
        let last = self.last.take().filter(Restart::is_under_way);
        let now = Clock::system().now();
        let mut restart =
            last.unwrap_or_else(|| Restart::begun("the previous Envoy exited too early", now));
        restart.method = Some(method);
        self.last = Some(restart);
    }

    /// Ends the restart under way, if there is one.
    fn conclude(&mut self, outcome: Outcome, problem: Option<String>) {
        let last = self.last.as_mut();
        let Some(restart) = last.filter(|restart| restart.is_under_way()) else {
            return;
        };
        let why = problem.as_deref().unwrap_or_default();
        let result = match outcome {
            Outcome::UnderWay => return,
            Outcome::Succeeded if restart.method == Some(Method::Hot) => "hot",
            Outcome::Succeeded => "full",
            Outcome::Unchanged => {
                tracing::info!("bootstrap unchanged, Envoy keeps running");
                "unchanged"
            }
            Outcome::Refused => {
                let subject = "hot restart rejected";
                let problem = Problem::new(codes::HOT_RESTART_REFUSED, subject, why);
                tracing::error!("{problem}");
                "refused"
            }
            Outcome::Failed => {
                let problem = Problem::new(codes::HOT_RESTART_FAILED, "hot restart failed", why);
                tracing::error!("{problem}");
                "failed"
            }
            Outcome::Abandoned => {
                tracing::info!("hot restart abandoned: {why}");
                "abandoned"
            }
        };
        restart.outcome = outcome;
        restart.problem = problem;
        self.results.with([result]).inc();
    }

    /// Checks what there is to start beside the Envoy that serves.
    fn check(&mut self, current: &Current) {
        let reason = self.reason;
        tracing::info!("validating new Envoy inputs ({reason})");
        self.last = Some(Restart::begun(reason, Clock::system().now()));
        let limit = self.limits.check;
        let serving = current.launch.clone();
        let check = check(self.prepare.clone(), current.count, serving, self.admin);
        self.drop_calls();
        self.calls.spawn(async move {
            let checked = tokio::time::timeout(limit, check).await;
            let problem = match checked {
                Ok(Ok(checked)) => return checked,
                Ok(Err(error)) => with_causes(error.as_ref()),
                Err(_) => format!("not validated within {}", rounded(limit)),
            };
            Progress::Refused(problem)
        });
    }

    /// Gives up what is under way.
    fn drop_calls(&mut self) {
        self.calls = JoinSet::new();
        self.deadline = None;
    }

    /// Waits for what is under way. May be dropped and called again.
    pub(super) async fn progress(&mut self) -> io::Result<Progress> {
        let deadline = OptionFuture::from(self.deadline.map(sleep_until));
        tokio::select! {
            ended = instance::ended(&mut self.successor) => ended.map(Progress::SuccessorEnded),
            ended = instance::ended(&mut self.parent) => ended.map(Progress::ParentEnded),
            Some(call) = self.calls.join_next() => Ok(call.unwrap_or_else(|error| {
                // The wait for a successor has its deadline.
                Progress::Refused(error.to_string())
            })),
            Some(()) = deadline => {
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
    pub(super) fn stay(&self) -> Duration {
        OVERDUE.saturating_add(self.limits.parent_shutdown)
    }

    /// Whether a parent that has ended did so before its successor ended it.
    fn is_early(&self) -> bool {
        let shutdown = Duration::from_secs(self.limits.parent_shutdown.as_secs());
        let serves = self.serves_since.map(|since| since.elapsed());
        serves.is_some_and(|serves| serves.saturating_add(NOTICED) < shutdown)
    }
}

/// Validates the inputs of this epoch: reads them outside the agent's thread, has the new binary check them, and
/// asks the current Envoy for its state.
async fn check(
    prepare: Prepare,
    epoch: u32,
    serving: Option<Launch>,
    admin: Admin,
) -> Result<Progress, BoxError> {
    let prepared = tokio::task::spawn_blocking(move || prepare(epoch)).await??;
    let serving = serving.as_ref();
    if serving.is_some_and(|launch| launch.prepared.digest == prepared.digest) {
        return Ok(Progress::Unchanged);
    }
    let prepared = Arc::new(prepared);
    validate(Arc::clone(&prepared), epoch).await?;
    let answer = admin.request(HttpMethod::GET, "/server_info").await;
    let found = answer.ok().as_ref().and_then(serves);
    let is_live = found.is_some() && found == serving.map(Launch::restart_epoch);
    Ok(Progress::Usable { is_live, prepared })
}

/// Has Envoy read what it would start from.
pub(crate) async fn validate(prepared: Arc<Prepared>, epoch: u32) -> Result<(), BoxError> {
    let launch = Launch {
        prepared,
        base_id: None,
        mode: Mode::Validate,
    };
    let mut envoy = Instance::start(launch, epoch)?;
    let ended = envoy.ended().await?;
    let reason = envoy.output.reason().await;
    match ended {
        Ended::Code(0) => Ok(()),
        ended => Err(format!("Envoy rejected the bootstrap ({ended}): {reason}").into()),
    }
}

/// Waits until the Envoy of this restart epoch serves.
pub(super) async fn until_serves(admin: Admin, restart_epoch: u32) {
    let is_live = |answer: &Response<Bytes>| serves(answer) == Some(restart_epoch);
    admin.until("/server_info", LIVE_PERIOD, is_live).await;
}

/// The restart epoch of an Envoy that serves.
fn serves(info: &Response<Bytes>) -> Option<u32> {
    let info: Value = serde_json::from_slice(info.body()).ok()?;
    // One whose health check was failed on purpose serves on.
    let serves = ["LIVE", "DRAINING"].contains(&info.get("state")?.as_str()?);
    let epoch = info.pointer("/command_line_options/restart_epoch")?;
    u32::try_from(epoch.as_u64()?).ok().filter(|_| serves)
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
        instance.kill();
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
        let admin = Admin::new(std::net::Ipv4Addr::LOCALHOST.into(), 1, second);
        let mut hot_restart = HotRestart::new(
            Some(limits),
            PathBuf::new(),
            admin,
            Arc::new(|_| Err("nothing".into())),
            &Registry::default(),
        );
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

    #[test]
    fn an_envoy_tells_its_restart_epoch_once_it_serves() {
        let info =
            |state, epoch| format!(r#"{{"state":"{state}","command_line_options":{{{epoch}}}}}"#);
        for (info, expected) in [
            (info("LIVE", r#""restart_epoch":3"#), Some(3)),
            (info("DRAINING", r#""restart_epoch":0"#), Some(0)),
            (info("PRE_INITIALIZING", r#""restart_epoch":0"#), None),
            (info("LIVE", ""), None),
            (info("LIVE", r#""restart_epoch":-1"#), None),
            (String::new(), None),
        ] {
            let answer = Response::new(Bytes::from(info.clone()));
            assert_eq!(serves(&answer), expected, "{info}");
        }
    }
}
