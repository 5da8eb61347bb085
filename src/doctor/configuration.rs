//! Settings that cannot be used or have no effect.

use super::report::Check;
use crate::config::{Config, Problem};

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let warnings = config.warnings.iter().map(|problem| {
        Check::warning(&problem.subject, format!("{:?}", problem.found)).expected(&problem.expected)
    });
    let authority = config.authority_problems.iter().map(|problem| {
        Check::warning(&problem.subject, format!("{:?}", problem.found))
            .expected(&problem.expected)
            .remedy("it matters unless another process serves the workload's certificate")
    });
    let mut checks: Vec<_> = warnings.chain(authority).collect();
    if checks.is_empty() {
        checks.push(Check::ok("settings", "all can be used"));
    }
    if !config.ignored.is_empty() {
        let without_effect = config.ignored.join(", ");
        checks.push(Check::ok("settings without effect", without_effect));
    }
    checks
}

/// The problems the agent does not start with.
pub(super) fn unusable(problems: &[Problem]) -> Vec<Check> {
    let errors = problems.iter().map(|problem| {
        Check::error(&problem.subject, format!("{:?}", problem.found))
            .expected(&problem.expected)
            .remedy("the agent does not start with it; pilot-agent config says where it comes from")
    });
    errors.collect()
}
