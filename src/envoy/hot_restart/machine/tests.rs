//! Tests the state machine: selected sequences of events by table, other sequences at random.

use proptest::prelude::*;

use super::*;
use Event::{
    CurrentExited, Deadline, Live, NothingToStart, ParentExited, Stop, SuccessorExited, Usable,
    Wanted,
};

/// The exit of a successor in another container, whose initializing flag is still set.
const RECLAIM: Event = Event::Reclaim { is_flag_clear: false };
const READY: Event = Event::Ready { has_base_id: true };
const UNSHARED: Event = Event::Ready { has_base_id: false };
const USABLE: Event = Usable { owns_admin_port: true };
const NO_ADMIN_PORT: Event = Usable { owns_admin_port: false };
const PARENT_EXITED: Event = ParentExited { is_early: false };
const PARENT_EXITED_EARLY: Event = ParentExited { is_early: true };

/// Applies events to a machine, and checks the action that each event leads to.
fn walk(way: &[(Event, Action)]) -> Machine {
    let mut machine = Machine::new();
    for (at, (event, expected)) in way.iter().enumerate() {
        let before = machine.phase();
        let action = machine.apply(*event);
        assert_eq!(action, *expected, "step {at}: {event:?} in {before:?}");
    }
    machine
}

fn after(start: &[(Event, Action)], then: &[(Event, Action)]) -> Machine {
    walk(&[start, then].concat())
}

const STARTED: [(Event, Action); 3] =
    [(READY, Action::Nothing), (Wanted, Action::Check), (USABLE, Action::Start)];
const PROMOTED: [(Event, Action); 4] =
    [STARTED[0], STARTED[1], STARTED[2], (Live, Action::Promote)];

#[test]
fn a_successor_is_validated_started_and_promoted_and_the_parent_exits() {
    let machine = after(&PROMOTED, &[(PARENT_EXITED, Action::Nothing)]);
    assert_eq!(machine.phase(), Phase::Idle);
    assert!(machine.is_base_id_usable);
}

#[test]
fn a_restart_requested_during_a_restart_waits_until_the_parent_exits() {
    let again = [
        (Wanted, Action::Nothing),
        (Wanted, Action::Nothing),
        (PARENT_EXITED, Action::Check),
        (NothingToStart, Action::Nothing),
    ];
    after(&PROMOTED, &again);
    walk(&[(Wanted, Action::Nothing), (READY, Action::Check)]);
}

#[test]
fn unchanged_or_invalid_inputs_start_no_successor() {
    let machine = after(&STARTED[..2], &[(NothingToStart, Action::Nothing)]);
    assert_eq!(machine.phase(), Phase::Idle);
    assert!(machine.is_base_id_usable);
}

#[test]
fn a_failed_successor_makes_the_next_restart_full_and_later_ones_hot() {
    let killed = [(Deadline, Action::KillSuccessor), (SuccessorExited, Action::Nothing)];
    for failure in [&killed[..], &[(SuccessorExited, Action::Nothing)]] {
        let failed = [&STARTED[..], failure].concat();
        let machine = walk(&failed);
        assert!(!machine.is_base_id_usable);
        for checked in [USABLE, NO_ADMIN_PORT] {
            let full = [
                (Wanted, Action::Check),
                (checked, Action::Replace(EndBy::Quit)),
                (CurrentExited, Action::Nothing),
                (READY, Action::Nothing),
                (Wanted, Action::Check),
                (USABLE, Action::Start),
            ];
            after(&failed, &full);
        }
    }
}

#[test]
fn a_dead_successors_parent_is_killed_before_the_next_replacement() {
    let again = [
        (CurrentExited, Action::KillParent),
        (READY, Action::Nothing),
        (Wanted, Action::Nothing),
        (PARENT_EXITED, Action::Check),
    ];
    assert!(after(&PROMOTED, &again).is_base_id_usable);
}

#[test]
fn the_successor_of_a_dead_parent_is_replaced_before_it_hangs() {
    let early = (PARENT_EXITED_EARLY, Action::Replace(EndBy::Kill));
    after(&PROMOTED, &[early]);
    // After a stop request, the successor is not replaced.
    after(&PROMOTED, &[(Stop, Action::Nothing), (PARENT_EXITED_EARLY, Action::Nothing)]);
}

#[test]
fn a_parent_that_stays_too_long_is_killed() {
    let late = [(Deadline, Action::KillParent), (PARENT_EXITED, Action::Nothing)];
    after(&PROMOTED, &late);
}

#[test]
fn a_stop_request_kills_an_unready_successor_and_starts_none() {
    let stopped = [
        (Stop, Action::KillSuccessor),
        (Wanted, Action::Nothing),
        (SuccessorExited, Action::Nothing),
    ];
    after(&STARTED, &stopped);
    let taken_along = [(Stop, Action::Nothing), (CurrentExited, Action::Nothing)];
    after(&PROMOTED, &taken_along);
    after(&STARTED[..2], &[(Stop, Action::Nothing), (USABLE, Action::Nothing)]);
}

#[test]
fn a_restart_is_retried_if_the_old_envoy_exits_or_drains_early() {
    let again = (READY, Action::Check);
    let ended = [(CurrentExited, Action::Nothing), (USABLE, Action::Nothing)];
    after(&STARTED[..2], &[&ended[..], &[again]].concat());
    let drained = [(Event::Unready, Action::Nothing), (USABLE, Action::Nothing)];
    after(&STARTED[..2], &[&drained[..], &[again]].concat());
    let killed =
        [(CurrentExited, Action::KillSuccessor), (SuccessorExited, Action::Nothing), again];
    after(&STARTED, &killed);
    // After a stop request, no successor is started.
    let stopped = [(Stop, Action::Nothing), (CurrentExited, Action::Nothing)];
    after(&STARTED[..2], &[&stopped[..], &[(READY, Action::Nothing)]].concat());
}

#[test]
fn an_envoy_without_base_id_is_replaced_by_a_full_restart() {
    let full = [
        (UNSHARED, Action::Nothing),
        (Wanted, Action::Check),
        (USABLE, Action::Replace(EndBy::Quit)),
        (CurrentExited, Action::Nothing),
    ];
    after(&full, &STARTED);
}

#[test]
fn a_handover_to_another_container_is_tried_once_and_blocks_restarts_meanwhile() {
    let lent = [(READY, Action::Nothing), (Event::Lend, Action::Nothing)];
    assert_eq!(walk(&lent).phase(), Phase::Lent);
    let wanted = [
        (Wanted, Action::Nothing),
        (Event::Lend, Action::Nothing),
        (RECLAIM, Action::Check),
        // The initializing flag is still set, so the base id cannot be used by a successor.
        (USABLE, Action::Replace(EndBy::Quit)),
    ];
    after(&lent, &wanted);
    let cleared = Event::Reclaim { is_flag_clear: true };
    let again = [(cleared, Action::Nothing), (Event::Lend, Action::Nothing)];
    assert_eq!(after(&lent, &again).phase(), Phase::Lent);
    let died = [
        (CurrentExited, Action::Nothing),
        (READY, Action::Nothing),
        (RECLAIM, Action::Nothing),
        (Event::Lend, Action::Nothing),
    ];
    assert_eq!(after(&lent, &died).phase(), Phase::Lent);
    for refused in [
        &[(Event::Lend, Action::Nothing)][..],
        &[(UNSHARED, Action::Nothing), (Event::Lend, Action::Nothing)],
        &[(READY, Action::Nothing), (Stop, Action::Nothing), (Event::Lend, Action::Nothing)],
    ] {
        assert_eq!(walk(refused).phase(), Phase::Idle, "{refused:?}");
    }
}

#[test]
fn a_restart_waits_until_a_parent_in_another_container_has_exited() {
    let mut machine = Machine::new();
    machine.begin_with_parent();
    for (event, expected) in [
        (READY, Action::Nothing),
        (Wanted, Action::Nothing),
        (Event::Lend, Action::Nothing),
        (PARENT_EXITED, Action::Check),
    ] {
        assert_eq!(machine.apply(event), expected, "{event:?}");
    }
}

/// The state of the processes, as a supervisor knows it.
#[derive(Debug, Default)]
struct World {
    serving: bool,
    next: bool,
    old: bool,
    /// True while a successor in another container starts.
    is_lent: bool,
    is_checking: bool,
    /// True if the time of the old Envoy until its exit is over.
    is_overdue: bool,
    is_stopped: bool,
}

impl World {
    /// Returns true if the event can happen now.
    fn allows(&self, event: Event) -> bool {
        match event {
            Event::Ready { .. } => self.serving && !self.is_stopped,
            CurrentExited => self.serving,
            Live | SuccessorExited => self.next,
            ParentExited { .. } => self.old,
            NothingToStart | Usable { .. } => self.is_checking,
            Event::Reclaim { .. } => self.is_lent,
            _ => true,
        }
    }

    fn step(&mut self, machine: &mut Machine, event: Event) -> Result<(), TestCaseError> {
        if !self.allows(event) {
            return Ok(());
        }
        match event {
            CurrentExited => self.serving = false,
            SuccessorExited => self.next = false,
            ParentExited { .. } => self.old = false,
            NothingToStart | Usable { .. } => self.is_checking = false,
            Deadline => self.is_overdue = self.old,
            Stop => self.is_stopped = true,
            Event::Reclaim { .. } => self.is_lent = false,
            _ => {}
        }
        let before = machine.phase();
        let action = machine.apply(event);
        if event == Event::Lend && machine.phase() == Phase::Lent && !self.is_lent {
            prop_assert!(self.serving && !self.next && !self.old && !self.is_stopped);
            self.is_lent = true;
        }
        prop_assert!(!self.is_lent || action == Action::Nothing, "{action:?}");
        match action {
            Action::Nothing => {}
            Action::Check => {
                prop_assert!(self.serving && !self.next && !self.old && !self.is_stopped);
                self.is_checking = true;
            }
            Action::Start => {
                prop_assert!(self.serving, "no Envoy serves");
                prop_assert!(!self.next && !self.old, "a third Envoy");
                self.next = true;
            }
            Action::KillSuccessor => prop_assert!(self.next),
            Action::Promote => {
                prop_assert!(self.next && self.serving && !self.old);
                (self.next, self.old) = (false, true);
            }
            Action::KillParent => {
                let is_successor_alive = self.serving && !self.is_overdue;
                prop_assert!(!is_successor_alive, "killed in {before:?}");
            }
            Action::Replace(_) => prop_assert!(self.serving && !self.next && !self.old),
        }
        if !self.old {
            self.is_overdue = false;
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn at_most_one_successor_exists_and_its_parent_is_not_killed(
        events in prop::collection::vec(prop::sample::select(vec![
            READY, Event::Unready, UNSHARED, Wanted, USABLE, NO_ADMIN_PORT,
            NothingToStart, Live, Deadline, SuccessorExited, PARENT_EXITED,
            PARENT_EXITED_EARLY, CurrentExited, Stop, Event::Lend, RECLAIM,
            Event::Reclaim { is_flag_clear: true },
        ]), 0..40),
    ) {
        let mut machine = Machine::new();
        let mut world = World { serving: true, ..World::default() };
        for event in events {
            world.step(&mut machine, event)?;
            // Unless the agent stops, the supervisor starts another Envoy after the exit of the current
            // one.
            world.serving |= !world.is_stopped;
        }
        // Each restart ends: its check has a result, and each process that it waits for exits.
        for event in [RECLAIM, NothingToStart, Deadline, SuccessorExited, PARENT_EXITED, Deadline] {
            world.step(&mut machine, event)?;
        }
        if world.is_checking {
            world.step(&mut machine, NothingToStart)?;
        }
        prop_assert_eq!(machine.phase(), Phase::Idle);
    }
}
