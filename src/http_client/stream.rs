//! The bytes of a connection, as hyper reads them.
//!
//! Hyper reads versions 1.0 and 1.1 only, Go any: the first status line is made to say 1.1. Bytes come
//! in small portions, as hyper's buffer for a body grows with them, up to the size of the largest head.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const PORTION: usize = 32 << 10;

/// Where the digits of the version are in a status line.
const MAJOR: usize = "HTTP/".len();
const MINOR: usize = "HTTP/1.".len();

pub(super) struct Stream<S> {
    io: S,
    /// How many bytes have arrived, up to the end of the version.
    count: usize,
}

impl<S> Stream<S> {
    pub(super) fn new(io: S) -> Self {
        Self { io, count: 0 }
    }

    /// Replaces the version in what has arrived.
    fn rewrite(&mut self, arrived: &mut [u8]) {
        for byte in arrived {
            if self.count > MINOR {
                return;
            }
            if [MAJOR, MINOR].contains(&self.count) && byte.is_ascii_digit() {
                *byte = b'1';
            }
            self.count += 1;
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let size = buffer.remaining().min(PORTION);
        let mut portion = ReadBuf::new(buffer.initialize_unfilled_to(size));
        ready!(Pin::new(&mut self.io).poll_read(context, &mut portion))?;
        self.rewrite(portion.filled_mut());
        let count = portion.filled().len();
        buffer.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The bytes after they arrived in portions of `size`.
    fn rewritten(bytes: &[u8], size: usize) -> Vec<u8> {
        let mut stream = Stream::new(tokio::io::empty());
        let mut bytes = bytes.to_vec();
        bytes
            .chunks_mut(size)
            .for_each(|portion| stream.rewrite(portion));
        bytes
    }

    #[test]
    fn every_version_becomes_one_that_hyper_reads() {
        for (version, expected) in [
            ("1.1", "1.1"),
            ("1.0", "1.1"),
            ("0.9", "1.1"),
            ("1.2", "1.1"),
            ("2.0", "1.1"),
            ("3.7", "1.1"),
            ("x.y", "x.y"),
        ] {
            let line = |version| format!("HTTP/{version} 200 OK\r\na: HTTP/2.0\r\n");
            for size in [1, 3, 100] {
                let found = rewritten(line(version).as_bytes(), size);
                assert_eq!(String::from_utf8(found).expect("text"), line(expected));
            }
        }
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_differ_in_the_version_alone(
            bytes in proptest::collection::vec(any::<u8>(), 0..20),
            size in 1..20_usize,
        ) {
            let found = rewritten(&bytes, size);
            prop_assert_eq!(&found, &rewritten(&bytes, 20));
            let different = (0..bytes.len()).filter(|index| bytes[*index] != found[*index]);
            for index in different {
                prop_assert!(index == MAJOR || index == MINOR);
            }
        }
    }
}
