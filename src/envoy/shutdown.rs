//! The steps of Envoy's shutdown: their order, names and limits.
//!
//! [`Step`] is the one list of them: the machine walks it, the supervisor begins each step, and the
//! status port shows the [`Plan`] of those left and the [`Shutdown`] under way.

use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};

use crate::clock;

/// The last part of a drain, in which Envoy's listeners are closed: a quarter, and no longer than this.
const LAST_REQUESTS: Duration = Duration::from_secs(1);

/// A step, named after what it waits for. Each follows the one before when that is done or has had
/// its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The answer to the drain call.
    DrainCall,
    /// Time in which clients leave.
    DrainTime,
    /// The end of the last connection.
    Connections,
    /// The end of requests under way, after the listeners are closed.
    LastRequests,
    /// The end of requests that take longer than the drain.
    LongRequests,
    /// The end of an Envoy that was asked to quit.
    Quit,
    /// The end after SIGTERM.
    Termination,
    /// The end after SIGKILL.
    Kill,
}

/// How long each step may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub drain_call: Duration,
    pub drain: Drain,
    /// For requests that take longer than a timed drain; zero cuts them.
    pub long_requests: Duration,
    pub quit: Duration,
    pub terminate: Duration,
    /// Until the agent gives up on a process that the kernel cannot end.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedStep {
    pub waits_for: Step,
    #[serde(rename = "at_most_seconds", serialize_with = "in_seconds")]
    pub at_most: Duration,
}

/// The steps left, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan(pub Vec<PlannedStep>);

/// A shutdown under way.
#[derive(Clone, Debug, Serialize)]
pub struct Shutdown {
    /// The reason of the first request.
    pub cause: &'static str,
    #[serde(serialize_with = "clock::in_utc")]
    pub since: SystemTime,
    /// As it was when the shutdown began, or when a more urgent request made it shorter.
    pub plan: Plan,
    pub waits_for: Step,
    /// When the step under way is over at the latest.
    #[serde(serialize_with = "clock::in_utc")]
    pub until: SystemTime,
    /// The last count of what the step waits for: connections, or requests.
    pub connections: Option<u64>,
}

impl Step {
    pub(super) const ALL: [Self; 8] = [
        Self::DrainCall,
        Self::DrainTime,
        Self::Connections,
        Self::LastRequests,
        Self::LongRequests,
        Self::Quit,
        Self::Termination,
        Self::Kill,
    ];
}

impl Limits {
    /// How long a step may take; none leaves it out. A drain takes no longer than configured with
    /// all its steps.
    pub(super) fn of(&self, step: Step) -> Option<Duration> {
        let whole = self.drain.at_most();
        let last_requests = LAST_REQUESTS.min(crate::duration::scaled(whole, 0.25));
        let until_then = whole.saturating_sub(last_requests);
        match (step, self.drain) {
            (Step::DrainCall, _) => Some(self.drain_call),
            (Step::DrainTime, Drain::For(_)) => Some(until_then),
            (Step::DrainTime, Drain::UntilIdle { at_least, .. }) => Some(at_least.min(until_then)),
            (Step::Connections, Drain::UntilIdle { at_least, .. }) => {
                Some(until_then.saturating_sub(at_least))
            }
            (Step::LastRequests, _) => Some(last_requests),
            (Step::LongRequests, Drain::For(_)) => {
                Some(self.long_requests).filter(|limit| !limit.is_zero())
            }
            (Step::Connections, Drain::For(_)) | (Step::LongRequests, Drain::UntilIdle { .. }) => {
                None
            }
            (Step::Quit, _) => Some(self.quit),
            (Step::Termination, _) => Some(self.terminate),
            (Step::Kill, _) => Some(self.kill),
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
}

impl Plan {
    /// How long all steps take together, at most.
    pub fn at_most(&self) -> Duration {
        let steps = self.0.iter().map(|step| step.at_most);
        steps.fold(Duration::ZERO, Duration::saturating_add)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.0 {
            write!(f, "{} {:?}, ", step.waits_for, step.at_most)?;
        }
        write!(f, "all in all {:?} at most", self.at_most())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Its name in JSON.
        self.serialize(f)
    }
}

fn in_seconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

pub(super) fn in_utc_if_any<S: Serializer>(
    moment: &Option<SystemTime>,
    to: S,
) -> Result<S::Ok, S::Error> {
    moment.map(clock::rfc3339).serialize(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_one_line_that_ends_with_the_sum() {
        let step = |waits_for, seconds| PlannedStep {
            waits_for,
            at_most: Duration::from_secs(seconds),
        };
        let plan = Plan(vec![step(Step::Quit, 2), step(Step::Termination, 5)]);
        let expected = "quit 2s, termination 5s, all in all 7s at most";
        assert_eq!(plan.to_string(), expected);
    }

    #[test]
    fn a_drain_keeps_a_part_of_its_time_for_the_last_requests() {
        let millis = Duration::from_millis;
        for (whole, time, last_requests) in [
            (millis(0), millis(0), millis(0)),
            (millis(10), millis(7500) / 1000, millis(2500) / 1000),
            (millis(2000), millis(1500), millis(500)),
            (millis(5000), millis(4000), millis(1000)),
            (millis(60_000), millis(59_000), millis(1000)),
        ] {
            let limits = limits(Drain::For(whole));
            assert_eq!(limits.of(Step::DrainTime), Some(time));
            assert_eq!(limits.of(Step::Connections), None);
            assert_eq!(limits.of(Step::LastRequests), Some(last_requests));
        }
    }

    #[test]
    fn a_drain_until_idle_stays_under_its_ceiling_however_long_its_least() {
        let limits = limits(Drain::UntilIdle {
            at_least: Duration::from_secs(90),
            at_most: Duration::from_secs(60),
        });
        assert_eq!(limits.of(Step::DrainTime), Some(Duration::from_secs(59)));
        assert_eq!(limits.of(Step::Connections), Some(Duration::ZERO));
        assert_eq!(limits.of(Step::LastRequests), Some(Duration::from_secs(1)));
    }

    fn limits(drain: Drain) -> Limits {
        Limits {
            drain_call: Duration::ZERO,
            drain,
            long_requests: Duration::ZERO,
            quit: Duration::ZERO,
            terminate: Duration::ZERO,
            kill: Duration::ZERO,
        }
    }
}
