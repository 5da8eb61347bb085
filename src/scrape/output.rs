//! Hands the page to the scraper while it is written.
//!
//! The body owns the future that writes and runs it when the scraper takes more: nothing is written
//! ahead, and nothing runs once the scraper has gone. Where writing fails, the response is aborted.

use std::future::Future;
use std::io::Write;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http_body::{Body, Frame};
use tokio::sync::mpsc;

use crate::lifecycle::BoxError;

/// Smaller runs of lines are copied together.
const SMALL: usize = 4 << 10;
/// How much is copied together before it is sent.
const PIECE: usize = 32 << 10;

/// Where the page is written.
pub(super) struct Output {
    gzip: Option<GzEncoder<Vec<u8>>>,
    pending: Vec<u8>,
    ready: Vec<Bytes>,
    pieces: mpsc::Sender<Bytes>,
}

impl Output {
    /// Writes part of a chunk, without a copy if it is large.
    pub(super) fn pass(&mut self, chunk: &Bytes, part: Range<usize>) {
        if self.gzip.is_none() && part.len() >= SMALL {
            self.flush();
            self.ready.push(chunk.slice(part));
        } else {
            self.write(&chunk[part]);
        }
    }

    pub(super) fn write(&mut self, lines: &[u8]) {
        let pending = match &mut self.gzip {
            Some(gzip) => {
                // A vector takes everything.
                let _ = gzip.write_all(lines);
                gzip.get_mut()
            }
            None => {
                self.pending.extend_from_slice(lines);
                &mut self.pending
            }
        };
        if pending.len() >= PIECE {
            let piece = std::mem::take(pending);
            self.ready.push(piece.into());
        }
    }

    /// Sends what there is of it, and waits until the scraper wants more.
    pub(super) async fn send(&mut self) {
        for piece in self.ready.drain(..) {
            // The receiver is dropped together with the future that writes.
            let _ = self.pieces.send(piece).await;
        }
    }

    /// Sends the rest.
    pub(super) async fn finish(mut self) -> Result<(), BoxError> {
        if let Some(gzip) = self.gzip.take() {
            self.pending = gzip.finish()?;
        }
        self.flush();
        self.send().await;
        Ok(())
    }

    fn flush(&mut self) {
        if !self.pending.is_empty() {
            let piece = std::mem::take(&mut self.pending);
            self.ready.push(piece.into());
        }
    }
}

type Writing = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

/// A page on its way to the scraper.
pub(super) struct Written {
    writing: Option<Writing>,
    failure: Option<BoxError>,
    pieces: mpsc::Receiver<Bytes>,
}

impl Written {
    /// `write` makes the future that writes the page.
    pub(super) fn new<F>(is_gzip: bool, write: impl FnOnce(Output) -> F) -> Self
    where
        F: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (sender, pieces) = mpsc::channel(1);
        let output = Output {
            gzip: is_gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast())),
            pending: Vec::new(),
            ready: Vec::new(),
            pieces: sender,
        };
        Self {
            writing: Some(Box::pin(write(output))),
            failure: None,
            pieces,
        }
    }
}

impl Body for Written {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(writing) = &mut self.writing
            && let Poll::Ready(result) = writing.as_mut().poll(context)
        {
            self.writing = None;
            self.failure = result.err();
        }
        let piece = std::task::ready!(self.pieces.poll_recv(context));
        let failure = || self.failure.take().map(Err);
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))).or_else(failure))
    }
}
