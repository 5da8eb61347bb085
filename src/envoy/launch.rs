//! Defines what an Envoy is started with: command line, files, and its relation to other Envoys.

use std::any::Any;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use super::base_id::BaseId;
use super::command::{Command, Mode, Takeover};

/// The inputs of an Envoy: a command line with the files it names.
#[derive(Debug)]
pub struct Prepared {
    pub command: Command,
    /// The hash of all inputs without the changing metadata. Envoys with equal digests would serve alike.
    pub digest: u64,
    /// The hash of metadata for which a running Envoy is not restarted.
    pub metadata_digest: u64,
    /// Set if a first Envoy takes over from one in another container.
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
    /// Creates the inputs from a command and the content of its bootstrap, apart from the metadata for which a running
    /// Envoy is not restarted. The digest ignores the bootstrap's path.
    pub fn new(
        command: Command,
        bootstrap: &[u8],
        metadata: &str,
        files: Option<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        let arguments = command.arguments(&Mode::Alone);
        // A new program may be installed at the same path. A program from `PATH` has no metadata here.
        let program = fs::metadata(&command.binary)
            .ok()
            .map(|file| (file.dev(), file.ino(), (file.mtime(), file.mtime_nsec()), file.len()));
        // The first two arguments are the bootstrap's path.
        let digest = hash((bootstrap, &arguments[2..], command.environment(), program));
        Self { command, digest, metadata_digest: hash(metadata), takeover: None, _files: files }
    }
}

fn hash(inputs: impl Hash) -> u64 {
    let mut digest = DefaultHasher::new();
    inputs.hash(&mut digest);
    digest.finish()
}

impl Launch {
    /// Returns the takeover of a successor. None without hot restart.
    pub(super) fn takeover(&self) -> Option<Takeover> {
        let Mode::HotRestart { takeover, .. } = &self.mode else {
            return None;
        };
        Some(Takeover {
            restart_epoch: takeover.restart_epoch + 1,
            workers: self.prepared.command.workers(&self.mode),
            ..takeover.clone()
        })
    }

    /// Returns the launch of an Envoy that takes over from this one. `workers` is the number of this Envoy's workers, if
    /// Envoy has reported it.
    pub(super) fn successor(
        &self,
        prepared: Arc<Prepared>,
        workers: Option<u32>,
        parent_shutdown: Duration,
    ) -> Self {
        let mode = self.takeover().map_or(Mode::Alone, |takeover| Mode::HotRestart {
            takeover: Takeover { workers: workers.or(takeover.workers), ..takeover },
            parent_shutdown,
        });
        Self { prepared, base_id: self.base_id.clone(), mode }
    }

    /// Returns Envoy's `--restart-epoch`: how many Envoys have had the base id before.
    pub(super) fn restart_epoch(&self) -> u32 {
        match &self.mode {
            Mode::HotRestart { takeover, .. } => takeover.restart_epoch,
            _ => 0,
        }
    }
}
