//! Envoy: its process, its admin port, what it has refused, and what it waits for.

use super::report::{Check, Level};
use super::{PROBE_LIMIT, Subject, run_blocking};
use crate::envoy::admin::Admin;
use crate::envoy::crash::Crash;
use crate::envoy::handle::Report;
use crate::envoy::{Config, inspect};
use crate::problem::{Problem, codes};

const ADMIN: &str = "admin port";

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let Some(config) = &subject.config.envoy else {
        return vec![Check::skipped(
            "Envoy",
            "the agent runs none (DISABLE_ENVOY)",
        )];
    };
    let handle = subject.running.and_then(|running| running.envoy.as_ref());
    let admin = match handle {
        Some(envoy) => envoy.admin().within(PROBE_LIMIT),
        None => Admin::new(config.admin_host, config.admin_port, PROBE_LIMIT),
    };
    let report = handle.map(|envoy| envoy.snapshot());
    let process = async {
        match &report {
            Some(report) => process(report),
            None => outside(config).await,
        }
    };
    let (mut checks, server, waits) =
        tokio::join!(process, admin.page("/server_info"), inspect::waits(admin));
    let refused = subject
        .running
        .map(|running| running.discovery.snapshot().refusals());
    checks.extend(shown(refused.unwrap_or_default()));
    match server {
        Ok(server) => {
            let text = |name| server[name].as_str().unwrap_or("unknown");
            // Commit, version, status, kind and TLS library.
            let version = text("version").split('/').nth(1).unwrap_or("unknown");
            let found = format!("{}: {}, version {version}", admin.address, text("state"));
            checks.extend(shown(waits));
            checks.push(Check::ok(ADMIN, found));
        }
        // Without a process that is a consequence.
        Err(why) if report.is_none_or(|report| report.problem().is_some()) => {
            checks.push(Check::skipped(ADMIN, why));
        }
        Err(why) => {
            let problem = Problem::new(codes::ENVOY_HANGS, ADMIN, why);
            checks.push(Check::problem(Level::Error, &problem));
        }
    }
    checks
}

fn shown(problems: Vec<Problem>) -> impl Iterator<Item = Check> {
    problems.into_iter().map(|problem| {
        let is_unknown = problem.code == codes::ENVOY_NOT_INSPECTED;
        let level = if is_unknown {
            Level::Warning
        } else {
            Level::Error
        };
        Check::problem(level, &problem)
    })
}

/// Envoy as its supervisor sees it.
fn process(report: &Report) -> Vec<Check> {
    if let Some(problem) = report.problem() {
        return vec![Check::problem(Level::Error, &problem)];
    }
    let (pid, epoch) = (report.pid.unwrap_or_default(), report.epoch);
    let memory = report.rss_bytes.unwrap_or_default() >> 20;
    let found = format!("pid {pid}, epoch {epoch}, {memory} MiB in memory");
    let crash = report.last_crash.as_ref().map(Crash::problem);
    let crash = crash.map(|crash| Check::problem(Level::Warning, &crash));
    [Check::ok("process", found)]
        .into_iter()
        .chain(crash)
        .collect()
}

/// The record of the last crash, where no agent runs Envoy.
async fn outside(config: &Config) -> Vec<Check> {
    let directory = config.directory.clone();
    match run_blocking(move || Crash::read(&directory)).await {
        Ok(Ok(crash)) => crash
            .iter()
            .map(|crash| Check::problem(Level::Error, &crash.problem()))
            .collect(),
        Ok(Err(problem)) => vec![Check::problem(Level::Warning, &problem)],
        Err(late) => vec![Check::error("last crash", late)],
    }
}
