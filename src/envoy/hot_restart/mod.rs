//! Replaces the current Envoy while it serves, by Envoy's hot restart.
//!
//! On request, the inputs are read again. If they have changed, a successor starts next to the current Envoy; once
//! it is live, the previous Envoy is its parent and finishes its requests. [`machine`] decides; [`HotRestart`]
//! carries the decision out, and owns the successor, the parent and the running check. The supervisor owns the current
//! Envoy. Each step is logged, counted and published. [`watch`] orders restarts.

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
use super::machine::{Event as EnvoyEvent, Phase as EnvoyPhase};
use super::supervisor::Current;
use crate::clock;
use crate::duration::rounded;
use crate::lifecycle::{BoxError, with_causes};
use crate::metrics::{Counters, Registry};
use crate::problem::{Problem, codes};
use machine::{Action, Event, Machine, Phase};

/// The longest delay until the agent notices that a successor is live, on a busy machine.
const DETECTION_DELAY: Duration = Duration::from_secs(1);

/// The time between the end of its parent shutdown time and the kill of a parent.
const PARENT_GRACE: Duration = Duration::from_secs(10);

/// The limit for the exit of a parent after its successor has exited on request.
const PARENT_EXIT: Duration = Duration::from_secs(1);

/// The period of requests to a successor until it is live.
const LIVE_PERIOD: Duration = Duration::from_millis(25);

/// Returns the inputs of an epoch: for the first one the inputs of the agent's start, otherwise the current inputs. May
/// block.
pub type Prepare = Arc<dyn Fn(u32) -> Result<Prepared, BoxError> + Send + Sync>;

/// Limits for the parts of a hot restart.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// The parent shutdown time; longer than the drain time. Whole seconds are used.
    pub parent_shutdown: Duration,
    /// The time until a successor is live; longer than its own waits for configuration.
    pub live: Duration,
    /// The time for reading the inputs and for their validation by Envoy.
    pub check: Duration,
}

/// The base id and restart epoch with which a successor in another container takes over.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Lent {
    pub base_id: u32,
    /// The restart epoch of the successor.
    pub restart_epoch: u32,
}

/// The result of a running call, wait or process.
#[derive(Debug)]
pub(super) enum Progress {
    /// The current Envoy already runs with the inputs.
    Unchanged,
    /// The inputs cannot be used, for this reason.
    Refused(String),
    /// The inputs have changed and are valid.
    Usable {
        /// True if the current Envoy has answered at its admin port.
        is_live: bool,
        prepared: Arc<Prepared>,
    },
    /// The successor is live.
    Live,
    Deadline,
    SuccessorEnded(Ended),
    ParentEnded(Ended),
}

/// The state of hot restarts. The supervisor owns the current Envoy.
pub(super) struct HotRestart {
    is_on: bool,
    limits: Limits,
    prepare: Prepare,
    admin: Admin,
    /// The directory of the base id files.
    directory: PathBuf,
    machine: Machine,
    /// The reason of the last request.
    reason: &'static str,
    pub(super) last: Option<Restart>,
    /// Valid inputs that have not been started yet.
    prepared: Option<Arc<Prepared>>,
    pub(super) successor: Option<Instance>,
    pub(super) parent: Option<Instance>,
    deadline: Option<Instant>,
    /// The time when the current Envoy became live and began to count the time of its parent.
    live_since: Option<Instant>,
    calls: JoinSet<Progress>,
    results: Counters<1>,
}

impl HotRestart {
    /// Switches hot restart on if there are `limits`.
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
            live_since: None,
            calls: JoinSet::new(),
            results: metrics.counters(
                "istio_agent_envoy_hot_restarts_total",
                "Restarts of an Envoy that serves, by how they went.",
                &["result"],
            ),
        }
    }

    /// Lets a successor in another container start. [`HotRestart::reclaim`] ends this if it does not take over.
    pub(super) fn lend(&mut self, current: &mut Current) -> Result<Lent, String> {
        let launch = current.launch.as_ref();
        let lent = launch
            .and_then(Launch::lend)
            .ok_or("Envoy runs without hot restart")?;
        self.apply(Event::Lend, current);
        let problem = match self.machine.phase() {
            Phase::Lent => return Ok(lent),
            Phase::Idle if current.machine.phase() != EnvoyPhase::Running => "Envoy does not serve",
            Phase::Idle => {
                "an earlier successor of Envoy has failed, and Envoy must be restarted before the next"
            }
            _ => "Envoy is being replaced, or its parent has not ended",
        };
        Err(problem.to_owned())
    }

    /// Allows restarts again after the successor in another container has exited.
    pub(super) fn reclaim(&mut self, current: &mut Current) {
        if self.machine.phase() != Phase::Lent {
            return;
        }
        let cleared = current.base_id().map(BaseId::clear_mark);
        if let Some(Err(error)) = &cleared {
            tracing::warn!(%error, "no handover is possible until Envoy restarts: its shared memory cannot be written");
        }
        let is_clear = matches!(cleared, Some(Ok(())));
        self.apply(Event::Reclaim { is_clear }, current);
    }

    /// Handles the exit of the parent in another container. Returns the event for the current Envoy.
    pub(super) fn handle_parent_exit(&mut self, current: &mut Current) -> Option<EnvoyEvent> {
        if let Some(base_id) = current.base_id() {
            base_id.set_lent(false);
        }
        let early = self.is_early();
        self.apply(Event::ParentExited { early }, current)
    }

    /// Requests a restart. It begins when no other one is running.
    pub(super) fn request(&mut self, reason: &'static str, current: &mut Current) {
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

    /// Tells the machine about an event of the current Envoy, which has already handled it.
    pub(super) fn observe(&mut self, event: EnvoyEvent, current: &mut Current) {
        let is_running = current.machine.phase() == EnvoyPhase::Running;
        let event = match event {
            EnvoyEvent::Live if is_running => Event::Ready {
                shares_memory: self.handle_live(current),
            },
            EnvoyEvent::StopRequested(_) => {
                self.abandon("Envoy stops");
                Event::Stop
            }
            _ if !is_running => Event::Unready,
            _ => return,
        };
        self.apply(event, current);
    }

    /// Concludes a full restart whose Envoy is live. Returns true if it can share memory with a successor.
    fn handle_live(&mut self, current: &Current) -> bool {
        let shares_memory = current.base_id().and_then(BaseId::get).is_some();
        if self.is_on && !shares_memory {
            tracing::warn!("no shared memory, using full restarts");
        }
        if self.machine.phase() == Phase::Leaving && self.live_since.is_none() {
            self.begin_parent_shutdown();
        }
        let last = self.last.as_ref();
        if last.is_some_and(|last| last.method == Some(Method::Full)) {
            self.conclude(Outcome::Succeeded, None);
        }
        shares_memory
    }

    /// Handles the exit of the current Envoy.
    pub(super) fn handle_current_exit(&mut self, current: &mut Current) {
        // In phase Idle the exit is part of a full restart, which continues.
        if self.machine.phase() != Phase::Idle {
            self.abandon("the current Envoy has exited");
        }
        self.apply(Event::ServingExited, current);
    }

    /// Gives up the current restart. A running check continues without effect.
    fn abandon(&mut self, why: &str) {
        self.prepared = None;
        self.conclude(Outcome::Abandoned, Some(why.to_owned()));
    }

    /// Handles what [`HotRestart::progress`] has returned. Returns the event for the current Envoy.
    pub(super) async fn handle_progress(
        &mut self,
        progress: Progress,
        current: &mut Current,
    ) -> Option<EnvoyEvent> {
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
                if current.machine.phase() == EnvoyPhase::Running {
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
                if let Some(mut successor) = self.successor.take() {
                    let reason = successor.output.reason().await;
                    let problem =
                        format!("the new Envoy exited before it served ({ended}): {reason}");
                    self.conclude(Outcome::Failed, Some(problem));
                }
                Event::SuccessorExited
            }
            Progress::ParentEnded(ended) => {
                self.deadline = None;
                let early = self.is_early();
                if let Some(mut parent) = self.parent.take() {
                    // Its last lines are forwarded before the exit is logged.
                    parent.output.last_lines().await;
                    tracing::info!("Envoy epoch {} has exited: {ended}", parent.epoch);
                }
                Event::ParentExited { early }
            }
        };
        self.apply(event, current)
    }

    /// Lets the machine decide and carries the decision out. Returns the event for the current Envoy.
    fn apply(&mut self, event: Event, current: &mut Current) -> Option<EnvoyEvent> {
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
                return Some(EnvoyEvent::Replace(end_by));
            }
        }
        None
    }

    fn start_successor(&mut self, current: &mut Current) -> Result<(), Problem> {
        let (Some(prepared), Some(parent)) = (self.prepared.take(), &current.launch) else {
            return Ok(());
        };
        let launch = parent.successor(prepared, self.limits.parent_shutdown);
        let epoch = current.count;
        tracing::info!("starting Envoy epoch {epoch}, which takes over the sockets (hot restart)");
        let successor = current.spawn(launch)?;
        let (admin, restart_epoch) = (self.admin, successor.launch.restart_epoch());
        self.drop_calls();
        self.deadline = Some(clock::after(self.limits.live));
        self.calls.spawn(async move {
            wait_until_live(admin, restart_epoch).await;
            Progress::Live
        });
        self.successor = Some(successor);
        self.begin_restart(Method::Hot);
        Ok(())
    }

    /// Returns the launch of an Envoy that is no successor of this agent's Envoys. It shares memory if possible.
    pub(super) fn next_launch(&mut self, current: &mut Current) -> Result<Launch, BoxError> {
        let last = current.launch.take().map(|launch| launch.prepared);
        // A full restart starts the inputs that were validated for it.
        let prepared = match self.prepared.take().or(last) {
            Some(prepared) => prepared,
            None => (self.prepare)(0)?.into(),
        };
        let parent_shutdown = self.limits.parent_shutdown;
        let mut base_id = None;
        let mode = if let Some(continues) = prepared.continues.filter(|_| current.count == 0) {
            self.machine.begin_with_parent();
            let file = self.directory.join("envoy-base-id");
            base_id = Some(BaseId::adopted(file, continues.base_id)?);
            Mode::Next {
                continues,
                parent_shutdown,
            }
        } else if self.machine.can_share {
            let file = format!("envoy-base-id{}", current.count);
            let first = BaseId::new(self.directory.join(file), prepared.command.user);
            Mode::First {
                base_id_file: base_id.insert(first).file.clone(),
                parent_shutdown,
            }
        } else {
            Mode::Alone
        };
        Ok(Launch {
            prepared,
            base_id: base_id.map(Arc::new),
            mode,
        })
    }

    /// Makes the successor the current Envoy and the previous one its parent.
    fn promote(&mut self, current: &mut Current) -> Option<EnvoyEvent> {
        self.drop_calls();
        let (successor, parent) = (self.successor.take()?, current.instance.take()?);
        self.begin_parent_shutdown();
        let limit = rounded(self.parent_limit());
        let (epoch, parent_epoch) = (successor.epoch, parent.epoch);
        self.parent = Some(parent);
        current.set(successor);
        tracing::info!("Envoy epoch {epoch} is live; epoch {parent_epoch} exits within {limit}");
        self.conclude(Outcome::Succeeded, None);
        let is_drained = current.machine.is_drained();
        is_drained.then_some(EnvoyEvent::DrainOrdered)
    }

    /// Ends successor and parent when the agent stops.
    pub(super) async fn end(&mut self, limit: Duration) {
        self.drop_calls();
        if let Some(successor) = self.successor.take() {
            successor.end(limit).await;
        }
        if let Some(mut parent) = self.parent.take()
            // Its successor, the last current Envoy, has ended it.
            && tokio::time::timeout(PARENT_EXIT, parent.ended()).await.is_err()
        {
            parent.end(limit).await;
        }
    }

    /// Sets the method of the current restart. One that was not requested begins here.
    fn begin_restart(&mut self, method: Method) {
        let requested = self.last.take().filter(Restart::is_under_way);
        let restart =
            requested.unwrap_or_else(|| Restart::begin("the previous Envoy exited too early"));
        self.last = Some(Restart {
            method: Some(method),
            ..restart
        });
    }

    /// Ends the current restart, if there is one.
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

    /// Begins to read and validate the inputs of a successor.
    fn check(&mut self, current: &Current) {
        tracing::info!("validating new Envoy inputs ({})", self.reason);
        self.last = Some(Restart::begin(self.reason));
        let limit = self.limits.check;
        let launch = current.launch.clone();
        let check = check(self.prepare.clone(), current.count, launch, self.admin);
        self.drop_calls();
        self.calls.spawn(async move {
            let problem = match tokio::time::timeout(limit, check).await {
                Ok(Ok(progress)) => return progress,
                Ok(Err(error)) => with_causes(error.as_ref()),
                Err(_) => format!("not validated within {}", rounded(limit)),
            };
            Progress::Refused(problem)
        });
    }

    /// Cancels the running call and the deadline.
    fn drop_calls(&mut self) {
        self.calls = JoinSet::new();
        self.deadline = None;
    }

    /// Waits for the next result for [`HotRestart::handle_progress`]. Cancel safe.
    pub(super) async fn progress(&mut self) -> io::Result<Progress> {
        let deadline = OptionFuture::from(self.deadline.map(sleep_until));
        tokio::select! {
            ended = instance::ended(&mut self.successor) => ended.map(Progress::SuccessorEnded),
            ended = instance::ended(&mut self.parent) => ended.map(Progress::ParentEnded),
            Some(call) = self.calls.join_next() => Ok(call.unwrap_or_else(|error| {
                // Only a check is refused; the wait for a successor ends with its deadline.
                Progress::Refused(error.to_string())
            })),
            Some(()) = deadline => {
                self.deadline = None;
                Ok(Progress::Deadline)
            }
        }
    }

    /// Starts the time of the parent, now that its successor is live.
    fn begin_parent_shutdown(&mut self) {
        let now = Instant::now();
        self.live_since = Some(now);
        self.deadline = Some(clock::later(now, self.parent_limit()));
    }

    /// Returns the time after which a parent is killed.
    pub(super) fn parent_limit(&self) -> Duration {
        PARENT_GRACE.saturating_add(self.limits.parent_shutdown)
    }

    /// Returns true if a parent that exits now has not been ended by its successor.
    fn is_early(&self) -> bool {
        let shutdown = Duration::from_secs(self.limits.parent_shutdown.as_secs());
        self.live_since
            .is_some_and(|since| since.elapsed().saturating_add(DETECTION_DELAY) < shutdown)
    }
}

/// Validates the inputs of this epoch: reads them on a blocking thread, has the new binary check them, and asks the
/// current Envoy for its state. `current` is the launch of that Envoy.
async fn check(
    prepare: Prepare,
    epoch: u32,
    current: Option<Launch>,
    admin: Admin,
) -> Result<Progress, BoxError> {
    let prepared = Arc::new(tokio::task::spawn_blocking(move || prepare(epoch)).await??);
    let current = current.as_ref();
    if current.is_some_and(|launch| launch.prepared.digest == prepared.digest) {
        return Ok(Progress::Unchanged);
    }
    validate(Arc::clone(&prepared), epoch).await?;
    let info = admin.request(HttpMethod::GET, "/server_info").await;
    let live_epoch = info.ok().as_ref().and_then(live_epoch);
    let is_live = live_epoch.is_some() && live_epoch == current.map(Launch::restart_epoch);
    Ok(Progress::Usable { is_live, prepared })
}

/// Fails if Envoy rejects the bootstrap.
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

/// Waits until the Envoy of this restart epoch is live.
pub(super) async fn wait_until_live(admin: Admin, restart_epoch: u32) {
    let is_live = |info: &Response<Bytes>| live_epoch(info) == Some(restart_epoch);
    admin.until("/server_info", LIVE_PERIOD, is_live).await;
}

/// Reads the restart epoch of a live Envoy from its `/server_info`.
fn live_epoch(info: &Response<Bytes>) -> Option<u32> {
    let info: Value = serde_json::from_slice(info.body()).ok()?;
    // DRAINING is the state after `/healthcheck/fail`; that Envoy still serves.
    let is_live = ["LIVE", "DRAINING"].contains(&info.get("state")?.as_str()?);
    let epoch = info.pointer("/command_line_options/restart_epoch")?;
    u32::try_from(epoch.as_u64()?).ok().filter(|_| is_live)
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
    async fn the_parent_shutdown_time_starts_when_the_successor_is_live() {
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
        hot_restart.begin_parent_shutdown();
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
            assert_eq!(live_epoch(&answer), expected, "{info}");
        }
    }
}
