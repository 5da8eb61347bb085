//! Checks and prepares directories for files that survive a restart of the container.
//!
//! Call [`Volume::prepare`] before content is stored. The doctor calls [`Volume::check`], which changes nothing.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{fstatfs, statvfs};

use crate::files::directory::Directory;
use crate::files::permission::{explained, writable};
use crate::problem::{Code, Problem};

/// File systems in memory, as `statfs` names them: tmpfs and ramfs.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// A directory that the operator has named, or a default one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    pub directory: PathBuf,
    pub is_default: bool,
    /// True outside of a container, where the root file system outlives the agent.
    pub is_machine: bool,
}

/// The content of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Configuration of Envoy, which may be large.
    Configuration,
    /// The workload's key and certificate, which must not be written to a disk.
    Certificate,
}

impl Content {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::Certificate => "certificate",
        }
    }

    pub(crate) fn variable(self) -> &'static str {
        match self {
            Self::Configuration => "ISTIO_AGENT_KEEP_CONFIG",
            Self::Certificate => "ISTIO_AGENT_KEEP_CERTS",
        }
    }

    /// Returns the subdirectory that the agent creates.
    pub(crate) const fn directory(self) -> &'static str {
        match self {
            Self::Configuration => "istio-agent-config",
            Self::Certificate => "istio-agent",
        }
    }
}

impl Volume {
    /// Makes a volume of a directory that the operator has named.
    pub fn named(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), is_default: false, is_machine: false }
    }

    /// Fails if this process cannot write to the directory, or if its file system does not suit the content.
    pub(crate) fn check(&self, content: Content) -> Result<(), Problem> {
        self.usable(content).map_err(|error| self.problem(content, error))
    }

    fn problem(&self, content: Content, error: io::Error) -> Problem {
        let code = match content {
            Content::Configuration => Code::KeptConfigUnwritable,
            Content::Certificate => Code::CertificateCacheUnwritable,
        };
        let path = &self.directory;
        let subject = format!("{}={}", content.variable(), path.display());
        Problem::new(code, subject, explained(path, error).to_string())
    }

    fn usable(&self, content: Content) -> io::Result<()> {
        let is_in_memory = is_in_memory(&Directory::open(&self.directory)?)?;
        let is_large = content == Content::Configuration;
        let is_lost = self.is_default
            && !self.is_machine
            && self.directory.metadata()?.dev() == Path::new("/").metadata()?.dev();
        let why = if is_lost {
            "it is not on a volume and is lost with the container"
        } else if content == Content::Certificate && !is_in_memory {
            "it is on a disk, expected a file system in memory"
        } else if is_large && self.is_default && is_in_memory {
            "it is in memory, which counts against the container's limit"
        } else if is_large && self.is_default && is_nearly_full(&self.directory)? {
            "less than 10 % of its file system is free"
        } else {
            return writable(&self.directory);
        };
        Err(io::Error::other(why))
    }

    /// Creates the subdirectory, and logs a failure. Returns true if the content is to be stored, also after a failure
    /// if the operator has named the directory, because it may become usable later.
    pub(crate) fn prepare(&self, content: Content) -> bool {
        let created = self.check(content).and_then(|()| {
            Directory::private(&self.directory, content.directory(), true)
                .map_err(|error| self.problem(content, error))
        });
        let Err(problem) = created else {
            return true;
        };
        if self.is_default {
            let Problem { subject, found, .. } = problem;
            tracing::info!(
                "{} is not stored for the next container: {subject}: {found}",
                content.name()
            );
        } else {
            tracing::error!("{problem}");
        }
        !self.is_default
    }
}

/// Returns true if less than a tenth of a file system is free for the agent's user.
fn is_nearly_full(directory: &Path) -> io::Result<bool> {
    let space = statvfs(directory)?;
    Ok(space.f_bavail < space.f_blocks / 10)
}

/// Returns true if the files of an open directory are in memory.
pub(crate) fn is_in_memory(directory: impl AsFd) -> io::Result<bool> {
    let file_system = fstatfs(directory)?;
    // The type is a small number in a word whose width depends on the machine.
    Ok(IN_MEMORY.contains(&(file_system.f_type as u64 & 0xffff_ffff)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_directory_is_used_on_volumes_of_the_right_medium() {
        let disk = tempfile::tempdir().expect("a directory");
        let memory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let missing = disk.path().join("missing");
        let (disk, memory) = (disk.path(), memory.path());
        let in_memory = "it is in memory";
        // The disk of the machine that runs this test may be nearly full, and is not used by default then.
        let is_full = is_nearly_full(disk).expect("free space");
        let full = is_full.then_some("less than 10 %");
        for (directory, is_machine, content, expected) in [
            (disk, false, Content::Configuration, Some("it is not on a volume")),
            (disk, true, Content::Configuration, full),
            (disk, true, Content::Certificate, Some("it is on a disk")),
            (memory, false, Content::Certificate, None),
            (memory, false, Content::Configuration, Some(in_memory)),
            (memory, true, Content::Configuration, Some(in_memory)),
            (&missing, true, Content::Configuration, Some("No such file")),
        ] {
            let volume = Volume { is_default: true, is_machine, ..Volume::named(directory) };
            let found = volume.check(content);
            let text = found.as_ref().err().map(|it| it.found.clone());
            let text = text.unwrap_or_default();
            assert_eq!(found.is_err(), expected.is_some(), "{volume:?}: {text}");
            assert!(text.contains(expected.unwrap_or_default()), "{text}");
        }
        for (directory, content, is_usable) in [
            (memory, Content::Configuration, true),
            (memory, Content::Certificate, true),
            (disk, Content::Configuration, true),
            (disk, Content::Certificate, false),
            (&missing, Content::Configuration, false),
        ] {
            let volume = Volume::named(directory);
            assert_eq!(volume.check(content).is_ok(), is_usable, "{volume:?}");
            assert!(volume.prepare(content));
        }
        let found = memory.join("istio-agent").metadata().expect("a directory");
        assert_eq!(found.mode() & 0o7777, 0o700);
    }

    #[test]
    fn a_default_directory_without_a_private_subdirectory_is_not_used() {
        let memory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let shared = memory.path().join("istio-agent");
        std::fs::create_dir(&shared).expect("a directory");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&shared, mode).expect("a mode");
        let volume = Volume { is_default: true, ..Volume::named(memory.path()) };
        assert!(!volume.prepare(Content::Certificate));
    }
}
