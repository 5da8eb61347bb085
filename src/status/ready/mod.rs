//! Whether the pod can take traffic, and what is missing if not.
//!
//! Envoy must run, have been configured once, and serve; the agent must not be on its way out. What
//! an Envoy has proven once it need not prove again, but another process has to: proofs belong to an
//! epoch and a pid. Requests that come while Envoy is being asked share the answer, so a stuck Envoy
//! gathers no crowd.
//!
//! Does not ask Envoy anything once it is proven.

mod bootstrap_file;
mod stats;

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Sources;
use crate::envoy::handle::{Envoy, Report, State};
use crate::lifecycle::{StopRequest, Urgency};
use crate::metrics::Gauge;
use crate::timeline::{Milestone, Timeline};
use bootstrap_file::BootstrapFile;

/// Pauses of the watch while Envoy starts, and when it takes long.
const PAUSE: Duration = Duration::from_millis(25);
const LONG_PAUSE: Duration = Duration::from_secs(1);
const START: Duration = Duration::from_secs(30);

/// Why the answer is no.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotReady {
    #[error("Envoy has not been started yet")]
    NotStarted,
    #[error("Envoy has ended")]
    Ended,
    #[error("server is terminated: {0}")]
    Terminated(&'static str),
    #[error(transparent)]
    Stats(#[from] stats::Missing),
    #[error(transparent)]
    BootstrapFile(#[from] bootstrap_file::Missing),
    #[error("istio DNS capture is turned ON and DNS lookup table is not ready yet")]
    Dns,
}

pub(super) struct Readiness {
    timeline: Timeline,
    asked: watch::Receiver<StopRequest>,
    envoy: Option<Envoy>,
    grpc: Option<BootstrapFile>,
    dns: Option<watch::Receiver<bool>>,
    startup: Gauge,
    proof: Mutex<Proof>,
    /// When Envoy was asked last, and what came of it. Locked while it is being asked.
    last: tokio::sync::Mutex<Option<(Instant, Result<(), NotReady>)>>,
    was_ready: AtomicBool,
    has_started: AtomicBool,
}

/// What one Envoy has proven.
#[derive(Clone, Copy, Debug, Default)]
struct Proof {
    of: Option<Process>,
    is_configured: bool,
    is_live: bool,
}

/// One Envoy among those before and after it.
type Process = (u32, Option<i32>);

impl Readiness {
    pub(super) fn new(grpc: Option<PathBuf>, sources: &Sources) -> Self {
        let startup = sources.metrics.gauge(
            "istio_agent_startup_duration_seconds",
            "The time from the process starting to being marked ready.",
        );
        Self {
            timeline: sources.timeline.clone(),
            asked: sources.stop.requested(),
            envoy: sources.envoy.clone(),
            grpc: grpc.map(BootstrapFile::new),
            dns: sources.dns_ready.clone(),
            startup,
            proof: Mutex::default(),
            last: tokio::sync::Mutex::default(),
            was_ready: AtomicBool::new(false),
            has_started: AtomicBool::new(false),
        }
    }

    /// The answer to a request, which is also logged.
    pub(super) async fn check_and_log(&self) -> Result<(), NotReady> {
        let ready = self.check().await;
        let was_ready = self.was_ready.swap(ready.is_ok(), Ordering::Relaxed);
        match &ready {
            Ok(()) if !was_ready => tracing::info!("Envoy proxy is ready"),
            Ok(()) => {}
            Err(missing) => tracing::warn!("Envoy proxy is NOT ready: {missing}"),
        }
        ready
    }

    pub(super) async fn check(&self) -> Result<(), NotReady> {
        if let Some(envoy) = &self.envoy {
            self.envoy_is_ready(envoy).await?;
        }
        self.not_terminating()?;
        if let Some(file) = &self.grpc {
            file.check()?;
        }
        match &self.dns {
            Some(ready) if !*ready.borrow() => return Err(NotReady::Dns),
            _ => {}
        }
        self.timeline.mark(Milestone::Ready);
        Ok(())
    }

    /// Asks Envoy again and again until it is live, so that the moment is known when nobody asks,
    /// and that of readiness with it.
    pub(super) async fn watch(&self) -> Infallible {
        if let Some(envoy) = &self.envoy {
            self.until_live(envoy).await;
        }
        if let Some(ready) = &self.dns {
            let _ = ready.clone().wait_for(|ready| *ready).await; // Checked below.
        }
        if let Err(missing) = self.check().await {
            tracing::debug!("Envoy is live and the pod is not ready: {missing}");
        }
        std::future::pending().await
    }

    async fn until_live(&self, envoy: &Envoy) {
        let mut report = envoy.report();
        let (mut watched, mut since) = (None, Instant::now());
        loop {
            // Much of a report changes while an Envoy lives, and only another one starts anew.
            let process = alive(&report.borrow_and_update()).ok();
            if process != watched {
                (watched, since) = (process, Instant::now());
            }
            let is_there = process.is_some();
            if is_there && self.envoy_is_ready(envoy).await.is_ok() {
                return;
            }
            let pause = match since.elapsed() < START {
                true => PAUSE,
                false => LONG_PAUSE,
            };
            tokio::select! {
                changed = report.changed() => if changed.is_err() {
                    // Nobody runs Envoy any more.
                    return;
                },
                () = tokio::time::sleep(pause), if is_there => {}
            }
        }
    }

    async fn envoy_is_ready(&self, envoy: &Envoy) -> Result<(), NotReady> {
        let process = alive(&envoy.report().borrow())?;
        if self.proof(process).is_live {
            return Ok(());
        }
        let came = Instant::now();
        let mut last = self.last.lock().await;
        if let Some((when, answer)) = &*last
            && *when >= came
        {
            return answer.clone();
        }
        let answer = self.prove(envoy, process).await;
        *last = Some((Instant::now(), answer.clone()));
        answer
    }

    /// Asks Envoy for what it has not proven yet.
    async fn prove(&self, envoy: &Envoy, process: Process) -> Result<(), NotReady> {
        let mut proof = self.proof(process);
        if !proof.is_configured {
            stats::is_configured(envoy.admin()).await?;
            proof.is_configured = true;
            self.keep(proof);
            self.timeline.mark(Milestone::ConfigReceived);
        }
        self.not_terminating()?;
        if !proof.is_live {
            stats::is_live(envoy.admin()).await?;
            proof.is_live = true;
            self.keep(proof);
            self.mark_start();
        }
        Ok(())
    }

    /// Records how long the first start took.
    fn mark_start(&self) {
        if !self.has_started.swap(true, Ordering::Relaxed) {
            let took = self.timeline.elapsed();
            self.timeline.mark(Milestone::EnvoyLive);
            self.startup.set(took.as_secs_f64());
            tracing::info!("Readiness succeeded in {took:?}");
        }
    }

    fn not_terminating(&self) -> Result<(), NotReady> {
        let asked = self.asked.borrow();
        match asked.urgency {
            Urgency::Run => Ok(()),
            _ => Err(NotReady::Terminated(asked.cause.unwrap_or("asked to stop"))),
        }
    }

    fn proof(&self, process: Process) -> Proof {
        let proof = *self.proof.lock();
        let none = Proof {
            of: Some(process),
            ..Proof::default()
        };
        if proof.of == Some(process) {
            proof
        } else {
            none
        }
    }

    fn keep(&self, proof: Proof) {
        *self.proof.lock() = proof;
    }
}

/// The Envoy that runs now.
fn alive(report: &Report) -> Result<Process, NotReady> {
    match report.state {
        State::Initial => Err(NotReady::NotStarted),
        State::Exited => Err(NotReady::Ended),
        State::Starting | State::Running | State::Draining | State::Stopping => {
            Ok((report.epoch, report.pid))
        }
    }
}

#[cfg(test)]
mod tests;
