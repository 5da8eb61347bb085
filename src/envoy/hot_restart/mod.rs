//! Replaces the current Envoy while it serves, by Envoy's hot restart.
//!
//! On request, the inputs are read again. If they have changed, a successor starts next to the current Envoy; once
//! it is live, the previous Envoy is its parent and finishes its requests. [`machine`] decides; [`HotRestart`]
//! carries the decision out, and owns the successor, the parent and the running check. The supervisor owns the current
//! Envoy, calls [`HotRestart`] after each event, and carries out each [`CurrentAction`]. Each step is logged, counted and
//! published. [`watch`] orders restarts.

pub mod machine;
pub mod watch;

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixDatagram;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep};

use super::admin::{Address, Admin};
use super::admin_socket;
use super::base_id::BaseId;
use super::command::{Mode, Takeover};
use super::handle::{Method, Outcome, Restart};
use super::instance::{self, Ended, Instance};
use super::launch::{Launch, Prepared};
use super::machine::{EndBy, Event as EnvoyEvent};
use super::{Config, warn};
use crate::metrics::{Counters, Registry};
use crate::problem::{Code, Problem};
use crate::runtime::duration::rounded;
use crate::runtime::lifecycle::{BoxError, with_causes};
use machine::{Action, Event, Machine, Phase};

/// The longest delay until the agent notices that a successor is live, on a busy machine.
const DETECTION_DELAY: Duration = Duration::from_secs(1);

/// The time between the end of its parent shutdown time and the kill of a parent.
const PARENT_GRACE: Duration = Duration::from_secs(10);

/// The limit for the exit of a parent after its successor has exited on request.
const PARENT_EXIT: Duration = Duration::from_secs(1);

/// Returns the inputs of the Envoy of this epoch: for the first one, 0, the inputs of the agent's start,
/// otherwise the current inputs. May block.
pub type Prepare = Arc<dyn Fn(u32) -> Result<Prepared, BoxError> + Send + Sync>;

#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// The parent shutdown time; longer than the drain time. Whole seconds are used.
    pub parent_shutdown: Duration,
    /// The time until a successor is live; longer than its own waits for configuration.
    pub live: Duration,
    /// The time for reading the inputs and for their validation by Envoy.
    pub check: Duration,
}

/// The end of a task or of a process.
#[derive(Debug)]
pub(super) enum Completion {
    /// The inputs are unchanged, or refused for this reason.
    NothingToStart(Outcome, Option<String>),
    /// Only metadata has changed for which Envoy is not restarted. The next Envoy has these inputs.
    MetadataChanged(Arc<Prepared>),
    /// The inputs have changed and are valid.
    Usable {
        /// The number of workers of the current Envoy. None if it has not responded at the admin port.
        workers: Option<u32>,
        prepared: Arc<Prepared>,
    },
    Live,
    SuccessorDeadline,
    ParentDeadline,
    Panicked(JoinError),
    SuccessorExited(Ended),
    ParentExited(Ended),
}

/// An action of the supervisor, which owns the current Envoy.
pub(super) enum CurrentAction {
    /// Make the successor the current Envoy, and the previous one its parent.
    Promote(Box<Instance>),
    /// Shut the current Envoy down, then start the next one.
    Replace(EndBy),
}

/// The state of hot restarts. The supervisor owns the current Envoy.
pub(super) struct HotRestart {
    is_on: bool,
    limits: Limits,
    prepare: Prepare,
    admin: Admin,
    /// The directory below which the sockets are created.
    directory: PathBuf,
    machine: Machine,
    /// The epoch of the next Envoy: the number of Envoys started so far.
    next_epoch: u32,
    /// The launch of the current Envoy, also after its exit.
    launch: Option<Launch>,
    reason: &'static str,
    pub(super) last: Option<Restart>,
    /// Valid inputs that have not been started yet.
    prepared: Option<Arc<Prepared>>,
    /// The number of workers of the current Envoy at the last check.
    workers: Option<u32>,
    /// The reason why the current Envoy runs without hot restart.
    pub(super) unavailable: Option<String>,
    /// True if the next Envoy starts without hot restart.
    skips_memory: bool,
    pub(super) successor: Option<Instance>,
    pub(super) parent: Option<Instance>,
    /// The sockets of a parent that has exited early, while its successor may send it messages.
    parent_sockets: Option<[UnixDatagram; 2]>,
    /// The time when the current Envoy became live and began to count the time of its parent.
    live_since: Option<Instant>,
    /// The running check, or the wait for a successor, and timers.
    tasks: JoinSet<Completion>,
    results: Counters<1>,
}

impl HotRestart {
    pub(super) fn new(config: &Config, prepare: Prepare, metrics: &Registry) -> Self {
        let is_on = config.hot_restart.is_some();
        Self {
            is_on,
            limits: config.hot_restart.unwrap_or_default(),
            prepare,
            admin: config.admin.clone(),
            directory: config.shared_directory.clone(),
            machine: Machine::new(),
            next_epoch: 0,
            launch: None,
            reason: "",
            last: None,
            prepared: None,
            workers: None,
            unavailable: None,
            skips_memory: false,
            successor: None,
            parent: None,
            parent_sockets: None,
            live_since: None,
            tasks: JoinSet::new(),
            results: metrics.counters(
                "istio_agent_envoy_hot_restarts_total",
                "Restarts of a serving Envoy, by result.",
                &["result"],
            ),
        }
    }

    /// Lets a successor in another container start: returns its takeover, or the reason for a refusal.
    /// Blocks restarts until [`HotRestart::reclaim`], which must follow if the successor does not take over.
    pub(super) fn lend(&mut self) -> Result<Takeover, BoxError> {
        let Some(takeover) = self.launch.as_ref().and_then(Launch::takeover) else {
            return Err(match &self.unavailable {
                Some(why) => format!("Envoy runs without hot restart: {why}").into(),
                None => "no Envoy runs".into(),
            });
        };
        self.apply(Event::Lend);
        let why = match self.machine.phase() {
            Phase::Lent => return Ok(takeover),
            Phase::Idle if !self.machine.is_ready => "Envoy does not serve",
            Phase::Idle => {
                "an earlier successor of Envoy has failed, and Envoy must be restarted before the next"
            }
            _ => "Envoy is being replaced, or its parent has not ended",
        };
        Err(why.into())
    }

    /// Allows restarts again after the successor in another container has exited. Returns what the supervisor must do.
    pub(super) fn reclaim(&mut self) -> Option<CurrentAction> {
        if self.machine.phase() != Phase::Lent {
            return None;
        }
        let cleared = self.base_id().map(BaseId::clear_initializing_flag);
        if let Some(Err(error)) = &cleared {
            tracing::warn!(%error, "no other Envoy can take over until Envoy restarts: its shared memory cannot be written");
        }
        self.apply(Event::Reclaim { is_flag_clear: matches!(cleared, Some(Ok(()))) })
    }

    /// Leaves the shared memory to an Envoy in another container, or takes it over after that Envoy has exited.
    pub(super) fn set_lent(&self, is_lent: bool) {
        if let Some(base_id) = self.base_id() {
            base_id.set_lent(is_lent);
        }
    }

    /// Makes the next Envoy start without shared memory, after one that has exited before it served because its memory
    /// could not be written. Returns false if that one did not create shared memory.
    pub(super) fn skip_memory(&mut self) -> bool {
        let launch = self.launch.as_ref();
        self.skips_memory =
            launch.is_some_and(|it| it.base_id.is_some() && it.restart_epoch() == 0);
        self.skips_memory
    }

    fn base_id(&self) -> Option<&BaseId> {
        self.launch.as_ref()?.base_id.as_deref()
    }

    /// Handles the exit of the parent in another container. Returns what the supervisor must do.
    pub(super) fn handle_parent_exit(&mut self) -> Option<CurrentAction> {
        self.set_lent(false);
        let event = self.replace_parent();
        self.apply(event)
    }

    /// Takes the sockets of a parent that has exited before its successor has ended it, because the successor aborts if it
    /// cannot send it messages. Returns the event of the exit.
    fn replace_parent(&mut self) -> Event {
        // The Envoy that could send messages to an earlier parent is the one that has exited.
        self.parent_sockets = None;
        if self.machine.phase() == Phase::Leaving
            && self.is_early()
            && let Some(base_id) = self.base_id()
            && let Some(launch) = &self.launch
        {
            match base_id.bind_parent_sockets(launch.restart_epoch().saturating_sub(1)) {
                Ok(sockets) => {
                    tracing::warn!(
                        "the former Envoy has exited early; its successor keeps serving, and the agent receives the messages \
                         to the former one"
                    );
                    self.parent_sockets = Some(sockets);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot bind the sockets of the former Envoy, which has exited early");
                    return Event::ParentExited { is_early: true };
                }
            }
        }
        Event::ParentExited { is_early: false }
    }

    /// Requests a restart. It begins when no other one is running. Returns what the supervisor must do.
    pub(super) fn request(&mut self, reason: &'static str) -> Option<CurrentAction> {
        if !self.is_on {
            tracing::warn!("not restarting Envoy ({reason}): hot restart is not configured");
            return None;
        }
        if self.machine.phase() != Phase::Idle {
            tracing::info!("Envoy will be restarted ({reason}) after the current change");
        }
        self.reason = reason;
        self.apply(Event::Wanted)
    }

    /// Tells the machine about an event of the current Envoy, and whether that Envoy is running after it.
    pub(super) fn observe(&mut self, event: EnvoyEvent, is_running: bool) {
        let event = match event {
            EnvoyEvent::Live if is_running => {
                self.handle_live();
                Event::Ready { has_base_id: self.base_id().is_some() }
            }
            EnvoyEvent::StopRequested(_) => {
                self.abandon("Envoy stops");
                Event::Stop
            }
            _ if !is_running => Event::Unready,
            _ => return,
        };
        // None of these events leads to an action of the supervisor.
        self.apply(event);
    }

    /// Concludes a full restart, whose Envoy is live. Starts the time of a parent in another container.
    fn handle_live(&mut self) {
        if self.machine.phase() == Phase::Leaving && self.live_since.is_none() {
            self.begin_parent_shutdown();
        }
        let last = self.last.as_ref();
        if last.is_some_and(|last| last.method == Some(Method::Full)) {
            self.conclude(Outcome::Succeeded, None);
        }
    }

    /// Handles the exit of the current Envoy. A restart that it interrupts is abandoned.
    pub(super) fn handle_current_exit(&mut self) {
        self.parent_sockets = None;
        // In phase Idle the exit is part of a full restart, which continues.
        if self.machine.phase() != Phase::Idle {
            self.abandon("the current Envoy has exited");
        }
        self.apply(Event::CurrentExited);
    }

    /// Concludes the current restart without success. Unless the agent stops, the machine tries it again when an Envoy
    /// serves, which then is another restart in logs and metrics. A running check continues.
    fn abandon(&mut self, why: &str) {
        self.prepared = None;
        self.conclude(Outcome::Abandoned, Some(why.to_owned()));
    }

    /// Handles what [`HotRestart::next_completion`] has returned: logs and concludes a restart that has ended, and lets
    /// the machine decide. Returns what the supervisor must do.
    pub(super) async fn handle_completion(
        &mut self,
        completion: Completion,
    ) -> Option<CurrentAction> {
        let event = match completion {
            Completion::NothingToStart(outcome, problem) => {
                self.conclude(outcome, problem);
                Event::NothingToStart
            }
            Completion::MetadataChanged(prepared) => {
                if let Some(launch) = &mut self.launch {
                    launch.prepared = prepared;
                }
                self.conclude(Outcome::Unchanged, None);
                Event::NothingToStart
            }
            Completion::Usable { workers, prepared } => {
                if self.machine.is_ready {
                    self.prepared = Some(prepared);
                } else {
                    self.abandon("the current Envoy drains or has exited");
                }
                self.workers = workers;
                Event::Usable { owns_admin_port: workers.is_some() }
            }
            Completion::Panicked(error) => {
                // Only a check is refused; the wait for a successor also ends with its deadline or its exit.
                if self.machine.phase() != Phase::Checking {
                    warn(&error, "continuing without an answer from the new Envoy");
                    return None;
                }
                self.conclude(Outcome::Refused, Some(error.to_string()));
                Event::NothingToStart
            }
            Completion::Live => Event::Live,
            Completion::SuccessorDeadline => {
                let limit = rounded(self.limits.live);
                let problem = format!("the new Envoy did not serve within {limit}");
                self.conclude(Outcome::Failed, Some(problem));
                Event::Deadline
            }
            Completion::ParentDeadline => Event::Deadline,
            Completion::SuccessorExited(ended) => {
                self.cancel_tasks();
                if let Some(mut successor) = self.successor.take() {
                    let reason = successor.output.reason().await;
                    let problem =
                        format!("the new Envoy exited before it served ({ended}): {reason}");
                    self.conclude(Outcome::Failed, Some(problem));
                }
                Event::SuccessorExited
            }
            Completion::ParentExited(ended) => {
                self.cancel_tasks();
                if let Some(mut parent) = self.parent.take() {
                    // Its last lines are forwarded before the exit is logged.
                    parent.output.last_lines().await;
                    tracing::info!("Envoy epoch {} has exited: {ended}", parent.epoch);
                }
                self.replace_parent()
            }
        };
        self.apply(event)
    }

    /// Lets the machine decide, and carries out a decision that is not about the current Envoy. Returns one that is.
    fn apply(&mut self, event: Event) -> Option<CurrentAction> {
        match self.machine.apply(event) {
            Action::Nothing => {}
            Action::Check => self.begin_check(),
            Action::Start => {
                if let Err(error) = self.start_successor() {
                    self.conclude(Outcome::Failed, Some(error.to_string()));
                    return self.apply(Event::SuccessorExited);
                }
            }
            Action::KillSuccessor => kill(self.successor.as_ref()),
            Action::KillParent => kill(self.parent.as_ref()),
            Action::Promote => return self.promote(),
            Action::Replace(end_by) => {
                tracing::warn!("full restart of Envoy: it stops before the next Envoy starts");
                self.begin_restart(Method::Full);
                return Some(CurrentAction::Replace(end_by));
            }
        }
        None
    }

    fn start_instance(&mut self, launch: Launch) -> Result<Instance, Problem> {
        let command = &launch.prepared.command;
        if let (Some(own), Some(workers)) = (command.concurrency, command.workers(&launch.mode))
            && own < workers
        {
            tracing::info!(
                "the next Envoy has the {workers} workers of its parent, because a hot restart with fewer would reset \
                 connections; concurrency={own} takes effect when an Envoy starts after the exit of the previous one"
            );
        }
        let instance = Instance::start(launch, self.next_epoch)?;
        self.next_epoch += 1;
        Ok(instance)
    }

    /// Starts the successor with the validated inputs, and begins to wait until it is live.
    fn start_successor(&mut self) -> Result<(), Problem> {
        let (Some(prepared), Some(parent)) = (self.prepared.take(), &self.launch) else {
            return Ok(());
        };
        let launch = parent.successor(prepared, self.workers, self.limits.parent_shutdown);
        let number = self.next_epoch;
        tracing::info!("starting Envoy epoch {number}, which takes over the sockets (hot restart)");
        let successor = self.start_instance(launch)?;
        let live = self.admin.clone().wait_until_live(successor.launch.restart_epoch());
        self.cancel_tasks();
        self.spawn_task(Completion::Live, live);
        self.spawn_task(Completion::SuccessorDeadline, sleep(self.limits.live));
        self.successor = Some(successor);
        self.begin_restart(Method::Hot);
        Ok(())
    }

    /// Starts an Envoy that is not a successor of this agent's Envoys: the first one, or another one after an exit.
    pub(super) fn start(&mut self) -> Result<Instance, BoxError> {
        let launch = self.next_launch()?;
        if let Address::Socket(path) = &self.admin.address
            && launch.restart_epoch() == 0
        {
            admin_socket::prepare(path, launch.prepared.command.run_as())?;
        }
        if self.next_epoch == 0 {
            let command = &launch.prepared.command;
            let arguments = command.arguments(&launch.mode).join(" ");
            tracing::info!(target: crate::logging::UNABRIDGED, "Envoy command: [{arguments}]");
        }
        let instance = self.start_instance(launch)?;
        self.launch = Some(instance.launch.clone());
        Ok(instance)
    }

    /// Returns the launch for [`Self::start`]. Its inputs are the validated ones of a full restart, else the inputs of
    /// the last Envoy. It shares memory if possible. The first Envoy may take over from one in another container.
    fn next_launch(&mut self) -> Result<Launch, BoxError> {
        let last = self.launch.take().map(|launch| launch.prepared);
        // A full restart starts the inputs that were validated for it.
        let prepared = match self.prepared.take().or(last) {
            Some(prepared) => prepared,
            // The first Envoy.
            None => (self.prepare)(0)?.into(),
        };
        let user = prepared.command.run_as();
        let takeover = if self.next_epoch == 0 { prepared.takeover.clone() } else { None };
        let base_id = match &takeover {
            Some(takeover) => {
                self.machine.begin_with_parent();
                Some(BaseId::adopt(takeover, user)?)
            }
            None => self.choose_base_id(user),
        };
        let takeover = takeover.or_else(|| base_id.as_ref().map(BaseId::first));
        let parent_shutdown = self.limits.parent_shutdown;
        let mode = takeover.map(|takeover| Mode::HotRestart { takeover, parent_shutdown });
        Ok(Launch { prepared, base_id: base_id.map(Arc::new), mode: mode.unwrap_or_default() })
    }

    /// Chooses a base id for an Envoy of this user without a parent. Returns None without hot restart, which is logged if
    /// it is on.
    fn choose_base_id(&mut self, user: u32) -> Option<BaseId> {
        if !self.is_on {
            return None;
        }
        let chosen = if std::mem::take(&mut self.skips_memory) {
            Err(io::Error::other("/dev/shm: the previous Envoy found no page (SIGBUS)"))
        } else {
            BaseId::choose(&self.directory, user)
        };
        self.unavailable = chosen.as_ref().err().map(ToString::to_string);
        if let Some(why) = &self.unavailable {
            tracing::error!("{}", Problem::new(Code::HotRestartUnavailable, "Envoy", why));
        }
        chosen.ok()
    }

    /// Concludes the restart, and starts the time of the parent. Returns the live successor for the supervisor.
    fn promote(&mut self) -> Option<CurrentAction> {
        self.cancel_tasks();
        let successor = self.successor.take()?;
        self.begin_parent_shutdown();
        self.launch = Some(successor.launch.clone());
        self.conclude(Outcome::Succeeded, None);
        Some(CurrentAction::Promote(Box::new(successor)))
    }

    /// Ends successor and parent when the agent stops.
    pub(super) async fn end(&mut self, limit: Duration) {
        self.cancel_tasks();
        self.parent_sockets = None;
        if let Some(successor) = self.successor.take() {
            successor.kill_and_reap(limit).await;
        }
        if let Some(mut parent) = self.parent.take()
            // Its successor, the last current Envoy, has ended it.
            && tokio::time::timeout(PARENT_EXIT, parent.wait_for_exit()).await.is_err()
        {
            parent.kill_and_reap(limit).await;
        }
    }

    /// Sets the method of the current restart. One that was not requested begins here.
    fn begin_restart(&mut self, method: Method) {
        let requested = self.last.take().filter(Restart::is_under_way);
        let restart =
            requested.unwrap_or_else(|| Restart::begin("the previous Envoy exited too early"));
        self.last = Some(Restart { method: Some(method), ..restart });
    }

    fn conclude(&mut self, outcome: Outcome, problem: Option<String>) {
        let Some(restart) = self.last.as_mut().filter(|restart| restart.is_under_way()) else {
            return;
        };
        let why = problem.as_deref().unwrap_or_default();
        let result = match outcome {
            Outcome::UnderWay => return,
            Outcome::Succeeded if restart.method == Some(Method::Hot) => "hot",
            Outcome::Succeeded => "full",
            Outcome::Unchanged => "unchanged",
            Outcome::Refused => {
                log_error(Code::HotRestartRefused, "hot restart rejected", why);
                "refused"
            }
            Outcome::Failed => {
                log_error(Code::HotRestartFailed, "hot restart failed", why);
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

    fn begin_check(&mut self) {
        tracing::info!("validating new Envoy inputs ({})", self.reason);
        self.last = Some(Restart::begin(self.reason));
        let limit = self.limits.check;
        let launch = self.launch.clone();
        let check = check_inputs(self.prepare.clone(), self.next_epoch, launch, self.admin.clone());
        self.cancel_tasks();
        self.tasks.spawn(async move {
            let problem = match tokio::time::timeout(limit, check).await {
                Ok(Ok(completion)) => return completion,
                Ok(Err(error)) => with_causes(error.as_ref()),
                Err(_) => format!("not validated within {}", rounded(limit)),
            };
            Completion::NothingToStart(Outcome::Refused, Some(problem))
        });
    }

    fn spawn_task(
        &mut self,
        completion: Completion,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.tasks.spawn(async move {
            task.await;
            completion
        });
    }

    fn cancel_tasks(&mut self) {
        self.tasks = JoinSet::new();
    }

    /// Waits for the next result for [`HotRestart::handle_completion`]. Fails if a process cannot be waited for. Cancel
    /// safe.
    pub(super) async fn next_completion(&mut self) -> io::Result<Completion> {
        tokio::select! {
            ended = instance::wait_for_exit(&mut self.successor) => ended.map(Completion::SuccessorExited),
            ended = instance::wait_for_exit(&mut self.parent) => ended.map(Completion::ParentExited),
            Some(task) = self.tasks.join_next() => Ok(task.unwrap_or_else(Completion::Panicked)),
            never = discard(self.parent_sockets.as_ref()) => match never {},
        }
    }

    fn begin_parent_shutdown(&mut self) {
        self.live_since = Some(Instant::now());
        self.spawn_task(Completion::ParentDeadline, sleep(self.parent_limit()));
    }

    /// Returns the time after which a parent is killed.
    pub(super) fn parent_limit(&self) -> Duration {
        PARENT_GRACE.saturating_add(self.limits.parent_shutdown)
    }

    /// Returns true if a parent that exits now has not been ended by its successor, which may not be live yet.
    fn is_early(&self) -> bool {
        let shutdown = Duration::from_secs(self.limits.parent_shutdown.as_secs());
        self.live_since
            .is_none_or(|since| since.elapsed().saturating_add(DETECTION_DELAY) < shutdown)
    }
}

/// Validates the inputs of the next Envoy: reads them on a blocking thread, has the new binary check them, and asks the
/// current Envoy for its state. `current` is the launch of that Envoy. Fails if the inputs cannot be used.
async fn check_inputs(
    prepare: Prepare,
    epoch: u32,
    current: Option<Launch>,
    admin: Admin,
) -> Result<Completion, BoxError> {
    let prepared = Arc::new(tokio::task::spawn_blocking(move || prepare(epoch)).await??);
    let current = current.as_ref();
    let before = current.map(|launch| &launch.prepared);
    if let Some(before) = before.filter(|before| before.digest == prepared.digest) {
        if before.metadata_digest == prepared.metadata_digest {
            tracing::info!("bootstrap unchanged, Envoy keeps running");
            return Ok(Completion::NothingToStart(Outcome::Unchanged, None));
        }
        tracing::info!(
            "only annotations, labels or platform metadata have changed in the bootstrap: Envoy keeps running, and the \
             next Envoy has them"
        );
        return Ok(Completion::MetadataChanged(prepared));
    }
    validate(Arc::clone(&prepared), epoch).await?;
    let workers = admin.workers(current.map_or(0, Launch::restart_epoch)).await;
    Ok(Completion::Usable { workers, prepared })
}

/// Runs Envoy to check its bootstrap. Fails with Envoy's reason if it rejects the bootstrap.
pub(crate) async fn validate(prepared: Arc<Prepared>, epoch: u32) -> Result<(), BoxError> {
    let mut envoy =
        Instance::start(Launch { prepared, base_id: None, mode: Mode::Validate }, epoch)?;
    let ended = envoy.wait_for_exit().await?;
    let reason = envoy.output.reason().await;
    match ended {
        Ended::Code(0) => Ok(()),
        ended => Err(format!("Envoy rejected the bootstrap ({ended}): {reason}").into()),
    }
}

/// The reply to a message that Envoy does not know, with its length (`hot_restart.proto`, field
/// `didnt_recognize_your_last_message`).
const NOT_RECOGNIZED: [u8; 10] = [0, 0, 0, 0, 0, 0, 0, 2, 0x18, 1];

/// Receives the messages for a parent that has exited. Replies that they are not recognized: the successor waits for a
/// reply when it asks for the socket of a new listener, and then binds its own. It ignores other replies. Cancel safe.
async fn discard(sockets: Option<&[UnixDatagram; 2]>) -> Infallible {
    let mut message = [0];
    let mut forwarded = [0];
    while let Some([messages, udp]) = sockets {
        tokio::select! {
            Ok((_, successor)) = messages.recv_from(&mut message) => {
                tracing::info!("Envoy has sent a message to its former parent, which has exited");
                if let Some(path) = successor.as_pathname() {
                    // It fails if Envoy has exited, or has ten replies that it has not read.
                    let _ = messages.try_send_to(&NOT_RECOGNIZED, path);
                }
            }
            Ok(_) = udp.recv(&mut forwarded) => {}
            else => break,
        }
    }
    std::future::pending().await
}

fn log_error(code: Code, subject: &str, why: &str) {
    tracing::error!("{}", Problem::new(code, subject, why));
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
    use crate::envoy::tests::config;

    #[tokio::test(start_paused = true)]
    async fn the_parent_shutdown_time_starts_when_the_successor_is_live() {
        let second = Duration::from_secs(1);
        let mut config = config("envoy".into(), "".as_ref());
        config.hot_restart =
            Some(Limits { parent_shutdown: second * 60, live: second, check: second });
        let mut hot_restart =
            HotRestart::new(&config, Arc::new(|_| Err("nothing".into())), &Registry::default());
        assert!(hot_restart.is_early(), "the successor is not live");
        tokio::time::advance(second * 100).await;
        hot_restart.begin_parent_shutdown();
        let begun = Instant::now();
        assert!(hot_restart.is_early());
        tokio::time::advance(second * 58).await;
        assert!(hot_restart.is_early());
        tokio::time::advance(second).await;
        assert!(!hot_restart.is_early(), "a second may have passed unnoticed");
        let completion = hot_restart.next_completion().await;
        let is_deadline = matches!(completion, Ok(Completion::ParentDeadline));
        assert!(is_deadline, "{completion:?}");
        assert_eq!(begun.elapsed().as_secs(), 70);
    }
}
