//! Streams a body to a temporary file, and takes the module out of it on the way: Wasm as it is, or in
//! gzip and tar.
//!
//! Unpacking, digests and the disk are on a thread of their own; a bounded pipe leads there. A
//! module is never in memory as a whole, and each layer of packing has a limit, so that small input
//! does not become large output. The file is removed unless the caller keeps it.

use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use aws_lc_rs::digest::{Context, SHA256};
use flate2::read::MultiGzDecoder;
use tempfile::NamedTempFile;
use tokio::io::{AsyncWriteExt, DuplexStream};
use tokio_util::io::{InspectReader, SyncIoBridge};

use super::Error;
use crate::http_client::Body;
use crate::lifecycle::with_causes;
use crate::problem::codes;

/// Most bytes between the network and the disk.
const PIPE: usize = 256 << 10;

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
        let (pipe, received) = tokio::io::duplex(PIPE);
        let writing = tokio::task::spawn_blocking(move || self.write(received));
        let sent = send(body, limit, pipe).await;
        let written = writing.await.map_err(|error| error.to_string());
        match sent.and(written) {
            Ok(Ok(download)) => Ok(download),
            Ok(Err(UnpackError::Invalid(problem))) => {
                let found = format!("fetched Wasm binary from {url} is invalid: {problem}");
                Err((codes::WASM_INVALID, found))
            }
            Ok(Err(broken)) => Err(unusable(&url, &with_causes(&broken))),
            Err(problem) => Err(unusable(&url, &problem)),
        }
    }

    /// Unpacks what is received until it ends.
    fn write(&self, received: DuplexStream) -> Result<Download, UnpackError> {
        let readable = std::fs::Permissions::from_mode(0o644);
        let mut builder = tempfile::Builder::new();
        builder.prefix(PREFIX).suffix(SUFFIX).permissions(readable);
        let file = builder.tempfile_in(&self.directory);
        let mut file = file.map_err(no_disk)?;
        let mut digest = Context::new(&SHA256);
        let received = InspectReader::new(received, |portion: &[u8]| digest.update(portion));
        let mut input = SyncIoBridge::new(received);
        let unpacked = self.unpack(&mut input, file.as_file_mut(), MAX_LAYERS);
        // What follows the module counts for the digest.
        io::copy(&mut input, &mut io::sink())?;
        drop(input);
        let found = hexadecimal(digest.finish().as_ref());
        if let Some(expected) = self.digest.as_ref().filter(|digest| **digest != found) {
            let problem = format!("it has digest sha256:{found}, expected sha256:{expected}");
            return Err(io::Error::other(problem).into());
        }
        let (size, sha256) = unpacked?;
        Ok(Download { file, sha256, size })
    }

    /// Writes the module in `input`, which `left` layers of packing may be around. Returns its size and
    /// SHA-256.
    fn unpack(
        &self,
        input: &mut dyn Read,
        output: &mut dyn Write,
        left: u32,
    ) -> Result<(u64, String), UnpackError> {
        let mut begin = Vec::new();
        input.take(HEADER).read_to_end(&mut begin)?;
        let mut input = Read::chain(Cursor::new(&begin), input);
        if begin.starts_with(MAGIC) && begin.len() >= MIN {
            Ok(copy(&mut input, output)?)
        } else if begin.starts_with(GZIP) && left > 0 {
            let mut content = MultiGzDecoder::new(input).take(self.max_unpacked.saturating_add(1));
            let found = self.unpack(&mut content, output, left - 1);
            match content.limit() {
                0 => Err(io::Error::other("more bytes than a module may have").into()),
                _ => found,
            }
        } else if begin.get(USTAR) == Some(b"ustar") && left > 0 {
            self.unpack_archive(&mut input, output, left - 1)
        } else {
            let found = begin[..begin.len().min(16)].escape_ascii();
            let expected = "expected \"\\x00asm\" and a version";
            Err(UnpackError::Invalid(format!(
                "it begins with \"{found}\", {expected}"
            )))
        }
    }

    fn unpack_archive(
        &self,
        input: &mut dyn Read,
        output: &mut dyn Write,
        left: u32,
    ) -> Result<(u64, String), UnpackError> {
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
            let found = self.unpack(&mut content, output, left)?;
            return match content.limit() {
                0 => Ok(found),
                missing => Err(io::Error::other(format!("{missing} bytes are missing")).into()),
            };
        }
        let file = self.file.unwrap_or("file");
        Err(UnpackError::Invalid(format!("its archive has no {file}")))
    }
}

/// The error of a response that does not contain a whole module.
pub(super) fn unusable(url: &str, problem: &str) -> Error {
    let found = format!("could not fetch Wasm binary from {url}: {problem}");
    (codes::WASM_DOWNLOAD_FAILED, found)
}

async fn send(mut body: Body, limit: u64, mut pipe: DuplexStream) -> Result<(), String> {
    let mut size = 0;
    while let Some(portion) = body.chunk().await {
        let portion = portion.map_err(|error| with_causes(&error))?;
        size += portion.len() as u64;
        if size > limit {
            return Err(format!("it has more than {limit} bytes"));
        }
        if pipe.write_all(&portion).await.is_err() {
            // The writer has failed and says why.
            break;
        }
    }
    Ok(())
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
    /// Complete, and no Wasm.
    #[error("{0}")]
    Invalid(String),
}

/// Copies all there is. Returns its size and SHA-256.
pub(crate) fn copy(input: &mut dyn Read, output: &mut dyn Write) -> io::Result<(u64, String)> {
    let (mut digest, mut size) = (Context::new(&SHA256), 0);
    let mut portion = vec![0; 64 << 10];
    loop {
        let count = input.read(&mut portion)?;
        if count == 0 {
            return Ok((size, hexadecimal(digest.finish().as_ref())));
        }
        digest.update(&portion[..count]);
        output.write_all(&portion[..count]).map_err(no_disk)?;
        size += count as u64;
    }
}

fn no_disk(error: io::Error) -> io::Error {
    io::Error::other(format!("cannot write it to disk: {error}"))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
