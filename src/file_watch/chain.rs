//! The way from a path to its file, link by link.
//!
//! The path is walked as the kernel walks it. What can make it lead elsewhere is told: each link on
//! the way, the file at the end, and where the way ends early, what is missing.
//!
//! Does not tell of plain directories on the way: whoever moves one takes the watched ones along.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// As many links as the kernel follows.
const MOST_LINKS: usize = 40;

/// A name in a directory that decides where a path leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) directory: PathBuf,
    pub(super) name: OsString,
}

/// The steps of an absolute path, from the first link to the file.
pub(super) fn steps(path: &Path) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut at = PathBuf::from("/");
    let mut rest = parts(path);
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&name);
        let kind = fs::symlink_metadata(&next).map(|found| found.file_type());
        let is_link = kind.as_ref().is_ok_and(fs::FileType::is_symlink);
        if is_link || kind.is_err() || rest.is_empty() {
            let directory = at.clone();
            steps.push(Step { directory, name });
        }
        if kind.is_err() {
            break;
        }
        if !is_link {
            at = next;
            continue;
        }
        links += 1;
        let Ok(target) = fs::read_link(&next) else {
            break; // It changed meanwhile, which the watch tells.
        };
        if links > MOST_LINKS {
            break;
        }
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        let mut target = parts(&target);
        target.append(&mut rest);
        rest = target;
    }
    steps.dedup();
    steps
}

fn parts(path: &Path) -> VecDeque<OsString> {
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
    fn tells_links_and_ends_and_no_plain_directories() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("plain/..1")).unwrap();
        fs::write(root.join("plain/..1/key"), "").unwrap();
        symlink("..1", root.join("plain/..data")).unwrap();
        symlink("..data/key", root.join("plain/key")).unwrap();
        symlink("plain/../plain/key", root.join("alias")).unwrap();
        let told = |path: &str| {
            let steps = steps(&root.join(path)).into_iter();
            let steps = steps.map(|step| step.directory.join(step.name));
            let relative = steps.map(|path| path.strip_prefix(&root).unwrap().to_owned());
            relative.collect::<Vec<_>>()
        };
        let expected = ["alias", "plain/key", "plain/..data", "plain/..1/key"];
        assert_eq!(told("alias"), expected.map(PathBuf::from));
        assert_eq!(told("plain/..1/key"), [PathBuf::from("plain/..1/key")]);
        assert_eq!(told("plain/none/key"), [PathBuf::from("plain/none")]);
    }
}
