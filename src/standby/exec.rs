//! Replaces this process by another command of this program.

use std::os::unix::process::CommandExt;
use std::process::Command;

use super::record::Record;
use crate::config::environment::Environment;
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle;

/// Runs `pilot-agent proxy` as the former holder of the lock ran it. Returns only on failure.
pub fn proxy(record: &Record, own: &Environment) -> Problem {
    run(|command| command.args(&record.arguments).env_clear().envs(record.environment(own)))
}

/// Runs `pilot-agent standby`. Returns only on failure.
pub fn standby() -> Problem {
    run(|command| command.arg("standby"))
}

fn run(prepare: impl FnOnce(&mut Command) -> &mut Command) -> Problem {
    let error = match lifecycle::hold_signals().and_then(|()| std::env::current_exe()) {
        Ok(program) => prepare(&mut Command::new(program)).exec(),
        Err(error) => error,
    };
    Problem::new(Code::StandbyUnusable, "pilot-agent", error)
}
