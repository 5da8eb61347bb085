//! The record of a crash of Envoy.
//!
//! A [`Crash`] is logged, shown, and kept in a file beside the bootstrap for the agent of the next
//! container. Only the agent's user can read the file, as Envoy's last lines may name secrets. It goes
//! when an Envoy has ended as it was asked to.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::output::reason;
use crate::regular_file;
use crate::replace_file::replace_file;

const NAME: &str = "envoy-crash.json";
/// No agent writes a larger file.
const MAX_RECORD: u64 = 64 << 10;

/// An end that was not requested, or not in this way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crash {
    /// In UTC, to the second.
    pub when: String,
    pub epoch: u32,
    pub pid: i32,
    pub code: Option<u8>,
    pub signal: Option<i32>,
    pub uptime_seconds: f64,
    /// Whether the kernel killed it for want of memory. None where it was not killed, or the kernel does
    /// not tell.
    pub out_of_memory: Option<bool>,
    /// The last lines of standard error.
    pub stderr: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the record of Envoy's crash, {}", .path.display())]
pub struct Error {
    action: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl Crash {
    /// The record an earlier agent has left in `directory`.
    pub fn read(directory: &Path) -> Result<Option<Self>, Error> {
        on_file("read", directory, |path| {
            let content = regular_file::read(path, MAX_RECORD)?;
            Ok(Some(serde_json::from_slice(&content)?))
        })
    }

    pub(super) fn write(&self, directory: &Path) -> Result<(), Error> {
        on_file("write", directory, |path| {
            replace_file(path, &serde_json::to_vec_pretty(self)?, 0o600)
        })
    }

    pub(super) fn remove(directory: &Path) -> Result<(), Error> {
        on_file("remove", directory, |path| fs::remove_file(path))
    }
}

/// A file that is not there is no error.
fn on_file<T: Default>(
    action: &'static str,
    directory: &Path,
    act: impl FnOnce(&Path) -> io::Result<T>,
) -> Result<T, Error> {
    let path = directory.join(NAME);
    act(&path).or_else(|source| match source.kind() {
        io::ErrorKind::NotFound if action != "write" => Ok(T::default()),
        _ => Err(Error {
            action,
            path,
            source,
        }),
    })
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.signal, self.code) {
            (Some(signal), _) => write!(f, "signal {signal}")?,
            (None, code) => write!(f, "exit status {}", code.unwrap_or_default())?,
        }
        write!(f, " after {:.1} s", self.uptime_seconds)?;
        match self.out_of_memory {
            Some(true) => f.write_str(", killed by the kernel for want of memory"),
            Some(false) => f.write_str(", not for want of memory"),
            None => Ok(()),
        }?;
        match reason(&self.stderr) {
            Some(reason) => write!(f, ": {reason}"),
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
            out_of_memory: Some(true),
            stderr: vec!["[critical] assert failure".to_owned()],
        }
    }

    #[test]
    fn the_next_agent_finds_a_record_until_it_is_removed() {
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
    fn a_file_that_is_no_record_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join(NAME), "{}").expect("written");
        let error = Crash::read(directory.path()).expect_err("no record");
        assert!(error.to_string().contains(NAME), "{error}");
    }

    #[test]
    fn a_record_is_shown_as_a_sentence() {
        let expected = "signal 9 after 3.2 s, killed by the kernel for want of memory";
        let killed = Crash {
            stderr: vec!["[info] exiting".to_owned()],
            ..crash()
        };
        assert_eq!(killed.to_string(), expected);
        let taken = Crash {
            code: Some(1),
            signal: None,
            out_of_memory: None,
            stderr: vec!["[critical] error".to_owned(), "cannot bind".to_owned()],
            ..crash()
        };
        let expected = "exit status 1 after 3.2 s: cannot bind";
        assert_eq!(taken.to_string(), expected);
    }
}
