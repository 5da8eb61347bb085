//! Envoy's life as a state machine: up, and every way down.
//!
//! Asked to stop, Envoy drains, closes its listeners, finishes what outlasts the drain, is asked to
//! quit, terminated, and killed, each step after the one before has had its time. How urgent the
//! request is says where to begin; a more urgent one goes further at once and nothing goes back. An
//! Envoy told to drain beforehand skips its drain. One that ends by itself is started again if the
//! event says that it may be.
//!
//! Does not look at a clock, a process or a socket: events in, one action out.

use std::time::Duration;

use super::handle::State;
use super::shutdown::{Plan, PlannedStep, Step};
use crate::lifecycle::Urgency;

/// How long each step may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For the answer to the drain call.
    pub drain_call: Duration,
    pub drain: Drain,
    /// For requests that outlast a drain for a time; zero cuts them.
    pub long_requests: Duration,
    /// Between asking Envoy to quit and SIGTERM.
    pub quit: Duration,
    /// Between SIGTERM and SIGKILL.
    pub terminate: Duration,
    /// Between SIGKILL and giving up on a process the kernel cannot end.
    pub kill: Duration,
}

/// What ends a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    For(Duration),
    /// The end of the last connection.
    UntilIdle {
        at_least: Duration,
        at_most: Duration,
    },
}

/// The last part of a drain is for requests under way, as nothing new is let in: a quarter, and no
/// longer than this.
const LAST_REQUESTS: Duration = Duration::from_secs(1);

/// A drain cut into its steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    time: Duration,
    /// The longest wait for connections, if they are waited for.
    connections: Option<Duration>,
    last_requests: Duration,
}

/// Where Envoy is. From `Announcing` on it is on its way down, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// There is no Envoy yet.
    Initial,
    /// There is none for a moment: the next is about to start.
    Pausing,
    Starting,
    Running,
    /// Told to send its clients away ahead of any request to stop.
    Drained,
    /// The drain call is under way.
    Announcing,
    Draining,
    /// Drained for as long as it had to; its connections are counted.
    Counting,
    /// Nothing new is let in; requests under way may end.
    Closing,
    /// The drain is over, and requests under way may still end.
    Outlasting,
    Quitting,
    Terminating,
    Killing,
    Exited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Begin,
    /// Envoy serves.
    Live,
    /// Somebody wants Envoy drained and not ended.
    DrainOrdered,
    /// Somebody wants the end, this urgently.
    StopRequested(Urgency),
    /// Another Envoy is to take this one's place, once this one has ended.
    Replace(EndBy),
    /// The drain call was answered, or given up.
    Answered,
    /// No connection, or no request, is left, or they cannot be counted.
    Idle,
    /// Envoy cannot be asked to quit.
    QuitRefused,
    /// The wait of the last action is over.
    Deadline,
    EnvoyExited {
        may_restart: bool,
    },
}

/// How an Envoy ends that is to be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndBy {
    /// On its usual way down.
    Quit,
    /// Drained, then killed: asked to quit it would hang.
    Kill,
}

/// What to do next. The waits are for [`Event::Deadline`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Start Envoy and look out for [`Event::Live`].
    Start,
    /// Tell Envoy to drain and to stay.
    Tell,
    Announce(Duration),
    Wait(Duration),
    /// Look out for [`Event::Idle`].
    Count(Duration),
    /// Have Envoy close its listeners, and look out for [`Event::Idle`].
    Close(Duration),
    /// Let requests under way end, and look out for [`Event::Idle`].
    Outlast(Duration),
    Quit(Duration),
    Terminate(Duration),
    Kill(Duration),
    /// Wait as long as is right before the next start.
    Pause,
    /// Envoy is gone, and none will follow.
    Leave,
    /// Envoy cannot be ended.
    GiveUp,
}

/// From the first start to the last end.
#[derive(Debug)]
pub struct Machine {
    phase: Phase,
    limits: Limits,
    asked: Urgency,
    /// Whether a drain was ordered, so that the end needs none.
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
            Self::Drained
            | Self::Announcing
            | Self::Draining
            | Self::Counting
            | Self::Closing
            | Self::Outlasting => State::Draining,
            Self::Quitting | Self::Terminating | Self::Killing => State::Stopping,
            Self::Pausing | Self::Exited => State::Exited,
        }
    }
}

impl Machine {
    pub fn new(limits: Limits) -> Self {
        Self {
            phase: Phase::Initial,
            limits,
            asked: Urgency::Run,
            is_drained: false,
            replaced: None,
        }
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    pub fn is_asked_to_stop(&self) -> bool {
        self.asked > Urgency::Run
    }

    /// Whether Envoy is on its way down because the agent wants it to.
    pub fn expects_the_end(&self) -> bool {
        self.is_asked_to_stop() || self.replaced.is_some()
    }

    pub fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// The steps from here to the end, as long as nobody makes it more urgent.
    pub fn plan(&self) -> Plan {
        use Step::{Connections, DrainCall, DrainTime, Kill, LastRequests, LongRequests};
        use Step::{Quit, Termination};
        let parts = self.limits.drain.parts();
        let steps = [
            (Phase::Announcing, DrainCall, Some(self.limits.drain_call)),
            (Phase::Draining, DrainTime, Some(parts.time)),
            (Phase::Counting, Connections, parts.connections),
            (Phase::Closing, LastRequests, Some(parts.last_requests)),
            (
                Phase::Outlasting,
                LongRequests,
                self.outlast().filter(|_| self.outlasts()),
            ),
            (Phase::Quitting, Quit, Some(self.limits.quit)),
            (Phase::Terminating, Termination, Some(self.limits.terminate)),
            (Phase::Killing, Kill, Some(self.limits.kill)),
        ];
        let step = |(phase, waits_for, limit): (Phase, Step, Option<Duration>)| {
            let at_most = limit.filter(|_| phase >= self.next_step())?;
            Some(PlannedStep { waits_for, at_most })
        };
        Plan(steps.into_iter().filter_map(step).collect())
    }

    /// Where the steps of an end begin: a drain that was ordered is not repeated.
    fn next_step(&self) -> Phase {
        match self.phase {
            early if self.is_drained && early < Phase::Announcing => Phase::Quitting,
            phase => phase,
        }
    }

    pub fn apply(&mut self, event: Event) -> Action {
        use Event::{
            Answered, Begin, Deadline, DrainOrdered, EnvoyExited, Idle, Live, QuitRefused,
        };
        use Phase::{Announcing, Closing, Counting, Draining, Exited, Initial, Killing, Pausing};
        use Phase::{Outlasting, Quitting, Running, Starting, Terminating};
        match (self.phase, event) {
            (Exited, _) => Action::Nothing,
            (_, EnvoyExited { may_restart }) => self.exited(may_restart),
            (_, Event::StopRequested(urgency)) => self.asked(urgency),
            (_, DrainOrdered) => self.ordered(),
            (Initial, Begin) | (Pausing, Deadline) => self.enter(Starting),
            (Running | Phase::Drained, Event::Replace(end_by)) => {
                self.replaced = Some(end_by);
                self.enter(Announcing)
            }
            (Starting, Live) if self.is_drained => self.enter(Phase::Drained),
            (Starting, Live) => self.enter(Running),
            (Announcing, Answered | Deadline) => self.enter(Draining),
            (Draining, Deadline) => match self.limits.drain {
                Drain::For(_) => self.enter(Closing),
                Drain::UntilIdle { .. } => self.enter(Counting),
            },
            (Counting, Idle | Deadline) => self.enter(Closing),
            (Closing, Deadline) if self.outlasts() => self.enter(Outlasting),
            (Closing | Outlasting, Idle | Deadline) => self.enter(Quitting),
            (Quitting, QuitRefused | Deadline) => self.enter(Terminating),
            (Terminating, Deadline) => self.enter(Killing),
            (Killing, Deadline) => Action::GiveUp,
            _ => Action::Nothing,
        }
    }

    /// How long requests may outlast the drain before the end, if they may. A drain until idle has
    /// waited for them.
    fn outlast(&self) -> Option<Duration> {
        let is_timed = matches!(self.limits.drain, Drain::For(_));
        let may = is_timed && !self.limits.long_requests.is_zero();
        may.then_some(self.limits.long_requests)
    }

    /// Whether they do. An Envoy that another follows leaves nobody to serve meanwhile.
    fn outlasts(&self) -> bool {
        let is_last = self.replaced.is_none() || self.is_asked_to_stop();
        is_last && self.outlast().is_some()
    }

    fn asked(&mut self, urgency: Urgency) -> Action {
        self.asked = self.asked.max(urgency);
        let target = match self.asked {
            Urgency::Run => return Action::Nothing,
            Urgency::Drain if self.is_drained => Phase::Quitting,
            Urgency::Drain => Phase::Announcing,
            Urgency::Terminate => Phase::Quitting,
            Urgency::Kill => Phase::Killing,
        };
        match self.phase {
            Phase::Initial | Phase::Pausing => self.enter(Phase::Exited),
            phase if phase < target => self.enter(target),
            _ => Action::Nothing,
        }
    }

    fn ordered(&mut self) -> Action {
        self.is_drained = true;
        match self.phase {
            // It will be told again when it serves, should this be too early.
            Phase::Starting => Action::Tell,
            Phase::Running | Phase::Drained => self.enter(Phase::Drained),
            _ => Action::Nothing,
        }
    }

    fn exited(&mut self, may_restart: bool) -> Action {
        let may_restart = self.replaced.take().is_some() || may_restart;
        let restarts = may_restart && !self.is_asked_to_stop();
        self.enter(if restarts {
            Phase::Pausing
        } else {
            Phase::Exited
        })
    }

    fn enter(&mut self, phase: Phase) -> Action {
        let hangs = self.replaced == Some(EndBy::Kill);
        let phase = match phase {
            Phase::Quitting | Phase::Terminating if hangs => Phase::Killing,
            phase => phase,
        };
        self.phase = phase;
        let parts = self.limits.drain.parts();
        match phase {
            Phase::Initial | Phase::Running => Action::Nothing,
            Phase::Pausing => Action::Pause,
            Phase::Starting => Action::Start,
            Phase::Drained => Action::Tell,
            Phase::Announcing => Action::Announce(self.limits.drain_call),
            Phase::Draining => Action::Wait(parts.time),
            Phase::Counting => Action::Count(parts.connections.unwrap_or_default()),
            Phase::Closing => Action::Close(parts.last_requests),
            Phase::Outlasting => Action::Outlast(self.limits.long_requests),
            Phase::Quitting => Action::Quit(self.limits.quit),
            Phase::Terminating => Action::Terminate(self.limits.terminate),
            Phase::Killing => Action::Kill(self.limits.kill),
            Phase::Exited => Action::Leave,
        }
    }
}

impl Drain {
    /// The longest it may last.
    pub(super) fn at_most(self) -> Duration {
        match self {
            Self::For(time) => time,
            Self::UntilIdle { at_most, .. } => at_most,
        }
    }

    /// Its steps, which together take no longer than the whole.
    fn parts(self) -> Parts {
        let last_requests = LAST_REQUESTS.min(self.at_most() / 4);
        let rest = self.at_most() - last_requests;
        let (time, connections) = match self {
            Self::For(_) => (rest, None),
            Self::UntilIdle { at_least, .. } => {
                let at_least = at_least.min(rest);
                (at_least, Some(rest - at_least))
            }
        };
        Parts {
            time,
            connections,
            last_requests,
        }
    }
}

#[cfg(test)]
mod tests;
