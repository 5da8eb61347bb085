//! Checks whether the pod is ready, and names the cause if it is not.
//!
//! Envoy must run, have accepted clusters and listeners once, be live, and hold an earlier version of each secret
//! whose new version it has rejected; the agent must not be stopping. A check that an Envoy (epoch and pid) has passed
//! is not repeated, so a steady probe sends no request to it. Concurrent probes share the answer of Envoy's admin
//! port.

mod bootstrap_file;
mod stats;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::{Sources, startup};
use crate::envoy::handle::{Envoy, Report, State};
use crate::envoy::inspect;
use crate::istiod::Status;
use crate::metrics::Gauge;
use crate::problem::{Problem, codes};
use crate::runtime::clock::after;
use crate::runtime::lifecycle::Urgency;
use bootstrap_file::BootstrapFile;

/// The pauses between two checks of an Envoy that starts: in the [`EARLY_PHASE`], and later.
const PAUSE: Duration = Duration::from_millis(25);
const LONG_PAUSE: Duration = Duration::from_secs(1);
/// The kubelet's limit for a probe in Istio's template, and the time that the rest of the answer takes.
const PROBE_LIMIT: Duration = Duration::from_secs(3);
const RESERVE: Duration = Duration::from_millis(300);
/// The age of the agent from which a failed check asks Envoy what it waits for.
const INSPECT_AFTER: Duration = Duration::from_secs(5);
/// The time limit of this query to Envoy.
const INSPECT_LIMIT: Duration = Duration::from_secs(1);
/// The time after its start in which an Envoy process is checked often.
const EARLY_PHASE: Duration = Duration::from_secs(30);

pub(super) struct Readiness {
    sources: Arc<Sources>,
    grpc: Option<BootstrapFile>,
    /// The limit of a query to Envoy's admin interface.
    query_limit: Duration,
    startup: Gauge,
    /// Locked during a query to Envoy's admin port.
    checks: Mutex<Checks>,
    /// The result that was logged last, because `pilot-agent wait` sends ten probes a second.
    logged: parking_lot::Mutex<Option<Result<(), String>>>,
}

/// The checks one Envoy process has passed.
#[derive(Default)]
struct Checks {
    process: Option<Process>,
    is_configured: bool,
    is_live: bool,
    /// The time and result of the last query.
    last: Option<(Instant, Result<(), String>)>,
}

/// The reason why the pod is not ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotReady {
    /// The text has the cause.
    #[error("{0}")]
    Explained(String),
    #[error("istio DNS capture is turned ON and DNS lookup table is not ready yet")]
    NoNameTable,
    /// Another part of the agent may know the cause.
    #[error("{0}")]
    Unexplained(String),
}

/// Epoch and pid of an Envoy.
type Process = (u32, Option<i32>);

impl Readiness {
    pub(super) fn new(grpc: Option<PathBuf>, query_limit: Duration, sources: Arc<Sources>) -> Self {
        let startup = sources.metrics.gauge(
            "istio_agent_startup_duration_seconds",
            "The time from the process starting to being marked ready.",
        );
        Self {
            sources,
            grpc: grpc.map(BootstrapFile::new),
            query_limit,
            startup,
            checks: Mutex::default(),
            logged: parking_lot::Mutex::default(),
        }
    }

    /// Checks for a readiness probe, and logs a result that differs from the last.
    pub(super) async fn check_and_log(&self) -> Result<(), String> {
        let ready = self.check_and_explain().await;
        let logged = self.logged.lock().replace(ready.clone());
        match &ready {
            _ if logged.as_ref() == Some(&ready) => {}
            Ok(()) => tracing::info!("Envoy proxy is ready"),
            Err(missing) => tracing::warn!("Envoy proxy is NOT ready: {missing}"),
        }
        ready
    }

    /// Checks like [`Self::check`], and adds to a failure the cause that another part of the agent knows.
    pub(super) async fn check_and_explain(&self) -> Result<(), String> {
        let until = self.deadline();
        let Err(missing) = self.check_until(until).await else {
            return Ok(());
        };
        let text = missing.to_string();
        if self.check_not_stopping().is_err() {
            return Err(text);
        }
        let cause = match missing {
            NotReady::Explained(_) => None,
            // A failed call on a connection, such as a certificate request, does not explain a missing name table.
            NotReady::NoNameTable => self.istiod_failure(|status| status.connected.is_none()),
            NotReady::Unexplained(_) => self.find_cause(until).await,
        };
        let suffix = cause.map_or_else(String::new, |cause| format!("; {cause}"));
        let text = text.trim_end();
        Err(format!("{text}{suffix}; see `pilot-agent doctor`"))
    }

    /// Returns the cause that another part of the agent knows. None if Envoy has exited, which is the cause.
    async fn find_cause(&self, until: Instant) -> Option<String> {
        let sources = &self.sources;
        let envoy = sources.envoy.as_ref()?;
        running_process(&envoy.report().borrow()).ok()?;
        let certificate = || Some(sources.secrets.as_ref()?.problem()?.to_string());
        let rejected = || Some(sources.discovery.snapshot().rejections().first()?.to_string());
        let known = self.istiod_failure(|_| true).or_else(certificate).or_else(rejected);
        let limit = INSPECT_LIMIT.min(until.saturating_duration_since(Instant::now()));
        // Inspecting Envoy takes up to a second, and `pilot-agent wait` sends ten probes a second at the start.
        if known.is_some() || limit.is_zero() || sources.milestones.elapsed() < INSPECT_AFTER {
            return known;
        }
        let waits = inspect::warming(&envoy.admin().within(limit)).await;
        let mut all = waits.iter();
        let wait = all.find(|it| it.code != codes::ENVOY_NOT_INSPECTED);
        wait.map(ToString::to_string)
    }

    /// Returns the last failure of a connection or call to istiod, if none has succeeded since and the status is
    /// `relevant`.
    fn istiod_failure(&self, relevant: fn(&Status) -> bool) -> Option<String> {
        let status = self.sources.istiod.status();
        let failure = status.last_error.as_ref().filter(|_| relevant(&status))?;
        Some(failure.problem.to_string())
    }

    /// Checks whether the pod is ready now. The error is the first reason why it is not. Records the milestones that
    /// are reached for the first time.
    pub(super) async fn check(&self) -> Result<(), NotReady> {
        self.check_until(self.deadline()).await
    }

    /// Returns the time until which the answer to a probe must be known, so that it arrives before the kubelet gives up.
    fn deadline(&self) -> Instant {
        after(self.query_limit.max(PROBE_LIMIT).saturating_sub(RESERVE))
    }

    async fn check_until(&self, until: Instant) -> Result<(), NotReady> {
        if let Some(envoy) = &self.sources.envoy {
            let checked = self.check_envoy(envoy, until).await;
            checked.map_err(NotReady::Unexplained)?;
        }
        self.check_not_stopping().map_err(NotReady::Explained)?;
        let is_missing = |problem: &&Problem| problem.code == codes::SECRET_REFUSED;
        if let Some(rejection) = self.sources.rejections.lock().values().find(is_missing) {
            return Err(NotReady::Explained(rejection.to_string()));
        }
        if let Some(file) = &self.grpc {
            file.check().map_err(NotReady::Unexplained)?;
        }
        if let Some(dns) = &self.sources.dns
            && !dns.is_ready()
        {
            return Err(NotReady::NoNameTable);
        }
        self.sources.milestones.mark(startup::READY);
        Ok(())
    }

    /// Checks until the pod is ready for the first time, so that this time is recorded without a probe.
    pub(super) async fn poll_until_ready(&self) {
        let (mut process, mut first_seen) = (None, Instant::now());
        while self.check().await.is_err() {
            // The phase starts again with another Envoy process.
            let checked = self.checks.lock().await.process;
            if checked != process {
                (process, first_seen) = (checked, Instant::now());
            }
            let is_early = first_seen.elapsed() < EARLY_PHASE;
            tokio::time::sleep(if is_early { PAUSE } else { LONG_PAUSE }).await;
        }
    }

    /// Checks Envoy, or returns the result of a query that has ended since this call.
    async fn check_envoy(&self, envoy: &Envoy, until: Instant) -> Result<(), String> {
        let process = running_process(&envoy.report().borrow())?;
        let begin = Instant::now();
        let mut checks = self.checks.lock().await;
        if checks.process != Some(process) {
            *checks = Checks { process: Some(process), ..Checks::default() };
        }
        if checks.is_live {
            return Ok(());
        }
        if let Some((end, result)) = &checks.last
            && *end >= begin
        {
            return result.clone();
        }
        let result = self.query(envoy, &mut checks, until).await;
        checks.last = Some((Instant::now(), result.clone()));
        result
    }

    /// Makes the checks of Envoy that it has not passed yet. Records those it passes, their milestones, and the time
    /// of the start.
    async fn query(
        &self,
        envoy: &Envoy,
        checks: &mut Checks,
        until: Instant,
    ) -> Result<(), String> {
        let admin = || {
            let left = until.saturating_duration_since(Instant::now());
            envoy.admin().within(self.query_limit.min(left))
        };
        if !checks.is_configured {
            stats::check_configured(&admin()).await?;
            checks.is_configured = true;
            self.sources.milestones.mark(startup::CONFIG_RECEIVED);
        }
        self.check_not_stopping()?;
        stats::check_live(&admin()).await?;
        checks.is_live = true;
        if self.sources.milestones.mark(startup::ENVOY_LIVE) {
            let took = self.sources.milestones.elapsed();
            self.startup.set(took.as_secs_f64());
            tracing::info!("Readiness succeeded in {took:?}");
        }
        Ok(())
    }

    /// Fails if the agent is asked to stop.
    fn check_not_stopping(&self) -> Result<(), String> {
        let request = self.sources.stop.requested().borrow().clone();
        if request.urgency == Urgency::Run {
            return Ok(());
        }
        let cause = request.cause.unwrap_or("asked to stop");
        Err(format!("server is terminated: {cause}"))
    }
}

/// Returns the Envoy process, or why there is none.
fn running_process(report: &Report) -> Result<Process, String> {
    match (report.state, report.problem()) {
        (State::Initial | State::Exited, Some(problem)) => Err(problem.to_string()),
        _ => Ok((report.epoch, report.pid)),
    }
}

#[cfg(test)]
mod tests;
