//! One Envoy: started, signalled and reaped here, the only place that knows its pid.
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
use super::handle::{Epoch, Role};
use super::launch::Launch;
use super::output::Output;
use super::program;
use crate::clock::{self, Clock};
use crate::duration::rounded;
use crate::port;
use crate::problem::{Problem, codes};

pub(super) const INTERRUPTED: i32 = Signal::INT.as_raw();
pub(super) const KILLED: i32 = Signal::KILL.as_raw();
pub(super) const TERMINATED: i32 = Signal::TERM.as_raw();

/// A running Envoy, and what it was started from. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Instance {
    child: tokio::process::Child,
    pid: Pid,
    pub(super) launch: Launch,
    pub(super) epoch: u32,
    started: SystemTime,
    since: Instant,
    pub(super) output: Output,
    /// The kernel's count before the start.
    oom_kills: Option<u64>,
}

/// How an Envoy has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Code(u8),
    Signal(i32),
}

impl Instance {
    /// Starts Envoy. Call it on the main thread.
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
            // Takes all other groups away, too.
            start.gid(user).uid(user);
        }
        // The kernel forgets this when the user changes, and code in between runs after that.
        end_with_parent(&mut start);
        let started = program::runnable(&command.binary).and_then(|()| {
            let child = start.spawn()?;
            let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
            let pid = pid.ok_or_else(|| io::Error::other("it exited before its pid was known"));
            Ok((child, pid?))
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
        // The id is only given to another process after the reaping, after which tokio has none.
        if self.child.id().is_none() {
            return;
        }
        if let Err(error) = rustix::process::kill_process(self.pid, signal) {
            tracing::warn!(%error, ?signal, "cannot signal Envoy; waiting until it exits");
        }
    }

    /// Waits for the end and reaps it. May be called again.
    pub(super) async fn ended(&mut self) -> io::Result<Ended> {
        Ok(self.child.wait().await?.into())
    }

    /// Kills Envoy and reaps it, unless the kernel takes longer than `limit`.
    pub(super) async fn end(mut self, limit: Duration) {
        self.kill();
        if tokio::time::timeout(limit, self.ended()).await.is_err() {
            tracing::error!("{}", unkillable(limit));
        }
    }

    pub(super) async fn crash(&mut self, ended: Ended) -> Crash {
        let uptime = self.since.elapsed();
        let (code, signal) = match ended {
            Ended::Code(code) => (Some(code), None),
            Ended::Signal(signal) => (None, Some(signal)),
        };
        let has_grown = || Some(oom_kills("/".as_ref())? > self.oom_kills?);
        // Later another process may have a port that was taken.
        let stderr = self.output.last_lines().await.into_iter();
        Crash {
            when: clock::rfc3339(Clock::system().now()),
            epoch: self.epoch,
            pid: self.pid.as_raw_nonzero().get(),
            code,
            signal,
            uptime_seconds: uptime.as_secs_f64(),
            out_of_memory: (signal == Some(KILLED)).then(has_grown).flatten(),
            stderr: stderr.map(port::explained).collect(),
        }
    }

    pub(super) fn report(&self, state: Role) -> Epoch {
        Epoch {
            epoch: self.epoch,
            restart_epoch: self.launch.restart_epoch(),
            pid: self.pid.as_raw_nonzero().get(),
            state,
            started: Some(self.started),
            config: self.launch.prepared.command.bootstrap.clone(),
        }
    }
}

/// Waits for the end of an Envoy, if there is one, and for ever if not.
pub(super) async fn ended(instance: &mut Option<Instance>) -> io::Result<Ended> {
    match instance {
        Some(instance) => instance.ended().await,
        None => std::future::pending().await,
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

/// The problem of an Envoy that SIGKILL did not end in time.
pub(super) fn unkillable(limit: Duration) -> Problem {
    let found = format!("it did not exit within {} of SIGKILL", rounded(limit));
    Problem::new(codes::ENVOY_UNKILLABLE, "Envoy", found)
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
