//! Settings that cannot be used or have no effect.

use super::report::{Check, Level};
use crate::config::{Config, Problem};
use crate::logging;

pub(super) fn checks(config: &Result<Config, Vec<Problem>>) -> Vec<Check> {
    let config = match config {
        Ok(config) => config,
        Err(problems) => {
            let errors = problems.iter();
            return errors
                .map(|problem| Check::problem(Level::Error, problem))
                .collect();
        }
    };
    let consequence = "the agent cannot request certificates, unless another process serves them";
    let of_authority = config.authority_problems.iter().cloned();
    let of_authority = of_authority.map(|problem| problem.consequence(consequence));
    let warnings = config.warnings.iter().cloned().chain(of_authority);
    let mut checks: Vec<_> = warnings
        .map(|problem| Check::problem(Level::Warning, &problem))
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
