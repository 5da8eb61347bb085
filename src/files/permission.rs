//! Describes errors of files and directories: [`problem`] with a code for the cause, [`explained`] with the owner and the
//! mode if access was denied. [`writable`] finds such errors before a write.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Access, access, statvfs};
use rustix::process::geteuid;

use crate::problem::{Code, Problem};

/// Returns the problem of a file, directory or socket for which `action` failed, such as reading or creating it.
pub(crate) fn problem(action: &str, path: &Path, error: io::Error) -> Problem {
    let code = match error.kind() {
        io::ErrorKind::PermissionDenied => Code::DirectoryForbidden,
        io::ErrorKind::ReadOnlyFilesystem => Code::DirectoryReadOnly,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::DiskFull,
        _ => Code::FileUnusable,
    };
    let error = explained(path, error);
    Problem::new(code, path.display(), format!("cannot {action}: {error}"))
}

/// Fails if this process cannot write to `directory` or, if that is missing, to its nearest ancestor that exists.
pub(crate) fn writable(directory: &Path) -> io::Result<()> {
    let directory = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    if !directory.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    access(directory, Access::WRITE_OK | Access::EXEC_OK)?;
    let volume = statvfs(directory)?;
    // A tmpfs without a limit reports no blocks at all.
    if volume.f_bavail == 0 && volume.f_blocks > 0 {
        return Err(io::ErrorKind::StorageFull.into());
    }
    Ok(())
}

/// Explains an error of using `path` if access was denied: adds the owner of the path, or of the nearest
/// ancestor whose metadata can be read, and the user of this process. Other errors stay unchanged.
pub(crate) fn explained(path: &Path, error: io::Error) -> io::Error {
    // An explained error stays as it is.
    if error.kind() != io::ErrorKind::PermissionDenied || error.get_ref().is_some() {
        return error;
    }
    // The last ancestor of a relative path is empty and does not exist.
    let mut paths = path.ancestors().chain([Path::new(".")]);
    let Some((path, found)) = paths.find_map(|path| Some((path, path.metadata().ok()?))) else {
        return error;
    };
    let mode = found.mode() & 0o7777;
    let us = geteuid();
    let text = format!(
        "{error}: {} belongs to user {} with mode {mode:o}, and this process runs as user {us}",
        path.display(),
        found.uid()
    );
    io::Error::new(error.kind(), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denied_access_names_owner_and_user_and_other_errors_stay() {
        let root = tempfile::tempdir().unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(root.path(), mode).unwrap();
        let us = geteuid();
        let expected = |at: &Path| {
            format!(
                "permission denied: {} belongs to user {us} with mode 700, and this process runs as \
                 user {us}",
                at.display()
            )
        };
        for path in ["missing", "missing/further"] {
            let denied = io::Error::from(io::ErrorKind::PermissionDenied);
            let error = explained(&root.path().join(path), denied);
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            assert_eq!(error.to_string(), expected(root.path()), "{path}");
        }
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = explained(Path::new("missing"), denied).to_string();
        assert!(error.contains(": . belongs to user "), "{error}");
        let missing = explained(root.path(), io::ErrorKind::NotFound.into());
        assert_eq!(missing.to_string(), "entity not found");
    }
}
