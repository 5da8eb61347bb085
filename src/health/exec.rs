//! Runs a program as a check: exit code 0 is success.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Command;

/// A process group that is killed when this is dropped.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // There may be none left.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Runs the command without a shell, and without reading its output. When it ends, and after `limit`,
/// what it has started is killed.
pub(super) async fn run(command: &[String], limit: Duration) -> Result<(), String> {
    let Some((program, arguments)) = command.split_first() else {
        return Err("no command".to_owned());
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|error| format!("{program:?} does not run: {error}"))?;
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let _group = Group(pid);
    let ended = tokio::time::timeout(limit, child.wait()).await;
    match ended {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(format!("{program:?} ended with {status}")),
        Ok(Err(error)) => Err(format!("{program:?} cannot be waited for: {error}")),
        // The runtime reaps the child once it has ended.
        Err(_) => Err(format!(
            "command timeout exceeded: {program:?} ran for {limit:?}"
        )),
    }
}
