//! Envoy's memory: how much it holds, and whether the kernel has killed for want of it.
//!
//! What it holds is read from `/proc` while it lives, as nothing is left to read afterwards; that is
//! done when the agent is awake for another reason, and never wakes it. Kills
//! are counted by the kernel for the control group this process is in: a count that went up while
//! Envoy died of SIGKILL says why. Version 2 of control groups counts in `memory.events`, version 1
//! in `memory.oom_control`.
//!
//! Does not see kills outside the own control group, such as those of a machine out of memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::Pid;
use serde::{Serialize, Serializer};
use tokio::time::Instant;

const KILLS: &str = "oom_kill";

/// Who looks more often is told what was seen last.
const SELDOM: Duration = Duration::from_secs(1);

/// How many bytes a process has in memory, as far as somebody has looked. Clones share it; the
/// default is of no process.
#[derive(Clone, Debug, Default)]
pub struct Resident(Option<Arc<Process>>);

#[derive(Debug)]
struct Process {
    pid: Pid,
    seen: Mutex<Seen>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    when: Option<Instant>,
    bytes: Option<u64>,
}

impl Resident {
    pub(super) fn of(pid: Pid) -> Self {
        let seen = Mutex::default();
        Self(Some(Arc::new(Process { pid, seen })))
    }

    /// Looks, unless somebody just has.
    pub fn look(&self) -> Option<u64> {
        self.look_after(SELDOM)
    }

    /// Looks in any case.
    pub(super) fn look_now(&self) -> Option<u64> {
        self.look_after(Duration::ZERO)
    }

    fn look_after(&self, pause: Duration) -> Option<u64> {
        let process = self.0.as_ref()?;
        let mut seen = process.seen.lock();
        if seen.when.is_none_or(|when| when.elapsed() >= pause) {
            seen.when = Some(Instant::now());
            // Of a process that has ended the last figure stays.
            seen.bytes = resident(process.pid).or(seen.bytes);
        }
        seen.bytes
    }

    /// What was seen last.
    pub(super) fn last(&self) -> Option<u64> {
        self.look_after(Duration::MAX)
    }
}

/// The same for two that would be shown alike.
impl PartialEq for Resident {
    fn eq(&self, other: &Self) -> bool {
        self.last() == other.last()
    }
}

/// As bytes, looked at when it is shown.
impl Serialize for Resident {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.look().serialize(to)
    }
}

/// Bytes in memory now. None of a process that is gone.
fn resident(pid: Pid) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The kernel's count of processes killed for want of memory.
#[derive(Debug)]
pub(super) struct KillCounter {
    file: PathBuf,
    before: u64,
}

impl KillCounter {
    /// Notes the count of this process' control group. None where there is no count.
    pub(super) fn start() -> Option<Self> {
        Self::start_at(Path::new("/"))
    }

    fn start_at(root: &Path) -> Option<Self> {
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
        let files = groups.lines().filter_map(candidates).flatten();
        files
            .map(|file| root.join(file))
            .find_map(|file| count(&file).map(|before| Self { file, before }))
    }

    /// Whether the count went up since. None when it cannot be read any more.
    pub(super) fn has_grown(&self) -> Option<bool> {
        count(&self.file).map(|now| now > self.before)
    }
}

/// Where the count may be, by a line of `/proc/self/cgroup`. A container that sees the machine's
/// path may have its own group mounted at the top.
fn candidates(line: &str) -> Option<[String; 2]> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let (top, file) = match controllers {
        "" => ("sys/fs/cgroup", "memory.events"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("sys/fs/cgroup/memory", "memory.oom_control")
        }
        _ => return None,
    };
    let path = path.trim_matches('/');
    Some([format!("{top}/{path}/{file}"), format!("{top}/{file}")])
}

fn count(file: &Path) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let mut pairs = text.lines().filter_map(|line| line.split_once(' '));
    let (_, count) = pairs.find(|(name, _)| *name == KILLS)?;
    count.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_count_of_either_version_and_notices_that_it_grew() {
        for (groups, file, text) in [
            (
                "0::/\n",
                "sys/fs/cgroup/memory.events",
                "oom 1\noom_kill N\noom_group_kill 0\n",
            ),
            (
                "0::/pod/envoy\n",
                "sys/fs/cgroup/pod/envoy/memory.events",
                "oom_kill N\n",
            ),
            (
                "0::/of/the/machine\n",
                "sys/fs/cgroup/memory.events",
                "oom_kill N\n",
            ),
            (
                "3:cpu,cpuacct:/pod\n2:memory:/pod\n0::/\n",
                "sys/fs/cgroup/memory/pod/memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill N\n",
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
            let counter = KillCounter::start_at(root.path()).expect(file);
            assert_eq!(counter.has_grown(), Some(false), "{file}");
            write(file, &text.replace('N', "5"));
            assert_eq!(counter.has_grown(), Some(true), "{file}");
            fs::remove_file(root.path().join(file)).expect("removed");
            assert_eq!(counter.has_grown(), None, "{file}");
        }
    }

    #[test]
    fn a_machine_without_control_groups_has_no_count() {
        let root = tempfile::tempdir().expect("a directory");
        assert!(KillCounter::start_at(root.path()).is_none());
    }

    #[test]
    fn this_process_is_in_memory_and_none_is_not() {
        let resident = Resident::of(rustix::process::getpid());
        assert!(resident.look().is_some_and(|bytes| bytes > 1 << 20));
        assert_eq!(Resident::default().look(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_looks_often_is_told_what_was_seen_last_also_of_one_that_is_gone() {
        let mut child = std::process::Command::new("sleep")
            .arg("3600")
            .spawn()
            .expect("a process");
        let resident = Resident::of(Pid::from_child(&child));
        assert_eq!(resident.last(), resident.look());
        let seen = resident.look_now();
        assert!(seen.is_some());
        child.kill().expect("killed");
        child.wait().expect("reaped");
        assert_eq!(resident.look(), seen);
        tokio::time::advance(SELDOM).await;
        assert_eq!(resident.look(), seen);
    }
}
