//! Replaces a whole file: a reader finds the old content or the new content, never a part of it.
//!
//! The new content is written to `<path>.tmp` and renamed over `path`. A `.tmp` file of a killed agent is
//! removed first. [`replace_file`] does not sync to disk: the file survives the agent, but not a power failure.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, renameat, unlinkat};

use crate::files::permission::explained;
use crate::files::regular_file::if_exists;

/// Replaces `path` by a new file with `bytes` and `mode`. After an error `path` is unchanged.
pub(crate) fn replace_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace_all(CWD, &[(path, bytes)], mode, false).map_err(|error| explained(path, error))
}

/// Like [`replace_file`], for files below an open directory. All are written, and on the disk if
/// `syncs`, before the first one is replaced.
pub(crate) fn replace_all<P: AsRef<Path>>(
    directory: BorrowedFd<'_>,
    files: &[(P, &[u8])],
    mode: u32,
    syncs: bool,
) -> io::Result<()> {
    write_and_rename(directory, files, mode, syncs).inspect_err(|_| {
        for (path, _) in files {
            // The first error is reported, not the one of this clean-up.
            let _ = unlinkat(directory, temporary(path.as_ref()), AtFlags::empty());
        }
    })
}

fn write_and_rename<P: AsRef<Path>>(
    directory: BorrowedFd<'_>,
    files: &[(P, &[u8])],
    mode: u32,
    syncs: bool,
) -> io::Result<()> {
    for (path, bytes) in files {
        let file = write_temporary(directory, path.as_ref(), bytes, mode)?;
        if syncs {
            file.sync_all()?;
        }
    }
    for (path, _) in files {
        renameat(directory, temporary(path.as_ref()), directory, path.as_ref())?;
    }
    Ok(())
}

fn write_temporary(
    directory: BorrowedFd<'_>,
    path: &Path,
    bytes: &[u8],
    mode: u32,
) -> io::Result<File> {
    let temporary = temporary(path);
    // A leftover could be a link, or have another mode.
    if_exists(unlinkat(directory, &temporary, AtFlags::empty()).map_err(Into::into))?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file: File = openat(directory, &temporary, flags, Mode::from_raw_mode(0o600))?.into();
    file.write_all(bytes)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    Ok(file)
}

fn temporary(path: &Path) -> PathBuf {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    temporary.into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_replaced_file_has_new_content_and_mode_despite_leftovers() {
        let directory = tempfile::tempdir().unwrap();
        let (path, victim) = (directory.path().join("a.pem"), directory.path().join("b"));
        fs::write(&victim, "untouched").unwrap();
        symlink(&victim, directory.path().join("a.pem.tmp")).unwrap();
        for content in ["first", "second"] {
            replace_file(&path, content.as_bytes(), 0o600).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        assert_eq!(names(directory.path()), ["a.pem", "b"]);
    }

    #[test]
    fn a_failed_replacement_leaves_the_old_entry_and_no_temporary_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("taken");
        fs::create_dir_all(path.join("by a directory")).unwrap();
        assert!(replace_file(&path, b"new", 0o600).is_err());
        assert_eq!(names(directory.path()), ["taken"]);
        let missing = directory.path().join("missing/file");
        let error = replace_file(&missing, b"new", 0o600).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
