//! Streams a body to a temporary file, unpacked on the way.
//!
//! Unpacking, digests and the disk are on a thread of their own; a bounded channel leads there. The
//! file is removed unless the caller keeps it.

use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{Context, SHA256};
use bytes::{Buf, Bytes};
use tempfile::NamedTempFile;
use tokio::sync::mpsc;

use super::Error;
use super::unpack::{self, Unpacking, hexadecimal};
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
            Ok(Err(unpack::Error::Invalid(problem))) => Err(Error::Invalid { url, problem }),
            Ok(Err(broken)) => Err(unusable(&url, &with_causes(&broken))),
            Err(problem) => Err(unusable(&url, &problem)),
        }
    }

    /// Unpacks what is received until the channel is closed.
    fn write(self, received: mpsc::Receiver<Bytes>) -> Result<Download, unpack::Error> {
        let mut file = create(&self.directory).map_err(unpack::Error::Write)?;
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

fn create(directory: &Path) -> io::Result<NamedTempFile> {
    let readable = std::fs::Permissions::from_mode(0o644);
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).suffix(SUFFIX).permissions(readable);
    builder.tempfile_in(directory)
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
