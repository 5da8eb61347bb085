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
use crate::envoy::admin::Admin;
use crate::envoy::handle::{Envoy, Report, State};
use crate::envoy::inspect;
use crate::istiod::Status;
use crate::metrics::Gauge;
use crate::problem::{Code, Problem};
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
    logged: parking_lot::Mutex<Option<Option<String>>>,
}

/// The checks one Envoy process has passed.
#[derive(Default)]
struct Checks {
    process: Option<Process>,
    is_configured: bool,
    is_live: bool,
    /// The time and result of the last query.
    last: Option<(Instant, Result<(), NotReady>)>,
}

/// The reason why the pod is not ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotReady {
    #[error("server is terminated: {cause}")]
    Stopping { cause: &'static str },
    #[error(transparent)]
    SecretRefused(Problem),
    #[error("istio DNS capture is turned ON and DNS lookup table is not ready yet")]
    NoNameTable,
    #[error(transparent)]
    NoEnvoy(Problem),
    #[error("failed to get {what} stats: {why}")]
    NoStats { what: &'static str, why: String },
    /// The numbers of updates that Envoy has accepted and rejected.
    #[error(
        "{problem}: cds updates: {} successful, {} rejected; lds updates: {} successful, {} rejected",
        .clusters.0, .clusters.1, .listeners.0, .listeners.1
    )]
    NotConfigured { problem: &'static str, clusters: (u64, u64), listeners: (u64, u64) },
    #[error("{name} is not yet updated: {body}")]
    NotUpdated { name: &'static str, body: String },
    #[error("workers have not yet started")]
    NoWorkers,
    #[error("server is not live, current state is: {state}")]
    NotLive { state: &'static str },
    #[error("envoy stat {name} missing separator. line:{line}")]
    NoSeparator { name: &'static str, line: String },
    #[error("failed parsing Envoy stat {name}, expected a whole number. line:{line}")]
    NoNumber { name: &'static str, line: String },
    #[error("failed loading {}: {why}", .path.display())]
    Bootstrap { path: PathBuf, why: String },
    #[error("{} does not exist", .0.display())]
    NoFile(PathBuf),
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

    /// Checks for a readiness probe, and logs a result that differs from the last. Returns the reason why the pod is
    /// not ready.
    pub(super) async fn check_and_log(&self) -> Option<String> {
        let missing = self.check_and_explain().await;
        let logged = self.logged.lock().replace(missing.clone());
        match &missing {
            _ if logged.as_ref() == Some(&missing) => {}
            None => tracing::info!("Envoy proxy is ready"),
            Some(missing) => tracing::warn!("Envoy proxy is NOT ready: {missing}"),
        }
        missing
    }

    /// Checks like [`Self::check`], and adds to the reason the cause that another part of the agent knows.
    pub(super) async fn check_and_explain(&self) -> Option<String> {
        let until = self.deadline();
        let missing = self.check_until(until).await.err()?;
        if self.check_not_stopping().is_err() {
            return Some(missing.to_string());
        }
        let cause = match missing {
            NotReady::Stopping { .. } | NotReady::SecretRefused(_) => None,
            // A failed call on a connection, such as a certificate request, does not explain a missing name table.
            NotReady::NoNameTable => self.istiod_failure(|status| status.connected.is_none()),
            _ => self.find_cause(until).await,
        };
        let mut text = missing.to_string().trim_end().to_owned();
        if let Some(cause) = cause {
            text += &format!("; {cause}");
        }
        Some(text + "; see `pilot-agent doctor`")
    }

    /// Returns the cause that another part of the agent knows. None if Envoy has exited, which is the cause.
    async fn find_cause(&self, until: Instant) -> Option<String> {
        let sources = &self.sources;
        let envoy = sources.envoy.as_ref()?;
        running_process(&envoy.report().borrow()).ok()?;
        let known = self
            .istiod_failure(|_| true)
            .or_else(|| Some(sources.secrets.as_ref()?.problem()?.to_string()))
            .or_else(|| Some(sources.discovery.snapshot().rejections().first()?.to_string()));
        let limit = INSPECT_LIMIT.min(until.saturating_duration_since(Instant::now()));
        // Inspecting Envoy takes up to a second, and `pilot-agent wait` sends ten probes a second at the start.
        if known.is_some() || limit.is_zero() || sources.milestones.elapsed() < INSPECT_AFTER {
            return known;
        }
        let waits = inspect::warming(&envoy.admin().within(limit)).await;
        waits.iter().find(|it| it.code != Code::EnvoyNotInspected).map(ToString::to_string)
    }

    /// Returns the last failure of a connection or call to istiod, if none has succeeded since and the status is
    /// `relevant`.
    fn istiod_failure(&self, relevant: fn(&Status) -> bool) -> Option<String> {
        let status = self.sources.istiod.status();
        if relevant(&status) { Some(status.last_error?.problem.to_string()) } else { None }
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
            self.check_envoy(envoy, until).await?;
        }
        self.check_not_stopping()?;
        for rejection in self.sources.rejections.lock().values() {
            if rejection.code == Code::SecretRefused {
                return Err(NotReady::SecretRefused(rejection.clone()));
            }
        }
        if let Some(file) = &self.grpc {
            file.check()?;
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
        let mut process = None;
        let mut first_seen = Instant::now();
        while self.check().await.is_err() {
            // The phase starts again with another Envoy process.
            let checked = self.checks.lock().await.process;
            if checked != process {
                process = checked;
                first_seen = Instant::now();
            }
            let is_early = first_seen.elapsed() < EARLY_PHASE;
            tokio::time::sleep(if is_early { PAUSE } else { LONG_PAUSE }).await;
        }
    }

    /// Checks Envoy, or returns the result of a query that has ended since this call.
    async fn check_envoy(&self, envoy: &Envoy, until: Instant) -> Result<(), NotReady> {
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
    ) -> Result<(), NotReady> {
        if !checks.is_configured {
            stats::check_configured(&self.admin(envoy, until)).await?;
            checks.is_configured = true;
            self.sources.milestones.mark(startup::CONFIG_RECEIVED);
        }
        self.check_not_stopping()?;
        stats::check_live(&self.admin(envoy, until)).await?;
        checks.is_live = true;
        if self.sources.milestones.mark(startup::ENVOY_LIVE) {
            let took = self.sources.milestones.elapsed();
            self.startup.set(took.as_secs_f64());
            tracing::info!("Readiness succeeded in {took:?}");
        }
        Ok(())
    }

    fn admin(&self, envoy: &Envoy, until: Instant) -> Admin {
        let left = until.saturating_duration_since(Instant::now());
        envoy.admin().within(self.query_limit.min(left))
    }

    /// Fails if the agent is asked to stop.
    fn check_not_stopping(&self) -> Result<(), NotReady> {
        let request = self.sources.stop.requested().borrow().clone();
        match request.urgency {
            Urgency::Run => Ok(()),
            _ => Err(NotReady::Stopping { cause: request.cause.unwrap_or("asked to stop") }),
        }
    }
}

/// Returns the Envoy process, or why there is none.
fn running_process(report: &Report) -> Result<Process, NotReady> {
    match (report.state, report.problem()) {
        (State::Initial | State::Exited, Some(problem)) => Err(NotReady::NoEnvoy(problem)),
        _ => Ok((report.epoch, report.pid)),
    }
}

#[cfg(test)]
mod tests;
