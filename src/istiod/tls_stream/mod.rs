//! TLS towards istiod, read several records at a time.
//!
//! A large response comes in records of 16 KiB. In rustls' own buffer there is room for one, so each
//! takes a system call, which costs as much as its decryption. Here the socket is read into a buffer
//! for many, which rustls then takes one by one (its unbuffered interface). What TLS does is rustls'
//! business alone; this moves bytes.
//!
//! A connection at rest has no buffers.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use rustls::ClientConfig;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::io::poll_read_buf;

/// Room for a record of any size, which is all that mostly comes.
const RECORD: usize = 5 + 16 * 1024 + 2048;
/// The room once a read has filled that: sixteen records as TLS 1.3 makes them of 16 KiB.
const MANY_RECORDS: usize = 16 * (5 + 16 * 1024 + 17);
/// What is encrypted at once, and how much may wait for the socket before more is.
const PIECE: usize = 16 * 1024;
const MOST_UNSENT: usize = 4 * PIECE;
/// What a record is longer than its content, at least at first guess.
const OVERHEAD: usize = 64;

/// An encrypted connection.
pub(super) struct TlsStream<IO> {
    io: IO,
    session: UnbufferedClientConnection,
    /// What rustls has not taken yet.
    received: BytesMut,
    /// Whether the last read filled its room.
    filled: bool,
    /// What the reader had no room for.
    plain: BytesMut,
    unsent: BytesMut,
    /// Why nothing more will come.
    end: Option<End>,
    close_notify: bool,
}

#[derive(Clone, Debug)]
enum End {
    /// As TLS ends.
    Closed,
    /// The peer is gone and did not say so: what it sent may be cut.
    Cut,
    Failed(rustls::Error),
}

impl End {
    fn result(&self) -> io::Result<()> {
        match self {
            Self::Closed => Ok(()),
            Self::Cut => Err(closed("it closed the connection without ending TLS")),
            Self::Failed(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error.clone())),
        }
    }
}

fn closed(how: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, how)
}

/// What is to be encrypted.
#[derive(Clone, Copy)]
enum Outgoing<'a> {
    Nothing,
    Data(&'a [u8]),
    CloseNotify,
}

/// How far rustls came with what there is.
enum Step {
    /// There may be more to do.
    Again,
    /// What was to be encrypted is; nothing more can be read.
    Idle,
    /// Nothing can be encrypted until more has come.
    Handshake,
    /// Nothing more is said.
    Over,
}

impl<IO: AsyncRead + AsyncWrite + Unpin> TlsStream<IO> {
    /// Shakes hands.
    pub(super) async fn connect(
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        io: IO,
    ) -> io::Result<Self> {
        let session = UnbufferedClientConnection::new(config, name).map_err(io::Error::other)?;
        let mut stream = Self {
            io,
            session,
            received: BytesMut::new(),
            filled: false,
            plain: BytesMut::new(),
            unsent: BytesMut::new(),
            end: None,
            close_notify: false,
        };
        std::future::poll_fn(|context| stream.poll_handshake(context)).await?;
        Ok(stream)
    }

    pub(super) fn session(&self) -> &UnbufferedClientConnection {
        &self.session
    }

    fn poll_handshake(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let step = self.step(&mut ReadBuf::new(&mut []), Outgoing::Nothing)?;
            if matches!(step, Step::Again) {
                continue;
            }
            // Also when it fails: the peer is told why.
            ready!(self.poll_send(context))?;
            match (&self.end, step) {
                (Some(failed @ End::Failed(_)), _) => return Poll::Ready(failed.result()),
                (None, Step::Idle) => return Poll::Ready(Ok(())),
                (None, Step::Handshake) => ready!(self.poll_receive(context))?,
                _ => return Poll::Ready(Err(closed("it closed the connection"))),
            }
        }
    }

    /// Has rustls take one thing of what came, or encrypt.
    fn step(&mut self, into: &mut ReadBuf<'_>, outgoing: Outgoing<'_>) -> io::Result<Step> {
        // A session that has failed only tells the peer why. To have it read on is a panic.
        if matches!(self.end, Some(End::Failed(_))) && !self.session.wants_write() {
            return Ok(Step::Over);
        }
        let UnbufferedStatus { discard, state } =
            self.session.process_tls_records(&mut self.received);
        let step = match state {
            Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                while let Some(record) = traffic.next_record() {
                    let record = record.map_err(io::Error::other)?;
                    let fits = match self.plain.is_empty() {
                        true => record.payload.len().min(into.remaining()),
                        false => 0,
                    };
                    let (now, later) = record.payload.split_at(fits);
                    into.put_slice(now);
                    self.plain.extend_from_slice(later);
                }
                Step::Again
            }
            Ok(ConnectionState::EncodeTlsData(mut data)) => {
                append(&mut self.unsent, 0, |room| match data.encode(room) {
                    Err(EncodeError::InsufficientSize(size)) => Err(Refused::Size(size)),
                    done => done.map_err(|error| Refused::Other(io::Error::other(error))),
                })?;
                Step::Again
            }
            Ok(ConnectionState::TransmitTlsData(data)) => {
                // It goes out in its turn, before all that is encrypted later.
                data.done();
                Step::Again
            }
            Ok(ConnectionState::WriteTraffic(mut traffic)) => {
                let mut encrypt = |guess, data: Option<&[u8]>| {
                    append(&mut self.unsent, guess, |room| {
                        let done = match data {
                            Some(data) => traffic.encrypt(data, room),
                            None => traffic.queue_close_notify(room),
                        };
                        done.map_err(|error| match error {
                            EncryptError::InsufficientSize(size) => Refused::Size(size),
                            error => Refused::Other(io::Error::other(error)),
                        })
                    })
                };
                match outgoing {
                    Outgoing::Nothing => {}
                    Outgoing::Data(data) => encrypt(data.len() + OVERHEAD, Some(data))?,
                    Outgoing::CloseNotify => encrypt(OVERHEAD, None)?,
                }
                Step::Idle
            }
            Ok(ConnectionState::BlockedHandshake) => Step::Handshake,
            Ok(ConnectionState::PeerClosed) => {
                self.end = Some(End::Closed);
                Step::Again
            }
            Ok(_) => Step::Over,
            Err(error) => {
                self.end = Some(End::Failed(error));
                Step::Again
            }
        };
        self.received.advance(discard.min(self.received.len()));
        Ok(step)
    }

    /// Waits for more of what rustls takes.
    fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.received.capacity() - self.received.len() < RECORD {
            let room = if self.filled { MANY_RECORDS } else { RECORD };
            let more = room.saturating_sub(self.received.len());
            self.received.reserve(more.max(RECORD));
        }
        let room = self.received.capacity() - self.received.len();
        match poll_read_buf(Pin::new(&mut self.io), context, &mut self.received) {
            Poll::Ready(read) => {
                let read = read?;
                self.filled = read == room;
                if read == 0 {
                    self.end.get_or_insert(End::Cut);
                }
                Poll::Ready(Ok(()))
            }
            Poll::Pending => {
                for buffer in [&mut self.received, &mut self.plain] {
                    if buffer.is_empty() {
                        *buffer = BytesMut::new();
                    }
                }
                Poll::Pending
            }
        }
    }

    /// Hands what is encrypted to the socket.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent.is_empty() {
            let sent = ready!(Pin::new(&mut self.io).poll_write(context, &self.unsent))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unsent.advance(sent);
        }
        self.unsent = BytesMut::new();
        Poll::Ready(Ok(()))
    }

    fn encrypt(&mut self, outgoing: Outgoing<'_>) -> io::Result<()> {
        loop {
            if let Some(failed @ End::Failed(_)) = &self.end {
                return failed.result();
            }
            match self.step(&mut ReadBuf::new(&mut []), outgoing)? {
                Step::Again => {}
                Step::Idle => return Ok(()),
                Step::Handshake | Step::Over => return Err(io::ErrorKind::BrokenPipe.into()),
            }
        }
    }
}

/// Why rustls has not written.
enum Refused {
    Size(InsufficientSizeError),
    Other(io::Error),
}

/// Has rustls write behind what is there, in as much room as it asks for.
fn append(
    to: &mut BytesMut,
    mut room: usize,
    mut write: impl FnMut(&mut [u8]) -> Result<usize, Refused>,
) -> io::Result<()> {
    let at = to.len();
    loop {
        to.resize(at + room, 0);
        match write(&mut to[at..]) {
            Ok(written) => {
                to.truncate(at + written);
                return Ok(());
            }
            Err(Refused::Size(size)) if size.required_size > room => room = size.required_size,
            Err(refused) => {
                to.truncate(at);
                return Err(match refused {
                    Refused::Size(_) => io::Error::other("no room is enough for TLS"),
                    Refused::Other(error) => error,
                });
            }
        }
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncRead for TlsStream<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        while into.remaining() > 0 {
            if !this.plain.is_empty() {
                let rest = this.plain.len().min(into.remaining());
                into.put_slice(&this.plain[..rest]);
                this.plain.advance(rest);
                continue;
            }
            if matches!(this.step(into, Outgoing::Nothing)?, Step::Again) {
                continue;
            }
            if into.filled().len() > before {
                break;
            }
            // Answers of TLS itself. If they cannot be sent, what came before says why.
            let _ = this.poll_send(context);
            if let Some(end) = &this.end {
                return Poll::Ready(end.result());
            }
            ready!(this.poll_receive(context))?;
        }
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TlsStream<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.unsent.len() >= MOST_UNSENT {
            ready!(this.poll_send(context))?;
        }
        let piece = &bytes[..bytes.len().min(PIECE)];
        this.encrypt(Outgoing::Data(piece))?;
        Poll::Ready(Ok(piece.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // One record for what is said at once.
        let mut together = Vec::new();
        for slice in slices {
            let room = PIECE - together.len();
            together.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        self.poll_write(context, &together)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.close_notify {
            this.close_notify = true;
            // A session that has failed has said so.
            let _ = this.encrypt(Outgoing::CloseNotify);
        }
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests;
