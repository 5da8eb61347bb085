//! Writes the three files of each rotation, so that all change in the same moment.

use std::io;
use std::time::{Duration, SystemTime};

use super::{Config, NAMES};
use crate::directory::Directory;

/// The link that is replaced.
pub(super) const DATA: &str = "..data";

/// The prefix of directories that hold one rotation; hexadecimal digits follow.
const VERSION: &str = "..istio-certs-";

/// What a link is called until it is renamed: a version with this suffix.
const LINK: &str = ".link";

/// A directory that is this old and not linked was left by an earlier agent.
pub(super) const STALE: Duration = Duration::from_secs(60);

/// What this agent has put in the directory.
#[derive(Debug)]
pub(super) struct Writer {
    config: Config,
    /// The version linked now.
    current: Option<String>,
    /// The version linked before: a client may still read it.
    previous: Option<String>,
}

impl Writer {
    pub(super) const fn new(config: Config) -> Self {
        Self {
            config,
            current: None,
            previous: None,
        }
    }

    /// Writes `contents`, in the order of [`NAMES`], unless they are there.
    pub(super) fn write(&mut self, contents: [&[u8]; 3]) -> io::Result<()> {
        let directory = Directory::open(&self.config.directory)?;
        if self.current.is_none() {
            self.take_over(&directory)?;
        }
        if self.is_written(&directory, contents) {
            return Ok(());
        }
        // The names go through the present link first, so nothing changes should the rest fail. On the
        // first write they follow the link, as no name may lead nowhere.
        let is_first = self.current.is_none();
        if !is_first {
            link_names(&directory)?;
        }
        let obsolete = self.swap(&directory, contents)?;
        if is_first {
            link_names(&directory)?;
        }
        if let Some(obsolete) = obsolete {
            remove(&directory, &obsolete);
        }
        directory.sync()
    }

    /// Continues with the version an earlier agent has linked, and removes what else it left.
    fn take_over(&mut self, directory: &Directory) -> io::Result<()> {
        let linked = directory.link_target(DATA);
        let is_ours = |name: &String| is_version(name) && directory.subdirectory(name).is_ok();
        self.current = linked.filter(is_ours);
        remove_stale(directory, self.current.as_deref())
    }

    /// Points the link to a new version, in one step. Returns the version before the previous one, which
    /// no client reads any more.
    fn swap(&mut self, directory: &Directory, contents: [&[u8]; 3]) -> io::Result<Option<String>> {
        let version = random_version();
        let filled = self.fill(directory, &version, contents);
        if let Err(error) = filled.and_then(|()| link(directory, DATA, &version)) {
            // Best effort: a later start removes what is left.
            let _ = directory.remove(&version, NAMES);
            return Err(error);
        }
        let before = self.current.replace(version);
        Ok(std::mem::replace(&mut self.previous, before))
    }

    fn fill(&self, directory: &Directory, version: &str, contents: [&[u8]; 3]) -> io::Result<()> {
        let (mode, file_mode) = match self.config.readable_by_all {
            true => (0o755, 0o644),
            false => (0o700, 0o600),
        };
        let version = directory.create(version)?;
        for (name, content) in NAMES.iter().zip(contents) {
            version.write(name, content, file_mode)?;
        }
        version.finish(mode)
    }

    fn is_written(&self, directory: &Directory, contents: [&[u8]; 3]) -> bool {
        let Some(current) = &self.current else {
            return false;
        };
        let Ok(version) = directory.subdirectory(current) else {
            return false;
        };
        let mut files = NAMES.iter().zip(contents);
        directory.link_target(DATA).as_ref() == Some(current)
            && files.all(|(name, content)| {
                directory.link_target(name) == Some(behind_link(name))
                    && version.read(name).is_ok_and(|found| *found == content)
            })
    }
}

fn behind_link(name: &str) -> String {
    format!("{DATA}/{name}")
}

fn link_names(directory: &Directory) -> io::Result<()> {
    NAMES.iter().try_for_each(|name| {
        let target = behind_link(name);
        match directory.link_target(name) {
            Some(found) if found == target => Ok(()),
            _ => link(directory, name, &target),
        }
    })
}

fn link(directory: &Directory, name: &str, target: &str) -> io::Result<()> {
    directory.link(name, target, &(random_version() + LINK))
}

fn random_version() -> String {
    format!("{VERSION}{:016x}", fastrand::u64(..))
}

/// Whether it is the name of a version: one component, as [`random_version`] makes them.
fn is_version(name: &str) -> bool {
    let digits = name.strip_prefix(VERSION);
    digits.is_some_and(|digits| {
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// Removes what earlier agents left. What another user has made stays.
fn remove_stale(directory: &Directory, linked: Option<&str>) -> io::Result<()> {
    for name in directory.names()? {
        if name.strip_suffix(LINK).is_some_and(is_version) {
            // If it is not ours it may stay.
            let _ = directory.remove_link(&name);
        } else if is_version(&name) && Some(&*name) != linked && is_stale(directory, &name) {
            remove(directory, &name);
        }
    }
    Ok(())
}

fn is_stale(directory: &Directory, name: &str) -> bool {
    let modified = directory.subdirectory(name).and_then(|old| old.modified());
    let age = modified.map(|modified| SystemTime::now().duration_since(modified));
    matches!(age, Ok(Ok(age)) if age > STALE)
}

/// What stays must not prevent writing.
fn remove(directory: &Directory, version: &str) {
    if let Err(error) = directory.remove(version, NAMES) {
        tracing::warn!("{version} of an earlier rotation stays: {error}");
    }
}
