//! Checks readiness and the application's probes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue, header};

use super::{PROBE_LIMIT, Subject, checked, error, get, used_up_ports};
use crate::config::Config;
use crate::logging::RECENT;
use crate::probe::{self, Probe};
use crate::problem::{Code, Level, Problem};
use crate::report::Check;
use crate::runtime::lifecycle::with_causes;

const USER_AGENT: HeaderValue = HeaderValue::from_static("istio-probe/1.0");

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let (mut checks, application) = tokio::join!(readiness(subject), application(subject.config));
    checks.extend(application);
    checks.extend(subject.running.and_then(|_| unknown()));
    checks
}

/// Reports the path that the kubelet has asked for several times, and that no prober has.
fn unknown() -> Option<Check> {
    let entry = RECENT
        .entries()
        .into_iter()
        .find(|it| it.code == Code::ProbeUnknown.name() && it.times > 2)?;
    let (text, _) = entry.message.split_once(';')?;
    let found = format!("{text}; {} times, last at {}", entry.times, entry.last);
    Some(error(Code::ProbeUnknown, "application probes", found))
}

/// Checks readiness like the kubelet: at the status port, and through Envoy.
async fn readiness(subject: Subject<'_>) -> Vec<Check> {
    const NAME: &str = "readiness";
    let config = subject.config;
    let Some(status) = &config.status else {
        return vec![Check::skipped(NAME, "statusPort is 0")];
    };
    let check = match ready(Ipv4Addr::LOCALHOST.into(), status.port).await {
        Ok(found) => Check::ok(NAME, found),
        // Another check reports that no agent runs.
        Err(problem) if subject.running.is_none() => Check::skipped(NAME, problem.found),
        Err(problem) => Check::from(&problem),
    };
    let is_ready = check.level == Level::Ok;
    let mut checks = vec![check];
    let port = config.bootstrap.ports.health;
    // Envoy may expect another protocol there, or have no such listener.
    let is_known = !config.bootstrap.health_proxy_protocol && !config.has_custom_bootstrap;
    if is_ready && config.envoy.is_some() && port != 0 && is_known {
        let found = ready(config.bootstrap.admin_host(), port).await;
        checks.push(checked("readiness through Envoy", found));
    }
    checks
}

fn unready(found: String) -> Problem {
    Problem::new(Code::ReadinessFailed, "readiness", found)
}

/// Requests readiness at a port. Returns the answer, as a problem if it is not ready.
async fn ready(host: IpAddr, port: u16) -> Result<String, Problem> {
    let url = format!("http://{}/healthz/ready", SocketAddr::new(host, port));
    let answer = get(&url, PROBE_LIMIT)
        .await
        .map_err(|error| used_up_ports(&error).unwrap_or_else(|| unready(with_causes(&error))))?;
    let status = answer.status();
    if status.is_success() {
        return Ok(format!("port {port}: ready"));
    }
    let reason = String::from_utf8_lossy(answer.body());
    Err(unready(format!("port {port}: {status} {}", reason.trim())))
}

/// Makes each probe of the application once. Lifecycle hooks are not called.
async fn application(config: &Config) -> Vec<Check> {
    let Some(status) = &config.status else {
        return Vec::new();
    };
    let client =
        match probe::Client::new(probe::Config { keeps_connections: false, ..status.probes }) {
            Ok(client) => client,
            Err(error) => return vec![Check::skipped("application probes", with_causes(&error))],
        };
    let probes = status.probers.probes().map(|(path, prober)| {
        let client = &client;
        let mut headers = prober.headers.clone();
        headers.entry(header::USER_AGENT).or_insert(USER_AGENT);
        async move { probed(client, path, &prober.probe(&status.application_host), &headers).await }
    });
    join_all(probes).await
}

async fn probed(client: &probe::Client, path: &str, probe: &Probe, headers: &HeaderMap) -> Check {
    let mut limited = probe.clone();
    limited.timeout = probe.timeout.min(PROBE_LIMIT);
    let outcome = client.probe(&limited, headers).await;
    let mut problem = match outcome.map(|outcome| outcome.status.as_u16()) {
        Ok(200..400) => return Check::ok(path, probe),
        Ok(status) => Problem::new(Code::ProbeStatus, probe, format!("status {status}")),
        Err(problem) => problem,
    };
    let (mut level, consequence) = match path.rsplit('/').next() {
        Some("livez") => (Level::Error, "the kubelet restarts the container"),
        Some("readyz") => (Level::Error, "the pod is not ready"),
        // A startup probe does not matter any more after one success.
        _ => (Level::Warning, "the container is restarted, unless it has started already"),
    };
    if problem.code == Code::ProbeLate && limited.timeout < probe.timeout {
        level = Level::Warning;
    }
    problem.found = format!("{}: {}", problem.subject, problem.found);
    path.clone_into(&mut problem.subject);
    Check::with_level(level, &problem.consequence(consequence))
}
