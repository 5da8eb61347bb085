//! Reaps orphans when the agent is process 1 of its container.
//!
//! A process that loses its parent becomes a child of process 1 and stays a zombie until that waits
//! for it. Zombies are found in `/proc` and waited for by their id: waiting for any child would take
//! Envoy's end away from the supervisor. Each other child of the agent must be claimed.

use std::convert::Infallible;
use std::fs;

use rustix::process::{Pid, WaitOptions};
use tokio::signal::unix::{SignalKind, signal};

use crate::lifecycle::Claim;

/// Reaps orphans for ever.
pub async fn reap() -> Infallible {
    if rustix::process::getpid() != Pid::INIT {
        return std::future::pending().await;
    }
    let mut ends = match signal(SignalKind::child()) {
        Ok(ends) => ends,
        Err(error) => {
            tracing::warn!(%error, "cannot watch for orphans; leaving them unreaped");
            return std::future::pending().await;
        }
    };
    loop {
        reap_once();
        if ends.recv().await.is_none() {
            return std::future::pending().await;
        }
    }
}

fn reap_once() {
    let Ok(processes) = fs::read_dir("/proc") else {
        return; // Without /proc zombies cannot be told apart.
    };
    let pids = processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Pid::from_raw)
        .filter(|pid| !Claim::is_on(*pid));
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
    fn only_zombies_of_the_first_process_are_reaped() {
        assert!(is_zombie_of_first("42 (sh) Z 1 42 42 0 -1"));
        assert!(is_zombie_of_first("42 (a) S 2 (b)) Z 1 42 42 0 -1"));
        assert!(!is_zombie_of_first("42 (sh) S 1 42 42 0 -1"));
        assert!(!is_zombie_of_first("42 (sh) Z 7 42 42 0 -1"));
        assert!(!is_zombie_of_first(""));
    }
}
