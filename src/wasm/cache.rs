//! Keeps modules on disk, each in a file called after its SHA-256.
//!
//! A key, a URL or the digest of an image, leads to a module by a symbolic link. The link is called
//! after the SHA-256 of the key, as a URL may hold a password. A file's content is checked at each use.
//! The time of a file is that of its last use.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};

use super::fetch::download::{self, Download, PREFIX, SUFFIX, hexadecimal};
use super::request::MAX_FETCH;
use crate::clock::Clock;
use crate::regular_file;

#[derive(Debug)]
pub(super) struct Cache {
    directory: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Module {
    pub(super) path: PathBuf,
    pub(super) sha256: String,
    pub(super) size: u64,
}

impl Cache {
    /// Nothing is read or written before a module is asked for.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Makes the directory that modules are downloaded to.
    pub(super) fn prepare(&self) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o755).create(&self.directory)
    }

    /// The module a key leads to, if its content is right.
    pub(super) fn find(&self, key: &str) -> Option<Module> {
        let target = fs::read_link(self.link_path(key)).ok()?;
        let path = self.directory.join(target.file_name()?);
        let problem = match checked(&path) {
            Ok(module) => return Some(module),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => error,
        };
        let shown = path.display();
        tracing::warn!(target: "wasm", "the cached Wasm module {shown} cannot be used and is fetched again: {problem}");
        // Another one takes its place if it stays.
        let _ = fs::remove_file(&path);
        None
    }

    /// Takes in a download that these keys lead to from now on.
    pub(super) fn add(&self, download: Download, keys: &[String]) -> io::Result<Module> {
        let Download { file, sha256, size } = download;
        tracing::debug!(target: "wasm", "fetched a Wasm module of {size} bytes, sha256:{sha256}");
        let path = self.directory.join(format!("{sha256}.wasm"));
        file.persist(&path).map_err(|failed| failed.error)?;
        let module = Module { path, sha256, size };
        for key in keys {
            self.link(key, &module)?;
        }
        Ok(module)
    }

    /// From now on, a key leads to this module.
    pub(super) fn link(&self, key: &str, module: &Module) -> io::Result<()> {
        let link = self.link_path(key);
        // Between the two, the key leads nowhere, and the module is fetched.
        let _ = fs::remove_file(&link);
        symlink(module.path.file_name().unwrap_or_default(), link)
    }

    /// Removes modules unused for longer than `expiry`, and those unused longest while all together
    /// have more than `max_bytes`, but none in `used`. Returns how many are left.
    pub(super) fn tidy(
        &self,
        used: &HashSet<PathBuf>,
        expiry: Duration,
        max_bytes: u64,
    ) -> io::Result<usize> {
        let now = Clock::system().now();
        let is_older = |time, limit| now.duration_since(time).is_ok_and(|age| age > limit);
        let mut modules = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            let (name, metadata) = (path.file_name().unwrap_or_default(), fs::metadata(&path));
            let name = name.to_string_lossy();
            match metadata {
                Ok(found) if name.strip_suffix(".wasm").is_some_and(is_digest) => {
                    modules.push((found.modified()?, found.len(), path));
                }
                // Left by an agent that was killed.
                Ok(found)
                    if name.starts_with(PREFIX)
                        && name.ends_with(SUFFIX)
                        && is_older(found.modified()?, MAX_FETCH) =>
                {
                    fs::remove_file(path)?;
                }
                // A link to a module that was removed.
                Err(_) if is_digest(&name) => fs::remove_file(path)?,
                _ => {}
            }
        }
        modules.sort();
        let mut total: u64 = modules.iter().map(|(_, size, _)| size).sum();
        modules.retain(|(last_use, size, path)| {
            let is_over = total > max_bytes || is_older(*last_use, expiry);
            let is_left = used.contains(path) || !is_over || !remove(path);
            total -= if is_left { 0 } else { *size };
            is_left
        });
        Ok(modules.len())
    }

    fn link_path(&self, key: &str) -> PathBuf {
        let name = hexadecimal(digest(&SHA256, key.as_bytes()).as_ref());
        self.directory.join(name)
    }
}

/// The module in a file, if its content is right.
fn checked(path: &Path) -> io::Result<Module> {
    let file = regular_file::open(path)?;
    let sha256 = path.file_stem().unwrap_or_default();
    let sha256 = sha256.to_string_lossy().into_owned();
    let size = file.metadata()?.len();
    // A device would have no end.
    if download::copy(&mut (&file).take(size), &mut io::sink())?.1 != sha256 {
        return Err(io::Error::other("the file was modified"));
    }
    // On a disk that is read-only, the time of the last use is not known.
    let _ = file.set_modified(Clock::system().now());
    Ok(Module {
        path: path.to_owned(),
        sha256,
        size,
    })
}

/// False if the module cannot be removed.
fn remove(path: &Path) -> bool {
    let shown = path.display();
    if let Err(error) = fs::remove_file(path) {
        tracing::error!(target: "wasm", "failed to purge Wasm module {shown}: {error}");
        return false;
    }
    tracing::debug!(target: "wasm", "successfully removed stale Wasm module {shown}");
    true
}

fn is_digest(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}
