//! Named ways through the machine by table, all others at random.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::envoy::shutdown::Drain;
use Event::{Begin, Done, DrainOrdered, EnvoyExited, Live, PauseOver};

const SECOND: Duration = Duration::from_secs(1);
const LIMITS: Limits = Limits {
    drain_call: SECOND.saturating_mul(2),
    drain: Drain::For(SECOND.saturating_mul(5)),
    long_requests: Duration::ZERO,
    quit: SECOND,
    terminate: SECOND.saturating_mul(3),
    kill: SECOND.saturating_mul(4),
};
const UNTIL_IDLE: Limits = Limits {
    drain: Drain::UntilIdle {
        at_least: SECOND.saturating_mul(5),
        at_most: SECOND.saturating_mul(60),
    },
    ..LIMITS
};
const LONG_REQUESTS: Limits = Limits {
    long_requests: SECOND.saturating_mul(8),
    ..LIMITS
};
const ANNOUNCE: Action = begin(Step::DrainCall, LIMITS.drain_call);
const QUIT: Action = begin(Step::Quit, LIMITS.quit);
const TERMINATE: Action = begin(Step::Termination, LIMITS.terminate);
const KILL: Action = begin(Step::Kill, LIMITS.kill);
const ANSWERED: Event = Done(Step::DrainCall);
const DRAINED: Event = Done(Step::DrainTime);
const CLOSED: Event = Done(Step::LastRequests);
const ASK: Event = Event::StopRequested(Urgency::Drain);
const ASK_AGAIN: Event = Event::StopRequested(Urgency::Terminate);
const ASK_A_THIRD_TIME: Event = Event::StopRequested(Urgency::Kill);
const CRASH: Event = EnvoyExited { may_restart: true };
const LAST_CRASH: Event = EnvoyExited { may_restart: false };

const fn begin(waits_for: Step, at_most: Duration) -> Action {
    Action::Begin(PlannedStep { waits_for, at_most })
}

/// Takes a machine through events, each with what it must lead to.
fn walk(limits: Limits, way: &[(Event, Action)]) -> Machine {
    let mut machine = Machine::new(limits);
    for (at, (event, expected)) in way.iter().enumerate() {
        let before = machine.phase();
        let action = machine.apply(*event);
        assert_eq!(action, *expected, "step {at}: {event:?} in {before:?}");
    }
    machine
}

fn up(then: &[(Event, Action)]) -> Vec<(Event, Action)> {
    let mut way = vec![(Begin, Action::Start), (Live, Action::Nothing)];
    way.extend(then);
    way
}

#[test]
fn drains_then_asks_then_terminates_then_kills_then_gives_up() {
    let way = up(&[
        (ASK, ANNOUNCE),
        (ANSWERED, begin(Step::DrainTime, SECOND * 4)),
        (DRAINED, begin(Step::LastRequests, SECOND)),
        (ANSWERED, Action::Nothing),
        (CLOSED, QUIT),
        (Done(Step::Quit), TERMINATE),
        (Done(Step::Termination), KILL),
        (Done(Step::Kill), Action::GiveUp),
    ]);
    walk(LIMITS, &way);
    let exited = [&way[..7], &[(LAST_CRASH, Action::Leave)]].concat();
    walk(LIMITS, &exited);
}

#[test]
fn a_drain_until_idle_lasts_between_its_minimum_and_its_maximum() {
    let start = [
        (ASK, ANNOUNCE),
        (ANSWERED, begin(Step::DrainTime, SECOND * 5)),
        (Done(Step::Connections), Action::Nothing),
        (DRAINED, begin(Step::Connections, SECOND * 54)),
    ];
    let mut way = up(&start);
    way.extend([
        (Done(Step::Connections), begin(Step::LastRequests, SECOND)),
        (CLOSED, QUIT),
    ]);
    walk(UNTIL_IDLE, &way);
    walk(
        UNTIL_IDLE,
        &[&up(&start)[..], &[(ASK_AGAIN, QUIT)]].concat(),
    );
}

#[test]
fn long_requests_are_awaited_until_the_last_has_ended_or_a_more_urgent_stop_comes() {
    let drained = [
        (ASK, ANNOUNCE),
        (ANSWERED, begin(Step::DrainTime, SECOND * 4)),
        (DRAINED, begin(Step::LastRequests, SECOND)),
        (CLOSED, begin(Step::LongRequests, SECOND * 8)),
    ];
    for (end, action) in [
        (Done(Step::LongRequests), QUIT),
        (CLOSED, Action::Nothing),
        (ASK, Action::Nothing),
        (ASK_AGAIN, QUIT),
        (ASK_A_THIRD_TIME, KILL),
        (LAST_CRASH, Action::Leave),
    ] {
        walk(
            LONG_REQUESTS,
            &up(&[&drained[..], &[(end, action)]].concat()),
        );
    }
    // A drain until idle has waited for them.
    let limits = Limits {
        long_requests: SECOND * 8,
        ..UNTIL_IDLE
    };
    let plan = |limits| walk(limits, &up(&drained[..1])).plan();
    assert_eq!(plan(limits), plan(UNTIL_IDLE));
    // Before another Envoy follows, none would serve meanwhile, unless the end is requested.
    let replaced = Event::Replace(EndBy::Quit);
    let before = [(replaced, drained[0].1), drained[1], drained[2]];
    walk(
        LONG_REQUESTS,
        &up(&[&before[..], &[(CLOSED, QUIT)]].concat()),
    );
    let wanted = [(ASK, Action::Nothing), drained[3]];
    walk(LONG_REQUESTS, &up(&[&before[..], &wanted].concat()));
}

#[test]
fn a_more_urgent_request_goes_further_at_once_and_a_lesser_one_changes_nothing() {
    for way in [
        up(&[(ASK_AGAIN, QUIT), (ASK, Action::Nothing)]),
        up(&[(ASK, ANNOUNCE), (ASK_AGAIN, QUIT), (ASK_A_THIRD_TIME, KILL)]),
        up(&[
            (ASK, ANNOUNCE),
            (ASK_AGAIN, QUIT),
            (ANSWERED, Action::Nothing),
            (ASK_AGAIN, Action::Nothing),
        ]),
        up(&[
            (ASK_A_THIRD_TIME, KILL),
            (ASK_A_THIRD_TIME, Action::Nothing),
        ]),
        vec![(Begin, Action::Start), (ASK, ANNOUNCE)],
    ] {
        walk(LIMITS, &way);
    }
}

#[test]
fn an_envoy_already_drained_on_request_exits_without_another_drain() {
    let told = (DrainOrdered, Action::Drain);
    let machine = walk(LIMITS, &up(&[told, told]));
    assert_eq!(machine.phase().state(), State::Draining);
    walk(
        LIMITS,
        &up(&[told, told, (ANSWERED, Action::Nothing), (ASK, QUIT)]),
    );
    let early = [
        (DrainOrdered, Action::Nothing),
        (Begin, Action::Start),
        told,
        (Live, Action::Drain),
        (ASK, QUIT),
        (DrainOrdered, Action::Nothing),
    ];
    walk(LIMITS, &early);
}

#[test]
fn an_envoy_that_crashed_starts_again_as_long_as_it_may_and_no_end_is_requested() {
    let again = [(CRASH, Action::Pause), (PauseOver, Action::Start)];
    walk(
        LIMITS,
        &up(&[again[0], again[1], (LAST_CRASH, Action::Leave)]),
    );
    walk(LIMITS, &up(&[again[0], (ASK, Action::Leave)]));
    let asked = (ASK, ANNOUNCE);
    walk(
        LIMITS,
        &up(&[asked, (CRASH, Action::Leave), (ASK, Action::Nothing)]),
    );
    let drained = [(DrainOrdered, Action::Drain), again[0], again[1]];
    walk(
        LIMITS,
        &[&up(&drained)[..], &[(Live, Action::Drain)]].concat(),
    );
    walk(LIMITS, &[(ASK, Action::Leave), (Begin, Action::Nothing)]);
}

#[test]
fn a_replaced_envoy_drains_and_is_followed_by_another_unless_a_stop_is_requested() {
    let wait = (ANSWERED, begin(Step::DrainTime, SECOND * 4));
    let close = (DRAINED, begin(Step::LastRequests, SECOND));
    for (end_by, end) in [(EndBy::Quit, QUIT), (EndBy::Kill, KILL)] {
        let replaced = (Event::Replace(end_by), ANNOUNCE);
        let way = [replaced, wait, close, (CLOSED, end)];
        let next = [(LAST_CRASH, Action::Pause), (PauseOver, Action::Start)];
        let after = [(Live, Action::Nothing), (ASK_AGAIN, QUIT)];
        let machine = walk(LIMITS, &up(&[&way[..], &next, &after].concat()));
        assert!(machine.expects_exit());
        let ended = [(ASK, Action::Nothing), (LAST_CRASH, Action::Leave)];
        walk(LIMITS, &up(&[&way[..], &ended].concat()));
        let urgent = [(ASK_A_THIRD_TIME, KILL), (LAST_CRASH, Action::Leave)];
        walk(LIMITS, &up(&[&way[..2], &urgent].concat()));
    }
    walk(
        LIMITS,
        &[
            (Begin, Action::Start),
            (Event::Replace(EndBy::Quit), Action::Nothing),
        ],
    );
}

#[test]
fn the_plan_lists_the_remaining_steps() {
    let waits = |machine: &Machine| -> Vec<_> {
        let steps = machine.plan().0;
        steps.iter().map(|step| step.waits_for).collect()
    };
    use Step::{Connections, DrainCall, DrainTime, Kill, LastRequests, LongRequests};
    use Step::{Quit, Termination};
    let asked = up(&[(ASK, ANNOUNCE)]);
    let machine = walk(LIMITS, &asked);
    assert_eq!(
        waits(&machine),
        [DrainCall, DrainTime, LastRequests, Quit, Termination, Kill]
    );
    assert_eq!(machine.plan().at_most(), SECOND * 15);
    let machine = walk(LONG_REQUESTS, &asked);
    assert_eq!(waits(&machine)[2..4], [LastRequests, LongRequests]);
    assert_eq!(machine.plan().at_most(), SECOND * 23);
    let machine = walk(UNTIL_IDLE, &asked);
    assert_eq!(
        waits(&machine)[1..4],
        [DrainTime, Connections, LastRequests]
    );
    assert_eq!(machine.plan().at_most(), SECOND * 70);
    let machine = walk(LIMITS, &up(&[(ASK_AGAIN, QUIT)]));
    assert_eq!(waits(&machine), [Quit, Termination, Kill]);
}

#[test]
fn the_plan_of_a_drained_envoy_has_no_drain_unless_one_is_under_way() {
    let steps = |machine: &Machine| machine.plan().0.len();
    let drained = walk(LIMITS, &up(&[(DrainOrdered, Action::Drain)]));
    assert_eq!(steps(&drained), 3);
    let asked = (ASK, ANNOUNCE);
    let late = (DrainOrdered, Action::Nothing);
    assert_eq!(steps(&walk(LIMITS, &up(&[asked, late]))), 6);
}

/// The knowledge of a supervisor: is there a process, and has it ended?
#[derive(Default)]
struct World {
    has_child: bool,
    is_over: bool,
    was_killed: bool,
}

impl World {
    fn step(&mut self, machine: &mut Machine, event: Event) -> Result<(), TestCaseError> {
        if self.is_over || (matches!(event, EnvoyExited { .. }) && !self.has_child) {
            return Ok(());
        }
        self.has_child &= !matches!(event, EnvoyExited { .. });
        match machine.apply(event) {
            Action::Start => {
                prop_assert!(!self.has_child, "two Envoys");
                self.has_child = true;
            }
            Action::Leave => {
                prop_assert!(!self.has_child, "an Envoy is left behind");
                self.is_over = true;
            }
            Action::GiveUp => {
                prop_assert!(self.was_killed, "given up without a kill");
                self.is_over = true;
            }
            Action::Begin(step) => {
                prop_assert!(self.has_child, "no Envoy to end");
                self.was_killed |= step.waits_for == Step::Kill;
            }
            Action::Pause => prop_assert!(!self.has_child),
            Action::Drain => prop_assert!(self.has_child, "no Envoy to drain"),
            Action::Nothing => {}
        }
        let is_exited = machine.phase() == Phase::Exited;
        prop_assert!(!(is_exited && self.has_child));
        prop_assert_eq!(
            is_exited,
            self.is_over && machine.phase() != Phase::Shutdown(Step::Kill)
        );
        Ok(())
    }
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let mut events = vec![
        Begin,
        Live,
        DrainOrdered,
        ASK,
        ASK_AGAIN,
        ASK_A_THIRD_TIME,
        PauseOver,
        CRASH,
        LAST_CRASH,
        Event::Replace(EndBy::Quit),
        Event::Replace(EndBy::Kill),
    ];
    events.extend(Step::ALL.map(Done));
    prop::collection::vec(prop::sample::select(events), 0..24)
}

proptest! {
    #[test]
    fn a_request_to_stop_ends_envoy_after_any_events(
        before in events(),
        limits in prop::sample::select(vec![LIMITS, LONG_REQUESTS, UNTIL_IDLE]),
    ) {
        let (mut machine, mut world) = (Machine::new(limits), World::default());
        for event in before {
            world.step(&mut machine, event)?;
        }
        world.step(&mut machine, ASK)?;
        // The time of each step is over.
        while let (Phase::Shutdown(step), false) = (machine.phase(), world.is_over) {
            world.step(&mut machine, Done(step))?;
        }
        prop_assert!(world.is_over, "still in {:?}", machine.phase());
    }

    #[test]
    fn no_event_restarts_an_envoy_that_is_stopping(before in events(), after in events()) {
        let (mut machine, mut world) = (Machine::new(LONG_REQUESTS), World::default());
        for event in before {
            world.step(&mut machine, event)?;
        }
        world.step(&mut machine, ASK)?;
        let mut last = machine.phase();
        for event in after {
            world.step(&mut machine, event)?;
            prop_assert!(machine.phase() >= last, "{:?} after {:?}", machine.phase(), last);
            last = machine.phase();
        }
    }

    #[test]
    fn a_more_urgent_stop_never_lengthens_the_shutdown_unless_it_cancels_a_replacement(before in events()) {
        let requests = [ASK, ASK_AGAIN, ASK_A_THIRD_TIME];
        for (request, limits) in requests.into_iter().flat_map(|request| {
            [UNTIL_IDLE, LONG_REQUESTS].map(|limits| (request, limits))
        }) {
            let (mut machine, mut world) = (Machine::new(limits), World::default());
            for event in &before {
                world.step(&mut machine, *event)?;
            }
            let left = machine.plan().at_most();
            // No Envoy follows one that was to be replaced any more, so its long requests are now
            // waited for.
            let is_followed = machine.expects_exit() && !machine.is_stop_requested();
            let more = if is_followed { limits.long_requests } else { Duration::ZERO };
            world.step(&mut machine, request)?;
            prop_assert!(machine.plan().at_most() <= left + more);
        }
    }
}
