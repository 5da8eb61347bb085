//! Streams a body to a temporary file, and takes the module out of it on the way: Wasm as it is, or in
//! gzip and tar.
//!
//! Unpacking, digests and the disk are on a thread of their own; a bounded channel leads there. A
//! module is never in memory as a whole, and each layer of packing has a limit, so that small input
//! does not become large output. The file is removed unless the caller keeps it.

use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use aws_lc_rs::digest::{Context, SHA256};
use bytes::{Buf, Bytes};
use flate2::read::MultiGzDecoder;
use tempfile::NamedTempFile;
use tokio::sync::mpsc;

use super::Error;
use crate::http_client::Body;
use crate::lifecycle::with_causes;

/// Portions of at most 32 KiB between the network and the disk.
const PORTIONS: usize = 8;

/// What temporary files are called.
pub(crate) const PREFIX: &str = "fetch-";
pub(crate) const SUFFIX: &str = ".tmp";

/// A module on disk, under a temporary name.
#[derive(Debug)]
pub(crate) struct Download {
    pub(crate) file: NamedTempFile,
    /// Of the module.
    pub(crate) sha256: String,
    pub(crate) size: u64,
}

/// What is downloaded, and where to.
pub(super) struct Plan {
    /// For errors.
    pub(super) url: String,
    /// The name of the module's file in an archive; the first file without.
    pub(super) file: Option<&'static str>,
    /// In bytes.
    pub(super) max_received: u64,
    pub(super) max_unpacked: u64,
    pub(super) directory: PathBuf,
    /// The SHA-256 of the body, where it is known.
    pub(super) digest: Option<String>,
}

impl Plan {
    /// Downloads a body to its end.
    pub(super) async fn carry_out(self, body: Body) -> Result<Download, Error> {
        let (url, limit) = (self.url.clone(), self.max_received);
        let (portions, received) = mpsc::channel(PORTIONS);
        let writing = tokio::task::spawn_blocking(move || self.write(received));
        let sent = send(body, limit, portions).await;
        let written = writing.await.map_err(|error| error.to_string());
        match sent.and(written) {
            Ok(Ok(download)) => Ok(download),
            Ok(Err(UnpackError::Invalid(problem))) => Err(Error::Invalid { url, problem }),
            Ok(Err(broken)) => Err(unusable(&url, &with_causes(&broken))),
            Err(problem) => Err(unusable(&url, &problem)),
        }
    }

    /// Unpacks what is received until the channel is closed.
    fn write(self, received: mpsc::Receiver<Bytes>) -> Result<Download, UnpackError> {
        let readable = std::fs::Permissions::from_mode(0o644);
        let mut builder = tempfile::Builder::new();
        builder.prefix(PREFIX).suffix(SUFFIX).permissions(readable);
        let file = builder.tempfile_in(&self.directory);
        let mut file = file.map_err(UnpackError::Write)?;
        let mut input = Input {
            received,
            portion: Bytes::new(),
            digest: Context::new(&SHA256),
        };
        let mut unpacking = Unpacking {
            file: self.file,
            limit: self.max_unpacked,
            output: file.as_file_mut(),
        };
        let unpacked = unpacking.unpack(&mut input);
        // What follows the module counts for the digest.
        io::copy(&mut input, &mut io::sink())?;
        let found = hexadecimal(input.digest.finish().as_ref());
        if let Some(expected) = self.digest.filter(|digest| *digest != found) {
            let problem = format!("it has digest sha256:{found}, expected sha256:{expected}");
            return Err(io::Error::other(problem).into());
        }
        let (size, sha256) = unpacked?;
        Ok(Download { file, sha256, size })
    }
}

/// The error of a module that came, but not as one.
pub(super) fn unusable(url: &str, problem: &str) -> Error {
    Error::Download(format!("could not fetch Wasm binary from {url}: {problem}"))
}

async fn send(mut body: Body, limit: u64, portions: mpsc::Sender<Bytes>) -> Result<(), String> {
    let mut size = 0;
    while let Some(portion) = body.chunk().await {
        let portion = portion.map_err(|error| with_causes(&error))?;
        size += portion.len() as u64;
        if size > limit {
            return Err(format!("it has more than {limit} bytes"));
        }
        if portions.send(portion).await.is_err() {
            // The writer has failed and says why.
            break;
        }
    }
    Ok(())
}

/// The received portions, with their digest.
struct Input {
    received: mpsc::Receiver<Bytes>,
    portion: Bytes,
    digest: Context,
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.portion.is_empty() {
            let Some(portion) = self.received.blocking_recv() else {
                return Ok(0);
            };
            self.digest.update(&portion);
            self.portion = portion;
        }
        let count = buffer.len().min(self.portion.len());
        self.portion.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

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
enum UnpackError {
    #[error("cannot unpack it")]
    Broken(#[from] io::Error),
    #[error("cannot write it to disk")]
    Write(#[source] io::Error),
    /// Complete, and no Wasm.
    #[error("{0}")]
    Invalid(String),
}

/// Where a module is unpacked to, and how.
struct Unpacking<'a> {
    /// The name of the module's file in an archive, in any directory; the first file without.
    file: Option<&'a str>,
    /// The most bytes of a layer once it is unpacked.
    limit: u64,
    output: &'a mut dyn Write,
}

impl Unpacking<'_> {
    /// Writes the module in `input`, and returns its size and SHA-256.
    fn unpack(&mut self, input: &mut dyn Read) -> Result<(u64, String), UnpackError> {
        self.layer(input, MAX_LAYERS)
    }

    fn layer(&mut self, input: &mut dyn Read, left: u32) -> Result<(u64, String), UnpackError> {
        let mut begin = Vec::new();
        input.take(HEADER).read_to_end(&mut begin)?;
        let mut whole = Read::chain(Cursor::new(&begin), input);
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
            Err(UnpackError::Invalid(format!(
                "it begins with \"{found}\", {expected}"
            )))
        }
    }

    fn archive(&mut self, input: &mut dyn Read, left: u32) -> Result<(u64, String), UnpackError> {
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
        Err(UnpackError::Invalid(format!("its archive has no {file}")))
    }

    fn module(&mut self, input: &mut dyn Read) -> Result<(u64, String), UnpackError> {
        let (mut digest, mut size) = (Context::new(&SHA256), 0);
        let mut portion = vec![0; 64 << 10];
        loop {
            let count = input.read(&mut portion)?;
            if count == 0 {
                return Ok((size, hexadecimal(digest.finish().as_ref())));
            }
            digest.update(&portion[..count]);
            let written = self.output.write_all(&portion[..count]);
            written.map_err(UnpackError::Write)?;
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
