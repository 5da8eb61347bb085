//! Stores modules on disk, each in a file named after its SHA-256.
//!
//! A symbolic link leads from a key, which is a URL or the digest of an image, to a module. The link is
//! named after the SHA-256 of the key, because a URL may contain a password. A file's content is checked
//! at each use. A file's modification time is the time of its last use.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{SHA256, digest};

use super::fetch::download::{self, Download, PREFIX, SUFFIX, hexadecimal};
use super::request::MAX_FETCH;
use crate::files::regular_file;
use crate::runtime::clock::Clock;

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
    /// Creates a cache without access to the disk.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Creates the directory that modules are downloaded to.
    pub(super) fn prepare(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.directory)
    }

    /// Returns the module that a key leads to, if its content is valid.
    pub(super) fn find(&self, key: &str) -> Option<Module> {
        let target = fs::read_link(self.link_path(key)).ok()?;
        let path = self.directory.join(target.file_name()?);
        let problem = match check(&path) {
            Ok(module) => return Some(module),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => error,
        };
        let shown = path.display();
        tracing::warn!(target: "wasm", "the cached Wasm module {shown} cannot be used and is fetched again: {problem}");
        // If it cannot be removed, the new module replaces it.
        let _ = fs::remove_file(&path);
        None
    }

    /// Stores a download, and links these keys to it.
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

    /// Links a key to a module.
    pub(super) fn link(&self, key: &str, module: &Module) -> io::Result<()> {
        let link = self.link_path(key);
        // Between the two calls the key leads nowhere, so the module would be fetched again.
        let _ = fs::remove_file(&link);
        symlink(module.path.file_name().unwrap_or_default(), link)
    }

    /// Removes modules that are unused for longer than `expiry`, and the least recently used ones while all
    /// together have more than `max_bytes`, but none in `used`. Returns the number of remaining modules.
    pub(super) fn tidy(
        &self,
        used: &HashSet<PathBuf>,
        expiry: Duration,
        max_bytes: u64,
    ) -> io::Result<usize> {
        let now = Clock::system().now();
        let mut modules = Vec::new();
        #[expect(clippy::disallowed_methods, reason = "only files with a digest as name are used")]
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match fs::metadata(&path) {
                Ok(file) if name.strip_suffix(".wasm").is_some_and(is_digest) => {
                    modules.push((file.modified()?, file.len(), path));
                }
                // A killed agent leaves its unfinished download.
                Ok(file)
                    if name.starts_with(PREFIX)
                        && name.ends_with(SUFFIX)
                        && age(now, file.modified()?) > MAX_FETCH =>
                {
                    fs::remove_file(path)?;
                }
                // The link leads to a module that was removed.
                Err(_) if is_digest(&name) => fs::remove_file(path)?,
                _ => {}
            }
        }
        modules.sort();
        let mut total: u64 = modules.iter().map(|(_, size, _)| size).sum();
        modules.retain(|(last_use, size, path)| {
            let is_over = total > max_bytes || age(now, *last_use) > expiry;
            let remains = used.contains(path) || !is_over || !remove(path);
            total -= if remains { 0 } else { *size };
            remains
        });
        Ok(modules.len())
    }

    fn link_path(&self, key: &str) -> PathBuf {
        self.directory.join(hexadecimal(digest(&SHA256, key.as_bytes()).as_ref()))
    }
}

/// Returns the module in a file if its content matches the name, and records its use.
fn check(path: &Path) -> io::Result<Module> {
    let file = regular_file::open(path)?;
    let sha256 = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let size = file.metadata()?.len();
    // Without a limit, reading a device would not end.
    if download::copy(&mut (&file).take(size), &mut io::sink())?.1 != sha256 {
        return Err(io::Error::other("the file was modified"));
    }
    // On a read-only disk, the time of the last use is not recorded.
    let _ = file.set_modified(Clock::system().now());
    Ok(Module { path: path.to_owned(), sha256, size })
}

/// Returns the age of a file, which is zero if the clock was set back.
fn age(now: SystemTime, time: SystemTime) -> Duration {
    now.duration_since(time).unwrap_or_default()
}

/// Removes a module. Returns false if that fails.
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
