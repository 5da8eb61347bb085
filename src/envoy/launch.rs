//! What one Envoy is started from.

use std::any::Any;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::Access;

use super::command::{Command, Mode};
use super::hot_restart::Lent;
use crate::regular_file;

const SHARED_MEMORY: &str = "/dev/shm";

/// The digits of a number, and blanks.
const MAX_ID: u64 = 32;

/// Size (104) and version (11) of Envoy's structure there, as in the hot restart version 11.104.
const SHARED_MEMORY_HEADER: [[u8; 8]; 2] = [104_u64.to_ne_bytes(), 11_u64.to_ne_bytes()];
/// Where the flags are in it.
const SHARED_MEMORY_FLAGS: u64 = 96;

/// Envoy multiplies its number by this.
const SPREAD: u64 = 10;

/// A command line with the files it names.
#[derive(Debug)]
pub struct Prepared {
    pub command: Command,
    /// The same for two that would run alike.
    pub digest: u64,
    /// The Envoy in another container that a first Envoy takes over from.
    pub continues: Option<Lent>,
    /// Removes them when dropped.
    _files: Option<Box<dyn Any + Send + Sync>>,
}

/// What an Envoy runs on, and its place among Envoys that take over from each other.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) prepared: Arc<Prepared>,
    /// None of an Envoy without hot restart.
    pub(super) base_id: Option<Arc<BaseId>>,
    pub(super) mode: Mode,
}

impl Prepared {
    /// Runs `command` on a bootstrap with this content. Its path does not count.
    pub fn new(
        command: Command,
        bootstrap: &[u8],
        files: Option<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        let mut digest = DefaultHasher::new();
        let arguments = command.arguments(&Mode::Alone);
        // Tells programs at the same path apart. One without a path is found elsewhere.
        let program = fs::metadata(&command.binary).ok().map(|file| {
            let modified = (file.mtime(), file.mtime_nsec());
            (file.dev(), file.ino(), modified, file.len())
        });
        (bootstrap, &arguments[2..], command.environment(), program).hash(&mut digest);
        Self {
            command,
            digest: digest.finish(),
            continues: None,
            _files: files,
        }
    }
}

impl Launch {
    /// The Envoy that takes over from this one, of which the base id is known.
    pub(super) fn successor(&self, prepared: Arc<Prepared>, parent_shutdown: Duration) -> Self {
        let base_id = self.base_id.as_ref().and_then(|base_id| base_id.get());
        let mode = base_id.map_or(Mode::Alone, |base_id| Mode::Next {
            base_id,
            epoch: self.restart_epoch() + 1,
            parent_shutdown,
        });
        Self {
            prepared,
            base_id: self.base_id.clone(),
            mode,
        }
    }

    /// Its number among Envoys that take over from each other.
    pub(super) fn restart_epoch(&self) -> u32 {
        match self.mode {
            Mode::Next { epoch, .. } => epoch,
            _ => 0,
        }
    }
}

/// The base id that an Envoy shares with its successors, and their shared memory of that name. The first Envoy
/// picks a free number and writes it to a file; its successors get the number. Envoy never removes the memory, so
/// dropping this removes memory and file, after the last Envoy of the base id.
#[derive(Debug)]
pub(super) struct BaseId {
    pub(super) file: PathBuf,
    /// Whether the memory belongs to an Envoy in another container, so that it is not removed.
    is_lent: AtomicBool,
}

/// Whether Envoys can share memory at all.
pub(super) fn can_share() -> bool {
    rustix::fs::access(SHARED_MEMORY, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

impl BaseId {
    /// Prepares the file for a first Envoy that runs as this user, if it is not the agent's.
    pub(super) fn new(file: PathBuf, user: Option<u32>) -> Self {
        remove(&file);
        if let Some(user) = user {
            // It may not make a file there, and is given one to write to.
            let given =
                fs::File::create_new(&file).and_then(|_| chown(&file, Some(user), Some(user)));
            if let Err(error) = given {
                tracing::warn!(%error, path = %file.display(), "cannot give a file to Envoy's user");
            }
        }
        Self {
            file,
            is_lent: AtomicBool::new(false),
        }
    }

    /// The base id of an Envoy in another container, which this one continues.
    pub(super) fn adopted(file: PathBuf, id: u32) -> io::Result<Self> {
        fs::write(&file, id.to_string())?;
        let is_lent = AtomicBool::new(true);
        Ok(Self { file, is_lent })
    }

    /// Leaves the memory to an Envoy in another container, or owns it after that has exited.
    pub(super) fn set_lent(&self, is_lent: bool) {
        self.is_lent.store(is_lent, Ordering::Relaxed);
    }

    /// Lets another successor start after one that has exited before it served. Envoy sets the first flag in the
    /// shared memory when it starts and clears it when it serves; while it is set, other Envoys refuse to start
    /// (`SharedMemory` in Envoy's `hot_restart_impl.h`: size, version, two mutexes, flags).
    pub(super) fn clear_mark(&self) -> io::Result<()> {
        let id = self.get().ok_or(io::ErrorKind::NotFound)?;
        let path = memory(id);
        let memory = fs::File::options().read(true).write(true).open(path)?;
        let mut header = [0_u8; 16];
        memory.read_exact_at(&mut header, 0)?;
        if header.as_chunks().0 != SHARED_MEMORY_HEADER {
            let found = format!("unknown header {header:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, found));
        }
        memory.write_all_at(&[0; 8], SHARED_MEMORY_FLAGS)
    }

    /// The number, once Envoy has written it.
    pub(super) fn get(&self) -> Option<u32> {
        let text = regular_file::read_text(&self.file, MAX_ID).ok()?;
        text.trim().parse().ok()
    }
}

impl Drop for BaseId {
    fn drop(&mut self) {
        if let Some(id) = self.get()
            && !self.is_lent.load(Ordering::Relaxed)
        {
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
            tracing::warn!(%error, path = %path.display(), "cannot remove a file of an Envoy that has exited");
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
        assert_eq!(MetadataExt::uid(&found), 1337);
        assert_eq!(base.get(), None);
    }
}
