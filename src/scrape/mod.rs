//! Merges the metrics of the agent, Envoy and the application into one page.
//!
//! [`Scrape::page`] serves one scrape. It requests all sources at once. When the head of each response has arrived,
//! or half of the time is over, it decides the format of the merged page. Then it writes the metrics of the agent,
//! of the targets and of Envoy, in this order, each straight from its socket. A source has four times the time that
//! is reserved for each later source. A source whose head is late comes last.
//!
//! If the scraper reads protobuf and a source answers in it, the page is in protobuf, and the other sources are
//! converted. Envoy then comes first, as in pilot-agent.
//!
//! A source that fails is logged, counted and left out; if it breaks off, its complete lines stay. In OpenMetrics
//! the response is then aborted, because its end would mean that nothing is missing.
//!
//! No submodule imports from this file.

mod format;
mod lines;
mod metrics;
mod negotiate;
mod output;
mod protobuf;
mod sample;
mod seen;
mod source;
pub mod targets;
pub mod tls;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{FutureExt, join_all, ready};
use futures_util::stream::{self, StreamExt};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, VARY};
use http::{HeaderMap, HeaderValue, Response, StatusCode, request};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::sync::mpsc::{Sender, channel};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;

use crate::metrics::Registry;
use crate::net::http_client::{self, Client, Redirects};
use crate::problem::Code;
use crate::runtime::clock::{after, later};
use crate::runtime::duration::{rounded, scaled};
use crate::runtime::lifecycle::BoxError;
use format::{Format, PROTOBUF_PAGE, TEXT_PAGE};
pub use lines::Hidden;
use lines::Lines;
use metrics::Metrics;
use negotiate::{SCRAPED_BY_HEADER, TIMEOUT_HEADER};
use output::Output;
use protobuf::{Copier, Malformed};
use seen::Seen;
use source::{Origin, Source};
use targets::Target;

/// The largest share of a scrape's time in which the heads of all responses are awaited.
const HEAD_SHARE: f64 = 0.5;
/// The time that is reserved for each later source, relative to the time of the source that is read.
const RESERVE: f64 = 0.25;
/// The share of the scraper's timeout in which the page is made; the rest is for its transfer.
const PAGE_SHARE: f64 = 0.95;
/// The longest timeout that a scraper can set.
const MAX_TIMEOUT: Duration = Duration::from_secs(3600);

/// The failure of a source that answers in protobuf unasked.
const NOT_ACCEPTED: &str = "a page in protobuf, which the scraper does not accept";

/// The sources of the page, and the limits of a scrape.
#[derive(Clone, Debug)]
pub struct Config {
    /// The port of Envoy's metrics. None leaves them out.
    pub envoy_port: Option<u16>,
    /// The families of Envoy that are left out of the page.
    pub hidden: Vec<Hidden>,
    pub targets: Vec<Target>,
    /// The maximum number of bytes that are read of each application target, if there are several.
    pub limit: u64,
    /// The timeout of a scrape whose scraper does not send one.
    pub timeout: Duration,
}

/// Serves the merged page. Clones share connections and counters.
#[derive(Clone)]
#[allow(missing_debug_implementations)]
pub struct Scrape {
    config: Arc<Config>,
    registry: Registry,
    metrics: Metrics,
    client: Client,
    tls_clients: tls::Clients,
    /// The identifier of the scrapes of this agent.
    id: HeaderValue,
}

impl Scrape {
    pub fn new(config: Config, registry: Registry) -> Self {
        let client = http_client::Config {
            redirects: Redirects::Follow,
            keeps_connections: true,
            ..http_client::Config::default()
        };
        Self {
            config: Arc::new(config),
            metrics: Metrics::new(&registry),
            registry,
            client: Client::new(client),
            tls_clients: tls::Clients::default(),
            id: HeaderValue::from(fastrand::u64(..)),
        }
    }

    /// Responds to a scrape once the format of its page is decided; the body is written while the scraper reads it.
    /// Refuses a scrape that comes from this agent, and counts every other scrape. Sources that have failed by then
    /// are logged, counted and left out.
    pub async fn page(&self, request: request::Parts) -> Response<UnsyncBoxBody<Bytes, BoxError>> {
        if request.headers.get_all(SCRAPED_BY_HEADER).iter().any(|agent| *agent == self.id) {
            return refuse_self_scrape();
        }
        self.metrics.scrapes.inc();
        let begin = Instant::now();
        let time_limit = self.time_limit(&request.headers);
        let mut sources = self.sources(&request);
        let heads = join_all(sources.iter_mut().map(Source::read_head));
        let _ = timeout_at(later(begin, scaled(time_limit, HEAD_SHARE)), heads).await;
        // The counters on this page include the sources that have failed by now.
        sources.retain(|source| {
            self.metrics.report(source);
            source.failure.is_none()
        });
        let content_type = content_type(&sources, negotiate::accepts_protobuf(&request.headers));
        let format = Format::from_content_type(content_type);
        let has_protobuf = sources.iter().any(|source| source.format() == Format::Protobuf);
        let is_downgrade = has_protobuf && format != Format::Protobuf;
        self.metrics
            .formats
            .with([format.name(), if is_downgrade { "true" } else { "false" }])
            .inc();
        // A late source comes last, so it has all the time that the others leave.
        let comes_later =
            |source: &Source| format == Format::Protobuf && source.origin == Origin::Application;
        sources.sort_by_key(|source| (!source.has_head(), comes_later(source)));
        let is_gzip = negotiate::accepts_gzip(&request.headers);
        let page = Page {
            scrape: self.clone(),
            format,
            deadline: later(begin, time_limit),
            seen: Seen::default(),
            output: Output::new(is_gzip),
        };
        let (sender, chunks) = channel(1);
        // Reading the body drives the future that writes the page. Its error is the end of the stream.
        let error = page.write(sources, sender).into_stream();
        let error = error.filter_map(|written| ready(written.err().map(Err)));
        let frames = ReceiverStream::new(chunks).map(|chunk| Ok(Frame::data(chunk)));
        let mut response =
            Response::new(StreamBody::new(stream::select(frames, error)).boxed_unsync());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
        if is_gzip {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }

    /// Returns the time in which the page is made: the scraper's timeout less the time for the transfer. Logs a
    /// timeout that cannot be parsed, and takes the configured one instead.
    fn time_limit(&self, headers: &HeaderMap) -> Duration {
        let mut timeout = self.config.timeout;
        if let Some(header) = headers.get(&TIMEOUT_HEADER) {
            match header.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok()) {
                Some(seconds) if seconds > 0.0 => {
                    timeout = Duration::try_from_secs_f64(seconds).unwrap_or(MAX_TIMEOUT);
                }
                _ => {
                    let timeout = rounded(timeout);
                    tracing::warn!(
                        "failed to parse timeout header {TIMEOUT_HEADER}: {header:?}, expected seconds; {timeout} is used"
                    );
                }
            }
        }
        scaled(timeout.min(MAX_TIMEOUT), PAGE_SHARE)
    }

    /// Prepares the requests to the targets and to Envoy, in the order of the page: Envoy's metrics are the most,
    /// and the series of the final source need not be remembered. [`Source::read_head`] sends each request.
    fn sources(&self, scrape: &request::Parts) -> Vec<Source> {
        let targets = &self.config.targets;
        let limit = match targets.len() {
            1 => u64::MAX,
            _ => self.config.limit,
        };
        let headers = &scrape.headers;
        let mut sources: Vec<_> = targets
            .iter()
            .map(|target| self.source(Origin::Application, headers, target, limit))
            .collect();
        if let Some(port) = self.config.envoy_port {
            let mut path = "/stats/prometheus".to_owned();
            if let Some(query) = scrape.uri.query() {
                path += &negotiate::envoy_query(query, headers);
            }
            let target = Target { port, path, tls: None };
            sources.push(self.source(Origin::Envoy, headers, &target, u64::MAX));
        }
        sources
    }

    fn source(&self, origin: Origin, headers: &HeaderMap, target: &Target, limit: u64) -> Source {
        let client = match target.tls.clone() {
            Some(files) => self.tls_clients.clone().of(target.port, files).boxed(),
            None => ready(Ok(self.client.clone())).boxed(),
        };
        let headers = negotiate::source_headers(origin.format(), headers, &self.id);
        Source::new(client, headers, origin, target, limit)
    }
}

/// A page that is written while the scraper reads it.
struct Page {
    scrape: Scrape,
    format: Format,
    deadline: Instant,
    seen: Seen,
    output: Output,
}

impl Page {
    /// Sends the page in chunks: the metrics of the agent, then of each source. An error aborts the response. A
    /// chunk that cannot be sent is ignored: the response was dropped then, and this future with it.
    async fn write(mut self, sources: Vec<Source>, chunks: Sender<Bytes>) -> Result<(), BoxError> {
        let mut sources = sources.into_iter().peekable();
        let is_protobuf = self.format == Format::Protobuf;
        let precedes =
            |source: &Source| is_protobuf && source.origin == Origin::Envoy && source.has_head();
        if let Some(envoy) = sources.next_if(precedes) {
            self.write_source(envoy, sources.len() + 1, &chunks).await?;
        }
        self.seen.begin_source(sources.len() == 0);
        let agent = self.scrape.registry.render();
        let mut lines = Lines::new(Format::Text, self.format, Vec::new());
        lines.push(agent.as_bytes(), &mut self.seen, &mut self.output);
        lines.finish(true, &mut self.seen, &mut self.output);
        while let Some(source) = sources.next() {
            self.write_source(source, sources.len(), &chunks).await?;
        }
        if self.format == Format::OpenMetrics {
            self.output.write(b"# EOF\n");
        }
        let _ = chunks.send(self.output.finish()?).await;
        Ok(())
    }

    /// Writes a source, in its share of the time that is left for it and for the later sources, whose number is
    /// `later_sources`. Fails if the response has to be aborted. Logs and counts a failure of the source.
    ///
    /// The share includes the time in which the scraper does not take a chunk, so a slow scraper can make a source
    /// fail with "timed out".
    async fn write_source(
        &mut self,
        mut source: Source,
        later_sources: usize,
        chunks: &Sender<Bytes>,
    ) -> Result<(), BoxError> {
        let Scrape { config, metrics, .. } = &self.scrape;
        self.seen.begin_source(later_sources == 0);
        let left = self.deadline.duration_since(Instant::now());
        let until = after(scaled(left, 1.0 / (1.0 + RESERVE * later_sources as f64)));
        let mut is_late = timeout_at(until, source.read_head()).await.is_err();
        let hidden = match source.origin {
            Origin::Envoy => config.hidden.clone(),
            Origin::Application => Vec::new(),
        };
        let mut reader = match source.format() {
            Format::Protobuf => Reader::Protobuf(Copier::new(hidden)),
            format => Reader::Text(Lines::new(format, self.format, hidden)),
        };
        if source.format() == Format::Protobuf && self.format != Format::Protobuf {
            source.fail(Code::ScrapePageInvalid, NOT_ACCEPTED);
        }
        while !is_late {
            if let Some(chunk) = self.output.take_ready() {
                let _ = chunks.send(chunk).await;
            }
            match timeout_at(until, source.chunk()).await {
                Ok(Some(chunk)) => {
                    if let Err(error) = reader.push(&chunk, &mut self.seen, &mut self.output) {
                        source.fail(Code::ScrapePageInvalid, error);
                    }
                }
                Ok(None) => break,
                Err(_) => is_late = true,
            }
            // A page whose next chunk is always ready never meets the timer.
            is_late |= Instant::now() >= until;
        }
        if is_late {
            source.fail(Code::ScrapeLate, "timed out");
        }
        let is_complete = source.failure.is_none();
        if let Err(error) = reader.finish(is_complete, &mut self.seen, &mut self.output)
            && is_complete
        {
            source.fail(Code::ScrapePageInvalid, error);
        }
        let (duplicates, malformed) = reader.left_out();
        metrics.duplicates.with([source.origin.name()]).add(duplicates);
        metrics.malformed.with([source.origin.name()]).add(malformed);
        metrics.report(&source);
        if source.failure.is_some() && source.has_head() && self.format == Format::OpenMetrics {
            return Err("a source broke off".into());
        }
        Ok(())
    }
}

/// Reads the page of a source.
enum Reader {
    Text(Lines),
    Protobuf(Copier),
}

impl Reader {
    fn push(
        &mut self,
        chunk: &[u8],
        seen: &mut Seen,
        output: &mut Output,
    ) -> Result<(), Malformed> {
        match self {
            Self::Text(lines) => lines.push(chunk, seen, output),
            Self::Protobuf(copier) => copier.push(chunk, seen, output)?,
        }
        Ok(())
    }

    fn finish(
        &mut self,
        is_complete: bool,
        seen: &mut Seen,
        output: &mut Output,
    ) -> Result<(), Malformed> {
        match self {
            Self::Text(lines) => lines.finish(is_complete, seen, output),
            Self::Protobuf(copier) => copier.finish(output)?,
        }
        Ok(())
    }

    /// Returns the numbers of duplicates and of malformed lines or metrics that were left out.
    fn left_out(&self) -> (u64, u64) {
        match self {
            Self::Text(lines) => (lines.duplicates, lines.malformed),
            Self::Protobuf(copier) => (copier.duplicates, copier.malformed),
        }
    }
}

/// Refuses a scrape by this agent, because each such scrape would lead to another one.
fn refuse_self_scrape() -> Response<UnsyncBoxBody<Bytes, BoxError>> {
    let why = "this agent scrapes itself: a target is, or redirects to, its own page\n";
    let mut response = Response::new(Full::from(why).map_err(Into::into).boxed_unsync());
    *response.status_mut() = StatusCode::LOOP_DETECTED;
    response
}

/// Returns the content type of the merged page: protobuf if the scraper accepts it and a source has it or is late, as
/// only this page can hold its metrics then. Else the type that all application pages whose heads have arrived
/// share, or text if they differ or there is none.
fn content_type(sources: &[Source], accepts_protobuf: bool) -> &'static str {
    let may_have_protobuf =
        |source: &Source| source.content_type.is_none_or(|kind| kind == PROTOBUF_PAGE);
    if accepts_protobuf && sources.iter().any(may_have_protobuf) {
        return PROTOBUF_PAGE;
    }
    let mut types = sources
        .iter()
        .filter(|source| source.origin == Origin::Application)
        .filter_map(|source| source.content_type.filter(|kind| *kind != PROTOBUF_PAGE));
    match types.next() {
        Some(first) if types.all(|other| other == first) => first,
        _ => TEXT_PAGE,
    }
}

#[cfg(test)]
mod tests;
