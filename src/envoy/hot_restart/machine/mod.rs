//! Decides about hot restarts: a state machine without I/O, events in, one action out.
//!
//! A restart checks the inputs of the successor, starts it next to the current Envoy, and promotes it once it is
//! live; the previous Envoy, now its parent, finishes its requests and exits. There is one restart at a time: a
//! request during a restart waits until the parent has exited. A successor that fails is killed and not asked to
//! quit, because it would end its parent. From its start until it is live, Envoy's initializing flag in the shared
//! memory is set. After a failure the flag remains, so no other successor can use the base id: the next restart is a
//! full one.

use crate::envoy::machine::EndBy;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The current Envoy serves and may be replaced.
    Ready {
        /// True if it shares a base id with successors.
        has_base_id: bool,
    },
    /// The current Envoy drains, shuts down, or has exited.
    Unready,
    Stop,
    Wanted,
    /// The inputs are unchanged or unusable.
    NothingToStart,
    /// The inputs have changed and are usable.
    Usable {
        /// True if the current Envoy responds at the admin port. A successor that failed may have taken the port.
        owns_admin_port: bool,
    },
    /// The successor serves.
    Live,
    /// The time of the last action, [`Action::Start`] or [`Action::Promote`], is over.
    Deadline,
    /// A successor in another container is about to start.
    Lend,
    /// The successor in the other container has exited without taking over.
    Reclaim {
        /// True if its initializing flag has been cleared.
        is_flag_clear: bool,
    },
    SuccessorExited,
    ParentExited {
        /// True if its successor had not ended it yet, and the agent cannot take its sockets.
        is_early: bool,
    },
    CurrentExited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Read and validate the inputs.
    Check,
    /// Start the successor and report [`Event::Live`], or [`Event::Deadline`] after its time.
    Start,
    KillSuccessor,
    /// Make the successor the current Envoy and the previous one its parent. Report [`Event::Deadline`] if the
    /// parent does not exit in time.
    Promote,
    KillParent,
    /// Shut the current Envoy down, then start the next one.
    Replace(EndBy),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Idle,
    Checking,
    Starting,
    /// The successor has been killed.
    Failing,
    /// A successor in another container starts.
    Lent,
    /// The successor serves; its parent exits soon.
    Leaving,
    /// The parent has been killed, or its successor has exited.
    WaitingForParentExit,
}

#[derive(Debug)]
pub struct Machine {
    phase: Phase,
    /// True if the current Envoy may be replaced.
    pub(super) is_ready: bool,
    is_wanted: bool,
    is_stopped: bool,
    /// True if a successor can use the base id of the current Envoy.
    is_base_id_usable: bool,
}

impl Machine {
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Idle,
            is_ready: false,
            is_wanted: false,
            is_stopped: false,
            is_base_id_usable: true,
        }
    }

    /// Begins with an Envoy whose parent is in another container.
    pub fn begin_with_parent(&mut self) {
        self.phase = Phase::Leaving;
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Changes the phase by an event, and returns what the caller must do. Events that have no meaning in the current
    /// phase change nothing.
    pub fn apply(&mut self, event: Event) -> Action {
        use Phase::{Checking, Failing, Idle, Leaving, Lent, Starting, WaitingForParentExit};
        match (self.phase, event) {
            (_, Event::Ready { has_base_id }) => {
                self.is_ready = !self.is_stopped;
                self.is_base_id_usable &= has_base_id;
                self.begin_if_wanted()
            }
            (_, Event::Unready) => {
                self.is_ready = false;
                Action::Nothing
            }
            (_, Event::Stop) => self.stop(),
            (_, Event::Wanted) => {
                self.is_wanted = true;
                self.begin_if_wanted()
            }
            (_, Event::CurrentExited) => self.handle_current_exit(),
            (Idle, Event::Lend) if self.is_ready && self.is_base_id_usable => {
                // The initializing flag stays set until the successor serves.
                self.is_base_id_usable = false;
                self.enter(Lent, Action::Nothing)
            }
            (Lent, Event::Reclaim { is_flag_clear }) => {
                self.is_base_id_usable |= is_flag_clear;
                self.finish_restart()
            }
            (Checking, Event::NothingToStart) => self.finish_restart(),
            (Checking, Event::Usable { owns_admin_port }) => self.start_or_replace(owns_admin_port),
            (Starting, Event::Live) => {
                self.is_base_id_usable = true;
                self.enter(Leaving, Action::Promote)
            }
            (Starting, Event::Deadline) => self.enter(Failing, Action::KillSuccessor),
            (Starting | Failing, Event::SuccessorExited) => self.finish_restart(),
            (Leaving, Event::ParentExited { is_early: true }) if self.is_ready => {
                // Envoy would fail or hang when it orders its dead parent to exit.
                self.replace(EndBy::Kill)
            }
            (Leaving | WaitingForParentExit, Event::ParentExited { .. }) => self.finish_restart(),
            (Leaving, Event::Deadline) => self.enter(WaitingForParentExit, Action::KillParent),
            _ => Action::Nothing,
        }
    }

    fn enter(&mut self, phase: Phase, action: Action) -> Action {
        self.phase = phase;
        action
    }

    /// Ends the current restart or loan, and begins the next restart if one is wanted.
    fn finish_restart(&mut self) -> Action {
        self.phase = Phase::Idle;
        self.begin_if_wanted()
    }

    /// Begins a wanted restart if none is running and the current Envoy may be replaced.
    fn begin_if_wanted(&mut self) -> Action {
        if self.phase != Phase::Idle || !self.is_ready || !self.is_wanted {
            return Action::Nothing;
        }
        self.is_wanted = false;
        self.enter(Phase::Checking, Action::Check)
    }

    /// Starts the successor if it can take over from the current Envoy, otherwise begins a full restart.
    fn start_or_replace(&mut self, owns_admin_port: bool) -> Action {
        if !self.is_ready {
            // The restart waits until an Envoy serves again.
            self.is_wanted = true;
            return self.finish_restart();
        }
        if !owns_admin_port || !self.is_base_id_usable {
            return self.replace(EndBy::Quit);
        }
        // The initializing flag stays set until the successor serves.
        self.is_base_id_usable = false;
        self.enter(Phase::Starting, Action::Start)
    }

    /// Begins a full restart. This machine has no part in it, so its phase is `Idle`.
    fn replace(&mut self, end_by: EndBy) -> Action {
        self.is_ready = false;
        self.enter(Phase::Idle, Action::Replace(end_by))
    }

    fn stop(&mut self) -> Action {
        self.is_ready = false;
        self.is_stopped = true;
        match self.phase {
            Phase::Starting => self.enter(Phase::Failing, Action::KillSuccessor),
            _ => Action::Nothing,
        }
    }

    fn handle_current_exit(&mut self) -> Action {
        self.is_ready = false;
        // The next Envoy has another base id.
        self.is_base_id_usable = true;
        match self.phase {
            // An Envoy that was asked to stop has ended its parent itself.
            Phase::Leaving if self.is_stopped => {
                self.enter(Phase::WaitingForParentExit, Action::Nothing)
            }
            Phase::Leaving => self.enter(Phase::WaitingForParentExit, Action::KillParent),
            Phase::Starting => {
                self.is_wanted = true;
                self.enter(Phase::Failing, Action::KillSuccessor)
            }
            // A running check continues; its result waits for an Envoy that serves.
            _ => Action::Nothing,
        }
    }
}

#[cfg(test)]
mod tests;
