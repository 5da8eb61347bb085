//! Reports settings that cannot be used or have no effect.

use crate::config::Config;
use crate::logging;
use crate::problem::Problem;
use crate::report::{Check, Level};

pub(super) fn checks(config: &Result<Config, Vec<Problem>>) -> Vec<Check> {
    let config = match config {
        Ok(config) => config,
        Err(problems) => return checks_of(Level::Error, problems),
    };
    let consequence = "the agent cannot request certificates, unless another process serves them";
    let mut checks = checks_of(Level::Warning, &config.warnings);
    for problem in &config.authority_problems {
        let warning = problem.clone().consequence(consequence);
        checks.push(Check::with_level(Level::Warning, &warning));
    }
    if checks.is_empty() {
        checks.push(Check::ok("settings", "all can be used"));
    }
    checks.extend(logging::levels().silent().as_ref().map(Check::from));
    if !config.ignored.is_empty() {
        let without_effect = config.ignored.join(", ");
        checks.push(Check::ok("settings without effect", without_effect));
    }
    checks
}

fn checks_of(level: Level, problems: &[Problem]) -> Vec<Check> {
    let checks = problems.iter().map(|it| Check::with_level(level, it));
    checks.collect()
}
