//! Finds out what is wrong with a sidecar: checks configuration, token, istiod, certificates, sockets,
//! Envoy, capture, DNS and probes, and says what to do.
//!
//! The checks run concurrently: in the agent, with the state of its modules, or in another process, with
//! what can be seen from outside. A report takes at most [`LIMIT`], whatever hangs. The doctor changes
//! nothing, and reports neither keys nor tokens.

mod capture;
mod certificate;
mod certificates;
mod configuration;
mod discovery;
mod dns;
mod envoy;
mod istiod;
mod probes;
mod sockets;
mod standby;
mod stored;
mod token;

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use tokio::sync::Semaphore;

use crate::clock;
use crate::config::{Config, Problem};
use crate::dns::Dns;
use crate::dns::forward::Forwarder;
use crate::duration::rounded;
use crate::envoy::handle::Envoy;
use crate::http_client::{self, Client, http_url};
use crate::istiod::Istiod;
use crate::problem::codes;
pub use crate::report;
use crate::sds::Refusals;
use crate::secrets::Secrets;
use crate::secrets::files::Files;
use crate::standby::Standby;
use crate::wasm::Wasm;
use crate::xds::observe::Observer;
use report::{Check, Group, Level, Report};

/// How long a report takes at most.
pub const LIMIT: Duration = Duration::from_millis(2200);
/// What one request, dial, lookup or read may take, so that the others of its group are reported.
const PROBE_LIMIT: Duration = Duration::from_millis(1800);
/// The largest answer that is read: a report, or a list of what Envoy waits for.
const MAX_ANSWER: usize = 1 << 20;

/// The threads that file work may hold at once.
pub(crate) static THREADS: Semaphore = Semaphore::const_new(32);

/// The modules of a running agent. `None` where the agent does without.
#[derive(Clone, Debug)]
pub struct Running {
    pub envoy: Option<Envoy>,
    pub istiod: Istiod,
    /// None without an authority.
    pub secrets: Option<Secrets>,
    pub files: Files,
    pub refusals: Refusals,
    /// Whether the SDS socket is the agent's, not another process'.
    pub serves_secrets: bool,
    pub discovery: Observer,
    pub dns: Option<Dns>,
    pub forwarder: Option<Forwarder>,
    pub wasm: Option<Wasm>,
    /// None if this is not one of two agents of its pod.
    pub standby: Option<Standby>,
}

/// What the groups check: the configuration and, in the agent itself, its modules.
#[derive(Clone, Copy, Debug)]
struct Subject<'a> {
    config: &'a Config,
    running: Option<&'a Running>,
}

/// Checks the agent with this configuration, or that would have it. `before` are checks that were made.
pub async fn report(
    config: &Result<Config, Vec<Problem>>,
    running: Option<&Running>,
    before: Vec<Check>,
) -> Report {
    let mut report = report_of_settings(config, before);
    let Ok(config) = config else {
        return report;
    };
    let subject = Subject { config, running };
    let ([token, istiod], others) = tokio::join!(control_plane(subject), async {
        <[Group; 9]>::from(tokio::join!(
            group("certificate", certificate::checks(subject)),
            group("sockets", sockets::checks(subject)),
            group("Envoy", envoy::checks(subject)),
            group("Wasm", async { missing_modules(subject) }),
            group("capture", capture::checks(subject)),
            group("DNS", dns::checks(subject)),
            group("probes", probes::checks(subject)),
            group("next container", stored::checks(subject)),
            group("standby", async { standby::checks(subject) }),
        ))
    });
    report
        .groups
        .extend([token, istiod].into_iter().chain(others));
    Report::new(report.node, report.groups)
}

/// Checks the configuration only, which takes no time.
pub fn report_of_settings(config: &Result<Config, Vec<Problem>>, before: Vec<Check>) -> Report {
    let node = config.as_ref().map(|it| it.bootstrap.node.id.clone());
    let groups = vec![
        Group::new("agent", before),
        Group::new("configuration", configuration::checks(config)),
    ];
    Report::new(node.unwrap_or_default(), groups)
}

fn missing_modules(subject: Subject<'_>) -> Vec<Check> {
    let wasm = subject.running.and_then(|running| running.wasm.as_ref());
    let missing = wasm.into_iter().flat_map(Wasm::missing);
    let checks = missing.map(|(passes, problem)| {
        let level = if passes { Level::Warning } else { Level::Error };
        Check::problem(level, &problem)
    });
    checks.collect()
}

/// Token and roots, then istiod with them.
async fn control_plane(subject: Subject<'_>) -> [Group; 2] {
    let until = clock::after(PROBE_LIMIT);
    let found = token::read(subject).await;
    let istiod = istiod::checks(subject, &found, until).await;
    [
        Group::new("token and roots", found.checks),
        Group::new("istiod", istiod),
    ]
}

/// Does file work on another thread, as disks hang; an error after [`PROBE_LIMIT`].
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    run_within(PROBE_LIMIT, &THREADS, work).await
}

/// Work that never ends holds its thread, so there is a limit for all reports together.
pub(crate) async fn run_within<T: Send + 'static>(
    limit: Duration,
    threads: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let done = async {
        let thread = threads.acquire().await;
        tokio::task::spawn_blocking(move || {
            let _thread = thread;
            work()
        })
        .await
    };
    let done = tokio::time::timeout(limit, done).await;
    let done = done.map_err(|_| unfinished(limit))?;
    done.map_err(|panic| panic.to_string())
}

/// Requests a page over HTTP, of 1 MiB at most.
pub async fn get(url: &str, limit: Duration) -> Result<Response<Bytes>, http_client::Error> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = http_url(url)?;
    let client = Client::default();
    client.fetch(request, limit, MAX_ANSWER).await
}

/// Makes the checks of a group, within the limit.
async fn group(name: &str, checks: impl Future<Output = Vec<Check>>) -> Group {
    let checks = tokio::time::timeout(LIMIT, checks).await;
    let checks = checks.unwrap_or_else(|_| vec![late(name, unfinished(LIMIT))]);
    Group::new(name, checks)
}

fn late(name: impl ToString, why: impl ToString) -> Check {
    Check::of(&Problem::new(codes::CHECKS_LATE, name, why))
}

fn unfinished(limit: Duration) -> String {
    format!("not finished within {}", rounded(limit))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};

    use super::*;

    #[tokio::test]
    async fn file_work_that_hangs_holds_a_bounded_number_of_threads() {
        static TWO: Semaphore = Semaphore::const_new(2);
        let limit = Duration::from_millis(50);
        let begun = Arc::new(AtomicUsize::new(0));
        let hung: Vec<mpsc::Sender<()>> = futures_util::future::join_all((0..4).map(async |_| {
            let (release, released) = mpsc::channel();
            let begun = begun.clone();
            let work = move || {
                begun.fetch_add(1, Ordering::Relaxed);
                released.recv()
            };
            let late = run_within(limit, &TWO, work).await.unwrap_err();
            assert_eq!(late, "not finished within 50 ms");
            release
        }))
        .await;
        assert!(run_within(limit, &TWO, || ()).await.is_err());
        assert_eq!(begun.load(Ordering::Relaxed), 2);
        drop(hung);
        assert_eq!(run_within(PROBE_LIMIT, &TWO, || 7).await, Ok(7));
    }
}
