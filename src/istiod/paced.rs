//! Lets those who take istiod's bytes have their turn while the bytes are still at hand.
//!
//! Otherwise a large response is read for as long as the socket has more of it, megabytes at a time,
//! and has left the processor's cache when the relay comes to pass it on. A reader that had its share
//! stands aside once and goes on when everybody else has had a turn.
//!
//! What others must not wait for longer than such a turn, however busy the processors are, is done
//! in between: see [`Meanwhile`]. Then threads that wait for this one's processor have it.
//!
//! Does not hold back anything while there is nothing else to do.

use std::fmt;
use std::hint::black_box;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Once};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is read in one turn: as much as the relay writes at once.
const SHARE: usize = 256 * 1024;

/// What is freed at the end of the heap and kept for the next buffer is twice this at most.
const KEPT: usize = 1024 * 1024;

/// What is done after each turn of reading a large response. Nothing by default.
#[derive(Clone, Default)]
pub struct Meanwhile(Option<Arc<dyn Fn() + Send + Sync>>);

impl Meanwhile {
    /// `work` must not wait.
    pub fn new(work: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(work)))
    }

    fn work(&self) {
        if let Some(work) = &self.0 {
            work();
        }
    }
}

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.0.as_ref().map(|_| "work");
        f.debug_tuple("Meanwhile").field(&what).finish()
    }
}

/// A byte stream read in turns.
#[derive(Debug)]
pub(super) struct Paced<T> {
    inner: T,
    meanwhile: Meanwhile,
    /// What is left of the share.
    left: usize,
}

impl<T> Paced<T> {
    pub(super) fn new(inner: T, meanwhile: Meanwhile) -> Self {
        Self {
            inner,
            meanwhile,
            left: SHARE,
        }
    }
}

/// Has the allocator keep the buffers of a large response for the next ones. Otherwise glibc gives
/// what is free at the end of the heap back to the kernel over and over, and each page of it that is
/// used again is a fault: a tenth of what a large response costs. It goes by the largest buffer ever
/// freed (mallopt(3), `M_MMAP_THRESHOLD`), so one is, untouched and thus for nothing. Not before a
/// large response comes, as an agent without one is better off smaller.
fn keep_freed_memory() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(black_box(Vec::<u8>::with_capacity(KEPT))));
}

impl<T: AsyncRead + Unpin> AsyncRead for Paced<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.left == 0 {
            self.left = SHARE;
            keep_freed_memory();
            self.meanwhile.work();
            // Other threads wait for the end of the time slice otherwise, for a millisecond and more.
            std::thread::yield_now();
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
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Waker;
    use tokio::io::AsyncReadExt;

    #[test]
    fn a_reader_that_had_its_share_stands_aside_once_while_other_work_is_done() {
        let worked = Arc::new(AtomicUsize::new(0));
        let works = worked.clone();
        let meanwhile = Meanwhile::new(move || {
            works.fetch_add(1, Ordering::Relaxed);
        });
        let mut paced = Paced::new(&[7; 3 * SHARE][..], meanwhile);
        let mut context = Context::from_waker(Waker::noop());
        let mut bytes = vec![0; SHARE];
        let mut turn = || {
            let mut buffer = ReadBuf::new(&mut bytes);
            Pin::new(&mut paced)
                .poll_read(&mut context, &mut buffer)
                .is_ready()
        };
        assert_eq!([turn(), turn(), turn(), turn()], [true, false, true, false]);
        assert_eq!(worked.load(Ordering::Relaxed), 2);
    }

    /// Pages this thread has had to be given so far.
    #[cfg(target_env = "gnu")]
    fn faults() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The name, in parentheses, may hold spaces; minflt is the tenth column (proc_pid_stat(5)).
        let (_, columns) = stat.rsplit_once(") ").unwrap();
        columns.split(' ').nth(7).unwrap().parse().unwrap()
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn buffers_that_come_and_go_keep_their_memory() {
        const BUFFER: usize = 100 * 1024;
        let use_some = || drop(black_box([0_u8; 6].map(|_| vec![7_u8; BUFFER])));
        keep_freed_memory();
        use_some();
        let before = faults();
        for _ in 0..20 {
            use_some();
        }
        let (new, pages) = (faults() - before, 6 * BUFFER as u64 / 4096);
        assert!(new < pages, "{new} faults for 20 times {pages} pages");
    }

    #[tokio::test]
    async fn every_byte_comes() {
        let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
        let mut got = Vec::new();
        let mut paced = Paced::new(&sent[..], Meanwhile::default());
        paced.read_to_end(&mut got).await.unwrap();
        assert!(got == sent);
    }
}
