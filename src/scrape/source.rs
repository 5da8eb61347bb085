//! Reads one page to merge, from the request to the end of its body.
//!
//! Nothing is read ahead: the rest of a page waits in the socket, and then in the source. Gzip is decoded a
//! little at a time.

use std::io::{self, Write};
use std::mem;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use futures_util::future::BoxFuture;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Request, Response, StatusCode};
use tokio::task::coop::consume_budget;

use super::format::{Format, content_type};
use super::negotiate::{Coding, coding};
use super::targets::Target;
use super::tls;
use crate::net::http_client::{self, Body, Client};
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::with_causes;

/// The maximum number of gzip bytes that are decoded at a time, because they may become a thousand times as
/// many.
const MAX_ENCODED: usize = 512;
/// The maximum number of bytes that are decoded of a page.
const MAX_DECODED: u64 = 64 << 20;

/// The remedy of failures of Envoy, which has no annotations that could be wrong.
const ENVOY_REMEDY: &str = "see Envoy's log; it answers 400 if it cannot use the query of the scrape (`params` of the \
    scrape job)";

/// Code and text of the reason why a page has ended early.
type Failure = (Code, String);

/// The kind of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Envoy,
    Application,
}

impl Origin {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Envoy => "envoy",
            Self::Application => "application",
        }
    }

    /// Returns the strictest format that the source can write.
    pub(super) fn format(self) -> Format {
        match self {
            Self::Envoy => Format::Text,
            Self::Application => Format::OpenMetrics,
        }
    }
}

/// A page that is requested and read.
pub(super) struct Source {
    pub origin: Origin,
    /// Host, port and path of the page, for log lines.
    address: String,
    response: BoxFuture<'static, Result<Response<Body>, Failure>>,
    /// None until the head of the response has arrived.
    pub content_type: Option<&'static str>,
    /// None before the head and after the end.
    body: Option<Body>,
    gzip: Option<MultiGzDecoder<Vec<u8>>>,
    /// Bytes that have arrived and are not decoded yet.
    encoded: Bytes,
    /// The maximum number of decoded bytes that are read of the page, and the number that is left of it.
    limit: u64,
    remaining: u64,
    /// The problem of a page that has ended early.
    pub failure: Option<Problem>,
}

impl Source {
    /// Prepares the request for a page, of which up to `limit` bytes are read. [`Self::read_head`] sends it. The
    /// query of the path is not logged, as it may hold a secret. The error of `client` says why there is none.
    pub(super) fn new(
        client: BoxFuture<'static, Result<Client, tls::Error>>,
        headers: HeaderMap,
        origin: Origin,
        Target { port, path, tls }: &Target,
        limit: u64,
    ) -> Self {
        let mut request = Request::new(Bytes::new());
        let scheme = if tls.is_some() { "https" } else { "http" };
        let uri = format!("{scheme}://localhost:{port}{path}");
        // Paths are checked with the configuration, and queries by the status port.
        *request.uri_mut() = uri.parse().unwrap_or_default();
        *request.headers_mut() = headers;
        let response =
            async move { client.await.map_err(unusable)?.send(request).await.map_err(broken) };
        let path = path.split_once('?').map_or(path.as_str(), |(path, _)| path);
        Self {
            origin,
            address: format!("localhost:{port}{path}"),
            response: Box::pin(response),
            content_type: None,
            body: None,
            gzip: None,
            encoded: Bytes::new(),
            limit,
            remaining: 0,
            failure: None,
        }
    }

    /// Returns true once the head of a response that can be read has arrived.
    pub(super) fn has_head(&self) -> bool {
        self.content_type.is_some()
    }

    pub(super) fn format(&self) -> Format {
        self.content_type.map(Format::from_content_type).unwrap_or_default()
    }

    /// Ends the page early, for the reason given. The caller logs and counts it.
    pub(super) fn fail(&mut self, code: Code, found: impl ToString) {
        let origin = self.origin.name();
        let subject = format!("failed scraping {origin} metrics from {}", self.address);
        let problem = Problem::new(code, subject, found);
        self.failure = Some(match self.origin {
            Origin::Envoy if code != Code::ScrapeLate => problem.remedy(ENVOY_REMEDY),
            _ => problem,
        });
    }

    /// Sends the request and waits for the head of the response, unless it was read or has failed already. Sets
    /// `content_type`, or `failure`. A call that is dropped can be repeated.
    pub(super) async fn read_head(&mut self) {
        if self.has_head() || self.failure.is_some() {
            return;
        }
        let response = self.response.as_mut().await;
        if let Err((code, found)) = response.and_then(|response| self.take_response(response)) {
            self.fail(code, found);
        }
    }

    /// Takes over a response. Fails if its status is not 200, or if its body is in an unknown encoding.
    fn take_response(&mut self, response: Response<Body>) -> Result<(), Failure> {
        let (head, body) = response.into_parts();
        if head.status != StatusCode::OK {
            return Err((Code::ScrapeFailed, format!("status {}, expected 200", head.status)));
        }
        match coding(&head.headers) {
            Coding::Plain => {}
            Coding::Gzip => {
                self.gzip = Some(MultiGzDecoder::new(Vec::new()));
                self.limit = self.limit.min(MAX_DECODED);
            }
            Coding::Other(found) => {
                return Err(invalid(format!("encoding {found:?}, expected gzip or none")));
            }
        }
        self.remaining = self.limit;
        self.content_type = Some(content_type(head.headers.get(CONTENT_TYPE)));
        self.body = Some(body);
        Ok(())
    }

    /// Returns the next chunk of the page, which may be empty. None is its end, or follows a failure. Sets
    /// `failure` if the page breaks off or exceeds its limit.
    pub(super) async fn chunk(&mut self) -> Option<Bytes> {
        if self.failure.is_some() {
            return None;
        }
        let mut chunk = match self.read().await {
            Ok(chunk) => chunk?,
            Err((code, found)) => {
                self.fail(code, found);
                return None;
            }
        };
        if self.remaining == self.limit
            && self.format() != Format::Protobuf
            && chunk.trim_ascii_start().starts_with(b"<")
        {
            let (code, found) = invalid("the page is HTML, expected metrics".to_owned());
            self.fail(code, found);
            return None;
        }
        if chunk.len() as u64 > self.remaining {
            // It is less than the length, so it fits into a usize.
            chunk.truncate(self.remaining as usize);
            let (code, found) = invalid(format!("the page is cut off after {} bytes", self.limit));
            self.fail(code, found);
        }
        self.remaining -= chunk.len() as u64;
        Some(chunk)
    }

    async fn read(&mut self) -> Result<Option<Bytes>, Failure> {
        let Some(body) = &mut self.body else {
            return Ok(None);
        };
        if self.encoded.is_empty() {
            match body.chunk().await.transpose().map_err(broken)? {
                Some(chunk) => self.encoded = chunk,
                None => self.body = None,
            }
        }
        let Some(gzip) = &mut self.gzip else {
            return Ok(Some(mem::take(&mut self.encoded)));
        };
        let encoded = self.encoded.split_to(self.encoded.len().min(MAX_ENCODED));
        gzip.write_all(&encoded).map_err(not_gzip)?;
        if self.body.is_none() {
            gzip.try_finish().map_err(not_gzip)?;
        }
        // Bytes that have arrived are decoded without a wait for the socket, so other tasks get their turn here.
        consume_budget().await;
        Ok(Some(mem::take(gzip.get_mut()).into()))
    }
}

fn broken(error: http_client::Error) -> Failure {
    (Code::ScrapeFailed, with_causes(&error))
}

fn unusable(error: tls::Error) -> Failure {
    (Code::ScrapeTlsUnusable, with_causes(&error))
}

fn not_gzip(error: io::Error) -> Failure {
    invalid(format!("invalid gzip body: {error}"))
}

fn invalid(found: String) -> Failure {
    (Code::ScrapePageInvalid, found)
}
