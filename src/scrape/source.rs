//! One page to merge, from the request to the end of its body.
//!
//! The beginning of a body can be set aside while another source has its turn; what does not fit stays
//! in the socket. Gzip is decoded a little at a time.

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

use super::lines::Format;
use super::negotiate::{TEXT_PAGE, content_type, is_gzip};
use super::sent_by;
use crate::http_client::{self, Body};
use crate::lifecycle::with_causes;
use crate::problem::{Code, Problem, codes};

/// How much encoded data is decoded at a time: it may become a thousand times as much.
const ENCODED: usize = 512;
/// How much of what was set aside is taken at a time: it is copied into the page.
const PORTION: usize = 32 << 10;
/// Most that is decoded of a page.
const MAX_DECODED: u64 = 64 << 20;

/// Why a source is not on the page, or not all of it.
pub(super) type Failure = (&'static Code, String);

/// Where a part of the page comes from.
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
}

/// A portion of a page, with the type of its content.
type Part = (&'static str, Bytes);

pub(super) struct Source {
    pub origin: Origin,
    /// Where the page is, for people.
    pub address: String,
    /// None until the head of the answer has arrived.
    pub content_type: Option<&'static str>,
    /// Why the page has ended early.
    pub failure: Option<Failure>,
    pub has_ended: bool,
    parts: Pin<Box<dyn Stream<Item = Result<Part, Failure>> + Send>>,
    aside: BytesMut,
    room: usize,
}

impl Source {
    /// `room` is how much may be set aside, and `limit` how much is read. The query of the path is not
    /// logged, as it may hold a secret.
    pub(super) fn new(
        origin: Origin,
        port: u16,
        path: &str,
        asking: impl Future<Output = Result<Response<Body>, http_client::Error>> + Send + 'static,
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
            parts: Box::pin(sent_by(move |parts| read(asking, limit, parts))),
            aside: BytesMut::new(),
            room,
        }
    }

    pub(super) fn format(&self) -> Format {
        self.content_type.map_or(Format::Text, Format::of)
    }

    /// The type of the page. One of several pages is text if it is complete and lacks `# EOF`.
    pub(super) fn page_type(&self, is_alone: bool) -> Option<&'static str> {
        let has_end = self.aside.trim_ascii_end().ends_with(b"# EOF");
        let is_whole = self.has_ended && self.failure.is_none();
        let text = self.content_type.map(|_| TEXT_PAGE);
        text.filter(|_| is_whole && !has_end && !is_alone)
            .or(self.content_type)
    }

    /// Whether it waits for its turn: all of it is there, or no more can be set aside.
    fn is_settled(&self) -> bool {
        self.has_ended || self.aside.len() >= self.room
    }

    /// The order of turns: ended sources come first, then those with more than can be set aside, and of
    /// these Envoy's page last, as it is the largest: the series of the last one are not remembered.
    fn turn(&self) -> (bool, bool) {
        let is_full = !self.has_ended;
        (is_full, is_full && self.origin == Origin::Envoy)
    }

    pub(super) fn fail(&mut self, code: &'static Code, found: impl ToString) {
        self.failure = Some((code, found.to_string()));
        self.has_ended = true;
    }

    /// The problem of a page that has ended early.
    pub(super) fn problem(&self) -> Option<Problem> {
        let (code, found) = self.failure.as_ref()?;
        let (origin, address) = (self.origin.name(), &self.address);
        let subject = format!("failed scraping {origin} metrics from {address}");
        Some(Problem::new(code, subject, found))
    }

    /// Sets aside what there is, as far as there is room.
    pub(super) fn set_aside(&mut self, context: &mut Context<'_>) {
        while self.aside.len() < self.room
            && let Poll::Ready(Some(chunk)) = self.poll_read(context)
        {
            self.aside.extend_from_slice(&chunk);
        }
    }

    /// The next chunk of the page, what was set aside first. None is its end.
    pub(super) fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        match self.aside.len().min(PORTION) {
            0 => self.poll_read(context),
            length => Poll::Ready(Some(self.aside.split_to(length).freeze())),
        }
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

/// Sends a page, first an empty part once its head has come.
async fn read(
    asking: impl Future<Output = Result<Response<Body>, http_client::Error>>,
    mut limit: u64,
    parts: Sender<Result<Part, Failure>>,
) -> Result<(), Failure> {
    let broken = |error: http_client::Error| (codes::SCRAPE_FAILED, with_causes(&error));
    let (head, mut body) = asking.await.map_err(broken)?.into_parts();
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
    let mut left = limit;
    let mut send = async |mut chunk: Bytes| {
        let is_too_large = chunk.len() as u64 > left;
        if is_too_large {
            // Less than the length, which is a size.
            chunk.truncate(left as usize);
        }
        left -= chunk.len() as u64;
        // Who receives parts also polls this.
        let _ = parts.send(Ok((content_type, chunk))).await;
        match is_too_large {
            true => Err(invalid(format!("the page is cut off after {limit} bytes"))),
            false => Ok(()),
        }
    };
    send(Bytes::new()).await?;
    while let Some(chunk) = body.chunk().await.transpose().map_err(broken)? {
        let Some(gzip) = &mut gzip else {
            send(chunk).await?;
            continue;
        };
        for part in chunk.chunks(ENCODED) {
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

/// Sets aside until a source waits for its turn, or `all` do. Returns the place of the one that comes
/// first.
pub(super) async fn settled(sources: &mut VecDeque<Source>, all: bool) -> Option<usize> {
    poll_fn(|context| {
        for source in &mut *sources {
            source.set_aside(context);
        }
        let settled = (0..sources.len()).filter(|index| sources[*index].is_settled());
        let first = settled.clone().min_by_key(|index| sources[*index].turn());
        match settled.count() {
            count if count == sources.len() || count > 0 && !all => Poll::Ready(first),
            _ => Poll::Pending,
        }
    })
    .await
}
