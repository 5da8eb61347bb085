//! Extracts the module from a body into a temporary file while it is received: plain Wasm, or Wasm in gzip
//! and tar.
//!
//! Unpacking, digests and disk access run on a blocking thread, which a bounded pipe feeds. A module is
//! never completely in memory, and each layer of packing is limited, so that a small input does not become
//! a large output. The file is removed unless the caller persists it.

use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use aws_lc_rs::digest::{Context, SHA256};
use flate2::read::MultiGzDecoder;
use tempfile::NamedTempFile;
use tokio::io::{AsyncWriteExt, DuplexStream};
use tokio_util::io::{InspectReader, SyncIoBridge};

use super::Error;
use super::error::FetchError;
use crate::net::http_client::Body;
use crate::problem::Code;
use crate::runtime::lifecycle::with_causes;

/// The most bytes between the network and the disk.
const PIPE: usize = 256 << 10;

/// Prefix and suffix of temporary files.
pub(crate) const PREFIX: &str = "fetch-";
pub(crate) const SUFFIX: &str = ".tmp";

/// A module on disk, under a temporary name.
#[derive(Debug)]
pub(crate) struct Download {
    pub(crate) file: NamedTempFile,
    /// The digest of the module.
    pub(crate) sha256: String,
    pub(crate) size: u64,
}

/// The source, limits and destination of a download.
pub(super) struct Plan {
    /// The URL in errors.
    pub(super) url: String,
    /// The name of the module's file in an archive; `None` for the first file.
    pub(super) file: Option<&'static str>,
    /// The most bytes of the body.
    pub(super) max_received: u64,
    /// The most bytes of each unpacked layer.
    pub(super) max_unpacked: u64,
    pub(super) directory: PathBuf,
    /// The expected SHA-256 of the body.
    pub(super) digest: Option<String>,
}

impl Plan {
    /// Downloads a body.
    pub(super) async fn download(self, body: Body) -> Result<Download, Error> {
        let url = self.url.clone();
        let limit = self.max_received;
        let (pipe, received) = tokio::io::duplex(PIPE);
        let writing = tokio::task::spawn_blocking(move || self.write(received));
        let sent = send(body, limit, pipe).await;
        let written = writing.await.map_err(FetchError::from);
        match sent.and(written).map_err(|error| unusable(&url, &error))? {
            Err(UnpackError::Invalid(problem)) => {
                let found = format!("fetched Wasm binary from {url} is invalid: {problem}");
                Err((Code::WasmInvalid, found))
            }
            unpacked => unpacked.map_err(|error| unusable(&url, &error)),
        }
    }

    /// Unpacks the received body into a file, and compares its digest.
    fn write(&self, received: DuplexStream) -> Result<Download, UnpackError> {
        let mut file = tempfile::Builder::new()
            .prefix(PREFIX)
            .suffix(SUFFIX)
            .permissions(std::fs::Permissions::from_mode(0o644))
            .tempfile_in(&self.directory)
            .map_err(disk_error)?;
        let mut digest = Context::new(&SHA256);
        let received = InspectReader::new(received, |portion: &[u8]| digest.update(portion));
        let mut input = SyncIoBridge::new(received);
        let unpacked = self.unpack(&mut input, file.as_file_mut(), MAX_LAYERS);
        // The digest includes the bytes behind the module.
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

    /// Extracts the module from `input`, from at most `layers` layers of packing. Returns its size and
    /// SHA-256.
    fn unpack(
        &self,
        input: &mut dyn Read,
        output: &mut dyn Write,
        layers: u32,
    ) -> Result<(u64, String), UnpackError> {
        let mut begin = Vec::new();
        input.take(HEADER).read_to_end(&mut begin)?;
        let mut input = Read::chain(Cursor::new(&begin), input);
        if begin.starts_with(MAGIC) && begin.len() >= MIN {
            Ok(copy(&mut input, output)?)
        } else if begin.starts_with(GZIP) && layers > 0 {
            let mut content = MultiGzDecoder::new(input).take(self.max_unpacked.saturating_add(1));
            let unpacked = self.unpack(&mut content, output, layers - 1);
            match content.limit() {
                0 => Err(io::Error::other("more bytes than a module may have").into()),
                _ => unpacked,
            }
        } else if begin.get(USTAR) == Some(b"ustar") && layers > 0 {
            self.unpack_archive(&mut input, output, layers - 1)
        } else {
            let found = begin[..begin.len().min(16)].escape_ascii();
            Err(UnpackError::Invalid(format!(
                "it begins with \"{found}\", expected \"\\x00asm\" and a version"
            )))
        }
    }

    /// Extracts the module from an archive of tar. Returns its size and SHA-256.
    fn unpack_archive(
        &self,
        input: &mut dyn Read,
        output: &mut dyn Write,
        layers: u32,
    ) -> Result<(u64, String), UnpackError> {
        // Entries are raw, because extensions of the format would be read into memory. Names are therefore cut to 100
        // bytes.
        for entry in tar::Archive::new(input).entries()?.raw(true) {
            let entry = entry?;
            let name = entry.path_bytes();
            let base = name.rsplit(|byte| *byte == b'/').next();
            if self.file.is_some_and(|file| base != Some(file.as_bytes()))
                || !entry.header().entry_type().is_file()
            {
                continue;
            }
            let size = entry.size();
            let mut content = entry.take(size);
            let unpacked = self.unpack(&mut content, output, layers)?;
            return match content.limit() {
                0 => Ok(unpacked),
                missing => Err(io::Error::other(format!("{missing} bytes are missing")).into()),
            };
        }
        Err(UnpackError::Invalid(format!("its archive has no {}", self.file.unwrap_or("file"))))
    }
}

/// Returns the error of a response without a complete module.
pub(super) fn unusable(url: &str, error: &(dyn std::error::Error + 'static)) -> Error {
    let found = format!("could not fetch Wasm binary from {url}: {}", with_causes(error));
    (Code::WasmDownloadFailed, found)
}

/// Sends a body to the thread that unpacks it. Fails if it is incomplete or has more than `limit` bytes.
async fn send(mut body: Body, limit: u64, mut pipe: DuplexStream) -> Result<(), FetchError> {
    let mut size = 0;
    while let Some(portion) = body.chunk().await {
        let portion = portion?;
        size += portion.len() as u64;
        if size > limit {
            return Err(FetchError::TooLarge { limit });
        }
        if pipe.write_all(&portion).await.is_err() {
            // The thread that writes has failed, and returns the reason.
            break;
        }
    }
    Ok(())
}

/// The beginning of a module. Its version follows.
const MAGIC: &[u8] = b"\0asm";
const MIN: usize = 8;
const GZIP: &[u8] = &[0x1f, 0x8b];
/// The bytes of an archive's header that identify the format.
const USTAR: std::ops::Range<usize> = 257..262;
const HEADER: u64 = 512;
/// The most layers of packing: gzip in tar in gzip, and one more.
const MAX_LAYERS: u32 = 4;

#[derive(Debug, thiserror::Error)]
enum UnpackError {
    #[error("cannot unpack it")]
    Broken(#[from] io::Error),
    /// The content is complete, but not Wasm.
    #[error("{0}")]
    Invalid(String),
}

/// Copies all bytes. Returns their number and SHA-256.
pub(crate) fn copy(input: &mut dyn Read, output: &mut dyn Write) -> io::Result<(u64, String)> {
    let mut digest = Context::new(&SHA256);
    let mut size = 0;
    let mut portion = vec![0; 64 << 10];
    loop {
        let count = input.read(&mut portion)?;
        if count == 0 {
            return Ok((size, hexadecimal(digest.finish().as_ref())));
        }
        digest.update(&portion[..count]);
        output.write_all(&portion[..count]).map_err(disk_error)?;
        size += count as u64;
    }
}

fn disk_error(error: io::Error) -> io::Error {
    io::Error::other(format!("cannot write it to disk: {error}"))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
