//! Takes modules out of what servers send: Wasm as it is, or in gzip and tar.
//!
//! Everything is streamed: a module is never in memory as a whole, and each layer of packing has a
//! limit, so that small input does not become large output.

use std::io::{self, Cursor, Read, Write};

use aws_lc_rs::digest::{Context, SHA256};
use flate2::read::MultiGzDecoder;

/// What a module begins with. Its version follows.
const MAGIC: &[u8] = b"\0asm";
const GZIP: &[u8] = &[0x1f, 0x8b];
/// The size of a header in an archive, and the unit of its entries.
const BLOCK: usize = 512;
/// Where a header of an archive says what it is.
const USTAR: std::ops::Range<usize> = 257..262;
/// gzip in tar in gzip, with one to spare.
const MOST_LAYERS: u32 = 4;

/// How a module is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// Not at all.
    Plain,
    /// Not at all, or in any combination of gzip and tar, of which the first file is taken.
    Detect,
    /// In an image's layer: the first file of a tar.gz whose name is `plugin.wasm`.
    Layer,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot unpack it")]
    Read(#[source] io::Error),
    #[error("cannot write it to disk")]
    Write(#[source] io::Error),
    /// Complete, and no Wasm.
    #[error("{0}")]
    Invalid(String),
}

/// Writes the module in `input` to `output`, in at most `limit` bytes, and returns its size and SHA-256.
pub(super) fn unpack(
    input: &mut dyn Read,
    packing: Packing,
    limit: u64,
    output: &mut dyn Write,
) -> Result<(u64, String), Error> {
    match packing {
        Packing::Plain => copy(input, output),
        Packing::Detect => detect(input, limit, output, MOST_LAYERS),
        Packing::Layer => {
            let mut archive = Limited::new(MultiGzDecoder::new(input), limit);
            let is_module = |name: &str| name.rsplit('/').next() == Some("plugin.wasm");
            match first_entry(&mut archive, limit, is_module)? {
                Some(size) => whole_entry(archive.take(size), |entry| copy(entry, output)),
                None => Err(Error::Invalid("it has no plugin.wasm".to_owned())),
            }
        }
    }
}

fn detect(
    input: &mut dyn Read,
    limit: u64,
    output: &mut dyn Write,
    layers_left: u32,
) -> Result<(u64, String), Error> {
    let mut begin = Vec::with_capacity(BLOCK);
    let block = BLOCK as u64;
    let read = (&mut *input).take(block).read_to_end(&mut begin);
    read.map_err(Error::Read)?;
    let is_archive = begin.get(USTAR) == Some(b"ustar");
    let is_gzip = begin.starts_with(GZIP);
    let mut whole = Cursor::new(begin).chain(input);
    if layers_left == 0 || !is_archive && !is_gzip {
        return copy(&mut whole, output);
    }
    if is_gzip {
        let mut unzipped = Limited::new(MultiGzDecoder::new(&mut whole as &mut dyn Read), limit);
        return detect(&mut unzipped, limit, output, layers_left - 1);
    }
    match first_entry(&mut whole, limit, |_| true)? {
        Some(size) => whole_entry(whole.take(size), |mut entry| {
            detect(&mut entry, limit, output, layers_left - 1)
        }),
        None => Err(Error::Invalid("its archive has no file".to_owned())),
    }
}

/// Copies a module and checks how it begins.
fn copy(input: &mut dyn Read, output: &mut dyn Write) -> Result<(u64, String), Error> {
    let (mut digest, mut size) = (Context::new(&SHA256), 0);
    let mut portion = vec![0; 64 << 10];
    loop {
        let count = fill(input, &mut portion).map_err(Error::Read)?;
        let bytes = &portion[..count];
        if size == 0 && (count < 2 * MAGIC.len() || !bytes.starts_with(MAGIC)) {
            let begin = &bytes[..count.min(16)];
            let begin = begin.escape_ascii();
            return Err(Error::Invalid(format!(
                "it begins with \"{begin}\", expected \"\\x00asm\""
            )));
        }
        if count == 0 {
            return Ok((size, hexadecimal(digest.finish().as_ref())));
        }
        digest.update(bytes);
        output.write_all(bytes).map_err(Error::Write)?;
        size += count as u64;
    }
}

/// Reads until the buffer is full or the input ends.
fn fill(input: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Goes to the content of the first file in a tar whose name is wanted, and returns its size. Names
/// lead nowhere: nothing but the content is used. A name over 100 characters is known in part.
///
/// Source: POSIX, `pax`, "ustar Interchange Format".
fn first_entry(
    archive: &mut dyn Read,
    limit: u64,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Option<u64>, Error> {
    let mut header = [0; BLOCK];
    loop {
        let count = fill(archive, &mut header).map_err(Error::Read)?;
        // Archives end with empty blocks, or just so.
        if count == 0 || header.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let size = number(&header[124..136]).filter(|_| count == BLOCK);
        let size = size.ok_or_else(|| broken("its archive has a broken header"))?;
        if size > limit {
            return Err(broken(&format!(
                "its archive has an entry of {size} bytes, over {limit}"
            )));
        }
        let name = header[..100].split(|byte| *byte == 0).next();
        let name = String::from_utf8_lossy(name.unwrap_or_default());
        // Directories, links and extensions of the format are other types.
        if matches!(header[156], b'0' | 0 | b'7') && is_wanted(&name) && !name.ends_with('/') {
            return Ok(Some(size));
        }
        let skipped = size.next_multiple_of(BLOCK as u64);
        let read = io::copy(&mut (&mut *archive).take(skipped), &mut io::sink());
        read.map_err(Error::Read)?;
    }
}

/// Reads an entry, which the archive must hold to its end.
fn whole_entry<R: Read, T>(
    mut entry: io::Take<R>,
    read: impl FnOnce(&mut io::Take<R>) -> Result<T, Error>,
) -> Result<T, Error> {
    let found = read(&mut entry)?;
    let is_whole = entry.limit() == 0;
    is_whole
        .then_some(found)
        .ok_or_else(|| broken("its archive is cut off"))
}

/// An octal number, or a binary one that its first bit marks.
fn number(field: &[u8]) -> Option<u64> {
    if let Some((0x80, binary)) = field.split_first() {
        let (high, low) = binary.split_last_chunk::<8>()?;
        return high
            .iter()
            .all(|byte| *byte == 0)
            .then(|| u64::from_be_bytes(*low));
    }
    let text = field.split(|byte| *byte == 0).next()?;
    let text = std::str::from_utf8(text).ok()?.trim();
    u64::from_str_radix(if text.is_empty() { "0" } else { text }, 8).ok()
}

fn broken(problem: &str) -> Error {
    Error::Read(io::Error::other(problem.to_owned()))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fails where its input has more than `limit` bytes.
struct Limited<R> {
    input: R,
    limit: u64,
    left: u64,
}

impl<R> Limited<R> {
    fn new(input: R, limit: u64) -> Self {
        let left = limit;
        Self { input, limit, left }
    }
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            let limit = self.limit;
            io::Error::other(format!("more than {limit} bytes once unpacked"))
        })?;
        Ok(count)
    }
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
