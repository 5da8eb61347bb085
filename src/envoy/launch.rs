//! Defines what an Envoy is started with: command line, files, and the memory shared in hot restarts.

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
use super::hot_restart::Takeover;
use crate::regular_file;

const SHARED_MEMORY: &str = "/dev/shm";

/// The largest base id file: the digits of a number, and blanks.
const MAX_ID: u64 = 32;

/// Size (104) and version (11) of Envoy's structure in the shared memory, as in the hot restart version 11.104.
const SHARED_MEMORY_HEADER: [[u8; 8]; 2] = [104_u64.to_ne_bytes(), 11_u64.to_ne_bytes()];
/// The offset of the flags in this structure.
const SHARED_MEMORY_FLAGS: u64 = 96;

/// The factor by which Envoy multiplies the base id in the name of the shared memory.
const SPREAD: u64 = 10;

/// The inputs of an Envoy: a command line with the files it names.
#[derive(Debug)]
pub struct Prepared {
    pub command: Command,
    /// The hash of all inputs. Envoys with equal digests would run alike.
    pub digest: u64,
    /// The base id and restart epoch with which a first Envoy takes over from one in another container.
    pub takeover: Option<Takeover>,
    /// The owner of the files, which removes them when it is dropped.
    _files: Option<Box<dyn Any + Send + Sync>>,
}

/// The inputs of an Envoy, and its mode of hot restart.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) prepared: Arc<Prepared>,
    /// None without hot restart.
    pub(super) base_id: Option<Arc<BaseId>>,
    pub(super) mode: Mode,
}

impl Prepared {
    /// Creates the inputs from a command and the content of its bootstrap. The digest ignores the bootstrap's path.
    pub fn new(
        command: Command,
        bootstrap: &[u8],
        files: Option<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        let mut digest = DefaultHasher::new();
        let arguments = command.arguments(&Mode::Alone);
        // A new program may be installed at the same path. A program from `PATH` has no metadata here.
        let program = fs::metadata(&command.binary).ok().map(|file| {
            let modified = (file.mtime(), file.mtime_nsec());
            (file.dev(), file.ino(), modified, file.len())
        });
        // The first two arguments are the bootstrap's path.
        (bootstrap, &arguments[2..], command.environment(), program).hash(&mut digest);
        Self {
            command,
            digest: digest.finish(),
            takeover: None,
            _files: files,
        }
    }
}

impl Launch {
    /// Returns the base id and restart epoch of a successor. None if the base id is not known.
    pub(super) fn takeover(&self) -> Option<Takeover> {
        Some(Takeover {
            base_id: self.base_id.as_ref()?.get()?,
            restart_epoch: self.restart_epoch() + 1,
        })
    }

    /// Returns the launch of an Envoy that takes over from this one, whose base id is known.
    pub(super) fn successor(&self, prepared: Arc<Prepared>, parent_shutdown: Duration) -> Self {
        let mode = self.takeover().map_or(Mode::Alone, |takeover| Mode::Next {
            takeover,
            parent_shutdown,
        });
        Self {
            prepared,
            base_id: self.base_id.clone(),
            mode,
        }
    }

    /// Returns Envoy's `--restart-epoch`: how many Envoys have had the base id before.
    pub(super) fn restart_epoch(&self) -> u32 {
        match self.mode {
            Mode::Next { takeover, .. } => takeover.restart_epoch,
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
    /// True if the memory belongs to an Envoy in another container, so that it is not removed.
    is_lent: AtomicBool,
}

/// Returns true if Envoys can share memory on this machine.
pub(super) fn can_share() -> bool {
    rustix::fs::access(SHARED_MEMORY, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

impl BaseId {
    /// Prepares the file for a first Envoy. `user` is the user it runs as, if that is not the agent's.
    pub(super) fn new(file: PathBuf, user: Option<u32>) -> Self {
        remove(&file);
        if let Some(user) = user {
            // This user may not create files in the directory, so it gets an empty one.
            let given =
                fs::File::create_new(&file).and_then(|_| chown(&file, Some(user), Some(user)));
            if let Err(error) = given {
                tracing::warn!(%error, path = %file.display(), "cannot give a file to Envoy's user");
            }
        }
        let is_lent = AtomicBool::new(false);
        Self { file, is_lent }
    }

    /// Adopts the base id of an Envoy in another container, from which this agent's first Envoy takes over.
    pub(super) fn adopted(file: PathBuf, id: u32) -> io::Result<Self> {
        fs::write(&file, id.to_string())?;
        let is_lent = AtomicBool::new(true);
        Ok(Self { file, is_lent })
    }

    /// Leaves the memory to an Envoy in another container, or takes it over after that Envoy has exited.
    pub(super) fn set_lent(&self, is_lent: bool) {
        self.is_lent.store(is_lent, Ordering::Relaxed);
    }

    /// Allows another successor after one that has exited before it served. Envoy sets the initializing flag in the
    /// shared memory when it starts and clears it when it serves; while it is set, other Envoys refuse to start
    /// (`SharedMemory` in Envoy's `hot_restart_impl.h`: size, version, two mutexes, flags). Fails if the memory has
    /// another form.
    pub(super) fn clear_initializing_flag(&self) -> io::Result<()> {
        let id = self.get().ok_or(io::ErrorKind::NotFound)?;
        let mut options = fs::File::options();
        let memory = options.read(true).write(true).open(memory_path(id))?;
        let mut header = [0_u8; 16];
        memory.read_exact_at(&mut header, 0)?;
        if header.as_chunks().0 != SHARED_MEMORY_HEADER {
            let found = format!("unknown header {header:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, found));
        }
        memory.write_all_at(&[0; 8], SHARED_MEMORY_FLAGS)
    }

    /// Returns the number, once Envoy has written it.
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
            remove(&memory_path(id));
        }
        remove(&self.file);
    }
}

fn memory_path(id: u32) -> PathBuf {
    let number = u64::from(id) * SPREAD;
    Path::new(SHARED_MEMORY).join(format!("envoy_shared_memory_{number}"))
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %path.display(), "cannot remove a file of an Envoy that has exited");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_id_is_known_once_envoy_has_written_it_and_its_file_is_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("envoy-base-id");
        fs::write(&file, "1").expect("left by another");
        let base = BaseId::new(file.clone(), None);
        assert_eq!(base.get(), None);
        // Envoy does not choose a base id this high, so no Envoy uses the shared memory of this name.
        for text in ["", "-1", "4294967296", "a"] {
            fs::write(&file, text).expect("written");
            assert_eq!(base.get(), None, "{text}");
        }
        fs::write(&file, "4294967295").expect("written");
        assert_eq!(base.get(), Some(u32::MAX));
        assert_eq!(
            memory_path(u32::MAX),
            Path::new("/dev/shm/envoy_shared_memory_42949672950")
        );
        drop(base);
        assert!(!file.exists());
    }

    #[test]
    fn an_envoy_of_another_user_owns_the_file_for_its_base_id() {
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
