//! Tests the state machine: selected sequences of events by table, other sequences at random.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::envoy::shutdown::Drain;
use Event::{Begin, DelayOver, Done, DrainOrdered, EnvoyExited, Live, PauseOver};

const SECOND: Duration = Duration::from_secs(1);
const LIMITS: Limits = Limits {
    drain_call: SECOND.saturating_mul(2),
    drain: Drain::For(SECOND.saturating_mul(5)),
    delay: Duration::ZERO,
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
const LONG_REQUESTS: Limits = Limits { long_requests: SECOND.saturating_mul(8), ..LIMITS };
const DELAYED: Limits = Limits { delay: SECOND.saturating_mul(7), ..LIMITS };
const ANNOUNCE: Action = begin(Step::DrainCall, LIMITS.drain_call);
const QUIT: Action = begin(Step::Quit, LIMITS.quit);
const TERMINATE: Action = begin(Step::Termination, LIMITS.terminate);
const KILL: Action = begin(Step::Kill, LIMITS.kill);
const ANSWERED: Event = Done(Step::DrainCall);
const DRAINED: Event = Done(Step::DrainTime);
const CLOSED: Event = Done(Step::LastRequests);
const STOP_DRAIN: Event = Event::StopRequested(Urgency::Drain);
const STOP_TERMINATE: Event = Event::StopRequested(Urgency::Terminate);
const STOP_KILL: Event = Event::StopRequested(Urgency::Kill);
const CRASH: Event = EnvoyExited { may_restart: true };
const LAST_CRASH: Event = EnvoyExited { may_restart: false };

const fn begin(waits_for: Step, at_most: Duration) -> Action {
    Action::Begin(PlannedStep { waits_for, at_most })
}

/// Applies events to a machine, and checks the action that each event leads to.
fn walk(limits: Limits, way: &[(Event, Action)]) -> Machine {
    let mut machine = Machine::new(limits);
    for (at, (event, expected)) in way.iter().enumerate() {
        let before = machine.phase();
        let action = machine.apply(*event);
        assert_eq!(action, *expected, "step {at}: {event:?} in {before:?}");
    }
    machine
}

fn running_then(then: &[(Event, Action)]) -> Vec<(Event, Action)> {
    let mut way = vec![(Begin, Action::Start), (Live, Action::Nothing)];
    way.extend(then);
    way
}

#[test]
fn drains_then_asks_then_terminates_then_kills_then_gives_up() {
    let way = running_then(&[
        (STOP_DRAIN, ANNOUNCE),
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
fn a_delay_precedes_the_drain_once() {
    let delay = begin(Step::DrainDelay, SECOND * 7);
    let ordered = [(DrainOrdered, Action::Delay), (DrainOrdered, Action::Nothing)];
    let drained = (DelayOver, Action::Drain);
    for way in [
        &[(STOP_DRAIN, delay), (Done(Step::DrainDelay), ANNOUNCE)][..],
        &[ordered[0], ordered[1], drained, (STOP_DRAIN, QUIT)],
        // The supervisor waits for the rest of the time.
        &[
            ordered[0],
            (STOP_DRAIN, delay),
            (DelayOver, Action::Nothing),
            (Done(Step::DrainDelay), ANNOUNCE),
        ],
        // Not in front of other ends.
        &[(STOP_TERMINATE, QUIT)],
        &[ordered[0], (STOP_TERMINATE, QUIT)],
        &[(Event::Replace(EndBy::Quit), ANNOUNCE)],
        // The next Envoy is drained at once.
        &[
            ordered[0],
            (CRASH, Action::Pause),
            (PauseOver, Action::Start),
            (Live, Action::Drain),
            (STOP_DRAIN, QUIT),
        ],
    ] {
        walk(DELAYED, &running_then(way));
    }
    let starting = [(Begin, Action::Start), (DrainOrdered, Action::Drain), (Live, Action::Drain)];
    walk(DELAYED, &starting);
}

#[test]
fn a_drain_until_idle_lasts_between_its_minimum_and_its_maximum() {
    let start = [
        (STOP_DRAIN, ANNOUNCE),
        (ANSWERED, begin(Step::DrainTime, SECOND * 5)),
        (Done(Step::Connections), Action::Nothing),
        (DRAINED, begin(Step::Connections, SECOND * 54)),
    ];
    let mut way = running_then(&start);
    way.extend([(Done(Step::Connections), begin(Step::LastRequests, SECOND)), (CLOSED, QUIT)]);
    walk(UNTIL_IDLE, &way);
    walk(UNTIL_IDLE, &[&running_then(&start)[..], &[(STOP_TERMINATE, QUIT)]].concat());
}

#[test]
fn long_requests_are_awaited_until_they_end_or_urgency_rises() {
    let drained = [
        (STOP_DRAIN, ANNOUNCE),
        (ANSWERED, begin(Step::DrainTime, SECOND * 4)),
        (DRAINED, begin(Step::LastRequests, SECOND)),
        (CLOSED, begin(Step::LongRequests, SECOND * 8)),
    ];
    for (end, action) in [
        (Done(Step::LongRequests), QUIT),
        (CLOSED, Action::Nothing),
        (STOP_DRAIN, Action::Nothing),
        (STOP_TERMINATE, QUIT),
        (STOP_KILL, KILL),
        (LAST_CRASH, Action::Leave),
    ] {
        walk(LONG_REQUESTS, &running_then(&[&drained[..], &[(end, action)]].concat()));
    }
    // A drain until idle has waited for long requests, so its plan has no step for them.
    let limits = Limits { long_requests: SECOND * 8, ..UNTIL_IDLE };
    let plan = |limits| walk(limits, &running_then(&drained[..1])).plan();
    assert_eq!(plan(limits), plan(UNTIL_IDLE));
    // Before another Envoy follows, long requests are not awaited, because no Envoy would serve
    // meanwhile. They are awaited once a stop is requested.
    let replaced = Event::Replace(EndBy::Quit);
    let before = [(replaced, drained[0].1), drained[1], drained[2]];
    walk(LONG_REQUESTS, &running_then(&[&before[..], &[(CLOSED, QUIT)]].concat()));
    let wanted = [(STOP_DRAIN, Action::Nothing), drained[3]];
    walk(LONG_REQUESTS, &running_then(&[&before[..], &wanted].concat()));
}

#[test]
fn a_more_urgent_request_acts_at_once_and_lesser_ones_change_nothing() {
    for way in [
        running_then(&[(STOP_TERMINATE, QUIT), (STOP_DRAIN, Action::Nothing)]),
        running_then(&[(STOP_DRAIN, ANNOUNCE), (STOP_TERMINATE, QUIT), (STOP_KILL, KILL)]),
        running_then(&[
            (STOP_DRAIN, ANNOUNCE),
            (STOP_TERMINATE, QUIT),
            (ANSWERED, Action::Nothing),
            (STOP_TERMINATE, Action::Nothing),
        ]),
        running_then(&[(STOP_KILL, KILL), (STOP_KILL, Action::Nothing)]),
        vec![(Begin, Action::Start), (STOP_DRAIN, ANNOUNCE)],
    ] {
        walk(LIMITS, &way);
    }
}

#[test]
fn an_envoy_already_drained_on_request_exits_without_another_drain() {
    let told = (DrainOrdered, Action::Drain);
    let machine = walk(LIMITS, &running_then(&[told, told]));
    assert_eq!(machine.phase().state(), State::Draining);
    walk(LIMITS, &running_then(&[told, told, (ANSWERED, Action::Nothing), (STOP_DRAIN, QUIT)]));
    let early = [
        (DrainOrdered, Action::Nothing),
        (Begin, Action::Start),
        told,
        (Live, Action::Drain),
        (STOP_DRAIN, QUIT),
        (DrainOrdered, Action::Nothing),
    ];
    walk(LIMITS, &early);
}

#[test]
fn a_crashed_envoy_restarts_within_its_budget_unless_an_end_is_requested() {
    let again = [(CRASH, Action::Pause), (PauseOver, Action::Start)];
    walk(LIMITS, &running_then(&[again[0], again[1], (LAST_CRASH, Action::Leave)]));
    walk(LIMITS, &running_then(&[again[0], (STOP_DRAIN, Action::Leave)]));
    let asked = (STOP_DRAIN, ANNOUNCE);
    walk(LIMITS, &running_then(&[asked, (CRASH, Action::Leave), (STOP_DRAIN, Action::Nothing)]));
    let drained = [(DrainOrdered, Action::Drain), again[0], again[1]];
    walk(LIMITS, &[&running_then(&drained)[..], &[(Live, Action::Drain)]].concat());
    walk(LIMITS, &[(STOP_DRAIN, Action::Leave), (Begin, Action::Nothing)]);
}

#[test]
fn a_replaced_envoy_drains_and_another_follows_unless_a_stop_is_requested() {
    let wait = (ANSWERED, begin(Step::DrainTime, SECOND * 4));
    let close = (DRAINED, begin(Step::LastRequests, SECOND));
    for (end_by, end) in [(EndBy::Quit, QUIT), (EndBy::Kill, KILL)] {
        let replaced = (Event::Replace(end_by), ANNOUNCE);
        let way = [replaced, wait, close, (CLOSED, end)];
        let next = [(LAST_CRASH, Action::Pause), (PauseOver, Action::Start)];
        let after = [(Live, Action::Nothing), (STOP_TERMINATE, QUIT)];
        let machine = walk(LIMITS, &running_then(&[&way[..], &next, &after].concat()));
        assert!(machine.expects_exit());
        let ended = [(STOP_DRAIN, Action::Nothing), (LAST_CRASH, Action::Leave)];
        walk(LIMITS, &running_then(&[&way[..], &ended].concat()));
        let urgent = [(STOP_KILL, KILL), (LAST_CRASH, Action::Leave)];
        walk(LIMITS, &running_then(&[&way[..2], &urgent].concat()));
    }
    walk(LIMITS, &[(Begin, Action::Start), (Event::Replace(EndBy::Quit), Action::Nothing)]);
}

#[test]
fn the_plan_lists_the_remaining_steps() {
    let waits = |machine: &Machine| -> Vec<_> {
        let steps = machine.plan().0;
        steps.iter().map(|step| step.waits_for).collect()
    };
    use Step::{Connections, DrainCall, DrainTime, Kill, LastRequests, LongRequests};
    use Step::{Quit, Termination};
    let asked = running_then(&[(STOP_DRAIN, ANNOUNCE)]);
    let machine = walk(LIMITS, &asked);
    assert_eq!(waits(&machine), [DrainCall, DrainTime, LastRequests, Quit, Termination, Kill]);
    assert_eq!(machine.plan().at_most(), SECOND * 15);
    let machine = walk(LONG_REQUESTS, &asked);
    assert_eq!(waits(&machine)[2..4], [LastRequests, LongRequests]);
    assert_eq!(machine.plan().at_most(), SECOND * 23);
    let machine = walk(UNTIL_IDLE, &asked);
    assert_eq!(waits(&machine)[1..4], [DrainTime, Connections, LastRequests]);
    assert_eq!(machine.plan().at_most(), SECOND * 70);
    let machine = walk(LIMITS, &running_then(&[(STOP_TERMINATE, QUIT)]));
    assert_eq!(waits(&machine), [Quit, Termination, Kill]);
}

#[test]
fn the_plan_of_a_drained_envoy_has_no_drain_unless_one_runs() {
    let steps = |machine: &Machine| machine.plan().0.len();
    let drained = walk(LIMITS, &running_then(&[(DrainOrdered, Action::Drain)]));
    assert_eq!(steps(&drained), 3);
    let asked = (STOP_DRAIN, ANNOUNCE);
    let late = (DrainOrdered, Action::Nothing);
    assert_eq!(steps(&walk(LIMITS, &running_then(&[asked, late]))), 6);
}

/// The state of the process, as a supervisor knows it.
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
            Action::Delay | Action::Drain => prop_assert!(self.has_child, "no Envoy to drain"),
            Action::Nothing => {}
        }
        let is_exited = machine.phase() == Phase::Exited;
        prop_assert!(!(is_exited && self.has_child));
        prop_assert_eq!(is_exited, self.is_over && machine.phase() != Phase::Shutdown(Step::Kill));
        Ok(())
    }
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let mut events = vec![
        Begin,
        Live,
        DrainOrdered,
        DelayOver,
        STOP_DRAIN,
        STOP_TERMINATE,
        STOP_KILL,
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
        limits in prop::sample::select(vec![LIMITS, DELAYED, LONG_REQUESTS, UNTIL_IDLE]),
    ) {
        let (mut machine, mut world) = (Machine::new(limits), World::default());
        for event in before {
            world.step(&mut machine, event)?;
        }
        world.step(&mut machine, STOP_DRAIN)?;
        // Each remaining step ends when its time is over.
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
        world.step(&mut machine, STOP_DRAIN)?;
        let mut last = machine.phase();
        for event in after {
            world.step(&mut machine, event)?;
            prop_assert!(machine.phase() >= last, "{:?} after {:?}", machine.phase(), last);
            last = machine.phase();
        }
    }

    #[test]
    fn an_urgent_stop_never_lengthens_the_shutdown_except_of_a_replacement(before in events()) {
        let requests = [STOP_DRAIN, STOP_TERMINATE, STOP_KILL];
        for (request, limits) in requests.into_iter().flat_map(|request| {
            [UNTIL_IDLE, DELAYED, LONG_REQUESTS].map(|limits| (request, limits))
        }) {
            let (mut machine, mut world) = (Machine::new(limits), World::default());
            for event in &before {
                world.step(&mut machine, *event)?;
            }
            let left = machine.plan().at_most();
            // The request cancels a replacement: no other Envoy follows, so long requests are awaited
            // now.
            let is_followed = machine.expects_exit() && !machine.is_stop_requested();
            let more = if is_followed { limits.long_requests } else { Duration::ZERO };
            world.step(&mut machine, request)?;
            prop_assert!(machine.plan().at_most() <= left + more);
        }
    }
}
