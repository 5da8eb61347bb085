//! Files of the bootstrap on disk.
//!
//! Each is written next to its place and moved there, so that nobody reads half of one.
//!
//! Does not know what is in them.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::tracer::Tracer;
use super::{Config, document};

/// A bootstrap on disk. Dropping it removes its files.
#[derive(Debug)]
pub struct Written {
    paths: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {action} {}", .path.display())]
    Write {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Written {
    /// What Envoy reads.
    pub fn files(&self) -> &[PathBuf] {
        &self.paths
    }
}

/// Writes the bootstrap next to its place and moves it there.
pub fn write(config: &Config) -> Result<Written, Error> {
    make_directory(&config.directory)?;
    let mut written = Written { paths: Vec::new() };
    if let Some(Tracer::Lightstep(_, token)) = Tracer::of(&config.node.proxy_config) {
        replace(&config.token_file(), &token.0, 0o600)?;
        written.paths.push(config.token_file());
    }
    replace(&config.file(), &format!("{:#}\n", document(config)), 0o644)?;
    written.paths.push(config.file());
    Ok(written)
}

pub(super) fn make_directory(path: &Path) -> Result<(), Error> {
    if path.as_os_str().is_empty() {
        return Ok(());
    }
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| failed("create", path, source))
}

/// Puts a whole file where another may be.
pub(super) fn replace(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".tmp");
    let unfinished = PathBuf::from(unfinished);
    // One that a dead agent left could have another mode.
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed("remove", &unfinished, error));
        }
        _ => {}
    }
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&unfinished)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|source| failed("write", &unfinished, source))?;
    fs::rename(&unfinished, path).map_err(|source| failed("move a new file to", path, source))
}

pub(super) fn failed(action: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Write {
        action,
        path: path.to_owned(),
        source,
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        for path in &self.paths {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, path = %path.display(), "cannot remove Envoy's bootstrap");
            }
        }
    }
}
