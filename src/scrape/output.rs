//! The page as it is written, in the encoding of the response.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::ops::Range;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;

/// Smaller runs of lines are copied together.
const SMALL: usize = 4 << 10;
/// How much is copied together before it is sent.
const CHUNK: usize = 32 << 10;

#[derive(Default)]
pub(super) struct Output {
    gzip: Option<GzEncoder<Vec<u8>>>,
    pending: Vec<u8>,
    ready: VecDeque<Bytes>,
}

impl Output {
    pub(super) fn new(is_gzip: bool) -> Self {
        Self {
            gzip: is_gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast())),
            ..Self::default()
        }
    }

    /// Writes part of a chunk, without a copy if it is large.
    pub(super) fn pass(&mut self, chunk: &Bytes, part: Range<usize>) {
        if self.gzip.is_none() && part.len() >= SMALL {
            self.flush();
            self.ready.push_back(chunk.slice(part));
        } else {
            self.write(&chunk[part]);
        }
    }

    pub(super) fn write(&mut self, lines: &[u8]) {
        let pending = match &mut self.gzip {
            Some(gzip) => {
                // A vector takes everything.
                let _ = gzip.write_all(lines);
                gzip.get_mut()
            }
            None => {
                self.pending.extend_from_slice(lines);
                &mut self.pending
            }
        };
        if pending.len() >= CHUNK {
            self.ready.push_back(std::mem::take(pending).into());
        }
    }

    /// Ends the page: the rest is ready as well.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        if let Some(gzip) = self.gzip.take() {
            self.pending = gzip.finish()?;
        }
        self.flush();
        Ok(())
    }

    /// Takes the next chunk that is ready to be sent.
    pub(super) fn take_ready(&mut self) -> Option<Bytes> {
        self.ready.pop_front()
    }

    fn flush(&mut self) {
        if !self.pending.is_empty() {
            self.ready
                .push_back(std::mem::take(&mut self.pending).into());
        }
    }
}
