//! The ways down, as a state machine.
//!
//! Asked to stop, Envoy first drains: it is told to, then left alone for a while. It is terminated
//! when that time is over, or at once when somebody asks a second time, and killed when it does not
//! heed that, or when somebody asks a third time. It may exit by itself at any moment.
//!
//! Pure: events in, one action out. Does not look at a clock, a process or a socket.

use std::time::Duration;

/// How long each step may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Between the drain call and termination.
    pub drain: Duration,
    /// Between termination and the kill.
    pub terminate: Duration,
    /// Between the kill and giving up on a process the kernel cannot end.
    pub kill: Duration,
}

/// Where Envoy is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Running,
    /// The drain call is under way.
    Announcing,
    Draining,
    Terminating,
    Killing,
    Exited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody asked, for the first time or again.
    StopAsked,
    /// The drain call was answered, or given up.
    Announced,
    /// The wait of the last action is over.
    Deadline,
    EnvoyExited,
}

/// What to do next. The waits are for [`Event::Deadline`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    Announce,
    Wait(Duration),
    TerminateAndWait(Duration),
    KillAndWait(Duration),
    /// Envoy cannot be ended. Leave.
    GiveUp,
}

/// One Envoy, from its start to its end.
#[derive(Debug)]
pub struct Descent {
    phase: Phase,
    limits: Limits,
}

impl Descent {
    pub fn new(limits: Limits) -> Self {
        Self {
            phase: Phase::Running,
            limits,
        }
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    pub fn apply(&mut self, event: Event) -> Action {
        use Event::{Announced, Deadline, EnvoyExited, StopAsked};
        use Phase::{Announcing, Draining, Exited, Killing, Running, Terminating};
        let (phase, action) = match (self.phase, event) {
            (_, EnvoyExited) => (Exited, Action::Nothing),
            (Running, StopAsked) => (Announcing, Action::Announce),
            (Announcing, Announced) => (Draining, Action::Wait(self.limits.drain)),
            (Announcing, StopAsked) | (Draining, StopAsked | Deadline) => {
                (Terminating, Action::TerminateAndWait(self.limits.terminate))
            }
            (Terminating, StopAsked | Deadline) => (Killing, Action::KillAndWait(self.limits.kill)),
            (Killing, Deadline) => (Killing, Action::GiveUp),
            (phase, _) => (phase, Action::Nothing),
        };
        self.phase = phase;
        action
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Event::{Announced, Deadline, EnvoyExited, StopAsked};

    const LIMITS: Limits = Limits {
        drain: Duration::from_secs(5),
        terminate: Duration::from_secs(3),
        kill: Duration::from_secs(1),
    };
    const TERMINATE: Action = Action::TerminateAndWait(LIMITS.terminate);
    const KILL: Action = Action::KillAndWait(LIMITS.kill);

    fn check(events: &[Event], last: Action, phase: Phase) {
        let mut descent = Descent::new(LIMITS);
        let actions: Vec<_> = events.iter().map(|event| descent.apply(*event)).collect();
        assert_eq!(
            (actions.last(), descent.phase()),
            (Some(&last), phase),
            "{events:?}"
        );
    }

    #[test]
    fn drains_then_terminates_then_kills_then_gives_up() {
        let way = [StopAsked, Announced, Deadline, Deadline, Deadline];
        check(&way[..1], Action::Announce, Phase::Announcing);
        check(&way[..2], Action::Wait(LIMITS.drain), Phase::Draining);
        check(&way[..3], TERMINATE, Phase::Terminating);
        check(&way[..4], KILL, Phase::Killing);
        check(&way, Action::GiveUp, Phase::Killing);
    }

    #[test]
    fn each_further_request_skips_the_wait_it_meets() {
        check(&[StopAsked, StopAsked], TERMINATE, Phase::Terminating);
        check(
            &[StopAsked, Announced, StopAsked],
            TERMINATE,
            Phase::Terminating,
        );
        check(&[StopAsked, StopAsked, StopAsked], KILL, Phase::Killing);
        check(&[StopAsked; 4], Action::Nothing, Phase::Killing);
    }

    #[test]
    fn a_late_answer_to_the_drain_call_changes_nothing() {
        check(
            &[StopAsked, StopAsked, Announced],
            Action::Nothing,
            Phase::Terminating,
        );
    }

    #[test]
    fn an_exit_ends_every_phase_and_nothing_follows() {
        let way = [StopAsked, Announced, Deadline, Deadline];
        for length in 0..=way.len() {
            let mut events = way[..length].to_vec();
            events.push(EnvoyExited);
            check(&events, Action::Nothing, Phase::Exited);
            events.push(StopAsked);
            check(&events, Action::Nothing, Phase::Exited);
        }
    }
}
