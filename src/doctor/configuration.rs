//! Settings that cannot be used or have no effect.

use super::report::{Check, Level};
use crate::config::{Config, Problem};
use crate::logging;

pub(super) fn checks(config: &Result<Config, Vec<Problem>>) -> Vec<Check> {
    let check = |level, problem: &Problem, remedy| {
        let check = Check::new(&problem.subject, level, problem.quoted());
        check.expected(&problem.expected).remedy(remedy)
    };
    let config = match config {
        Ok(config) => config,
        Err(problems) => {
            let remedy =
                "the agent does not start with it; pilot-agent config says where it comes from";
            let errors = problems.iter();
            return errors.map(|it| check(Level::Error, it, remedy)).collect();
        }
    };
    let remedy = "it matters unless another process serves the workload's certificate";
    let warnings = config.warnings.iter().map(|problem| (problem, ""));
    let of_authority = config.authority_problems.iter().map(|it| (it, remedy));
    let mut checks: Vec<_> = warnings
        .chain(of_authority)
        .map(|(problem, remedy)| check(Level::Warning, problem, remedy))
        .collect();
    if checks.is_empty() {
        checks.push(Check::ok("settings", "all can be used"));
    }
    let silent = logging::levels().silent();
    if !silent.is_empty() {
        let check = Check::warning("log level", format!("none, of {}", silent.join(", ")));
        checks.push(check.expected("error or more").remedy(
            "no error of these is logged; correct --log_output_level, or set a level at /debug/logging",
        ));
    }
    if !config.ignored.is_empty() {
        let without_effect = config.ignored.join(", ");
        checks.push(Check::ok("settings without effect", without_effect));
    }
    checks
}
