//! Checks that the other container of the pod is able to take over.

use std::time::Duration;

use super::{Pair, State};
use crate::envoy::handle::Envoy;
use crate::problem::{Code, Problem};
use crate::report::Check;

/// The time limit for a container to be replaced and to connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

impl Pair {
    pub fn check(&self, envoy: Option<&Envoy>) -> Check {
        let report = envoy.map(Envoy::report);
        let blocker = report.and_then(|report| report.borrow().hot_restart_problem.clone());
        check(&self.state(), blocker.as_deref())
    }

    /// Says why Envoy's admin port is closed if the Envoy of a successor has taken it and failed.
    pub fn why_admin_is_closed(&self) -> Option<&'static str> {
        self.state().last?.failed.map(|_| "closed for the Envoy of the failed handover")
    }
}

/// `blocker` is the reason why no other Envoy can take over from the one that serves.
fn check(state: &State, blocker: Option<&str>) -> Check {
    let name = format!("container {} serves", state.serves);
    if let Some(why) = blocker {
        let found = format!("no handover is possible, its Envoy runs without hot restart: {why}");
        return error(Code::HotRestartUnavailable, name, found);
    }
    if let Some(other) = state.waits()
        && let Some(why) = &other.takeover_blocker
    {
        return error(Code::StandbyUnable, name, format!("container {}: {why}", other.name));
    }
    if let Some(last) = &state.last
        && let Some(why) = &last.failed
    {
        let found = format!("container {} ({}): {why}", last.to, last.build);
        return error(Code::HandoverFailed, name, found);
    }
    if let Some(other) = state.waits() {
        let state = if other.is_checked {
            "is able to take over: it had mounts, roots and token when it connected"
        } else {
            "waits; its roots and its token are not checked"
        };
        Check::ok(name, format!("container {} ({}) {state}", other.name, other.build))
    } else if state.has_parent {
        Check::skipped(name, "the former Envoy in the other container finishes its connections")
    } else if state.last_waiting_ended.is_some_and(|since| since.elapsed() > CONNECT_LIMIT) {
        error(Code::StandbyAbsent, name, Code::StandbyAbsent.cause())
    } else {
        Check::skipped(name, "the other container is not connected yet")
    }
}

fn error(code: Code, name: String, found: impl ToString) -> Check {
    Check::from(&Problem::new(code, name, found))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::SystemTime;

    use super::*;
    use crate::problem::Level;
    use crate::standby::{Handover, Waiting};

    #[test]
    fn a_standby_that_cannot_take_over_is_a_warning() {
        let waits = |blocker: Option<&str>| {
            vec![Arc::new(Waiting {
                name: "istio-standby".to_owned(),
                build: "1.31".to_owned(),
                takeover_blocker: blocker.map(str::to_owned),
                is_checked: true,
            })]
        };
        let old = vec![Arc::new(Waiting { is_checked: false, ..(*waits(None)[0]).clone() })];
        let last = |failed: Option<&str>| {
            Some(Handover {
                to: "istio-standby".to_owned(),
                build: "1.32".to_owned(),
                at: SystemTime::UNIX_EPOCH,
                failed: failed.map(str::to_owned),
            })
        };
        for (waiting, last, has_parent, level, found) in [
            (waits(None), None, false, Level::Ok, "is able to take over"),
            (waits(None), last(None), false, Level::Ok, "is able to take over"),
            (waits(None), last(Some("late")), false, Level::Warning, "1.32): late"),
            (old, None, false, Level::Ok, "its token are not checked"),
            (waits(Some("no mount")), None, false, Level::Warning, "no mount"),
            (vec![], None, true, Level::Skipped, "finishes its connections"),
            (vec![], None, false, Level::Skipped, "not connected yet"),
        ] {
            let state = State { waiting, last, has_parent, ..State::default() };
            let check = check(&state, None);
            assert_eq!(check.level, level, "{check:?}");
            assert!(check.found.contains(found), "{check:?}");
        }
        let check = check(&State::default(), Some("/dev/shm is full"));
        assert!(check.level == Level::Warning && check.found.contains("/dev/shm is full"));
    }
}
