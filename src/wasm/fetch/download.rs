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

use super::unpack::{self, Packing, hexadecimal, unpack};
use crate::http_client::{self, Body};
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
    pub(super) packing: Packing,
    /// The most bytes, before and after unpacking.
    pub(super) limit: u64,
    pub(super) directory: PathBuf,
    /// Size and SHA-256 of the body, where they are known.
    pub(super) expected: Option<(u64, String)>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Network(#[from] http_client::Error),
    #[error("it has more than {0} bytes")]
    TooLarge(u64),
    #[error("cannot write to {directory}")]
    Create {
        directory: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Unpack(#[from] unpack::Error),
    #[error("it has {found}, expected {expected}")]
    Different { found: String, expected: String },
    #[error("the thread that unpacks it ended")]
    Thread,
}

impl Plan {
    pub(super) async fn carry_out(self, body: &mut Body) -> Result<Download, Error> {
        let limit = self.expected.as_ref().map_or(self.limit, |(size, _)| *size);
        let (portions, received) = mpsc::channel(PORTIONS);
        let writing = tokio::task::spawn_blocking(move || self.write(received));
        let sent = send(body, limit, &portions).await;
        if sent.is_err() {
            // Without this the writer would take what came for all.
            let _ = portions.send(None).await;
        }
        drop(portions);
        let written = writing.await.map_err(|_| Error::Thread)?;
        sent.and(written)
    }

    /// Unpacks what is received until the channel is closed.
    fn write(self, received: mpsc::Receiver<Option<Bytes>>) -> Result<Download, Error> {
        let mut file = create(&self.directory).map_err(|source| Error::Create {
            directory: self.directory.clone(),
            source,
        })?;
        let mut input = Input {
            received,
            portion: Bytes::new(),
            digest: Context::new(&SHA256),
            size: 0,
        };
        let unpacked = unpack(&mut input, self.packing, self.limit, &mut file);
        // What follows the module counts for the digest. If the input is broken, that is the error.
        let read = io::copy(&mut input, &mut io::sink()).map_err(unpack::Error::Read);
        let (size, sha256) = read.and(unpacked)?;
        if let Some((size, digest)) = self.expected {
            let found = hexadecimal(input.digest.finish().as_ref());
            if (input.size, &found) != (size, &digest) {
                return Err(Error::Different {
                    found: format!("{} bytes with digest sha256:{found}", input.size),
                    expected: format!("{size} with sha256:{digest}"),
                });
            }
        }
        Ok(Download { file, sha256, size })
    }
}

async fn send(
    body: &mut Body,
    limit: u64,
    portions: &mpsc::Sender<Option<Bytes>>,
) -> Result<(), Error> {
    let mut size = 0;
    while let Some(portion) = body.chunk().await.transpose()? {
        size += portion.len() as u64;
        if size > limit {
            return Err(Error::TooLarge(limit));
        }
        if portions.send(Some(portion)).await.is_err() {
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

/// The received portions, with their size and digest. None among them is a failure.
struct Input {
    received: mpsc::Receiver<Option<Bytes>>,
    portion: Bytes,
    digest: Context,
    size: u64,
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.portion.is_empty() {
            match self.received.blocking_recv() {
                None => return Ok(0),
                Some(None) => return Err(io::Error::other("the transfer failed")),
                Some(Some(portion)) => {
                    self.digest.update(&portion);
                    self.size += portion.len() as u64;
                    self.portion = portion;
                }
            }
        }
        let count = buffer.len().min(self.portion.len());
        self.portion.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

impl Error {
    /// Whether all of the body came, and holds no Wasm.
    pub(super) fn is_invalid(&self) -> bool {
        matches!(self, Self::Unpack(unpack::Error::Invalid(_)))
    }
}

impl From<Error> for String {
    fn from(error: Error) -> Self {
        with_causes(&error)
    }
}
