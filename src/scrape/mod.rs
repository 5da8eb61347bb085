//! Merges the metrics of the agent, Envoy and the application into one page.
//!
//! All sources are asked at once, and what they send is set aside. When each has ended or has no more
//! room there, or half of the time is over, the format of the page is settled, and the sources are
//! written one after the other: what has ended comes first; a large or slow page passes straight from its
//! socket in the time that is left. A source that fails is logged, counted and left out; the
//! complete lines of one that breaks off stay. In OpenMetrics the response is then aborted, as its end
//! would say that nothing is missing.

mod lines;
mod negotiate;
mod page;
mod sample;
mod seen;
mod source;
pub mod targets;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::{self, Stream, TryStreamExt};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, VARY};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, request};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::sync::mpsc::{Sender, channel};
use tokio::time::{Instant, timeout_at};

use crate::clock::later;
use crate::duration::{rounded, scaled};
use crate::http_client::{self, Client, Redirects};
use crate::lifecycle::BoxError;
use crate::metrics::{Counter, Counters, Registry};
use lines::Format;
use negotiate::{SCRAPED_BY, TEXT_PAGE, TIMEOUT};
use page::{Output, Page};
use seen::Seen;
use source::{Origin, Source};
use targets::Target;

/// What may be set aside of all sources together, in bytes.
const ASIDE: usize = 512 << 10;
/// The part of a scrape's time that is spent on setting aside at most, so that pages come in their order.
const SETTLING: f64 = 0.5;
/// The part of the scraper's time in which the page is made; the rest is for its way back.
const MAKING: f64 = 0.95;
/// Longest time a scraper can ask for.
const MAX_TIME: Duration = Duration::from_secs(3600);

/// What is scraped, and within which limits.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where Envoy has its metrics. None leaves them out.
    pub envoy_port: Option<u16>,
    /// Families of Envoy's that are left out of the page.
    pub hidden: Vec<Hidden>,
    pub targets: Vec<Target>,
    /// Most that is read of one of several application targets.
    pub limit: u64,
    /// How long a scrape may take whose scraper does not say.
    pub timeout: Duration,
}

/// The families whose names start and end so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden {
    pub start: &'static str,
    pub end: &'static str,
}

/// Serves the merged page. Clones share connections and counters.
#[derive(Clone)]
#[allow(missing_debug_implementations)]
pub struct Scrape(Arc<Inner>);

struct Inner {
    config: Config,
    registry: Registry,
    counts: Counts,
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
            counts: Counts::new(&registry),
            registry,
            client: Client::new(client),
            id: HeaderValue::from(fastrand::u64(..)),
        }))
    }

    /// Answers a scrape once its sources are settled; the page is written while it is read.
    pub async fn page(&self, request: request::Parts) -> Response<UnsyncBoxBody<Bytes, BoxError>> {
        let scrape = &self.0;
        let mut agents = request.headers.get_all(SCRAPED_BY).iter();
        if agents.any(|agent| *agent == scrape.id) {
            // Otherwise each scrape would ask for the next one.
            let why = "this agent scrapes itself: a target is, or redirects to, its own page\n";
            let body = Full::from(why).map_err(Into::into).boxed_unsync();
            let mut refusal = Response::new(body);
            *refusal.status_mut() = StatusCode::LOOP_DETECTED;
            return refusal;
        }
        scrape.counts.scrapes.inc();
        let begin = Instant::now();
        let time = scrape.time(&request.headers);
        let mut sources = scrape.sources(&request);
        let settling = source::settled(&mut sources, true);
        // Sources that are late have their turn later.
        let _ = timeout_at(later(begin, scaled(time, SETTLING)), settling).await;
        // What has failed already shows on this very page.
        sources.retain_mut(|source| match source.content_type {
            None if source.has_ended => {
                scrape.report(source);
                false
            }
            _ => true,
        });
        let content_type = settle(&sources, scrape.config.targets.len() == 1);
        let format = Format::of(content_type);
        let is_gzip = negotiate::takes_gzip(&request.headers);
        let page = Page {
            scrape: scrape.clone(),
            format,
            deadline: later(begin, time),
            sources,
            seen: Seen::default(),
            output: Output::new(is_gzip),
        };
        let chunks = sent_by(|chunks| page.write(chunks)).map_ok(Frame::data);
        let mut response = Response::new(StreamBody::new(chunks).boxed_unsync());
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
    /// How long the scrape may take, without the page's way back.
    fn time(&self, headers: &HeaderMap) -> Duration {
        let asked = headers.get(&TIMEOUT).and_then(|header| {
            let seconds = header.to_str().ok().and_then(|text| text.trim().parse().ok());
            let seconds = seconds.filter(|seconds: &f64| *seconds > 0.0);
            if seconds.is_none() {
                let timeout = rounded(self.config.timeout);
                tracing::warn!("failed to parse timeout header {TIMEOUT}: {header:?}, expected seconds; {timeout} is used");
            }
            seconds
        });
        let time = asked.map_or(self.config.timeout, |seconds| {
            Duration::try_from_secs_f64(seconds).unwrap_or(MAX_TIME)
        });
        scaled(time.min(MAX_TIME), MAKING)
    }

    /// Asks everything but the agent itself: Envoy first, then the targets in order.
    fn sources(&self, request: &request::Parts) -> VecDeque<Source> {
        let targets = &self.config.targets;
        let room = ASIDE / (targets.len() + 1);
        let ask = |origin, port, path: &str, limit| {
            let uri = format!("http://localhost:{port}{path}");
            let mut sent = Request::new(Bytes::new());
            // Paths are checked with the configuration, and queries by the status port.
            *sent.uri_mut() = uri.parse().unwrap_or_default();
            *sent.headers_mut() = negotiate::for_source(origin, &request.headers, &self.id);
            let client = self.client.clone();
            let asking = async move { client.send(sent).await };
            Source::new(origin, port, path, asking, room, limit)
        };
        let envoy = self.config.envoy_port.map(|port| {
            let query = request.uri.query();
            let query = query.map_or(String::new(), |query| format!("?{query}"));
            let path = format!("/stats/prometheus{query}");
            ask(Origin::Envoy, port, &path, u64::MAX)
        });
        let limit = match targets.len() {
            1 => u64::MAX,
            _ => self.config.limit,
        };
        let targets = targets
            .iter()
            .map(|target| ask(Origin::Application, target.port, &target.path, limit));
        envoy.into_iter().chain(targets).collect()
    }

    /// Logs and counts a failure.
    fn report(&self, source: &Source) {
        if let Some(problem) = source.problem() {
            self.counts.failures.with([source.origin.name()]).inc();
            tracing::error!("{problem}");
        }
    }
}

/// What the page says it is: the same as the application, or text where its targets differ.
fn settle(sources: &VecDeque<Source>, is_alone: bool) -> &'static str {
    let targets = sources.iter();
    let targets = targets.filter(|source| source.origin == Origin::Application);
    let mut types = targets.filter_map(|source| source.page_type(is_alone));
    let first = types.next().unwrap_or(TEXT_PAGE);
    match types.all(|other| other == first) {
        true => first,
        false => TEXT_PAGE,
    }
}

/// What `work` sends, and at the end its error. It goes on while the stream is polled.
fn sent_by<T, E, W: Future<Output = Result<(), E>>>(
    work: impl FnOnce(Sender<Result<T, E>>) -> W,
) -> impl Stream<Item = Result<T, E>> {
    let (sender, mut sent) = channel(1);
    let working = work(sender.clone());
    let working = async move {
        if let Err(error) = working.await {
            let _ = sender.send(Err(error)).await;
        }
    };
    let mut working = Box::pin(working.fuse());
    stream::poll_fn(move |context| {
        let _ = working.poll_unpin(context);
        sent.poll_recv(context)
    })
}

/// What was scraped, what failed, and what was left out of a page.
struct Counts {
    scrapes: Counter,
    failures: Counters<1>,
    duplicates: Counters<1>,
    malformed: Counters<1>,
}

impl Counts {
    fn new(registry: &Registry) -> Self {
        Self {
            scrapes: registry.counter("istio_agent_scrapes_total", "The total number of scrapes."),
            failures: registry.counters(
                "istio_agent_scrape_failures_total",
                "The total number of failed scrapes.",
                &["type"],
            ),
            duplicates: registry.counters(
                "istio_agent_scrape_duplicate_series_total",
                "Samples left out of the page because an earlier source has the same series.",
                &["source"],
            ),
            malformed: registry.counters(
                "istio_agent_scrape_malformed_lines_total",
                "Lines left out of the page because they are malformed or longer than 1 MiB.",
                &["source"],
            ),
        }
    }
}

#[cfg(test)]
mod tests;
