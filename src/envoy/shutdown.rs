//! What lies ahead of an Envoy that is to end, in a form for people.
//!
//! A [`Plan`] is the list of steps left; [`Shutdown`] says which of them is under way. Both are shown
//! by the status port, and the plan is logged in one line when the way down begins.
//!
//! Does not decide what follows what; [`super::machine`] does.

use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};

use crate::clock;

/// What a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The answer to the drain call.
    DrainCall,
    /// Time in which clients leave.
    DrainTime,
    /// The end of the last connection.
    Connections,
    /// The end of requests under way, after nothing new is let in.
    LastRequests,
    /// The end of the last of them that takes longer than the drain.
    LongRequests,
    /// The end of an Envoy that was asked to quit.
    Quit,
    /// The end after SIGTERM.
    Termination,
    /// The end after SIGKILL.
    Kill,
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

/// The way down, as far as it has got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shutdown {
    /// Why, in the words of who asked first.
    pub cause: &'static str,
    #[serde(serialize_with = "in_utc")]
    pub since: SystemTime,
    /// As it was when the way down began, or when somebody made it shorter.
    pub plan: Plan,
    pub waits_for: Option<Step>,
    /// When the step under way is over at the latest.
    #[serde(serialize_with = "in_utc_if_any")]
    pub until: Option<SystemTime>,
    /// How many were counted last, if they are: connections, or requests that outlast the drain.
    pub connections: Option<u64>,
}

impl Plan {
    /// How long all steps take together, at most.
    pub fn at_most(&self) -> Duration {
        self.0.iter().map(|step| step.at_most).sum()
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
        f.write_str(match self {
            Self::DrainCall => "drain call",
            Self::DrainTime => "drain time",
            Self::Connections => "last connection",
            Self::LastRequests => "last requests",
            Self::LongRequests => "longer requests",
            Self::Quit => "quit call",
            Self::Termination => "SIGTERM",
            Self::Kill => "SIGKILL",
        })
    }
}

pub(super) fn in_seconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

fn in_utc<S: Serializer>(moment: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&clock::rfc3339(*moment))
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
    fn reads_as_one_line_that_ends_with_the_whole() {
        let step = |waits_for, seconds| PlannedStep {
            waits_for,
            at_most: Duration::from_secs(seconds),
        };
        let plan = Plan(vec![step(Step::Quit, 2), step(Step::Termination, 5)]);
        let expected = "quit call 2s, SIGTERM 5s, all in all 7s at most";
        assert_eq!(plan.to_string(), expected);
    }
}
