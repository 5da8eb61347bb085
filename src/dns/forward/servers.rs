//! The servers in force: those of `resolv.conf` as it is now.
//!
//! The file is looked at when a query needs it, at most once a second, so an idle agent never wakes
//! up for it. The last servers that made sense stay in force while the file is missing or says
//! nothing: a writer may be half way through. Our own addresses are left out, lest we ask
//! ourselves.
//!
//! Does not know which servers answer.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::resolv_conf::ResolvConf;

/// Nobody has more, and each may cost a socket.
const MAX_SERVERS: usize = 16;

const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Whom to ask, and how.
#[derive(Clone, Debug, Default)]
pub(super) struct Servers {
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) use_tcp: bool,
}

#[derive(Debug)]
pub(super) struct Watched {
    path: PathBuf,
    own: Vec<SocketAddr>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    looked: Option<Instant>,
    /// Of what was read last; none when that failed.
    stamp: Option<Stamp>,
    is_unreadable: bool,
    servers: Arc<Servers>,
}

/// What changes when the file does. All zero for one that is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    changed: (i64, i64),
    modified: (i64, i64),
}

impl Watched {
    pub(super) fn new(path: PathBuf, own: Vec<SocketAddr>) -> Self {
        let state = Mutex::default();
        Self { path, own, state }
    }

    pub(super) fn current(&self) -> Arc<Servers> {
        let mut state = self.state.lock();
        let now = Instant::now();
        if state.looked.is_none_or(|looked| now - looked >= LOOK_AGAIN) {
            state.looked = Some(now);
            let stamp = self.stamp();
            if state.stamp != Some(stamp) {
                match ResolvConf::read(&self.path) {
                    Ok(found) => {
                        state.stamp = Some(stamp);
                        state.is_unreadable = false;
                        if let Some(servers) = self.usable(&found) {
                            state.servers = Arc::new(servers);
                        }
                    }
                    // It may be for a moment, which no stamp tells. Said once.
                    Err(error) => {
                        state.stamp = None;
                        if !state.is_unreadable {
                            let path = self.path.display();
                            tracing::warn!(target: "dns", "{path}: {error}; keeping the DNS servers known so far");
                        }
                        state.is_unreadable = true;
                    }
                }
            }
        }
        state.servers.clone()
    }

    fn stamp(&self) -> Stamp {
        // Reading the file says what is wrong with it.
        let metadata = std::fs::metadata(&self.path);
        metadata.map_or_else(
            |_| Stamp::default(),
            |found| Stamp {
                inode: found.ino(),
                size: found.size(),
                changed: (found.ctime(), found.ctime_nsec()),
                modified: (found.mtime(), found.mtime_nsec()),
            },
        )
    }

    /// Nothing when the last servers stay in force.
    fn usable(&self, found: &ResolvConf) -> Option<Servers> {
        let path = self.path.display();
        for line in &found.unusable {
            tracing::warn!(target: "dns", "{path}: leaving out {line:?}, expected a server's address");
        }
        let (ours, mut addresses): (Vec<_>, Vec<_>) = found
            .nameservers
            .iter()
            .partition(|server| self.is_own(**server));
        for server in ours {
            tracing::warn!(target: "dns", "{path}: leaving out {server}, which is this agent");
        }
        if addresses.len() > MAX_SERVERS {
            tracing::warn!(target: "dns", "{path}: using the first {MAX_SERVERS} DNS servers only");
            addresses.truncate(MAX_SERVERS);
        }
        if addresses.is_empty() {
            tracing::warn!(target: "dns", "{path}: names no DNS server; keeping those known so far");
            return None;
        }
        tracing::info!(target: "dns", "forwarding to the DNS servers {addresses:?}");
        Some(Servers {
            addresses,
            use_tcp: found.use_tcp,
        })
    }

    /// A server at an unspecified address is this machine, and we may listen at all of its.
    fn is_own(&self, server: SocketAddr) -> bool {
        let address = server.ip();
        let is_here = address.is_loopback() || address.is_unspecified();
        self.own.iter().any(|own| {
            let is_same = own.ip() == address
                || own.ip().is_unspecified() && is_here
                || own.ip().is_loopback() && address.is_unspecified();
            own.port() == server.port() && is_same
        })
    }
}
