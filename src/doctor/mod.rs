//! Finds out what is wrong with a sidecar: checks configuration, token, istiod, certificates, sockets,
//! Envoy, capture, DNS, probes, limits and disk, and says what to do.
//!
//! The checks run side by side, in the agent with what its modules know, or in a process of their own
//! with what can be seen from outside. A report takes at most [`LIMIT`], whatever hangs. Nothing is
//! changed, and neither keys nor tokens are reported.

mod capture;
mod certificate;
mod certificates;
mod configuration;
mod discovery;
mod disk;
mod dns;
mod envoy;
mod explain;
mod istiod;
mod limits;
mod probes;
pub mod report;
mod sockets;
mod token;

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::config::{Config, Problem};
use crate::dns::Dns;
use crate::dns::forward::Forwarder;
use crate::envoy::handle::Envoy;
use crate::health::Health;
use crate::http_client::{self, Client, http_url};
use crate::istiod::Istiod;
use crate::sds::Consumers;
use crate::secrets::Secrets;
use crate::wasm::Wasm;
use crate::xds::observe::Observer;
use report::{Check, Group, Report};

/// How long a report takes at most.
pub const LIMIT: Duration = Duration::from_millis(2200);
/// What one request, dial, lookup or read may take, so that the others of its group are reported.
const PROBE_LIMIT: Duration = Duration::from_millis(1800);
/// The largest answer that is read: a report, or a list of what Envoy waits for.
const LARGEST_ANSWER: usize = 1 << 20;

/// The threads that file work may hold at once.
static THREADS: Semaphore = Semaphore::const_new(32);

/// The modules of a running agent. `None` where the agent does without.
#[derive(Clone, Debug)]
pub struct Running {
    pub envoy: Option<Envoy>,
    pub istiod: Istiod,
    /// None if another process serves certificates.
    pub secrets: Option<Secrets>,
    pub consumers: Consumers,
    pub discovery: Observer,
    pub dns: Option<Dns>,
    pub forwarder: Option<Forwarder>,
    pub health: Option<Health>,
    pub wasm: Option<Wasm>,
}

/// What the groups check: the configuration and, in the agent itself, its modules.
#[derive(Clone, Copy, Debug)]
struct Subject<'a> {
    config: &'a Config,
    running: Option<&'a Running>,
}

/// Checks the agent with this configuration, or that would have it. `before` are checks made already.
pub async fn report(
    config: &Result<Config, Vec<Problem>>,
    running: Option<&Running>,
    before: Vec<Check>,
) -> Report {
    let (node, about) = match config {
        Ok(config) => (
            config.bootstrap.node.id.clone(),
            configuration::checks(config),
        ),
        Err(problems) => (String::new(), configuration::unusable(problems)),
    };
    let named = |name: &str, checks| Group {
        name: name.to_owned(),
        checks,
    };
    let mut groups = vec![named("configuration", about), named("agent", before)];
    if let Ok(config) = config {
        let subject = Subject { config, running };
        // All the others rest on these two.
        let machine = async {
            <[Group; 2]>::from(tokio::join!(
                group("limits", limits::checks(subject)),
                group("disk", disk::checks(subject)),
            ))
        };
        let others = async {
            <[Group; 6]>::from(tokio::join!(
                group("certificate", certificate::checks(subject)),
                group("sockets", sockets::checks(subject)),
                group("Envoy", envoy::checks(subject)),
                group("capture", capture::checks(subject)),
                group("DNS", dns::checks(subject)),
                group("probes", probes::checks(subject)),
            ))
        };
        let (machine, control_plane, others) =
            tokio::join!(machine, control_plane(subject), others);
        groups.extend(machine.into_iter().chain(control_plane).chain(others));
    }
    Report::new(node, groups)
}

/// Token and roots, then istiod with them: what istiod answers decides whether a token is right.
async fn control_plane(subject: Subject<'_>) -> [Group; 2] {
    let until = Instant::now() + PROBE_LIMIT;
    let found = token::read(subject).await;
    let (istiod, accepted) = istiod::checks(subject, &found, until).await;
    [
        Group {
            name: "token and roots".to_owned(),
            checks: found.into_checks(accepted),
        },
        Group {
            name: "istiod".to_owned(),
            checks: istiod,
        },
    ]
}

/// Does file work on another thread, as disks hang; an error after [`PROBE_LIMIT`]. Work that never
/// ends holds its thread, so there is a limit for all reports together.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let done = async {
        let thread = THREADS.acquire().await.map_err(|error| error.to_string())?;
        let work = move || {
            let _thread = thread;
            work()
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|panic| panic.to_string())
    };
    let late = match THREADS.available_permits() {
        0 => "not begun, as earlier reads of files still hang".to_owned(),
        _ => format!("not finished within {PROBE_LIMIT:?}"),
    };
    tokio::time::timeout(PROBE_LIMIT, done)
        .await
        .unwrap_or(Err(late))
}

/// Requests a page over HTTP, of 1 MiB at most.
pub async fn get(url: &str, limit: Duration) -> Result<Response<Bytes>, http_client::Error> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = http_url(url)?;
    let client = Client::default();
    client.fetch(request, limit, LARGEST_ANSWER).await
}

/// Makes the checks of a group, within the limit.
async fn group(name: &'static str, checks: impl Future<Output = Vec<Check>>) -> Group {
    let checks = tokio::time::timeout(LIMIT, checks).await;
    let late = |_| {
        vec![Check::error(
            "checks",
            format!("not finished within {LIMIT:?}"),
        )]
    };
    Group {
        name: name.to_owned(),
        checks: checks.unwrap_or_else(late),
    }
}
