//! The bodies of the two streams a relay ties: what goes to istiod, and what goes to Envoy.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::mpsc;

use crate::metrics::Counter;

/// Frames between the relay and Envoy's socket: 256 KiB.
const FRAMES: usize = 16;

/// Requests on their way to istiod, each a gRPC frame. Ends when its sender is dropped.
#[derive(Debug)]
pub(crate) struct RequestQueue {
    queue: mpsc::UnboundedReceiver<Bytes>,
    /// Counts those that left.
    sent: Counter,
}

impl RequestQueue {
    pub(crate) fn new(queue: mpsc::UnboundedReceiver<Bytes>, sent: Counter) -> Self {
        Self { queue, sent }
    }
}

impl Body for RequestQueue {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let request = std::task::ready!(self.queue.poll_recv(context));
        Poll::Ready(request.map(|request| {
            self.sent.inc();
            Ok(Frame::data(request))
        }))
    }
}

/// Responses on their way to Envoy: bytes as they came, then the status.
#[derive(Debug)]
pub struct ResponseBody(Option<mpsc::Receiver<Frame<Bytes>>>);

impl ResponseBody {
    /// A body fed through a channel of a few frames, what is written to the socket at once: further
    /// bytes are taken from istiod only when Envoy has taken these.
    pub(crate) fn channel() -> (mpsc::Sender<Frame<Bytes>>, Self) {
        let (sender, receiver) = mpsc::channel(FRAMES);
        (sender, Self(Some(receiver)))
    }

    /// No bytes, for an answer that is all in its head.
    pub(crate) const fn empty() -> Self {
        Self(None)
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.0 {
            Some(receiver) => receiver.poll_recv(context).map(|frame| frame.map(Ok)),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}
