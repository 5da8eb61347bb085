//! Reaps processes that were left to the agent, when it is the first of its container.
//!
//! Whoever loses its parent becomes a child of process 1, and stays a zombie until that one asks how
//! it ended. Zombies are found in `/proc`, so that each can be asked for by its id: asking for any
//! child would take Envoy's end away from the one who waits for it.
//!
//! Does nothing under another process id. Must learn of every other child the agent starts.

use std::convert::Infallible;
use std::fs;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Pid, WaitOptions};
use tokio::signal::unix::{SignalKind, signal};

/// Processes whose end somebody waits for. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Children(Arc<Mutex<Vec<Pid>>>);

/// The claim to hear of a process' end oneself, given up when dropped.
#[derive(Debug)]
pub struct Claim {
    own: Children,
    pid: Pid,
}

impl Children {
    pub fn claim(&self, pid: Pid) -> Claim {
        self.lock().push(pid);
        Claim {
            own: self.clone(),
            pid,
        }
    }

    fn contains(&self, pid: Pid) -> bool {
        self.lock().contains(&pid)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Pid>> {
        self.0.lock()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.own.lock().retain(|pid| *pid != self.pid);
    }
}

/// Reaps reaper for ever, except for `own`.
pub async fn reap(own: Children) -> Infallible {
    if rustix::process::getpid() != Pid::INIT {
        return std::future::pending().await;
    }
    let mut children = match signal(SignalKind::child()) {
        Ok(children) => children,
        Err(error) => {
            tracing::warn!(%error, "cannot watch for reaper; leaving them unreaped");
            return std::future::pending().await;
        }
    };
    loop {
        reap_once(&own);
        if children.recv().await.is_none() {
            return std::future::pending().await;
        }
    }
}

fn reap_once(own: &Children) {
    let Ok(processes) = fs::read_dir("/proc") else {
        return; // Without /proc there is no telling whose zombie is whose.
    };
    let pids = processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Pid::from_raw)
        .filter(|pid| !own.contains(*pid));
    for pid in pids {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
        if stat.is_ok_and(|stat| is_zombie_of_first(&stat)) {
            // It is a zombie, so this does not wait; an error means that it is gone.
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

/// Reads state and parent behind the name in brackets, which may hold brackets itself (proc(5)).
fn is_zombie_of_first(stat: &str) -> bool {
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = rest.split_ascii_whitespace();
    (fields.next(), fields.next()) == (Some("Z"), Some("1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_lasts_until_it_is_dropped() {
        let own = Children::default();
        let (first, second) = (Pid::from_raw(41), Pid::from_raw(42));
        let (first, second) = (first.expect("a pid"), second.expect("a pid"));
        let (claim, _other) = (own.claim(first), own.claim(second));
        assert!(own.contains(first) && own.contains(second));
        drop(claim);
        assert!(!own.contains(first) && own.contains(second));
    }

    #[test]
    fn only_zombies_of_the_first_process_are_reaped() {
        assert!(is_zombie_of_first("42 (sh) Z 1 42 42 0 -1"));
        assert!(is_zombie_of_first("42 (a) S 2 (b)) Z 1 42 42 0 -1"));
        assert!(!is_zombie_of_first("42 (sh) S 1 42 42 0 -1"));
        assert!(!is_zombie_of_first("42 (sh) Z 7 42 42 0 -1"));
        assert!(!is_zombie_of_first(""));
    }
}
