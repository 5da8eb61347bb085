//! Accepts or rejects a connection by the peer's user, which the kernel reports.
//!
//! Each rejected user is logged once, with the process; all rejections are counted. Groups are not checked
//! here: the mode of the socket's directory restricts them.

use std::collections::BTreeSet;
use std::path::Path;

use tokio::net::UnixStream;

use crate::metrics::Counter;

/// The number of rejected users that are remembered.
const MAX_USERS: usize = 1024;

/// The user that stands for all that a user namespace does not have (user_namespaces(7)).
const OVERFLOW: u32 = 65534;

#[derive(Clone, Debug)]
pub struct Access {
    users: BTreeSet<u32>,
    /// Refused users that have been logged.
    refused: BTreeSet<u32>,
    refusals: Counter,
}

impl Access {
    /// Admits these users, root, and the one this process runs as.
    pub fn only(users: &BTreeSet<u32>, refusals: Counter) -> Self {
        Self { users: with_agent_and_root(users), refused: BTreeSet::new(), refusals }
    }

    /// Returns true if the peer may connect. Otherwise counts the rejection, and logs the first one of a user.
    pub(super) fn admit(&mut self, stream: &UnixStream, path: &Path) -> bool {
        match stream.peer_cred() {
            Ok(peer) => self.admit_user(peer.uid(), peer.pid(), path),
            Err(error) => {
                tracing::warn!("refused a connection on {}: {error}", path.display());
                self.refusals.inc();
                false
            }
        }
    }

    fn admit_user(&mut self, user: u32, process: Option<i32>, path: &Path) -> bool {
        if self.users.contains(&user) {
            return true;
        }
        self.refusals.inc();
        if self.refused.len() < MAX_USERS && self.refused.insert(user) {
            let users: Vec<_> = self.users.iter().map(u32::to_string).collect();
            tracing::warn!(
                "refused user {user} (process {}) on {}; further refusals of it are only counted; \
                 admitted users: {}; ISTIO_AGENT_SDS_USERS adds users",
                process.unwrap_or_default(),
                path.display(),
                users.join(", ")
            );
        }
        false
    }
}

/// Adds the user this process runs as, and root, which could read its memory anyway.
pub fn with_agent_and_root(users: &BTreeSet<u32>) -> BTreeSet<u32> {
    with_own(users, rustix::process::geteuid().as_raw())
}

fn with_own(users: &BTreeSet<u32>, own: u32) -> BTreeSet<u32> {
    let own = (own != OVERFLOW).then_some(own);
    users.iter().copied().chain([0]).chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Registry;

    #[test]
    fn the_overflow_user_is_admitted_only_if_it_is_named() {
        assert_eq!(with_own(&[7].into(), OVERFLOW), [0, 7].into());
        let named = [OVERFLOW].into();
        assert_eq!(with_own(&named, OVERFLOW), [0, OVERFLOW].into());
    }

    #[tokio::test]
    async fn admits_itself_root_and_named_users_and_counts_refusals() {
        let registry = Registry::default();
        let refusals = registry.counter("refusals_total", "Refusals");
        let mut access = Access::only(&[1337].into(), refusals.clone());
        let path = Path::new("socket");
        let own = rustix::process::geteuid().as_raw();
        for (user, expected) in [(own, true), (0, true), (1337, true), (4711, false), (4711, false)]
        {
            let admitted = access.admit_user(user, Some(1), path);
            assert_eq!(admitted, expected, "{user}");
        }
        assert_eq!(refusals.get(), 2);
        let (near, _far) = UnixStream::pair().unwrap();
        assert!(access.admit(&near, path), "the kernel names this process");
    }
}
