//! Readiness and application probes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue, header};

use super::report::{Check, Level};
use super::{PROBE_LIMIT, Subject, get};
use crate::config::Config;
use crate::lifecycle::with_causes;
use crate::probe::{self, Kind, Probe};

const USER_AGENT: HeaderValue = HeaderValue::from_static("istio-probe/1.0");

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let (mut checks, application) = tokio::join!(readiness(subject), application(subject.config));
    checks.extend(application);
    checks
}

/// Readiness as the kubelet sees it: at the status port, and through Envoy.
async fn readiness(subject: Subject<'_>) -> Vec<Check> {
    const NAME: &str = "readiness";
    let config = subject.config;
    let Some(status) = &config.status else {
        return vec![Check::skipped(
            NAME,
            "there is no status port (statusPort: 0)",
        )];
    };
    let check = match ready(Ipv4Addr::LOCALHOST.into(), status.port).await {
        Ok(found) => Check::ok(NAME, found),
        // Another check says that no agent runs.
        Err(found) if subject.running.is_none() => Check::warning(NAME, found),
        Err(found) => Check::error(NAME, found)
            .expected("a ready Envoy")
            .remedy("see the errors above"),
    };
    let is_ready = check.level == Level::Ok;
    let mut checks = vec![check];
    let port = config.bootstrap.ports.health;
    // Envoy may expect another protocol there, or have no such listener.
    let is_known = !config.bootstrap.health_proxy_protocol && !config.has_custom_bootstrap;
    if is_ready && config.envoy.is_some() && port != 0 && is_known {
        const NAME: &str = "readiness through Envoy";
        checks.push(match ready(config.bootstrap.admin_host(), port).await {
            Ok(found) => Check::ok(NAME, found),
            Err(found) => Check::error(NAME, found)
                .expected("200: the kubelet probes this port")
                .remedy("restart the container if Envoy stays so"),
        });
    }
    checks
}

/// What is found at a port, ready or not.
async fn ready(host: IpAddr, port: u16) -> Result<String, String> {
    let url = format!("http://{}/healthz/ready", SocketAddr::new(host, port));
    let answer = get(&url, PROBE_LIMIT).await;
    let answer = answer.map_err(|error| with_causes(&error))?;
    let (status, reason) = (answer.status(), String::from_utf8_lossy(answer.body()));
    match status.is_success() {
        true => Ok(format!("port {port}: ready")),
        false => Err(format!("port {port}: {status} {}", reason.trim())),
    }
}

/// Each probe of the application once; hooks are not called.
async fn application(config: &Config) -> Vec<Check> {
    let Some(status) = &config.status else {
        return Vec::new();
    };
    let client = match probe::Client::new(probe::Config {
        keeps_connections: false,
        ..status.probes
    }) {
        Ok(client) => client,
        Err(error) => return vec![Check::error("application probes", with_causes(&error))],
    };
    let probes = status.probers.probes().map(|(path, prober)| {
        let (client, mut headers) = (&client, prober.headers.clone());
        headers.entry(header::USER_AGENT).or_insert(USER_AGENT);
        let probe = prober.probe(path, &status.application);
        async move { probed(client, path, &probe, &headers).await }
    });
    join_all(probes).await
}

async fn probed(client: &probe::Client, path: &str, probe: &Probe, headers: &HeaderMap) -> Check {
    let limit = probe.timeout.min(PROBE_LIMIT);
    let limited = Probe {
        timeout: limit,
        ..probe.clone()
    };
    let what = match &probe.kind {
        Kind::Http { path, .. } => format!("HTTP {path} at port {}", probe.port),
        Kind::Tcp => format!("TCP at port {}", probe.port),
        Kind::Grpc { service } => format!("gRPC {service} at port {}", probe.port),
    };
    let problem = match client.probe(&limited, headers).await {
        Ok(outcome) if (200..400).contains(&outcome.status.as_u16()) => {
            return Check::ok(path, what);
        }
        Ok(outcome) => format!("{what}: status {}", outcome.status.as_u16()),
        Err(probe::Error::Late(_)) if limit < probe.timeout => {
            let kubelet = probe.timeout;
            let found =
                format!("{what}: no answer within {limit:?}, the kubelet waits for {kubelet:?}");
            return Check::warning(path, found);
        }
        Err(error) => format!("{what}: {}", with_causes(&error)),
    };
    let (level, expected) = match path.rsplit('/').next() {
        Some("livez") => (
            Level::Error,
            "success; the kubelet restarts the container otherwise",
        ),
        Some("readyz") => (Level::Error, "success; the pod is not ready otherwise"),
        // It does not matter any more after one success.
        _ => (
            Level::Warning,
            "success, unless the container has started already",
        ),
    };
    let remedy = "see the application's log; the probe is that of its container in the pod";
    Check::new(path, level, problem)
        .expected(expected)
        .remedy(remedy)
}
