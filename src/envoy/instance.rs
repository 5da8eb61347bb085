//! One Envoy of the agent: its process, what it was started from, and what a record of its crash needs.

use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal};
use tokio::time::Instant;

use super::crash::Crash;
use super::handle::{Epoch, Role};
use super::launch::Launch;
use super::memory::oom_kills;
use super::output::Output;
use super::process::{Ended, Error, Process};
use crate::clock::{self, Clock};
use crate::lifecycle::Claim;

pub(super) const KILLED: i32 = Signal::KILL.as_raw();

#[derive(Debug)]
pub(super) struct Instance {
    pub(super) process: Process,
    pub(super) launch: Launch,
    pub(super) epoch: u32,
    pub(super) started: SystemTime,
    since: Instant,
    pub(super) output: Output,
    /// The kernel's count before the start.
    oom_kills: Option<u64>,
    _claim: Claim,
}

impl Instance {
    /// Starts Envoy. Call it on the main thread, see [`Process::start`].
    pub(super) fn start(launch: Launch, epoch: u32) -> Result<Self, Error> {
        let oom_kills = oom_kills("/".as_ref());
        let command = &launch.prepared.command;
        let (output, stdio) = Output::copy(command.user);
        let process = Process::start(command, &launch.mode, stdio)?;
        Ok(Self {
            _claim: Claim::new(process.pid()),
            process,
            launch,
            epoch,
            started: Clock::system().now(),
            since: Instant::now(),
            output,
            oom_kills,
        })
    }

    pub(super) fn pid(&self) -> Pid {
        self.process.pid()
    }

    pub(super) fn uptime(&self) -> Duration {
        self.since.elapsed()
    }

    pub(super) async fn crash(&mut self, ended: Ended) -> Crash {
        let uptime = self.uptime();
        let (code, signal) = match ended {
            Ended::Code(code) => (Some(code), None),
            Ended::Signal(signal) => (None, Some(signal)),
        };
        let has_grown = || Some(oom_kills("/".as_ref())? > self.oom_kills?);
        Crash {
            when: clock::rfc3339(Clock::system().now()),
            epoch: self.epoch,
            pid: self.pid().as_raw_nonzero().get(),
            code,
            signal,
            uptime_seconds: uptime.as_secs_f64(),
            out_of_memory: (signal == Some(KILLED)).then(has_grown).flatten(),
            stderr: self.output.last_lines().await,
        }
    }

    /// Kills Envoy and reaps it, unless the kernel takes longer than `limit`.
    pub(super) async fn end(mut self, limit: Duration) {
        self.process.kill();
        let ended = tokio::time::timeout(limit, self.process.ended()).await;
        if ended.is_err() {
            let pid = self.pid();
            tracing::error!("Envoy {pid} did not end within {limit:?} of being killed; leaving it");
        }
    }

    pub(super) fn report(&self, state: Role) -> Epoch {
        Epoch {
            epoch: self.epoch,
            restart_epoch: self.launch.restart_epoch(),
            pid: self.pid().as_raw_nonzero().get(),
            state,
            started: Some(self.started),
            config: self.launch.prepared.command.bootstrap.clone(),
        }
    }
}

/// Waits for the end of an Envoy, if there is one, and for ever if not.
pub(super) async fn ended(instance: &mut Option<Instance>) -> Result<Ended, Error> {
    match instance {
        Some(instance) => instance.process.ended().await,
        None => std::future::pending().await,
    }
}
