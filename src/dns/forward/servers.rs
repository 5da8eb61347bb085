//! The servers in force: those of `resolv.conf` as it is now.
//!
//! The file is read when a query needs it, at most once a second, so an idle agent never wakes up for
//! it. The last usable servers stay in force while the file is missing or names none: a writer may be
//! half way through. Our own addresses are left out, or we would ask ourselves.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::resolv_conf::ResolvConf;

/// More are hardly meant, and each may cost a socket.
const MAX_SERVERS: usize = 16;

const READ_AGAIN: Duration = Duration::from_secs(1);

/// Servers that follow the file.
#[derive(Debug)]
pub(super) struct Servers {
    path: PathBuf,
    own: Vec<SocketAddr>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    read_at: Option<Instant>,
    /// What the file said last; `None` if it could not be read.
    found: Option<ResolvConf>,
    /// What is in force, with usable servers only.
    usable: Arc<ResolvConf>,
}

impl Servers {
    pub(super) fn new(path: PathBuf, own: Vec<SocketAddr>) -> Self {
        let state = Mutex::default();
        Self { path, own, state }
    }

    pub(super) fn current(&self) -> Arc<ResolvConf> {
        let mut state = self.state.lock();
        let now = Instant::now();
        let is_old = |read| now.duration_since(read) >= READ_AGAIN;
        if state.read_at.is_none_or(is_old) {
            self.read(&mut state);
            state.read_at = Some(now);
        }
        state.usable.clone()
    }

    fn read(&self, state: &mut State) {
        let was_readable = state.read_at.is_none() || state.found.is_some();
        let read = ResolvConf::read(&self.path);
        if let (Err(error), true) = (&read, was_readable) {
            let path = self.path.display();
            tracing::warn!(target: "dns", "{path}: {error}; keeping the DNS servers known so far");
        }
        let found = read.ok();
        if found != state.found {
            let usable = found.as_ref().and_then(|found| self.usable(found));
            state.usable = usable.map_or(state.usable.clone(), Arc::new);
            state.found = found;
        }
    }

    /// `None` when the last servers stay in force.
    fn usable(&self, found: &ResolvConf) -> Option<ResolvConf> {
        let path = self.path.display();
        for line in &found.unusable {
            tracing::warn!(target: "dns", "{path}: leaving out {line:?}, expected a server's address");
        }
        let (ours, mut addresses): (Vec<_>, Vec<_>) = found
            .nameservers
            .iter()
            .partition(|server| is_own(&self.own, **server));
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
        Some(ResolvConf {
            nameservers: addresses,
            ..found.clone()
        })
    }
}

/// Whether a server is this agent, which answers at its `own` addresses. One at an unspecified address
/// is this machine, and we may listen at all of its.
pub(crate) fn is_own(own: &[SocketAddr], server: SocketAddr) -> bool {
    let address = server.ip();
    let is_here = address.is_loopback() || address.is_unspecified();
    own.iter().any(|own| {
        let is_same = own.ip() == address
            || own.ip().is_unspecified() && is_here
            || own.ip().is_loopback() && address.is_unspecified();
        own.port() == server.port() && is_same
    })
}
