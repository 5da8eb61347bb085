//! What is known about an Envoy that ended as it should not have.
//!
//! The [`Crash`] is logged, shown, and kept in a file beside the bootstrap, readable by the agent's
//! user only: Envoy's last words may name what is nobody's business. The file is there for the agent
//! of the next container, and goes when an Envoy has ended as it was asked to.
//!
//! Does not decide whether an end was a crash.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

const NAME: &str = "envoy-crash.json";
/// Larger files are not ours.
const LARGEST: u64 = 64 << 10;

/// An end nobody asked for, or not in this way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crash {
    /// In UTC, to the second.
    pub when: String,
    pub epoch: u32,
    pub pid: i32,
    pub code: Option<u8>,
    pub signal: Option<i32>,
    pub uptime_seconds: f64,
    /// What Envoy held in memory when it was last looked at, which is when the agent was last awake.
    pub rss_bytes: Option<u64>,
    /// Whether the kernel killed it for want of memory. None where the kernel does not tell.
    pub out_of_memory: Option<bool>,
    /// The last lines of standard error.
    pub stderr: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot {action} the record of Envoy's crash, {}", .path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the record of Envoy's crash in {} is none, expected what an agent wrote", .path.display())]
    Content {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

impl Crash {
    /// The record an earlier agent has left in `directory`.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, Error> {
        let path = directory.join(NAME);
        let read = fs::metadata(&path).and_then(|file| match file.len() {
            0..=LARGEST => fs::read(&path),
            _ => Err(io::ErrorKind::FileTooLarge.into()),
        });
        match read {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|source| Error::Content { path, source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(failed("read", path, source)),
        }
    }

    /// Puts the record where another may be, whole.
    pub(super) fn write(&self, directory: &Path) -> Result<(), Error> {
        let (path, new) = (directory.join(NAME), directory.join(format!("{NAME}.tmp")));
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let write = || {
            let mut options = fs::OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            options.open(&new)?.write_all(&text)?;
            fs::rename(&new, &path)
        };
        write().map_err(|source| failed("write", path.clone(), source))
    }

    pub(super) fn remove(directory: &Path) -> Result<(), Error> {
        let path = directory.join(NAME);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", path, error))
            }
            _ => Ok(()),
        }
    }
}

fn failed(action: &'static str, path: PathBuf, source: io::Error) -> Error {
    Error::File {
        action,
        path,
        source,
    }
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.signal, self.code) {
            (Some(signal), _) => write!(f, "signal {signal}")?,
            (None, code) => write!(f, "exit status {}", code.unwrap_or_default())?,
        }
        write!(f, " after {:.1} s", self.uptime_seconds)?;
        if let Some(bytes) = self.rss_bytes {
            write!(f, ", {} MiB in memory", bytes >> 20)?;
        }
        match self.out_of_memory {
            Some(true) => f.write_str(", killed by the kernel for want of memory"),
            Some(false) => f.write_str(", not for want of memory"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn crash() -> Crash {
        Crash {
            when: "2026-08-22T15:00:18Z".to_owned(),
            epoch: 1,
            pid: 42,
            code: None,
            signal: Some(9),
            uptime_seconds: 3.25,
            rss_bytes: Some(70 << 20),
            out_of_memory: Some(true),
            stderr: vec!["[critical] assert failure".to_owned()],
        }
    }

    #[test]
    fn is_found_by_the_next_agent_until_it_is_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        assert_eq!(Crash::read(directory.path()).expect("nothing"), None);
        crash().write(directory.path()).expect("written");
        let mode = fs::metadata(directory.path().join(NAME))
            .expect("a file")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(
            Crash::read(directory.path()).expect("a record"),
            Some(crash())
        );
        Crash::remove(directory.path()).expect("removed");
        Crash::remove(directory.path()).expect("nothing to remove");
        assert_eq!(Crash::read(directory.path()).expect("nothing"), None);
    }

    #[test]
    fn a_file_that_is_none_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join(NAME), "{}").expect("written");
        let error = Crash::read(directory.path()).expect_err("no record");
        assert!(error.to_string().contains(NAME), "{error}");
    }

    #[test]
    fn reads_as_a_sentence() {
        let expected =
            "signal 9 after 3.2 s, 70 MiB in memory, killed by the kernel for want of memory";
        assert_eq!(crash().to_string(), expected);
    }
}
