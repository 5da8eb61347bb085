//! Reads certificates, keys, tokens and settings: regular files up to a size, because a path may name a pipe or a
//! device by mistake.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use zeroize::Zeroizing;

use crate::files::permission::explained;

/// The size limit of a settings file, in bytes. A ConfigMap has at most 1 MiB.
pub(crate) const MAX_SETTINGS: u64 = 4 << 20;

/// The size limit of a text of the kernel, such as a list of all TCP sockets.
const MAX_KERNEL: u64 = 64 << 20;

/// The most links of a path, as in the kernel.
const MAX_LINKS: u32 = 40;

/// Returns None instead of the error that a file or directory does not exist.
pub(crate) fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// Reads a regular file of at most `limit` bytes.
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    read_open(open(path)?, limit)
}

/// Reads a regular file of UTF-8, of at most `limit` bytes.
pub(crate) fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    let content = std::mem::take(&mut *read(path, limit)?);
    String::from_utf8(content).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Reads a text of the kernel, from procfs or sysfs.
pub(crate) fn read_kernel(path: impl AsRef<Path>) -> io::Result<String> {
    read_text(path.as_ref(), MAX_KERNEL)
}

/// Opens a file for reading, without waiting.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    // Without the second flag, opening a pipe waits for its writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    opened.map(File::from).map_err(|error| explained(path, error.into()))
}

/// Opens a file for reading, on a path whose links belong to this process' user or root. The owner of another link, in a
/// directory that the pod's containers share, could lead the agent to a file of its own.
pub(crate) fn open_trusted(path: &Path) -> io::Result<File> {
    const STEP: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
    let mut at = open_start(path)?;
    let mut rest = steps(path);
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        let step = rustix::fs::openat(&at, &name, STEP, Mode::empty())?;
        let found = File::from(step.try_clone()?).metadata()?;
        if found.is_symlink() {
            let owner = found.uid();
            if links == MAX_LINKS || ![0, rustix::process::geteuid().as_raw()].contains(&owner) {
                let why = format!("the link {} of user {owner} is not followed", name.display());
                return Err(io::Error::other(why));
            }
            links += 1;
            let target = rustix::fs::readlinkat(&step, "", Vec::new())?;
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            if target.is_absolute() {
                at = open_start(&target)?;
            }
            rest = steps(&target).into_iter().chain(rest).collect();
        } else if rest.is_empty() {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(&at, &name, flags, Mode::empty());
            return opened.map(File::from).map_err(|error| explained(path, error.into()));
        } else {
            at = step;
        }
    }
    Err(io::ErrorKind::IsADirectory.into())
}

fn open_start(path: &Path) -> rustix::io::Result<OwnedFd> {
    let start = if path.is_absolute() { "/" } else { "." };
    rustix::fs::open(start, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

/// Returns the names of a path, without its root.
fn steps(path: &Path) -> VecDeque<OsString> {
    let is_name = |it: &Component<'_>| matches!(it, Component::Normal(_) | Component::ParentDir);
    path.components().filter(is_name).map(|it| it.as_os_str().to_owned()).collect()
}

/// Reads an open file. Fails unless it is a regular file of at most `limit` bytes.
pub(crate) fn read_open(file: File, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    // The buffer has its final capacity, because a buffer that grows leaves copies of a key in memory.
    let capacity = usize::try_from(metadata.len().min(limit)).unwrap_or(0) + 1;
    let mut content = Zeroizing::new(Vec::with_capacity(capacity));
    if file.take(limit + 1).read_to_end(&mut content)? as u64 > limit {
        let problem = format!("more than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(content)
}

/// Reads a file like [`read`], on a thread that may block.
pub(crate) async fn read_blocking(path: PathBuf, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    tokio::task::spawn_blocking(move || read(&path, limit)).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_regular_files_up_to_the_limit_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_blocking(path.clone(), 5).await.unwrap().as_slice(), b"12345");
        let text = |path: &Path| read(path, 4).unwrap_err().to_string();
        assert_eq!(text(&path), "more than 4 bytes");
        assert_eq!(text(dir.path()), "not a regular file");
        assert_eq!(text(Path::new("/dev/zero")), "not a regular file");
        assert!(text(&dir.path().join("none")).starts_with("No such file"));
    }
}
