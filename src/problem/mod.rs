//! Describes problems that an operator can solve, each with a code. All outputs of the agent report problems in this
//! form: log, exit errors, `doctor`, `config`, `preflight`, readiness, debug pages and support bundle.
//!
//! Programs compare codes only. Texts are for people and may change.

mod codes;
mod repetition;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use clap::ValueEnum;
pub use codes::Code;
pub use repetition::Repetition;
use serde::{Deserialize, Serialize, Serializer};

/// The level of a check, or of a problem in a report.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// The check was skipped; the finding gives the reason.
    #[default]
    Skipped,
    Ok,
    Warning,
    Error,
}

impl Level {
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |it| it.get_name().to_owned())
    }
}

/// A problem that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    #[serde(serialize_with = "name")]
    pub code: Code,
    /// The variable, flag, member, file, peer or part of the agent.
    pub subject: String,
    /// A sentence without its subject, or a value in quotes.
    pub found: String,
    /// The expected value; empty unless `found` is a value.
    pub expected: Cow<'static, str>,
    pub consequence: Cow<'static, str>,
    pub remedy: Cow<'static, str>,
}

impl Problem {
    /// Describes a problem by a sentence.
    pub fn new(code: Code, subject: impl ToString, found: impl ToString) -> Self {
        Self {
            code,
            subject: subject.to_string(),
            found: found.to_string(),
            expected: "".into(),
            consequence: code.consequence().into(),
            remedy: code.remedy().into(),
        }
    }

    /// Describes a value other than expected.
    pub fn value(
        code: Code,
        subject: impl ToString,
        found: &str,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(code, subject, format!("{found:?}")).expected(expected)
    }

    /// Describes the value of a setting that is ignored or replaced by another, as the consequence states.
    pub fn replaced(
        subject: impl ToString,
        found: &str,
        expected: impl Into<Cow<'static, str>>,
        consequence: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::value(Code::SettingReplaced, subject, found, expected).consequence(consequence)
    }

    /// Adds the value that was expected.
    #[must_use]
    pub fn expected(mut self, expected: impl Into<Cow<'static, str>>) -> Self {
        self.expected = expected.into();
        self
    }

    /// Replaces the consequence of the code by a more specific one.
    #[must_use]
    pub fn consequence(mut self, consequence: impl Into<Cow<'static, str>>) -> Self {
        self.consequence = consequence.into();
        self
    }

    /// Replaces the remedy of the code by a more specific one.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.remedy = remedy.into();
        self
    }
}

impl std::error::Error for Problem {}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let follows = [&*self.consequence, &*self.remedy];
        let Self { subject, found, .. } = self;
        let text = sentence(subject, found, &self.expected, follows, self.code.name());
        f.write_str(&text)
    }
}

/// Joins the parts of a problem to a text. Leaves out empty parts.
pub fn sentence(
    subject: &str,
    found: &str,
    expected: &str,
    follows: [&str; 2],
    code: &str,
) -> String {
    let mut text = match expected {
        "" => format!("{subject}: {found}"),
        expected => format!("{subject} is {found}, expected {expected}"),
    };
    for part in follows.into_iter().filter(|part| !part.is_empty()) {
        text += &format!("; {part}");
    }
    if !code.is_empty() {
        text += &format!(" [{code}]");
    }
    text
}

fn name<S: Serializer>(code: &Code, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(code.name())
}

/// Serializes a problem as a text, and its code.
pub fn error<S: Serializer>(problem: &Problem, serializer: S) -> Result<S::Ok, S::Error> {
    let (code, error) = (problem.code.name(), problem.to_string());
    BTreeMap::from([("code", code), ("error", &error)]).serialize(serializer)
}

/// The problems found while a configuration is read.
#[derive(Debug, Default)]
pub struct Diagnostics {
    /// Problems that make the configuration unusable.
    pub problems: Vec<Problem>,
    /// Values that are ignored or replaced by a default.
    pub warnings: Vec<Problem>,
}

impl Diagnostics {
    /// Adds a problem that makes the configuration unusable, once.
    pub fn add(&mut self, problem: Problem) {
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }
}

#[cfg(test)]
impl Problem {
    /// Formats the problem without consequence, remedy and code.
    pub fn brief(&self) -> String {
        sentence(&self.subject, &self.found, &self.expected, ["", ""], "")
    }
}

#[cfg(test)]
mod docs_tests;
