//! Owns Envoy's process: waits for events, lets the machine decide, and carries the decision out.
//!
//! Requests to the admin port run concurrently with the wait for events, so a slow response delays neither a signal
//! nor the handling of Envoy's exit. An exit is a crash unless the agent caused it, or Envoy's status is 0;
//! [`restart_budget`](super::restart_budget) decides whether another Envoy follows.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until};

use super::active_requests::{Active, Counting};
use super::admin::DrainCall;
use super::crash::Crash;
use super::handle::{Envoy, Order, Report, Role, State};
use super::hot_restart::{CurrentAction, HotRestart, Prepare};
use super::instance::{self, BUS, Ended, Instance, KILLED, TERMINATED, unkillable};
use super::machine::{Action, Event, Machine, Phase};
use super::restart_budget::Restarts;
use super::shutdown::{Drain, PlannedStep, Shutdown, Step};
use super::{Config, Exit, warn};
use crate::metrics::{Counter, Registry};
use crate::net::port;
use crate::runtime::clock::{Clock, after};
use crate::runtime::duration::{rounded, scaled};
use crate::runtime::lifecycle::{BoxError, Stop, StopRequest, Urgency};

/// The capacity of the queue of orders; a sender waits while it is full.
const MAX_ORDERS: usize = 8;
/// The period in which connections and requests are counted.
const PERIOD: Duration = Duration::from_secs(1);
/// The period after the listeners are closed.
const LAST_PERIOD: Duration = Duration::from_millis(100);
/// The part of the quit step's time in which Envoy must respond; in the rest of the time it must exit.
const QUIT_CALL: f64 = 0.5;

pub(super) struct Supervisor {
    config: Config,
    /// Decides about the current Envoy, which serves or starts to, and is not the successor of a hot restart.
    machine: Machine,
    instance: Option<Instance>,
    /// Running requests to its admin port, and timers.
    tasks: JoinSet<Event>,
    budget: Restarts,
    /// The exit of the last Envoy, if the agent did not cause it, until the next start.
    last_end: Option<Ended>,
    pause: Duration,
    hot_restart: HotRestart,
    /// The end of the delay before the drain, once it has begun.
    delay_until: Option<Instant>,
    /// The reply to the sender of the current drain order, sent once Envoy has been asked.
    drain_order: Option<oneshot::Sender<()>>,
    publish: watch::Sender<Report>,
    stop: watch::Receiver<StopRequest>,
    orders: mpsc::Receiver<Order>,
    restarts: Counter,
    drains: Counter,
}

impl Supervisor {
    pub(super) fn new(
        config: Config,
        prepare: Prepare,
        stop: &Stop,
        metrics: &Registry,
    ) -> (Envoy, Self) {
        let (publish, report) = watch::channel(Report::default());
        let (sender, orders) = mpsc::channel(MAX_ORDERS);
        let envoy = Envoy::new(config.admin.clone(), report, sender);
        let supervisor = Self {
            machine: Machine::new(config.limits),
            instance: None,
            tasks: JoinSet::new(),
            budget: Restarts::new(config.restarts),
            last_end: None,
            pause: Duration::ZERO,
            hot_restart: HotRestart::new(&config, prepare, metrics),
            config,
            delay_until: None,
            drain_order: None,
            publish,
            stop: stop.requested(),
            orders,
            restarts: metrics
                .counter("istio_agent_envoy_restarts_total", "Restarts of Envoy after a crash."),
            drains: metrics.counter(
                "istio_agent_envoy_drains_total",
                "Requests to Envoy to drain its listeners.",
            ),
        };
        (envoy, supervisor)
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
        if self.instance.is_none() {
            self.publish.send_modify(|report| report.state = State::Exited);
        }
        exit
    }

    /// Handles events until the last exit, or until a successor in another container has taken over.
    async fn supervise(&mut self) -> Result<Exit, BoxError> {
        self.read_last_crash();
        let mut event = match self.stop.borrow().urgency {
            Urgency::Run => Event::Begin,
            urgency => Event::StopRequested(urgency),
        };
        loop {
            let action = self.machine.apply(event);
            if action != Action::Drain {
                // Dropping its sender ends a drain order without effect at once.
                self.drain_order = None;
            }
            match action {
                Action::Leave => return Ok(self.exit()),
                Action::GiveUp => return Err(unkillable(self.config.limits.kill).into()),
                Action::Nothing => {}
                Action::Start => self.start()?,
                Action::Pause => {
                    tracing::warn!("starting Envoy again in {}", rounded(self.pause));
                    self.spawn_task(Event::PauseOver, sleep(self.pause));
                }
                Action::Delay => {
                    let delay = self.delay();
                    self.spawn_task(Event::DelayOver, delay);
                }
                Action::Drain => self.call_drain(DrainCall::Stay),
                Action::Begin(step) => {
                    self.report_step(step, matches!(event, Event::StopRequested(_)));
                    self.begin_step(step);
                }
            }
            self.hot_restart.observe(event, self.machine.phase() == Phase::Running);
            let Some(next) = self.next_event().await? else {
                return Ok(Exit::Superseded);
            };
            event = next;
        }
    }

    /// Waits until the successor in another container has ended Envoy. After a stop request Envoy still has the time
    /// of a drain.
    async fn await_end_by_successor(&mut self) -> Result<Exit, BoxError> {
        self.hot_restart.set_lent(true);
        let Some(mut envoy) = self.instance.take() else {
            return Ok(Exit::Superseded);
        };
        let drain = self.config.limits.drain.at_most();
        let stop = &mut self.stop;
        let stopped_and_drained = async {
            wait_for_more_urgent(stop, Urgency::Run).await;
            // A second, more urgent request cuts the drain.
            let _ = tokio::time::timeout(drain, wait_for_more_urgent(stop, Urgency::Drain)).await;
        };
        tokio::select! {
            ended = envoy.wait_for_exit() => tracing::info!("the former Envoy has exited: {}", ended?),
            () = sleep(self.hot_restart.parent_limit()) => {
                tracing::warn!("killing the former Envoy, which its successor should have ended");
            }
            () = stopped_and_drained => {
                tracing::info!("killing the former Envoy: the agent must stop");
            }
        }
        envoy.kill_and_reap(self.config.limits.kill).await;
        Ok(Exit::Superseded)
    }

    fn exit(&self) -> Exit {
        match self.last_end {
            Some(ended) if !self.machine.is_stop_requested() => Exit::ByItself(ended),
            _ => Exit::Requested,
        }
    }

    /// Logs and publishes the crash that the agent of the previous container has recorded.
    fn read_last_crash(&self) {
        match Crash::read(&self.config.directory) {
            Ok(None) => {}
            Ok(Some(crash)) => {
                tracing::warn!("in the previous container: {}", crash.problem());
                self.publish.send_modify(|report| report.last_crash = Some(crash));
            }
            Err(problem) => tracing::warn!("{problem}"),
        }
    }

    /// Waits for the next event of the machine. Returns None if a successor in another container has taken over.
    ///
    /// Publishes the report before each wait. Meanwhile handles the orders and completions of hot restarts, and stores
    /// the sender of a drain order for the action that follows the event.
    async fn next_event(&mut self) -> Result<Option<Event>, BoxError> {
        loop {
            self.publish();
            let requested = self.machine.requested();
            let action = tokio::select! {
                biased;
                ended = instance::wait_for_exit(&mut self.instance) => return self.handle_exit(ended?).await.map(Some),
                urgency = wait_for_more_urgent(&mut self.stop, requested) => {
                    return Ok(Some(Event::StopRequested(urgency)));
                }
                Some(order) = self.orders.recv() => match order {
                    Order::Drain(sender) => {
                        self.drain_order = Some(sender);
                        return Ok(Some(Event::DrainOrdered));
                    }
                    Order::Lend(answer) => {
                        // It fails only if the task that waits for it has been dropped, when the agent ends.
                        let _ = answer.send(self.hot_restart.lend());
                        None
                    }
                    Order::Reclaim => self.hot_restart.reclaim(),
                    Order::Supersede => return Ok(None),
                    Order::ParentExited => self.hot_restart.handle_parent_exit(),
                    Order::Restart { reason } => self.hot_restart.request(reason),
                },
                completion = self.hot_restart.next_completion() => {
                    self.hot_restart.handle_completion(completion?).await
                }
                Some(task) = self.tasks.join_next() => match task {
                    Ok(event) => return Ok(Some(event)),
                    // Each step has a time limit, so the shutdown continues without this response, only later.
                    Err(error) => {
                        warn(&error, "continuing without an answer from Envoy");
                        None
                    }
                },
            };
            if let Some(event) = action.and_then(|action| self.apply_hot_restart_action(action)) {
                return Ok(Some(event));
            }
        }
    }

    /// Carries out an action of the hot restart. Returns the event for the machine, if there is one.
    fn apply_hot_restart_action(&mut self, action: CurrentAction) -> Option<Event> {
        match action {
            CurrentAction::Replace(end_by) => Some(Event::Replace(end_by)),
            CurrentAction::Promote(successor) => {
                let limit = rounded(self.hot_restart.parent_limit());
                let number = successor.epoch;
                let parent = self.instance.replace(*successor)?;
                let parent_number = parent.epoch;
                tracing::info!(
                    "Envoy epoch {number} is live; epoch {parent_number} exits within {limit}"
                );
                self.hot_restart.parent = Some(parent);
                // The parent was drained; clients of the successor must be asked, too.
                if self.machine.is_drained() { Some(Event::DrainOrdered) } else { None }
            }
        }
    }

    /// Publishes a step of a shutdown. `is_requested` is true for the first step after a stop request, which begins
    /// or shortens the shutdown. The steps of a full restart are not published, because it is not a shutdown.
    fn report_step(&self, step: PlannedStep, is_requested: bool) {
        let clock = Clock::system();
        let plan = self.machine.plan();
        let cause = self.stop.borrow().cause.unwrap_or("no reason was given");
        if is_requested {
            tracing::info!("stopping Envoy ({cause}): {plan}");
        }
        let waits_for = step.waits_for;
        let until = clock.after(step.at_most);
        self.publish.send_modify(|report| {
            if is_requested {
                report.ending = Some(Shutdown {
                    cause,
                    since: report.ending.as_ref().map_or_else(|| clock.now(), |it| it.since),
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
        let instance = self.hot_restart.start()?;
        let live = self.config.admin.clone().wait_until_live(instance.launch.restart_epoch());
        self.instance = Some(instance);
        self.spawn_task(Event::Live, live);
        Ok(())
    }

    fn publish(&self) {
        let machine = &self.machine;
        let hot_restart = &self.hot_restart;
        let [parent, current, successor] = [
            (&hot_restart.parent, Role::Leaving),
            (&self.instance, Role::Current),
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
            report.running = [parent, current, successor].into_iter().flatten().collect();
            report.last_restart = hot_restart.last.clone();
            report.hot_restart_problem = hot_restart.unavailable.clone();
        });
    }

    /// Handles the exit of the current Envoy: records a crash, and decides whether and after which pause another Envoy
    /// may start. Fails if the first Envoy crashed before it served.
    async fn handle_exit(&mut self, ended: Ended) -> Result<Event, BoxError> {
        self.cancel_tasks();
        let has_served = self.machine.phase() > Phase::Starting;
        let is_expected = self.machine.expects_exit();
        self.last_end = if is_expected { None } else { Some(ended) };
        let crash = self.record_exit(ended).await;
        self.hot_restart.handle_current_exit();
        let out_of_memory = crash.as_ref().and_then(|crash| crash.out_of_memory);
        let skips_memory = ended == Ended::Signal(BUS)
            && !has_served
            && !is_expected
            && self.hot_restart.skip_memory();
        if let Some(crash) = crash {
            let is_early = crash.uptime_seconds < self.config.early.as_secs_f64();
            if is_early && !has_served && crash.epoch == 0 && !is_expected && !skips_memory {
                // Another Envoy with the same inputs would crash, too.
                return Err(crash.problem().into());
            }
            tracing::error!("{}", crash.problem());
        }
        let pause = if is_expected || skips_memory {
            Some(Duration::ZERO)
        } else {
            self.budget.take(ended, out_of_memory, has_served)
        };
        self.pause = pause.unwrap_or_default();
        Ok(Event::EnvoyExited { may_restart: pause.is_some() })
    }

    /// Records an exit that the agent did not ask for, and returns it if it is a crash. An exit on request removes the
    /// record.
    async fn record_exit(&mut self, ended: Ended) -> Option<Crash> {
        let mut envoy = self.instance.take()?;
        let directory = &self.config.directory;
        let is_crash = is_crash(ended, self.machine.phase());
        if is_crash || !self.machine.expects_exit() {
            let crash = envoy.describe_crash(ended).await;
            Crash::record(Some(&crash), directory);
            self.publish.send_modify(|report| report.last_crash = Some(crash.clone()));
            if !is_crash {
                tracing::warn!("{}", crash.problem());
            }
            return if is_crash { Some(crash) } else { None };
        }
        envoy.output.last_lines().await;
        tracing::info!("Envoy exited normally");
        Crash::record(None, directory);
        None
    }

    /// Begins a step of the shutdown: signals Envoy, or spawns a request that ends with [`Event::Done`] if the next
    /// step can begin before the time of this one is over.
    fn begin_step(&mut self, PlannedStep { waits_for, at_most }: PlannedStep) {
        // The request of the previous step, which drains Envoy or closes its listeners, continues in these two. The
        // machine ignores the end of the request and of its timer.
        if ![Step::DrainTime, Step::LongRequests].contains(&waits_for) {
            self.cancel_tasks();
        }
        let done = Event::Done(waits_for);
        let limit = rounded(at_most);
        self.spawn_task(done, sleep(at_most));
        match waits_for {
            Step::DrainDelay => {
                let delay = self.delay();
                self.spawn_task(done, delay);
            }
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
                self.spawn_task(done, async move {
                    sleep(PERIOD).await;
                    until_none.await;
                });
            }
            Step::LastRequests => {
                tracing::info!("closing Envoy's listeners; running requests have {limit} to end");
                self.spawn_task(done, self.close_listeners());
            }
            Step::LongRequests => {
                tracing::info!("the drain is over; running requests have {limit} more to end");
                self.spawn_task(done, self.until_none(Active::Requests, PERIOD));
            }
            Step::Quit => {
                tracing::info!("Asking Envoy to quit");
                self.spawn_task(done, self.config.admin.within(scaled(at_most, QUIT_CALL)).quit());
            }
            Step::Termination => {
                tracing::info!("Terminating Envoy");
                self.instance.iter().for_each(Instance::terminate);
            }
            Step::Kill => {
                tracing::warn!("Killing Envoy: it did not exit in time, or a kill was requested");
                self.instance.iter().for_each(Instance::kill);
            }
        }
    }

    /// Waits for the end of the delay before the drain, which begins with the first call. It ends early if no application
    /// of the pod listens any more. A delay before a drain until idle also ends early if there is no connection.
    fn delay(&mut self) -> impl Future<Output = ()> + Send + use<> {
        let delay = self.config.limits.delay;
        let until = *self.delay_until.get_or_insert_with(|| {
            let limit = rounded(delay);
            tracing::info!("Envoy accepts connections for {limit} more before it drains");
            after(delay)
        });
        let has_application = self.config.drain_inbound_only;
        let waits_for_connections = matches!(self.config.limits.drain, Drain::UntilIdle { .. });
        let until_none = self.until_none(Active::Connections, PERIOD);
        let own = self.instance.iter().map(|it| it.report(Role::Current).pid);
        let own: Vec<_> = own.filter_map(|pid| u32::try_from(pid).ok()).collect();
        async move {
            tokio::select! {
                () = sleep_until(until) => {}
                () = until_none, if waits_for_connections => {}
                () = until_application_ends(own), if has_application => {
                    tracing::info!("no application listens in this pod any more; Envoy drains now");
                }
            }
        }
    }

    /// Runs a request to the admin port, or a timer, which ends with this event.
    fn spawn_task(&mut self, event: Event, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            event
        });
    }

    fn cancel_tasks(&mut self) {
        self.tasks = JoinSet::new();
    }

    /// Asks Envoy to drain, then replies to the drain order, if there is one.
    fn call_drain(&mut self, call: DrainCall) {
        self.drains.inc();
        let draining = self.config.admin.clone().drain(call, self.config.drain_inbound_only);
        let sender = self.drain_order.take();
        self.spawn_task(Event::Done(Step::DrainCall), async move {
            draining.await;
            if let Some(sender) = sender {
                let _ = sender.send(()); // It fails if the caller no longer waits.
            }
        });
    }

    /// Closes Envoy's listeners and waits for the running requests.
    fn close_listeners(&self) -> impl Future<Output = ()> + Send + use<> {
        let closing =
            self.config.admin.clone().drain(DrainCall::Close, self.config.drain_inbound_only);
        let is_timed = matches!(self.config.limits.drain, Drain::For(_));
        let until_none = self.until_none(Active::Connections, LAST_PERIOD);
        async move {
            closing.await;
            if is_timed {
                // The workload may send requests until the end of a timed drain.
                return std::future::pending().await;
            }
            sleep(LAST_PERIOD).await;
            until_none.await;
        }
    }

    /// Waits until Envoy has no active connections or requests, and publishes each count.
    fn until_none(
        &self,
        active: Active,
        period: Duration,
    ) -> impl Future<Output = ()> + Send + use<> {
        let publish = self.publish.clone();
        let counting = Counting {
            active,
            period,
            inbound_only: self.config.drain_inbound_only,
            internal_ports: self.config.internal_ports.clone(),
        };
        counting.until_none(self.config.admin.clone(), move |count| {
            publish.send_modify(|report| {
                if let Some(ending) = &mut report.ending {
                    ending.connections = Some(count);
                }
            });
        })
    }
}

/// Waits until no process of the pod other than the agent and these Envoys listens on a TCP port.
async fn until_application_ends(envoys: Vec<u32>) {
    loop {
        let envoys = envoys.clone();
        let listens = spawn_blocking(move || port::others_listen(&envoys)).await;
        if listens.is_ok_and(|listens| !listens) {
            return;
        }
        sleep(PERIOD).await;
    }
}

async fn wait_for_more_urgent(stop: &mut watch::Receiver<StopRequest>, last: Urgency) -> Urgency {
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
    fn an_exit_by_signal_is_a_crash_unless_the_agent_sent_it() {
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
