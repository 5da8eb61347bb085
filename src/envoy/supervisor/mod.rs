//! Owns Envoy's process: waits for events, has the machine decide, and does as it says.
//!
//! Calls to Envoy's admin port run beside the waiting, so that neither a signal nor the end of Envoy
//! waits for an answer. Each change is published in the report.

mod end;
mod steps;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::admin::{Admin, DrainCall};
use super::crash::Crash;
use super::crash_restart::Restarts;
use super::handle::{Order, Report, Role, State};
use super::hot_restart::{HotRestart, Prepare};
use super::instance::{self, Instance};
use super::launch::Launch;
use super::machine::{Action, Event, Machine, Phase};
use super::reaper;
use super::shutdown::{PlannedStep, Shutdown};
use super::{Config, Error, Exit, warn};
use crate::clock::{Clock, after};
use crate::lifecycle::{StopRequest, Urgency};
use crate::metrics::{self, Counter, Registry};

#[derive(Debug)]
pub(super) struct Counters {
    restarts: Counter,
    drains: Counter,
    pub(super) hot_restarts: metrics::Counters<1>,
}

pub(super) struct Supervisor {
    pub(super) config: Config,
    pub(super) admin: Admin,
    pub(super) machine: Machine,
    pub(super) current: Current,
    /// How many Envoys have been started.
    pub(super) count: u32,
    restart: Restarts,
    pub(super) hot_restart: HotRestart,
    /// The request to stop the machine knows of.
    requested: StopRequest,
    /// The sender of the drain order the machine is applied to now.
    drain_order: Option<oneshot::Sender<()>>,
    publish: watch::Sender<Report>,
    pub(super) counters: Counters,
    pub(super) clock: Clock,
}

/// The Envoy that serves, or is to.
#[derive(Default)]
pub(super) struct Current {
    pub(super) instance: Option<Instance>,
    /// What it was started from, also when it has ended.
    pub(super) launch: Option<Launch>,
    /// Requests to its admin port under way.
    calls: JoinSet<Event>,
    /// End of the current wait.
    deadline: Option<Instant>,
}

impl Supervisor {
    pub(super) fn new(
        config: Config,
        admin: Admin,
        prepare: Prepare,
        publish: watch::Sender<Report>,
        metrics: &Registry,
    ) -> Self {
        Self {
            machine: Machine::new(config.limits),
            current: Current::default(),
            count: 0,
            restart: Restarts::new(config.restarts),
            hot_restart: HotRestart::new(config.hot_restart, prepare),
            config,
            admin,
            requested: StopRequest::default(),
            drain_order: None,
            publish,
            counters: Counters {
                restarts: metrics.counter(
                    "istio_agent_envoy_restarts_total",
                    "Starts of Envoy after one that ended by itself.",
                ),
                drains: metrics.counter(
                    "istio_agent_envoy_drains_total",
                    "Times Envoy was told to send its clients away.",
                ),
                hot_restarts: metrics.counters(
                    "istio_agent_envoy_hot_restarts_total",
                    "Restarts of an Envoy that serves, by how they went.",
                    &["result"],
                ),
            },
            clock: Clock::system(),
        }
    }

    pub(super) async fn run(
        mut self,
        mut stop: watch::Receiver<StopRequest>,
        mut orders: mpsc::Receiver<Order>,
    ) -> Result<Exit, Error> {
        let until_end = async {
            let exit = self.until_end(&mut stop, &mut orders).await;
            self.end_others().await;
            exit
        };
        let exit = tokio::select! {
            exit = until_end => exit,
            never = reaper::reap() => match never {},
        };
        if self.current.instance.is_none() {
            self.publish
                .send_modify(|report| report.state = State::Exited);
        }
        exit
    }

    async fn until_end(
        &mut self,
        stop: &mut watch::Receiver<StopRequest>,
        orders: &mut mpsc::Receiver<Order>,
    ) -> Result<Exit, Error> {
        self.read_last_crash();
        let requested = stop.borrow().clone();
        let mut event = match requested.urgency {
            Urgency::Run => Event::Begin,
            _ => self.stop_requested(requested),
        };
        loop {
            let action = self.apply(event);
            match action {
                Action::Leave => return Ok(self.exit()),
                Action::GiveUp => return Err(Error::Unkillable(self.config.limits.kill)),
                Action::Nothing => {}
                Action::Start => self.start()?,
                Action::Pause => tracing::warn!("starting Envoy again in {:?}", self.restart.pause),
                Action::Drain => self.call_drain(DrainCall::Stay),
                Action::Begin(step) => self.begin(step),
            }
            self.after(event);
            event = self.next(stop, orders).await?;
        }
    }

    fn exit(&self) -> Exit {
        match self.restart.last_end {
            Some(ended) if !self.machine.is_asked_to_stop() => Exit::ByItself(ended),
            _ => Exit::Requested,
        }
    }

    /// Reads what an agent before this one has left.
    fn read_last_crash(&self) {
        match Crash::read(&self.config.directory) {
            Ok(None) => {}
            Ok(Some(crash)) => {
                let when = &crash.when;
                tracing::warn!("previous Envoy ended at {when} with {crash}");
                self.publish
                    .send_modify(|report| report.last_crash = Some(crash));
            }
            Err(error) => warn(&error, "going on without the record of the last crash"),
        }
    }

    /// Waits for the next event.
    async fn next(
        &mut self,
        stop: &mut watch::Receiver<StopRequest>,
        orders: &mut mpsc::Receiver<Order>,
    ) -> Result<Event, Error> {
        loop {
            self.publish_instances();
            let (current, urgency) = (&mut self.current, self.requested.urgency);
            let deadline = current.deadline;
            tokio::select! {
                biased;
                ended = instance::ended(&mut current.instance) => return self.ended(ended?).await,
                request = more_urgent(stop, urgency) => return Ok(self.stop_requested(request)),
                Some(order) = orders.recv() => match order {
                    Order::Drain(order) => {
                        self.drain_order = Some(order);
                        return Ok(Event::DrainOrdered);
                    }
                    Order::Restart { reason } => self.want_restart(reason),
                },
                progress = self.hot_restart.progress() => {
                    if let Some(event) = self.progressed(progress?).await {
                        return Ok(event);
                    }
                }
                Some(answer) = current.calls.join_next() => match answer {
                    Ok(event) => return Ok(event),
                    // Every step has its deadline, so nothing hangs on the answer.
                    Err(error) => warn(&error, "going on without an answer from Envoy"),
                },
                () = reached(deadline) => {
                    self.current.deadline = None;
                    return Ok(Event::Deadline);
                }
            }
        }
    }

    fn stop_requested(&mut self, request: StopRequest) -> Event {
        self.requested = request;
        Event::StopRequested(self.requested.urgency)
    }

    /// Has the machine decide, and publishes the outcome.
    fn apply(&mut self, event: Event) -> Action {
        let action = self.machine.apply(event);
        if action != Action::Drain {
            // The sender of an order that changes nothing has nothing to wait for.
            self.drain_order = None;
        }
        let step = match action {
            Action::Begin(step) => Some(step),
            _ => None,
        };
        let pause = (action == Action::Pause).then_some(self.restart.pause);
        if let Some(wait) = step.map(|step| step.at_most).or(pause) {
            self.current.deadline = Some(after(wait));
        }
        let is_planned = step.is_some() && matches!(event, Event::StopRequested(_));
        self.publish_life(is_planned, step);
        action
    }

    /// `is_planned` tells that a shutdown begins, or has become shorter by a more urgent request.
    fn publish_life(&self, is_planned: bool, step: Option<PlannedStep>) {
        let (now, plan) = (self.clock.now(), self.machine.plan());
        let cause = self.requested.cause.unwrap_or("no reason was given");
        if is_planned {
            tracing::info!("Envoy is to end ({cause}): {plan}");
        }
        self.publish.send_modify(|report| {
            if let Some(step) = step
                && (is_planned || report.ending.is_some())
            {
                let before = report.ending.take();
                let since = before.as_ref().map_or(now, |ending| ending.since);
                let before = before.filter(|_| !is_planned);
                report.ending = Some(Shutdown {
                    cause,
                    since,
                    plan: before.map_or_else(|| plan.clone(), |ending| ending.plan),
                    waits_for: step.waits_for,
                    until: self.clock.after(step.at_most),
                    connections: None,
                });
            }
            let is_pausing = self.machine.phase() == Phase::Pausing;
            let restart = self.clock.after(self.restart.pause);
            report.restart = report.restart.or(Some(restart));
            report.restart = report.restart.filter(|_| is_pausing);
            report.state = self.machine.phase().state();
            report.plan = plan;
            report.is_drained = self.machine.is_drained();
        });
    }

    /// Starts the first Envoy, or another after one that has ended.
    fn start(&mut self) -> Result<(), Error> {
        if self.restart.last_end.take().is_some() {
            self.counters.restarts.inc();
        }
        let launch = self.next_launch()?;
        if self.count == 0 {
            let command = &launch.prepared.command;
            let arguments = command.arguments(&launch.mode).join(" ");
            tracing::info!("Envoy command: [{} {arguments}]", command.binary.display());
        }
        let instance = self.spawn(launch)?;
        self.set_current(instance);
        self.current.calls = JoinSet::new();
        let admin = self.admin;
        self.current.calls.spawn(async move {
            admin.live().await;
            Event::Live
        });
        Ok(())
    }

    fn next_launch(&mut self) -> Result<Launch, Error> {
        let last = self.current.launch.take();
        let is_relaunch = std::mem::take(&mut self.hot_restart.is_relaunch);
        // What was found usable and not started beside another is started now.
        let prepared = match (self.hot_restart.prepared.take(), last) {
            (None, Some(last)) if is_relaunch => return Ok(last),
            (Some(prepared), _) => prepared,
            (None, Some(last)) => last.prepared,
            (None, None) => {
                let prepared = (self.hot_restart.prepare)(0);
                prepared.map_err(|source| Error::Inputs { source })?.into()
            }
        };
        Ok(self.first_launch(prepared))
    }

    pub(super) fn spawn(&mut self, launch: Launch) -> Result<Instance, Error> {
        let instance = Instance::start(launch, self.count)?;
        self.count += 1;
        Ok(instance)
    }

    pub(super) fn set_current(&mut self, instance: Instance) {
        self.current.launch = Some(instance.launch.clone());
        self.current.instance = Some(instance);
    }

    /// Publishes which Envoys there are, and the last restart.
    pub(super) fn publish_instances(&self) {
        let hot_restart = &self.hot_restart;
        let all = [
            (&hot_restart.parent, Role::Leaving),
            (&self.current.instance, Role::Current),
            (&hot_restart.successor, Role::Next),
        ];
        let all = all.map(|(instance, role)| Some(instance.as_ref()?.report(role)));
        self.publish.send_modify(|report| {
            report.pid = all[1].as_ref().map(|current| current.pid);
            if let Some(current) = &all[1] {
                report.epoch = current.epoch;
                report.started = current.started;
            }
            report.epochs = all.into_iter().flatten().collect();
            report.last_restart = hot_restart.last.clone();
        });
    }
}

/// Returns a request to stop that is more urgent than the last.
async fn more_urgent(stop: &mut watch::Receiver<StopRequest>, last: Urgency) -> StopRequest {
    let request = stop.wait_for(|now| now.urgency > last).await;
    if let Some(request) = request.ok().map(|request| request.clone()) {
        return request;
    }
    // There will be no further request.
    std::future::pending().await
}

pub(super) async fn reached(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
