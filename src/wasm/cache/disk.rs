//! The files of the cache: `<directory>/<SHA-256 of the module's name>/<checksum>.wasm`, as in
//! pilot-agent, and beside each a record `<checksum>.json` that makes it usable after a restart.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

use crate::replace_file::replace_file;
use crate::wasm::fetch::download::{Download, PREFIX, SUFFIX};
use crate::wasm::fetch::hexadecimal;

const LARGEST_RECORD: u64 = 1 << 20;

/// A module in the cache: by the SHA-256 of its name, and its checksum. Both are hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(super) name: String,
    /// Of the module over HTTP, of the manifest from a registry.
    pub(super) checksum: String,
}

/// What is kept of a module beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Of the module itself.
    pub(super) sha256: String,
    /// Without secrets.
    pub(super) url: String,
    /// The SHA-256 of each URL, as it was given, that led here last.
    pub(super) urls: Vec<String>,
}

/// What changes when a file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Key {
    pub(crate) fn new(module_name: &str, checksum: &str) -> Self {
        Self {
            name: sha256_of(module_name),
            checksum: checksum.to_owned(),
        }
    }

    pub(super) fn path(&self, directory: &Path) -> PathBuf {
        directory
            .join(&self.name)
            .join(format!("{}.wasm", self.checksum))
    }

    fn record_path(&self, directory: &Path) -> PathBuf {
        self.path(directory).with_extension("json")
    }
}

pub(super) fn sha256_of(text: &str) -> String {
    hexadecimal(aws_lc_rs::digest::digest(&SHA256, text.as_bytes()).as_ref())
}

/// The modules of an earlier agent, with their sizes. What it left unfinished is removed.
pub(super) fn scan(directory: &Path) -> io::Result<Vec<(Key, Record, u64)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_digest(&name) {
            scan_module(&entry.path(), &name, &mut found)?;
        } else if name.starts_with(PREFIX) && name.ends_with(SUFFIX) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(found)
}

fn scan_module(path: &Path, name: &str, found: &mut Vec<(Key, Record, u64)>) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let file = entry.file_name().to_string_lossy().into_owned();
        let Some(checksum) = file.strip_suffix(".wasm").filter(|name| is_digest(name)) else {
            continue;
        };
        let (name, checksum) = (name.to_owned(), checksum.to_owned());
        let record =
            crate::regular_file::read(&entry.path().with_extension("json"), LARGEST_RECORD);
        let record = record
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok());
        match record {
            Some(record) => found.push((Key { name, checksum }, record, entry.metadata()?.len())),
            // Written by pilot-agent, or in part: its content cannot be checked.
            None => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

fn is_digest(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Moves a download to its place. The record is there first, so that no module is without one.
pub(super) fn store(
    directory: &Path,
    key: &Key,
    download: Download,
    record: &Record,
) -> io::Result<Stamp> {
    let path = key.path(directory);
    let parent = directory.join(&key.name);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(parent)?;
    write_record(directory, key, record)?;
    let file = download
        .file
        .persist(&path)
        .map_err(|failed| failed.error)?;
    Ok(stamp(&file.metadata()?))
}

pub(super) fn write_record(directory: &Path, key: &Key, record: &Record) -> io::Result<()> {
    let text = serde_json::to_vec(record).map_err(io::Error::other)?;
    replace_file(&key.record_path(directory), &text, 0o600)
}

/// Whether a module's file is the one that was checked as `known`, or has the digest. None if not.
pub(super) fn check(path: &Path, known: Option<Stamp>, sha256: &str) -> io::Result<Option<Stamp>> {
    let found = stamp(&fs::metadata(path)?);
    if known == Some(found) {
        return Ok(known);
    }
    let (mut file, mut digest) = (fs::File::open(path)?, Context::new(&SHA256));
    io::copy(&mut file, &mut Digesting(&mut digest))?;
    Ok((hexadecimal(digest.finish().as_ref()) == sha256).then_some(found))
}

/// Removes a module, its record, and their directory unless it holds others.
pub(super) fn remove(directory: &Path, key: &Key) -> io::Result<()> {
    match fs::remove_file(key.path(directory)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Without its module a record means nothing.
    let _ = fs::remove_file(key.record_path(directory));
    let _ = fs::remove_dir(directory.join(&key.name));
    Ok(())
}

fn stamp(metadata: &fs::Metadata) -> Stamp {
    Stamp {
        inode: metadata.ino(),
        size: metadata.len(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
    }
}

struct Digesting<'a>(&'a mut Context);

impl io::Write for Digesting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
