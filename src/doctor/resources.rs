//! Checks that the pod has not used up what it may use: memory, processes, open files, local ports and space on volumes.

use std::path::{Path, PathBuf};

use rustix::fs::{StatVfsMountFlags, statvfs};

use super::{Subject, run_blocking};
use crate::problem::{Code, Level, Problem};
use crate::report::Check;
use crate::runtime::usage::{self, Usage};

const NAME: &str = "resources of the pod";
pub(super) const PORTS: &str = "local ports of the pod";

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let config = subject.config;
    let envoy = subject.running.and_then(|running| running.envoy.as_ref());
    let pid = envoy.and_then(|envoy| envoy.snapshot().pid);
    let volume = config.last_known_good.as_ref().and_then(|it| it.volume.as_ref());
    let directories = [
        config.envoy.as_ref().map(|envoy| envoy.directory.clone()),
        config.sds_socket.parent().map(Path::to_owned),
        volume.map(|volume| volume.directory.clone()),
        Some(PathBuf::from("/dev/shm")),
    ];
    let found = run_blocking(move || {
        (usages(Path::new("/"), pid), full_volumes(directories.into_iter().flatten()))
    });
    let (usages, full) = match found.await {
        Ok(found) => found,
        Err(late) => return vec![super::late(NAME, late)],
    };
    let mut checks: Vec<_> = full.iter().map(Check::from).collect();
    for (code, what, usage) in &usages {
        if usage.is_nearly_all() {
            let found = format!("{usage} are in use");
            // Connections to different addresses may share a port, and the kernel can free some memory.
            let is_exact = [Code::TasksUsedUp, Code::FilesUsedUp].contains(code);
            let is_error = is_exact && usage.used >= usage.limit;
            let level = if is_error { Level::Error } else { Level::Warning };
            checks.push(Check::with_level(level, &Problem::new(*code, what, found)));
        }
    }
    if checks.is_empty() {
        let found = usages.iter().map(|(_, what, usage)| format!("{what}: {usage}"));
        checks.push(Check::ok(NAME, found.collect::<Vec<_>>().join("; ")));
    }
    checks
}

/// Reads what can be read and has a limit: the code if it is used up, the resource, and how much is in use.
fn usages(root: &Path, envoy: Option<i32>) -> Vec<(Code, &'static str, Usage)> {
    let files = envoy.and_then(|pid| usage::open_files(root, pid));
    [
        (
            Code::MemoryUsedUp,
            "memory of the container in MiB",
            usage::memory(root).map(in_mebibytes),
        ),
        (Code::TasksUsedUp, "processes and threads of the container", usage::tasks(root)),
        (Code::FilesUsedUp, "open files of Envoy", files),
        (Code::PortsUsedUp, PORTS, usage::local_ports(root)),
    ]
    .into_iter()
    .filter_map(|(code, what, usage)| Some((code, what, usage?)))
    .collect()
}

fn in_mebibytes(usage: Usage) -> Usage {
    Usage { used: usage.used >> 20, limit: usage.limit >> 20 }
}

/// Lists directories whose volume has neither space nor room for another file.
fn full_volumes(directories: impl Iterator<Item = PathBuf>) -> Vec<Problem> {
    let problems = directories.filter_map(|directory| {
        // Another check reports a missing directory.
        let volume = statvfs(&directory).ok()?;
        let what = match volume {
            // Some file systems that are read only have no free blocks.
            _ if volume.f_flag.contains(StatVfsMountFlags::RDONLY) => return None,
            _ if volume.f_blocks > 0 && volume.f_bavail == 0 => "no space is left",
            _ if volume.f_files > 0 && volume.f_favail == 0 => "no inode is left",
            _ => return None,
        };
        Some(Problem::new(Code::DiskFull, directory.display(), what))
    });
    problems.collect()
}
