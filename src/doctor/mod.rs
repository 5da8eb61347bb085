//! Diagnoses a sidecar: checks configuration, token, istiod, certificates, sockets, Envoy, capture, DNS and
//! probes, and reports problems with their remedies.
//!
//! The checks run concurrently: in the agent with the state of its modules, or in another process with
//! the state that is visible from outside. A report takes at most [`LIMIT`], even if a check hangs. The doctor changes
//! nothing, and its report contains neither keys nor tokens.

mod capture;
mod cert_chain;
mod configuration;
mod dns;
mod envoy;
mod istiod;
mod peers;
mod probes;
mod resources;
mod secrets;
mod sockets;
mod stored;
mod token;

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::config::Config;
use crate::dns::Dns;
use crate::dns::forward::Forwarder;
use crate::envoy::handle::Envoy;
use crate::istiod::Istiod;
use crate::net::dial;
use crate::net::http_client::{self, Client, http_url};
use crate::problem::{Code, Level, Problem};
use crate::report::{Check, Group, Report};
use crate::runtime::blocking::{THREADS, run_within, unfinished};
use crate::runtime::clock;
use crate::runtime::usage;
use crate::sds::Rejections;
use crate::secrets::Secrets;
use crate::secrets::files::Files;
use crate::standby::Pair;
use crate::wasm::Wasm;
use crate::xds::observe::Observer;
use bytes::Bytes;
use http::{Request, Response};

pub const LIMIT: Duration = Duration::from_millis(2200);
/// The time limit of one request, dial, lookup or read, so that the other checks of its group are reported.
const PROBE_LIMIT: Duration = Duration::from_millis(1800);
/// The largest HTTP body that is read, in bytes: a report, or a list of Envoy's pending secrets and clusters.
const MAX_BODY: usize = 1 << 20;

/// The modules of a running agent. None if the agent runs without the module.
#[derive(Clone, Debug)]
pub struct Running {
    pub envoy: Option<Envoy>,
    pub istiod: Istiod,
    /// None without an authority.
    pub secrets: Option<Secrets>,
    pub files: Files,
    pub rejections: Rejections,
    /// True if the agent serves the SDS socket, not another process.
    pub serves_secrets: bool,
    pub discovery: Observer,
    pub dns: Option<Dns>,
    pub forwarder: Option<Forwarder>,
    pub wasm: Option<Wasm>,
    /// None if this is not one of two agents of its pod.
    pub pair: Option<Pair>,
}

#[derive(Clone, Copy, Debug)]
struct Subject<'a> {
    config: &'a Config,
    running: Option<&'a Running>,
}

/// Checks a running agent, or the environment of one with this configuration. `before` are the results of earlier
/// checks.
pub async fn report(
    config: &Result<Config, Vec<Problem>>,
    running: Option<&Running>,
    before: Vec<Check>,
) -> Report {
    let mut report = check_settings(config, before);
    let Ok(config) = config else {
        return report;
    };
    let subject = Subject { config, running };
    let ([token, istiod], others) = tokio::join!(control_plane(subject), async {
        <[Group; 10]>::from(tokio::join!(
            group("certificate", secrets::checks(subject)),
            group("sockets", sockets::checks(subject)),
            group("Envoy", envoy::checks(subject)),
            group("resources", resources::checks(subject)),
            group("Wasm", async { missing_modules(subject) }),
            group("capture", capture::checks(subject)),
            group("DNS", dns::checks(subject)),
            group("probes", probes::checks(subject)),
            group("next container", stored::checks(subject)),
            group("standby", async { other_container(subject.running).into_iter().collect() }),
        ))
    });
    report.groups.extend([token, istiod].into_iter().chain(others));
    Report::new(report.node, report.groups)
}

/// Checks the configuration only, without a time limit.
pub fn check_settings(config: &Result<Config, Vec<Problem>>, before: Vec<Check>) -> Report {
    let node = config.as_ref().map(|it| it.bootstrap.node.id.clone());
    let groups = vec![
        Group::new("agent", before),
        Group::new("configuration", configuration::checks(config)),
    ];
    Report::new(node.unwrap_or_default(), groups)
}

fn missing_modules(subject: Subject<'_>) -> Vec<Check> {
    let wasm = subject.running.and_then(|running| running.wasm.as_ref());
    wasm.into_iter()
        .flat_map(Wasm::missing_modules)
        .map(|(passes, problem)| {
            let level = if passes { Level::Warning } else { Level::Error };
            Check::with_level(level, &problem)
        })
        .collect()
}

/// Checks token and roots, and then istiod with them.
async fn control_plane(subject: Subject<'_>) -> [Group; 2] {
    let until = clock::after(PROBE_LIMIT);
    let credentials = token::read(subject).await;
    let istiod = istiod::checks(subject, &credentials, until).await;
    [Group::new("token and roots", credentials.checks), Group::new("istiod", istiod)]
}

/// Runs file operations on another thread, because disks may hang. Fails after [`PROBE_LIMIT`].
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    run_within(PROBE_LIMIT, &THREADS, work).await
}

/// Requests a page over HTTP, of 1 MiB at most.
pub async fn get(url: &str, limit: Duration) -> Result<Response<Bytes>, http_client::Error> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = http_url(url)?;
    Client::default().fetch(request, limit, MAX_BODY).await
}

/// Returns the problem of a request to this pod that had no local port to connect from.
pub fn used_up_ports(error: &http_client::Error) -> Option<Problem> {
    let http_client::Error::Connect(dial::Error::Connect { source, .. }) = error else {
        return None;
    };
    if source.kind() != io::ErrorKind::AddrNotAvailable {
        return None;
    }
    let usage = usage::local_ports(Path::new("/"))?;
    let found = format!("{source}; {usage} are in use");
    Some(Problem::new(Code::PortsUsedUp, resources::PORTS, found))
}

async fn group(name: &str, checks: impl Future<Output = Vec<Check>>) -> Group {
    let made = tokio::time::timeout(LIMIT, checks).await;
    Group::new(name, made.unwrap_or_else(|_| vec![late(name, unfinished(LIMIT))]))
}

/// Checks that the other container of the pod, if there is one, is able to take over.
fn other_container(running: Option<&Running>) -> Option<Check> {
    let Running { pair, envoy, .. } = running?;
    Some(pair.as_ref()?.check(envoy.as_ref()))
}

fn checked(name: impl ToString, found: Result<impl ToString, Problem>) -> Check {
    match found {
        Ok(found) => Check::ok(name, found),
        Err(problem) => Check::from(&problem),
    }
}

fn late(name: impl ToString, why: impl ToString) -> Check {
    error(Code::ChecksLate, name, why)
}

fn error(code: Code, name: impl ToString, found: impl ToString) -> Check {
    Check::from(&Problem::new(code, name, found))
}
