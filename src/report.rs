//! The findings of `doctor` and `preflight`: one line each, as text or as JSON.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::logging::printable;
use crate::problem::{Problem, sentence};

/// In characters.
const MAX_TEXT: usize = 1000;

/// The answer of all checks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub node: String,
    /// The worst of all checks.
    pub level: Level,
    pub groups: Vec<Group>,
}

/// Checks of one subject. The groups are sorted by dependency.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Group {
    pub name: String,
    pub checks: Vec<Check>,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub level: Level,
    /// Empty if the check passed or was not made.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub code: String,
    pub found: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub expected: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub consequence: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

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
    /// Not checked, with the reason.
    #[default]
    Skipped,
    Ok,
    Warning,
    Error,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

impl Group {
    pub(crate) fn new(name: &str, checks: Vec<Check>) -> Self {
        let name = name.to_owned();
        Self { name, checks }
    }
}

impl Check {
    pub fn ok(name: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::new(name, Level::Ok, found)
    }

    /// A check that was not made.
    pub fn skipped(name: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(name, Level::Skipped, why)
    }

    /// A state that works, but may not for long, or not as configured.
    pub fn warning(name: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::new(name, Level::Warning, found)
    }

    /// A state that keeps the pod from being ready or from serving.
    pub fn error(name: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::new(name, Level::Error, found)
    }

    pub fn new(name: impl Into<String>, level: Level, found: impl fmt::Display) -> Self {
        Self {
            name: name.into(),
            level,
            // An error may quote what another process has sent.
            found: found.to_string().chars().take(MAX_TEXT).collect(),
            code: String::new(),
            expected: String::new(),
            consequence: String::new(),
            remedy: String::new(),
        }
    }

    pub fn problem(level: Level, problem: &Problem) -> Self {
        Self {
            code: problem.code.name.to_owned(),
            expected: problem.expected.to_string(),
            consequence: problem.consequence.to_string(),
            remedy: problem.remedy.to_string(),
            ..Self::new(&problem.subject, level, &problem.found)
        }
    }

    pub fn sentence(&self) -> String {
        let follows = [self.consequence.as_str(), &self.remedy];
        sentence(&self.name, &self.found, &self.expected, follows, &self.code)
    }

    pub fn expected(mut self, expected: impl fmt::Display) -> Self {
        self.expected = expected.to_string();
        self
    }

    pub fn remedy(mut self, remedy: impl fmt::Display) -> Self {
        self.remedy = remedy.to_string();
        self
    }
}

impl Report {
    pub(crate) fn new(node: String, groups: Vec<Group>) -> Self {
        let groups: Vec<_> = groups
            .into_iter()
            .filter(|g| !g.checks.is_empty())
            .collect();
        let levels = groups.iter().flat_map(|group| &group.checks);
        let level = levels.map(|check| check.level).max();
        Self {
            node,
            level: level.unwrap_or(Level::Skipped),
            groups,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", printable(&self.node))?;
        for group in &self.groups {
            writeln!(f, "{}", group.name)?;
            for check in &group.checks {
                writeln!(f, "  {check}")?;
            }
        }
        let count = |level| {
            let checks = self.groups.iter().flat_map(|group| &group.checks);
            checks.filter(|check| check.level == level).count()
        };
        let [errors, warnings] = [Level::Error, Level::Warning].map(count);
        write!(f, "errors: {errors}, warnings: {warnings}")
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = self.level.name();
        // A certificate's name or an answer may contain anything.
        write!(f, "{level:<8} {}", printable(&self.sentence()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(checks: Vec<Check>) -> Report {
        let name = "istiod".to_owned();
        Report::new("node".to_owned(), vec![Group { name, checks }])
    }

    #[test]
    fn a_report_has_the_level_of_its_worst_check_and_a_line_for_each() {
        let mut checks = vec![Check::skipped("a", "no agent")];
        assert_eq!(report(checks.clone()).level, Level::Skipped);
        checks.push(Check::ok("b", "found"));
        assert_eq!(report(checks.clone()).level, Level::Ok);
        checks.push(Check::warning("c", "late").expected("soon"));
        assert_eq!(report(checks.clone()).level, Level::Warning);
        checks.push(Check::error("d\n", "a\u{1b}[2Jb\nc").remedy("mend it"));
        let report = report(checks);
        assert_eq!(report.level, Level::Error);
        let expected = "node\nistiod\n  skipped  a: no agent\n  ok       b: found\n  \
                        warning  c is late, expected soon\n  error    d\\n: a\\u001b[2Jb\\nc; mend it\n\
                        errors: 1, warnings: 1";
        assert_eq!(report.to_string(), expected);
    }

    #[test]
    fn a_text_of_another_process_is_cut() {
        let check = Check::error("a", "é".repeat(5000));
        assert_eq!(check.found.chars().count(), MAX_TEXT);
    }
}
