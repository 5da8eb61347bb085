//! Notices when files may have changed, also behind symbolic links.
//!
//! One inotify instance watches directories, not files: those in which a path's last component and
//! each link on the way to it stand. So a file that is renamed over, written in place, made, removed
//! or reached through a link that now points elsewhere is noticed, whatever order that happens in.
//! Where a chain of links leads may change, so a path is watched anew each time it is read.
//!
//! To follow a path may wait for a disk, or for a network. So a [`Walker`] does that wherever it may
//! wait, and what it brings is taken in afterwards; what happens on the way meanwhile is not missed.
//!
//! Does not read files, and does not tell whether their content is another one.

mod chain;
mod strays;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use strays::Strays;
use tokio::io::unix::AsyncFd;

/// What may have to be read again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    Paths(BTreeSet<PathBuf>),
    /// The kernel had more to tell than it could hold. Nothing is watched any more.
    Anything,
}

/// Watched paths.
#[derive(Debug)]
pub(crate) struct FileWatch {
    inotify: AsyncFd<Arc<OwnedFd>>,
    /// The directories each path is watched in, with the name to look for.
    paths: HashMap<PathBuf, Vec<chain::Step>>,
    directories: HashMap<PathBuf, Directory>,
    by_descriptor: HashMap<i32, PathBuf>,
    strays: Strays,
}

/// Follows paths, and has the kernel watch on the way. It may wait for a disk.
#[derive(Debug)]
pub(crate) struct Walker {
    inotify: Arc<OwnedFd>,
    /// What had strayed when it began.
    since: u64,
}

/// Where a path led, and what the kernel watches of the way.
#[derive(Debug)]
pub(crate) struct Walked {
    inotify: Arc<OwnedFd>,
    since: u64,
    path: PathBuf,
    steps: Vec<(chain::Step, i32)>,
    /// Why it is watched in part only.
    error: Option<io::Error>,
}

#[derive(Debug)]
struct Directory {
    descriptor: i32,
    /// The names of interest in it, each with the paths that pass it.
    names: HashMap<OsString, HashSet<PathBuf>>,
}

impl FileWatch {
    #[expect(
        deprecated,
        reason = "an owned descriptor is what the safe constructor is sound for"
    )]
    pub(crate) fn new() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Self {
            inotify: AsyncFd::new(Arc::new(inotify))?,
            paths: HashMap::new(),
            directories: HashMap::new(),
            by_descriptor: HashMap::new(),
            strays: Strays::default(),
        })
    }

    /// Watches a path where it leads now, which may wait for a disk. An error leaves it watched in
    /// part.
    pub(crate) fn watch(&mut self, path: &Path) -> io::Result<()> {
        let walked = self.walker().walk(path);
        self.take(walked, &mut BTreeSet::new())
    }

    pub(crate) fn walker(&self) -> Walker {
        Walker {
            inotify: self.inotify.get_ref().clone(),
            since: self.strays.count(),
        }
    }

    /// Watches a path where it led. `changed` is told of paths to which something may have happened
    /// since. An error leaves it watched in part.
    pub(crate) fn take(
        &mut self,
        walked: Walked,
        changed: &mut BTreeSet<PathBuf>,
    ) -> io::Result<()> {
        let Walked { path, steps, .. } = walked;
        if !Arc::ptr_eq(&walked.inotify, self.inotify.get_ref()) {
            changed.insert(path);
            return Ok(());
        }
        for (step, descriptor) in &steps {
            if self.strays.had(*descriptor, &step.name, walked.since) {
                changed.insert(path.clone());
            }
            self.enter(step, *descriptor, &path, changed);
        }
        let steps: Vec<_> = steps.into_iter().map(|(step, _)| step).collect();
        let old = self.paths.insert(path.clone(), steps.clone());
        for step in old.into_iter().flatten() {
            if !steps.contains(&step) {
                self.leave(&step, &path);
            }
        }
        walked.error.map_or(Ok(()), Err)
    }

    pub(crate) fn unwatch(&mut self, path: &Path) {
        for step in self.paths.remove(path).into_iter().flatten() {
            self.leave(&step, path);
        }
    }

    /// Waits until something has happened to watched paths.
    pub(crate) async fn changed(&mut self) -> io::Result<Changed> {
        loop {
            let mut ready = self.inotify.readable().await?;
            let events = drain(ready.get_inner());
            ready.clear_ready();
            if Arc::strong_count(self.inotify.get_ref()) == 1 {
                // Nobody is on the way.
                self.strays.clear();
            }
            let mut changed = BTreeSet::new();
            for event in events? {
                if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                    // Watches may have ended without a word, so none is relied on.
                    *self = Self::new()?;
                    return Ok(Changed::Anything);
                }
                self.apply(&event, &mut changed);
            }
            if !changed.is_empty() {
                return Ok(Changed::Paths(changed));
            }
        }
    }

    fn enter(
        &mut self,
        step: &chain::Step,
        descriptor: i32,
        path: &Path,
        changed: &mut BTreeSet<PathBuf>,
    ) {
        let known = self.directories.get(&step.directory);
        if let Some(other) = known.filter(|known| known.descriptor != descriptor) {
            // Another directory stands there now.
            changed.extend(other.names.values().flatten().cloned());
            self.forget(&step.directory);
        }
        // The same directory by another name has the same descriptor, and is found by both.
        self.by_descriptor
            .entry(descriptor)
            .or_insert_with(|| step.directory.clone());
        let directory = self.directories.entry(step.directory.clone());
        let directory = directory.or_insert_with(|| Directory {
            descriptor,
            names: HashMap::new(),
        });
        let passing = directory.names.entry(step.name.clone()).or_default();
        passing.insert(path.to_owned());
    }

    fn leave(&mut self, step: &chain::Step, path: &Path) {
        let Some(directory) = self.directories.get_mut(&step.directory) else {
            return;
        };
        if let Some(passing) = directory.names.get_mut(&step.name) {
            passing.remove(path);
            if passing.is_empty() {
                directory.names.remove(&step.name);
            }
        }
        if directory.names.is_empty() {
            self.forget(&step.directory.clone());
        }
    }

    /// Stops watching a directory, unless it is watched by another name as well.
    fn forget(&mut self, directory: &Path) {
        let Some(gone) = self.directories.remove(directory) else {
            return;
        };
        let heir = self.directories.iter();
        let heir = heir.filter(|(_, other)| other.descriptor == gone.descriptor);
        match heir.map(|(path, _)| path.clone()).next() {
            Some(heir) => {
                self.by_descriptor.insert(gone.descriptor, heir);
            }
            None => {
                self.by_descriptor.remove(&gone.descriptor);
                // It fails when the directory has gone, and its watch with it.
                let _ = inotify::remove_watch(self.inotify.get_ref(), gone.descriptor);
            }
        }
    }

    fn apply(&mut self, event: &Event, changed: &mut BTreeSet<PathBuf>) {
        let gone =
            ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED | ReadFlags::UNMOUNT;
        let is_gone = event.flags.intersects(gone);
        let same = |directory: &&PathBuf| {
            let found = self.directories.get(*directory);
            found.is_some_and(|found| found.descriptor == event.descriptor)
        };
        // Somebody else may be on the way there.
        self.strays.note(event.descriptor, event.name.clone());
        let directories: Vec<PathBuf> = self.directories.keys().filter(same).cloned().collect();
        for path in directories {
            let Some(directory) = self.directories.get(&path) else {
                continue;
            };
            if is_gone {
                changed.extend(directory.names.values().flatten().cloned());
                self.forget(&path);
            } else if let Some(passing) = directory.names.get(&event.name) {
                changed.extend(passing.iter().cloned());
            }
        }
    }
}

impl Walker {
    pub(crate) fn walk(self, path: &Path) -> Walked {
        let mut walked = Walked {
            inotify: self.inotify,
            since: self.since,
            path: path.to_owned(),
            steps: Vec::new(),
            error: None,
        };
        match std::path::absolute(path) {
            Ok(path) => walked.follow(&path),
            Err(error) => walked.error = Some(error),
        }
        walked
    }
}

impl Walked {
    fn follow(&mut self, path: &Path) {
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        for step in chain::steps(path) {
            match inotify::add_watch(&self.inotify, &step.directory, flags) {
                Ok(descriptor) => self.steps.push((step, descriptor)),
                Err(error) => self.error = Some(error.into()),
            }
        }
    }
}

/// What the kernel tells of a directory.
struct Event {
    descriptor: i32,
    flags: ReadFlags,
    name: OsString,
}

/// All events there are.
fn drain(inotify: &OwnedFd) -> io::Result<Vec<Event>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = Reader::new(inotify, &mut buffer);
    let mut events = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => events.push(Event {
                descriptor: event.wd(),
                flags: event.events(),
                name: event
                    .file_name()
                    .map(|name| OsStr::from_bytes(name.to_bytes()).to_owned())
                    .unwrap_or_default(),
            }),
            Err(Errno::AGAIN) => return Ok(events),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests;
