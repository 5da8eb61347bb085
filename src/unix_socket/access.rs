//! Whom a socket serves: the kernel says which user dials.
//!
//! Each user that is turned away is logged once, with the process, so that neither an attack nor a
//! mistake goes unnoticed or fills the log.
//!
//! Does not look at groups: a socket's directory is for that.

use std::collections::BTreeSet;
use std::path::Path;

use tokio::net::UnixStream;

use crate::metrics::Counter;

/// How many users turned away are remembered.
const MOST_USERS: usize = 1024;

/// Who may dial. By default everybody may.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// None lets everybody in.
    users: Option<BTreeSet<u32>>,
    refused: BTreeSet<u32>,
    refusals: Option<Counter>,
}

impl Access {
    /// Lets in these users, the one this process runs as, and root, who could take it anyway.
    pub fn only(users: impl IntoIterator<Item = u32>, refusals: Counter) -> Self {
        let own = rustix::process::geteuid().as_raw();
        Self {
            users: Some(users.into_iter().chain([own, 0]).collect()),
            refused: BTreeSet::new(),
            refusals: Some(refusals),
        }
    }

    pub(super) fn admits(&mut self, stream: &UnixStream, path: &Path) -> bool {
        if self.users.is_none() {
            return true;
        }
        match stream.peer_cred() {
            Ok(peer) => self.admits_user(peer.uid(), peer.pid(), path),
            Err(error) => {
                tracing::warn!("refused a connection on {}: {error}", path.display());
                self.count();
                false
            }
        }
    }

    fn admits_user(&mut self, user: u32, process: Option<i32>, path: &Path) -> bool {
        let users = self.users.as_ref();
        if users.is_none_or(|users| users.contains(&user)) {
            return true;
        }
        self.count();
        if self.refused.len() < MOST_USERS && self.refused.insert(user) {
            tracing::warn!(
                "refused user {user} (process {}) on {}, and will without a word from now on; \
                 users let in: {}",
                process.unwrap_or_default(),
                path.display(),
                users.map(shown).unwrap_or_default()
            );
        }
        false
    }

    fn count(&self) {
        if let Some(refusals) = &self.refusals {
            refusals.inc();
        }
    }
}

fn shown(users: &BTreeSet<u32>) -> String {
    let users: Vec<_> = users.iter().map(u32::to_string).collect();
    users.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Registry;

    #[tokio::test]
    async fn lets_in_itself_root_and_those_named_and_counts_the_others() {
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
            assert_eq!(access.admits_user(user, Some(1), path), expected, "{user}");
        }
        assert_eq!(refusals.get(), 2);
        let (near, _far) = UnixStream::pair().unwrap();
        assert!(access.admits(&near, path), "the kernel names this process");
        assert!(Access::default().admits_user(4711, None, path));
    }
}
