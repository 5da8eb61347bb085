//! Envoy: its process, its admin port, what it has refused, and what it waits for.

mod waits;

use serde_json::Value;

use super::report::{Check, Level};
use super::{PROBE_LIMIT, Subject, get, run_blocking};
use crate::envoy::Config;
use crate::envoy::crash::Crash;
use crate::envoy::handle::{Report, State};
use crate::lifecycle::with_causes;
use crate::xds::observe::Snapshot;

const ADMIN: &str = "admin port";
const NACK: &str =
    "correct the resource: `istioctl analyze`, EnvoyFilters, versions of istiod and Envoy";
const LOG: &str = "look at the last lines of its log (`kubectl logs --previous`)";

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let Some(config) = &subject.config.envoy else {
        return vec![Check::skipped(
            "Envoy",
            "the agent runs none (DISABLE_ENVOY)",
        )];
    };
    let handle = subject.running.and_then(|running| running.envoy.as_ref());
    let admin = match handle {
        Some(envoy) => envoy.admin().address,
        None => (config.admin_host, config.admin_port).into(),
    };
    let report = handle.map(|envoy| envoy.snapshot());
    let process = async {
        match &report {
            Some(report) => process(report),
            None => outside(config).await,
        }
    };
    let admin = format!("http://{admin}");
    let (mut checks, server, waits) =
        tokio::join!(process, page(&admin, "/server_info"), waits::checks(&admin),);
    let refused = subject
        .running
        .map(|running| nacks(&running.discovery.snapshot()));
    let refused = refused.into_iter().flatten();
    let is_down = handle.is_none() || checks.iter().any(|check| check.level == Level::Error);
    let server = match server {
        Ok(server) => server,
        Err(why) if is_down => {
            checks.push(Check::skipped(ADMIN, why));
            return checks;
        }
        Err(why) => {
            checks.push(Check::error(ADMIN, why).expected("an answer").remedy(
                "Envoy hangs, or another process has its port (ProxyConfig.proxyAdminPort): restart the container",
            ));
            checks.extend(refused);
            return checks;
        }
    };
    checks.extend(refused);
    checks.extend(waits);
    let text = |name| server[name].as_str().unwrap_or("unknown");
    // Commit, version, status, kind and TLS library.
    let version = text("version").split('/').nth(1).unwrap_or("unknown");
    let found = format!("{admin}: {}, version {version}", text("state"));
    checks.push(Check::ok(ADMIN, found));
    checks
}

/// A page of the admin port as JSON, or why there is none.
async fn page(admin: &str, path: &str) -> Result<Value, String> {
    let answer = get(&format!("{admin}{path}"), PROBE_LIMIT).await;
    let answer = answer.map_err(|error| with_causes(&error))?;
    let wrong = |found: String| format!("{admin}{path}: {found}, expected JSON of Envoy");
    match answer.status().as_u16() {
        200 => serde_json::from_slice(answer.body()).map_err(|error| wrong(error.to_string())),
        other => Err(wrong(format!("status {other}"))),
    }
}

/// Envoy as its supervisor sees it.
fn process(report: &Report) -> Vec<Check> {
    const NAME: &str = "process";
    let pid = report.pid.unwrap_or_default();
    let crash = report.last_crash.as_ref();
    let epoch = report.epoch;
    let check = match report.state {
        State::Starting | State::Running => {
            let memory = report.rss_bytes.unwrap_or_default() >> 20;
            Check::ok(
                NAME,
                format!("pid {pid}, epoch {epoch}, {memory} MiB in memory"),
            )
        }
        State::Initial => Check::error(NAME, "the agent has not started it yet")
            .expected("a running Envoy")
            .remedy("the agent's log says what it waits for"),
        State::Draining | State::Stopping => {
            let cause = report
                .ending
                .as_ref()
                .map_or("a request to drain", |it| it.cause);
            Check::error(NAME, format!("pid {pid} drains or stops: {cause}"))
                .expected("an Envoy that takes traffic")
                .remedy("none if the pod is to end")
        }
        State::Exited => {
            let how = crash.map_or_else(|| "ended".to_owned(), Crash::to_string);
            let next = match report.restart {
                Some(_) => "; it is started again soon",
                None => "; it is not started again",
            };
            return vec![
                Check::error(NAME, format!("Envoy has ended: {how}{next}"))
                    .expected("a running Envoy")
                    .remedy(remedy(crash)),
            ];
        }
    };
    std::iter::once(check)
        .chain(crash.map(|it| crashed(it, Level::Warning)))
        .collect()
}

/// The record of the last crash, where no agent runs Envoy.
async fn outside(config: &Config) -> Vec<Check> {
    let directory = config.directory.clone();
    match run_blocking(move || Crash::read(&directory)).await {
        Ok(Ok(crash)) => Vec::from_iter(crash.map(|crash| crashed(&crash, Level::Error))),
        Ok(Err(error)) => vec![Check::warning("last crash", with_causes(&error))],
        Err(late) => vec![Check::error("last crash", late)],
    }
}

fn crashed(crash: &Crash, level: Level) -> Check {
    let found = format!("{}: {crash}", crash.when);
    Check::new("last crash", level, found).remedy(remedy(Some(crash)))
}

fn remedy(crash: Option<&Crash>) -> &'static str {
    match crash.and_then(|crash| crash.out_of_memory) {
        Some(true) => {
            "raise the memory limit of the container, or limit its hosts with a Sidecar resource"
        }
        _ => LOG,
    }
}

/// The types whose last response was refused.
fn nacks(snapshot: &Snapshot) -> Vec<Check> {
    let refused = snapshot
        .types
        .iter()
        .filter(|(_, of_type)| of_type.is_refused());
    let checks = refused.filter_map(|(url, of_type)| {
        let name = url.rsplit(['.', '/']).next()?;
        let nack = of_type.last_nack.as_ref()?;
        let version = of_type
            .last_response
            .as_ref()
            .map_or("", |last| &last.version);
        let found = format!("version {version} at {}: {}", nack.at, nack.reason);
        Some(
            Check::error(format!("NACK of {name}"), found)
                .expected("ACK")
                .remedy(NACK),
        )
    });
    let checks: Vec<_> = checks.collect();
    match checks.is_empty() {
        true => vec![Check::ok("NACKs", "no last response of a type was refused")],
        false => checks,
    }
}
