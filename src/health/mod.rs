//! Checks the health of a machine's workload, as the `readinessProbe` of its ProxyConfig says.
//!
//! Checks begin when Envoy serves, and go on each period; while Envoy does not serve, they fail. The
//! verdict changes after as many equal results in a row as its threshold says. The discovery stream
//! tells istiod, which takes the endpoints of an unhealthy workload away from its callers. A stop request
//! and a drain make the workload unhealthy at once.

use std::fmt;
use std::future::{Future, pending};
use std::process::Stdio;
use std::time::Duration;

use ::http::HeaderMap;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Serialize, Serializer};
use serde_json::json;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::envoy::handle::{Report, State};
use crate::lifecycle::{StopRequest, Urgency};
use crate::metrics::{Counters, Gauge, Registry};
use crate::probe::{self, Client, Kind, Probe};

#[derive(Clone, Debug)]
pub struct Config {
    pub initial_delay: Duration,
    pub period: Duration,
    /// How many successes in a row make the workload healthy.
    pub successes: u32,
    /// How many failures in a row make it unhealthy.
    pub failures: u32,
    pub check: Check,
    pub probes: probe::Config,
}

#[derive(Clone, PartialEq, Eq)]
pub enum Check {
    /// The headers are those of an HTTP request.
    Probe(Probe, HeaderMap),
    /// A program with its arguments, not empty, and how long it may run.
    Exec(Vec<String>, Duration),
}

/// Healthy, or why not; None before the first verdict.
pub type Verdict = Option<Result<(), String>>;

/// A handle to the verdict. Clones share it.
#[derive(Clone, Debug)]
pub struct Health {
    /// The kind of check, as the member of `readinessProbe` is called.
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
        let healthy = verdict.as_ref().map(Result::is_ok);
        let problem = verdict.and_then(Result::err);
        json!({ "check": self.check, "healthy": healthy, "problem": problem }).serialize(serializer)
    }
}

/// Checks the workload beside the Envoy of these reports, if there is one. The future never ends.
pub fn new(
    config: Config,
    envoy: Option<watch::Receiver<Report>>,
    stop: watch::Receiver<StopRequest>,
    registry: &Registry,
) -> Result<(Health, impl Future<Output = ()> + Send + use<>), rustls::Error> {
    let (sender, receiver) = watch::channel(None);
    let health = Health {
        check: config.check.name(),
        verdict: receiver,
    };
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
    /// Whether the last checks succeeded, and how many in a row.
    streak: (bool, u32),
}

impl Checks {
    async fn run(
        mut self,
        envoy: Option<watch::Receiver<Report>>,
        mut stop: watch::Receiver<StopRequest>,
    ) {
        let drained = envoy.clone();
        let drained = async move {
            let Some(mut report) = drained else {
                return pending().await;
            };
            // The supervisor ends after a stop request, which is seen as well.
            let _ = report.wait_for(|report| report.is_drained).await;
        };
        let why = tokio::select! {
            _ = stop.wait_for(|asked| asked.urgency != Urgency::Run) => "the agent is stopping",
            () = drained => "Envoy is draining",
            () = self.check_each_period(envoy) => return,
        };
        self.decide(Err(why.to_owned()));
        pending().await
    }

    async fn check_each_period(&mut self, mut envoy: Option<watch::Receiver<Report>>) {
        if let Some(report) = &mut envoy {
            let serves = |report: &Report| report.state == State::Running;
            if report.wait_for(serves).await.is_err() {
                return pending().await;
            }
        }
        let (kind, delay) = (self.config.check.name(), self.config.initial_delay);
        tracing::info!(target: "healthcheck", "starting health check for {kind} in {delay:?}");
        tokio::time::sleep(delay).await;
        let mut ticks = tokio::time::interval(self.config.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            ticks.tick().await;
            let state = envoy.as_ref().map(|report| report.borrow().state);
            let result = match state {
                None | Some(State::Running) => self.check().await,
                Some(_) => Err("Envoy does not serve".to_owned()),
            };
            self.count(result);
        }
    }

    async fn check(&self) -> Result<(), String> {
        match &self.config.check {
            Check::Exec(command, limit) => run(command, *limit).await,
            Check::Probe(probe, headers) => {
                let outcome = self.client.probe(probe, headers).await;
                let status = outcome.map_err(|problem| problem.to_string())?.status;
                match status.as_u16() {
                    200..400 => Ok(()),
                    bad => Err(format!(
                        "status code was not from [200,400), bad code {bad}"
                    )),
                }
            }
        }
    }

    /// Counts a result, and decides after enough equal ones.
    fn count(&mut self, result: Result<(), String>) {
        let (label, threshold) = match &result {
            Ok(()) => ("success", self.config.successes),
            Err(problem) => {
                tracing::debug!(target: "healthcheck", "health check failed: {problem}");
                ("failure", self.config.failures)
            }
        };
        self.results.with([label]).inc();
        let (is_ok, count) = self.streak;
        let count = match is_ok == result.is_ok() {
            true => count.saturating_add(1),
            false => 1,
        };
        self.streak = (result.is_ok(), count);
        let verdict = self.verdict.borrow().as_ref().map(Result::is_ok);
        if count >= threshold && verdict != Some(result.is_ok()) {
            self.decide(result);
        }
    }

    fn decide(&mut self, result: Result<(), String>) {
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
        self.verdict.send_replace(Some(result));
    }
}

impl Check {
    /// The name of its member in `readinessProbe`.
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
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // There may be none left.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Runs a command as a check, without a shell and without reading its output: exit code 0 is success. When it ends, and after `limit`,
/// what it has started is killed.
async fn run(command: &[String], limit: Duration) -> Result<(), String> {
    let Some((program, arguments)) = command.split_first() else {
        return Err("no command".to_owned());
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|error| format!("{program:?} does not run: {error}"))?;
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let _group = Group(pid);
    let ended = tokio::time::timeout(limit, child.wait()).await;
    match ended {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(format!("{program:?} ended with {status}")),
        Ok(Err(error)) => Err(format!("{program:?} cannot be waited for: {error}")),
        // The runtime reaps the child once it has ended.
        Err(_) => Err(format!(
            "command timeout exceeded: {program:?} ran for {limit:?}"
        )),
    }
}

#[cfg(test)]
mod tests;
