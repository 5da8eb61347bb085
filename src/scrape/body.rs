//! The page as a body: written while it is read.
//!
//! The body owns the future that writes and runs it when the scraper takes more, so nothing is
//! written ahead, nothing runs once the scraper has gone, and no task is needed.
//!
//! Does not know what is written.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::mpsc;

use super::encode::Encoder;
use super::page::Page;
use crate::lifecycle::BoxError;

/// How much is written before it is handed on.
const PIECE: usize = 32 << 10;

type Writing = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The page, and the way to the scraper.
pub(super) struct Output {
    pub page: Page,
    pieces: mpsc::Sender<Bytes>,
}

impl Output {
    /// Hands on what has been written, if it is worth it, and waits until it is wanted.
    pub(super) async fn offer(&mut self) {
        if self.page.len() >= PIECE {
            self.send().await;
        }
    }

    /// Hands on the rest.
    pub(super) async fn finish(mut self) {
        self.page.end();
        self.send().await;
    }

    async fn send(&mut self) {
        let mut rest = Bytes::from(self.page.take());
        while !rest.is_empty() {
            let piece = rest.split_to(rest.len().min(2 * PIECE));
            // Who takes pieces drops the writer first.
            let _ = self.pieces.send(piece).await;
        }
    }
}

/// A page on its way to the scraper.
pub(super) struct Pieces {
    writing: Option<Writing>,
    pieces: mpsc::Receiver<Bytes>,
    /// Taken already, to come first.
    first: Option<Bytes>,
    encoder: Option<Encoder>,
}

impl Pieces {
    /// `write` makes the future that writes the page.
    pub(super) fn new<F>(page: Page, write: impl FnOnce(Output) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, pieces) = mpsc::channel(1);
        let output = Output {
            page,
            pieces: sender,
        };
        Self {
            writing: Some(Box::pin(write(output))),
            pieces,
            first: None,
            encoder: None,
        }
    }

    /// Waits for the first piece, which stays. Returns how long it is.
    pub(super) async fn begin(&mut self) -> usize {
        self.first = std::future::poll_fn(|context| self.poll_piece(context)).await;
        self.first.as_ref().map_or(0, Bytes::len)
    }

    pub(super) fn encode(&mut self, encoder: Encoder) {
        self.encoder = Some(encoder);
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(first));
        }
        if let Some(writing) = &mut self.writing
            && writing.as_mut().poll(context).is_ready()
        {
            self.writing = None;
        }
        self.pieces.poll_recv(context)
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            let piece = ready!(self.poll_piece(context));
            let Some(encoder) = &mut self.encoder else {
                return Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))));
            };
            let is_end = piece.is_none();
            let encoded = match piece {
                Some(piece) => encoder.piece(piece),
                None => encoder.finish(),
            };
            if is_end {
                self.encoder = None;
            }
            match encoded {
                Ok(encoded) if encoded.is_empty() => {}
                Ok(encoded) => return Poll::Ready(Some(Ok(Frame::data(encoded)))),
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
        }
    }
}
