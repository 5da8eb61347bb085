//! Notices that one of several files has changed, or has come to be.
//!
//! The kernel tells what happens in their directories, so that a file may be replaced, be a link, or
//! not be there yet. Kubernetes changes all files of a volume at once by moving a link, whose name
//! counts as that of each file beside it.
//!
//! Does not look into the files, and costs nothing while nothing happens. A directory that does not
//! exist is not watched.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::net::unix::pipe::Receiver;

/// The link of a volume of Kubernetes.
const VOLUME: &[u8] = b"..data";
/// Holds a few events, each with a name of up to 255 bytes.
const EVENTS: usize = 4096;

#[derive(Debug)]
pub(super) struct Watch {
    /// No pipe, but read like one.
    events: Receiver,
    /// The names that count, by the directory's watch.
    names: BTreeMap<i32, BTreeSet<Vec<u8>>>,
}

impl Watch {
    pub(super) fn of(files: &[PathBuf]) -> io::Result<Self> {
        let events = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        let mut names: BTreeMap<i32, BTreeSet<Vec<u8>>> = BTreeMap::new();
        for file in files {
            let Some((directory, name)) = directory_and_name(file) else {
                continue;
            };
            match inotify::add_watch(&events, directory, wanted()) {
                Ok(watch) => {
                    names.entry(watch).or_default().insert(name);
                }
                Err(error) => {
                    tracing::debug!(%error, file = %file.display(), "not watching a file");
                }
            }
        }
        Ok(Self {
            events: Receiver::from_owned_fd_unchecked(events)?,
            names,
        })
    }

    /// Returns when a file has changed since the last call. May be dropped and called again.
    pub(super) async fn changed(&mut self) -> io::Result<()> {
        loop {
            self.events.readable().await?;
            if self.read()? {
                return Ok(());
            }
        }
    }

    /// Reads all there is to read; whether any of it counts.
    fn read(&self) -> io::Result<bool> {
        let mut buffer = [0; EVENTS];
        let mut counts = false;
        loop {
            match self.events.try_read(&mut buffer) {
                Ok(length) => {
                    let happened = events(&buffer[..length]);
                    counts |= happened
                        .into_iter()
                        .any(|(watch, name)| self.counts(watch, name));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(counts),
                Err(error) => return Err(error),
            }
        }
    }

    fn counts(&self, watch: i32, name: &[u8]) -> bool {
        let of_directory = self.names.get(&watch);
        name == VOLUME || of_directory.is_some_and(|names| names.contains(name))
    }
}

fn wanted() -> WatchFlags {
    WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::CREATE
}

fn directory_and_name(file: &Path) -> Option<(&Path, Vec<u8>)> {
    let directory = match file.parent()? {
        here if here.as_os_str().is_empty() => Path::new("."),
        directory => directory,
    };
    let name = file.file_name()?.as_encoded_bytes().to_vec();
    Some((directory, name))
}

/// The watches and names of events as the kernel writes them, see inotify(7): four words of four
/// bytes, the last of which is the length of the name that follows, which zeroes make up to it.
fn events(mut bytes: &[u8]) -> Vec<(i32, &[u8])> {
    let mut found = Vec::new();
    while let Some((words, rest)) = bytes.split_first_chunk::<16>() {
        let [watch, _, _, length] = [0, 4, 8, 12]
            .map(|at| i32::from_ne_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]));
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some((name, rest)) = rest.split_at_checked(length) else {
            break;
        };
        let end = name.iter().position(|byte| *byte == 0);
        found.push((watch, &name[..end.unwrap_or(length)]));
        bytes = rest;
    }
    found
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// Whether there is news by now.
    fn has_changed(watch: &mut Watch) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        matches!(
            pin!(watch.changed()).poll(&mut context),
            Poll::Ready(Ok(()))
        )
    }

    async fn changes(watch: &mut Watch) {
        watch.changed().await.expect("it is watched");
    }

    #[test]
    fn what_the_kernel_has_not_written_is_not_read() {
        let mut bytes = Vec::new();
        for (watch, name) in [(1_i32, &b"a\0\0\0"[..]), (2, b""), (3, b"bc\0\0")] {
            bytes.extend(watch.to_ne_bytes());
            bytes.extend([0; 8]);
            bytes.extend(u32::try_from(name.len()).expect("short").to_ne_bytes());
            bytes.extend(name);
        }
        let all = [(1, &b"a"[..]), (2, b""), (3, b"bc")];
        assert_eq!(events(&bytes), all);
        for cut in 1..20 {
            assert_eq!(events(&bytes[..bytes.len() - cut]), all[..2]);
        }
    }

    #[tokio::test]
    async fn notices_files_written_replaced_linked_and_new_but_not_their_neighbours() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        fs::write(path("mesh"), "1").expect("written");
        let files = [
            path("mesh"),
            path("override"),
            "none/such".into(),
            "envoy".into(),
        ];
        let mut watch = Watch::of(&files).expect("a watch");
        fs::write(path("neighbour"), "1").expect("written");
        assert!(!has_changed(&mut watch));
        fs::write(path("mesh"), "2").expect("written");
        changes(&mut watch).await;
        fs::rename(path("neighbour"), path("override")).expect("moved");
        changes(&mut watch).await;
        std::os::unix::fs::symlink("elsewhere", path("..data")).expect("a link");
        changes(&mut watch).await;
        assert!(!has_changed(&mut watch));
    }
}
