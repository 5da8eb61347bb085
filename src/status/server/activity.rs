//! What a connection is doing, and how long it may.
//!
//! A connection is silent, in the middle of a request's head, or being answered. The stream tells of
//! bytes that arrive, the server of requests and answers.
//!
//! Does not close anything.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// How long the head of a request may take, the first one from the connection's beginning.
pub(super) const HEAD: Duration = Duration::from_secs(10);
/// Longer than the pause between two probes or scrapes.
pub(super) const SILENCE: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct Activity(Mutex<(Phase, Instant)>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Bytes of a head have come, or none at all yet.
    Asking,
    Silent,
    Answering,
}

/// An answer under way; dropped when it has been sent.
#[derive(Debug)]
pub(super) struct Answering(Arc<Activity>);

/// A stream that tells when bytes arrive.
#[derive(Debug)]
pub(super) struct Heard {
    stream: TcpStream,
    activity: Arc<Activity>,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self(Mutex::new((Phase::Asking, Instant::now())))
    }

    /// When the connection is to be closed; none while it is being answered.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let (phase, since) = *self.lock();
        match phase {
            Phase::Asking => Some(since + HEAD),
            Phase::Silent => Some(since + SILENCE),
            Phase::Answering => None,
        }
    }

    pub(super) fn since(&self) -> Instant {
        self.lock().1
    }

    /// The lower, the less it is missed.
    pub(super) fn rank(&self) -> (bool, Instant) {
        let (phase, since) = *self.lock();
        (phase == Phase::Answering, since)
    }

    /// A request has come.
    pub(super) fn is_asked(&self) {
        *self.lock() = (Phase::Answering, Instant::now());
    }

    /// Keeps the connection answering until the returned guard is dropped.
    pub(super) fn until_answered(self: &Arc<Self>) -> Answering {
        Answering(self.clone())
    }

    fn hear(&self) {
        let mut now = self.lock();
        if now.0 == Phase::Silent {
            *now = (Phase::Asking, Instant::now());
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Phase, Instant)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        *self.0.lock() = (Phase::Silent, Instant::now());
    }
}

impl Heard {
    pub(super) fn new(stream: TcpStream, activity: Arc<Activity>) -> Self {
        Self { stream, activity }
    }
}

impl AsyncRead for Heard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.activity.hear();
        }
        read
    }
}

impl AsyncWrite for Heard {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
