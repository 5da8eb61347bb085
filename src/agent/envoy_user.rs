//! Gives Envoy access to the agent's directories and files if it runs as another user.
//!
//! Other users cannot enter the agent's directories, because one of them contains the socket for secrets: the
//! directories get Envoy's group. Files for Envoy get Envoy's user as owner. Directories that are open to all users,
//! or have another owner, stay unchanged.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Search permission of the group and of others.
const GROUP_ENTERS: u32 = 0o010;
const OTHERS_ENTER: u32 = 0o001;

/// Makes `user` the owner of `files`. A failure is logged: Envoy reports files that it cannot open.
pub(super) fn give_files(user: u32, files: &[PathBuf]) {
    for file in files {
        log_failure(file, chown(file, Some(user), Some(user)));
    }
}

/// Lets the group `user` enter `directories` and their ancestors. A failure is logged, as with files.
pub(super) fn admit(user: u32, directories: &[Option<&Path>]) {
    let paths = directories.iter().flatten().flat_map(|it| it.ancestors());
    for directory in paths.filter(|path| !path.as_os_str().is_empty()) {
        log_failure(directory, admit_group(user, directory));
    }
}

fn admit_group(group: u32, directory: &Path) -> io::Result<()> {
    let found = fs::metadata(directory)?;
    let mode = found.permissions().mode();
    let is_open = mode & OTHERS_ENTER != 0;
    let is_of_root = (found.uid(), found.gid()) == (0, 0);
    if is_open || !is_of_root || mode & GROUP_ENTERS == 0 {
        return Ok(());
    }
    chown(directory, None, Some(group))
}

fn log_failure(path: &Path, result: io::Result<()>) {
    if let Err(error) = result {
        let path = path.display();
        tracing::warn!("cannot give Envoy's user access to {path}; starting Envoy anyway: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows have the owner, group and mode of a directory, and its group afterwards.
    #[test]
    fn only_root_directories_closed_to_others_get_envoys_group() {
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
            admit(1337, &[inner.parent(), Some(&*inner), None]);
            let gid = fs::metadata(&inner).expect("there").gid();
            assert_eq!(gid, expected, "{owner}:{group} {mode:o}");
        }
    }

    #[test]
    fn files_are_given_to_envoys_user() {
        if !rustix::process::getuid().is_root() {
            eprintln!("Only root gives files away: this test is not run.");
            return;
        }
        let place = tempfile::tempdir().expect("a directory");
        let file = place.path().join("bootstrap");
        fs::write(&file, "").expect("written");
        give_files(1337, std::slice::from_ref(&file));
        let found = fs::metadata(&file).expect("there");
        assert_eq!((found.uid(), found.gid()), (1337, 1337));
    }
}
