//! Decides about Envoy's start, shutdown and next start: a state machine without I/O, events in, one action out.
//!
//! A shutdown follows the steps of [`shutdown`](super::shutdown). The urgency of the request decides the first step.
//! A more urgent request skips steps; no event leads back to an earlier step. An Envoy that is already drained skips
//! the drain. The exit event says whether another Envoy may start.

use super::handle::State;
use super::shutdown::{Limits, Plan, PlannedStep, Step};
use crate::runtime::lifecycle::Urgency;

/// The phases in the order in which Envoy passes through them; `Pausing` comes after an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Initial,
    /// Envoy has exited, and the next one starts soon.
    Pausing,
    Starting,
    Running,
    /// The delay before the drain of an order. Envoy serves as before.
    Delaying,
    /// Drained by an order, before any stop request.
    Drained,
    Shutdown(Step),
    Exited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Begin,
    Live,
    /// Envoy must drain and keep running.
    DrainOrdered,
    DelayOver,
    StopRequested(Urgency),
    /// Envoy must shut down so that another one can start.
    Replace(EndBy),
    /// The event that the step waits for has happened or cannot be observed, or the time of the step is over.
    Done(Step),
    PauseOver,
    EnvoyExited {
        may_restart: bool,
    },
}

/// The end of an Envoy after the drain, if another one is to replace it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndBy {
    Quit,
    /// Kills an Envoy that would hang in `/quitquitquit`.
    Kill,
}

/// The next step of the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Start Envoy and report [`Event::Live`].
    Start,
    /// Wait before the drain of an order, and report [`Event::DelayOver`].
    Delay,
    Drain,
    /// Begin the step, and report [`Event::Done`] at the end of its time.
    Begin(PlannedStep),
    /// Wait before the next start, and report [`Event::PauseOver`].
    Pause,
    /// Return: Envoy has exited, and none will follow.
    Leave,
    /// Fail: the kernel did not end Envoy.
    GiveUp,
}

/// The state of Envoy from its first start to its last exit.
#[derive(Debug)]
pub struct Machine {
    phase: Phase,
    limits: Limits,
    requested: Urgency,
    /// True after a drain order: the shutdown then needs no drain.
    is_drained: bool,
    /// The end of Envoy if another one is to replace it.
    replaced: Option<EndBy>,
}

impl Phase {
    pub fn state(self) -> State {
        match self {
            Self::Initial => State::Initial,
            Self::Starting => State::Starting,
            Self::Running => State::Running,
            Self::Shutdown(step) if step >= Step::Quit => State::Stopping,
            Self::Delaying | Self::Drained | Self::Shutdown(_) => State::Draining,
            Self::Pausing | Self::Exited => State::Exited,
        }
    }
}

impl Machine {
    pub fn new(limits: Limits) -> Self {
        Self {
            phase: Phase::Initial,
            limits,
            requested: Urgency::Run,
            is_drained: false,
            replaced: None,
        }
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    pub fn requested(&self) -> Urgency {
        self.requested
    }

    pub fn is_stop_requested(&self) -> bool {
        self.requested > Urgency::Run
    }

    /// Returns true if the agent itself shuts Envoy down.
    pub fn expects_exit(&self) -> bool {
        self.is_stop_requested() || self.replaced.is_some()
    }

    pub fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// Returns the steps from the current phase to the exit. A more urgent request will shorten them.
    pub fn plan(&self) -> Plan {
        let first = match self.phase {
            Phase::Exited => return Plan::default(),
            Phase::Shutdown(step) => step,
            // An ordered drain is not repeated.
            _ if self.is_drained => Step::Quit,
            _ => Step::DrainDelay,
        };
        Plan(self.steps(|step| step >= first).collect())
    }

    /// Returns the steps of this shutdown among those that `among` accepts.
    fn steps(&self, among: impl Fn(Step) -> bool) -> impl Iterator<Item = PlannedStep> {
        let steps = Step::ALL.into_iter().filter(move |step| among(*step) && !self.skips(*step));
        steps.filter_map(|waits_for| {
            Some(PlannedStep { waits_for, at_most: self.limits.at_most(waits_for)? })
        })
    }

    /// Returns true if this shutdown leaves the step out.
    fn skips(&self, step: Step) -> bool {
        match step {
            // The other Envoy accepts connections at once.
            Step::DrainDelay => self.replaced.is_some() && !self.is_stop_requested(),
            // No Envoy would serve new requests during this wait.
            Step::LongRequests => self.replaced.is_some() && !self.is_stop_requested(),
            Step::Quit | Step::Termination => self.replaced == Some(EndBy::Kill),
            _ => false,
        }
    }

    /// Changes the phase by an event, and returns what the supervisor must do. Events that have no meaning in the
    /// current phase change nothing.
    pub fn apply(&mut self, event: Event) -> Action {
        use Phase::{Delaying, Drained, Exited, Initial, Pausing, Running, Shutdown, Starting};
        match (self.phase, event) {
            (Exited, _) => Action::Nothing,
            (_, Event::EnvoyExited { may_restart }) => self.handle_exit(may_restart),
            (_, Event::StopRequested(urgency)) => self.handle_stop_request(urgency),
            (_, Event::DrainOrdered) => self.handle_drain_order(),
            (Delaying, Event::DelayOver) => {
                self.is_drained = true;
                self.enter(Drained, Action::Drain)
            }
            (Initial, Event::Begin) | (Pausing, Event::PauseOver) => {
                self.enter(Starting, Action::Start)
            }
            (Starting, Event::Live) if self.is_drained => self.enter(Drained, Action::Drain),
            (Starting, Event::Live) => self.enter(Running, Action::Nothing),
            (Running | Drained, Event::Replace(end_by)) => {
                self.replaced = Some(end_by);
                self.begin(|_| true)
            }
            (Shutdown(step), Event::Done(done)) if done == step => self.begin(|next| next > step),
            _ => Action::Nothing,
        }
    }

    /// Begins the first step that `among` accepts. Gives up after the last one.
    fn begin(&mut self, among: impl Fn(Step) -> bool) -> Action {
        let Some(step) = self.steps(among).next() else {
            return Action::GiveUp;
        };
        self.enter(Phase::Shutdown(step.waits_for), Action::Begin(step))
    }

    fn handle_stop_request(&mut self, urgency: Urgency) -> Action {
        self.requested = self.requested.max(urgency);
        let first = match self.requested {
            Urgency::Run => return Action::Nothing,
            Urgency::Drain if self.is_drained => Step::Quit,
            Urgency::Drain => Step::DrainDelay,
            Urgency::Terminate => Step::Quit,
            Urgency::Kill => Step::Kill,
        };
        match self.phase {
            Phase::Initial | Phase::Pausing => self.enter(Phase::Exited, Action::Leave),
            phase if phase < Phase::Shutdown(first) => self.begin(|step| step >= first),
            _ => Action::Nothing,
        }
    }

    fn handle_drain_order(&mut self) -> Action {
        let has_delay = self.limits.at_most(Step::DrainDelay).is_some();
        match self.phase {
            Phase::Delaying => return Action::Nothing,
            Phase::Running if has_delay => return self.enter(Phase::Delaying, Action::Delay),
            _ => {}
        }
        self.is_drained = true;
        match self.phase {
            // A starting Envoy may not accept the call yet; it is repeated once Envoy is live.
            Phase::Starting => Action::Drain,
            Phase::Running | Phase::Drained => self.enter(Phase::Drained, Action::Drain),
            _ => Action::Nothing,
        }
    }

    fn handle_exit(&mut self, may_restart: bool) -> Action {
        // The next Envoy is drained without another delay.
        self.is_drained |= self.phase == Phase::Delaying;
        let may_restart = self.replaced.take().is_some() || may_restart;
        if may_restart && !self.is_stop_requested() {
            self.enter(Phase::Pausing, Action::Pause)
        } else {
            self.enter(Phase::Exited, Action::Leave)
        }
    }

    fn enter(&mut self, phase: Phase, action: Action) -> Action {
        self.phase = phase;
        action
    }
}

#[cfg(test)]
mod tests;
