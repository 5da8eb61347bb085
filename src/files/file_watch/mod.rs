//! Reports when files may have changed, also behind symbolic links.
//!
//! One inotify instance watches directories, not files: the directories that contain a path's last component and
//! each link on the way to it. Therefore every change is reported: a file that is replaced by a rename, written in
//! place, created or removed, and a link that points to another file. Call [`FileWatch::watch`] before each
//! read, because a chain of links may lead to another file by then: a change after the call is reported, and an
//! earlier change is in the content that is read. Content is not compared.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, Event, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

/// The maximum number of links of a path that are followed, as in the kernel.
const MAX_LINKS: usize = 40;

/// Watched paths.
#[derive(Debug)]
pub(crate) struct FileWatch {
    inotify: AsyncFd<OwnedFd>,
    watched: Mutex<Watched>,
}

/// A name in the directory of a watch descriptor.
type Link = (i32, OsString);

#[derive(Debug, Default)]
struct Watched {
    /// The links on the way of each path.
    paths: HashMap<PathBuf, HashSet<Link>>,
    /// The paths that lead through each name of a directory, by its watch descriptor.
    directories: HashMap<i32, HashMap<OsString, HashSet<PathBuf>>>,
}

impl FileWatch {
    #[expect(deprecated, reason = "an owned descriptor is what the safe constructor is sound for")]
    pub(crate) fn new() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Self { inotify: AsyncFd::new(inotify)?, watched: Mutex::default() })
    }

    /// Watches a path and its current chain of links. Blocks on the file system. After an error only a part of the
    /// chain is watched.
    pub(crate) fn watch(&self, path: &Path) -> io::Result<()> {
        let mut links = HashSet::new();
        let mut outcome = Ok(());
        walk(&std::path::absolute(path)?, |directory, name| {
            match self.watch_directory(directory, &name, path) {
                Ok(descriptor) => {
                    links.insert((descriptor, name));
                }
                Err(error) => outcome = Err(error),
            }
        });
        let mut watched = self.watched.lock();
        let old = watched.paths.insert(path.to_owned(), links.clone());
        for link in old.unwrap_or_default().difference(&links) {
            self.remove(&mut watched, link, path);
        }
        outcome
    }

    /// Ends the watch of a path, and of directories that no other path leads through.
    pub(crate) fn unwatch(&self, path: &Path) {
        let mut watched = self.watched.lock();
        for link in watched.paths.remove(path).unwrap_or_default() {
            self.remove(&mut watched, &link, path);
        }
    }

    /// Waits until watched paths may have changed, and returns them.
    pub(crate) async fn changed(&self) -> io::Result<BTreeSet<PathBuf>> {
        loop {
            let mut ready = self.inotify.readable().await?;
            let changed = self.read_events();
            ready.clear_ready();
            let paths = changed?;
            if !paths.is_empty() {
                return Ok(paths);
            }
        }
    }

    /// Reads all pending events. Returns the paths that they may have changed.
    fn read_events(&self) -> io::Result<BTreeSet<PathBuf>> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(self.inotify.get_ref(), &mut buffer);
        let mut paths = BTreeSet::new();
        loop {
            match reader.next() {
                Ok(event) => self.add_changed(&event, &mut paths),
                Err(Errno::AGAIN) => return Ok(paths),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Watches a directory for a path that leads through `name` in it. Returns the watch descriptor.
    fn watch_directory(&self, directory: &Path, name: &OsStr, path: &Path) -> io::Result<i32> {
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
        loop {
            let descriptor = inotify::add_watch(&self.inotify, directory, flags)?;
            {
                let mut watched = self.watched.lock();
                let names = watched.directories.entry(descriptor).or_default();
                names.entry(name.to_owned()).or_default().insert(path.to_owned());
            }
            // Another thread may have removed the same watch before this one recorded it.
            if inotify::add_watch(&self.inotify, directory, flags)? == descriptor {
                return Ok(descriptor);
            }
            self.remove(&mut self.watched.lock(), &(descriptor, name.to_owned()), path);
        }
    }

    /// Removes a path from a link. Ends the watch of a directory without paths.
    fn remove(&self, watched: &mut Watched, (descriptor, name): &Link, path: &Path) {
        let Some(names) = watched.directories.get_mut(descriptor) else {
            return;
        };
        if let Some(paths) = names.get_mut(name) {
            paths.remove(path);
            if paths.is_empty() {
                names.remove(name);
            }
        }
        if names.is_empty() {
            watched.directories.remove(descriptor);
            self.end_watch(*descriptor);
        }
    }

    fn end_watch(&self, descriptor: i32) {
        // It fails if the directory is removed, because its watch is removed with it.
        let _ = inotify::remove_watch(&self.inotify, descriptor);
    }

    /// Adds the paths that an event may have changed. Ends the watch of a directory that no longer exists.
    fn add_changed(&self, event: &Event<'_>, changed: &mut BTreeSet<PathBuf>) {
        let mut watched = self.watched.lock();
        let gone =
            ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED | ReadFlags::UNMOUNT;
        if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
            // The kernel dropped events, which may have been about any path.
            changed.extend(watched.paths.keys().cloned());
        } else if event.events().intersects(gone) {
            if let Some(names) = watched.directories.remove(&event.wd()) {
                changed.extend(names.into_values().flatten());
                self.end_watch(event.wd());
            }
        } else if let Some(names) = watched.directories.get(&event.wd())
            && let Some(name) = event.file_name()
        {
            let name = OsStr::from_bytes(name.to_bytes());
            changed.extend(names.get(name).into_iter().flatten().cloned());
        }
    }
}

/// Calls `visit` with the directory and the name of each component that decides to which file an absolute path
/// leads: each link, the file at the end, or the first component that is missing. Plain directories are
/// left out, because the watches of directories below a moved one still hold.
///
/// A component is read after its visit, so that a watch set by `visit` misses no change.
fn walk(path: &Path, mut visit: impl FnMut(&Path, OsString)) {
    let mut at = PathBuf::from("/");
    let mut rest = components(path);
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&name);
        let mut target = link_target(&next);
        if !matches!(target, Ok(None)) || rest.is_empty() {
            visit(&at, name);
            target = link_target(&next);
        }
        match target {
            Ok(None) => at = next,
            Ok(Some(_)) if links == MAX_LINKS => return,
            Ok(Some(target)) => {
                links += 1;
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                let mut target = components(&target);
                target.append(&mut rest);
                rest = target;
            }
            Err(_) => return,
        }
    }
}

/// Returns the target of a link, or None if `path` is not a link.
fn link_target(path: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read_link(path) {
        Ok(target) => Ok(Some(target)),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(None),
        Err(error) => Err(error),
    }
}

fn components(path: &Path) -> VecDeque<OsString> {
    let named = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    named.collect()
}

#[cfg(test)]
mod tests;
