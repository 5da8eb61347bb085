//! A directory other users may write to, used through its descriptor.
//!
//! Names are single components, links are never followed, and only files and directories of this
//! process' user are read or removed, whatever another user puts in their place meanwhile.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, mkdirat, open, openat, readlinkat, renameat, statat,
    symlinkat, unlinkat,
};
use rustix::io::Errno;
use zeroize::Zeroizing;

use crate::regular_file;
use crate::replace_file::replace_at;

/// The largest file read, many times a chain of certificates.
const MAX_FILE: u64 = 1 << 20;

/// The permissions of group and others.
const OTHERS: u32 = 0o077;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// An open directory.
#[derive(Debug)]
pub(crate) struct Directory(File);

impl Directory {
    /// Opens the directory at `path`, links included, as the operator has named it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let directory = open(path, DIRECTORY, Mode::empty())?;
        Ok(Self(directory.into()))
    }

    /// Opens the directory `name` of our own.
    pub(crate) fn subdirectory(&self, name: &str) -> io::Result<Self> {
        let directory = openat(&self.0, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
        Ok(Self(own(name, directory)?))
    }

    /// Creates the directory `name`, which only we can use.
    pub(crate) fn create(&self, name: &str) -> io::Result<Self> {
        mkdirat(&self.0, name, Mode::RWXU)?;
        self.subdirectory(name)
    }

    /// Opens the directory `name` below `parent`, which only we have access to; `is_made` if it is missing.
    pub(crate) fn private(parent: &Path, name: &str, is_made: bool) -> io::Result<Self> {
        let parent = Self::open(parent)?;
        if is_made {
            match mkdirat(&parent.0, name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let flags = DIRECTORY | OFlags::NOFOLLOW;
        let directory = File::from(openat(&parent.0, name, flags, Mode::empty())?);
        check_private(name, &directory)?;
        Ok(Self(directory))
    }

    /// When the directory was changed last.
    pub(crate) fn modified(&self) -> io::Result<SystemTime> {
        self.0.metadata()?.modified()
    }

    /// Sets the mode, whatever the umask, and syncs the entries.
    pub(crate) fn finish(&self, mode: u32) -> io::Result<()> {
        self.0.set_permissions(Permissions::from_mode(mode))?;
        self.sync()
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    /// The names of all entries.
    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        let entries = Dir::read_from(&self.0)?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    }

    /// The target of the link `name`; None if it is none.
    pub(crate) fn link_target(&self, name: &str) -> Option<String> {
        readlinkat(&self.0, name, Vec::new())
            .ok()?
            .into_string()
            .ok()
    }

    /// Replaces `name` by a link to `target`, by way of the link `temporary`.
    pub(crate) fn link(&self, name: &str, target: &str, temporary: &str) -> io::Result<()> {
        symlinkat(target, &self.0, temporary)?;
        renameat(&self.0, temporary, &self.0, name).inspect_err(|_| {
            // The error that matters is the first.
            let _ = self.remove_link(temporary);
        })?;
        Ok(())
    }

    /// Reads the file `name` of our own.
    pub(crate) fn read(&self, name: &str) -> io::Result<Zeroizing<Vec<u8>>> {
        regular_file::read_open(self.own_file(name, OFlags::RDONLY)?, MAX_FILE)
    }

    /// Like [`Directory::read`], of a file that only we have access to.
    pub(crate) fn read_private(&self, name: &str) -> io::Result<Zeroizing<Vec<u8>>> {
        let file = self.own_file(name, OFlags::RDONLY)?;
        check_private(name, &file)?;
        regular_file::read_open(file, MAX_FILE)
    }

    /// Opens the file `name`, which only we have access to, for reading and writing.
    pub(crate) fn private_file(&self, name: &str) -> io::Result<File> {
        let file = self.own_file(name, OFlags::RDWR)?;
        check_private(name, &file)?;
        Ok(file)
    }

    /// Opens the regular file `name` of our own. One that has another name as well, elsewhere, is refused.
    fn own_file(&self, name: &str, access: OFlags) -> io::Result<File> {
        // Without the last flag, opening a pipe waits for its writer.
        let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = own(name, openat(&self.0, name, flags, Mode::empty())?)?;
        let found = file.metadata()?;
        match found.is_file() {
            true if found.nlink() == 1 => Ok(file),
            true => Err(io::Error::other(format!("{name} has more than one name"))),
            false => Err(io::Error::other(format!("{name} is not a regular file"))),
        }
    }

    /// Creates the file `name`, which only we have access to, in place of what has this name.
    pub(crate) fn create_file(&self, name: &str) -> io::Result<File> {
        self.remove_file(name)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        Ok(openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Removes the file or link `name`, if there is one.
    pub(crate) fn remove_file(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.0, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Replaces the file `name` whole, readable by us alone.
    pub(crate) fn replace_file(&self, name: &str, content: &[u8]) -> io::Result<()> {
        replace_at(self.as_fd(), name.as_ref(), content, 0o600)
    }

    /// Writes the file `name`, which must not exist, and syncs it.
    pub(crate) fn write(&self, name: &str, content: &[u8], mode: u32) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file: File = openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?.into();
        file.write_all(content)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()
    }

    /// Removes the directory `name` of our own with the entries `names`, and fails if there are others.
    pub(crate) fn remove(&self, name: &str, names: [&str; 3]) -> io::Result<()> {
        let directory = self.subdirectory(name)?;
        names
            .iter()
            .try_for_each(|name| directory.remove_file(name))?;
        Ok(unlinkat(&self.0, name, AtFlags::REMOVEDIR)?)
    }

    /// Removes the link `name` of our own.
    pub(crate) fn remove_link(&self, name: &str) -> io::Result<()> {
        let found = statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_link = FileType::from_raw_mode(found.st_mode).is_symlink();
        match is_link && found.st_uid == us() {
            true => Ok(unlinkat(&self.0, name, AtFlags::empty())?),
            false => Err(io::Error::other(format!("{name} is no link of ours"))),
        }
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn own(name: &str, opened: OwnedFd) -> io::Result<File> {
    let file = File::from(opened);
    let (found, us) = (file.metadata()?.uid(), us());
    match found == us {
        true => Ok(file),
        false => Err(io::Error::other(format!(
            "{name} belongs to user {found}, expected user {us}"
        ))),
    }
}

/// Fails if others have access: who can write there could plant what the agent trusts.
fn check_private(name: &str, file: &File) -> io::Result<()> {
    let (found, us) = (file.metadata()?, us());
    if found.uid() == us && found.mode() & OTHERS == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{name} belongs to user {} with mode {:o}, expected user {us} and no access for others",
        found.uid(),
        found.mode() & 0o7777
    )))
}

fn us() -> u32 {
    rustix::process::geteuid().as_raw()
}
