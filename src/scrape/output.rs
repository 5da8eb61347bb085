//! Collects the merged page in the encoding of the response, and returns it in chunks.

use std::io::{self, Write};
use std::mem;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;

/// The minimum size of a chunk, in bytes, except for the end of the page.
const MIN_CHUNK: usize = 32 << 10;

pub(super) enum Output {
    Plain(Vec<u8>),
    Gzip(GzEncoder<Vec<u8>>),
}

impl Output {
    pub(super) fn new(is_gzip: bool) -> Self {
        if is_gzip {
            Self::Gzip(GzEncoder::new(Vec::new(), Compression::fast()))
        } else {
            Self::Plain(Vec::new())
        }
    }

    pub(super) fn write(&mut self, lines: &[u8]) {
        match self {
            Self::Plain(page) => page.extend_from_slice(lines),
            // Writing to a vector does not fail.
            Self::Gzip(page) => drop(page.write_all(lines)),
        }
    }

    /// Takes the next chunk if it has its minimum size.
    pub(super) fn take_ready(&mut self) -> Option<Bytes> {
        let written = match self {
            Self::Plain(page) => page,
            Self::Gzip(page) => page.get_mut(),
        };
        if written.len() < MIN_CHUNK {
            return None;
        }
        Some(mem::take(written).into())
    }

    /// Ends the page, and returns the rest of it.
    pub(super) fn finish(self) -> io::Result<Bytes> {
        match self {
            Self::Plain(page) => Ok(page.into()),
            Self::Gzip(page) => page.finish().map(Bytes::from),
        }
    }
}
