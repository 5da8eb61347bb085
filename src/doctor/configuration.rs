//! Settings that cannot be used or have no effect.

use super::report::Check;
use crate::config::{Config, Problem};

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let warnings = config.warnings.iter().map(|problem| {
        Check::warning(&problem.subject, format!("{:?}", problem.found)).expected(&problem.expected)
    });
    let checks: Vec<_> = warnings.collect();
    match checks.is_empty() {
        true => vec![Check::ok("settings", "all are used")],
        false => checks,
    }
}

/// The problems the agent does not start with.
pub(super) fn unusable(problems: &[Problem]) -> Vec<Check> {
    let errors = problems.iter().map(|problem| {
        Check::error(&problem.subject, format!("{:?}", problem.found))
            .expected(&problem.expected)
            .remedy("the agent does not start with it")
    });
    errors.collect()
}
