//! Checks the health of a virtual machine's workload, as configured by the `readinessProbe` of its ProxyConfig.
//!
//! Checks begin when Envoy serves, and follow in each period; while Envoy does not serve, they fail. The
//! verdict changes when the number of consecutive equal results reaches its threshold. The discovery stream
//! reports it to istiod, which removes the endpoints of an unhealthy workload. A stop request and a drain make
//! the workload unhealthy at once.

use std::fmt;
use std::future::{Future, pending};
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use ::http::{HeaderMap, StatusCode};
use futures_util::future::OptionFuture;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Serialize, Serializer};
use serde_json::json;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::envoy::handle::{Report, State};
use crate::metrics::{Counters, Gauge, Registry};
use crate::probe::{self, Client, Kind, Probe};
use crate::problem::Problem;
use crate::runtime::lifecycle::{StopRequest, Urgency};

#[derive(Clone, Debug)]
pub struct Config {
    pub initial_delay: Duration,
    pub period: Duration,
    /// The consecutive successes that make the workload healthy.
    pub successes: u32,
    /// The consecutive failures that make it unhealthy.
    pub failures: u32,
    pub check: Check,
    pub probes: probe::Config,
}

#[derive(Clone, PartialEq, Eq)]
pub enum Check {
    /// A probe, with the headers of its HTTP request.
    Probe(Probe, HeaderMap),
    /// A program with its arguments, not empty, and the limit of its run time.
    Exec(Vec<String>, Duration),
}

/// The reason why a check failed.
#[derive(Debug, thiserror::Error)]
enum Unhealthy {
    #[error("the agent is stopping")]
    Stopping,
    #[error("Envoy is draining")]
    Draining,
    #[error("Envoy does not serve")]
    NoEnvoy,
    #[error(transparent)]
    Probe(#[from] Problem),
    #[error("status code was not from [200,400), bad code {}", .0.as_u16())]
    Status(StatusCode),
    #[error("no command")]
    NoCommand,
    #[error("{program:?} does not run: {error}")]
    NotStarted { program: String, error: io::Error },
    #[error("{program:?} ended with {status}")]
    Failed { program: String, status: ExitStatus },
    #[error("{program:?} cannot be waited for: {error}")]
    Lost { program: String, error: io::Error },
    #[error("command timeout exceeded: {program:?} ran for {limit:?}")]
    Late { program: String, limit: Duration },
}

/// The health of the workload, or its problem for istiod; None before the first verdict.
pub type Verdict = Option<Result<(), String>>;

/// A handle to the verdict. Clones share it.
#[derive(Clone, Debug)]
pub struct Health {
    /// The kind of check, as the name of its member of `readinessProbe`.
    pub check: &'static str,
    verdict: watch::Receiver<Verdict>,
}

impl Health {
    pub fn verdict(&self) -> watch::Receiver<Verdict> {
        self.verdict.clone()
    }
}

impl Serialize for Health {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let verdict = self.verdict.borrow().clone();
        json!({
            "check": self.check,
            "healthy": verdict.as_ref().map(Result::is_ok),
            "problem": verdict.and_then(Result::err),
        })
        .serialize(serializer)
    }
}

/// Creates the handle and the future that checks the workload. `envoy` are the reports of its Envoy, if there is
/// one. The future never ends.
pub fn new(
    config: Config,
    envoy: Option<watch::Receiver<Report>>,
    stop: watch::Receiver<StopRequest>,
    registry: &Registry,
) -> Result<(Health, impl Future<Output = ()> + Send + use<>), rustls::Error> {
    let (sender, receiver) = watch::channel(None);
    let health = Health { check: config.check.name(), verdict: receiver };
    let checks = Checks {
        client: Client::new(config.probes)?,
        results: registry.counters(
            "istio_agent_health_checks_total",
            "Health checks of the workload",
            &["result"],
        ),
        healthy: registry.gauge(
            "istio_agent_workload_healthy",
            "Whether istiod was told that the workload is healthy",
        ),
        verdict: sender,
        streak: (false, 0),
        config,
    };
    Ok((health, checks.run(envoy, stop)))
}

struct Checks {
    config: Config,
    client: Client,
    results: Counters<1>,
    healthy: Gauge,
    verdict: watch::Sender<Verdict>,
    /// The last result, true for a success, and the number of times in a row that it came.
    streak: (bool, u32),
}

impl Checks {
    async fn run(
        mut self,
        envoy: Option<watch::Receiver<Report>>,
        mut stop: watch::Receiver<StopRequest>,
    ) {
        let drained = OptionFuture::from(envoy.clone().map(|mut report| async move {
            // It fails when the supervisor ends, which is after a stop request.
            let _ = report.wait_for(|report| report.is_drained).await;
        }));
        let reason = tokio::select! {
            _ = stop.wait_for(|request| request.urgency != Urgency::Run) => Unhealthy::Stopping,
            Some(()) = drained => Unhealthy::Draining,
            () = self.check_each_period(envoy) => return,
        };
        self.decide(Err(reason));
        pending().await
    }

    async fn check_each_period(&mut self, mut envoy: Option<watch::Receiver<Report>>) {
        if let Some(report) = &mut envoy
            && report.wait_for(|report| report.state == State::Running).await.is_err()
        {
            return pending().await;
        }
        let kind = self.config.check.name();
        let delay = self.config.initial_delay;
        tracing::info!(target: "healthcheck", "starting health check for {kind} in {delay:?}");
        tokio::time::sleep(delay).await;
        let mut ticks = tokio::time::interval(self.config.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            ticks.tick().await;
            let state = envoy.as_ref().map(|report| report.borrow().state);
            let result = match state {
                None | Some(State::Running) => self.check().await,
                Some(_) => Err(Unhealthy::NoEnvoy),
            };
            self.count(result);
        }
    }

    async fn check(&self) -> Result<(), Unhealthy> {
        match &self.config.check {
            Check::Exec(command, limit) => run(command, *limit).await,
            Check::Probe(probe, headers) => {
                let status = self.client.probe(probe, headers).await?.status;
                match status.as_u16() {
                    200..400 => Ok(()),
                    _ => Err(Unhealthy::Status(status)),
                }
            }
        }
    }

    /// Counts a result, and changes the verdict when its threshold is reached.
    fn count(&mut self, result: Result<(), Unhealthy>) {
        let (label, threshold) = match &result {
            Ok(()) => ("success", self.config.successes),
            Err(problem) => {
                tracing::debug!(target: "healthcheck", "health check failed: {problem}");
                ("failure", self.config.failures)
            }
        };
        self.results.with([label]).inc();
        if self.streak.0 != result.is_ok() {
            self.streak = (result.is_ok(), 0);
        }
        self.streak.1 = self.streak.1.saturating_add(1);
        let verdict = self.verdict.borrow().as_ref().map(Result::is_ok);
        if self.streak.1 >= threshold && verdict != Some(result.is_ok()) {
            self.decide(result);
        }
    }

    /// Logs and publishes a verdict.
    fn decide(&mut self, result: Result<(), Unhealthy>) {
        match &result {
            Ok(()) => {
                tracing::info!(target: "healthcheck", "success threshold hit, marking as healthy");
            }
            Err(problem) => tracing::info!(
                target: "healthcheck",
                "failure threshold hit, marking as unhealthy: {problem}"
            ),
        }
        self.healthy.set(if result.is_ok() { 1.0 } else { 0.0 });
        self.verdict.send_replace(Some(result.map_err(|problem| problem.to_string())));
    }
}

impl Check {
    /// Returns the name of the member of `readinessProbe` for this kind of check.
    fn name(&self) -> &'static str {
        match self {
            Self::Exec(..) => "exec",
            Self::Probe(probe, _) => match probe.kind {
                Kind::Http { .. } => "httpGet",
                Kind::Tcp => "tcpSocket",
                Kind::Grpc { .. } => "grpc",
            },
        }
    }
}

/// Headers and arguments may hold secrets.
impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A process group that is killed when this is dropped.
struct Group(Pid);

impl Drop for Group {
    fn drop(&mut self) {
        // It fails if no process of the group is left.
        let _ = kill_process_group(self.0, Signal::KILL);
    }
}

/// Runs a command as a check, without a shell and without reading its output: exit code 0 is success. When the program
/// exits, and after `limit`, all processes of its group are killed.
async fn run(command: &[String], limit: Duration) -> Result<(), Unhealthy> {
    let (program, arguments) = command.split_first().ok_or(Unhealthy::NoCommand)?;
    let program = program.clone();
    let spawned = Command::new(&program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => return Err(Unhealthy::NotStarted { program, error }),
    };
    let _group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).map(Group);
    match tokio::time::timeout(limit, child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(Unhealthy::Failed { program, status }),
        Ok(Err(error)) => Err(Unhealthy::Lost { program, error }),
        // The runtime reaps the killed child.
        Err(_) => Err(Unhealthy::Late { program, limit }),
    }
}

#[cfg(test)]
mod tests;
