//! Checks Envoy: its process, its admin port, the resources it has rejected, and those it waits for.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::Duration;

use serde_json::Value;

use super::{PROBE_LIMIT, Running, Subject, capture, error, peers, run_blocking};
use crate::config;
use crate::envoy::crash::Crash;
use crate::envoy::handle::{Method, Outcome, Report};
use crate::envoy::{Config, inspect, program};
use crate::files::permission;
use crate::net::port;
use crate::net::unix_socket;
use crate::problem::{Code, Level, Problem};
use crate::report::Check;
use crate::standby::Pair;
use crate::xds::observe::Snapshot;

const ADMIN: &str = "admin port";
/// The time after which an Envoy must have opened its admin port, also on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(5);
/// The page with the number of listeners that a request to the admin port has closed, and the number of members of the
/// bootstrap that Envoy does not know.
const COUNTERS: &str =
    "/stats?filter=%5E(listener_manager.listener_stopped%7Cserver.static_unknown_fields)%24";

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let Some(envoy) = &subject.config.envoy else {
        return vec![Check::skipped("Envoy", "the agent runs none (DISABLE_ENVOY)")];
    };
    let handle = subject.running.and_then(|running| running.envoy.as_ref());
    let admin = envoy.admin.within(PROBE_LIMIT);
    let report = handle.map(|envoy| envoy.snapshot());
    let process = async {
        match &report {
            Some(report) => process(report),
            None => preconditions(subject.config, envoy).await,
        }
    };
    let (mut checks, server, waits, endpoints, refusals, strict) = tokio::join!(
        process,
        admin.page("/server_info"),
        inspect::warming(&admin),
        peers::checks(subject, &admin),
        inspect::refusals(&admin),
        inspect::strict_ports(&admin),
    );
    if let Some(seen) = subject.running.map(|it| it.discovery.snapshot()) {
        checks.extend(accepted(&seen, capture::is_captured(subject.config)));
    }
    match server {
        Ok(server) => {
            let state = text(&server, "state");
            // The text is commit, version, status, kind and TLS library.
            let version = text(&server, "version").split('/').nth(1).unwrap_or("unknown");
            let found = format!("{}: {state}, version {version}", admin.address);
            let counters = admin.text(COUNTERS).await.unwrap_or_default();
            if let Some(report) = &report {
                checks.extend(drained(&counters, state, report).iter().map(Check::from));
            }
            checks.extend(unknown_members(&counters).iter().map(Check::from));
            checks.extend(waits.iter().map(Check::from).chain(endpoints));
            checks.extend(refusals.problems.iter().map(Check::from));
            if !refusals.are_counted {
                checks.push(Check::skipped("refused calls", inspect::STATISTICS_HINT));
            }
            checks.extend(strict.map(|ports| Check::ok("inbound mTLS", ports)));
            checks.push(Check::ok(ADMIN, found));
        }
        // The admin interface does not answer because Envoy does not run, which another check reports.
        Err(why) if report.as_ref().is_none_or(|report| report.problem().is_some()) => {
            checks.push(Check::skipped(ADMIN, why));
        }
        Err(why) => {
            let is_closed = !admin.address.is_taken().await;
            let taken = if is_closed { subject.running.and_then(taken_by_successor) } else { None };
            checks.push(match taken {
                Some(taken) => taken,
                None if is_closed && report.is_some_and(has_just_started) => {
                    Check::skipped(ADMIN, format!("Envoy has just started: {why}"))
                }
                None => error(Code::EnvoyHangs, ADMIN, why),
            });
        }
    }
    checks
}

/// Reports what Envoy has not accepted of its configuration.
fn accepted(seen: &Snapshot, is_captured: bool) -> Vec<Check> {
    let mut checks: Vec<_> = seen.rejections().iter().map(Check::from).collect();
    checks.extend(seen.missing_listeners(is_captured).iter().map(Check::from));
    if let Some(problem) = seen.stream.as_ref().and_then(|stream| stream.problem.as_ref()) {
        checks.push(Check::with_level(Level::Warning, problem));
    }
    if let Some(on_demand) = &seen.on_demand {
        for problem in on_demand.problems() {
            checks.push(Check::with_level(Level::Warning, &problem));
        }
        checks.push(Check::ok("clusters on demand", on_demand.summary()));
    }
    checks
}

fn text<'a>(server: &'a Value, name: &str) -> &'a str {
    server[name].as_str().unwrap_or("unknown")
}

/// Returns true within [`START_LIMIT`] of Envoy's start.
fn has_just_started(report: Report) -> bool {
    let age = report.started.and_then(|started| started.elapsed().ok());
    age.is_some_and(|age| age < START_LIMIT)
}

fn count(page: &str, name: &str) -> u64 {
    page.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")?.parse().ok())
        .unwrap_or(0)
}

/// Reports members of the bootstrap that Envoy ignores.
fn unknown_members(counters: &str) -> Option<Problem> {
    let unknown = count(counters, "server.static_unknown_fields");
    let found = format!("unknown members: {unknown}");
    (unknown > 0).then(|| Problem::new(Code::BootstrapMemberIgnored, "bootstrap", found))
}

/// Reports an Envoy that another process has drained.
fn drained(counters: &str, state: &str, report: &Report) -> Option<Problem> {
    // After a hot restart, Envoy adds the counts of the former Envoy.
    let is_stopped =
        count(counters, "listener_manager.listener_stopped") > 0 && report.restart_epoch() == 0;
    let found = match state {
        _ if report.problem().is_some() || report.is_drained => return None,
        "DRAINING" => "its health check was failed (`POST /healthcheck/fail`), not by the agent",
        _ if is_stopped => "its listeners were closed (`POST /drain_listeners`), not by the agent",
        _ => return None,
    };
    let remedy = "find who calls Envoy's admin port; `pilot-agent request POST healthcheck/ok`, or \
                  for listeners a restart of the container, undoes it";
    Some(Problem::new(Code::EnvoyStopping, "Envoy", found).remedy(remedy))
}

/// Describes the admin port of an Envoy that has closed it for a successor, which then failed. Such an Envoy serves.
fn taken_by_successor(running: &Running) -> Option<Check> {
    let last = running.envoy.as_ref()?.snapshot().last_restart;
    let last = last.filter(|it| (it.method, it.outcome) == (Some(Method::Hot), Outcome::Failed));
    if let Some(why) = running.pair.as_ref().and_then(Pair::why_admin_is_closed) {
        // Another check reports the failed handover.
        return Some(Check::skipped(ADMIN, why));
    }
    let found = format!("closed: {}", last?.problem?);
    let problem = Problem::new(Code::HotRestartFailed, ADMIN, found);
    Some(Check::with_level(Level::Warning, &problem))
}

fn process(report: &Report) -> Vec<Check> {
    if let Some(problem) = report.problem() {
        return vec![Check::from(&problem)];
    }
    let pid = report.pid.unwrap_or_default();
    let memory = report.rss_bytes.unwrap_or_default() >> 20;
    let found = format!("pid {pid}, epoch {}, {memory} MiB in memory", report.epoch);
    let mut checks = vec![Check::ok("process", found)];
    if let Some(crash) = &report.last_crash {
        checks.push(Check::with_level(Level::Warning, &crash.problem()));
    }
    checks
}

/// Checks the preconditions of a start, and reports the last crash, if no agent runs Envoy.
async fn preconditions(config: &config::Config, envoy: &Config) -> Vec<Check> {
    let config = config.clone();
    let envoy = envoy.clone();
    match run_blocking(move || obstacles(&config, &envoy)).await {
        Ok(found) => found.iter().map(Check::from).collect(),
        Err(late) => vec![super::late("start of Envoy", late)],
    }
}

fn obstacles(config: &config::Config, envoy: &Config) -> Vec<Problem> {
    let mut found = match Crash::read(&envoy.directory) {
        Ok(crash) => Vec::from_iter(crash.map(|crash| crash.problem())),
        Err(problem) => vec![problem],
    };
    // An agent of another user may run and listen on the ports.
    if unix_socket::find_listener(&config.xds_socket).is_ok() {
        return found;
    }
    let program = &envoy.command.binary;
    if let Err(error) = program::check_runnable(program) {
        found.push(program::problem(program, &error));
    }
    let status = config.status.as_ref().map_or(0, |status| status.port);
    for (code, port) in [
        (Code::StatusPortTaken, status),
        (Code::PortTaken, envoy.admin.address.port().unwrap_or_default()),
        (Code::PortTaken, config.bootstrap.ports.health),
    ] {
        let holder = port::holder(port);
        found.extend(holder.map(|holder| Problem::new(code, format!("port {port}"), holder)));
    }
    for address in config.dns.iter().flat_map(|dns| &dns.forwarder.listen_addresses) {
        let taken =
            UdpSocket::bind(address).err().filter(|error| error.kind() == ErrorKind::AddrInUse);
        let holder = port::holder(address.port()).or(taken.map(|error| format!("UDP: {error}")));
        let subject = format!("port {}", address.port());
        found.extend(holder.map(|it| Problem::new(Code::DnsPortTaken, subject, it)));
    }
    for directory in [&*envoy.directory, config.sds_socket.parent().unwrap_or(&envoy.directory)] {
        if let Err(error) = permission::writable(directory) {
            found.push(permission::problem("write to it", directory, error));
        }
    }
    found
}
