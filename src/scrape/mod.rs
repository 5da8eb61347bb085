//! Merges the metrics of the agent, Envoy and the application into one page.
//!
//! All sources are asked at once. When the heads of their answers are there, or half of the time is
//! over, the format of the page is settled, and the sources are written one after the other. What is
//! small, or there already, has been set aside and comes first; a large or slow page passes straight
//! from its socket in the time that is left. A source that fails is logged, counted and left out; the
//! complete lines of one that breaks off stay. In OpenMetrics the response is then aborted, as its end
//! would say that nothing is missing.

mod counts;
mod lines;
mod negotiate;
mod output;
mod sample;
mod seen;
mod source;
pub mod targets;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, VARY};
use http::{HeaderMap, HeaderValue, Request, Response, Uri, request};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::time::{Instant, timeout_at};

use crate::http_client::{self, Client, Redirects};
use crate::lifecycle::BoxError;
use crate::metrics::Registry;
use counts::{Counts, Origin};
use lines::{Format, Lines};
use negotiate::{ContentType, TIMEOUT};
use output::{Output, Written};
use seen::Seen;
use source::{Failure, Source};
use targets::Target;

/// What may be set aside of all sources together, in bytes.
const ASIDE: usize = 512 << 10;
/// The part of a scrape's time that is spent on setting aside, so that pages come in their order.
const SETTLING: u32 = 10;
/// The part of the scraper's time that is left for the page's way back, and the least of it.
const WAY_BACK: f64 = 0.05;
const LEAST_WAY_BACK: Duration = Duration::from_millis(50);
/// Longest time a scraper can ask for.
const LONGEST: Duration = Duration::from_secs(3600);
/// Of an answer's head, and of the buffer its body passes through.
const LARGEST_HEAD: usize = 64 << 10;

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
pub struct Scrape(Arc<Inner>);

struct Inner {
    config: Config,
    registry: Registry,
    counts: Counts,
    client: Client,
}

impl std::fmt::Debug for Scrape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Scrape").field(&self.0.config).finish()
    }
}

impl Scrape {
    pub fn new(config: Config, registry: Registry) -> Self {
        let client = http_client::Config {
            redirects: Redirects::Follow,
            largest_head: LARGEST_HEAD,
            keeps_connections: true,
            ..http_client::Config::default()
        };
        Self(Arc::new(Inner {
            config,
            counts: Counts::new(&registry),
            registry,
            client: Client::new(client),
        }))
    }

    /// Answers a scrape as soon as the format is known; the page is written while it is read.
    pub async fn page(&self, request: request::Parts) -> Response<UnsyncBoxBody<Bytes, BoxError>> {
        let scrape = &self.0;
        scrape.counts.scrapes.inc();
        let begin = Instant::now();
        let time = scrape.time(&request.headers);
        let mut sources = scrape.sources(&request);
        let has_head = |source: &Source| source.content_type.is_some() || source.has_ended();
        source::set_aside(&mut sources, begin + time / 2, has_head).await;
        source::set_aside(&mut sources, begin + time / SETTLING, Source::is_settled).await;
        // What has failed already shows on this very page.
        sources.retain_mut(|source| match source.content_type {
            None if source.has_ended() => {
                scrape.report(source);
                false
            }
            _ => true,
        });
        let format = settle(&sources);
        let is_gzip = negotiate::takes_gzip(&request.headers);
        let inner = scrape.clone();
        let write = |output| inner.write(sources, format.format(), begin + time, output);
        let mut response = Response::new(Written::new(is_gzip, write).boxed_unsync());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, format.header());
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
                let timeout = self.config.timeout;
                tracing::warn!("failed to parse timeout header {TIMEOUT}: {header:?}, expected seconds, using {timeout:?}");
            }
            seconds
        });
        let time = match asked {
            Some(seconds) => Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST),
            None => self.config.timeout,
        };
        let time = time.min(LONGEST);
        let way_back = time.mul_f64(WAY_BACK).max(LEAST_WAY_BACK);
        time.saturating_sub(way_back).max(time / 2)
    }

    /// Asks everything but the agent itself: Envoy first, then the targets in order.
    fn sources(&self, request: &request::Parts) -> Vec<Source> {
        let config = &self.config;
        let room = ASIDE / (config.targets.len() + 1);
        let mut sources = Vec::new();
        let mut ask = |origin, port, path: &str, headers, limit| {
            let mut request = Request::new(Bytes::new());
            let uri = format!("http://localhost:{port}{path}");
            // Paths are checked with the configuration, and queries by the status port.
            *request.uri_mut() = uri.parse().unwrap_or_else(|_| Uri::default());
            *request.headers_mut() = headers;
            let client = self.client.clone();
            let asking = Box::pin(async move { client.send(request).await });
            sources.push(Source::new(origin, port, path, asking, room, limit));
        };
        if let Some(port) = config.envoy_port {
            let query = request.uri.query();
            let query = query.map_or(String::new(), |query| format!("?{query}"));
            let path = format!("/stats/prometheus{query}");
            let headers = negotiate::for_envoy(&request.headers);
            ask(Origin::Envoy, port, &path, headers, u64::MAX);
        }
        let limit = match config.targets.len() {
            1 => u64::MAX,
            _ => config.limit,
        };
        for target in &config.targets {
            let headers = negotiate::for_application(&request.headers);
            ask(
                Origin::Application,
                target.port,
                &target.path,
                headers,
                limit,
            );
        }
        sources
    }

    /// Writes the page: the agent's own metrics, and the sources as their turns come.
    async fn write(
        self: Arc<Self>,
        mut sources: Vec<Source>,
        to: Format,
        deadline: Instant,
        mut output: Output,
    ) -> Result<(), BoxError> {
        let mut seen = Seen::default();
        seen.begin(sources.is_empty());
        let own = Bytes::from(self.registry.render());
        Lines::new(Format::Text, to, &[], false).push(&own, &mut seen, &mut output);
        while let Some(next) = next(&mut sources, deadline).await {
            let mut source = sources.remove(next);
            seen.begin(sources.is_empty());
            self.pass(
                &mut source,
                &mut sources,
                to,
                deadline,
                &mut seen,
                &mut output,
            )
            .await;
            let has_broken_off = source.failure.is_some() && source.content_type.is_some();
            self.report(&mut source);
            if has_broken_off && to == Format::OpenMetrics {
                return Err("a source broke off".into());
            }
        }
        if to == Format::OpenMetrics {
            output.write(b"# EOF\n");
        }
        output.finish().await
    }

    /// Writes what a source has, while the others are set aside.
    async fn pass(
        &self,
        source: &mut Source,
        others: &mut [Source],
        to: Format,
        deadline: Instant,
        seen: &mut Seen,
        output: &mut Output,
    ) {
        // Nothing that others wait for takes all of their time.
        let now = Instant::now();
        let until = match others.is_empty() {
            true => deadline,
            false => now + deadline.saturating_duration_since(now) / 2,
        };
        let hidden = match source.origin {
            Origin::Envoy => self.config.hidden.as_slice(),
            _ => &[],
        };
        let is_small = source.has_ended();
        let mut lines = None;
        loop {
            let chunk = poll_fn(|context| {
                for other in &mut *others {
                    other.set_aside(context);
                }
                source.poll_chunk(context)
            });
            let Ok(chunk) = timeout_at(until, chunk).await else {
                source.fail(Failure::Late);
                break;
            };
            let from = source.format();
            let lines = lines.get_or_insert_with(|| Lines::new(from, to, hidden, is_small));
            let Some(chunk) = chunk else {
                break;
            };
            lines.push(&chunk, seen, output);
            output.send().await;
            // A page that always has more is never late by the timer alone.
            if Instant::now() >= until {
                source.fail(Failure::Late);
            }
        }
        let Some(mut lines) = lines else {
            return;
        };
        lines.finish(source.failure.is_none(), seen, output);
        if source.failure.is_none() && source.format() == Format::OpenMetrics && !lines.has_ended {
            source.fail(Failure::NoEnd);
        }
        self.counts
            .left_out(source.origin, lines.duplicates, lines.malformed);
    }

    /// Logs and counts a failure.
    fn report(&self, source: &mut Source) {
        if let Some(failure) = &source.failure {
            self.counts.failure(source.origin);
            tracing::error!("{}", source.explain(failure));
        }
    }
}

/// Waits for the source whose turn it is, if there are any left.
async fn next(sources: &mut [Source], deadline: Instant) -> Option<usize> {
    if sources.len() < 2 {
        return sources.len().checked_sub(1);
    }
    let settled = poll_fn(|context| {
        for source in &mut *sources {
            source.set_aside(context);
        }
        let settled = sources.iter().enumerate();
        let settled = settled.filter(|(_, source)| source.is_settled());
        match settled.min_by_key(|(_, source)| source.turn()) {
            Some((index, _)) => Poll::Ready(index),
            None => Poll::Pending,
        }
    });
    Some(timeout_at(deadline, settled).await.unwrap_or(0))
}

/// The format of the page: that of the application, or text where its targets differ.
fn settle(sources: &[Source]) -> ContentType {
    let targets = sources
        .iter()
        .filter(|source| source.origin == Origin::Application);
    let mut types = targets.filter_map(|source| source.content_type);
    let first = types.next().unwrap_or(ContentType::Text);
    match types.all(|other| other == first) {
        true => first,
        false => ContentType::Text,
    }
}

#[cfg(test)]
mod tests;
