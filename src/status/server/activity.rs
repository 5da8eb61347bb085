//! What a connection is doing, and how long it may.
//!
//! A connection is silent, in the middle of a request's head, or being answered. The stream tells of
//! bytes that arrive or cannot leave, the server of requests and answers.
//!
//! Does not close anything.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// How long the head of a request may take, the first one from the connection's beginning.
pub(super) const HEAD: Duration = Duration::from_secs(10);
/// Longer than the pause between two probes or scrapes.
pub(super) const SILENCE: Duration = Duration::from_secs(300);
/// How long what has been written may wait for its reader: longer than any scraper does.
pub(super) const READING: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Activity(Mutex<Now>);

#[derive(Clone, Copy, Debug)]
struct Now {
    phase: Phase,
    since: Instant,
    /// Whether bytes of the next head have come while a request is being answered.
    is_next_here: bool,
    /// Whether bytes that come meanwhile may be the request's own.
    has_body: bool,
    /// Since when something waits for the reader; it may be the end of an answer that is all written.
    unread: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Bytes of a head have come, or none at all yet.
    Asking,
    Silent,
    Answering,
}

/// An answer under way; dropped when it has been sent.
#[derive(Debug)]
pub(super) struct Answering(Arc<Activity>);

/// A stream that tells when bytes arrive, and when they cannot leave.
#[derive(Debug)]
pub(super) struct Heard {
    stream: TcpStream,
    activity: Arc<Activity>,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Now {
            phase: Phase::Asking,
            since: Instant::now(),
            is_next_here: false,
            has_body: false,
            unread: None,
        }))
    }

    /// When the connection is to be closed; none while its answer is being made.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let now = *self.lock();
        match now.phase {
            _ if now.unread.is_some() => now.unread.map(|since| since + READING),
            Phase::Asking => Some(now.since + HEAD),
            Phase::Silent => Some(now.since + SILENCE),
            Phase::Answering => None,
        }
    }

    pub(super) fn since(&self) -> Instant {
        self.lock().since
    }

    /// The lower, the less it is missed.
    pub(super) fn rank(&self) -> (bool, Instant) {
        let now = *self.lock();
        let is_busy = now.phase == Phase::Answering && now.unread.is_none();
        (is_busy, now.since)
    }

    /// A request has come.
    pub(super) fn is_asked(&self, has_body: bool) {
        let mut now = self.lock();
        now.enter(Phase::Answering);
        now.has_body = has_body;
    }

    /// Keeps the connection answering until the returned guard is dropped.
    pub(super) fn until_answered(self: &Arc<Self>) -> Answering {
        Answering(self.clone())
    }

    fn hear(&self) {
        let mut now = self.lock();
        match now.phase {
            Phase::Silent => now.enter(Phase::Asking),
            Phase::Answering => now.is_next_here = !now.has_body,
            Phase::Asking => {}
        }
    }

    fn is_unread(&self) {
        self.lock().unread.get_or_insert_with(Instant::now);
    }

    fn is_read(&self) {
        self.lock().unread = None;
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.0.lock()
    }
}

impl Now {
    fn enter(&mut self, phase: Phase) {
        (self.phase, self.since) = (phase, Instant::now());
        self.is_next_here = false;
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut now = self.0.lock();
        let phase = match now.is_next_here {
            true => Phase::Asking,
            false => Phase::Silent,
        };
        now.enter(phase);
    }
}

impl Heard {
    pub(super) fn new(stream: TcpStream, activity: Arc<Activity>) -> Self {
        Self { stream, activity }
    }

    fn note(&self, written: Poll<std::io::Result<usize>>) -> Poll<std::io::Result<usize>> {
        if written.is_pending() {
            self.activity.is_unread();
        }
        written
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
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note(written)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        // Whoever writes flushes when all of it is written.
        self.activity.is_read();
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
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
