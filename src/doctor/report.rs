//! What the checks found: one line each, as text or as JSON.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The answer of all checks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub node: String,
    /// The worst of all checks.
    pub level: Level,
    pub groups: Vec<Group>,
}

/// Checks of one subject, in the order in which one thing rests on the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Group {
    pub name: String,
    pub checks: Vec<Check>,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub level: Level,
    pub found: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub expected: String,
    /// What to do.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Ok,
    /// Not checked, and why not.
    Skipped,
    Warning,
    Error,
}

impl Check {
    pub fn ok(name: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::new(name, Level::Ok, found)
    }

    /// A check that was not made.
    pub fn skipped(name: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(name, Level::Skipped, why)
    }

    /// What works, but may not for long, or not as configured.
    pub fn warning(name: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::new(name, Level::Warning, found)
    }

    /// What keeps the pod from being ready or from serving.
    pub fn error(name: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::new(name, Level::Error, found)
    }

    fn new(name: impl Into<String>, level: Level, found: impl fmt::Display) -> Self {
        Self {
            name: name.into(),
            level,
            found: found.to_string(),
            expected: String::new(),
            remedy: String::new(),
        }
    }

    pub fn expected(self, expected: impl fmt::Display) -> Self {
        Self {
            expected: expected.to_string(),
            ..self
        }
    }

    pub fn remedy(self, remedy: impl fmt::Display) -> Self {
        Self {
            remedy: remedy.to_string(),
            ..self
        }
    }
}

impl Report {
    pub(super) fn new(node: String, groups: Vec<Group>) -> Self {
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
        writeln!(f, "{}", self.node)?;
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
        write!(f, "{errors} errors, {warnings} warnings")
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Skipped => "skipped",
            Level::Warning => "warning",
            Level::Error => "error",
        };
        // A certificate's name or an answer may hold anything.
        let line = |text: &str| text.replace(|c: char| c.is_control(), " ");
        write!(f, "{level:<8} {}: {}", self.name, line(&self.found))?;
        if !self.expected.is_empty() {
            write!(f, "; expected {}", line(&self.expected))?;
        }
        if !self.remedy.is_empty() {
            write!(f, "; {}", line(&self.remedy))?;
        }
        Ok(())
    }
}
