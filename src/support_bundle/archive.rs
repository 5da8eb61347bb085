//! A `.tar.gz` whose files are compressed before their sizes are known.
//!
//! A header of tar has the size of the file behind it. Each file is therefore compressed into memory by
//! itself, and so is its header, once the size is known; gzip reads what follows each other as one.

use std::cell::Cell;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;

const BLOCK: usize = 512;

/// Why a file is incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Full {
    #[error("it has more than {} MiB", .0 >> 20)]
    File(u64),
    #[error("the bundle has no room left for it")]
    Bundle,
}

/// A file of the archive.
pub(super) struct File {
    pub(super) name: String,
    size: u64,
    compressed: Vec<u8>,
}

/// Compresses a file.
pub(super) struct Compressor<'a> {
    gzip: GzEncoder<Vec<u8>>,
    size: u64,
    largest: u64,
    /// What all files may take compressed.
    room: &'a Cell<usize>,
}

impl<'a> Compressor<'a> {
    pub(super) fn new(largest: u64, room: &'a Cell<usize>) -> Self {
        Self {
            gzip: GzEncoder::new(Vec::new(), Compression::fast()),
            size: 0,
            largest,
            room,
        }
    }

    pub(super) fn has_content(&self) -> bool {
        self.size > 0
    }

    /// Adds what the limits allow.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Full> {
        let left = usize::try_from(self.largest - self.size).unwrap_or(usize::MAX);
        let fitting = &bytes[..bytes.len().min(left)];
        let before = self.gzip.get_ref().len();
        // A Vec takes everything.
        let _ = self.gzip.write_all(fitting);
        self.size += fitting.len() as u64;
        let grown = self.gzip.get_ref().len() - before;
        self.room.set(self.room.get().saturating_sub(grown));
        match (self.room.get(), fitting.len() < bytes.len()) {
            (0, _) => Err(Full::Bundle),
            (_, true) => Err(Full::File(self.largest)),
            _ => Ok(()),
        }
    }

    pub(super) fn finish(self, name: String) -> io::Result<File> {
        Ok(File {
            name,
            size: self.size,
            compressed: self.gzip.finish()?,
        })
    }
}

/// Writes the archive, with the files in `folder`.
pub(super) fn write(folder: &str, files: &[File], out: &mut impl Write) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    for file in files {
        let mut header = tar::Header::new_gnu();
        header.set_path(format!("{folder}/{}", file.name))?;
        header.set_size(file.size);
        header.set_mode(0o600);
        header.set_mtime(now.as_ref().map_or(0, |now| now.as_secs()));
        header.set_cksum();
        out.write_all(&gzipped(header.as_bytes())?)?;
        out.write_all(&file.compressed)?;
        let padding = file.size.next_multiple_of(BLOCK as u64) - file.size;
        out.write_all(&gzipped(&[0; BLOCK][..padding as usize])?)?;
    }
    out.write_all(&gzipped(&[0; 2 * BLOCK])?)?;
    out.flush()
}

fn gzipped(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(bytes)?;
    gzip.finish()
}
