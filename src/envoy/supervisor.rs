//! Owns Envoy's process: waits for events, lets the machine decide, and carries the decision out.
//!
//! Calls to the admin port run next to the wait, so neither a signal nor Envoy's exit waits for an answer. An exit
//! is a crash unless the agent caused it, or Envoy's status is 0; [`crash_restart`](super::crash_restart) decides
//! whether another Envoy follows.

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
use super::hot_restart::{HotRestart, Prepare, until_serves};
use super::instance::{self, Ended, Instance, KILLED, TERMINATED, unkillable};
use super::launch::Launch;
use super::machine::{Action, Event, Machine, Phase};
use super::shutdown::{Drain, PlannedStep, Shutdown, Step};
use super::{Config, Exit, warn};
use crate::clock::{Clock, after};
use crate::duration::{rounded, scaled};
use crate::lifecycle::{BoxError, StopRequest, Urgency};
use crate::metrics::{Counter, Registry};
use crate::problem::Problem;

/// How often connections and requests are counted.
const PERIOD: Duration = Duration::from_secs(1);
/// The same when the listeners are closed.
const LAST_PERIOD: Duration = Duration::from_millis(100);
/// Half the time for quitting is for the answer, the rest for the end that follows it.
const QUIT_CALL: f64 = 0.5;

pub(super) struct Supervisor {
    config: Config,
    admin: Admin,
    current: Current,
    budget: Restarts,
    /// How the last Envoy ended by itself, while there is none, and the pause before the next.
    last_end: Option<Ended>,
    pause: Duration,
    hot_restart: HotRestart,
    /// The request to stop the machine knows of.
    requested: StopRequest,
    /// The sender of the drain order the machine is applied to now.
    drain_order: Option<oneshot::Sender<()>>,
    publish: watch::Sender<Report>,
    restarts: Counter,
    drains: Counter,
}

/// The Envoy that serves, or is to.
pub(super) struct Current {
    pub(super) machine: Machine,
    pub(super) instance: Option<Instance>,
    /// What it was started from, also when it has ended.
    pub(super) launch: Option<Launch>,
    /// How many Envoys have been started.
    pub(super) count: u32,
    /// Requests to its admin port under way.
    calls: JoinSet<Event>,
    /// End of the current wait.
    deadline: Option<Instant>,
}

impl Current {
    pub(super) fn new(machine: Machine) -> Self {
        Self {
            machine,
            instance: None,
            launch: None,
            count: 0,
            calls: JoinSet::new(),
            deadline: None,
        }
    }

    pub(super) fn spawn(&mut self, launch: Launch) -> Result<Instance, Problem> {
        let instance = Instance::start(launch, self.count)?;
        self.count += 1;
        Ok(instance)
    }

    pub(super) fn set(&mut self, instance: Instance) {
        self.launch = Some(instance.launch.clone());
        self.instance = Some(instance);
    }

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
        metrics: &Registry,
    ) -> Self {
        Self {
            current: Current::new(Machine::new(config.limits)),
            budget: Restarts::new(config.restarts),
            last_end: None,
            pause: Duration::ZERO,
            hot_restart: HotRestart::new(
                config.hot_restart,
                config.directory.clone(),
                admin,
                prepare,
                metrics,
            ),
            config,
            admin,
            requested: StopRequest::default(),
            drain_order: None,
            publish,
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

    pub(super) async fn run(
        mut self,
        mut stop: watch::Receiver<StopRequest>,
        mut orders: mpsc::Receiver<Order>,
    ) -> Result<Exit, BoxError> {
        tracing::info!("Starting proxy agent");
        let exit = match self.until_end(&mut stop, &mut orders).await {
            Ok(Exit::Superseded) => self.until_successor_ends_it(&mut stop).await,
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

    async fn until_end(
        &mut self,
        stop: &mut watch::Receiver<StopRequest>,
        orders: &mut mpsc::Receiver<Order>,
    ) -> Result<Exit, BoxError> {
        self.read_last_crash();
        let requested = stop.borrow().clone();
        let mut event = match requested.urgency {
            Urgency::Run => Event::Begin,
            _ => self.stop_requested(requested),
        };
        loop {
            let action = self.current.machine.apply(event);
            if action != Action::Drain {
                // The sender of an order that changes nothing has nothing to wait for.
                self.drain_order = None;
            }
            match action {
                Action::Leave => return Ok(self.exit()),
                Action::GiveUp => return Err(unkillable(self.config.limits.kill).into()),
                Action::Nothing => {}
                Action::Start => self.start()?,
                Action::Pause => {
                    let pause = rounded(self.pause);
                    tracing::warn!("starting Envoy again in {pause}");
                    self.current.deadline = Some(after(self.pause));
                }
                Action::Drain => self.call_drain(DrainCall::Stay),
                Action::Begin(step) => {
                    self.report_step(step, matches!(event, Event::StopRequested(_)));
                    self.begin(step);
                }
            }
            self.hot_restart.after(event, &mut self.current);
            let Some(next) = self.next(stop, orders).await? else {
                return Ok(Exit::Superseded);
            };
            event = next;
        }
    }

    /// Waits until the successor in another container has ended Envoy. A request to stop leaves Envoy the time of a
    /// drain.
    async fn until_successor_ends_it(
        &mut self,
        stop: &mut watch::Receiver<StopRequest>,
    ) -> Result<Exit, BoxError> {
        let base_id = self.current.launch.as_ref();
        if let Some(base_id) = base_id.and_then(|launch| launch.base_id.as_ref()) {
            base_id.set_lent(true);
        }
        let Some(mut envoy) = self.current.instance.take() else {
            return Ok(Exit::Superseded);
        };
        let drain = self.config.limits.drain.at_most();
        let told = async {
            more_urgent(stop, Urgency::Run).await;
            tokio::select! {
                _ = more_urgent(stop, Urgency::Drain) => {}
                () = tokio::time::sleep(drain) => {}
            }
        };
        tokio::select! {
            ended = envoy.ended() => tracing::info!("the former Envoy has exited: {}", ended?),
            () = tokio::time::sleep(self.hot_restart.stay()) => {
                tracing::warn!("killing the former Envoy, which its successor should have ended");
            }
            () = told => tracing::info!("killing the former Envoy: the agent is to stop"),
        }
        envoy.end(self.config.limits.kill).await;
        Ok(Exit::Superseded)
    }

    fn exit(&self) -> Exit {
        match self.last_end {
            Some(ended) if !self.current.machine.is_asked_to_stop() => Exit::ByItself(ended),
            _ => Exit::Requested,
        }
    }

    /// Reads the record of the agent before this one.
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

    /// Waits for the next event. None is a successor in another container that has taken over.
    async fn next(
        &mut self,
        stop: &mut watch::Receiver<StopRequest>,
        orders: &mut mpsc::Receiver<Order>,
    ) -> Result<Option<Event>, BoxError> {
        loop {
            self.publish();
            let (current, urgency) = (&mut self.current, self.requested.urgency);
            let deadline = OptionFuture::from(current.deadline.map(sleep_until));
            tokio::select! {
                biased;
                ended = instance::ended(&mut current.instance) => return self.ended(ended?).await.map(Some),
                request = more_urgent(stop, urgency) => return Ok(Some(self.stop_requested(request))),
                Some(order) = orders.recv() => match order {
                    Order::Drain(order) => {
                        self.drain_order = Some(order);
                        return Ok(Some(Event::DrainOrdered));
                    }
                    Order::Lend(answer) => {
                        // Its sender may have left, and then reclaims it.
                        let _ = answer.send(self.hot_restart.lend(current));
                    }
                    Order::Reclaim => self.hot_restart.reclaim(current),
                    Order::Supersede => return Ok(None),
                    Order::ParentEnded => {
                        if let Some(event) = self.hot_restart.parent_ended(current) {
                            return Ok(Some(event));
                        }
                    }
                    Order::Restart { reason } => {
                        self.hot_restart.want(reason, &mut self.current);
                    }
                },
                progress = self.hot_restart.progress() => {
                    let (progress, current) = (progress?, &mut self.current);
                    if let Some(event) = self.hot_restart.progressed(progress, current).await {
                        return Ok(Some(event));
                    }
                }
                Some(answer) = current.calls.join_next() => match answer {
                    Ok(event) => return Ok(Some(event)),
                    // Every step has its deadline, so nothing hangs on the answer.
                    Err(error) => warn(&error, "continuing without an answer from Envoy"),
                },
                Some(()) = deadline => {
                    self.current.deadline = None;
                    return Ok(Some(Event::Deadline));
                }
            }
        }
    }

    fn stop_requested(&mut self, request: StopRequest) -> Event {
        self.requested = request;
        Event::StopRequested(self.requested.urgency)
    }

    /// Publishes a step of a shutdown. `is_planned` tells that the shutdown begins, or has become
    /// shorter by a more urgent request. A full restart has steps, too, and is no shutdown.
    fn report_step(&self, step: PlannedStep, is_planned: bool) {
        let (clock, plan) = (Clock::system(), self.current.machine.plan());
        let cause = self.requested.cause.unwrap_or("no reason was given");
        if is_planned {
            tracing::info!("stopping Envoy ({cause}): {plan}");
        }
        let (waits_for, until) = (step.waits_for, clock.after(step.at_most));
        self.publish.send_modify(|report| match &mut report.ending {
            Some(ending) if !is_planned => {
                (ending.waits_for, ending.until, ending.connections) = (waits_for, until, None);
            }
            None if !is_planned => {}
            ending => {
                let since = ending.as_ref().map_or_else(|| clock.now(), |it| it.since);
                *ending = Some(Shutdown {
                    cause,
                    since,
                    plan,
                    waits_for,
                    until,
                    connections: None,
                });
            }
        });
    }

    /// Starts the first Envoy, or another after one that has ended.
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
        self.current.calls = JoinSet::new();
        self.current.calls.spawn(async move {
            if restart_epoch == 0 {
                admin.live().await;
            } else {
                // The parent in another container may still answer at the admin port.
                until_serves(admin, restart_epoch).await;
            }
            Event::Live
        });
        Ok(())
    }

    /// Publishes where Envoy is, which Envoys there are, and the last restart.
    fn publish(&self) {
        let (machine, hot_restart) = (&self.current.machine, &self.hot_restart);
        let all = [
            (&hot_restart.parent, Role::Leaving),
            (&self.current.instance, Role::Current),
            (&hot_restart.successor, Role::Next),
        ];
        let all = all.map(|(instance, role)| Some(instance.as_ref()?.report(role)));
        let next_start = Clock::system().after(self.pause);
        self.publish.send_modify(|report| {
            report.state = machine.phase().state();
            report.plan = machine.plan();
            report.is_drained = machine.is_drained();
            let is_pausing = machine.phase() == Phase::Pausing;
            report.restart = is_pausing.then(|| report.restart.unwrap_or(next_start));
            report.pid = all[1].as_ref().map(|current| current.pid);
            if let Some(current) = &all[1] {
                report.epoch = current.epoch;
                report.started = current.started;
            }
            report.epochs = all.into_iter().flatten().collect();
            report.last_restart = hot_restart.last.clone();
        });
    }

    async fn ended(&mut self, ended: Ended) -> Result<Event, BoxError> {
        self.current.calls = JoinSet::new();
        self.current.deadline = None;
        let has_served = self.current.machine.phase() > Phase::Starting;
        let is_expected = self.current.machine.expects_the_end();
        self.last_end = (!is_expected).then_some(ended);
        let crash = self.record_end(ended).await;
        self.hot_restart.serving_ended(&mut self.current);
        let out_of_memory = crash.as_ref().and_then(|crash| crash.out_of_memory);
        if let Some(crash) = crash {
            let is_early = crash.uptime_seconds < self.config.early.as_secs_f64();
            if is_early && !has_served && crash.epoch == 0 && !is_expected {
                // The next Envoy would end like it.
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

    /// Records a crash. An exit on request removes the record.
    async fn record_end(&mut self, ended: Ended) -> Option<Crash> {
        let mut envoy = self.current.instance.take()?;
        let directory = &self.config.directory;
        if is_crash(ended, self.current.machine.phase()) {
            let crash = envoy.crash(ended).await;
            Crash::record(Some(&crash), directory);
            let published = Some(crash.clone());
            self.publish
                .send_modify(|report| report.last_crash = published);
            return Some(crash);
        }
        envoy.output.last_lines().await;
        if self.current.machine.expects_the_end() {
            tracing::info!("Envoy exited normally");
            Crash::record(None, directory);
        }
        None
    }

    /// Begins a step. Its calls end with [`Event::Done`] when the next one can begin early.
    fn begin(&mut self, PlannedStep { waits_for, at_most }: PlannedStep) {
        self.current.deadline = Some(after(at_most));
        // The call that drains Envoy, or closes its listeners, may still be on its way.
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
                let whole = self.config.limits.drain.at_most();
                tracing::info!("Graceful termination period is {whole:?}, starting...");
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
                let last_requests = self.last_requests();
                self.current.call(waits_for, last_requests);
            }
            Step::LongRequests => {
                tracing::info!("the drain is over; running requests have {limit} more to end");
                let until_none = self.until_none(Active::Requests, PERIOD);
                self.current.call(waits_for, until_none);
            }
            Step::Quit => {
                tracing::info!("Asking Envoy to quit");
                let admin = self.admin.within(scaled(at_most, QUIT_CALL));
                self.current
                    .call(waits_for, async move { admin.quit().await });
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

    /// Has Envoy drain, and answers the order for that, if there is one.
    fn call_drain(&mut self, how: DrainCall) {
        self.drains.inc();
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        let order = self.drain_order.take();
        self.current.call(Step::DrainCall, async move {
            admin.drain(how, inbound_only).await;
            if let Some(order) = order {
                let _ = order.send(()); // Its sender may have left.
            }
        });
    }

    /// Closes Envoy's listeners and waits for the requests under way.
    fn last_requests(&self) -> impl Future<Output = ()> + Send + use<> {
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        let is_timed = matches!(self.config.limits.drain, Drain::For(_));
        let until_none = self.until_none(Active::Connections, LAST_PERIOD);
        async move {
            admin.drain(DrainCall::Close, inbound_only).await;
            if is_timed {
                // The workload may call out until a timed drain is over.
                return std::future::pending().await;
            }
            tokio::time::sleep(LAST_PERIOD).await;
            until_none.await;
        }
    }

    /// Counts until none is left, and publishes the counts.
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
        let report = move |count| {
            publish.send_modify(|report| {
                if let Some(ending) = &mut report.ending {
                    ending.connections = Some(count);
                }
            });
        };
        counting.until_none(admin, report)
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
