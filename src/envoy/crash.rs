//! Records a crash of Envoy.
//!
//! A [`Crash`] is logged, shown, and stored next to the bootstrap for the agent of the next container, until an Envoy
//! exits on request. Only the agent's user can read the file, because Envoy's last lines may name secrets.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::instance::{INTERRUPTED, TERMINATED};
use super::output::reason;
use crate::files::permission;
use crate::files::regular_file::{self, if_exists};
use crate::files::replace_file::replace_file;
use crate::net::port;
use crate::problem::{Code, Problem};
use crate::runtime::duration::rounded_seconds;
use crate::runtime::usage::in_control_group;

const NAME: &str = "envoy-crash.json";
/// The largest record that is read; the agent writes smaller ones.
const MAX_RECORD: u64 = 64 << 10;

/// What Envoy prints before it exits for lack of something, and the code of that.
const CAUSES: [(&str, Code); 3] = [
    ("Too many open files", Code::FilesUsedUp),
    ("Unable to create a thread", Code::TasksUsedUp),
    ("Out of memory", Code::EnvoyOutOfMemory),
];

/// An exit that was not requested, or differs from the requested one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crash {
    /// The time in UTC, to the second.
    pub when: String,
    /// The number of Envoys that the agent had started before this one.
    pub epoch: u32,
    pub pid: i32,
    pub code: Option<u8>,
    pub signal: Option<i32>,
    pub uptime_seconds: f64,
    /// True if the kernel killed Envoy because memory was used up; None if Envoy was not killed, or the
    /// kernel's count cannot be read.
    pub out_of_memory: Option<bool>,
    pub stderr: Vec<String>,
}

impl Crash {
    /// Reads the record that an earlier agent has left in `directory`. Returns None if there is none.
    pub fn read(directory: &Path) -> Result<Option<Self>, Problem> {
        let path = directory.join(NAME);
        let record = regular_file::read(&path, MAX_RECORD);
        if_exists(record.and_then(|json| Ok(serde_json::from_slice(&json)?)))
            .map_err(|error| permission::problem("read the record of a crash", &path, error))
    }

    /// Replaces the record by this crash, or removes it. Logs a failure.
    pub(super) fn record(crash: Option<&Self>, directory: &Path) {
        let path = directory.join(NAME);
        let done = match crash.map(serde_json::to_vec_pretty) {
            Some(json) => {
                json.map_err(io::Error::from).and_then(|json| replace_file(&path, &json, 0o600))
            }
            None => if_exists(fs::remove_file(&path)).map(drop),
        };
        if let Err(error) = done {
            tracing::warn!(
                "{}",
                permission::problem("replace the record of a crash", &path, error)
            );
        }
    }

    /// Returns the crash as a problem, with a code for its cause.
    pub fn problem(&self) -> Problem {
        let mut printed =
            CAUSES.iter().filter(|(text, _)| self.stderr.iter().any(|line| line.contains(text)));
        let code = match (self.out_of_memory, self.signal) {
            (Some(true), _) => Code::EnvoyOutOfMemory,
            _ if let Some((_, code)) = printed.next() => *code,
            (_, Some(TERMINATED | INTERRUPTED)) => Code::EnvoyExited,
            (_, Some(_)) => Code::EnvoyCrashed,
            _ if self.code == Some(0) => Code::EnvoyExited,
            _ if reason(&self.stderr).and_then(port::taken).is_some() => Code::PortTaken,
            _ => Code::EnvoyBootstrapRefused,
        };
        // Pilot-agent's log line of an error begins with these words.
        let subject = if self.code == Some(0) { "Envoy" } else { "Envoy exited with error" };
        Problem::new(code, subject, self)
    }
}

/// Counts the processes of the agent's control group that the kernel has killed because memory was used up; None if
/// the count cannot be read. `root` is `/` outside of tests.
pub(super) fn oom_kills(root: &Path) -> Option<u64> {
    in_control_group(root, "memory", |directory, version| {
        let file = if version == 2 { "memory.events" } else { "memory.oom_control" };
        let counts = regular_file::read_kernel(directory.join(file)).ok()?;
        counts.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
    })
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.signal, self.code) {
            (Some(signal), _) => write!(f, "signal {signal}")?,
            (None, code) => write!(f, "exit status {}", code.unwrap_or_default())?,
        }
        write!(f, " after {}, at {}", rounded_seconds(self.uptime_seconds), self.when)?;
        f.write_str(match self.out_of_memory {
            Some(true) => ", killed by the kernel because memory was used up",
            Some(false) => ", not killed for lack of memory",
            None => "",
        })?;
        reason(&self.stderr).map_or(Ok(()), |reason| write!(f, ": {reason}"))
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
        Crash::record(Some(&crash()), directory.path());
        let mode = fs::metadata(directory.path().join(NAME)).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(Crash::read(directory.path()).expect("a record"), Some(crash()));
        Crash::record(None, directory.path());
        Crash::record(None, directory.path());
        assert_eq!(Crash::read(directory.path()).expect("nothing"), None);
    }

    #[test]
    fn the_error_for_an_invalid_crash_record_names_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join(NAME), "{}").expect("written");
        let error = Crash::read(directory.path()).expect_err("no record");
        assert!(error.to_string().contains(NAME), "{error}");
    }

    #[test]
    fn a_record_is_shown_as_a_sentence() {
        let expected = "signal 9 after 3.2 s, at 2026-08-22T15:00:18Z, killed by the kernel because memory was used up";
        let killed = Crash { stderr: vec!["[info] exiting".to_owned()], ..crash() };
        assert_eq!(killed.to_string(), expected);
        let taken = Crash {
            code: Some(1),
            signal: None,
            out_of_memory: None,
            stderr: vec!["[critical] error".to_owned(), "cannot bind".to_owned()],
            ..crash()
        };
        let expected = "exit status 1 after 3.2 s, at 2026-08-22T15:00:18Z: cannot bind";
        assert_eq!(taken.to_string(), expected);
    }

    #[test]
    fn what_envoy_lacked_is_the_cause_of_a_crash() {
        for (line, expected) in [
            ("[critical] accept: Too many open files", Code::FilesUsedUp),
            ("[critical] assert failure: Unable to create a thread", Code::TasksUsedUp),
            ("[critical] Out of memory", Code::EnvoyOutOfMemory),
            ("[critical] Caught Segmentation fault", Code::EnvoyCrashed),
        ] {
            let stderr = vec![line.to_owned(), "Backtrace".to_owned()];
            let crash = Crash { out_of_memory: Some(false), stderr, ..crash() };
            assert_eq!(crash.problem().code, expected, "{line}");
        }
    }

    #[test]
    fn an_exit_that_another_process_asked_for_is_no_crash() {
        for (code, signal, expected) in [
            (Some(0), None, Code::EnvoyExited),
            (None, Some(TERMINATED), Code::EnvoyExited),
            (None, Some(11), Code::EnvoyCrashed),
            (Some(1), None, Code::EnvoyBootstrapRefused),
        ] {
            let crash = Crash { code, signal, out_of_memory: None, ..crash() };
            assert_eq!(crash.problem().code, expected, "{crash}");
        }
    }

    #[test]
    fn the_kernels_count_of_kills_is_found() {
        for (groups, file, text) in [
            ("0::/\n", "sys/fs/cgroup/memory.events", "oom 1\noom_kill N\noom_group_kill 0\n"),
            ("0::/pod/envoy\n", "sys/fs/cgroup/pod/envoy/memory.events", "oom_kill N\n"),
            ("0::/of/the/machine\n", "sys/fs/cgroup/memory.events", "oom_kill N\n"),
            (
                "2:cpu:/pod/cpu\n4:memory:/pod/envoy\n0::/\n",
                "sys/fs/cgroup/memory/pod/envoy/memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill N\n",
            ),
            (
                "4:memory:/of/the/machine\n",
                "sys/fs/cgroup/memory/memory.oom_control",
                "oom_kill N\n",
            ),
        ] {
            let root = tempfile::tempdir().expect("a directory");
            let write = |path: &str, text: &str| {
                let path = root.path().join(path);
                fs::create_dir_all(path.parent().expect("a parent")).expect("made");
                fs::write(path, text).expect("written");
            };
            write("proc/self/cgroup", groups);
            write(file, &text.replace('N', "4"));
            assert_eq!(oom_kills(root.path()), Some(4), "{file}");
            fs::remove_file(root.path().join(file)).expect("removed");
            assert_eq!(oom_kills(root.path()), None, "{file}");
        }
    }

    #[test]
    fn no_count_of_kills_is_found_without_control_groups() {
        let root = tempfile::tempdir().expect("a directory");
        assert_eq!(oom_kills(root.path()), None);
    }
}
