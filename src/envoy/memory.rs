//! Envoy's memory: how much it holds, and whether the kernel has killed for want of it.
//!
//! The kernel counts its kills for the agent's control group, version 2 in `memory.events`, version 1
//! in `memory.oom_control`: a count that went up while Envoy died of SIGKILL says why. Kills for want
//! of the machine's memory are counted elsewhere.

use std::fs;
use std::path::{Path, PathBuf};

use crate::metrics;

const KILLS: &str = "oom_kill";

/// Bytes a process has in memory now; none if it is gone.
pub(crate) fn resident(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    metrics::process::memory(&status, "VmRSS:")
}

/// How many processes of this control group the kernel has killed for want of memory. None where it
/// does not count them.
pub(super) fn oom_kills(root: &Path) -> Option<u64> {
    files(root).iter().find_map(|file| count(file))
}

/// Where those of this process may be, by the lines of `/proc/self/cgroup`. A container that sees the
/// machine's path may have its own group mounted at the top.
fn files(root: &Path) -> Vec<PathBuf> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let files = groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (top, kills) = match controllers {
            "" => ("sys/fs/cgroup", "memory.events"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.oom_control")
            }
            _ => return None,
        };
        let top = root.join(top);
        let directories = [top.join(path.trim_matches('/')), top];
        Some(directories.map(|directory| directory.join(kills)))
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
    fn the_count_of_either_version_is_found() {
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
            assert_eq!(oom_kills(root.path()), Some(4), "{file}");
            fs::remove_file(root.path().join(file)).expect("removed");
            assert_eq!(oom_kills(root.path()), None, "{file}");
        }
    }

    #[test]
    fn a_machine_without_control_groups_has_no_count() {
        let root = tempfile::tempdir().expect("a directory");
        assert_eq!(oom_kills(root.path()), None);
    }

    #[test]
    fn this_process_is_in_memory() {
        let own = std::process::id().try_into().expect("a pid");
        assert!(resident(own).is_some_and(|bytes| bytes > 1 << 20));
    }
}
