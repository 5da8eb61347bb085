//! Uses a directory to which other users may write, through its descriptor.
//!
//! Names are single components, links are never followed, and only files of this process' user are
//! read, whatever another user puts in their place meanwhile.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, fchmod, mkdirat, open, openat, renameat, unlinkat};
use rustix::io::Errno;
use zeroize::Zeroizing;

use crate::files::regular_file::{self, if_exists};
use crate::files::replace_file::replace_all;

/// The largest file that is read, many times a chain of certificates.
const MAX_FILE: u64 = 1 << 20;

/// The permissions of group and others.
const OTHERS: u32 = 0o077;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// An open directory.
#[derive(Debug)]
pub(crate) struct Directory(File);

impl Directory {
    /// Opens the directory at `path`, links included, as the operator has named it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(open(path, DIRECTORY, Mode::empty())?.into()))
    }

    /// Opens the directory `name` below `parent`. Fails if other users have access to it. `creates` it if it is
    /// missing.
    pub(crate) fn private(parent: &Path, name: &str, creates: bool) -> io::Result<Self> {
        Self::private_to(own_user(), parent, name, creates)
    }

    /// Like [`Self::private`], for a directory to which only `user` has access.
    pub(crate) fn private_to(
        user: u32,
        parent: &Path,
        name: &str,
        creates: bool,
    ) -> io::Result<Self> {
        let (directory, is_new) = Self::below(parent, name, creates)?;
        if is_new && user != own_user() {
            fchown(&directory, Some(user), Some(user))?;
        }
        check_private(name, &directory, user)?;
        Ok(Self(directory))
    }

    /// Like [`Self::private_to`], and creates the directory. A process of root takes it from another owner.
    pub(crate) fn owned_by(user: u32, parent: &Path, name: &str) -> io::Result<Self> {
        let (directory, _) = Self::below(parent, name, true)?;
        if own_user() == 0 {
            if directory.metadata()?.uid() != user {
                fchown(&directory, Some(user), Some(user))?;
            }
            fchmod(&directory, Mode::RWXU)?;
        }
        check_private(name, &directory, user)?;
        Ok(Self(directory))
    }

    /// Opens the directory `name` below `parent`. Returns true if it was created.
    fn below(parent: &Path, name: &str, creates: bool) -> io::Result<(File, bool)> {
        let parent = Self::open(parent)?;
        let is_new = creates
            && match mkdirat(&parent.0, name, Mode::RWXU) {
                Err(Errno::EXIST) => false,
                created => created.map(|()| true)?,
            };
        Ok((openat(&parent.0, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?.into(), is_new))
    }

    /// Lists the names in the directory.
    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        let entries = Dir::read_from(&self.0)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Returns a path to `name` for calls that do not take a descriptor, while the directory is open.
    pub(crate) fn path_to(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()).into()
    }

    /// Reads the file `name`. Fails if other users have access to it.
    pub(crate) fn read_private(&self, name: &str) -> io::Result<Zeroizing<Vec<u8>>> {
        regular_file::read_open(self.open_private_file(name)?, MAX_FILE)
    }

    /// Opens the regular file `name` of this process' user for reading. Fails if other users have access to it, or if it has
    /// a second name (a hard link), which may be in a directory of another user.
    pub(crate) fn open_private_file(&self, name: &str) -> io::Result<File> {
        // Without the last flag, opening a pipe waits for its writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(openat(&self.0, name, flags, Mode::empty())?);
        check_private(name, &file, own_user())?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other(format!("{name} is not a regular file")));
        }
        if metadata.nlink() != 1 {
            return Err(io::Error::other(format!("{name} has more than one name")));
        }
        Ok(file)
    }

    /// Creates the file `name` without access for other users. It replaces a file of this name.
    pub(crate) fn create_file(&self, name: &str) -> io::Result<File> {
        self.remove_file(name)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        Ok(openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Replaces the file `name` by the file `from`.
    pub(crate) fn rename(&self, from: &str, name: &str) -> io::Result<()> {
        Ok(renameat(&self.0, from, &self.0, name)?)
    }

    /// Removes the file or link `name`, if there is one.
    pub(crate) fn remove_file(&self, name: &str) -> io::Result<()> {
        if_exists(unlinkat(&self.0, name, AtFlags::empty()).map_err(Into::into)).map(drop)
    }

    /// Replaces whole files. All new files are on the disk before the first one is replaced.
    pub(crate) fn replace_files(&self, files: &[(&str, &[u8])], mode: u32) -> io::Result<()> {
        replace_all(self.as_fd(), files, mode, true)?;
        self.0.sync_all()
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Fails if users other than `user` have access, because they could plant content that the agent trusts.
fn check_private(name: &str, file: &File, user: u32) -> io::Result<()> {
    let found = file.metadata()?;
    if found.uid() == user && found.mode() & OTHERS == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{name} belongs to user {} with mode {:o}, expected user {user} and no access for others",
        found.uid(),
        found.mode() & 0o7777
    )))
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}
