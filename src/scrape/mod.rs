//! Merges the metrics of the agent, Envoy and the application into one page.
//!
//! All sources are requested at once, and the beginning of each page is buffered ("set aside"). When every
//! source has ended or filled its buffer, or half of the time is over, the format of the merged page is
//! decided, and the sources are written one after the other: those that have ended come first; a large or
//! slow page passes straight from its socket in the time that is left. A source that fails is logged,
//! counted and left out; if it breaks off, its complete lines stay. In OpenMetrics the response is then
//! aborted, as its end would say that nothing is missing.
//!
//! [`Scrape::page`] answers one scrape. No submodule imports from this file.

mod format;
mod lines;
mod metrics;
mod negotiate;
mod output;
mod page;
mod producer;
mod sample;
mod seen;
mod source;
pub mod targets;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::TryStreamExt;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, VARY};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, request};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::time::{Instant, timeout_at};

use crate::clock::later;
use crate::duration::{rounded, scaled};
use crate::http_client::{self, Client, Redirects};
use crate::lifecycle::BoxError;
use crate::metrics::Registry;
use format::{Format, TEXT_PAGE};
pub use lines::Hidden;
use metrics::Metrics;
use negotiate::{SCRAPED_BY, TIMEOUT};
use output::Output;
use page::Page;
use seen::Seen;
use source::{Origin, Source};
use targets::Target;

/// The most that is set aside of all sources together, in bytes.
const MAX_ASIDE: usize = 512 << 10;
/// The largest share of a scrape's time in which sources are only set aside, so that they come in their order.
const ASIDE_SHARE: f64 = 0.5;
/// The share of the scraper's timeout in which the page is made; the rest is for its transfer.
const PAGE_SHARE: f64 = 0.95;
/// The longest timeout that a scraper can set.
const MAX_TIMEOUT: Duration = Duration::from_secs(3600);

/// The sources of the page, and the limits of a scrape.
#[derive(Clone, Debug)]
pub struct Config {
    /// The port of Envoy's metrics. None leaves them out.
    pub envoy_port: Option<u16>,
    /// Families of Envoy's that are left out of the page.
    pub hidden: Vec<Hidden>,
    pub targets: Vec<Target>,
    /// The most that is read of each application target, in bytes, if there are several.
    pub limit: u64,
    /// The timeout of a scrape whose scraper does not send one.
    pub timeout: Duration,
}

/// Serves the merged page. Clones share connections and counters.
#[derive(Clone)]
#[allow(missing_debug_implementations)]
pub struct Scrape(Arc<Inner>);

struct Inner {
    config: Config,
    registry: Registry,
    metrics: Metrics,
    client: Client,
    /// Identifies the scrapes of this agent.
    id: HeaderValue,
}

impl Scrape {
    pub fn new(config: Config, registry: Registry) -> Self {
        let client = http_client::Config {
            redirects: Redirects::Follow,
            keeps_connections: true,
            ..http_client::Config::default()
        };
        Self(Arc::new(Inner {
            config,
            metrics: Metrics::new(&registry),
            registry,
            client: Client::new(client),
            id: HeaderValue::from(fastrand::u64(..)),
        }))
    }

    /// Answers a scrape once the format of its page is decided; the page is written while it is read.
    pub async fn page(&self, request: request::Parts) -> Response<UnsyncBoxBody<Bytes, BoxError>> {
        let scrape = &self.0;
        let mut agents = request.headers.get_all(SCRAPED_BY).iter();
        if agents.any(|agent| *agent == scrape.id) {
            return self_scrape();
        }
        scrape.metrics.scrapes.inc();
        let begin = Instant::now();
        let time = scrape.time(&request.headers);
        let mut sources = scrape.request_sources(&request);
        let settled = source::settled(&mut sources, true);
        // Sources that are late have their turn later.
        let _ = timeout_at(later(begin, scaled(time, ASIDE_SHARE)), settled).await;
        // The counters on this page include the sources that have failed by now.
        sources.retain(|source| {
            let is_missing = source.has_ended && source.content_type.is_none();
            if is_missing {
                scrape.metrics.report(source);
            }
            !is_missing
        });
        let has_one_target = scrape.config.targets.len() == 1;
        let content_type = content_type(&sources, has_one_target);
        let is_gzip = negotiate::accepts_gzip(&request.headers);
        let page = Page {
            registry: scrape.registry.clone(),
            metrics: scrape.metrics.clone(),
            hidden: scrape.config.hidden.clone(),
            has_one_target,
            format: Format::from_content_type(content_type),
            deadline: later(begin, time),
            sources,
            seen: Seen::default(),
            output: Output::new(is_gzip),
        };
        let frames = producer::stream(|chunks| page.write(chunks)).map_ok(Frame::data);
        let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
        if is_gzip {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }
}

impl Inner {
    /// Returns the time in which the page is made: the scraper's timeout less the time for the transfer.
    fn time(&self, headers: &HeaderMap) -> Duration {
        let seconds = headers.get(&TIMEOUT).and_then(|header| {
            let text = header.to_str().ok();
            let number = text.and_then(|text| text.trim().parse().ok());
            let seconds = number.filter(|seconds: &f64| *seconds > 0.0);
            if seconds.is_none() {
                let timeout = rounded(self.config.timeout);
                tracing::warn!("failed to parse timeout header {TIMEOUT}: {header:?}, expected seconds; {timeout} is used");
            }
            seconds
        });
        let timeout = seconds.map_or(self.config.timeout, |seconds| {
            Duration::try_from_secs_f64(seconds).unwrap_or(MAX_TIMEOUT)
        });
        scaled(timeout.min(MAX_TIMEOUT), PAGE_SHARE)
    }

    /// Requests the pages of Envoy and of the targets, in this order.
    fn request_sources(&self, request: &request::Parts) -> VecDeque<Source> {
        let targets = &self.config.targets;
        let envoy = self.config.envoy_port.map(|port| {
            let query = request.uri.query().map(|query| format!("?{query}"));
            let path = format!("/stats/prometheus{}", query.unwrap_or_default());
            self.request(&request.headers, Origin::Envoy, port, &path, u64::MAX)
        });
        let limit = match targets.len() {
            1 => u64::MAX,
            _ => self.config.limit,
        };
        let applications = targets.iter().map(|Target { port, path }| {
            self.request(&request.headers, Origin::Application, *port, path, limit)
        });
        envoy.into_iter().chain(applications).collect()
    }

    fn request(
        &self,
        headers: &HeaderMap,
        origin: Origin,
        port: u16,
        path: &str,
        limit: u64,
    ) -> Source {
        let mut request = Request::new(Bytes::new());
        let uri = format!("http://localhost:{port}{path}");
        // Paths are checked with the configuration, and queries by the status port.
        *request.uri_mut() = uri.parse().unwrap_or_default();
        *request.headers_mut() = negotiate::for_source(origin.format(), headers, &self.id);
        let client = self.client.clone();
        let response = async move { client.send(request).await };
        let room = MAX_ASIDE / (self.config.targets.len() + 1);
        Source::new(origin, port, path, response, room, limit)
    }
}

/// Refuses a scrape by this agent, which would lead to the next one, and so on.
fn self_scrape() -> Response<UnsyncBoxBody<Bytes, BoxError>> {
    let why = "this agent scrapes itself: a target is, or redirects to, its own page\n";
    let body = Full::from(why).map_err(Into::into).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::LOOP_DETECTED;
    response
}

/// Returns the content type that all application pages have, or text if they differ.
fn content_type(sources: &VecDeque<Source>, has_one_target: bool) -> &'static str {
    let mut types = sources
        .iter()
        .filter(|source| source.origin == Origin::Application)
        .filter_map(|source| source.page_type(has_one_target));
    let first = types.next().unwrap_or(TEXT_PAGE);
    if types.all(|other| other == first) {
        first
    } else {
        TEXT_PAGE
    }
}

#[cfg(test)]
mod tests;
