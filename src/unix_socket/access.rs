//! Decides by the peer's user, as the kernel tells it, whether a connection is served.
//!
//! Each refused user is logged once, with the process; all refusals are counted. Groups do not
//! matter: a socket's directory is for them.

use std::collections::BTreeSet;
use std::path::Path;

use tokio::net::UnixStream;

use crate::metrics::Counter;

/// How many refused users are remembered.
const MOST_USERS: usize = 1024;

/// The users that may connect.
#[derive(Clone, Debug)]
pub struct Access {
    users: BTreeSet<u32>,
    /// Refused users that have been logged.
    refused: BTreeSet<u32>,
    refusals: Counter,
}

impl Access {
    /// Admits these users, the one this process runs as, and root, which could read its memory anyway.
    pub fn only(users: impl IntoIterator<Item = u32>, refusals: Counter) -> Self {
        let own = rustix::process::geteuid().as_raw();
        Self {
            users: users.into_iter().chain([own, 0]).collect(),
            refused: BTreeSet::new(),
            refusals,
        }
    }

    pub(super) fn admits(&mut self, stream: &UnixStream, path: &Path) -> bool {
        match stream.peer_cred() {
            Ok(peer) => self.admits_user(peer.uid(), peer.pid(), path),
            Err(error) => {
                tracing::warn!("refused a connection on {}: {error}", path.display());
                self.refusals.inc();
                false
            }
        }
    }

    fn admits_user(&mut self, user: u32, process: Option<i32>, path: &Path) -> bool {
        if self.users.contains(&user) {
            return true;
        }
        self.refusals.inc();
        if self.refused.len() < MOST_USERS && self.refused.insert(user) {
            let users: Vec<_> = self.users.iter().map(u32::to_string).collect();
            tracing::warn!(
                "refused user {user} (process {}) on {}; further refusals of it are only counted; \
                 admitted users: {}",
                process.unwrap_or_default(),
                path.display(),
                users.join(", ")
            );
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Registry;

    #[tokio::test]
    async fn admits_itself_root_and_named_users_and_counts_refusals() {
        let registry = Registry::default();
        let refusals = registry.counter("refusals_total", "Refusals");
        let mut access = Access::only([1337], refusals.clone());
        let path = Path::new("socket");
        let own = rustix::process::geteuid().as_raw();
        for (user, expected) in [
            (own, true),
            (0, true),
            (1337, true),
            (4711, false),
            (4711, false),
        ] {
            let admitted = access.admits_user(user, Some(1), path);
            assert_eq!(admitted, expected, "{user}");
        }
        assert_eq!(refusals.get(), 2);
        let (near, _far) = UnixStream::pair().unwrap();
        assert!(access.admits(&near, path), "the kernel names this process");
    }
}
