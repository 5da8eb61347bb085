//! Reports the peer's first SETTINGS, its GOAWAY, and the loss of an HTTP/2 connection with its cause.
//!
//! hyper does not report these. [`inspect`] wraps the byte stream below it and reads the frame headers, nine
//! bytes each, and the beginning of GOAWAY; other payloads are skipped by their length. The bytes are not changed.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use h2::Reason;
use tokio::io::{AsyncRead, AsyncWrite, Join, ReadBuf, ReadHalf, WriteHalf};
use tokio::sync::watch;

use super::tls;

const HEADER: usize = 9;
const SETTINGS: u8 = 0x4;
const GOAWAY: u8 = 0x7;
/// The most bytes of GOAWAY that are read: 8, and the peer's text.
const MAX_GOAWAY: usize = 8 + 256;

/// The state of an HTTP/2 connection, as the frames of its peer show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Http2State {
    AwaitingSettings,
    /// The first frame was SETTINGS, as RFC 9113, section 3.4 requires.
    Ready,
    /// The peer sent GOAWAY: streams may finish, new ones are rejected.
    GoingAway(GoAway),
    Closed(Loss),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    Alert(String),
    /// The peer answered with something other than HTTP/2.
    NotHttp2(String),
    Ended(String),
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Alert(reason) | Self::NotHttp2(reason) | Self::Ended(reason)) = self;
        f.write_str(reason)
    }
}

/// The reason in a GOAWAY, such as ENHANCE_YOUR_CALM and `too_many_pings`. Source: RFC 9113, section 6.8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GoAway {
    pub(super) code: Reason,
    /// The peer's text, escaped.
    text: String,
}

impl GoAway {
    fn parse(payload: &[u8]) -> Self {
        let code = payload.get(4..8).and_then(|code| code.try_into().ok());
        let text = payload.get(8..).unwrap_or_default();
        Self {
            code: code.map_or(0, u32::from_be_bytes).into(),
            text: text.escape_ascii().to_string(),
        }
    }
}

impl fmt::Display for GoAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, text } = self;
        write!(f, "GOAWAY {code:?}")?;
        match text.as_str() {
            "" => Ok(()),
            text => write!(f, " \"{text}\""),
        }
    }
}

/// A byte stream whose incoming frames are inspected.
pub(super) type Inspected<T> = Join<Reader<ReadHalf<T>>, WriteHalf<T>>;

/// Wraps a byte stream, and reports the state of the connection.
pub(super) fn inspect<T: AsyncRead + AsyncWrite>(
    io: T,
) -> (Inspected<T>, watch::Receiver<Http2State>) {
    let (read, write) = tokio::io::split(io);
    let (reader, state) = Reader::new(read);
    (tokio::io::join(reader, write), state)
}

/// The incoming half, with its position in the sequence of frames.
#[derive(Debug)]
pub(super) struct Reader<T> {
    inner: T,
    state: watch::Sender<Http2State>,
    header: [u8; HEADER],
    header_read: usize,
    payload_left: usize,
    /// The beginning of the payload of a GOAWAY that is being read.
    go_away: Option<Vec<u8>>,
    started: bool,
}

impl<T> Reader<T> {
    fn new(inner: T) -> (Self, watch::Receiver<Http2State>) {
        let (state, receiver) = watch::channel(Http2State::AwaitingSettings);
        let reader = Self {
            inner,
            state,
            header: [0; HEADER],
            header_read: 0,
            payload_left: 0,
            go_away: None,
            started: false,
        };
        (reader, receiver)
    }

    /// Reports a new state. The first reason of a loss stays, and the reason in a GOAWAY before it.
    fn report(&self, new: Http2State) {
        use Http2State::{Closed, GoingAway};
        self.state.send_if_modified(|state| {
            let changed = *state != new
                && !matches!((&*state, &new), (Closed(_), _) | (GoingAway(_), Closed(_)));
            if changed {
                *state = new;
            }
            changed
        });
    }

    /// Follows the frames in the next bytes of the stream.
    fn inspect(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.payload_left > 0 {
                let (part, rest) = bytes.split_at(self.payload_left.min(bytes.len()));
                self.payload_left -= part.len();
                bytes = rest;
                if let Some(payload) = &mut self.go_away {
                    payload.extend_from_slice(&part[..part.len().min(MAX_GOAWAY - payload.len())]);
                    if self.payload_left == 0 {
                        let go_away = GoAway::parse(payload);
                        self.go_away = None;
                        self.report(Http2State::GoingAway(go_away));
                    }
                }
                continue;
            }
            let taken = (HEADER - self.header_read).min(bytes.len());
            self.header[self.header_read..self.header_read + taken]
                .copy_from_slice(&bytes[..taken]);
            self.header_read += taken;
            bytes = &bytes[taken..];
            if self.header_read == HEADER {
                self.inspect_header();
            }
        }
    }

    /// Reports the state that a complete frame header shows, and prepares for the payload.
    fn inspect_header(&mut self) {
        let [high, middle, low, kind, ..] = self.header;
        self.header_read = 0;
        self.payload_left = u32::from_be_bytes([0, high, middle, low]) as usize;
        match (self.started, kind) {
            (false, SETTINGS) => self.report(Http2State::Ready),
            (false, _) => {
                let reason =
                    format!("it answered \"{}\" instead of HTTP/2", self.header.escape_ascii());
                self.report(Http2State::Closed(Loss::NotHttp2(reason)));
            }
            // Without a payload it is malformed, and ends the connection as well.
            (true, GOAWAY) if self.payload_left == 0 => {
                self.report(Http2State::GoingAway(GoAway::parse(&[])));
            }
            (true, GOAWAY) => self.go_away = Some(Vec::new()),
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
        let result = ready!(Pin::new(&mut this.inner).poll_read(cx, buf)).map_err(in_plain_words);
        match &result {
            Err(error) => {
                let loss = match tls::error(error) {
                    Some(rustls::Error::AlertReceived(_)) => Loss::Alert,
                    _ => Loss::Ended,
                };
                this.report(Http2State::Closed(loss(error.to_string())));
            }
            Ok(()) if buf.filled().len() > before => this.inspect(&buf.filled()[before..]),
            Ok(()) if room > 0 => {
                let loss = match (this.started, this.header_read) {
                    (false, 1..) => Loss::NotHttp2,
                    _ => Loss::Ended,
                };
                this.report(Http2State::Closed(loss("it closed the connection".to_owned())));
            }
            Ok(()) => {}
        }
        Poll::Ready(result)
    }
}

/// Replaces the text of rustls, which refers to its manual.
fn in_plain_words(error: io::Error) -> io::Error {
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

    /// Returns the states that are reported while the bytes arrive in chunks of `step` bytes, without the
    /// initial state and without repetitions.
    fn seen(bytes: &[u8], step: usize) -> Vec<Http2State> {
        let (mut reader, peer) = Reader::new(());
        let after = bytes.chunks(step).map(|chunk| {
            reader.inspect(chunk);
            peer.borrow().clone()
        });
        let mut seen: Vec<_> = after.filter(|peer| *peer != Http2State::AwaitingSettings).collect();
        seen.dedup();
        seen
    }

    #[test]
    fn settings_and_goaway_are_recognized_in_chunks_of_any_size() {
        let data = [7; 70_000];
        let bytes = [
            frame(SETTINGS, &[4; 12]),
            frame(0, &data),
            frame(GOAWAY, b"\0\0\0\x01\0\0\0\x0btoo_many_pings"),
        ]
        .concat();
        let go_away = GoAway { code: Reason::ENHANCE_YOUR_CALM, text: "too_many_pings".to_owned() };
        assert_eq!(go_away.to_string(), "GOAWAY ENHANCE_YOUR_CALM \"too_many_pings\"");
        let go_away = Http2State::GoingAway(go_away);
        for step in [1, 2, 8, 9, 10, 4096] {
            assert_eq!(seen(&bytes, step), [Http2State::Ready, go_away.clone()], "{step}");
        }
        assert_eq!(seen(&bytes, bytes.len()), [go_away]);
    }

    #[test]
    fn a_goaway_of_any_payload_is_read_up_to_a_limit() {
        for (payload, expected) in [
            (&[0; 8][..], "GOAWAY NO_ERROR".to_owned()),
            (&[1, 2], "GOAWAY NO_ERROR".to_owned()),
            (&[], "GOAWAY NO_ERROR".to_owned()),
            (b"\0\0\0\x01\0\0\0\x63\x1b\"", "GOAWAY Reason(63) \"\\x1b\\\"\"".to_owned()),
            (&[0; 5000], format!("GOAWAY NO_ERROR \"{}\"", "\\x00".repeat(256))),
        ] {
            let bytes = [frame(SETTINGS, &[]), frame(GOAWAY, payload)].concat();
            let seen = seen(&bytes, 7);
            let Some(Http2State::GoingAway(found)) = seen.last() else {
                panic!("{seen:?}");
            };
            assert_eq!(found.to_string(), expected);
        }
    }

    #[test]
    fn the_error_quotes_bytes_received_instead_of_http2() {
        let reason = "it answered \"HTTP/1.1 \" instead of HTTP/2".to_owned();
        let expected = Http2State::Closed(Loss::NotHttp2(reason));
        assert_eq!(seen(b"HTTP/1.1 400 Bad Request\r\n", 5), [expected]);
    }

    #[tokio::test]
    async fn the_first_reason_of_a_closed_connection_is_kept() {
        let (mut reader, seen) = Reader::new(tokio::io::empty());
        let mut nothing = Vec::new();
        for _ in 0..2 {
            tokio::io::AsyncReadExt::read_to_end(&mut reader, &mut nothing).await.unwrap();
        }
        let expected = Http2State::Closed(Loss::Ended("it closed the connection".to_owned()));
        assert_eq!(*seen.borrow(), expected);
    }
}
