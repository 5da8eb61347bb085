//! Takes modules out of what servers send: Wasm as it is, or in gzip and tar.
//!
//! Everything is streamed: a module is never in memory as a whole, and each layer of packing has a
//! limit, so that small input does not become large output.

use std::io::{self, Cursor, Read, Write};

use aws_lc_rs::digest::{Context, SHA256};
use flate2::read::MultiGzDecoder;

/// What a module begins with. Its version follows.
const MAGIC: &[u8] = b"\0asm";
const MIN: usize = 8;
const GZIP: &[u8] = &[0x1f, 0x8b];
/// Where the header of an archive says what it is.
const USTAR: std::ops::Range<usize> = 257..262;
const HEADER: u64 = 512;
/// gzip in tar in gzip, with one to spare.
const MAX_LAYERS: u32 = 4;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot unpack it")]
    Broken(#[from] io::Error),
    #[error("cannot write it to disk")]
    Write(#[source] io::Error),
    /// Complete, and no Wasm.
    #[error("{0}")]
    Invalid(String),
}

/// Where a module is unpacked to, and how.
pub(super) struct Unpacking<'a> {
    /// The name of the module's file in an archive, in any directory; the first file without.
    pub(super) file: Option<&'a str>,
    /// The most bytes of a layer once it is unpacked.
    pub(super) limit: u64,
    pub(super) output: &'a mut dyn Write,
}

impl Unpacking<'_> {
    /// Writes the module in `input`, and returns its size and SHA-256.
    pub(super) fn unpack(&mut self, input: &mut dyn Read) -> Result<(u64, String), Error> {
        self.layer(input, MAX_LAYERS)
    }

    fn layer(&mut self, input: &mut dyn Read, left: u32) -> Result<(u64, String), Error> {
        let mut begin = Vec::new();
        input.take(HEADER).read_to_end(&mut begin)?;
        let mut whole = Cursor::new(&begin).chain(input);
        let input: &mut dyn Read = &mut whole;
        if begin.starts_with(MAGIC) && begin.len() >= MIN {
            self.module(input)
        } else if begin.starts_with(GZIP) && left > 0 {
            let (input, limit) = (MultiGzDecoder::new(input), self.limit);
            self.layer(&mut Limited { input, left: limit }, left - 1)
        } else if begin.get(USTAR) == Some(b"ustar") && left > 0 {
            self.archive(input, left - 1)
        } else {
            let found = begin[..begin.len().min(16)].escape_ascii();
            let expected = "expected \"\\x00asm\" and a version";
            Err(Error::Invalid(format!(
                "it begins with \"{found}\", {expected}"
            )))
        }
    }

    fn archive(&mut self, input: &mut dyn Read, left: u32) -> Result<(u64, String), Error> {
        // Raw entries: extensions of the format would be read into memory. A name of more than 100
        // bytes is known in part.
        for entry in tar::Archive::new(input).entries()?.raw(true) {
            let entry = entry?;
            let name = entry.path_bytes();
            let base = name.rsplit(|byte| *byte == b'/').next();
            let is_named = self.file.is_none_or(|file| base == Some(file.as_bytes()));
            if !is_named || !entry.header().entry_type().is_file() {
                continue;
            }
            let size = entry.size();
            let mut content = entry.take(size);
            let found = self.layer(&mut content, left)?;
            return match content.limit() {
                0 => Ok(found),
                missing => Err(io::Error::other(format!("{missing} bytes are missing")).into()),
            };
        }
        let file = self.file.unwrap_or("file");
        Err(Error::Invalid(format!("its archive has no {file}")))
    }

    fn module(&mut self, input: &mut dyn Read) -> Result<(u64, String), Error> {
        let (mut digest, mut size) = (Context::new(&SHA256), 0);
        let mut portion = vec![0; 64 << 10];
        loop {
            let count = input.read(&mut portion)?;
            if count == 0 {
                return Ok((size, hexadecimal(digest.finish().as_ref())));
            }
            digest.update(&portion[..count]);
            let written = self.output.write_all(&portion[..count]);
            written.map_err(Error::Write)?;
            size += count as u64;
        }
    }
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fails where its input has more bytes than are left.
struct Limited<R> {
    input: R,
    left: u64,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        let left = self.left.checked_sub(count as u64);
        self.left = left.ok_or_else(|| io::Error::other("more bytes than a module may have"))?;
        Ok(count)
    }
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
