//! Reports the peer's first SETTINGS, its GOAWAY, and the loss of an HTTP/2 connection with its cause.
//!
//! hyper reports none of these. [`inspect`] wraps the byte stream below it and reads the frame
//! headers that pass, nine bytes each; payloads are skipped by their length. No byte is changed.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, Join, ReadBuf, ReadHalf, WriteHalf};
use tokio::sync::watch;

use super::tls;

const HEADER: usize = 9;
const SETTINGS: u8 = 0x4;
const GOAWAY: u8 = 0x7;

/// The state of an HTTP/2 connection, as the frames of its peer show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Http2State {
    AwaitingSettings,
    /// Its first frame was SETTINGS, as RFC 9113, section 3.4 demands.
    Ready,
    /// It sent GOAWAY: streams may finish, new ones are refused.
    GoingAway,
    /// The connection is lost, for this reason, which may be an alert of TLS.
    Closed(String, bool),
}

/// A byte stream whose incoming frames are inspected.
pub(super) type Inspected<T> = Join<Reader<ReadHalf<T>>, WriteHalf<T>>;

/// Wraps a byte stream, and reports what its peer shows.
pub(super) fn inspect<T: AsyncRead + AsyncWrite>(
    io: T,
) -> (Inspected<T>, watch::Receiver<Http2State>) {
    let (read, write) = tokio::io::split(io);
    let (reader, seen) = Reader::new(read);
    (tokio::io::join(reader, write), seen)
}

/// The incoming half, with its position in the sequence of frames.
#[derive(Debug)]
pub(super) struct Reader<T> {
    inner: T,
    peer: watch::Sender<Http2State>,
    header: [u8; HEADER],
    /// How many bytes of `header` are known.
    known: usize,
    payload_left: usize,
    started: bool,
}

impl<T> Reader<T> {
    fn new(inner: T) -> (Self, watch::Receiver<Http2State>) {
        let (peer, seen) = watch::channel(Http2State::AwaitingSettings);
        let reader = Self {
            inner,
            peer,
            header: [0; HEADER],
            known: 0,
            payload_left: 0,
            started: false,
        };
        (reader, seen)
    }

    fn saw(&self, news: Http2State) {
        self.peer.send_if_modified(|peer| {
            let changed = *peer != news && !matches!(peer, Http2State::Closed(..));
            if changed {
                *peer = news;
            }
            changed
        });
    }

    fn read(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.payload_left > 0 {
                let skipped = self.payload_left.min(bytes.len());
                self.payload_left -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let taken = (HEADER - self.known).min(bytes.len());
            self.header[self.known..self.known + taken].copy_from_slice(&bytes[..taken]);
            self.known += taken;
            bytes = &bytes[taken..];
            if self.known == HEADER {
                self.frame();
            }
        }
    }

    fn frame(&mut self) {
        let [high, middle, low, kind, ..] = self.header;
        self.known = 0;
        self.payload_left = u32::from_be_bytes([0, high, middle, low]) as usize;
        match (self.started, kind) {
            (false, SETTINGS) => self.saw(Http2State::Ready),
            (false, _) => {
                let found = self.header.escape_ascii();
                let reason = format!("it answered \"{found}\" instead of HTTP/2");
                self.saw(Http2State::Closed(reason, false));
            }
            (true, GOAWAY) => self.saw(Http2State::GoingAway),
            (true, _) => {}
        }
        self.started = true;
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Reader<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let room = buf.remaining();
        let result = ready!(Pin::new(&mut this.inner).poll_read(cx, buf)).map_err(plain);
        match &result {
            Err(error) => {
                let alert = matches!(tls::error(error), Some(rustls::Error::AlertReceived(_)));
                this.saw(Http2State::Closed(error.to_string(), alert));
            }
            Ok(()) if buf.filled().len() > before => this.read(&buf.filled()[before..]),
            Ok(()) if room > 0 => this.saw(Http2State::Closed(
                "it closed the connection".to_owned(),
                false,
            )),
            Ok(()) => {}
        }
        Poll::Ready(result)
    }
}

/// The error in plain words: the one of rustls refers to its manual.
fn plain(error: io::Error) -> io::Error {
    let text = "it closed the connection without notice, as a killed process does";
    match error.kind() {
        kind @ io::ErrorKind::UnexpectedEof => io::Error::new(kind, text),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], kind, 0, 0, 0, 0, 0];
        bytes.extend_from_slice(payload);
        bytes
    }

    /// What the peer has shown after each step.
    fn seen(bytes: &[u8], step: usize) -> Vec<Http2State> {
        let (mut reader, peer) = Reader::new(());
        let after = bytes.chunks(step).map(|chunk| {
            reader.read(chunk);
            peer.borrow().clone()
        });
        let mut seen: Vec<_> = after
            .filter(|peer| *peer != Http2State::AwaitingSettings)
            .collect();
        seen.dedup();
        seen
    }

    #[test]
    fn sees_settings_and_goaway_however_the_bytes_are_cut() {
        let data = [7; 70_000];
        let bytes = [
            frame(SETTINGS, &[4; 12]),
            frame(0, &data),
            frame(GOAWAY, &[0; 8]),
        ]
        .concat();
        for step in [1, 2, 8, 9, 10, 4096] {
            assert_eq!(
                seen(&bytes, step),
                [Http2State::Ready, Http2State::GoingAway],
                "{step}"
            );
        }
        assert_eq!(seen(&bytes, bytes.len()), [Http2State::GoingAway]);
    }

    #[test]
    fn names_what_came_instead_of_http2() {
        let expected = Http2State::Closed(
            "it answered \"HTTP/1.1 \" instead of HTTP/2".to_owned(),
            false,
        );
        assert_eq!(seen(b"HTTP/1.1 400 Bad Request\r\n", 5), [expected]);
    }

    #[tokio::test]
    async fn keeps_the_first_reason_of_a_loss() {
        let (mut reader, seen) = Reader::new(tokio::io::empty());
        let mut nothing = Vec::new();
        for _ in 0..2 {
            tokio::io::AsyncReadExt::read_to_end(&mut reader, &mut nothing)
                .await
                .unwrap();
        }
        let expected = Http2State::Closed("it closed the connection".to_owned(), false);
        assert_eq!(*seen.borrow(), expected);
    }
}
