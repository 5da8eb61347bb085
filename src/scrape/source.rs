//! Reads one page to merge, from the request to the end of its body.
//!
//! [`settled`] and [`Source::set_aside`] buffer the beginning of a body while another source has its turn; the
//! rest waits in the socket. [`Source::poll_chunk`] reads the page. Gzip is decoded a little at a time.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, Write};
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use flate2::write::MultiGzDecoder;
use futures_util::stream::{Stream, StreamExt};
use http::header::CONTENT_TYPE;
use http::{Response, StatusCode};
use tokio::sync::mpsc::Sender;

use super::format::{Format, TEXT_PAGE, content_type};
use super::negotiate::is_gzip;
use super::producer;
use crate::http_client::{self, Body};
use crate::lifecycle::with_causes;
use crate::problem::{Code, Problem, codes};

/// The most gzip data that is decoded at a time: it may become a thousand times as much.
const MAX_ENCODED: usize = 512;
/// The most that is taken at a time of the bytes that were set aside: they are copied into the page.
const MAX_PORTION: usize = 32 << 10;
/// The most that is decoded of a page.
const MAX_DECODED: u64 = 64 << 20;

/// Code and text of the reason why a page has ended early.
type Failure = (&'static Code, String);

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

/// Content type and bytes of a part of a page.
type Part = (&'static str, Bytes);

pub(super) struct Source {
    pub origin: Origin,
    /// Host, port and path of the page, for log lines.
    address: String,
    /// None until the head of the response has arrived.
    pub content_type: Option<&'static str>,
    /// The problem of a page that has ended early.
    pub failure: Option<Problem>,
    pub has_ended: bool,
    parts: Pin<Box<dyn Stream<Item = Result<Part, Failure>> + Send>>,
    aside: BytesMut,
    /// The most that is set aside, in bytes.
    room: usize,
}

impl Source {
    /// Sets aside up to `room` bytes and reads up to `limit`. The query of the path is not logged, as it may
    /// hold a secret.
    pub(super) fn new(
        origin: Origin,
        port: u16,
        path: &str,
        response: impl Future<Output = Result<Response<Body>, http_client::Error>> + Send + 'static,
        room: usize,
        limit: u64,
    ) -> Self {
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        Self {
            origin,
            address: format!("localhost:{port}{path}"),
            content_type: None,
            failure: None,
            has_ended: false,
            parts: Box::pin(producer::stream(move |parts| read(response, limit, parts))),
            aside: BytesMut::new(),
            room,
        }
    }

    pub(super) fn format(&self) -> Format {
        let format = self.content_type.map(Format::from_content_type);
        format.unwrap_or_default()
    }

    /// Returns the content type of the page. One of several pages is text if it is complete and lacks `# EOF`.
    pub(super) fn page_type(&self, is_alone: bool) -> Option<&'static str> {
        let is_complete = self.has_ended && self.failure.is_none();
        let has_end = self.aside.trim_ascii_end().ends_with(b"# EOF");
        if is_complete && !has_end && !is_alone {
            return self.content_type.and(Some(TEXT_PAGE));
        }
        self.content_type
    }

    /// Returns true if the source waits for its turn: it has ended, or no more of it can be set aside.
    fn is_settled(&self) -> bool {
        self.has_ended || self.aside.len() >= self.room
    }

    /// Returns the key by which turns are sorted: ended sources come first, then those with more than can be
    /// set aside. Of these, Envoy's page comes last, as it is the largest, and the series of the last source
    /// need not be remembered.
    fn turn(&self) -> (bool, bool) {
        let is_full = !self.has_ended;
        (is_full, is_full && self.origin == Origin::Envoy)
    }

    pub(super) fn fail(&mut self, code: &'static Code, found: impl ToString) {
        let (origin, address) = (self.origin.name(), &self.address);
        let subject = format!("failed scraping {origin} metrics from {address}");
        self.failure = Some(Problem::new(code, subject, found));
        self.has_ended = true;
    }

    /// Sets aside the bytes that have arrived, up to `room` or a chunk more.
    pub(super) fn set_aside(&mut self, context: &mut Context<'_>) {
        while self.aside.len() < self.room
            && let Poll::Ready(Some(chunk)) = self.poll_read(context)
        {
            self.aside.extend_from_slice(&chunk);
        }
    }

    /// Returns the next chunk of the page, first of the bytes that were set aside. None is its end.
    pub(super) fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.aside.is_empty() {
            return self.poll_read(context);
        }
        let length = self.aside.len().min(MAX_PORTION);
        Poll::Ready(Some(self.aside.split_to(length).freeze()))
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        while !self.has_ended {
            match ready!(self.parts.poll_next_unpin(context)) {
                Some(Ok((content_type, chunk))) => {
                    self.content_type = Some(content_type);
                    if !chunk.is_empty() {
                        return Poll::Ready(Some(chunk));
                    }
                }
                Some(Err((code, found))) => self.fail(code, found),
                None => self.has_ended = true,
            }
        }
        Poll::Ready(None)
    }
}

/// Sends the parts of a page. The first one is empty, and sent when the head of the response has arrived.
async fn read(
    response: impl Future<Output = Result<Response<Body>, http_client::Error>>,
    mut limit: u64,
    parts: Sender<Result<Part, Failure>>,
) -> Result<(), Failure> {
    let broken = |error: http_client::Error| (codes::SCRAPE_FAILED, with_causes(&error));
    let (head, mut body) = response.await.map_err(broken)?.into_parts();
    if head.status != StatusCode::OK {
        let found = format!("status {}, expected 200", head.status);
        return Err((codes::SCRAPE_FAILED, found));
    }
    let invalid = |found: String| (codes::SCRAPE_PAGE_INVALID, found);
    let encoding = |found| invalid(format!("encoding {found:?}, expected gzip or none"));
    let not_gzip = |error: io::Error| invalid(format!("invalid gzip body: {error}"));
    let mut gzip = None;
    if is_gzip(&head.headers).map_err(encoding)? {
        gzip = Some(MultiGzDecoder::new(Vec::new()));
        limit = limit.min(MAX_DECODED);
    }
    let content_type = content_type(head.headers.get(CONTENT_TYPE));
    let mut remaining = limit;
    let mut send = async |mut chunk: Bytes| {
        let is_too_large = chunk.len() as u64 > remaining;
        if is_too_large {
            // It is less than the length, so it fits into a usize.
            chunk.truncate(remaining as usize);
        }
        remaining -= chunk.len() as u64;
        // It fails only if the source was dropped, and this future with it.
        let _ = parts.send(Ok((content_type, chunk))).await;
        if is_too_large {
            return Err(invalid(format!("the page is cut off after {limit} bytes")));
        }
        Ok(())
    };
    send(Bytes::new()).await?;
    while let Some(chunk) = body.chunk().await.transpose().map_err(broken)? {
        let Some(gzip) = &mut gzip else {
            send(chunk).await?;
            continue;
        };
        for part in chunk.chunks(MAX_ENCODED) {
            gzip.write_all(part).map_err(not_gzip)?;
            send(mem::take(gzip.get_mut()).into()).await?;
        }
    }
    if let Some(mut gzip) = gzip {
        gzip.try_finish().map_err(not_gzip)?;
        send(mem::take(gzip.get_mut()).into()).await?;
    }
    Ok(())
}

/// Sets aside until a source waits for its turn, or `all` do. Returns the index of the one that comes first.
pub(super) async fn settled(sources: &mut VecDeque<Source>, all: bool) -> Option<usize> {
    poll_fn(|context| {
        for source in &mut *sources {
            source.set_aside(context);
        }
        let settled = (0..sources.len()).filter(|index| sources[*index].is_settled());
        let first = settled.clone().min_by_key(|index| sources[*index].turn());
        let count = settled.count();
        if count == sources.len() || count > 0 && !all {
            Poll::Ready(first)
        } else {
            Poll::Pending
        }
    })
    .await
}
