//! What one Envoy is started from.

use std::any::Any;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use super::command::{Command, Mode};
use super::hot_restart::base_id::BaseId;

/// A command line with the files it names.
#[derive(Debug)]
pub struct Prepared {
    pub command: Command,
    /// The same for two that would run alike.
    pub digest: u64,
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
