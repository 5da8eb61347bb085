//! Owns Envoy's process: waits for events, lets the machine decide, and carries the decision out.
//!
//! Requests to the admin port run concurrently with the wait for events, so a slow answer delays neither a signal nor
//! the handling of Envoy's exit. An exit is a crash unless the agent caused it, or Envoy's status is 0;
//! [`crash_restart`](super::crash_restart) decides whether another Envoy follows.

use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::active::{Active, Counting};
use super::admin::{Admin, DrainCall};
use super::crash::Crash;
use super::crash_restart::Restarts;
use super::handle::{Order, Report, Role, State};
use super::hot_restart::{HotRestart, Prepare, wait_until_live};
use super::instance::{self, Ended, Instance, KILLED, TERMINATED, unkillable};
use super::launch::{BaseId, Launch};
use super::machine::{Action, Event, Machine, Phase};
use super::shutdown::{Drain, PlannedStep, Shutdown, Step};
use super::{Config, Exit, warn};
use crate::clock::{Clock, after};
use crate::duration::{rounded, scaled};
use crate::lifecycle::{BoxError, StopRequest, Urgency};
use crate::metrics::{Counter, Registry};
use crate::problem::Problem;

/// The period in which connections and requests are counted.
const PERIOD: Duration = Duration::from_secs(1);
/// The period after the listeners are closed.
const LAST_PERIOD: Duration = Duration::from_millis(100);
/// The part of the quit step's time in which Envoy must answer; in the rest it must exit.
const QUIT_CALL: f64 = 0.5;

pub(super) struct Supervisor {
    config: Config,
    admin: Admin,
    current: Current,
    budget: Restarts,
    /// The exit of the last Envoy, if the agent did not cause it, until the next start.
    last_end: Option<Ended>,
    /// The pause before the next start.
    pause: Duration,
    hot_restart: HotRestart,
    /// Tells the sender of the current drain order that Envoy has been asked.
    drain_order: Option<oneshot::Sender<()>>,
    publish: watch::Sender<Report>,
    stop: watch::Receiver<StopRequest>,
    orders: mpsc::Receiver<Order>,
    restarts: Counter,
    drains: Counter,
}

/// The Envoy that serves, or starts to, and is not the successor of a hot restart.
pub(super) struct Current {
    pub(super) machine: Machine,
    pub(super) instance: Option<Instance>,
    /// The launch of the last instance, also after its exit.
    pub(super) launch: Option<Launch>,
    /// The number of Envoys started so far.
    pub(super) count: u32,
    /// Running requests to its admin port.
    calls: JoinSet<Event>,
    /// The time of the next [`Event::Deadline`].
    deadline: Option<Instant>,
}

impl Current {
    /// Starts an Envoy and counts it, without making it the current one.
    pub(super) fn spawn(&mut self, launch: Launch) -> Result<Instance, Problem> {
        let instance = Instance::start(launch, self.count)?;
        self.count += 1;
        Ok(instance)
    }

    pub(super) fn set(&mut self, instance: Instance) {
        self.launch = Some(instance.launch.clone());
        self.instance = Some(instance);
    }

    pub(super) fn base_id(&self) -> Option<&BaseId> {
        self.launch.as_ref()?.base_id.as_deref()
    }

    /// Runs a request to the admin port; `step` is done when it ends.
    fn call(&mut self, step: Step, call: impl Future<Output = ()> + Send + 'static) {
        self.calls.spawn(async move {
            call.await;
            Event::Done(step)
        });
    }
}

impl Supervisor {
    pub(super) fn new(
        config: Config,
        admin: Admin,
        prepare: Prepare,
        publish: watch::Sender<Report>,
        stop: watch::Receiver<StopRequest>,
        orders: mpsc::Receiver<Order>,
        metrics: &Registry,
    ) -> Self {
        let directory = config.directory.clone();
        Self {
            current: Current {
                machine: Machine::new(config.limits),
                instance: None,
                launch: None,
                count: 0,
                calls: JoinSet::new(),
                deadline: None,
            },
            budget: Restarts::new(config.restarts),
            last_end: None,
            pause: Duration::ZERO,
            hot_restart: HotRestart::new(config.hot_restart, directory, admin, prepare, metrics),
            config,
            admin,
            drain_order: None,
            publish,
            stop,
            orders,
            restarts: metrics.counter(
                "istio_agent_envoy_restarts_total",
                "Starts of Envoy after one that crashed.",
            ),
            drains: metrics.counter(
                "istio_agent_envoy_drains_total",
                "Times Envoy was told to send its clients away.",
            ),
        }
    }

    /// Runs Envoy until its last exit, then ends the Envoys of an unfinished hot restart.
    pub(super) async fn run(mut self) -> Result<Exit, BoxError> {
        tracing::info!("Starting proxy agent");
        let exit = match self.supervise().await {
            Ok(Exit::Superseded) => self.await_end_by_successor().await,
            exit => exit,
        };
        self.publish();
        self.hot_restart.end(self.config.limits.kill).await;
        self.publish();
        if self.current.instance.is_none() {
            self.publish
                .send_modify(|report| report.state = State::Exited);
        }
        exit
    }

    /// Handles events until the last exit, or until a successor in another container has taken over.
    async fn supervise(&mut self) -> Result<Exit, BoxError> {
        self.read_last_crash();
        let requested = self.stop.borrow().urgency;
        let mut event = match requested {
            Urgency::Run => Event::Begin,
            urgency => Event::StopRequested(urgency),
        };
        loop {
            let action = self.current.machine.apply(event);
            if action != Action::Drain {
                // A drain order without effect is answered at once, by dropping its sender.
                self.drain_order = None;
            }
            match action {
                Action::Leave => return Ok(self.exit()),
                Action::GiveUp => return Err(unkillable(self.config.limits.kill).into()),
                Action::Nothing => {}
                Action::Start => self.start()?,
                Action::Pause => {
                    tracing::warn!("starting Envoy again in {}", rounded(self.pause));
                    self.current.deadline = Some(after(self.pause));
                }
                Action::Drain => self.call_drain(DrainCall::Stay),
                Action::Begin(step) => {
                    self.report_step(step, matches!(event, Event::StopRequested(_)));
                    self.begin(step);
                }
            }
            self.hot_restart.observe(event, &mut self.current);
            let Some(next) = self.next().await? else {
                return Ok(Exit::Superseded);
            };
            event = next;
        }
    }

    /// Waits until the successor in another container has ended Envoy. After a stop request Envoy still has the time
    /// of a drain.
    async fn await_end_by_successor(&mut self) -> Result<Exit, BoxError> {
        if let Some(base_id) = self.current.base_id() {
            base_id.set_lent(true);
        }
        let Some(mut envoy) = self.current.instance.take() else {
            return Ok(Exit::Superseded);
        };
        let (stop, drain) = (&mut self.stop, self.config.limits.drain.at_most());
        let stopped_and_drained = async {
            more_urgent(stop, Urgency::Run).await;
            // A second, more urgent request cuts the drain.
            let _ = tokio::time::timeout(drain, more_urgent(stop, Urgency::Drain)).await;
        };
        tokio::select! {
            ended = envoy.ended() => tracing::info!("the former Envoy has exited: {}", ended?),
            () = tokio::time::sleep(self.hot_restart.parent_limit()) => {
                tracing::warn!("killing the former Envoy, which its successor should have ended");
            }
            () = stopped_and_drained => {
                tracing::info!("killing the former Envoy: the agent is to stop");
            }
        }
        envoy.end(self.config.limits.kill).await;
        Ok(Exit::Superseded)
    }

    fn exit(&self) -> Exit {
        match self.last_end {
            Some(ended) if !self.current.machine.is_stop_requested() => Exit::ByItself(ended),
            _ => Exit::Requested,
        }
    }

    /// Logs and publishes the crash that the agent of the previous container has recorded.
    fn read_last_crash(&self) {
        match Crash::read(&self.config.directory) {
            Ok(None) => {}
            Ok(Some(crash)) => {
                tracing::warn!("in the previous container: {}", crash.problem());
                self.publish
                    .send_modify(|report| report.last_crash = Some(crash));
            }
            Err(problem) => tracing::warn!("{problem}"),
        }
    }

    /// Waits for the next event. Returns None if a successor in another container has taken over.
    async fn next(&mut self) -> Result<Option<Event>, BoxError> {
        loop {
            self.publish();
            let current = &mut self.current;
            let requested = current.machine.requested();
            let deadline = OptionFuture::from(current.deadline.map(sleep_until));
            tokio::select! {
                biased;
                ended = instance::ended(&mut current.instance) => return self.handle_exit(ended?).await.map(Some),
                urgency = more_urgent(&mut self.stop, requested) => return Ok(Some(Event::StopRequested(urgency))),
                Some(order) = self.orders.recv() => match order {
                    Order::Drain(order) => {
                        self.drain_order = Some(order);
                        return Ok(Some(Event::DrainOrdered));
                    }
                    Order::Lend(answer) => {
                        // A sender that no longer listens will reclaim it.
                        let _ = answer.send(self.hot_restart.lend(current));
                    }
                    Order::Reclaim => self.hot_restart.reclaim(current),
                    Order::Supersede => return Ok(None),
                    Order::ParentEnded => {
                        if let Some(event) = self.hot_restart.handle_parent_exit(current) {
                            return Ok(Some(event));
                        }
                    }
                    Order::Restart { reason } => self.hot_restart.request(reason, current),
                },
                progress = self.hot_restart.progress() => {
                    let progressed = self.hot_restart.handle_progress(progress?, &mut self.current);
                    if let Some(event) = progressed.await {
                        return Ok(Some(event));
                    }
                }
                Some(call) = current.calls.join_next() => match call {
                    Ok(event) => return Ok(Some(event)),
                    // Each step also ends with its deadline, so a lost answer delays it at most.
                    Err(error) => warn(&error, "continuing without an answer from Envoy"),
                },
                Some(()) = deadline => {
                    self.current.deadline = None;
                    return Ok(Some(Event::Deadline));
                }
            }
        }
    }

    /// Publishes a step of a shutdown. `is_requested` is true for the first step after a stop request, which begins
    /// or shortens the shutdown. The steps of a full restart are not published, because it is not a shutdown.
    fn report_step(&self, step: PlannedStep, is_requested: bool) {
        let (clock, plan) = (Clock::system(), self.current.machine.plan());
        let cause = self.stop.borrow().cause.unwrap_or("no reason was given");
        if is_requested {
            tracing::info!("stopping Envoy ({cause}): {plan}");
        }
        let (waits_for, until) = (step.waits_for, clock.after(step.at_most));
        self.publish.send_modify(|report| {
            if is_requested {
                let since = report.ending.as_ref().map(|ending| ending.since);
                report.ending = Some(Shutdown {
                    cause,
                    since: since.unwrap_or_else(|| clock.now()),
                    plan,
                    waits_for,
                    until,
                    connections: None,
                });
            } else if let Some(ending) = &mut report.ending {
                (ending.waits_for, ending.until, ending.connections) = (waits_for, until, None);
            }
        });
    }

    /// Starts the first Envoy, or another one after an exit.
    fn start(&mut self) -> Result<(), BoxError> {
        if self.last_end.take().is_some() {
            self.restarts.inc();
        }
        let launch = self.hot_restart.next_launch(&mut self.current)?;
        if self.current.count == 0 {
            let command = &launch.prepared.command;
            let arguments = command.arguments(&launch.mode).join(" ");
            let program = command.binary.display();
            tracing::info!(target: crate::logging::WHOLE, "Envoy command: [{program} {arguments}]");
        }
        let (admin, restart_epoch) = (self.admin, launch.restart_epoch());
        let instance = self.current.spawn(launch)?;
        self.current.set(instance);
        self.current.calls.spawn(async move {
            if restart_epoch == 0 {
                admin.live().await;
            } else {
                // The parent in another container may still answer at the admin port.
                wait_until_live(admin, restart_epoch).await;
            }
            Event::Live
        });
        Ok(())
    }

    /// Publishes Envoy's state, the running Envoys, and the last restart.
    fn publish(&self) {
        let (machine, hot_restart) = (&self.current.machine, &self.hot_restart);
        let [parent, current, successor] = [
            (&hot_restart.parent, Role::Leaving),
            (&self.current.instance, Role::Current),
            (&hot_restart.successor, Role::Next),
        ]
        .map(|(instance, role)| Some(instance.as_ref()?.report(role)));
        let next_start = Clock::system().after(self.pause);
        self.publish.send_modify(|report| {
            report.state = machine.phase().state();
            report.plan = machine.plan();
            report.is_drained = machine.is_drained();
            let is_pausing = machine.phase() == Phase::Pausing;
            report.restart = is_pausing.then(|| report.restart.unwrap_or(next_start));
            report.pid = current.as_ref().map(|current| current.pid);
            if let Some(current) = &current {
                report.epoch = current.epoch;
                report.started = Some(current.started);
            }
            report.epochs = [parent, current, successor].into_iter().flatten().collect();
            report.last_restart = hot_restart.last.clone();
        });
    }

    /// Handles the exit of the current Envoy. Fails if the first Envoy crashed before it served.
    async fn handle_exit(&mut self, ended: Ended) -> Result<Event, BoxError> {
        self.current.calls = JoinSet::new();
        self.current.deadline = None;
        let has_served = self.current.machine.phase() > Phase::Starting;
        let is_expected = self.current.machine.expects_exit();
        self.last_end = (!is_expected).then_some(ended);
        let crash = self.record_exit(ended).await;
        self.hot_restart.handle_current_exit(&mut self.current);
        let out_of_memory = crash.as_ref().and_then(|crash| crash.out_of_memory);
        if let Some(crash) = crash {
            let is_early = crash.uptime_seconds < self.config.early.as_secs_f64();
            if is_early && !has_served && crash.epoch == 0 && !is_expected {
                // Another Envoy with the same inputs would crash, too.
                return Err(crash.problem().into());
            }
            tracing::error!("{}", crash.problem());
        }
        let pause = if is_expected {
            Some(Duration::ZERO)
        } else {
            self.budget.take(ended, out_of_memory, has_served)
        };
        self.pause = pause.unwrap_or_default();
        let may_restart = pause.is_some();
        Ok(Event::EnvoyExited { may_restart })
    }

    /// Records and returns a crash. An exit on request removes the record.
    async fn record_exit(&mut self, ended: Ended) -> Option<Crash> {
        let mut envoy = self.current.instance.take()?;
        let directory = &self.config.directory;
        if is_crash(ended, self.current.machine.phase()) {
            let crash = envoy.crash(ended).await;
            Crash::record(Some(&crash), directory);
            self.publish
                .send_modify(|report| report.last_crash = Some(crash.clone()));
            return Some(crash);
        }
        envoy.output.last_lines().await;
        if self.current.machine.expects_exit() {
            tracing::info!("Envoy exited normally");
            Crash::record(None, directory);
        }
        None
    }

    /// Begins a step. Its request ends with [`Event::Done`] if the next step can begin before the deadline.
    fn begin(&mut self, PlannedStep { waits_for, at_most }: PlannedStep) {
        self.current.deadline = Some(after(at_most));
        // The request of the previous step, which drains Envoy or closes its listeners, continues in these two.
        if ![Step::DrainTime, Step::LongRequests].contains(&waits_for) {
            self.current.calls = JoinSet::new();
        }
        let limit = rounded(at_most);
        match waits_for {
            Step::DrainCall => {
                tracing::info!("Agent draining Proxy for termination");
                self.call_drain(DrainCall::Graceful);
            }
            Step::DrainTime => {
                let drain = self.config.limits.drain.at_most();
                tracing::info!("Graceful termination period is {drain:?}, starting...");
            }
            Step::Connections => {
                tracing::info!("waiting up to {limit} for Envoy's active connections to close");
                let until_none = self.until_none(Active::Connections, PERIOD);
                self.current.call(waits_for, async move {
                    tokio::time::sleep(PERIOD).await;
                    until_none.await;
                });
            }
            Step::LastRequests => {
                tracing::info!("closing Envoy's listeners; running requests have {limit} to end");
                let closed = self.close_listeners();
                self.current.call(waits_for, closed);
            }
            Step::LongRequests => {
                tracing::info!("the drain is over; running requests have {limit} more to end");
                let until_none = self.until_none(Active::Requests, PERIOD);
                self.current.call(waits_for, until_none);
            }
            Step::Quit => {
                tracing::info!("Asking Envoy to quit");
                let admin = self.admin.within(scaled(at_most, QUIT_CALL));
                self.current.call(waits_for, admin.quit());
            }
            Step::Termination => {
                tracing::info!("Terminating Envoy");
                self.current.instance.iter().for_each(Instance::terminate);
            }
            Step::Kill => {
                tracing::warn!("Killing Envoy: it did not exit in time, or a kill was requested");
                self.current.instance.iter().for_each(Instance::kill);
            }
        }
    }

    /// Asks Envoy to drain, then answers the drain order, if there is one.
    fn call_drain(&mut self, call: DrainCall) {
        self.drains.inc();
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        let order = self.drain_order.take();
        self.current.call(Step::DrainCall, async move {
            admin.drain(call, inbound_only).await;
            if let Some(order) = order {
                let _ = order.send(()); // It fails if the caller no longer waits.
            }
        });
    }

    /// Closes Envoy's listeners and waits for the running requests.
    fn close_listeners(&self) -> impl Future<Output = ()> + Send + use<> {
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        let is_timed = matches!(self.config.limits.drain, Drain::For(_));
        let until_none = self.until_none(Active::Connections, LAST_PERIOD);
        async move {
            admin.drain(DrainCall::Close, inbound_only).await;
            if is_timed {
                // The workload may send requests until the end of a timed drain.
                return std::future::pending().await;
            }
            tokio::time::sleep(LAST_PERIOD).await;
            until_none.await;
        }
    }

    /// Waits until Envoy has no active connections or requests, and publishes each count.
    fn until_none(
        &self,
        active: Active,
        period: Duration,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (admin, publish) = (self.admin, self.publish.clone());
        let counting = Counting {
            active,
            period,
            inbound_only: self.config.drain_inbound_only,
            internal_ports: self.config.internal_ports.clone(),
        };
        counting.until_none(admin, move |count| {
            publish.send_modify(|report| {
                if let Some(ending) = &mut report.ending {
                    ending.connections = Some(count);
                }
            });
        })
    }
}

/// Waits for a stop request that is more urgent than `last`, and returns its urgency.
async fn more_urgent(stop: &mut watch::Receiver<StopRequest>, last: Urgency) -> Urgency {
    let request = stop.wait_for(|request| request.urgency > last).await;
    match request.map(|request| request.urgency) {
        Ok(urgency) => urgency,
        // Without a sender no request can come.
        Err(_) => std::future::pending().await,
    }
}

/// Returns true if neither the agent nor a request to Envoy's admin port has caused the exit.
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
