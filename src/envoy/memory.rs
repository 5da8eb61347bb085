//! Envoy's memory: how much it holds, and whether the kernel has killed for want of it.
//!
//! What it holds is read from `/proc` while it lives, as nothing is left to read afterwards. Kills
//! are counted by the kernel for the control group this process is in: a count that went up while
//! Envoy died of SIGKILL says why. Version 2 of control groups counts in `memory.events`, version 1
//! in `memory.oom_control`.
//!
//! Does not see kills outside the own control group, such as those of a machine out of memory.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

const KILLS: &str = "oom_kill";

/// Bytes in memory now. None of a process that is gone.
pub(super) fn resident(pid: Pid) -> Option<u64> {
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
    fn this_process_is_in_memory() {
        assert!(resident(rustix::process::getpid()).is_some_and(|bytes| bytes > 1 << 20));
    }
}
