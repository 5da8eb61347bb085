//! Writes the files of the bootstrap, each of which is replaced atomically.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::config::Config;
use super::document::document;
use super::services::Tracer;
use crate::files::permission;
use crate::files::replace_file::replace_file;
use crate::problem::Problem;

/// A bootstrap on disk. Dropping it removes its files.
#[derive(Debug)]
pub struct Written {
    /// The files that Envoy reads.
    pub files: Vec<PathBuf>,
}

/// Writes the bootstrap and, for Lightstep, the file of its token.
pub fn write(config: &Config) -> Result<Written, Problem> {
    let mut written = Written { files: Vec::new() };
    let tracer = Tracer::from_config(config);
    if let Some(token) = tracer.and_then(|tracer| tracer.token) {
        let file = config.token_file();
        write_file(&file, token, 0o600)?;
        written.files.push(file);
    }
    write_file(&config.file(), &format!("{:#}\n", document(config)), 0o644)?;
    written.files.push(config.file());
    Ok(written)
}

/// Replaces a file atomically, in a directory that is made if missing (mode 0700).
pub(super) fn write_file(path: &Path, text: &str, mode: u32) -> Result<(), Problem> {
    if let Some(directory) = path.parent().filter(|path| !path.as_os_str().is_empty()) {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|error| permission::problem("create the directory", directory, error))?;
    }
    replace_file(path, text.as_bytes(), mode)
        .map_err(|error| permission::problem("write the file", path, error))
}

impl Drop for Written {
    fn drop(&mut self) {
        for path in &self.files {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, path = %path.display(), "cannot remove Envoy's bootstrap");
            }
        }
    }
}
