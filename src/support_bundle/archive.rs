//! A `.tar.gz` of files that are compressed as they arrive, as none is kept whole.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

/// What a file may take compressed.
pub(super) const MAX_COMPRESSED: usize = 16 << 20;
const FOLDER: &str = "support-bundle";

/// A file of the archive. What it has no room for is left out.
pub(super) struct File {
    pub(super) name: String,
    size: u64,
    gzip: GzEncoder<Vec<u8>>,
}

impl File {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            size: 0,
            gzip: GzEncoder::new(Vec::new(), Compression::fast()),
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.gzip.get_ref().len() >= MAX_COMPRESSED
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_full() {
            self.gzip.write_all(bytes)?;
            self.size += bytes.len() as u64;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the archive. Its headers need the sizes, so the files are compressed once more.
pub(super) fn write(files: Vec<File>, out: &mut impl Write) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut tar = tar::Builder::new(GzEncoder::new(out, Compression::fast()));
    for file in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(file.size);
        header.set_mode(0o600);
        header.set_mtime(now.as_ref().map_or(0, |now| now.as_secs()));
        let compressed = file.gzip.finish()?;
        let path = format!("{FOLDER}/{}", file.name);
        tar.append_data(&mut header, path, GzDecoder::new(&*compressed))?;
    }
    tar.into_inner()?.finish()?.flush()
}
