//! Writes what one turn of a connection has to say at once.
//!
//! HTTP/2 flushes after each frame of 16 KiB, and each write to a Unix socket wakes its reader: a
//! large response costs a switch of processes per frame. Here a flush only marks the end of a frame;
//! the bytes go out when the buffer is full or the turn is over, whichever is first, so nothing waits
//! for what may come later.
//!
//! Does not delay anything beyond the turn it was written in.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is written at once: sixteen frames of the usual size with their heads.
const CAPACITY: usize = 16 * (16 * 1024 + 9);

/// The stream as HTTP/2 sees it.
pub(super) struct Coalesced<IO>(Arc<Mutex<Inner<IO>>>);

/// The way to end a turn.
pub(super) struct Turn<IO>(Arc<Mutex<Inner<IO>>>);

struct Inner<IO> {
    io: IO,
    buffer: Vec<u8>,
    /// How much of the buffer is written.
    written: usize,
}

pub(super) fn coalesced<IO>(io: IO) -> (Coalesced<IO>, Turn<IO>) {
    let inner = Arc::new(Mutex::new(Inner {
        io,
        buffer: Vec::new(),
        written: 0,
    }));
    (Coalesced(inner.clone()), Turn(inner))
}

impl<IO: AsyncWrite + Unpin> Turn<IO> {
    /// Writes what the turn left. Pending only while the peer does not take it.
    pub(super) fn end(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = lock(&self.0);
        ready!(inner.drain(context))?;
        // A connection at rest keeps nothing.
        inner.buffer = Vec::new();
        Pin::new(&mut inner.io).poll_flush(context)
    }
}

impl<IO: AsyncWrite + Unpin> Inner<IO> {
    fn drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.buffer.len() {
            let rest = &self.buffer[self.written..];
            match ready!(Pin::new(&mut self.io).poll_write(context, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                taken => self.written += taken,
            }
        }
        self.buffer.clear();
        self.written = 0;
        Poll::Ready(Ok(()))
    }

    /// Takes what fits of `bytes`.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let room = CAPACITY - self.buffer.len();
        let taken = &bytes[..bytes.len().min(room)];
        if self.buffer.capacity() == 0 && taken.len() > 4096 {
            self.buffer.reserve_exact(CAPACITY);
        }
        self.buffer.extend_from_slice(taken);
        taken.len()
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Coalesced<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = lock(&self.0);
        if inner.buffer.len() == CAPACITY {
            ready!(inner.drain(context))?;
        }
        let mut taken = 0;
        for slice in slices {
            taken += inner.take(slice);
        }
        Poll::Ready(Ok(taken))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = lock(&self.0);
        ready!(inner.drain(context))?;
        Pin::new(&mut inner.io).poll_shutdown(context)
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Coalesced<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut lock(&self.0).io).poll_read(context, buffer)
    }
}

/// Both sides are polled by one task, so nobody waits; a panic leaves bytes, not a broken state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_turns_frames_leave_in_one_write_at_its_end() {
        let (near, mut far) = tokio::net::UnixStream::pair().unwrap();
        let (mut stream, turn) = coalesced(near);
        for frame in ["first ", "second ", "third"] {
            stream.write_all(frame.as_bytes()).await.unwrap();
            stream.flush().await.unwrap();
        }
        let mut read = [0; 64];
        assert!(far.try_read(&mut read).is_err(), "nothing is out yet");
        poll_fn(|context| turn.end(context)).await.unwrap();
        let length = far.read(&mut read).await.unwrap();
        assert_eq!(&read[..length], b"first second third");
    }

    #[tokio::test]
    async fn a_reader_that_is_slow_gets_every_byte_in_order() {
        let (near, mut far) = tokio::net::UnixStream::pair().unwrap();
        let (mut stream, turn) = coalesced(near);
        let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
        let writing = async {
            for piece in sent.chunks(16_393) {
                stream.write_all(piece).await.unwrap();
                stream.flush().await.unwrap();
            }
            poll_fn(|context| turn.end(context)).await.unwrap();
            stream.shutdown().await.unwrap();
        };
        let mut got = Vec::new();
        let (_, read) = tokio::join!(writing, far.read_to_end(&mut got));
        assert_eq!((read.unwrap(), got == sent), (sent.len(), true));
    }
}
