//! A directory other users may write to, used through its descriptor.
//!
//! Names are single components, links are never followed, and only files and directories of this
//! process' user are read or removed, whatever another user puts in their place meanwhile.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
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

/// The largest file read, many times a chain of certificates.
const LARGEST: u64 = 1 << 20;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// An open directory.
#[derive(Debug)]
pub(super) struct Directory(File);

impl Directory {
    /// Opens the directory at `path`, links included, as the operator has named it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let directory = open(path, DIRECTORY, Mode::empty())?;
        Ok(Self(directory.into()))
    }

    /// Opens the directory `name` of our own.
    pub(super) fn subdirectory(&self, name: &str) -> io::Result<Self> {
        let directory = openat(&self.0, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
        Ok(Self(own(name, directory)?))
    }

    /// Creates the directory `name`, which only we can use.
    pub(super) fn create(&self, name: &str) -> io::Result<Self> {
        mkdirat(&self.0, name, Mode::RWXU)?;
        self.subdirectory(name)
    }

    /// When the directory was changed last.
    pub(super) fn modified(&self) -> io::Result<SystemTime> {
        self.0.metadata()?.modified()
    }

    /// Sets the mode, whatever the umask, and syncs the entries.
    pub(super) fn finish(&self, mode: u32) -> io::Result<()> {
        self.0.set_permissions(Permissions::from_mode(mode))?;
        self.sync()
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    /// The names of all entries.
    pub(super) fn names(&self) -> io::Result<Vec<String>> {
        let entries = Dir::read_from(&self.0)?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    }

    pub(super) fn exists(&self, name: &str) -> bool {
        statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW).err() != Some(Errno::NOENT)
    }

    /// The target of the link `name`; None if it is none.
    pub(super) fn link_target(&self, name: &str) -> Option<String> {
        readlinkat(&self.0, name, Vec::new())
            .ok()?
            .into_string()
            .ok()
    }

    /// Replaces `name` by a link to `target`, by way of the link `temporary`.
    pub(super) fn link(&self, name: &str, target: &str, temporary: &str) -> io::Result<()> {
        symlinkat(target, &self.0, temporary)?;
        renameat(&self.0, temporary, &self.0, name).inspect_err(|_| {
            // The error that matters is the first.
            let _ = self.remove_link(temporary);
        })?;
        Ok(())
    }

    /// Reads the file `name` of our own. One that has another name as well, elsewhere, is refused.
    pub(super) fn read(&self, name: &str) -> io::Result<Zeroizing<Vec<u8>>> {
        // Without the last flag, opening a pipe waits for its writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = own(name, openat(&self.0, name, flags, Mode::empty())?)?;
        if file.metadata()?.nlink() != 1 {
            return Err(io::Error::other(format!("{name} has more than one name")));
        }
        regular_file::read_open(file, LARGEST)
    }

    /// Writes the file `name`, which must not exist, and syncs it.
    pub(super) fn write(&self, name: &str, content: &[u8], mode: u32) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file: File = openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?.into();
        file.write_all(content)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()
    }

    /// Removes the directory `name` of our own with the entries `names`, and fails if there are others.
    pub(super) fn remove(&self, name: &str, names: [&str; 3]) -> io::Result<()> {
        let directory = self.subdirectory(name)?;
        for name in names {
            match unlinkat(&directory.0, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(unlinkat(&self.0, name, AtFlags::REMOVEDIR)?)
    }

    /// Removes the link `name` of our own.
    pub(super) fn remove_link(&self, name: &str) -> io::Result<()> {
        let found = statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_link = FileType::from_raw_mode(found.st_mode).is_symlink();
        match is_link && found.st_uid == us() {
            true => Ok(unlinkat(&self.0, name, AtFlags::empty())?),
            false => Err(io::Error::other(format!("{name} is no link of ours"))),
        }
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

fn us() -> u32 {
    rustix::process::geteuid().as_raw()
}
