//! Envoy's process: started, signalled and reaped here, the only place that knows its pid.
//!
//! Envoy has no input, and leads a process group of its own, so that a terminal's signals reach the
//! agent alone. When the agent is killed, the kernel sends Envoy SIGTERM, its parent-death signal. The kernel watches the *thread* that forked for this: [`Process::start`]
//! must run on the main thread, which lives as long as the program does; the runtime is
//! single-threaded, so every future polled by it does.

use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal};

use super::command::{Command, Mode};

/// A running Envoy. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: tokio::process::Child,
    pid: Pid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Code(u8),
    Signal(i32),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no Envoy binary at {}", .path.display())]
    Missing { path: PathBuf },
    #[error("the Envoy binary {} exists, but the loader or interpreter it names does not", .path.display())]
    LoaderMissing { path: PathBuf },
    #[error("the Envoy binary {} is not executable", .path.display())]
    NotExecutable { path: PathBuf },
    #[error("cannot start Envoy from {}", .path.display())]
    Start {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot learn how Envoy ended")]
    Wait {
        #[source]
        source: io::Error,
    },
}

impl Process {
    /// Starts Envoy with this standard output and error. Call it on the main thread.
    pub fn start(command: &Command, mode: &Mode, output: [Stdio; 2]) -> Result<Self, Error> {
        let [stdout, stderr] = output;
        let mut start = tokio::process::Command::new(&command.binary);
        start
            .args(command.arguments(mode))
            .envs(command.environment())
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0)
            .kill_on_drop(true);
        if let Some(user) = command.user {
            // Takes all other groups away, too.
            start.gid(user).uid(user);
        }
        // The kernel forgets this when the user changes, and code in between runs after that.
        end_with_parent(&mut start);
        let child = start
            .spawn()
            .map_err(|source| start_error(&command.binary, source))?;
        let pid = child
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let pid = pid.ok_or_else(|| Error::Start {
            path: command.binary.clone(),
            source: io::Error::other("the process ended before it had an id"),
        })?;
        Ok(Self { child, pid })
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits for the end and reaps it. May be called again.
    pub async fn ended(&mut self) -> Result<Ended, Error> {
        let status = self
            .child
            .wait()
            .await
            .map_err(|source| Error::Wait { source })?;
        Ok(Ended::from(status))
    }

    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        // The id is only given to another process after the reaping, after which tokio has none.
        if self.child.id().is_none() {
            return;
        }
        if let Err(error) = rustix::process::kill_process(self.pid, signal) {
            tracing::warn!(%error, ?signal, "cannot signal Envoy; waiting for its end");
        }
    }
}

/// Makes the kernel terminate the child when the thread that starts it ends.
#[expect(
    unsafe_code,
    reason = "code between fork and exec can be had in no other way"
)]
fn end_with_parent(start: &mut tokio::process::Command) {
    let agent = rustix::process::getpid();
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. The closure makes two
    // system calls and builds an `io::Error` from a number, which does not allocate.
    unsafe {
        start.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            // The agent may have died before the line above; then no signal will come. Without a
            // parent in this pid namespace there is nothing to compare.
            match rustix::process::getppid() {
                Some(parent) if parent != agent => Err(rustix::io::Errno::SRCH.into()),
                _ => Ok(()),
            }
        });
    }
}

fn start_error(binary: &Path, source: io::Error) -> Error {
    let path = binary.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound if path.exists() => Error::LoaderMissing { path },
        io::ErrorKind::NotFound => Error::Missing { path },
        io::ErrorKind::PermissionDenied => Error::NotExecutable { path },
        _ => Error::Start { path, source },
    }
}

impl Ended {
    /// The exit code a shell would report.
    pub fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => u8::try_from(signal).map_or(u8::MAX, |s| s.saturating_add(128)),
        }
    }
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        // A process that was waited for has ended in one of two ways; the code is one byte.
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(u8::try_from(code).unwrap_or(u8::MAX)),
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit status {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}
