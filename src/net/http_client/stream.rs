//! Implements hyper's traits of a connection, for a connection to a server or proxy, in plaintext or with
//! TLS. The connection is read in small portions, because hyper's buffer for a body grows with the
//! portions, up to the size of the largest head.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Instant;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

const PORTION: usize = 32 << 10;

pub(super) struct Stream {
    pub(super) io: Either<Either<TcpStream, UnixStream>, TlsStream<TcpStream>>,
    /// True if the connection leads to a proxy that forwards requests.
    pub(super) is_proxied: bool,
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        // The time of connecting distinguishes pooled connections from new connections.
        let connected = Connected::new().extra(Instant::now());
        let connected = connected.proxy(self.is_proxied);
        match &self.io {
            Either::Right(tls) if tls.get_ref().1.alpn_protocol() == Some(b"h2") => {
                connected.negotiated_h2()
            }
            _ => connected,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let size = buffer.remaining().min(PORTION);
        let mut portion = ReadBuf::new(buffer.initialize_unfilled_to(size));
        ready!(Pin::new(&mut self.io).poll_read(context, &mut portion))?;
        let count = portion.filled().len();
        buffer.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
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
