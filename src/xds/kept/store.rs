//! The directory of what is kept: files of responses, and the manifest that says which of them count.
//!
//! The manifest is replaced whole and carries its own checksum, so that it is the one point at which a
//! change takes effect. Files it does not name are removed when the agent starts.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::segment::{Draft, Segment};
use crate::clock::Clock;
use crate::regular_file::{
    check_private_directory, create_private_directory, open_private, read_open,
};
use crate::replace_file::replace_file;

const DIRECTORY: &str = "istio-agent-config";
const MANIFEST: &str = "manifest";

/// Of the manifest and the files. Another is not used.
const FORMAT: u32 = 1;

/// Many times a manifest of all types.
const LARGEST_MANIFEST: u64 = 1 << 20;

/// The most bytes kept, what is being written included.
pub(super) const MOST_BYTES: u64 = 1 << 30;

/// What is left free of the file system.
const LEFT_FREE: u64 = 64 << 20;

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
    /// From the oldest to the newest.
    pub(super) segments: Vec<Segment>,
}

impl KeptType {
    pub(super) fn bytes(&self) -> u64 {
        let lengths = self.segments.iter().map(|segment| segment.length);
        lengths.fold(0, u64::saturating_add)
    }
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
        let text = read_open(file, LARGEST_MANIFEST)?;
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

fn checksum(json: &[u8]) -> String {
    format!("{:08x}\n", crc32fast::hash(json))
}

pub(super) fn open(parent: &Path, file: u64) -> io::Result<fs::File> {
    open_private(&parent.join(DIRECTORY).join(file.to_string()))
}

/// The directory, open for changes.
#[derive(Debug)]
pub(super) struct Store {
    directory: PathBuf,
    pub(super) manifest: Manifest,
    next_file: u64,
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
        let manifest = manifest.unwrap_or_default();
        let files = manifest.types.values().flat_map(|of| &of.segments);
        let next_file = files
            .map(|segment| segment.file.saturating_add(1))
            .max()
            .unwrap_or(0);
        let store = Self {
            directory,
            manifest,
            next_file,
        };
        store.remove_others(&HashSet::new());
        Ok(store)
    }

    /// Starts anew for another node.
    pub(super) fn reset(&mut self, identity: String) -> io::Result<()> {
        self.manifest = Manifest {
            format: FORMAT,
            identity,
            types: BTreeMap::new(),
        };
        self.commit(&HashSet::new())
    }

    /// A new file, which counts once a manifest names it.
    pub(super) fn draft(&mut self) -> io::Result<Draft> {
        let number = self.next_file;
        self.next_file += 1;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.path(number))?;
        Ok(Draft::new(number, file))
    }

    /// Fails if there is no space for so many bytes beside what is kept and `drafts`.
    pub(super) fn has_space_for(&self, drafts: u64, bytes: u64) -> io::Result<()> {
        let kept = self.manifest.types.values().map(KeptType::bytes);
        let kept = kept.fold(drafts + bytes, u64::saturating_add);
        if kept > MOST_BYTES {
            let problem = format!("over {MOST_BYTES} bytes would be kept");
            return Err(io::Error::other(problem));
        }
        let found = rustix::fs::statvfs(&self.directory)?;
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        if free < LEFT_FREE + bytes {
            let problem = format!("{free} bytes are free, expected at least {LEFT_FREE}");
            return Err(io::Error::new(io::ErrorKind::StorageFull, problem));
        }
        Ok(())
    }

    /// Makes the manifest count, and removes the files that no longer do; `drafts` stay.
    pub(super) fn commit(&mut self, drafts: &HashSet<u64>) -> io::Result<()> {
        let json = serde_json::to_vec(&self.manifest)?;
        let text = [checksum(&json).as_bytes(), &json].concat();
        replace_file(&self.directory.join(MANIFEST), &text, 0o600)?;
        self.remove_others(drafts);
        Ok(())
    }

    pub(super) fn remove(&self, file: u64) {
        // What stays is removed after the next change.
        let _ = fs::remove_file(self.path(file));
    }

    /// Removes all that is kept, the manifest first.
    pub(super) fn wipe(&self) {
        let _ = fs::remove_file(self.directory.join(MANIFEST));
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let _ = fs::remove_file(entry.path());
        }
    }

    /// What cannot be removed now is tried again after the next change.
    fn remove_others(&self, drafts: &HashSet<u64>) {
        let segments = self.manifest.types.values().flat_map(|of| &of.segments);
        let named: HashSet<_> = segments.map(|segment| segment.file).collect();
        let counts = |number: u64| named.contains(&number) || drafts.contains(&number);
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.parse().ok());
            if name != MANIFEST && !number.is_some_and(counts) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn path(&self, file: u64) -> PathBuf {
        self.directory.join(file.to_string())
    }
}
