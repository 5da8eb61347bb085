//! Hot restart as a state machine without I/O: events in, one action out.
//!
//! When a restart is wanted, what the successor would start from is checked, the successor is started
//! beside the Envoy that serves, and takes over when it serves itself; the Envoy before, now its
//! parent, leaves. One restart at a time: what is wanted meanwhile waits until the parent is gone. A
//! successor that fails is killed and not asked to quit, as it would end its parent. From its start
//! until it serves it leaves a mark in the memory they share, so after a failure no successor can
//! use the same base id; the next restart is a full one.

use crate::envoy::machine::EndBy;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The Envoy that serves does so, and may be replaced.
    Ready {
        /// Whether it shares memory with a successor.
        shares_memory: bool,
    },
    /// It drains, is on its way down, or is gone.
    Unready,
    /// No Envoy is wanted any more.
    Stop,
    Wanted,
    /// The check found nothing to start: it is what serves already, or cannot be used.
    NothingToStart,
    /// The check found something to start.
    Usable {
        /// Whether the admin port is that of the Envoy that serves. A successor that failed may have
        /// taken it.
        is_live: bool,
    },
    Live,
    /// The wait of the last action is over.
    Deadline,
    /// A successor in another container is about to start.
    Lend,
    /// That successor is gone, and has not taken over.
    Reclaim {
        /// Whether its mark in the shared memory has been cleared.
        is_clear: bool,
    },
    SuccessorExited,
    ParentExited {
        /// Before its successor has ended it.
        early: bool,
    },
    ServingExited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Find out whether there is something to start.
    Check,
    /// Start the successor, and look out for [`Event::Live`] for some time.
    Start,
    KillSuccessor,
    /// The successor is now the Envoy that serves; the one before is its parent, and leaves within
    /// some time.
    Promote,
    KillParent,
    /// Shut the Envoy that serves down, and start the next after it.
    Replace(EndBy),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Idle,
    Checking,
    Starting,
    Failing,
    /// A successor in another container starts.
    Lent,
    /// The parent is about to leave.
    Leaving,
    Clearing,
}

#[derive(Debug)]
pub struct Machine {
    phase: Phase,
    is_ready: bool,
    is_wanted: bool,
    is_stopped: bool,
    /// Whether Envoys can share memory here.
    pub(super) can_share: bool,
    /// Whether a successor can use the base id of the Envoy that serves.
    is_continuable: bool,
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
        }
    }

    /// Begins with an Envoy whose parent is in another container.
    pub fn begin_with_parent(&mut self) {
        self.phase = Phase::Leaving;
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    pub fn apply(&mut self, event: Event) -> Action {
        use Phase::{Checking, Clearing, Failing, Idle, Leaving, Lent, Starting};
        match (self.phase, event) {
            (_, Event::Ready { shares_memory }) => {
                self.is_ready = true;
                self.is_continuable &= shares_memory;
                self.next()
            }
            (_, Event::Unready) => {
                self.is_ready = false;
                Action::Nothing
            }
            (_, Event::Stop) => self.stop(),
            (_, Event::Wanted) => {
                self.is_wanted = true;
                self.next()
            }
            (_, Event::ServingExited) => self.serving_exited(),
            (Idle, Event::Lend) if self.is_ready && !self.is_stopped && self.is_continuable => {
                // The mark is there until the successor serves.
                self.is_continuable = false;
                self.phase = Lent;
                Action::Nothing
            }
            (Lent, Event::Reclaim { is_clear }) => {
                self.is_continuable |= is_clear;
                self.rest()
            }
            (Checking, Event::NothingToStart) => self.rest(),
            (Checking, Event::Usable { is_live }) => self.usable(is_live),
            (Starting, Event::Live) => self.promote(),
            (Starting, Event::Deadline) => self.fail(),
            (Starting | Failing, Event::SuccessorExited) => self.rest(),
            (Leaving, Event::ParentExited { early: true }) if self.is_ready => {
                self.phase = Idle;
                self.replace(EndBy::Kill)
            }
            (Leaving | Clearing, Event::ParentExited { .. }) => self.rest(),
            (Leaving, Event::Deadline) => {
                self.phase = Clearing;
                Action::KillParent
            }
            _ => Action::Nothing,
        }
    }

    /// Nothing is under way any more, so what waits may begin.
    fn rest(&mut self) -> Action {
        self.phase = Phase::Idle;
        self.next()
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

    fn usable(&mut self, is_live: bool) -> Action {
        if !self.is_ready {
            // It is still wanted, once an Envoy serves again.
            self.is_wanted = true;
            return self.rest();
        }
        if !is_live || !self.is_continuable {
            self.phase = Phase::Idle;
            return self.replace(EndBy::Quit);
        }
        // The mark is there until the successor serves.
        self.is_continuable = false;
        self.phase = Phase::Starting;
        Action::Start
    }

    fn replace(&mut self, end_by: EndBy) -> Action {
        self.is_ready = false;
        Action::Replace(end_by)
    }

    fn promote(&mut self) -> Action {
        self.phase = Phase::Leaving;
        self.is_continuable = self.can_share;
        Action::Promote
    }

    fn fail(&mut self) -> Action {
        self.phase = Phase::Failing;
        Action::KillSuccessor
    }

    fn stop(&mut self) -> Action {
        self.is_ready = false;
        self.is_stopped = true;
        match self.phase {
            Phase::Starting => self.fail(),
            _ => Action::Nothing,
        }
    }

    fn serving_exited(&mut self) -> Action {
        self.is_ready = false;
        self.is_continuable = self.can_share;
        match self.phase {
            Phase::Leaving => {
                self.phase = Phase::Clearing;
                match self.is_stopped {
                    // The Envoy that was asked to end has ended its parent.
                    true => Action::Nothing,
                    false => Action::KillParent,
                }
            }
            Phase::Starting => {
                self.is_wanted = true;
                self.fail()
            }
            // A check goes on, and what it finds waits for an Envoy that serves.
            Phase::Checking | Phase::Idle | Phase::Clearing | Phase::Failing | Phase::Lent => {
                Action::Nothing
            }
        }
    }
}

#[cfg(test)]
mod tests;
