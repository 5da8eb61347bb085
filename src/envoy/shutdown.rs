//! Defines the steps of Envoy's shutdown: their order, names and limits.
//!
//! [`Step`] lists the steps: the machine decides which comes next, the supervisor begins it, and the status port
//! shows the [`Plan`] of the remaining steps and the current [`Shutdown`].

use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};

use crate::runtime::clock;

/// The longest last part of a drain, in which Envoy's listeners are closed; otherwise it is a quarter of the drain.
const MAX_LAST_REQUESTS: Duration = Duration::from_secs(1);

/// A step, named after the event it waits for. It ends with this event, or when its time is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Time in which other nodes learn that the pod ends. Envoy accepts connections as before.
    DrainDelay,
    /// The response to the drain call.
    DrainCall,
    /// Time in which clients leave.
    DrainTime,
    /// The end of the last connection.
    Connections,
    /// The end of running requests, after the listeners are closed.
    LastRequests,
    /// The end of requests that take longer than the drain.
    LongRequests,
    /// The exit after `/quitquitquit`.
    Quit,
    /// The exit after SIGTERM.
    Termination,
    /// The exit after SIGKILL.
    Kill,
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time before the drain, which may be zero.
    pub delay: Duration,
    pub drain_call: Duration,
    pub drain: Drain,
    /// The limit for requests that take longer than a timed drain; zero cancels them.
    pub long_requests: Duration,
    pub quit: Duration,
    pub terminate: Duration,
    /// The time after which the agent gives up on a process that the kernel cannot end.
    pub kill: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// A timed drain.
    For(Duration),
    /// A drain until the last connection is closed.
    UntilIdle { at_least: Duration, at_most: Duration },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedStep {
    pub waits_for: Step,
    #[serde(rename = "at_most_seconds", serialize_with = "in_seconds")]
    pub at_most: Duration,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan(pub Vec<PlannedStep>);

#[derive(Clone, Debug, Serialize)]
pub struct Shutdown {
    /// The reason of the first request.
    pub cause: &'static str,
    #[serde(serialize_with = "clock::in_utc")]
    pub since: SystemTime,
    /// The plan after the last request that began or shortened the shutdown.
    pub plan: Plan,
    pub waits_for: Step,
    #[serde(serialize_with = "clock::in_utc")]
    pub until: SystemTime,
    /// The last count of the connections, or requests, that the step waits for.
    pub connections: Option<u64>,
}

impl Step {
    pub(super) const ALL: [Self; 9] = [
        Self::DrainDelay,
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
    /// Returns the limit of a step. None if this shutdown has no such step. All steps of a drain together take no
    /// longer than the drain.
    pub(super) fn at_most(&self, step: Step) -> Option<Duration> {
        let drain = self.drain.at_most();
        let last_requests = MAX_LAST_REQUESTS.min(crate::runtime::duration::scaled(drain, 0.25));
        let open = drain.saturating_sub(last_requests);
        Some(match (step, self.drain) {
            (Step::DrainDelay, _) if self.delay.is_zero() => return None,
            (Step::DrainDelay, _) => self.delay,
            (Step::DrainCall, _) => self.drain_call,
            (Step::DrainTime, Drain::For(_)) => open,
            (Step::DrainTime, Drain::UntilIdle { at_least, .. }) => at_least.min(open),
            (Step::Connections, Drain::UntilIdle { at_least, .. }) => open.saturating_sub(at_least),
            (Step::LastRequests, _) => last_requests,
            (Step::LongRequests, Drain::For(_)) if !self.long_requests.is_zero() => {
                self.long_requests
            }
            (Step::Connections | Step::LongRequests, _) => return None,
            (Step::Quit, _) => self.quit,
            (Step::Termination, _) => self.terminate,
            (Step::Kill, _) => self.kill,
        })
    }
}

impl Drain {
    pub(super) fn at_most(self) -> Duration {
        match self {
            Self::For(time) => time,
            Self::UntilIdle { at_most, .. } => at_most,
        }
    }
}

impl Plan {
    pub fn at_most(&self) -> Duration {
        self.0.iter().map(|step| step.at_most).fold(Duration::ZERO, Duration::saturating_add)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.0 {
            write!(f, "{} {:?}, ", step.waits_for, step.at_most)?;
        }
        write!(f, "in total {:?} at most", self.at_most())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // serde writes the name that a step has in JSON.
        self.serialize(f)
    }
}

fn in_seconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

/// Serializes a moment like [`clock::in_utc`], or null.
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
        let step =
            |waits_for, seconds| PlannedStep { waits_for, at_most: Duration::from_secs(seconds) };
        let plan = Plan(vec![step(Step::Quit, 2), step(Step::Termination, 5)]);
        let expected = "quit 2s, termination 5s, in total 7s at most";
        assert_eq!(plan.to_string(), expected);
    }

    #[test]
    fn a_drain_reserves_part_of_its_time_for_in_flight_requests() {
        let millis = Duration::from_millis;
        for (whole, time, last_requests) in [
            (millis(0), millis(0), millis(0)),
            (millis(10), millis(7500) / 1000, millis(2500) / 1000),
            (millis(2000), millis(1500), millis(500)),
            (millis(5000), millis(4000), millis(1000)),
            (millis(60_000), millis(59_000), millis(1000)),
        ] {
            let limits = limits(Drain::For(whole));
            assert_eq!(limits.at_most(Step::DrainTime), Some(time));
            assert_eq!(limits.at_most(Step::Connections), None);
            assert_eq!(limits.at_most(Step::LastRequests), Some(last_requests));
        }
    }

    #[test]
    fn a_drain_until_idle_never_exceeds_its_maximum() {
        let limits = limits(Drain::UntilIdle {
            at_least: Duration::from_secs(90),
            at_most: Duration::from_secs(60),
        });
        assert_eq!(limits.at_most(Step::DrainTime), Some(Duration::from_secs(59)));
        assert_eq!(limits.at_most(Step::Connections), Some(Duration::ZERO));
        assert_eq!(limits.at_most(Step::LastRequests), Some(Duration::from_secs(1)));
    }

    fn limits(drain: Drain) -> Limits {
        Limits {
            delay: Duration::ZERO,
            drain_call: Duration::ZERO,
            drain,
            long_requests: Duration::ZERO,
            quit: Duration::ZERO,
            terminate: Duration::ZERO,
            kill: Duration::ZERO,
        }
    }
}
