//! Replaces the `:authority` of gRPC's C-core clients (C++, Python, Ruby), which `h2` refuses.
//!
//! They send the socket's path, such as `etc%2Fistio%2Fproxy%2FXDS`, which is not a valid authority. Wrap each
//! accepted connection in [`valid_authority`]. If the first request has a valid authority, all bytes of the
//! connection pass unchanged. Otherwise this and all later header blocks are decoded, and encoded again with
//! `localhost`; other frames pass unchanged.
//!
//! A header block has at most 16 KiB, hyper's limit of a list of headers. Bytes that cannot be decoded pass
//! unchanged, and `h2` rejects them; once a header block has been replaced, they end the connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, BytesMut};
use http::uri::Authority;
use loona_hpack::Decoder;
use loona_hpack::encoder::encode_integer;
use loona_hpack::huffman::HuffmanDecoder;
use tokio::io::{AsyncRead, Join, ReadBuf};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio_util::io::poll_read_buf;

use crate::runtime::lifecycle::BoxError;

/// The number of bytes to read at once.
const READ: usize = 8 << 10;

/// The most bytes of a header block, encoded, and decoded by the rules of SETTINGS_MAX_HEADER_LIST_SIZE. Encoded
/// again it is smaller, and fits into a frame.
const MAX_BLOCK: usize = 16 << 10;

/// The largest dynamic table of HPACK: HTTP/2's default.
const MAX_TABLE: usize = 4096;

/// Length, type, flags and stream of a frame (RFC 9113, section 4.1).
const HEAD: usize = 9;
const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 0x01;
const END_HEADERS: u8 = 0x04;
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;

const AUTHORITY: &[u8] = b":authority";
const REPLACEMENT: &[u8] = b"localhost";

/// Wraps a client's connection, so that its requests have a valid authority.
pub(super) fn valid_authority(stream: UnixStream) -> Join<Reader<OwnedReadHalf>, OwnedWriteHalf> {
    let (read, write) = stream.into_split();
    tokio::io::join(Reader::new(read), write)
}

/// The incoming half of a connection.
pub(super) struct Reader<R> {
    inner: R,
    /// None once all bytes pass unchanged.
    rewriter: Option<Box<Rewriter>>,
    output: BytesMut,
}

impl<R> Reader<R> {
    fn new(inner: R) -> Self {
        Self { inner, rewriter: Some(Box::default()), output: BytesMut::new() }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Reader<R> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.output.is_empty() {
            let Some(rewriter) = &mut this.rewriter else {
                return Pin::new(&mut this.inner).poll_read(context, buffer);
            };
            rewriter.input.reserve(READ);
            let inner = Pin::new(&mut this.inner);
            if ready!(poll_read_buf(inner, context, &mut rewriter.input))? == 0 {
                return Poll::Ready(Ok(()));
            }
            if rewriter.rewrite(&mut this.output)? {
                this.output.unsplit(std::mem::take(&mut rewriter.input));
                this.rewriter = None;
            }
        }
        buffer.put_slice(&this.output.split_to(this.output.len().min(buffer.remaining())));
        if this.output.is_empty() {
            this.output = BytesMut::new(); // Frees its memory.
        }
        Poll::Ready(Ok(()))
    }
}

/// Finds the header blocks in a client's frames, and replaces them.
struct Rewriter {
    input: BytesMut,
    /// The number of bytes that pass unchanged: of the preface, or of a frame without headers.
    pass_through_left: usize,
    /// The header block at the beginning of `input`.
    block: Option<Block>,
    decoder: Decoder<'static>,
    huffman: HuffmanDecoder,
    /// True if the first request had an invalid authority.
    replaces: bool,
}

/// An incomplete header block.
struct Block {
    stream: [u8; 4],
    end_stream: u8,
    fragments: Vec<u8>,
    /// The number of bytes of its frames so far.
    size: usize,
}

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

impl Default for Rewriter {
    fn default() -> Self {
        let mut decoder = Decoder::new();
        decoder.set_max_allowed_table_size(MAX_TABLE);
        Self {
            input: BytesMut::new(),
            pass_through_left: PREFACE,
            block: None,
            decoder,
            huffman: HuffmanDecoder::new(),
            replaces: false,
        }
    }
}

impl Rewriter {
    /// Moves complete frames from the input to the output. Returns true if the rest may pass unchanged. Fails on
    /// invalid frames once a block has been replaced; before, `h2` rejects them.
    fn rewrite(&mut self, output: &mut BytesMut) -> io::Result<bool> {
        match self.read_frames(output) {
            Err(error) if self.replaces => Err(error),
            result => Ok(result.unwrap_or(true)),
        }
    }

    /// Passes frames without headers, and collects the frames of each header block. Returns true if the rest may
    /// pass unchanged, false if the rest is an incomplete frame or header block.
    fn read_frames(&mut self, output: &mut BytesMut) -> io::Result<bool> {
        loop {
            let passed = self.pass_through_left.min(self.input.len());
            output.unsplit(self.input.split_to(passed));
            self.pass_through_left -= passed;
            let seen = self.block.as_ref().map_or(0, |block| block.size);
            let Some(&head) = self.input[seen..].first_chunk::<HEAD>() else {
                return Ok(false);
            };
            let [high, middle, low, kind, flags, stream @ ..] = head;
            let frame_length = HEAD + u32::from_be_bytes([0, high, middle, low]) as usize;
            match (kind, &self.block) {
                (HEADERS, None) => {}
                (CONTINUATION, Some(block)) if block.stream == stream => {}
                (_, None) => {
                    self.pass_through_left = frame_length;
                    continue;
                }
                (_, Some(_)) => {
                    return Err(invalid(format!(
                        "a frame of type {kind} within a header block, expected CONTINUATION"
                    )));
                }
            }
            if seen + frame_length > MAX_BLOCK {
                return Err(invalid(format!("a header block of more than {MAX_BLOCK} bytes")));
            }
            let Some(payload) = self.input.get(seen + HEAD..seen + frame_length) else {
                return Ok(false);
            };
            let block = self.block.get_or_insert_with(|| Block {
                stream,
                end_stream: flags & END_STREAM,
                fragments: Vec::new(),
                size: 0,
            });
            let fragment = match kind {
                HEADERS => fragment_in_headers(payload, flags)
                    .ok_or_else(|| invalid("HEADERS that are shorter than their padding"))?,
                _ => payload,
            };
            block.fragments.extend_from_slice(fragment);
            block.size += frame_length;
            if flags & END_HEADERS != 0 && self.finish_block(output)? {
                return Ok(true);
            }
        }
    }

    /// Decodes the complete block. Returns true if the first request needs no replacement. From the first invalid
    /// authority on, re-encodes every block and returns false.
    fn finish_block(&mut self, output: &mut BytesMut) -> io::Result<bool> {
        let Some(block) = self.block.take() else {
            return Ok(false);
        };
        let plain = without_huffman(&mut self.huffman, &block.fragments)
            .ok_or_else(|| invalid("a header block that cannot be decoded"))?;
        let mut fields = decode(&mut self.decoder, &plain)?;
        for (name, value) in &mut fields {
            if name == AUTHORITY && Authority::try_from(&value[..]).is_err() {
                self.replaces = true;
                REPLACEMENT.clone_into(value);
            }
        }
        if self.replaces {
            self.input.advance(block.size);
            encode(&block, &fields, output);
        }
        Ok(!self.replaces)
    }
}

fn invalid(found: impl Into<BoxError>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, found)
}

/// Returns the part of a header block in a HEADERS frame, without padding and priority.
fn fragment_in_headers(payload: &[u8], flags: u8) -> Option<&[u8]> {
    let (padding, payload) = match flags & PADDED {
        0 => (0, payload),
        _ => payload.split_first().map(|(size, rest)| (usize::from(*size), rest))?,
    };
    let payload = match flags & PRIORITY {
        0 => payload,
        _ => payload.get(5..)?,
    };
    payload.get(..payload.len().checked_sub(padding)?)
}

/// Removes the Huffman coding of a header block. [`Decoder`] builds the table of the code for each coded string,
/// which takes half a second for a block of empty ones.
fn without_huffman(huffman: &mut HuffmanDecoder, mut block: &[u8]) -> Option<BytesMut> {
    let mut plain = BytesMut::with_capacity(block.len());
    while let Some(&first) = block.first() {
        // The representations of a field (RFC 7541, section 6).
        let (prefix, is_literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            0x20.. => (5, false),
            _ => (4, true),
        };
        let (index, size) = integer(block, prefix)?;
        let (head, mut rest) = block.split_at(size);
        plain.put_slice(head);
        let strings = match (is_literal, index) {
            (false, _) => 0,
            (true, 0) => 2,
            (true, _) => 1,
        };
        for _ in 0..strings {
            let is_coded = rest.first()? & 0x80 != 0;
            let (length, size) = integer(rest, 7)?;
            let (text, after) = rest[size..].split_at_checked(length)?;
            if is_coded {
                put_string(&huffman.decode(text).ok()?, &mut plain);
            } else {
                put_string(text, &mut plain);
            }
            rest = after;
        }
        block = rest;
    }
    Some(plain)
}

/// Reads an integer that begins with `prefix` bits (RFC 7541, section 5.1). Returns its size, too.
fn integer(bytes: &[u8], prefix: u32) -> Option<(usize, usize)> {
    let most = (1 << prefix) - 1;
    let mut value = usize::from(*bytes.first()?) & most;
    if value < most {
        return Some((value, 1));
    }
    // The decoder does not read longer integers.
    for (place, byte) in bytes.iter().enumerate().take(5).skip(1) {
        value += usize::from(byte & 0x7f) << (7 * (place - 1));
        if byte & 0x80 == 0 {
            return Some((value, place + 1));
        }
    }
    None
}

/// Decodes a block without Huffman coding. Fails if the fields are larger than [`MAX_BLOCK`].
fn decode(decoder: &mut Decoder<'_>, block: &[u8]) -> io::Result<Fields> {
    let mut fields = Fields::new();
    let mut size = 0;
    let decoded = decoder.decode_with_cb(block, |name, value| {
        size += name.len() + value.len() + 32;
        if size <= MAX_BLOCK {
            fields.push((name.into_owned(), value.into_owned()));
        }
    });
    decoded.map_err(|error| invalid(format!("a header block that cannot be decoded: {error}")))?;
    if size > MAX_BLOCK {
        return Err(invalid(format!("{size} bytes of headers, expected {MAX_BLOCK} at most")));
    }
    Ok(fields)
}

/// Appends a HEADERS frame with literals that do not change the dynamic table (RFC 7541, section 6.2.2).
fn encode(block: &Block, fields: &Fields, output: &mut BytesMut) {
    let head = output.len();
    output.put_bytes(0, 3);
    output.put_u8(HEADERS);
    output.put_u8(block.end_stream | END_HEADERS);
    output.put_slice(&block.stream);
    for (name, value) in fields {
        output.put_u8(0);
        for text in [name, value] {
            put_string(text, output);
        }
    }
    // The length is below 16 KiB, so it fits.
    let length = (output.len() - head - HEAD) as u32;
    output[head..head + 3].copy_from_slice(&length.to_be_bytes()[1..]);
}

/// Appends a string without Huffman coding (RFC 7541, section 5.2).
fn put_string(text: &[u8], output: &mut BytesMut) {
    output.put_slice(&encode_integer(text.len(), 7));
    output.put_slice(text);
}

#[cfg(test)]
mod tests;
