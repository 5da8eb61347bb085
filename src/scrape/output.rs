//! Collects the merged page in the encoding of the response, and hands it out in chunks.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;

/// The least that is sent at once, in bytes, but for the end of the page.
const MIN_CHUNK: usize = 32 << 10;

#[derive(Default)]
pub(super) struct Output {
    gzip: Option<GzEncoder<Vec<u8>>>,
    plain: Vec<u8>,
    has_ended: bool,
}

impl Output {
    pub(super) fn new(is_gzip: bool) -> Self {
        Self {
            gzip: is_gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast())),
            ..Self::default()
        }
    }

    pub(super) fn write(&mut self, lines: &[u8]) {
        match &mut self.gzip {
            // Writing to a vector does not fail.
            Some(gzip) => drop(gzip.write_all(lines)),
            None => self.plain.extend_from_slice(lines),
        }
    }

    /// Ends the page, and makes the rest of it ready.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        if let Some(gzip) = self.gzip.take() {
            self.plain = gzip.finish()?;
        }
        self.has_ended = true;
        Ok(())
    }

    /// Takes the next chunk that is ready to be sent. After [`Self::finish`], None is the end of the page.
    pub(super) fn take_ready(&mut self) -> Option<Bytes> {
        let written = match &mut self.gzip {
            Some(gzip) => gzip.get_mut(),
            None => &mut self.plain,
        };
        let is_ready = written.len() >= MIN_CHUNK || self.has_ended && !written.is_empty();
        is_ready.then(|| std::mem::take(written).into())
    }
}
