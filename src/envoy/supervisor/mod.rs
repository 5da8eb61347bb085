//! The one owner of Envoy's process: waits for events, tells the machine, does as it says.
//!
//! Calls to Envoy's admin port run beside the waiting, so that neither a signal nor the end of Envoy
//! waits for an answer. Each step down drops the calls of the step before. Every change is published.
//!
//! Does not decide what follows what; [`super::machine`] does.

mod end;
mod hot_restart;

mod start;
mod steps;
mod tell;

use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::admin::Admin;
use super::calls::warn;
use super::child::Child;
use super::crash::Crash;
use super::crash_restart::Restarts;
use super::handle::{Order, Report, State};
use super::hot_restart::{HotRestart, Progress};
use super::machine::{Action, Event, Machine, Phase};
use super::process::{self, Ended, Process};
use super::reaper::Children;
use super::shutdown::{Shutdown, Step};
use super::{Config, Error, Exit, reaper};
use crate::clock::Clock;
use crate::lifecycle::{StopRequest, Urgency};
use crate::metrics::{self, Counter, Registry};

/// What is counted.
#[derive(Debug)]
pub(super) struct Counters {
    restarts: Counter,
    drains: Counter,
    changes: metrics::Counters<1>,
}

/// How the supervisor hears what others want.
pub(super) struct Requests {
    pub(super) stop: watch::Receiver<StopRequest>,
    pub(super) orders: mpsc::Receiver<Order>,
}

pub(super) struct Supervisor {
    config: Config,
    admin: Admin,
    machine: Machine,
    child: Option<Child>,
    /// The number of that Envoy.
    epoch: u32,
    /// How many have been started.
    count: u32,
    /// What can replace that Envoy while it serves.
    epochs: Option<HotRestart>,
    /// Why it was last to be replaced.
    reason: &'static str,
    own: Children,
    restarts: Restarts,
    /// How the last Envoy ended, while there is none.
    last_end: Option<Ended>,
    /// The pause before the next start, once granted.
    pause: Duration,
    /// End of the current wait.
    deadline: Option<Instant>,
    /// Calls under way.
    calls: JoinSet<Event>,
    /// The order the machine hears of now.
    order: Option<oneshot::Sender<()>>,
    requests: Requests,
    /// The urgency acted on so far.
    asked: Urgency,
    publish: watch::Sender<Report>,
    counters: Counters,
    clock: Clock,
}

impl Counters {
    pub(super) fn of(metrics: &Registry) -> Self {
        Self {
            restarts: metrics.counter(
                "istio_agent_envoy_restarts_total",
                "Starts of Envoy after one that ended by itself.",
            ),
            drains: metrics.counter(
                "istio_agent_envoy_drains_total",
                "Times Envoy was told to send its clients away.",
            ),
            changes: metrics.counters(
                "istio_agent_envoy_hot_restarts_total",
                "Restarts of an Envoy that serves, by how they went.",
                &["result"],
            ),
        }
    }
}

impl Supervisor {
    pub(super) fn new(
        config: Config,
        admin: Admin,
        epochs: Option<HotRestart>,
        requests: Requests,
        publish: watch::Sender<Report>,
        counters: Counters,
    ) -> Self {
        Self {
            machine: Machine::new(config.limits),
            restarts: Restarts::new(config.restarts),
            config,
            admin,
            child: None,
            epoch: 0,
            count: 0,
            epochs,
            reason: "",
            own: Children::default(),
            last_end: None,
            pause: Duration::ZERO,
            deadline: None,
            calls: JoinSet::new(),
            order: None,
            requests,
            asked: Urgency::Run,
            publish,
            counters,
            clock: Clock::system(),
        }
    }

    pub(super) async fn run(mut self) -> Result<Exit, Error> {
        let own = self.own.clone();
        let to_the_end = async {
            let exit = self.until_the_end().await;
            self.end_others().await;
            exit
        };
        let exit = tokio::select! {
            exit = to_the_end => exit,
            never = reaper::reap(own) => match never {},
        };
        if self.child.is_none() {
            self.publish
                .send_modify(|report| report.state = State::Exited);
        }
        exit
    }

    async fn until_the_end(&mut self) -> Result<Exit, Error> {
        self.recall();
        self.asked = self.requests.stop.borrow().urgency;
        let mut event = match self.asked {
            Urgency::Run => Event::Begin,
            asked => Event::StopRequested(asked),
        };
        loop {
            let action = self.tell_machine(event);
            if action == Action::Leave {
                return Ok(self.exit());
            }
            self.act(action)?;
            self.tell_epochs(event);
            event = self.next().await?;
        }
    }

    fn exit(&self) -> Exit {
        match self.last_end {
            Some(ended) if !self.machine.is_asked_to_stop() => Exit::ByItself(ended),
            // Whoever asks before there is an Envoy has what he wants.
            _ => Exit::Requested,
        }
    }

    /// Reads what an agent before this one has left.
    fn recall(&self) {
        match Crash::read(&self.config.directory) {
            Ok(None) => {}
            Ok(Some(crash)) => {
                let last = crash.stderr.last();
                tracing::warn!(
                    last_line = last,
                    "previous Envoy ended at {} with {crash}",
                    crash.when
                );
                self.publish
                    .send_modify(|report| report.last_crash = Some(crash));
            }
            Err(error) => warn(&error, "going on without it"),
        }
    }

    /// Waits for the next event.
    async fn next(&mut self) -> Result<Event, Error> {
        loop {
            let deadline = self.deadline;
            tokio::select! {
                biased;
                ended = ended(&mut self.child) => return self.ended(ended?).await,
                urgency = more_urgent(&mut self.requests.stop, self.asked) => {
                    self.asked = urgency;
                    return Ok(Event::StopRequested(urgency));
                }
                Some(order) = self.requests.orders.recv() => match order {
                    Order::Drain(order) => {
                        self.order = Some(order);
                        return Ok(Event::DrainOrdered);
                    }
                    Order::Restart { reason } => self.want(reason),
                },
                news = news(&mut self.epochs) => {
                    if let Some(event) = self.hear(news?).await {
                        return Ok(event);
                    }
                }
                Some(answer) = self.calls.join_next() => match answer {
                    Ok(event) => return Ok(event),
                    // Every step has its deadline, so nothing hangs on the answer.
                    Err(error) => warn(&error, "going on without an answer from Envoy"),
                },
                () = reached(deadline) => {
                    self.deadline = None;
                    return Ok(Event::Deadline);
                }
            }
        }
    }

    /// Tells the machine, and everybody what has become of it.
    fn tell_machine(&mut self, event: Event) -> Action {
        let action = self.machine.apply(event);
        if action != Action::Tell {
            // Whoever gave an order that changes nothing has nothing to wait for.
            self.order = None;
        }
        if let Some(child) = &self.child {
            child.resident().look_now();
        }
        let step = step(action);
        let pause = (action == Action::Pause).then_some(self.pause);
        if let Some(wait) = step.map(|(wait, _)| wait).or(pause) {
            self.deadline = Some(Instant::now() + wait);
        }
        if step.is_some() && matches!(event, Event::StopRequested(_)) {
            self.show_plan();
        }
        self.show(step);
        action
    }

    /// The way down begins, or somebody has made it shorter.
    fn show_plan(&self) {
        let (cause, plan) = (self.cause(), self.machine.plan());
        tracing::info!("Envoy is to end ({cause}): {plan}");
        let now = self.clock.now();
        self.publish.send_modify(|report| {
            let since = report.ending.as_ref().map_or(now, |ending| ending.since);
            report.ending = Some(Shutdown {
                cause,
                since,
                plan,
                waits_for: None,
                until: None,
                connections: None,
            });
        });
    }

    fn show(&self, step: Option<(Duration, Step)>) {
        let (now, phase) = (self.clock.now(), self.machine.phase());
        let pause = (phase == Phase::Pausing).then_some(self.pause);
        self.publish.send_modify(|report| {
            report.state = phase.state();
            report.plan = self.machine.plan();
            report.is_drained = self.machine.is_drained();
            report.restart = pause.map(|pause| now + pause);
            if let (Some(ending), Some((wait, waits_for))) = (&mut report.ending, step) {
                ending.waits_for = Some(waits_for);
                ending.connections = None;
                ending.until = Some(now + wait);
            }
        });
    }

    fn cause(&self) -> &'static str {
        self.requests
            .stop
            .borrow()
            .cause
            .unwrap_or("nobody said why")
    }

    fn act(&mut self, action: Action) -> Result<(), Error> {
        match action {
            Action::Nothing | Action::Leave => {}
            Action::Start => self.start()?,
            Action::Pause => tracing::warn!("starting Envoy again in {:?}", self.pause),
            Action::Tell => self.tell(),
            Action::Announce(_) => self.announce(),
            Action::Wait(_) => {
                let whole = self.config.limits.drain.at_most();
                tracing::info!("Graceful termination period is {whole:?}, starting...");
            }
            Action::Count(at_most) => self.count(at_most),
            Action::Close(at_most) => self.close(at_most),
            Action::Outlast(at_most) => self.outlast(at_most),
            Action::Quit(wait) => self.quit(wait),
            Action::Terminate(_) => {
                tracing::info!("Terminating Envoy");
                self.calls = JoinSet::new();
                self.process(Process::terminate);
            }
            Action::Kill(_) => {
                tracing::warn!("Killing Envoy, which did not end in time or is to end at once");
                self.calls = JoinSet::new();
                self.process(Process::kill);
            }
            Action::GiveUp => return Err(Error::Unkillable(self.config.limits.kill)),
        }
        Ok(())
    }

    fn process(&self, signal: impl FnOnce(&Process)) {
        if let Some(child) = &self.child {
            signal(&child.process);
        }
    }
}

/// The wait an action begins, on the way down.
fn step(action: Action) -> Option<(Duration, Step)> {
    Some(match action {
        Action::Announce(wait) => (wait, Step::DrainCall),
        Action::Wait(wait) => (wait, Step::DrainTime),
        Action::Count(wait) => (wait, Step::Connections),
        Action::Close(wait) => (wait, Step::LastRequests),
        Action::Outlast(wait) => (wait, Step::LongRequests),
        Action::Quit(wait) => (wait, Step::Quit),
        Action::Terminate(wait) => (wait, Step::Termination),
        Action::Kill(wait) => (wait, Step::Kill),
        _ => return None,
    })
}

async fn ended(child: &mut Option<Child>) -> Result<Ended, process::Error> {
    match child {
        Some(child) => child.process.ended().await,
        None => std::future::pending().await,
    }
}

/// Returns when the urgency stands above what was acted on.
async fn more_urgent(requests: &mut watch::Receiver<StopRequest>, acted_on: Urgency) -> Urgency {
    let higher = requests.wait_for(|now| now.urgency > acted_on).await;
    if let Some(urgency) = higher.ok().map(|asked| asked.urgency) {
        return urgency;
    }
    // Nobody is left who could ask.
    std::future::pending().await
}

async fn news(epochs: &mut Option<HotRestart>) -> Result<Progress, process::Error> {
    match epochs {
        Some(epochs) => epochs.news().await,
        None => std::future::pending().await,
    }
}

pub(super) async fn reached(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
