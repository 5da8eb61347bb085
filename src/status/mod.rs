//! The status port: readiness, control, probes of the application, metrics, and a look inside.
//!
//! | path | method | from | answer |
//! |---|---|---|---|
//! | `/healthz/ready` | any | all | 200, or 503 with what is missing |
//! | `/stats/prometheus`, `/metrics` | any | all | the merged metrics, as [`Scrape`] has them |
//! | `/metrics/agent` | any | all | the agent's own metrics |
//! | `/quitquitquit` | POST | loopback | ends the agent without a drain |
//! | `/drain` | POST | loopback | has Envoy send its clients away |
//! | `/drain` | GET | loopback | JSON: what the end will look like, and how far it is |
//! | `/app-health/…`, `/app-lifecycle/…` | any | all | what the application says |
//! | `/debug/` | any | loopback | HTML: everything at one glance, for people |
//! | `/debug/overview` | any | loopback | JSON: the same |
//! | `/debug/…` | any | loopback | JSON: parts of it, as [`Sources`] has them |
//!
//! [`bind`] takes the port, before the rooms are built; the future of [`new`] serves it until it is
//! told to stop, which is last of all.
//!
//! Does not know the rooms it reports on, but for Envoy and the probes: [`Sources`] has them.

mod app_probe;
mod control;
mod debug;
mod held;
mod path;
mod probers;
mod ready;
mod reply;
mod server;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use ::http::{Method, Request, Response, StatusCode};
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::sync::watch;

use crate::envoy::handle::Envoy;
use crate::lifecycle::{BoxError, CancellationToken, Stop};
use crate::metrics::Registry;
use crate::probe;
use crate::timeline::Timeline;
use app_probe::AppProbes;
use control::Control;
pub use debug::{Glance, Page, Ready};
pub use probers::{Prober, Probers};
use ready::Readiness;
use reply::{json, plain};
pub use server::{BindError, Listener, bind};

/// What every answer consists of.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Answers a request for the metrics of all.
pub type Scrape = Arc<
    dyn Fn(::http::request::Parts) -> Pin<Box<dyn Future<Output = Response<Body>> + Send>>
        + Send
        + Sync,
>;

#[derive(Clone, Debug)]
pub struct Config {
    pub port: u16,
    /// Whether metrics are for callers on this machine only.
    pub metrics_localhost_only: bool,
    /// Where the application is.
    pub application: String,
    pub probers: Probers,
    pub probes: probe::Config,
    /// The bootstrap of gRPC applications, which cannot start without.
    pub grpc_bootstrap: Option<PathBuf>,
}

/// What the rooms provide.
pub struct Sources {
    /// How the start went, from when the agent came to life.
    pub timeline: Timeline,
    pub stop: Stop,
    /// None where the agent runs without Envoy.
    pub envoy: Option<Envoy>,
    /// Whether names can be looked up; none where the agent does not answer DNS.
    pub dns_ready: Option<watch::Receiver<bool>>,
    pub metrics: Registry,
    pub scrape: Scrape,
    pub debug: Vec<Page>,
    pub glance: Arc<dyn Glance>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("cannot set up TLS for probes")]
    Tls(#[from] rustls::Error),
}

/// What serves the port until `stop`.
pub fn new(
    config: Config,
    listener: Listener,
    sources: Sources,
    stop: CancellationToken,
) -> Result<impl Future<Output = ()> + Send, Error> {
    let router = Arc::new(Router::new(config, sources)?);
    Ok(async move {
        let watched = router.clone();
        tokio::select! {
            () = server::serve(listener, router, stop) => {}
            never = watched.ready.watch() => match never {},
        }
    })
}

/// Finds who answers.
struct Router {
    envoy: Option<Envoy>,
    metrics_localhost_only: bool,
    ready: Readiness,
    control: Control,
    probes: AppProbes,
    metrics: Registry,
    scrape: Scrape,
    debug: Vec<Page>,
    glance: Arc<dyn Glance>,
}

impl Router {
    fn new(config: Config, sources: Sources) -> Result<Self, Error> {
        Ok(Self {
            envoy: sources.envoy.clone(),
            metrics_localhost_only: config.metrics_localhost_only,
            ready: Readiness::new(config.grpc_bootstrap.clone(), &sources),
            control: Control::new(&sources),
            probes: AppProbes::new(config)?,
            metrics: sources.metrics,
            scrape: sources.scrape,
            debug: sources.debug,
            glance: sources.glance,
        })
    }

    async fn answer<B>(&self, request: Request<B>, from: SocketAddr) -> Response<Body> {
        if let Some(envoy) = &self.envoy {
            envoy.look_at_memory();
        }
        let (head, _) = request.into_parts();
        if head.method != Method::CONNECT
            && let Some(clean) = path::cleaned(&head.uri)
        {
            return reply::moved(&clean);
        }
        let is_local = from.ip().to_canonical().is_loopback();
        let page = head.uri.path().to_owned();
        match page.as_str() {
            "/healthz/ready" => match self.ready.check_and_log().await {
                Ok(()) => plain(StatusCode::OK, ""),
                Err(missing) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{missing}\n")),
            },
            "/stats/prometheus" | "/metrics" | "/metrics/agent"
                if self.metrics_localhost_only && !is_local =>
            {
                reply::forbidden()
            }
            "/stats/prometheus" | "/metrics" => (self.scrape)(head).await,
            "/metrics/agent" => reply::metrics(&self.metrics),
            "/quitquitquit" | "/drain" if !is_local => reply::forbidden(),
            "/quitquitquit" if head.method == Method::POST => self.control.quit(),
            "/drain" if head.method == Method::POST => self.control.drain().await,
            "/drain" if head.method == Method::GET => self.control.progress(),
            "/quitquitquit" | "/drain" => reply::method_not_allowed(),
            page if page.starts_with("/app-health/") || page.starts_with("/app-lifecycle/") => {
                self.probes.answer(page, &head.headers).await
            }
            "/debug/" | "/debug/overview" if !is_local => reply::forbidden(),
            "/debug/" => {
                self.at_a_glance(|glance, ready| reply::html(glance.html(ready)))
                    .await
            }
            "/debug/overview" => {
                self.at_a_glance(|glance, ready| json(StatusCode::OK, &glance.json(ready)))
                    .await
            }
            page => match self.debug.iter().find(|debug| debug.path == page) {
                Some(_) if !is_local => reply::forbidden(),
                Some(debug) => look_inside(debug).await,
                None => reply::not_found(),
            },
        }
    }

    /// A form of the page of everything. Readiness is not logged, as nobody probes.
    async fn at_a_glance(&self, form: fn(&dyn Glance, Ready) -> Response<Body>) -> Response<Body> {
        let ready = self.ready.check().await;
        let ready = ready.map_err(|missing| missing.to_string());
        let glance = self.glance.clone();
        let reply = aside(move || form(&*glance, ready)).await;
        reply.unwrap_or_else(|failure| failure)
    }
}

async fn look_inside(page: &Page) -> Response<Body> {
    let content = page.content.clone();
    match aside(move || content()).await {
        Ok(Some(content)) => json(StatusCode::OK, &content),
        Ok(None) => json(StatusCode::NOT_FOUND, &serde_json::json!({})),
        Err(failure) => failure,
    }
}

/// Makes a page aside, as some take a while.
async fn aside<C: Send + 'static>(
    make: impl FnOnce() -> C + Send + 'static,
) -> Result<C, Response<Body>> {
    let made = tokio::task::spawn_blocking(make).await;
    made.map_err(|panic| plain(StatusCode::INTERNAL_SERVER_ERROR, format!("{panic}\n")))
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources")
            .field("envoy", &self.envoy)
            .field("debug", &self.debug)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
