//! Gives Envoy access to the agent's directories and files if it runs as another user.
//!
//! The agent's directories are closed to others, because one of them serves secrets: they get Envoy's group. Files
//! for Envoy get its owner. Directories that are open to all users, or have another owner, stay unchanged.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Search permission of the group and of others.
const GROUP_ENTERS: u32 = 0o010;
const OTHERS_ENTER: u32 = 0o001;

/// Gives `user` access to `files` and `directories`. A failure is logged: Envoy reports what it cannot open.
pub(super) fn admit<'a>(
    user: u32,
    files: &[PathBuf],
    directories: impl IntoIterator<Item = Option<&'a Path>>,
) {
    for file in files {
        log(file, chown(file, Some(user), Some(user)));
    }
    for directory in directories.into_iter().flatten() {
        for directory in directory.ancestors().filter(|d| !d.as_os_str().is_empty()) {
            log(directory, enter(user, directory));
        }
    }
}

fn enter(group: u32, directory: &Path) -> io::Result<()> {
    let found = fs::metadata(directory)?;
    let mode = found.permissions().mode();
    let is_open = mode & OTHERS_ENTER != 0;
    let is_ours = (found.uid(), found.gid()) == (0, 0);
    if is_open || !is_ours || mode & GROUP_ENTERS == 0 {
        return Ok(());
    }
    chown(directory, None, Some(group))
}

fn log(path: &Path, result: io::Result<()>) {
    if let Err(error) = result {
        let path = path.display();
        tracing::warn!("cannot give Envoy's user access to {path}; starting Envoy anyway: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Group and mode of a directory before and after, as root, which alone may change owners.
    #[test]
    fn only_closed_directories_of_root_get_the_group() {
        if !rustix::process::getuid().is_root() {
            eprintln!("Only root gives files away: this test is not run.");
            return;
        }
        for (owner, group, mode, expected) in [
            (0, 0, 0o750, 1337),
            (0, 0, 0o755, 0),
            (0, 0, 0o700, 0),
            (0, 7, 0o750, 7),
            (7, 0, 0o750, 0),
        ] {
            let place = tempfile::tempdir().expect("a directory");
            let inner = place.path().join("a/b");
            fs::create_dir_all(&inner).expect("made");
            fs::set_permissions(&inner, fs::Permissions::from_mode(mode)).expect("set");
            chown(&inner, Some(owner), Some(group)).expect("given");
            admit(1337, &[], [inner.parent(), Some(&*inner), None]);
            let gid = fs::metadata(&inner).expect("there").gid();
            assert_eq!(gid, expected, "{owner}:{group} {mode:o}");
        }
    }

    #[test]
    fn files_become_envoys_own() {
        if !rustix::process::getuid().is_root() {
            eprintln!("Only root gives files away: this test is not run.");
            return;
        }
        let place = tempfile::tempdir().expect("a directory");
        let file = place.path().join("bootstrap");
        fs::write(&file, "").expect("written");
        admit(1337, std::slice::from_ref(&file), []);
        let found = fs::metadata(&file).expect("there");
        assert_eq!((found.uid(), found.gid()), (1337, 1337));
    }
}
