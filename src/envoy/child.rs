//! One Envoy with what is noted about it while it lives, for the day it ends badly.
//!
//! Its standard error is copied on, its start is remembered, and so is the kernel's count of kills
//! for want of memory. When it has ended, [`Child::crash`] makes a record of all that.
//!
//! Does not know whether its end was wanted.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::command::Command;
use super::crash::Crash;
use super::memory::{KillCounter, Resident};
use super::process::{Ended, Error, Process};
use super::reaper::{Children, Claim};
use super::stderr::Tee;
use crate::clock;

pub(super) const KILLED: i32 = 9;

#[derive(Debug)]
pub(super) struct Child {
    pub(super) process: Process,
    epoch: u32,
    stderr: Option<Tee>,
    started: Instant,
    kills: Option<KillCounter>,
    resident: Resident,
    _claim: Claim,
}

impl Child {
    /// Starts Envoy. Call it on the main thread.
    pub(super) fn start(command: &Command, epoch: u32, own: &Children) -> Result<Self, Error> {
        let kills = KillCounter::start();
        let mut process = Process::start(command)?;
        let claim = own.claim(process.pid());
        let resident = Resident::of(process.pid());
        let stderr = process.take_stderr().map(|stderr| {
            let resident = resident.clone();
            Tee::start(stderr, std::io::stderr(), move || {
                resident.look();
            })
        });
        Ok(Self {
            process,
            epoch,
            stderr,
            started: Instant::now(),
            kills,
            resident,
            _claim: claim,
        })
    }

    pub(super) fn pid(&self) -> i32 {
        self.process.pid().as_raw_nonzero().get()
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn resident(&self) -> &Resident {
        &self.resident
    }

    /// Copies on what Envoy wrote last.
    pub(super) async fn finish(&mut self) -> Vec<String> {
        match self.stderr.take() {
            Some(stderr) => stderr.last_lines().await,
            None => Vec::new(),
        }
    }

    /// The record of an end that came `now`.
    pub(super) fn crash(&self, ended: Ended, now: SystemTime, stderr: Vec<String>) -> Crash {
        let (code, signal) = match ended {
            Ended::Code(code) => (Some(code), None),
            Ended::Signal(signal) => (None, Some(signal)),
        };
        let kills = self.kills.as_ref().and_then(KillCounter::has_grown);
        Crash {
            when: clock::rfc3339(now),
            epoch: self.epoch,
            pid: self.pid(),
            code,
            signal,
            uptime_seconds: self.uptime().as_secs_f64(),
            rss_bytes: self.resident.last(),
            out_of_memory: kills.map(|grown| grown && signal == Some(KILLED)),
            stderr,
        }
    }
}
