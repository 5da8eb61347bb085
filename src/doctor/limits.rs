//! Open files, inotify and memory: how much of what agent and Envoy may have they use.

use std::fs;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getpid, getrlimit};

use super::report::Check;
use super::{Subject, aside};
use crate::envoy::memory::{ControlGroup, resident};

/// Files that are left for what agent and Envoy do at once.
const SPARE_FILES: u64 = 16;
/// Part of a limit, in percent, from which it is soon reached.
const NEARLY: u64 = 80;
/// Part of the memory that leaves too little for the next configuration.
const FULL: u64 = 90;

/// What there is of a process under a limit.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    used: Option<u64>,
    /// None is no limit.
    limit: Option<u64>,
}

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let is_agent = subject.running.is_some();
    let envoy = subject.running.and_then(|running| running.envoy.as_ref());
    let envoy = envoy.and_then(|envoy| envoy.report().borrow().pid);
    let awaits_envoy = subject.config.envoy.is_some() && envoy.is_none();
    let found = aside(move || {
        let mut checks = Vec::new();
        if is_agent {
            checks.push(files("open files of the agent", of_agent()));
        }
        if let Some(pid) = envoy {
            checks.push(files("open files of Envoy", of_process(pid)));
        }
        checks.push(inotify(awaits_envoy));
        let agent = is_agent.then(|| getpid().as_raw_nonzero().get());
        let resident = agent.into_iter().chain(envoy).filter_map(resident).sum();
        checks.push(match ControlGroup::read("/".as_ref()) {
            Some(group) => in_memory(resident, group),
            None => Check::skipped("memory", "this process is in no control group of memory"),
        });
        checks
    });
    found
        .await
        .unwrap_or_else(|late| vec![Check::warning("limits", late)])
}

fn of_agent() -> Use {
    let limit = getrlimit(Resource::Nofile).current;
    let used = open_files("self", limit);
    Use { used, limit }
}

fn of_process(pid: i32) -> Use {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
    let used = open_files(&pid.to_string(), None);
    let limit = file_limit(&limits);
    Use { used, limit }
}

/// None if another user's process does not show them. With none left to list our own, they are as many
/// as the limit.
fn open_files(process: &str, limit: Option<u64>) -> Option<u64> {
    match fs::read_dir(format!("/proc/{process}/fd")) {
        Ok(files) => u64::try_from(files.count()).ok(),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::MFILE) => limit,
        Err(_) => None,
    }
}

/// The soft limit of open files in a `limits` file of `/proc`; None if there is none.
fn file_limit(limits: &str) -> Option<u64> {
    let mut lines = limits.lines();
    let values = lines.find_map(|line| line.strip_prefix("Max open files"))?;
    values.split_whitespace().next()?.parse().ok()
}

fn files(name: &str, found: Use) -> Check {
    let (used, limit) = match (found.used, found.limit) {
        (None, Some(limit)) => {
            return Check::skipped(name, format!("cannot be listed, limit {limit}"));
        }
        (_, None) => return Check::ok(name, "no limit"),
        (Some(used), Some(limit)) => (used, limit),
    };
    let words = format!("{used} of {limit}");
    let check = match percent(used, limit) {
        _ if limit.saturating_sub(used) < SPARE_FILES => Check::error(name, words),
        NEARLY.. => Check::warning(name, words),
        _ => return Check::ok(name, words),
    };
    check
        .expected(format!("at most {NEARLY} %, and {SPARE_FILES} left"))
        .remedy(
            "raise the limit (LimitNOFILE of the container runtime or service), or \
                 look which connections stay open",
        )
}

/// Makes one more instance with one watch. Envoy needs them to start.
fn inotify(awaits_envoy: bool) -> Check {
    let name = "inotify";
    let limit = |of: &str| {
        let read = fs::read_to_string(Path::new("/proc/sys/fs/inotify").join(of));
        let value = read.unwrap_or_default();
        format!("fs.inotify.{of} is {}", value.trim())
    };
    let made = match inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK) {
        Ok(made) => made,
        Err(error) => {
            let found = format!(
                "no further instance: {error}; {}",
                limit("max_user_instances")
            );
            let check = match awaits_envoy {
                true => Check::error(name, found),
                false => Check::warning(name, found),
            };
            return check
                .expected("one more, without which Envoy cannot start")
                .remedy(
                    "raise the limit on the node with sysctl; all \
                         pods of a node with the same user share it",
                );
        }
    };
    match inotify::add_watch(made, "/", WatchFlags::DELETE_SELF) {
        Ok(_) => Check::ok(name, "an instance and a watch can be made"),
        Err(error) => {
            let found = format!("no further watch: {error}; {}", limit("max_user_watches"));
            Check::warning(name, found)
                .expected("one more; without, changed certificate files are noticed late")
                .remedy("raise the limit on the node with sysctl")
        }
    }
}

fn in_memory(resident: u64, group: ControlGroup) -> Check {
    let name = "memory";
    let used = match resident {
        0 => String::new(),
        resident => format!("agent and Envoy have {} MiB, ", resident >> 20),
    };
    let Some(limit) = group.limit else {
        return Check::ok(name, format!("{used}no limit"));
    };
    let words = format!(
        "{used}limit {} MiB, {} processes killed",
        limit >> 20,
        group.kills
    );
    let check = match percent(resident, limit) {
        0..FULL if group.kills == 0 => return Check::ok(name, words),
        _ => Check::warning(name, words),
    };
    check
        .expected(format!(
            "at most {FULL} %, and no process killed for want of memory"
        ))
        .remedy(
            "raise sidecar.istio.io/proxyMemoryLimit of the pod, or give \
                 Envoy less configuration by a Sidecar resource",
        )
}

fn percent(part: u64, whole: u64) -> u64 {
    (part.saturating_mul(100)).checked_div(whole).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::doctor::report::Level;

    #[test]
    fn files_near_their_limit_are_warned_of_before_they_are_an_error() {
        let level = |used, limit| files("files", Use { used, limit }).level;
        for (used, limit, expected) in [
            (Some(500), Some(1000), Level::Ok),
            (Some(800), Some(1000), Level::Warning),
            (Some(985), Some(1000), Level::Error),
            (Some(1), Some(0), Level::Error),
            (Some(1 << 60), None, Level::Ok),
            (None, Some(100), Level::Skipped),
        ] {
            assert_eq!(level(used, limit), expected, "{used:?} of {limit:?}");
        }
    }

    #[test]
    fn memory_near_its_limit_and_kills_are_warned_of() {
        let check = |resident, limit, kills| in_memory(resident, ControlGroup { limit, kills });
        for (resident, limit, kills, expected) in [
            (100 << 20, Some(200 << 20), 0, Level::Ok),
            (190 << 20, Some(200 << 20), 0, Level::Warning),
            (100 << 20, Some(200 << 20), 1, Level::Warning),
            // Others of the machine.
            (100 << 20, None, 7, Level::Ok),
        ] {
            let check = check(resident, limit, kills);
            assert_eq!(check.level, expected, "{check}");
        }
    }

    #[test]
    fn the_limit_of_another_process_is_read() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files  1024  4096  files\n";
        assert_eq!(file_limit(limits), Some(1024));
        assert_eq!(
            file_limit("Max open files   unlimited unlimited files"),
            None
        );
        assert_eq!(file_limit(""), None);
        let us = of_process(std::process::id().cast_signed());
        assert!(us.used.is_some_and(|used| used > 2), "{us:?}");
        assert_eq!(us.limit, of_agent().limit);
    }

    proptest! {
        #[test]
        fn any_text_has_a_limit_or_none(text in "(Max open files)?[ 0-9a-z\\n]{0,40}|\\PC{0,80}") {
            let _ = file_limit(&text);
        }
    }
}
