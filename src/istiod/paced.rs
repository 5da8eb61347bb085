//! Lets those who take istiod's bytes have their turn while the bytes are still at hand.
//!
//! Otherwise a large response is read for as long as the socket has more of it, megabytes at a time,
//! and has left the processor's cache when the relay comes to pass it on. A reader that had its share
//! stands aside once and goes on when everybody else has had a turn.
//!
//! Does not hold back anything while there is nothing else to do.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is read in one turn: as much as the relay writes at once.
const SHARE: usize = 128 * 1024;

/// A byte stream read in turns.
#[derive(Debug)]
pub(super) struct Paced<T> {
    inner: T,
    /// What is left of the share.
    left: usize,
}

impl<T> Paced<T> {
    pub(super) fn new(inner: T) -> Self {
        Self { inner, left: SHARE }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Paced<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.left == 0 {
            self.left = SHARE;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
        let read = buffer.filled().len() - before;
        self.left = self.left.saturating_sub(read);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Paced<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;
    use tokio::io::AsyncReadExt;

    #[test]
    fn a_reader_that_had_its_share_stands_aside_once() {
        let mut paced = Paced::new(&[7; 3 * SHARE][..]);
        let mut context = Context::from_waker(Waker::noop());
        let mut bytes = vec![0; SHARE];
        let mut turn = || {
            let mut buffer = ReadBuf::new(&mut bytes);
            Pin::new(&mut paced)
                .poll_read(&mut context, &mut buffer)
                .is_ready()
        };
        assert_eq!([turn(), turn(), turn(), turn()], [true, false, true, false]);
    }

    #[tokio::test]
    async fn every_byte_comes() {
        let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
        let mut got = Vec::new();
        let mut paced = Paced::new(&sent[..]);
        paced.read_to_end(&mut got).await.unwrap();
        assert!(got == sent);
    }
}
