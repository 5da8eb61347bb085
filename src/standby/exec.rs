//! Turns this process into another command of this program.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::record::Record;
use crate::config::environment::Environment;
use crate::lifecycle;

/// Runs `pilot-agent proxy` as the former holder of the lock ran it. Returns only on failure.
pub(super) fn proxy(record: &Record, own: &Environment) -> io::Error {
    run(|command| {
        command
            .args(&record.arguments)
            .env_clear()
            .envs(record.environment(own));
    })
}

/// Runs `pilot-agent standby`. Returns only on failure.
pub(super) fn standby() -> io::Error {
    run(|command| {
        command.arg("standby");
    })
}

fn run(prepare: impl FnOnce(&mut Command)) -> io::Error {
    let program = lifecycle::hold_signals().and_then(|()| std::env::current_exe());
    match program {
        Ok(program) => {
            let mut command = Command::new(program);
            prepare(&mut command);
            command.exec()
        }
        Err(error) => error,
    }
}
