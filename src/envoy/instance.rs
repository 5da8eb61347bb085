//! Starts, signals and reaps one Envoy. No other module knows its pid.
//!
//! Envoy has no input, and its own process group, so a terminal's signals reach the agent alone. If the agent dies,
//! the kernel sends Envoy SIGTERM. The kernel watches the *thread* that forked: [`Instance::start`] must run on the
//! main thread, which polls all futures of the single-threaded runtime.

use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal};
use tokio::time::Instant;

use super::crash::{Crash, oom_kills};
use super::handle::{Role, RunningEnvoy};
use super::launch::Launch;
use super::output::Output;
use super::program;
use crate::net::port;
use crate::problem::{Code, Problem};
use crate::runtime::clock::{self, Clock};
use crate::runtime::duration::rounded;

/// The signal for a file in memory that has no page where a process writes.
pub(super) const BUS: i32 = Signal::BUS.as_raw();
pub(super) const INTERRUPTED: i32 = Signal::INT.as_raw();
pub(super) const KILLED: i32 = Signal::KILL.as_raw();
pub(super) const TERMINATED: i32 = Signal::TERM.as_raw();

/// A running Envoy with its launch. Dropping it kills Envoy.
#[derive(Debug)]
pub(super) struct Instance {
    child: tokio::process::Child,
    pid: Pid,
    pub(super) launch: Launch,
    /// The number of Envoys that this agent has started before this one.
    pub(super) epoch: u32,
    started: SystemTime,
    since: Instant,
    pub(super) output: Output,
    /// The kernel's count of kills before the start.
    oom_kills: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Code(u8),
    Signal(i32),
}

impl Ended {
    /// Returns the exit code a shell would report.
    pub fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => u8::try_from(signal).map_or(u8::MAX, |s| s.saturating_add(128)),
        }
    }
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        // A reaped process has either a code, of one byte, or a signal.
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

impl Instance {
    /// Starts Envoy. Call it on the main thread. Fails with the reason why the kernel does not run the program.
    pub(super) fn start(launch: Launch, epoch: u32) -> Result<Self, Problem> {
        let oom_kills = oom_kills("/".as_ref());
        let command = &launch.prepared.command;
        let (output, [stdout, stderr]) = Output::copy(command.user);
        let mut start = tokio::process::Command::new(&command.binary);
        start
            .args(command.arguments(&launch.mode))
            .envs(command.environment())
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0)
            .kill_on_drop(true);
        if let Some(user) = command.user {
            // A change of the user also drops all supplementary groups.
            start.gid(user).uid(user);
        }
        // The kernel clears the setting when the user changes; the hook runs after that change.
        end_with_parent(&mut start);
        let started = program::check_runnable(&command.binary).and_then(|()| {
            let child = start.spawn()?;
            let pid = child
                .id()
                .and_then(|id| Pid::from_raw(id.cast_signed()))
                .ok_or_else(|| io::Error::other("it exited before its pid was known"))?;
            Ok((child, pid))
        });
        let (child, pid) = started.map_err(|error| program::problem(&command.binary, &error))?;
        Ok(Self {
            child,
            pid,
            launch,
            epoch,
            started: Clock::system().now(),
            since: Instant::now(),
            output,
            oom_kills,
        })
    }

    pub(super) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        // After the reaping tokio returns no pid, and the kernel may have given it to another process.
        if self.child.id().is_some()
            && let Err(error) = rustix::process::kill_process(self.pid, signal)
        {
            tracing::warn!(%error, ?signal, "cannot signal Envoy; waiting until it exits");
        }
    }

    /// Waits for the exit and reaps Envoy. Cancel safe; may be called again.
    pub(super) async fn wait_for_exit(&mut self) -> io::Result<Ended> {
        Ok(self.child.wait().await?.into())
    }

    /// Kills Envoy and reaps it. Logs an error if that takes longer than `limit`.
    pub(super) async fn kill_and_reap(mut self, limit: Duration) {
        self.kill();
        if tokio::time::timeout(limit, self.wait_for_exit()).await.is_err() {
            tracing::error!("{}", unkillable(limit));
        }
    }

    /// Describes the crash, now that Envoy has exited. Waits for its last lines of standard error.
    pub(super) async fn describe_crash(&mut self, ended: Ended) -> Crash {
        let uptime_seconds = self.since.elapsed().as_secs_f64();
        let (code, signal) = match ended {
            Ended::Code(code) => (Some(code), None),
            Ended::Signal(signal) => (None, Some(signal)),
        };
        let lines = self.output.last_lines().await;
        Crash {
            when: clock::rfc3339(Clock::system().now()),
            epoch: self.epoch,
            pid: self.pid.as_raw_nonzero().get(),
            code,
            signal,
            uptime_seconds,
            out_of_memory: match self.oom_kills {
                Some(before) if signal == Some(KILLED) => {
                    oom_kills("/".as_ref()).map(|now| now > before)
                }
                _ => None,
            },
            // Explained now, because another process may own the port later.
            stderr: lines.into_iter().map(port::explained).collect(),
        }
    }

    pub(super) fn report(&self, state: Role) -> RunningEnvoy {
        RunningEnvoy {
            epoch: self.epoch,
            restart_epoch: self.launch.restart_epoch(),
            pid: self.pid.as_raw_nonzero().get(),
            state,
            started: self.started,
            config: self.launch.prepared.command.bootstrap.clone(),
        }
    }
}

/// Waits for the exit of an Envoy; forever if there is none. Cancel safe.
pub(super) async fn wait_for_exit(instance: &mut Option<Instance>) -> io::Result<Ended> {
    match instance {
        Some(instance) => instance.wait_for_exit().await,
        None => std::future::pending().await,
    }
}

/// Makes the kernel terminate the child when the thread that starts it ends.
#[expect(unsafe_code, reason = "code between fork and exec can be had in no other way")]
fn end_with_parent(start: &mut tokio::process::Command) {
    let agent = rustix::process::getpid();
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. The closure makes two
    // system calls and builds an `io::Error` from a number, which does not allocate.
    unsafe {
        start.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            // If the agent died before the line above, no signal will come. A parent outside of this
            // pid namespace cannot be compared.
            if rustix::process::getppid().is_some_and(|parent| parent != agent) {
                return Err(rustix::io::Errno::SRCH.into());
            }
            Ok(())
        });
    }
}

pub(super) fn unkillable(limit: Duration) -> Problem {
    let found = format!("it did not exit within {} of SIGKILL", rounded(limit));
    Problem::new(Code::EnvoyUnkillable, "Envoy", found)
}
