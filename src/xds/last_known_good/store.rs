//! The directory of what is kept: files of responses, and the manifest that says which of them count.
//!
//! The manifest is replaced whole and carries its own checksum, so that it is the one point at which a
//! change takes effect. Files it does not name are removed when the agent starts.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::file::{Draft, Index, KeptFile};
use crate::clock::Clock;
use crate::regular_file::{
    check_private_directory, create_private_directory, open_private, read_open,
};
use crate::replace_file::replace_file;
use crate::xds::Protocol;

const DIRECTORY: &str = "istio-agent-config";
const MANIFEST: &str = "manifest";

/// Of the manifest and the files. Another is not used.
const FORMAT: u32 = 2;

/// Many times a manifest of all types.
const MAX_MANIFEST: u64 = 1 << 20;

/// The most bytes kept, what is being written included.
pub(super) const MAX_BYTES: u64 = 1 << 30;

/// What is left free of the file system.
const MIN_FREE: u64 = 64 << 20;

/// What counts.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Manifest {
    format: u32,
    /// Of the node it was kept for.
    pub(super) identity: String,
    /// By type URL.
    pub(super) types: BTreeMap<String, KeptType>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct KeptType {
    /// Of the last response.
    pub(super) version: String,
    /// When it was accepted, in seconds of Unix time.
    pub(super) accepted: u64,
    pub(super) file: KeptFile,
}

impl Manifest {
    /// Reads the manifest below `parent`; None if nothing is kept.
    pub(super) fn read(parent: &Path) -> io::Result<Option<Self>> {
        let directory = parent.join(DIRECTORY);
        let file = check_private_directory(&directory)
            .and_then(|()| open_private(&directory.join(MANIFEST)));
        let file = match file {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let text = read_open(file, MAX_MANIFEST)?;
        let (sum, json) = text.split_at_checked(9).unwrap_or_default();
        if sum != checksum(json).as_bytes() {
            return Err(io::Error::other("the checksum of its manifest is wrong"));
        }
        let manifest: Self = serde_json::from_slice(json)?;
        match manifest.format {
            FORMAT => Ok(Some(manifest)),
            other => {
                let problem = format!("its format is {other}, expected {FORMAT}");
                Err(io::Error::other(problem))
            }
        }
    }

    /// How long ago the last response was accepted.
    pub(super) fn age(&self) -> Duration {
        let newest = self.types.values().map(|of| of.accepted).max();
        let since_epoch = Clock::system().now().duration_since(SystemTime::UNIX_EPOCH);
        let accepted = Duration::from_secs(newest.unwrap_or(0));
        since_epoch.unwrap_or_default().saturating_sub(accepted)
    }
}

/// Fails if what is kept below `parent` cannot be used, or nothing can be kept there. Changes nothing.
pub(super) fn check(parent: &Path) -> io::Result<()> {
    Manifest::read(parent)?;
    has_space(parent, 0)
}

/// Fails if there is no space for so many bytes.
fn has_space(directory: &Path, bytes: u64) -> io::Result<()> {
    let found = rustix::fs::statvfs(directory)?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free >= MIN_FREE + bytes {
        return Ok(());
    }
    let problem = format!("{free} bytes are free, expected at least {MIN_FREE}");
    Err(io::Error::new(io::ErrorKind::StorageFull, problem))
}

fn checksum(json: &[u8]) -> String {
    format!("{:08x}\n", crc32fast::hash(json))
}

/// Reads and checks a file below `parent`.
pub(super) fn read(parent: &Path, protocol: Protocol, file: &KeptFile) -> io::Result<Index> {
    let opened = open_private(&parent.join(DIRECTORY).join(&file.name));
    Index::read(protocol, file, opened?)
}

/// The directory, open for changes.
#[derive(Debug)]
pub(super) struct Store {
    parent: PathBuf,
    directory: PathBuf,
    pub(super) manifest: Manifest,
}

impl Store {
    /// Opens the directory below `parent`, created if missing, and removes what does not count. What
    /// cannot be used is replaced, with a warning.
    pub(super) fn open(parent: &Path) -> io::Result<Self> {
        let directory = parent.join(DIRECTORY);
        create_private_directory(&directory)?;
        let manifest = Manifest::read(parent).unwrap_or_else(|error| {
            tracing::warn!(
                target: "xdsproxy",
                "the configuration kept in {} is not used: {error}",
                directory.display()
            );
            None
        });
        let store = Self {
            parent: parent.to_owned(),
            directory,
            manifest: manifest.unwrap_or_default(),
        };
        store.remove_others();
        Ok(store)
    }

    /// Starts anew for another node.
    pub(super) fn reset(&mut self, identity: String) -> io::Result<()> {
        self.manifest = Manifest {
            format: FORMAT,
            identity,
            types: BTreeMap::new(),
        };
        self.commit()?;
        self.remove_others();
        Ok(())
    }

    /// A new file, which counts once it is [set](Self::set).
    pub(super) fn draft(&self, protocol: Protocol) -> io::Result<Draft> {
        let file = tempfile::NamedTempFile::new_in(&self.directory)?;
        Ok(Draft::new(file, protocol))
    }

    /// Appends to a file, or makes one of both.
    pub(super) fn append(
        &self,
        protocol: Protocol,
        mut file: KeptFile,
        draft: Draft,
    ) -> io::Result<KeptFile> {
        if file.has_room_for(&draft) {
            let path = self.directory.join(&file.name);
            let opened = fs::OpenOptions::new().write(true).open(path)?;
            draft.append_to(&mut file, opened)?;
            return Ok(file);
        }
        has_space(&self.directory, file.length.saturating_add(draft.length))?;
        let older = read(&self.parent, protocol, &file)?;
        let mut merged = self.draft(protocol)?;
        older.merge(protocol, draft, &mut merged)?;
        merged.keep()
    }

    /// Fails if there is no space for so many bytes beside what is kept and `drafts`.
    pub(super) fn has_space_for(&self, drafts: u64, bytes: u64) -> io::Result<()> {
        let kept = self.manifest.types.values().map(|of| of.file.length);
        let kept = kept.fold(drafts + bytes, u64::saturating_add);
        if kept > MAX_BYTES {
            let problem = format!("over {MAX_BYTES} bytes would be kept");
            return Err(io::Error::other(problem));
        }
        has_space(&self.directory, bytes)
    }

    /// Makes this count, or nothing, of a type, and removes what did before.
    pub(super) fn set(&mut self, type_url: String, of: Option<KeptType>) -> io::Result<()> {
        let name = of.as_ref().map(|of| of.file.name.clone());
        let before = match of {
            Some(of) => self.manifest.types.insert(type_url, of),
            None => self.manifest.types.remove(&type_url),
        };
        self.commit()?;
        if let Some(before) = before.filter(|it| Some(&it.file.name) != name.as_ref()) {
            // What stays is removed by the next start.
            let _ = fs::remove_file(self.directory.join(before.file.name));
        }
        Ok(())
    }

    fn commit(&self) -> io::Result<()> {
        let json = serde_json::to_vec(&self.manifest)?;
        let text = [checksum(&json).as_bytes(), &json].concat();
        replace_file(&self.directory.join(MANIFEST), &text, 0o600)
    }

    /// Removes all that is kept, the manifest first.
    pub(super) fn wipe(mut self) {
        let _ = fs::remove_file(self.directory.join(MANIFEST));
        self.manifest = Manifest::default();
        self.remove_others();
    }

    /// Removes the files that do not count.
    fn remove_others(&self) {
        let counts = |name: &OsStr| {
            let mut types = self.manifest.types.values();
            name == MANIFEST || types.any(|of| *name == *of.file.name)
        };
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            if !counts(&name) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}
