//! Serves the status port: readiness, control, application probes, metrics and debug pages.
//!
//! | path | method | from | answer |
//! |---|---|---|---|
//! | `/healthz/ready` | any | all | 200, or 503 with the reason |
//! | `/stats/prometheus`, `/metrics` | any | all | merged metrics of agent, Envoy and application |
//! | `/metrics/agent` | any | all | the agent's own metrics |
//! | `/quitquitquit` | POST | loopback | ends the agent without a drain |
//! | `/drain` | POST | loopback | drains Envoy's listeners |
//! | `/handover` | POST | loopback | has the agent in the other container take over |
//! | `/drain` | GET | loopback | JSON: the steps of a shutdown, and the present one |
//! | `/app-health/…`, `/app-lifecycle/…` | any | all | the application's answer |
//! | `/debug/`, `/debug/?hold` | any | users | HTML: the overview; with `hold` it does not reload itself |
//! | `/debug/overview` | any | users | JSON: the same |
//! | `/debug/logging` | GET | users | JSON: the levels of the log |
//! | `/debug/logging?level=…` | POST, PUT | users | sets levels, see [`logging`] |
//! | `/debug/config` | any | users | JSON: the effective configuration, see [`crate::config::report`] |
//! | `/debug/standby` | any | users | JSON: which of two containers serves, see [`crate::standby::State`] |
//! | `/debug/log` | any | users | the last lines of the log |
//! | `/debug/doctor` | any | users | the doctor's report, as JSON, text or HTML, see `crate::doctor` |
//! | `/debug/…` | any | users | JSON: parts of the overview, and the name table |
//!
//! "users" are root, the agent's own and configured ones, on loopback; the paths for loopback can be limited to
//! users, too. See [`access`].
//!
//! [`bind`] takes the port before other modules are built; the future of [`new`] serves it until `stop` is
//! cancelled.

mod access;
mod logging;
mod overview;
mod probers;
mod ready;
mod reply;
mod server;
pub mod startup;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::http::request::Parts;
use ::http::{Method, Request, Response, StatusCode, Uri};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body_util::combinators::UnsyncBoxBody;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::dns::Dns;
use crate::envoy::handle::Envoy;
use crate::health::Health;
use crate::istiod::Istiod;
use crate::metrics::Registry;
use crate::probe;
use crate::problem::{Code, Problem};
use crate::report::{PodState, Report};
use crate::runtime::lifecycle::{BoxError, CancellationToken, QUIT, Stop, StopAccepting, Urgency};
use crate::sds::Rejections;
use crate::secrets::Secrets;
use crate::wasm::Wasm;
use crate::xds::observe::Observer;
use access::{Access, Caller, Refused};
use probers::AppProbes;
pub use probers::{Prober, Probers};
use ready::Readiness;
use reply::plain;
use server::UNREAD;
pub use server::bind;
use startup::Milestones;

/// The age up to which the debug page shows a report again, because the page reloads itself.
const REPORT_AGE: Duration = Duration::from_secs(10);
/// The limit of a drain. It is longer than the limit of a request to Envoy's admin port.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// The body of every response.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Makes a debug page that the agent's wiring adds.
pub type Page = Arc<dyn Fn() -> BoxFuture<'static, Value> + Send + Sync>;

/// Makes the doctor's report, or returns the last one if it is not older than this.
pub type Doctor = Arc<dyn Fn(Duration) -> BoxFuture<'static, Report> + Send + Sync>;

/// Asks the agent in another container of the pod to take over. Returns the name of the container, or the
/// reason why it cannot.
pub type HandOver = Arc<dyn Fn() -> Result<String, &'static str> + Send + Sync>;

/// Answers a request for merged metrics.
pub type Scrape = Arc<dyn Fn(Parts) -> BoxFuture<'static, Response<Body>> + Send + Sync>;

#[derive(Clone, Debug)]
pub struct Config {
    pub port: u16,
    /// Serves metrics only to callers on this machine.
    pub metrics_localhost_only: bool,
    /// The host of application probes.
    pub application_host: String,
    pub probers: Probers,
    pub probes: probe::Config,
    /// False to answer 404 on `/drain` and `/quitquitquit`.
    pub has_control: bool,
    /// The time limit of each request to Envoy for a readiness probe.
    pub readiness_query: Duration,
    /// The bootstrap of gRPC applications.
    pub grpc_bootstrap: Option<PathBuf>,
    /// Users that may read debug pages, in addition to root and the agent's own. None admits every user.
    pub debug_users: Option<BTreeSet<u32>>,
    /// Users that may drain and end the agent. None admits every user.
    pub control_users: Option<BTreeSet<u32>>,
}

/// The parts of the agent that the port reports on and controls.
#[allow(missing_debug_implementations)]
pub struct Sources {
    /// Envoy's node id.
    pub node: String,
    /// The version of Istio that istiod is told.
    pub istio_version: String,
    pub milestones: Milestones,
    pub stop: Stop,
    pub hand_over: HandOver,
    /// None if the agent runs without Envoy.
    pub envoy: Option<Envoy>,
    pub istiod: Istiod,
    /// None if another process serves certificates.
    pub secrets: Option<Secrets>,
    pub rejections: Rejections,
    pub discovery: Observer,
    /// None if the agent does not answer DNS.
    pub dns: Option<Dns>,
    /// None if the workload is not checked.
    pub health: Option<Health>,
    /// None if Envoy fetches Wasm modules itself.
    pub wasm: Option<Wasm>,
    pub metrics: Registry,
    pub scrape: Scrape,
    pub doctor: Doctor,
    /// Further debug pages, by path.
    pub pages: BTreeMap<&'static str, Page>,
}

/// Serves the port from when `listener` is ready until `stop`, and records start-up milestones.
pub fn new(
    config: Config,
    listener: impl Future<Output = io::Result<TcpListener>> + Send,
    sources: Sources,
    stop_accepting: StopAccepting,
    stop: CancellationToken,
) -> Result<impl Future<Output = ()> + Send, rustls::Error> {
    let router = Arc::new(Router::new(config, sources)?);
    Ok(async move {
        let watched = router.clone();
        let watches = async {
            tokio::join!(watched.ready.poll_until_ready(), crate::logging::levels().expire());
            std::future::pending().await
        };
        let listener = stop.run_until_cancelled(listener).await.transpose();
        match listener.and_then(|it| it.map(tokio::net::TcpListener::from_std).transpose()) {
            Ok(Some(listener)) => tokio::select! {
                () = server::serve(listener, UNREAD, router, stop_accepting, stop.clone()) => {}
                () = watches => {}
            },
            Ok(None) => {}
            Err(error) => tracing::error!("cannot serve the status port: {error}"),
        }
        // Another agent may have taken over the port before.
        stop.cancelled().await;
    })
}

struct Router {
    debug: Access,
    control: Access,
    sources: Arc<Sources>,
    ready: Readiness,
    probes: AppProbes,
    /// Locked while a debug page is made.
    page_lock: Arc<Mutex<()>>,
}

impl Router {
    fn new(config: Config, sources: Sources) -> Result<Self, rustls::Error> {
        let sources = Arc::new(sources);
        Ok(Self {
            debug: Access {
                variable: "ISTIO_AGENT_DEBUG_USERS",
                users: config.debug_users.clone(),
            },
            control: Access {
                variable: "ISTIO_AGENT_CONTROL_USERS",
                users: config.control_users.clone(),
            },
            ready: Readiness::new(
                config.grpc_bootstrap.clone(),
                config.readiness_query,
                sources.clone(),
            ),
            probes: AppProbes::new(config)?,
            sources,
            page_lock: Arc::default(),
        })
    }

    /// Answers a request for any path, see the table at the beginning of this file.
    async fn answer<B>(&self, request: Request<B>, caller: &Caller) -> Response<Body> {
        let (head, _) = request.into_parts();
        if head.method != Method::CONNECT
            && let Some(target) = server::canonical_target(&head.uri)
        {
            return reply::redirect(&target);
        }
        let path = head.uri.path().to_owned();
        let access = match path.as_str() {
            "/quitquitquit" | "/drain" | "/handover" => Some(&self.control),
            path if path.starts_with("/debug/") => Some(&self.debug),
            _ => None,
        };
        if let Some(access) = access
            && let Err(why) = access.check(caller, &head).await
        {
            return reply::refusal(StatusCode::FORBIDDEN, format!("{why}\n"));
        }
        let media_type = reply::preferred_media_type(&head.headers);
        match path.as_str() {
            "/quitquitquit" | "/drain" if !self.probes.config.has_control => reply::not_found(),
            "/healthz/ready" => match self.ready.check_and_log().await {
                None => plain(StatusCode::OK, ""),
                Some(missing) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{missing}\n")),
            },
            "/stats/prometheus" | "/metrics" | "/metrics/agent"
                if self.probes.config.metrics_localhost_only && !caller.is_local() =>
            {
                reply::refusal(StatusCode::FORBIDDEN, format!("{}\n", Refused::NotLocal))
            }
            "/stats/prometheus" | "/metrics" => (self.sources.scrape)(head).await,
            "/metrics/agent" => reply::metrics(&self.sources.metrics),
            "/quitquitquit" if head.method == Method::POST => quit(&self.sources.stop),
            "/drain" if head.method == Method::POST => drain(&self.sources).await,
            "/drain" if head.method == Method::GET => progress(&self.sources),
            "/handover" if head.method == Method::POST => hand_over(&self.sources),
            "/quitquitquit" | "/drain" | "/handover" => reply::method_not_allowed(),
            path if path.starts_with("/app-health/") || path.starts_with("/app-lifecycle/") => {
                self.probes.answer(path, &head.headers).await
            }
            "/" => reply::refusal(StatusCode::NOT_FOUND, "404 page not found: see /debug/\n"),
            "/debug/logging" => logging::answer(&head),
            "/debug/doctor" if media_type != "text/html" => {
                let report = self.diagnose(Duration::ZERO).await.report;
                match media_type {
                    "text/plain" => plain(StatusCode::OK, report.text(false, usize::MAX)),
                    _ => reply::json(Some(report)),
                }
            }
            path => match (self.sources.pages.get(path), debug_page(path)) {
                (Some(make), _) => reply::json(Some(make().await)),
                (None, Some(make)) => self.debug_page(&head.uri, make).await,
                (None, None) => reply::not_found(),
            },
        }
    }

    /// Makes the doctor's report, or takes one of at most this age, and checks the readiness. Unlike a readiness
    /// probe, it does not log the readiness.
    async fn diagnose(&self, age: Duration) -> Diagnosis {
        let check = tokio::time::timeout(Duration::from_secs(2), self.ready.check());
        let (report, ready) = tokio::join!((self.sources.doctor)(age), check);
        let missing = match ready {
            Ok(ready) => ready.err().map(|missing| missing.to_string()),
            Err(_) => Some("Envoy's admin port does not answer".to_owned()),
        };
        let problem = missing.as_ref().map(|it| Problem::new(Code::PodNotReady, "pod", it));
        let state = if missing.is_none() { PodState::Ready } else { PodState::NotReady };
        let report = report.judged(&state, problem.as_ref());
        Diagnosis { report, missing, ..Diagnosis::default() }
    }

    /// Makes a debug page on a blocking thread, because some take a while. Only one is made at a time, because
    /// glibc keeps the memory of each thread.
    async fn debug_page(&self, uri: &Uri, make: DebugPage) -> Response<Body> {
        let mut diagnosis = match uri.path() {
            "/debug/" | "/debug/doctor" | "/debug/overview" => self.diagnose(REPORT_AGE).await,
            _ => Diagnosis::default(),
        };
        diagnosis.is_held = uri.query() == Some("hold");
        if let Some(pair) = self.sources.pages.get("/debug/standby") {
            diagnosis.pair = pair().await;
        }
        let sources = self.sources.clone();
        let lock = self.page_lock.clone().lock_owned().await;
        let made = tokio::task::spawn_blocking(move || {
            // It stays locked until the end, even if the client has closed the connection.
            let _lock = lock;
            make(&sources, &diagnosis)
        });
        made.await
            .unwrap_or_else(|panic| plain(StatusCode::INTERNAL_SERVER_ERROR, format!("{panic}\n")))
    }
}

/// Ends the agent once the response has been sent.
fn quit(stop: &Stop) -> Response<Body> {
    tracing::info!("handling /quitquitquit, notifying pilot-agent to exit");
    let stop = stop.clone();
    plain(StatusCode::OK, "OK")
        .map(|body| reply::call_after(body, move || stop.request(Urgency::Terminate, QUIT)))
}

/// Asks Envoy, if there is one, to drain its listeners.
async fn drain(sources: &Sources) -> Response<Body> {
    tracing::info!("handling /drain, starting drain");
    if let Some(envoy) = &sources.envoy
        && tokio::time::timeout(DRAIN_LIMIT, envoy.drain()).await.is_err()
    {
        let found = "Envoy did not confirm the drain within 10 s";
        tracing::warn!("{}", Problem::new(Code::DrainUnconfirmed, "/drain", found));
    }
    plain(StatusCode::OK, "OK")
}

/// Asks the agent in the other container to take over.
fn hand_over(sources: &Sources) -> Response<Body> {
    match (sources.hand_over)() {
        Ok(name) => plain(StatusCode::OK, format!("container {name} takes over\n")),
        Err(why) => plain(StatusCode::CONFLICT, format!("{why}\n")),
    }
}

/// Returns the steps of a shutdown, and the present one.
fn progress(sources: &Sources) -> Response<Body> {
    let request = sources.stop.requested().borrow().clone();
    reply::json(Some(json!({
        "asked": format!("{:?}", request.urgency).to_lowercase(),
        "cause": request.cause,
        "envoy": sources.envoy.as_ref().map(Envoy::snapshot),
    })))
}

/// The doctor's report, the result of a readiness check, and what else a debug page needs.
#[derive(Default)]
struct Diagnosis {
    report: Report,
    /// The reason why the pod is not ready.
    missing: Option<String>,
    pair: Value,
    /// True if the page does not reload itself.
    is_held: bool,
}

/// Makes a page from the sources and, for the overview, the diagnosis.
type DebugPage = fn(&Sources, &Diagnosis) -> Response<Body>;

/// Returns what makes the debug page of a path; None if there is none.
fn debug_page(path: &str) -> Option<DebugPage> {
    Some(match path {
        "/debug/" | "/debug/doctor" => {
            |sources, diagnosis| reply::html(overview::html(sources, diagnosis))
        }
        "/debug/overview" => {
            |sources, diagnosis| reply::json(Some(overview::snapshot(sources, diagnosis)))
        }
        "/debug/log" => |_, _| plain(StatusCode::OK, crate::logging::LAST_LINES.text()),
        "/debug/envoy" => |sources, _| reply::json(sources.envoy.as_ref().map(Envoy::snapshot)),
        "/debug/istiod" => |sources, _| reply::json(Some(sources.istiod.status())),
        "/debug/certs" => |sources, _| reply::json(sources.secrets.as_ref().map(Secrets::snapshot)),
        "/debug/health" => |sources, _| reply::json(sources.health.as_ref()),
        "/debug/xdsz" => |sources, _| reply::json(Some(sources.discovery.snapshot())),
        "/debug/wasm" => |sources, _| reply::json(sources.wasm.as_ref().map(Wasm::snapshot)),
        "/debug/ndsz" => |sources, _| reply::json_text(sources.dns.as_ref().and_then(Dns::to_json)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
