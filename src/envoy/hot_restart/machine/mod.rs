//! The change from one Envoy to the next as a state machine.
//!
//! Somebody wants a restart: what the next would start from is checked, the next is started beside
//! the one that serves, and takes over when it serves itself; the old one leaves. One change at a
//! time: what is wanted meanwhile waits until the old one is gone. A next one that fails is killed,
//! never asked, as it would take the old one along. From its start until it serves it leaves a mark
//! in the memory they share, so after a failure the line of Envoys cannot be continued; another way
//! is taken next time.
//!
//! Does not look at a clock, a process or a socket: events in, one action out. Does not run the
//! Envoy that serves; [`crate::envoy::machine`] does.

use serde::Serialize;

use crate::envoy::machine::EndBy;

/// How one Envoy follows another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// It takes the sockets over from the one before.
    Hot,
    /// It binds the same ports beside the one before.
    Overlap,
    /// It starts when the one before has ended.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The one that serves does so, and may be replaced.
    Ready,
    /// It drains, is on its way down, or is gone.
    Unready,
    /// No Envoy is wanted any more.
    Stop,
    /// The one that serves has no line to continue.
    Unshared,
    Wanted,
    Checked(Verdict),
    /// The next one serves.
    Live,
    /// The wait of the last action is over.
    Deadline,
    NextExited,
    OldExited {
        /// Before its successor has sent it away.
        early: bool,
    },
    ServingExited,
}

/// Whether there is something to start, and beside what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The next would be what serves already.
    Unchanged,
    /// What there is cannot be used.
    Refused,
    Usable(Serving),
}

/// The one that serves, by its admin port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    Live,
    /// It serves, and nobody has the port: a next one that failed has taken it from it.
    WithoutAdminPort,
    /// It does not answer as it should.
    Unexpected,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Find out whether there is something to start.
    Check,
    /// Start the next one, and look out for [`Event::Live`] for some time.
    Start(Method),
    KillNext,
    /// The next one is now the one that serves; the one before is old, and leaves within some time.
    Promote(Method),
    KillOld,
    /// Start the one that serves again, at its place in the line.
    Relaunch,
    /// Bring the one that serves down, and start the next after it.
    Replace(EndBy),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Idle,
    Checking,
    /// The next one has started.
    Starting(Starting),
    /// The old one is about to leave.
    Leaving(Method),
    /// The old one has been killed.
    Clearing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starting {
    Awaited(Method),
    /// It has been killed.
    Failing,
}

/// From one Envoy to the next, over and over.
#[derive(Debug)]
pub struct Machine {
    phase: Phase,
    is_ready: bool,
    is_wanted: bool,
    /// Whether no Envoy is wanted any more.
    is_stopped: bool,
    /// Whether Envoys can share memory here.
    can_share: bool,
    /// Whether the line of the one that serves can be continued.
    is_continuable: bool,
    is_relaunched: bool,
}

impl Machine {
    pub fn new(can_share: bool) -> Self {
        Self {
            phase: Phase::Idle,
            is_ready: false,
            is_wanted: false,
            is_stopped: false,
            can_share,
            is_continuable: can_share,
            is_relaunched: false,
        }
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether the next change can be a hot restart.
    #[cfg(test)]
    fn is_continuable(&self) -> bool {
        self.is_continuable
    }

    pub fn apply(&mut self, event: Event) -> Action {
        use Event::{Checked, Deadline, Live, NextExited, OldExited, Unready, Wanted};
        use Phase::{Checking, Clearing, Idle, Leaving};
        use Starting::{Awaited, Failing};
        match (self.phase, event) {
            (_, Event::Ready) => {
                self.is_ready = true;
                self.next()
            }
            (_, Unready) => {
                self.is_ready = false;
                Action::Nothing
            }
            (_, Event::Stop) => self.stop(),
            (_, Event::Unshared) => {
                self.is_continuable = false;
                Action::Nothing
            }
            (_, Wanted) => {
                self.is_wanted = true;
                self.next()
            }
            (_, Event::ServingExited) => self.serving_exited(),
            (Checking, Checked(verdict)) => self.checked(verdict),
            (Phase::Starting(Awaited(method)), Live) => self.promote(method),
            (Phase::Starting(Awaited(_)), Deadline) => self.fail(),
            (Phase::Starting(_), NextExited) => self.rest(),
            (Leaving(Method::Hot), OldExited { early: true }) if self.is_ready => {
                self.phase = Idle;
                self.replace(EndBy::Kill)
            }
            (Leaving(_) | Clearing, OldExited { .. }) => self.rest(),
            (Leaving(_), Deadline) => {
                self.phase = Clearing;
                Action::KillOld
            }
            (
                Idle | Checking | Leaving(_) | Clearing | Phase::Starting(Awaited(_) | Failing),
                _,
            ) => Action::Nothing,
        }
    }

    /// Nothing is under way any more, so what waits may begin.
    fn rest(&mut self) -> Action {
        self.phase = Phase::Idle;
        self.next()
    }

    /// What was under way comes to nothing and has to begin again.
    fn want_again(&mut self) -> Action {
        self.is_wanted = true;
        self.rest()
    }

    fn next(&mut self) -> Action {
        let may_begin = self.is_ready && !self.is_stopped;
        if self.phase != Phase::Idle || !may_begin || !self.is_wanted {
            return Action::Nothing;
        }
        self.is_wanted = false;
        self.phase = Phase::Checking;
        Action::Check
    }

    fn checked(&mut self, verdict: Verdict) -> Action {
        let serving_state = match verdict {
            Verdict::Usable(serving_state) if self.is_ready => serving_state,
            // It is wanted still, of the next one that serves.
            Verdict::Usable(_) => return self.want_again(),
            Verdict::Unchanged | Verdict::Refused => return self.rest(),
        };
        let method = match serving_state {
            Serving::Live if self.is_continuable => Method::Hot,
            Serving::WithoutAdminPort => Method::Overlap,
            Serving::Live | Serving::Unexpected => {
                self.phase = Phase::Idle;
                return self.replace(EndBy::Quit);
            }
        };
        // The mark is there until the next one serves.
        self.is_continuable = false;
        self.phase = Phase::Starting(Starting::Awaited(method));
        Action::Start(method)
    }

    fn replace(&mut self, end_by: EndBy) -> Action {
        self.is_ready = false;
        Action::Replace(end_by)
    }

    fn promote(&mut self, method: Method) -> Action {
        self.phase = Phase::Leaving(method);
        self.is_continuable = self.can_share;
        self.is_relaunched = false;
        Action::Promote(method)
    }

    fn fail(&mut self) -> Action {
        self.phase = Phase::Starting(Starting::Failing);
        Action::KillNext
    }

    fn stop(&mut self) -> Action {
        self.is_ready = false;
        self.is_stopped = true;
        match self.phase {
            Phase::Starting(Starting::Awaited(_)) => self.fail(),
            Phase::Checking => self.rest(),
            _ => Action::Nothing,
        }
    }

    fn serving_exited(&mut self) -> Action {
        let may_relaunch = self.is_ready && !self.is_stopped && !self.is_relaunched;
        self.is_ready = false;
        match self.phase {
            Phase::Leaving(Method::Hot) if may_relaunch => {
                self.is_relaunched = true;
                return Action::Relaunch;
            }
            _ => self.is_continuable = self.can_share,
        }
        match self.phase {
            Phase::Leaving(_) => {
                self.phase = Phase::Clearing;
                if self.is_stopped {
                    // The one that was asked to end has sent it away.
                    return Action::Nothing;
                }
                Action::KillOld
            }
            Phase::Starting(Starting::Awaited(_)) => {
                self.is_wanted = true;
                self.fail()
            }
            Phase::Checking => self.want_again(),
            Phase::Idle | Phase::Clearing | Phase::Starting(Starting::Failing) => Action::Nothing,
        }
    }
}

#[cfg(test)]
mod tests;
