//! Whether the other container of the pod is able to take over.

use std::time::Duration;

use super::Subject;
use super::report::Check;
use crate::problem::{Problem, codes};
use crate::standby::State;

/// How long a container may take to be replaced and to connect.
const CONNECTS: Duration = Duration::from_secs(30);

pub(super) fn checks(subject: Subject<'_>) -> Vec<Check> {
    let standby = subject.running.and_then(|running| running.standby.as_ref());
    let checks = standby.map(|standby| check(&standby.state()));
    checks.into_iter().collect()
}

fn check(state: &State) -> Check {
    let (code, found) = match (&state.waits, &state.last) {
        (Some(other), _) if let Some(why) = &other.hindrance => (
            codes::STANDBY_UNABLE,
            format!("container {}: {why}", other.name),
        ),
        (_, Some(last)) if let Some(why) = &last.failed => {
            let found = format!("container {} ({}): {why}", last.to, last.build);
            (codes::HANDOVER_FAILED, found)
        }
        (Some(other), _) => {
            let found = format!(
                "container {} ({}) is able to take over",
                other.name, other.build
            );
            return Check::ok(name(state), found);
        }
        (None, _) if state.former_envoy => {
            let why = "the former Envoy in the other container finishes its connections";
            return Check::skipped(name(state), why);
        }
        (None, _)
            if state
                .alone_since
                .is_some_and(|since| since.elapsed() > CONNECTS) =>
        {
            (
                codes::STANDBY_ABSENT,
                codes::STANDBY_ABSENT.cause.to_owned(),
            )
        }
        (None, _) => {
            return Check::skipped(name(state), "the other container is not connected yet");
        }
    };
    Check::of(&Problem::new(code, name(state), found))
}

fn name(state: &State) -> String {
    format!("container {} serves", state.serves)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::doctor::report::Level;
    use crate::standby::{Handover, Waiting};

    #[test]
    fn a_standby_that_cannot_take_over_is_a_warning() {
        let waits = |hindrance: Option<&str>| {
            Some(Waiting {
                name: "istio-standby".to_owned(),
                build: "1.31".to_owned(),
                hindrance: hindrance.map(str::to_owned),
            })
        };
        let last = |failed: Option<&str>| {
            Some(Handover {
                to: "istio-standby".to_owned(),
                build: "1.32".to_owned(),
                at: SystemTime::UNIX_EPOCH,
                failed: failed.map(str::to_owned),
            })
        };
        for (waits, last, former_envoy, level, found) in [
            (waits(None), None, false, Level::Ok, "is able to take over"),
            (
                waits(None),
                last(None),
                false,
                Level::Ok,
                "is able to take over",
            ),
            (
                waits(None),
                last(Some("late")),
                false,
                Level::Warning,
                "1.32): late",
            ),
            (
                waits(Some("no mount")),
                None,
                false,
                Level::Warning,
                "no mount",
            ),
            (None, None, true, Level::Skipped, "finishes its connections"),
            (None, None, false, Level::Skipped, "not connected yet"),
        ] {
            let state = State {
                waits,
                last,
                former_envoy,
                ..State::default()
            };
            let check = check(&state);
            assert_eq!(check.level, level, "{check:?}");
            assert!(check.found.contains(found), "{check:?}");
        }
    }
}
