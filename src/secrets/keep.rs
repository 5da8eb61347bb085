//! Keeps key and certificate over a restart of the container, where that is asked for.
//!
//! One file, a line of JSON and the key behind it, replaced as a whole, in a directory of our own
//! below the one given, which must be in memory: a private key does not belong on a disk. What is
//! found there is used only if it is ours alone, for the same identity and kind of key, and still
//! good.
//!
//! Does not decide when to renew.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::certificate::{CertificateError, Workload};
use crate::identity::SpiffeId;
use crate::replace_file::replace_file;

const DIRECTORY: &str = "istio-agent";
const FILE: &str = "workload.json";

/// Many times a chain with its key.
const LARGEST: u64 = 1 << 20;

/// File systems in memory, as `statfs` names them.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

const OTHERS: u32 = 0o077;

/// Where a workload is kept, and what it is to be like.
#[derive(Clone, Debug)]
pub(super) struct Keep {
    directory: PathBuf,
    identity: SpiffeId,
    /// The kind of key and its encoding.
    kind: String,
}

/// The line before the key.
#[derive(Deserialize, Serialize)]
struct Kept {
    identity: String,
    kind: String,
    issued: u64,
    answer: Vec<String>,
}

/// Why nothing is kept, or what is kept is not used.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error("{path}: {source}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} is on a disk, expected a file system in memory", path = .path.display())]
    OnDisk { path: PathBuf },
    #[error(
        "{path} belongs to user {owner} with mode {mode:o}, expected user {us} and nobody else",
        path = .path.display()
    )]
    NotOurs {
        path: PathBuf,
        owner: u32,
        mode: u32,
        us: u32,
    },
    #[error("{path} cannot be read: {source}", path = .path.display())]
    Form {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("it is for another identity or another kind of key")]
    Other,
    #[error("it could not be worked on: {0}")]
    Interrupted(#[from] tokio::task::JoinError),
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

impl Keep {
    pub(super) fn new(parent: &Path, identity: &SpiffeId, kind: String) -> Self {
        Self {
            directory: parent.join(DIRECTORY),
            identity: identity.clone(),
            kind,
        }
    }

    /// What is kept, if it is of use, with the moment it was issued.
    pub(super) async fn restore(self, now: SystemTime) -> Option<(Workload, SystemTime)> {
        let loading = tokio::task::spawn_blocking(move || self.load(now));
        let found = match loading.await {
            Ok(found) => found,
            Err(error) => Err(error.into()),
        };
        found.unwrap_or_else(|error| {
            tracing::warn!(
                target: "cache",
                "the workload certificate that was kept is not used: {error}; asking for a new one"
            );
            None
        })
    }

    /// Keeps an answer instead of the one before.
    pub(super) async fn save(
        self,
        workload: Arc<Workload>,
        answer: Vec<String>,
        issued: SystemTime,
    ) {
        let storing = tokio::task::spawn_blocking(move || {
            self.store(workload.certificate.key_pem(), answer, issued)
        });
        let stored = match storing.await {
            Ok(stored) => stored,
            Err(error) => Err(error.into()),
        };
        if let Err(error) = stored {
            tracing::error!(
                target: "cache",
                "the workload certificate cannot be kept: {error}; a restart asks for a new one"
            );
        }
    }

    fn load(&self, now: SystemTime) -> Result<Option<(Workload, SystemTime)>, KeepError> {
        let path = self.directory.join(FILE);
        let text = match self.read(&path) {
            Err(KeepError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            text => text?,
        };
        let (line, key_pem) = match text.iter().position(|byte| *byte == b'\n') {
            Some(end) => (&text[..end], &text[end + 1..]),
            None => (&text[..], &[][..]),
        };
        let kept: Kept =
            serde_json::from_slice(line).map_err(|source| KeepError::Form { path, source })?;
        if kept.identity != self.identity.to_string() || kept.kind != self.kind {
            return Err(KeepError::Other);
        }
        // A key that is no text fails as a key.
        let key_pem = Zeroizing::new(String::from_utf8_lossy(key_pem).into_owned());
        let workload = Workload::new(&kept.answer, key_pem, now)?;
        if !workload.certificate.is_of(&self.identity) {
            return Err(KeepError::Other);
        }
        let issued = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(kept.issued));
        Ok(Some((workload, issued.unwrap_or(now).min(now))))
    }

    pub(super) fn store(
        &self,
        key_pem: &str,
        answer: Vec<String>,
        issued: SystemTime,
    ) -> Result<(), KeepError> {
        self.prepare()?;
        let since_epoch = issued
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let kept = Kept {
            identity: self.identity.to_string(),
            kind: self.kind.clone(),
            issued: since_epoch.as_secs(),
            answer,
        };
        let path = self.directory.join(FILE);
        let line = serde_json::to_vec(&kept).map_err(|source| KeepError::Form {
            path: path.clone(),
            source,
        })?;
        let text = Zeroizing::new([&line, &b"\n"[..], key_pem.as_bytes()].concat());
        replace_file(&path, &text, 0o600).map_err(|source| KeepError::Io { path, source })
    }

    fn read(&self, path: &Path) -> Result<Zeroizing<Vec<u8>>, KeepError> {
        let io = |source| KeepError::Io {
            path: path.to_owned(),
            source,
        };
        ours(
            &self.directory,
            &self.directory.symlink_metadata().map_err(io)?,
        )?;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
            .open(path)
            .map_err(io)?;
        ours(path, &file.metadata().map_err(io)?)?;
        // Sized beforehand: what grows leaves copies of the key behind.
        let mut text = Zeroizing::new(Vec::with_capacity(64 * 1024));
        file.take(LARGEST).read_to_end(&mut text).map_err(io)?;
        Ok(text)
    }

    fn prepare(&self) -> Result<(), KeepError> {
        let path = &self.directory;
        let io = |source| KeepError::Io {
            path: path.clone(),
            source,
        };
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(io(error)),
            _ => {}
        }
        ours(path, &path.symlink_metadata().map_err(io)?)?;
        let system = rustix::fs::statfs(path).map_err(|error| io(error.into()))?;
        // The type is a small number in a word whose width depends on the machine.
        if IN_MEMORY.contains(&(system.f_type as u64 & 0xffff_ffff)) {
            Ok(())
        } else {
            Err(KeepError::OnDisk { path: path.clone() })
        }
    }
}

/// Whoever else may write here could hand us a key of his.
fn ours(path: &Path, found: &fs::Metadata) -> Result<(), KeepError> {
    let us = rustix::process::geteuid().as_raw();
    if found.uid() == us && found.mode() & OTHERS == 0 {
        return Ok(());
    }
    Err(KeepError::NotOurs {
        path: path.to_owned(),
        owner: found.uid(),
        mode: found.mode() & 0o7777,
        us,
    })
}
