//! Sets the number of Envoy's worker threads.
//!
//! A flag that is not zero wins over the documents. Without either, the CPU limit of the pod counts:
//! `ISTIO_CPU_LIMIT`, else the quota of the process's control group. Zero in a document means every
//! hardware thread.

use std::path::Path;

use super::merged::Merged;

const NAME: &str = "concurrency";
const GROUPS: &str = "./sys/fs/cgroup";

pub(super) fn set(merged: &mut Merged, flag: u32, variable: u32, root: &Path) {
    let (limit, origin) = match variable {
        0 => (quota(root), "CPU quota of the control group"),
        limit => (Some(limit), "ISTIO_CPU_LIMIT"),
    };
    let given = merged.config.concurrency;
    let mut set = |threads: u32, origin: &str| {
        merged.config.concurrency = Some(i32::try_from(threads).unwrap_or(i32::MAX));
        merged.set_origin(NAME, origin);
    };
    if flag != 0 {
        set(flag, "--concurrency");
        let expected = "concurrency of ProxyConfig, which this flag overrides";
        let found = flag.to_string();
        merged.notes.warn("--concurrency", found, expected);
    } else if let (None, Some(limit)) = (given, limit) {
        set(limit, origin);
    }
}

/// CPUs the control group may use, rounded up; None without a limit.
fn quota(root: &Path) -> Option<u32> {
    let read = |file: &str| std::fs::read_to_string(root.join(GROUPS).join(file)).ok();
    if let Some(both) = read("cpu.max") {
        let (quota, period) = both.trim().split_once(' ')?;
        return cpus(quota, period);
    }
    let quota = read("cpu/cpu.cfs_quota_us")?;
    cpus(quota.trim(), read("cpu/cpu.cfs_period_us")?.trim())
}

/// `max` and -1 stand for no limit.
fn cpus(quota: &str, period: &str) -> Option<u32> {
    let quota: u64 = quota.parse().ok().filter(|quota| *quota > 0)?;
    let period: u64 = period.parse().ok().filter(|period| *period > 0)?;
    u32::try_from(quota.div_ceil(period)).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    fn machine(files: &[(&str, &str)]) -> TempDir {
        let root = TempDir::new().expect("a directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    #[test]
    fn the_flag_wins_over_documents_and_those_over_limits() {
        for (document, variable, flag, group, threads) in [
            ("{}", 0, 0, "max 100000", None),
            ("{}", 4, 0, "max 100000", Some(4)),
            ("{}", 4, 0, "100000 100000", Some(4)),
            ("{}", 0, 0, "150000 100000", Some(2)),
            ("{}", 0, 0, "50000 100000", Some(1)),
            ("{concurrency: 3}", 4, 0, "50000 100000", Some(3)),
            ("{concurrency: 0}", 4, 0, "50000 100000", Some(0)),
            ("{concurrency: 3}", 4, 5, "50000 100000", Some(5)),
            ("{}", 0, 5, "max 100000", Some(5)),
        ] {
            let root = machine(&[("sys/fs/cgroup/cpu.max", group)]);
            let mut config = Merged::builtin();
            config.merge_text("it", document);
            set(&mut config, flag, variable, root.path());
            assert_eq!(config.config.concurrency, threads, "{document} {group}");
            assert_eq!(
                config.notes.warnings.len(),
                usize::from(flag != 0),
                "{document}"
            );
        }
    }

    #[test]
    fn quotas_of_control_groups_version_1_count_as_well() {
        for (quota, threads) in [("250000", Some(3)), ("-1", None), ("x", None)] {
            let root = machine(&[
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ]);
            assert_eq!(super::quota(root.path()), threads, "{quota}");
        }
    }
}
