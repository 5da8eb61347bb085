//! One page to merge, from the request to the end of its body.
//!
//! The beginning of a body can be set aside while another source has its turn; what does not fit stays
//! in the socket. Gzip is decoded a little at a time.

use std::future::{Future, poll_fn};
use std::io::{self, Write};
use std::mem;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};
use tokio::time::{Instant, timeout_at};

use super::lines::Format;
use super::negotiate::content_type;
use crate::http_client::{self, Body};

/// How much encoded data is decoded at a time: it may become a thousand times as much.
const ENCODED: usize = 512;
/// How much decoded data is handed on together.
const DECODED: usize = 32 << 10;
/// Most that is decoded of a page.
const MAX_DECODED: u64 = 64 << 20;

/// Why a source is not on the page, or not all of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Fetch(#[from] http_client::Error),
    #[error("found status {0}, expected 200")]
    Status(StatusCode),
    #[error("found the encoding {0:?}, expected gzip or none")]
    Encoding(HeaderValue),
    #[error("the page was not there in time")]
    Late,
    #[error("the page was cut off after {0} bytes, the most that is read")]
    TooLarge(u64),
    #[error("the page is not the gzip it claims to be")]
    Gzip(#[source] io::Error),
    #[error("the page has no # EOF at its end")]
    NoEnd,
}

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

pub(super) type Asking =
    Pin<Box<dyn Future<Output = Result<Response<Body>, http_client::Error>> + Send>>;

pub(super) struct Source {
    pub origin: Origin,
    /// Where the page is, for people.
    pub address: String,
    /// None until the head of the answer has arrived.
    pub content_type: Option<&'static str>,
    /// Why the page has ended early.
    pub failure: Option<Failure>,
    state: State,
    aside: Vec<u8>,
    room: usize,
    /// Most that is read.
    limit: u64,
    read: u64,
}

enum State {
    Asking(Asking),
    Reading(Box<Body>, Option<Box<Decoder>>),
    Ended,
}

struct Decoder {
    gzip: MultiGzDecoder<Vec<u8>>,
    encoded: Bytes,
}

impl Source {
    /// `room` is how much may be set aside, and `limit` how much is read. The query of the path is not
    /// logged, as it may hold a secret.
    pub(super) fn new(
        origin: Origin,
        port: u16,
        path: &str,
        asking: Asking,
        room: usize,
        limit: u64,
    ) -> Self {
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        Self {
            origin,
            address: format!("localhost:{port}{path}"),
            content_type: None,
            failure: None,
            state: State::Asking(asking),
            aside: Vec::new(),
            room,
            limit,
            read: 0,
        }
    }

    pub(super) fn format(&self) -> Format {
        self.content_type.map_or(Format::Text, Format::of)
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// Whether it waits for its turn: all of it is there, or no more can be set aside.
    fn is_settled(&self) -> bool {
        self.has_ended() || self.aside.len() >= self.room
    }

    /// The order of turns: ended sources come first, then the others, and of these Envoy's page last, as
    /// it is the largest: the series of the last one are not remembered.
    pub(super) fn turn(&self) -> (bool, bool) {
        let is_full = !self.has_ended();
        (is_full, is_full && self.origin == Origin::Envoy)
    }

    pub(super) fn fail(&mut self, failure: Failure) {
        self.failure = Some(failure);
        self.state = State::Ended;
    }

    /// Sets aside what there is, as far as there is room.
    fn set_aside(&mut self, context: &mut Context<'_>) {
        while self.aside.len() < self.room
            && let Poll::Ready(Some(chunk)) = self.poll_read(context)
        {
            self.aside.extend_from_slice(&chunk);
        }
    }

    /// The next chunk of the page, what was set aside first. None is its end.
    pub(super) fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        match self.aside.is_empty() {
            true => self.poll_read(context),
            false => Poll::Ready(Some(mem::take(&mut self.aside).into())),
        }
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            let read = match &mut self.state {
                State::Asking(asking) => {
                    let answer = ready!(asking.as_mut().poll(context));
                    match answer.map_err(Failure::from).and_then(|a| self.begin(a)) {
                        Ok(()) => continue,
                        Err(failure) => Err(failure),
                    }
                }
                State::Reading(body, decoder) => ready!(read(body, decoder, context)),
                State::Ended => return Poll::Ready(None),
            };
            match read {
                Ok(Some(chunk)) => return Poll::Ready(Some(self.limited(chunk))),
                Ok(None) => self.state = State::Ended,
                Err(failure) => self.fail(failure),
            }
        }
    }

    fn begin(&mut self, answer: Response<Body>) -> Result<(), Failure> {
        let (head, body) = answer.into_parts();
        if head.status != StatusCode::OK {
            return Err(Failure::Status(head.status));
        }
        let decoder = match head.headers.get(CONTENT_ENCODING) {
            Some(found) if found == "gzip" || found == "x-gzip" => Some(Box::default()),
            Some(found) if found != "identity" => return Err(Failure::Encoding(found.clone())),
            _ => None,
        };
        if decoder.is_some() {
            self.limit = self.limit.min(MAX_DECODED);
        }
        self.content_type = Some(content_type(head.headers.get(CONTENT_TYPE)));
        self.state = State::Reading(Box::new(body), decoder);
        Ok(())
    }

    fn limited(&mut self, mut chunk: Bytes) -> Bytes {
        let left = self.limit - self.read;
        if chunk.len() as u64 > left {
            self.fail(Failure::TooLarge(self.limit));
            // Less than the length, which is a size.
            chunk.truncate(left as usize);
        }
        self.read += chunk.len() as u64;
        chunk
    }
}

fn read(
    body: &mut Body,
    decoder: &mut Option<Box<Decoder>>,
    context: &mut Context<'_>,
) -> Poll<Result<Option<Bytes>, Failure>> {
    loop {
        if let Some(decoder) = decoder
            && let Some(decoded) = decoder.decoded().map_err(Failure::Gzip)?
        {
            return Poll::Ready(Ok(Some(decoded)));
        }
        let chunk = ready!(pin!(body.chunk()).poll(context)).transpose()?;
        match (chunk, &mut *decoder) {
            (Some(chunk), Some(decoder)) => decoder.encoded = chunk,
            (None, Some(decoder)) => {
                let rest = decoder.finish().map_err(Failure::Gzip)?;
                return Poll::Ready(Ok(rest));
            }
            (chunk, None) => return Poll::Ready(Ok(chunk)),
        }
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            gzip: MultiGzDecoder::new(Vec::new()),
            encoded: Bytes::new(),
        }
    }
}

impl Decoder {
    fn decoded(&mut self) -> io::Result<Option<Bytes>> {
        while !self.encoded.is_empty() && self.gzip.get_ref().len() < DECODED {
            let part = self.encoded.split_to(ENCODED.min(self.encoded.len()));
            self.gzip.write_all(&part)?;
        }
        Ok(self.take())
    }

    /// What is decoded after the end of the encoded data; None after that.
    fn finish(&mut self) -> io::Result<Option<Bytes>> {
        self.gzip.try_finish()?;
        Ok(self.take())
    }

    fn take(&mut self) -> Option<Bytes> {
        let decoded = mem::take(self.gzip.get_mut());
        (!decoded.is_empty()).then(|| decoded.into())
    }
}

pub(super) fn set_all_aside(sources: &mut [Source], context: &mut Context<'_>) {
    for source in sources {
        source.set_aside(context);
    }
}

/// Sets aside until all sources wait for their turn, or until the time is over.
pub(super) async fn set_aside(sources: &mut [Source], until: Instant) {
    let done = poll_fn(|context| {
        set_all_aside(sources, context);
        match sources.iter().all(Source::is_settled) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    });
    // Sources that are late have their turn later.
    let _ = timeout_at(until, done).await;
}
