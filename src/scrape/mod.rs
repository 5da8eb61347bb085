//! The merged page of metrics: the agent's own, Envoy's and the application's.
//!
//! All pages are asked for at once. When their heads are there, or half of the time is over, the
//! answer's format is settled and they are written one after the other, straight from their sockets.
//! A page that is late gets its turn behind the others; one that keeps others waiting is cut off
//! when it has used half of the time that is left. What several application targets bring is held
//! until it can be grouped. Whatever fails is left out, logged and counted, and the rest goes on.
//!
//! Does not listen: whoever does hands in requests.

mod body;
mod counts;
mod encode;
mod family;
mod fetch;
mod line;
mod merge;
mod negotiate;
mod page;
mod scan;
mod source;
mod spool;
pub mod targets;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, VARY};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Response, request};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::time::{Instant, timeout_at};

use crate::lifecycle::BoxError;
use crate::metrics::Registry;
use body::{Output, Pieces};
use counts::{Counts, Origin};
use encode::Encoder;
use fetch::Pool;
use line::Format;
use merge::{Filter, Sink, WINDOW};
use negotiate::{ContentType, Encoding, TIMEOUT};
use page::Page;
use source::{Failure, Source, poll_heads};
use spool::Spool;
use targets::Target;

/// Pages smaller than this are not encoded.
const LEAST_ENCODED: usize = 1024;
/// The part of the scraper's time that is left for the page's way back, and the least of it.
const WAY_BACK: f64 = 0.05;
const LEAST_WAY_BACK: Duration = Duration::from_millis(50);
/// Longest time a scraper can ask for.
const LONGEST: Duration = Duration::from_secs(3600);

/// What is scraped, and within which limits.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where Envoy has its metrics. None leaves them out.
    pub envoy_port: Option<u16>,
    pub targets: Vec<Target>,
    /// Most that is read of one of several application targets.
    pub limit: u64,
    /// How long a scrape may take whose scraper does not say.
    pub timeout: Duration,
}

/// A way to the merged page. Clones share connections and counters.
#[derive(Clone)]
pub struct Scrape(Arc<Inner>);

struct Inner {
    config: Config,
    registry: Registry,
    counts: Counts,
    pool: Pool,
}

impl std::fmt::Debug for Scrape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Scrape").field(&self.0.config).finish()
    }
}

impl Scrape {
    pub fn new(config: Config, registry: Registry) -> Self {
        Self(Arc::new(Inner {
            config,
            counts: Counts::new(&registry),
            registry,
            pool: Pool::default(),
        }))
    }

    /// The answer to a scrape. It is there once its format is known; the page is written while it
    /// is read.
    pub async fn page(&self, request: request::Parts) -> Response<UnsyncBoxBody<Bytes, BoxError>> {
        let scrape = &self.0;
        scrape.counts.scrapes.inc();
        let time = self.time(&request.headers);
        let now = Instant::now();
        let deadline = now + time;
        let mut sources = self.sources(&request);
        // What is not there until the half of it may come later.
        let heads = poll_fn(|context| poll_heads(&mut sources, context));
        let _ = timeout_at(now + time / 2, heads).await;
        for source in &mut sources {
            scrape.tell(source);
        }
        let format = settle(&sources);
        let page = Page::new(format.format(), scrape.counts.clone());
        let this = scrape.clone();
        let write = |output| async move { this.write(sources, deadline, output).await };
        let mut pieces = Pieces::new(page, write);
        let length = pieces.begin().await;
        answer(pieces, length, format, &request.headers)
    }

    /// How long the scrape may take, without the page's way back.
    fn time(&self, headers: &HeaderMap) -> Duration {
        let asked = headers.get(&TIMEOUT).and_then(|header| {
            let seconds = header.to_str().ok().and_then(|text| text.trim().parse().ok());
            let seconds = seconds.filter(|seconds: &f64| *seconds > 0.0);
            if seconds.is_none() {
                let timeout = self.0.config.timeout;
                tracing::warn!("failed to parse timeout header {TIMEOUT}: {header:?}, expected seconds, using {timeout:?}");
            }
            seconds
        });
        let time = match asked {
            Some(seconds) => Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST),
            None => self.0.config.timeout,
        };
        let time = time.min(LONGEST);
        let way_back = time.mul_f64(WAY_BACK).max(LEAST_WAY_BACK);
        time.saturating_sub(way_back).max(time / 2)
    }

    /// Everything but the agent itself, asked. Envoy is first, then come the targets in order.
    fn sources(&self, request: &request::Parts) -> Vec<Source> {
        let config = &self.0.config;
        let mut sources = Vec::new();
        if let Some(port) = config.envoy_port {
            let path = match request.uri.query() {
                Some(query) => format!("/stats/prometheus?{query}"),
                None => "/stats/prometheus".to_owned(),
            };
            let headers = negotiate::for_envoy(&request.headers);
            sources.push(self.source(Origin::Envoy, port, &path, headers));
        }
        let headers = negotiate::for_application(&request.headers);
        sources.extend(config.targets.iter().map(|target| {
            self.source(
                Origin::Application,
                target.port,
                &target.path,
                headers.clone(),
            )
        }));
        sources
    }

    fn source(&self, origin: Origin, port: u16, path: &str, headers: HeaderMap) -> Source {
        let scrape = self.0.clone();
        let asked: PathAndQuery = path.parse().unwrap_or(PathAndQuery::from_static("/"));
        let asking = async move { scrape.pool.get(port, &asked, &headers).await };
        Source::new(origin, port, path, Box::pin(asking))
    }
}

impl Inner {
    /// Writes the page: the agent's part, and the others in their order, those that are late last.
    async fn write(self: Arc<Self>, sources: Vec<Source>, deadline: Instant, mut output: Output) {
        let mut agent = Filter::new(Format::Text, output.page.to, WINDOW);
        if agent
            .push(self.registry.render().as_bytes(), &mut output.page)
            .is_err()
        {
            self.counts.failure(Origin::Agent);
        }
        agent.finish(true, &mut output.page);
        let (envoy, targets): (Vec<_>, Vec<_>) = sources
            .into_iter()
            .partition(|source| source.origin == Origin::Envoy);
        let mut parts = vec![envoy, targets];
        parts.retain(|part| !part.is_empty());
        parts.sort_by_key(|part| part.iter().all(Source::is_late));
        let mut left = parts.len();
        for part in parts {
            left -= 1;
            let rest = deadline.saturating_duration_since(Instant::now());
            let until = if left > 0 {
                Instant::now() + rest / 2
            } else {
                deadline
            };
            output.page.origin = part.first().map_or(Origin::Agent, |source| source.origin);
            match part.len() {
                1 => self.stream(part, until, &mut output).await,
                _ => self.join(part, until, &mut output).await,
            }
        }
        output.finish().await;
    }

    /// Writes a source's page as it comes.
    async fn stream(&self, part: Vec<Source>, until: Instant, output: &mut Output) {
        for mut source in part {
            source.head(until).await;
            let Some(from) = source.content_type() else {
                self.tell(&mut source);
                continue;
            };
            let mut filter = Filter::new(from.format(), output.page.to, WINDOW);
            let result = loop {
                match source.piece(until).await {
                    Ok(None) => break ended(&filter, from),
                    Ok(Some(piece)) => {
                        if let Err(error) = filter.push(&piece, &mut output.page) {
                            break Err(error.into());
                        }
                        output.offer().await;
                    }
                    Err(failure) => break Err(failure),
                }
            };
            self.close(source, filter, result, &mut output.page);
            output.offer().await;
        }
    }

    /// Reads the pages of several sources side by side, and writes what they have together.
    async fn join(self: &Arc<Self>, part: Vec<Source>, until: Instant, output: &mut Output) {
        let rest = until.saturating_duration_since(Instant::now());
        // Joining takes a while as well.
        let until = until - rest / 10;
        let to = output.page.to;
        let spooling = part.into_iter().map(|source| {
            let scrape = self.clone();
            Box::pin(async move { scrape.spool(source, until, to).await }) as Spooling
        });
        let spools = all(spooling.collect()).await;
        if let Err(error) = spool::join(spools, output).await {
            self.counts.failure(Origin::Application);
            tracing::error!("failed scraping application metrics: {error}");
        }
    }

    async fn spool(&self, mut source: Source, until: Instant, to: Format) -> Spool {
        let mut spool = Spool::new(to, self.counts.clone());
        source.head(until).await;
        let Some(from) = source.content_type() else {
            self.tell(&mut source);
            return spool;
        };
        let mut filter = Filter::new(from.format(), to, spool::WINDOW);
        let mut left = self.config.limit;
        let result = loop {
            match source.piece(until).await {
                Ok(None) => break ended(&filter, from),
                Ok(Some(piece)) => {
                    let fits = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
                    left -= fits as u64;
                    if let Err(error) = filter.push(&piece[..fits], &mut spool) {
                        break Err(error.into());
                    }
                    if fits < piece.len() {
                        break Err(Failure::TooLarge(self.config.limit));
                    }
                }
                Err(failure) => break Err(failure),
            }
        };
        self.close(source, filter, result, &mut spool);
        spool
    }

    /// Lets out what is left of a source, and says how it went.
    fn close(
        &self,
        source: Source,
        mut filter: Filter,
        result: Result<(), Failure>,
        sink: &mut impl Sink,
    ) {
        let is_whole = matches!(result, Ok(()) | Err(Failure::NoEnd));
        filter.finish(is_whole, sink);
        self.counts.malformed(source.origin, filter.malformed());
        if let Err(failure) = result {
            self.failed(&source, &failure);
        }
        if is_whole {
            source.leave(&self.pool);
        }
    }

    fn tell(&self, source: &mut Source) {
        if let Some(failure) = source.failure() {
            self.failed(source, &failure);
        }
    }

    fn failed(&self, source: &Source, failure: &Failure) {
        self.counts.failure(source.origin);
        tracing::error!("{}", source.explain(failure));
    }
}

/// How a source whose body is over has ended.
fn ended(filter: &Filter, from: ContentType) -> Result<(), Failure> {
    match from.format() {
        Format::OpenMetrics if !filter.has_ended() => Err(Failure::NoEnd),
        _ => Ok(()),
    }
}

/// The format of the page: that of the application, or text where there are several.
fn settle(sources: &[Source]) -> ContentType {
    let targets = sources
        .iter()
        .filter(|source| source.origin == Origin::Application);
    let mut types = targets.filter_map(Source::content_type);
    let first = types.next().unwrap_or(ContentType::Text);
    match types.all(|other| other == first) {
        true => first,
        false => ContentType::Text,
    }
}

fn answer(
    mut pieces: Pieces,
    length: usize,
    format: ContentType,
    headers: &HeaderMap,
) -> Response<UnsyncBoxBody<Bytes, BoxError>> {
    let encoding = match negotiate::encoding(headers) {
        _ if length < LEAST_ENCODED => Encoding::Identity,
        encoding => encoding,
    };
    let name = match encoding {
        Encoding::Identity => None,
        Encoding::Gzip => Some("gzip"),
    };
    pieces.encode(Encoder::new(encoding));
    let mut response = Response::new(pieces.boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, format.header());
    headers.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
    if let Some(name) = name {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static(name));
    }
    response
}

type Spooling = Pin<Box<dyn Future<Output = Spool> + Send>>;

/// Runs all side by side; the results are in their order.
async fn all(mut running: Vec<Spooling>) -> Vec<Spool> {
    let mut done: Vec<_> = running.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (one, done) in running.iter_mut().zip(&mut done) {
            if done.is_none()
                && let Poll::Ready(spool) = one.as_mut().poll(context)
            {
                *done = Some(spool);
            }
        }
        match done.iter().all(Option::is_some) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests;
