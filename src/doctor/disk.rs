//! The directories the agent writes to: whether it may, and how much space they have.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use futures_util::future::join_all;
use rustix::fs::{Access, access};

use super::report::Check;
use super::{Subject, aside};
use crate::config::Config;
use crate::secrets;
use crate::xds::last_known_good;

/// Enough for certificates and the bootstrap.
const LEAST_FREE: u64 = 8 << 20;
const LEAST_INODES: u64 = 16;

/// A directory the agent writes to.
#[derive(Clone, Debug)]
struct Directory {
    path: PathBuf,
    /// What it is for.
    holds: &'static str,
    /// Whether the agent makes it if it is missing.
    is_made: bool,
    /// What else it must be like.
    check: fn(&Path) -> io::Result<()>,
}

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let serves_secrets = match subject.running {
        Some(running) => running.serves_secrets,
        None => {
            let socket = subject.config.sds_socket.clone();
            aside(move || !socket.exists()).await.unwrap_or(true)
        }
    };
    let directories = directories(subject.config, serves_secrets);
    join_all(directories.into_iter().map(checked)).await
}

async fn checked(directory: Directory) -> Check {
    let name = format!("{} ({})", directory.path.display(), directory.holds);
    match aside(move || directory.found()).await {
        Ok(Ok(found)) => Check::ok(name, found),
        Ok(Err(error)) => Check::error(name, error).remedy(
            "mount an emptyDir or a volume with free space there that user and group of the container may \
             write to",
        ),
        Err(late) => Check::error(name, late)
            .expected("a disk that answers")
            .remedy("look for a network volume whose server is away"),
    }
}

fn directories(config: &Config, serves_secrets: bool) -> Vec<Directory> {
    let mut all = Vec::new();
    let mut add = |path: Option<&Path>, holds, is_made| {
        // A relative name without a directory is in the working directory.
        let path = path.map(|path| match path.as_os_str().is_empty() {
            true => PathBuf::from("."),
            false => path.to_owned(),
        });
        all.extend(path.map(|path| Directory {
            path,
            holds,
            is_made,
            check: |_| Ok(()),
        }));
    };
    add(
        config.xds_socket.parent(),
        "bootstrap, discovery socket",
        true,
    );
    // Another process' socket may be in a volume that is only read.
    if serves_secrets {
        add(config.sds_socket.parent(), "SDS socket", true);
    }
    let grpc = config.grpc.as_ref().and_then(|grpc| grpc.path.parent());
    add(grpc, "bootstrap for gRPC applications", true);
    let wasm = config.wasm.as_ref().map(|wasm| wasm.directory.as_path());
    add(wasm, "Wasm modules", true);
    let output = config.secrets.output.as_ref();
    add(
        output.map(|output| output.directory.as_path()),
        "OUTPUT_CERTS",
        false,
    );
    let kept = config.kept.as_ref().map(|kept| Directory {
        path: kept.directory.clone(),
        holds: "ISTIO_AGENT_KEEP_CONFIG",
        is_made: false,
        check: last_known_good::check,
    });
    let cache = config.secrets.renewal.cache.clone().map(|path| Directory {
        path,
        holds: "ISTIO_AGENT_KEEP_CERTS",
        is_made: false,
        check: secrets::cache::check,
    });
    all.extend(kept.into_iter().chain(cache));
    let mut seen = Vec::new();
    all.retain(|directory| {
        let is_new = !seen.contains(&directory.path);
        seen.push(directory.path.clone());
        is_new
    });
    all
}

impl Directory {
    fn found(&self) -> io::Result<String> {
        let path = match self.is_made {
            true => existing(&self.path),
            false => &self.path,
        };
        let metadata = path.metadata()?;
        if !metadata.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        if let Err(error) = access(path, Access::WRITE_OK | Access::EXEC_OK) {
            return Err(io::Error::other(format!(
                "cannot be written to by user {}: {error}; {} belongs to user {} and group {} with mode {:o}",
                rustix::process::geteuid().as_raw(),
                path.display(),
                metadata.uid(),
                metadata.gid(),
                metadata.mode() & 0o7777,
            )));
        }
        (self.check)(path)?;
        let found = rustix::fs::statvfs(path)?;
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        if free < LEAST_FREE {
            let problem = format!("{} KiB free, expected {} MiB", free >> 10, LEAST_FREE >> 20);
            return Err(io::Error::other(problem));
        }
        // Without a limit there is no number of them.
        if found.f_files > 0 && found.f_favail < LEAST_INODES {
            let problem = format!("{} inodes free, expected {LEAST_INODES}", found.f_favail);
            return Err(io::Error::other(problem));
        }
        Ok(format!("writable, {} MiB free", free >> 20))
    }
}

/// The directory itself, or the nearest one above it that exists.
fn existing(path: &Path) -> &Path {
    let mut ancestors = path.ancestors().filter(|path| !path.as_os_str().is_empty());
    let missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let found = ancestors.find(|path| !path.metadata().as_ref().is_err_and(missing));
    found.unwrap_or(".".as_ref())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn directory(path: &Path) -> Directory {
        Directory {
            path: path.to_owned(),
            holds: "files",
            is_made: false,
            check: |_| Ok(()),
        }
    }

    #[test]
    fn a_missing_directory_is_no_error_if_the_agent_makes_it() {
        let root = tempfile::tempdir().expect("a directory");
        let mut missing = directory(&root.path().join("a/b"));
        let error = missing.found().expect_err("it is missing");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        missing.is_made = true;
        let found = missing.found().expect("it can be made");
        assert!(found.starts_with("writable, "), "{found}");
        missing.path = "no-such/directory".into();
        missing.found().expect("it can be made here");
    }

    #[test]
    fn what_is_no_directory_or_cannot_be_written_is_an_error() {
        let root = tempfile::tempdir().expect("a directory");
        let file = root.path().join("file");
        std::fs::write(&file, "").expect("written");
        let error = directory(&file).found().expect_err("a file");
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
        let error = directory(Path::new("/proc/self")).found();
        // root may, but the kernel offers no files to make.
        if !rustix::process::geteuid().is_root() {
            let error = error.expect_err("of the kernel").to_string();
            assert!(error.contains("cannot be written to by user"), "{error}");
        }
    }

    #[test]
    fn directories_that_keep_over_a_restart_have_rules_of_their_own() {
        let root = tempfile::tempdir().expect("a directory");
        let kept = Directory {
            check: last_known_good::check,
            ..directory(root.path())
        };
        kept.found().expect("nothing is kept yet");
        let own = root.path().join("istio-agent-config");
        std::fs::create_dir(&own).expect("made");
        std::fs::set_permissions(&own, PermissionsExt::from_mode(0o755)).expect("changed");
        let error = kept.found().expect_err("others may read it").to_string();
        assert!(error.contains("with mode 755, expected user"), "{error}");
    }
}
