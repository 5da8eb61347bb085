//! Envoy's memory: how much it holds, and whether the kernel has killed for want of it.
//!
//! Resident memory is read from `/proc` while Envoy lives, when the agent is awake for another reason.
//! The kernel counts its kills for the agent's control group, version 2 in `memory.events`, version 1
//! in `memory.oom_control`: a count that went up while Envoy died of SIGKILL says why. Kills for want
//! of the machine's memory are counted elsewhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::Pid;
use tokio::time::Instant;

use crate::metrics;

const KILLS: &str = "oom_kill";
/// Version 1 has a number of about this size where there is no limit.
const NO_LIMIT: u64 = 1 << 62;

/// The shortest time between two reads that are not forced.
const PERIOD: Duration = Duration::from_secs(1);

/// How many bytes the Envoy that serves has in memory, as last read. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Resident(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    pid: Option<Pid>,
    when: Option<Instant>,
    bytes: Option<u64>,
}

impl Resident {
    /// Reads the memory of this process from now on.
    pub(super) fn follow(&self, pid: Option<Pid>) {
        *self.0.lock() = Seen {
            pid,
            ..Seen::default()
        };
        self.look();
    }

    /// Reads anew, at most once in a period. Of a process that has ended the last figure stays.
    pub(super) fn look(&self) -> Option<u64> {
        self.look_after(PERIOD)
    }

    pub(super) fn look_now(&self) -> Option<u64> {
        self.look_after(Duration::ZERO)
    }

    fn look_after(&self, period: Duration) -> Option<u64> {
        let mut seen = self.0.lock();
        if seen.when.is_none_or(|when| when.elapsed() >= period) {
            seen.when = Some(Instant::now());
            seen.bytes = seen.pid.and_then(resident).or(seen.bytes);
        }
        seen.bytes
    }
}

/// Bytes in memory now; none of a process that is gone.
fn resident(pid: Pid) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    metrics::process::memory(&status, "VmRSS:")
}

/// The kernel's count of processes killed for want of memory.
#[derive(Debug)]
pub(super) struct OomKills {
    file: PathBuf,
    before: u64,
}

impl OomKills {
    /// Notes the count of this process' control group. None where there is no count.
    pub(super) fn start() -> Option<Self> {
        Self::start_at(Path::new("/"))
    }

    fn start_at(root: &Path) -> Option<Self> {
        files(root).into_iter().find_map(|files| {
            let before = count(&files.kills)?;
            let file = files.kills;
            Some(Self { file, before })
        })
    }

    /// Whether the count went up since. None when it cannot be read any more.
    pub(super) fn has_grown(&self) -> Option<bool> {
        count(&self.file).map(|now| now > self.before)
    }
}

/// What the kernel says about this process' control group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ControlGroup {
    /// The most bytes of memory it may have. None is no limit.
    pub(crate) limit: Option<u64>,
    /// Processes that were killed for want of memory.
    pub(crate) kills: u64,
}

impl ControlGroup {
    /// None where there is no control group of memory.
    pub(crate) fn read(root: &Path) -> Option<Self> {
        files(root).into_iter().find_map(|files| {
            let limit = fs::read_to_string(&files.limit).ok()?;
            let limit = limit.trim().parse().ok();
            Some(Self {
                limit: limit.filter(|limit| *limit < NO_LIMIT),
                kills: count(&files.kills).unwrap_or_default(),
            })
        })
    }
}

/// Files of a control group.
struct Files {
    kills: PathBuf,
    limit: PathBuf,
}

/// Where those of this process may be, by the lines of `/proc/self/cgroup`. A container that sees the
/// machine's path may have its own group mounted at the top.
fn files(root: &Path) -> Vec<Files> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let files = groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (top, kills, limit) = match controllers {
            "" => ("sys/fs/cgroup", "memory.events", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => (
                "sys/fs/cgroup/memory",
                "memory.oom_control",
                "memory.limit_in_bytes",
            ),
            _ => return None,
        };
        let top = root.join(top);
        let directories = [top.join(path.trim_matches('/')), top];
        Some(directories.map(|directory| Files {
            kills: directory.join(kills),
            limit: directory.join(limit),
        }))
    });
    files.flatten().collect()
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
            let counter = OomKills::start_at(root.path()).expect(file);
            assert_eq!(counter.has_grown(), Some(false), "{file}");
            write(file, &text.replace('N', "5"));
            assert_eq!(counter.has_grown(), Some(true), "{file}");
            fs::remove_file(root.path().join(file)).expect("removed");
            assert_eq!(counter.has_grown(), None, "{file}");
        }
    }

    #[test]
    fn limit_and_kills_of_either_version_are_read() {
        let one = "0::/\n";
        let other = "2:cpu:/\n3:memory:/pod\n";
        for (groups, directory, limit, events, expected) in [
            (
                one,
                "",
                ("memory.max", "max\n"),
                ("memory.events", "oom_kill 0\n"),
                (None, 0),
            ),
            (
                one,
                "",
                ("memory.max", "4096\n"),
                ("memory.events", "oom_kill 2\n"),
                (Some(4096), 2),
            ),
            (
                one,
                "",
                ("memory.max", "\u{fffd}"),
                ("memory.events", "?"),
                (None, 0),
            ),
            (
                other,
                "memory/pod",
                ("memory.limit_in_bytes", "8192\n"),
                ("memory.oom_control", "oom_kill 1\n"),
                (Some(8192), 1),
            ),
            (
                other,
                "memory",
                ("memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory.oom_control", "under_oom 0\n"),
                (None, 0),
            ),
        ] {
            let root = tempfile::tempdir().expect("a directory");
            let group = root.path().join("sys/fs/cgroup").join(directory);
            fs::create_dir_all(&group).expect("made");
            fs::create_dir_all(root.path().join("proc/self")).expect("made");
            fs::write(root.path().join("proc/self/cgroup"), groups).expect("written");
            for (file, text) in [limit, events] {
                fs::write(group.join(file), text).expect("written");
            }
            let (limit, kills) = expected;
            let read = ControlGroup::read(root.path());
            assert_eq!(read, Some(ControlGroup { limit, kills }), "{groups}");
        }
    }

    #[test]
    fn a_machine_without_control_groups_has_no_count() {
        let root = tempfile::tempdir().expect("a directory");
        assert!(OomKills::start_at(root.path()).is_none());
        assert_eq!(ControlGroup::read(root.path()), None);
    }

    #[test]
    fn this_process_is_in_memory_and_none_is_not() {
        let resident = Resident::default();
        assert_eq!(resident.look(), None);
        resident.follow(Some(rustix::process::getpid()));
        assert!(resident.look().is_some_and(|bytes| bytes > 1 << 20));
        resident.follow(None);
        assert_eq!(resident.look_now(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn within_a_period_and_after_the_end_the_last_figure_stays() {
        let mut child = std::process::Command::new("sleep")
            .arg("3600")
            .spawn()
            .expect("a process");
        let resident = Resident::default();
        resident.follow(Some(Pid::from_child(&child)));
        let seen = resident.look_now();
        assert!(seen.is_some());
        child.kill().expect("killed");
        child.wait().expect("reaped");
        assert_eq!(resident.look(), seen);
        tokio::time::advance(PERIOD).await;
        assert_eq!(resident.look(), seen);
    }
}
