//! Prepares the place of Envoy's admin socket.
//!
//! A process that can open the socket can stop Envoy, so only Envoy's user has access to its directory. Envoy creates
//! the socket, and does not remove it when it exits.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::files::directory::Directory;
use crate::files::regular_file::if_exists;
use crate::net::unix_socket;
use crate::problem::{Code, Problem};

/// Creates the directory of the socket for an Envoy of this user, and removes the socket of an Envoy that has exited.
/// Fails if a process listens on it, or if another file is in its place.
///
/// Not for the successor of a hot restart, which takes the path over from its parent.
pub(super) fn prepare(socket: &Path, user: u32) -> Result<(), Problem> {
    try_prepare(socket, user)
        .map_err(|why| Problem::new(Code::AdminSocketUnusable, socket.display(), why))
}

fn try_prepare(socket: &Path, user: u32) -> io::Result<()> {
    let directory = socket.parent().unwrap_or(Path::new(""));
    let parent = directory.parent().filter(|path| !path.as_os_str().is_empty());
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    let directory = Directory::owned_by(user, parent.unwrap_or(Path::new(".")), &name)?;
    let file = socket.file_name().unwrap_or_default().to_string_lossy();
    let path = directory.path_to(&file);
    let Some(found) = if_exists(fs::symlink_metadata(&path))? else {
        return Ok(());
    };
    if !found.file_type().is_socket() || found.uid() != user {
        let owner = found.uid();
        let mode = found.mode();
        let why = format!(
            "a file of user {owner} with mode {mode:o} is in its place, expected a socket of user {user}"
        );
        return Err(io::Error::other(why));
    }
    match unix_socket::find_listener(&path) {
        Ok(pid) => Err(io::Error::other(format!("process {pid} listens on it"))),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            directory.remove_file(&file)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Prepares the socket in this directory. Returns the problem, or nothing.
    fn prepared(root: &Path) -> String {
        let user = rustix::process::geteuid().as_raw();
        let prepared = prepare(&root.join("admin/admin.sock"), user);
        prepared.err().map(|problem| problem.found).unwrap_or_default()
    }

    #[test]
    fn the_directory_is_private_and_a_stale_socket_is_removed() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(prepared(root.path()), "");
        let directory = root.path().join("admin");
        assert_eq!(directory.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let socket = directory.join("admin.sock");
        drop(UnixListener::bind(&socket).unwrap());
        assert_eq!(prepared(root.path()), "");
        assert!(!socket.exists());
    }

    #[tokio::test]
    async fn a_socket_in_use_and_other_files_stay() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(prepared(root.path()), "");
        let socket = root.path().join("admin/admin.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let pid = std::process::id();
        assert_eq!(prepared(root.path()), format!("process {pid} listens on it"));
        drop(listener);
        fs::remove_file(&socket).unwrap();
        fs::write(&socket, "").unwrap();
        assert!(prepared(root.path()).contains("expected a socket"), "{}", prepared(root.path()));
        fs::remove_file(&socket).unwrap();
        symlink("/nowhere", &socket).unwrap();
        assert!(prepared(root.path()).contains("expected a socket"));
    }

    #[test]
    fn a_link_or_a_file_in_place_of_the_directory_is_refused() {
        let (root, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        symlink(other.path(), root.path().join("admin")).unwrap();
        assert_ne!(prepared(root.path()), "");
        fs::remove_file(root.path().join("admin")).unwrap();
        fs::write(root.path().join("admin"), "").unwrap();
        assert_ne!(prepared(root.path()), "");
    }
}
