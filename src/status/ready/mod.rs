//! Readiness of the pod, and the reason if it is not ready.
//!
//! Envoy must run, have accepted clusters and listeners once, and be live; the agent must not be
//! stopping. A check that an Envoy process has passed is not repeated for it, so a steady probe costs
//! no request to Envoy; another process, told by epoch and pid, starts anew. Requests that arrive
//! while Envoy's admin port is asked share the answer.

mod bootstrap_file;
mod stats;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::Sources;
use super::startup::Milestone;
use crate::envoy::handle::{Envoy, Report, State};
use crate::lifecycle::Urgency;
use crate::metrics::Gauge;
use bootstrap_file::BootstrapFile;

/// Pauses between two checks of an Envoy that starts: in the first [`START`], and later.
const PAUSE: Duration = Duration::from_millis(25);
const LONG_PAUSE: Duration = Duration::from_secs(1);
const START: Duration = Duration::from_secs(30);

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
    sources: Arc<Sources>,
    grpc: Option<BootstrapFile>,
    startup: Gauge,
    passed: Mutex<Passed>,
    /// When Envoy was asked last, and the result. Locked while it is being asked.
    last: tokio::sync::Mutex<Option<(Instant, Result<(), NotReady>)>>,
    was_ready: AtomicBool,
    has_started: AtomicBool,
}

/// The checks one Envoy process has passed.
#[derive(Clone, Copy, Debug, Default)]
struct Passed {
    by: Option<Process>,
    is_configured: bool,
    is_live: bool,
}

/// Epoch and pid of an Envoy.
type Process = (u32, Option<i32>);

impl Readiness {
    pub(super) fn new(grpc: Option<PathBuf>, sources: Arc<Sources>) -> Self {
        let startup = sources.metrics.gauge(
            "istio_agent_startup_duration_seconds",
            "The time from the process starting to being marked ready.",
        );
        Self {
            sources,
            grpc: grpc.map(BootstrapFile::new),
            startup,
            passed: Mutex::default(),
            last: tokio::sync::Mutex::default(),
            was_ready: AtomicBool::new(false),
            has_started: AtomicBool::new(false),
        }
    }

    /// Checks for a readiness probe, and logs the result as pilot-agent does.
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
        if let Some(envoy) = &self.sources.envoy {
            self.envoy_is_ready(envoy).await?;
        }
        self.not_terminating()?;
        if let Some(file) = &self.grpc {
            file.check()?;
        }
        match &self.sources.dns {
            Some(dns) if !*dns.ready().borrow() => return Err(NotReady::Dns),
            _ => {}
        }
        self.sources.milestones.mark(Milestone::Ready);
        Ok(())
    }

    /// Checks Envoy until it is live, so that the time of readiness is known without a probe.
    pub(super) async fn watch(&self) {
        if let Some(envoy) = &self.sources.envoy {
            self.until_live(envoy).await;
        }
        if let Some(dns) = &self.sources.dns {
            let _ = dns.ready().wait_for(|ready| *ready).await; // Checked below.
        }
        if let Err(missing) = self.check().await {
            tracing::debug!("Envoy is live and the pod is not ready: {missing}");
        }
    }

    async fn until_live(&self, envoy: &Envoy) {
        let mut report = envoy.report();
        let (mut watched, mut since) = (None, Instant::now());
        loop {
            // Only another process starts anew, not every change of the report.
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
                    return; // Envoy's supervisor has ended.
                },
                () = tokio::time::sleep(pause), if is_there => {}
            }
        }
    }

    async fn envoy_is_ready(&self, envoy: &Envoy) -> Result<(), NotReady> {
        let process = alive(&envoy.report().borrow())?;
        if self.passed_by(process).is_live {
            return Ok(());
        }
        let came = Instant::now();
        let mut last = self.last.lock().await;
        if let Some((when, answer)) = &*last
            && *when >= came
        {
            return answer.clone();
        }
        let answer = self.ask(envoy, process).await;
        *last = Some((Instant::now(), answer.clone()));
        answer
    }

    /// Makes the checks `process` has not passed yet.
    async fn ask(&self, envoy: &Envoy, process: Process) -> Result<(), NotReady> {
        let mut passed = self.passed_by(process);
        if !passed.is_configured {
            stats::is_configured(envoy.admin()).await?;
            passed.is_configured = true;
            *self.passed.lock() = passed;
            self.sources.milestones.mark(Milestone::ConfigReceived);
        }
        self.not_terminating()?;
        if !passed.is_live {
            stats::is_live(envoy.admin()).await?;
            passed.is_live = true;
            *self.passed.lock() = passed;
            self.record_start();
        }
        Ok(())
    }

    /// Records how long the first start took.
    fn record_start(&self) {
        if !self.has_started.swap(true, Ordering::Relaxed) {
            let took = self.sources.milestones.elapsed();
            self.sources.milestones.mark(Milestone::EnvoyLive);
            self.startup.set(took.as_secs_f64());
            tracing::info!("Readiness succeeded in {took:?}");
        }
    }

    fn not_terminating(&self) -> Result<(), NotReady> {
        let asked = self.sources.stop.requested().borrow().clone();
        match asked.urgency {
            Urgency::Run => Ok(()),
            _ => Err(NotReady::Terminated(asked.cause.unwrap_or("asked to stop"))),
        }
    }

    fn passed_by(&self, process: Process) -> Passed {
        let passed = *self.passed.lock();
        match passed.by == Some(process) {
            true => passed,
            false => Passed {
                by: Some(process),
                ..Passed::default()
            },
        }
    }
}

/// The Envoy process, if there is one.
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
