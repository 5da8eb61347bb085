//! Settings that cannot be used or have no effect.

use super::report::Check;
use crate::config::{Config, Problem};
use crate::logging;

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let warnings = config.warnings.iter().map(|problem| {
        Check::warning(&problem.subject, problem.quoted()).expected(&problem.expected)
    });
    let authority = config.authority_problems.iter().map(|problem| {
        Check::warning(&problem.subject, problem.quoted())
            .expected(&problem.expected)
            .remedy("it matters unless another process serves the workload's certificate")
    });
    let mut checks: Vec<_> = warnings.chain(authority).collect();
    if checks.is_empty() {
        checks.push(Check::ok("settings", "all can be used"));
    }
    checks.extend(silent(&logging::silent_scopes()));
    if !config.ignored.is_empty() {
        let without_effect = config.ignored.join(", ");
        checks.push(Check::ok("settings without effect", without_effect));
    }
    checks
}

fn silent(scopes: &[&str]) -> Option<Check> {
    let found = format!("none, of {}", scopes.join(", "));
    let check = Check::warning("log level", found)
        .expected("error or more")
        .remedy("no error of these is logged; correct --log_output_level, or set a level at /debug/logging");
    (!scopes.is_empty()).then_some(check)
}

/// The problems the agent does not start with.
pub(super) fn unusable(problems: &[Problem]) -> Vec<Check> {
    let errors = problems.iter().map(|problem| {
        Check::error(&problem.subject, problem.quoted())
            .expected(&problem.expected)
            .remedy("the agent does not start with it; pilot-agent config says where it comes from")
    });
    errors.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Level;

    #[test]
    fn scopes_that_log_nothing_are_a_warning_that_names_them() {
        assert!(silent(&[]).is_none());
        let check = silent(&["ca", "sds"]).expect("a check");
        assert_eq!(check.level, Level::Warning);
        assert!(check.found.contains("ca, sds"), "{check:?}");
    }
}
