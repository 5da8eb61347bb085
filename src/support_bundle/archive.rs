//! A `.tar.gz` whose files are compressed before their sizes are known.
//!
//! A header of tar has the size of the file behind it. Each file is therefore compressed into memory by
//! itself, and so is its header, once the size is known; gzip reads what follows each other as one.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;

const BLOCK: usize = 512;

/// A file of the archive.
pub(super) struct File {
    pub(super) name: String,
    size: u64,
    compressed: Vec<u8>,
}

/// Compresses a file, as long as the bundle has room for it.
pub(super) struct Compressor {
    gzip: GzEncoder<Vec<u8>>,
    size: u64,
    /// What all files may take compressed.
    room: Arc<AtomicUsize>,
}

impl Compressor {
    pub(super) fn new(room: Arc<AtomicUsize>) -> Self {
        Self {
            gzip: GzEncoder::new(Vec::new(), Compression::fast()),
            size: 0,
            room,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.room.load(Ordering::Relaxed) == 0
    }

    pub(super) fn finish(self, name: String) -> io::Result<File> {
        Ok(File {
            name,
            size: self.size,
            compressed: self.gzip.finish()?,
        })
    }
}

impl Write for Compressor {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_full() {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let before = self.gzip.get_ref().len();
        let written = self.gzip.write(bytes)?;
        self.size += written as u64;
        let grown = self.gzip.get_ref().len() - before;
        let shrink = |room: usize| Some(room.saturating_sub(grown));
        let _ = self
            .room
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, shrink);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
