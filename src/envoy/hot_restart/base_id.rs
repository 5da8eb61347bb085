//! The base id that an Envoy shares with its successors, and their shared memory of that name.
//!
//! The first Envoy picks a free number and writes it to a file; its successors are given the number.
//! Envoy never removes the memory, so this does when no Envoy uses the base id any more.

use std::fs;
use std::io;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

use crate::regular_file;

const SHARED_MEMORY: &str = "/dev/shm";

/// The digits of a number, and blanks.
const MAX_ID: u64 = 32;

/// Envoy multiplies its number by this.
const SPREAD: u64 = 10;

/// A base id. Dropping it removes the file and the shared memory.
#[derive(Debug)]
pub(in crate::envoy) struct BaseId {
    pub(in crate::envoy) file: PathBuf,
}

/// Whether Envoys can share memory at all.
pub(in crate::envoy) fn can_share() -> bool {
    rustix::fs::access(SHARED_MEMORY, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

impl BaseId {
    /// For a first Envoy that is about to be started, as this user where it is another than the
    /// agent's.
    pub(in crate::envoy) fn new(file: PathBuf, user: Option<u32>) -> Self {
        remove(&file);
        if let Some(user) = user {
            // It may not make a file there, and is given one to write to.
            let given =
                fs::File::create_new(&file).and_then(|_| chown(&file, Some(user), Some(user)));
            if let Err(error) = given {
                tracing::warn!(%error, path = %file.display(), "cannot give Envoy's user a file");
            }
        }
        Self { file }
    }

    /// The number, once Envoy has written it.
    pub(in crate::envoy) fn get(&self) -> Option<u32> {
        let text = regular_file::read_text(&self.file, MAX_ID).ok()?;
        text.trim().parse().ok()
    }
}

impl Drop for BaseId {
    fn drop(&mut self) {
        if let Some(id) = self.get() {
            remove(&memory(id));
        }
        remove(&self.file);
    }
}

fn memory(id: u32) -> PathBuf {
    let number = u64::from(id) * SPREAD;
    Path::new(SHARED_MEMORY).join(format!("envoy_shared_memory_{number}"))
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, path = %path.display(), "cannot remove what Envoy has left");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_known_once_it_is_written_and_its_file_goes_with_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("envoy-base-id");
        fs::write(&file, "1").expect("left by another");
        let base = BaseId::new(file.clone(), None);
        assert_eq!(base.get(), None);
        // No Envoy takes so high a number, so no memory of this name is in use.
        for text in ["", "-1", "4294967296", "a"] {
            fs::write(&file, text).expect("written");
            assert_eq!(base.get(), None, "{text}");
        }
        fs::write(&file, "4294967295").expect("written");
        assert_eq!(base.get(), Some(u32::MAX));
        assert_eq!(
            memory(u32::MAX),
            Path::new("/dev/shm/envoy_shared_memory_42949672950")
        );
        drop(base);
        assert!(!file.exists());
    }

    #[test]
    fn an_envoy_of_another_user_has_a_file_to_write_its_number_to() {
        if !rustix::process::getuid().is_root() {
            eprintln!("Only root gives files away: this test is not run.");
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("envoy-base-id");
        let base = BaseId::new(file.clone(), Some(1337));
        let found = fs::metadata(&file).expect("a file");
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&found), 1337);
        assert_eq!(base.get(), None);
    }
}
