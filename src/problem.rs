//! A setting that cannot be used, and the collection of all of them.

use std::fmt;

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problem {
    pub kind: Kind,
    /// Variable, flag, member or file.
    pub subject: String,
    pub found: String,
    /// Empty where `found` is a sentence that says it all.
    pub expected: String,
}

/// The kinds of problems that `preflight` tells apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    #[default]
    Value,
    RepeatedMember,
    UnknownMember,
}

impl Problem {
    /// What was found, in quotes where it is a value.
    pub fn quoted(&self) -> String {
        match self.expected.as_str() {
            "" => self.found.clone(),
            _ => format!("{:?}", self.found),
        }
    }

    pub fn new(
        subject: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self {
            kind: Kind::default(),
            subject: subject.into(),
            found: found.into(),
            expected: expected.into(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.subject, self.quoted(), self.expected.as_str()) {
            (subject, found, "") => write!(f, "{subject}: {found}"),
            (subject, found, expected) => write!(f, "{subject} is {found}, expected {expected}"),
        }
    }
}

/// The problems found while a configuration is read.
#[derive(Debug, Default)]
pub struct Diagnostics {
    /// What makes the configuration unusable.
    pub problems: Vec<Problem>,
    /// What is left out, or replaced by a default.
    pub warnings: Vec<Problem>,
}

impl Diagnostics {
    /// Adds what makes the configuration unusable, once.
    pub fn problem(
        &mut self,
        subject: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) {
        let problem = Problem::new(subject, found, expected);
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// Adds what is left out, or replaced by a default.
    pub fn warn(
        &mut self,
        subject: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) {
        self.warnings.push(Problem::new(subject, found, expected));
    }
}
