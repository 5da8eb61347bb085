//! Envoy's life as a state machine without I/O: start, shutdown, and the next start.
//!
//! A shutdown follows the steps of [`shutdown`](super::shutdown). The urgency of the request decides the first step;
//! a more urgent request skips steps, and no event goes back. An Envoy that was drained before skips its drain. The
//! event of an exit says whether another Envoy may start.

use super::handle::State;
use super::shutdown::{Limits, Plan, PlannedStep, Step};
use crate::lifecycle::Urgency;

/// Where Envoy is, in this order but for `Pausing`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Initial,
    /// There is none for a moment: the next is about to start.
    Pausing,
    Starting,
    Running,
    /// Drained ahead of any request to stop.
    Drained,
    Shutdown(Step),
    Exited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Begin,
    Live,
    /// Envoy is to be drained and not ended.
    DrainOrdered,
    StopRequested(Urgency),
    /// Another Envoy is to take this one's place, once this one has ended.
    Replace(EndBy),
    /// What a step waits for has come, or cannot be waited for.
    Done(Step),
    /// The wait of the last action is over.
    Deadline,
    EnvoyExited {
        may_restart: bool,
    },
}

/// How an Envoy that is to be replaced ends after its drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndBy {
    Quit,
    /// Asked to quit it would hang.
    Kill,
}

/// What to do next. The waits are for [`Event::Deadline`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Start Envoy and look out for [`Event::Live`].
    Start,
    Drain,
    Begin(PlannedStep),
    /// Wait as long as is right before the next start.
    Pause,
    /// Envoy is gone, and none will follow.
    Leave,
    GiveUp,
}

/// From the first start to the last end.
#[derive(Debug)]
pub struct Machine {
    phase: Phase,
    limits: Limits,
    requested: Urgency,
    /// Whether a drain was ordered, so that the shutdown needs none.
    is_drained: bool,
    /// Whether and how Envoy ends for the next.
    replaced: Option<EndBy>,
}

impl Phase {
    pub fn state(self) -> State {
        match self {
            Self::Initial => State::Initial,
            Self::Starting => State::Starting,
            Self::Running => State::Running,
            Self::Shutdown(step) if step >= Step::Quit => State::Stopping,
            Self::Drained | Self::Shutdown(_) => State::Draining,
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

    pub fn is_asked_to_stop(&self) -> bool {
        self.requested > Urgency::Run
    }

    /// Whether Envoy shuts down because the agent wants it to.
    pub fn expects_the_end(&self) -> bool {
        self.is_asked_to_stop() || self.replaced.is_some()
    }

    pub fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// The steps from here to the end, unless a more urgent request comes.
    pub fn plan(&self) -> Plan {
        let first = match self.phase {
            Phase::Exited => return Plan::default(),
            Phase::Shutdown(step) => step,
            // An ordered drain is not repeated.
            _ if self.is_drained => Step::Quit,
            _ => Step::DrainCall,
        };
        Plan(self.steps(|step| step >= first).collect())
    }

    /// The steps among these that this shutdown has.
    fn steps(&self, among: impl Fn(Step) -> bool) -> impl Iterator<Item = PlannedStep> {
        let steps = Step::ALL.into_iter();
        let steps = steps.filter(move |step| among(*step) && !self.skips(*step));
        steps.filter_map(|waits_for| {
            let at_most = self.limits.of(waits_for)?;
            Some(PlannedStep { waits_for, at_most })
        })
    }

    fn skips(&self, step: Step) -> bool {
        match step {
            // No Envoy would serve meanwhile.
            Step::LongRequests => self.replaced.is_some() && !self.is_asked_to_stop(),
            Step::Quit | Step::Termination => self.replaced == Some(EndBy::Kill),
            _ => false,
        }
    }

    pub fn apply(&mut self, event: Event) -> Action {
        use Phase::{Drained, Exited, Initial, Pausing, Running, Shutdown, Starting};
        match (self.phase, event) {
            (Exited, _) => Action::Nothing,
            (_, Event::EnvoyExited { may_restart }) => self.exited(may_restart),
            (_, Event::StopRequested(urgency)) => self.stop_requested(urgency),
            (_, Event::DrainOrdered) => self.drain_ordered(),
            (Initial, Event::Begin) | (Pausing, Event::Deadline) => {
                self.enter(Starting, Action::Start)
            }
            (Starting, Event::Live) if self.is_drained => self.enter(Drained, Action::Drain),
            (Starting, Event::Live) => self.enter(Running, Action::Nothing),
            (Running | Drained, Event::Replace(end_by)) => {
                self.replaced = Some(end_by);
                self.begin(|_| true)
            }
            (Shutdown(step), Event::Deadline) => self.begin(|next| next > step),
            (Shutdown(step), Event::Done(done)) if done == step => self.begin(|next| next > step),
            _ => Action::Nothing,
        }
    }

    /// Begins the first of these steps. After the last there is nothing left to do.
    fn begin(&mut self, among: impl Fn(Step) -> bool) -> Action {
        let step = self.steps(among).next();
        match step {
            Some(step) => self.enter(Phase::Shutdown(step.waits_for), Action::Begin(step)),
            None => Action::GiveUp,
        }
    }

    fn stop_requested(&mut self, urgency: Urgency) -> Action {
        self.requested = self.requested.max(urgency);
        let first = match self.requested {
            Urgency::Run => return Action::Nothing,
            Urgency::Drain if self.is_drained => Step::Quit,
            Urgency::Drain => Step::DrainCall,
            Urgency::Terminate => Step::Quit,
            Urgency::Kill => Step::Kill,
        };
        match self.phase {
            Phase::Initial | Phase::Pausing => self.enter(Phase::Exited, Action::Leave),
            phase if phase < Phase::Shutdown(first) => self.begin(|step| step >= first),
            _ => Action::Nothing,
        }
    }

    fn drain_ordered(&mut self) -> Action {
        self.is_drained = true;
        match self.phase {
            // The call is repeated when Envoy serves, should this be too early.
            Phase::Starting => Action::Drain,
            Phase::Running | Phase::Drained => self.enter(Phase::Drained, Action::Drain),
            _ => Action::Nothing,
        }
    }

    fn exited(&mut self, may_restart: bool) -> Action {
        let may_restart = self.replaced.take().is_some() || may_restart;
        if may_restart && !self.is_asked_to_stop() {
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
