//! Walks a path as the kernel does, symbolic link by symbolic link.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// As many links as the kernel follows.
const MAX_LINKS: usize = 40;

/// Calls `visit` with the directory and the name of everything that decides where an absolute path
/// leads: each link, the file at the end, or the first component that is missing. Plain directories are
/// left out: a move of one moves the visited ones along.
///
/// A component is read after its visit, so that a watch set there misses no change.
pub(super) fn walk(path: &Path, mut visit: impl FnMut(&Path, OsString)) {
    let mut at = PathBuf::from("/");
    let mut rest = components(path);
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&name);
        let mut target = link_target(&next);
        if !matches!(target, Ok(None)) || rest.is_empty() {
            visit(&at, name);
            target = link_target(&next);
        }
        match target {
            Ok(None) => at = next,
            Ok(Some(_)) if links == MAX_LINKS => return,
            Ok(Some(target)) => {
                links += 1;
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                let mut target = components(&target);
                target.append(&mut rest);
                rest = target;
            }
            Err(_) => return,
        }
    }
}

/// Where a link leads; None if `path` is no link.
fn link_target(path: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read_link(path) {
        Ok(target) => Ok(Some(target)),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(None),
        Err(error) => Err(error),
    }
}

fn components(path: &Path) -> VecDeque<OsString> {
    let named = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn visits_links_and_ends_and_no_plain_directories() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("plain/..1")).unwrap();
        fs::write(root.join("plain/..1/key"), "").unwrap();
        symlink("..1", root.join("plain/..data")).unwrap();
        symlink("..data/key", root.join("plain/key")).unwrap();
        symlink("plain/../plain/key", root.join("alias")).unwrap();
        let visited = |path: &str| {
            let mut visited = Vec::new();
            walk(&root.join(path), |directory, name| {
                let path = directory.join(name);
                visited.push(path.strip_prefix(&root).unwrap().to_owned());
            });
            visited
        };
        let expected = ["alias", "plain/key", "plain/..data", "plain/..1/key"];
        assert_eq!(visited("alias"), expected.map(PathBuf::from));
        assert_eq!(visited("plain/..1/key"), [PathBuf::from("plain/..1/key")]);
        assert_eq!(visited("plain/none/key"), [PathBuf::from("plain/none")]);
    }
}
