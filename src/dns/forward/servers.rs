//! The servers in force, those of `resolv.conf` as it is now, and the order to ask them in.
//!
//! The file is read when a query needs it, at most once a second, so an idle agent never wakes up for
//! it. The last usable servers stay in force while the file is missing or names none: a writer may be
//! half way through. Our own addresses are left out, or we would ask ourselves.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::resolv_conf::ResolvConf;
use crate::clock::later;

/// More are hardly meant, and each may cost a socket.
const MAX_SERVERS: usize = 16;

const READ_AGAIN: Duration = Duration::from_secs(1);

/// Unanswered queries that make a server a failing one: single packets get lost.
const MISSES: u32 = 3;

const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// How long one query may try a failing server on behalf of all.
const PROBE: Duration = Duration::from_secs(1);

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

/// Which servers answer.
///
/// Servers are asked in random order. One that refuses, or leaves several queries in a row unanswered,
/// is asked last for a while; then one query tries it again. The while doubles as long as it fails, and
/// the first answer ends it. No server is left out: when all fail, all are tried.
#[derive(Debug, Default)]
pub(super) struct Health(Mutex<HashMap<SocketAddr, Failing>>);

#[derive(Clone, Copy, Debug, Default)]
struct Failing {
    misses: u32,
    /// Asked last until then.
    until: Option<Instant>,
}

impl Health {
    /// The order in which to ask.
    pub(super) fn order(&self, servers: &[SocketAddr], now: Instant) -> Vec<SocketAddr> {
        let mut failing = self.0.lock();
        failing.retain(|server, _| servers.contains(server));
        let mut order = servers.to_vec();
        fastrand::shuffle(&mut order);
        order.sort_by_key(|server| {
            let until = failing.get(server).and_then(|failing| failing.until);
            until.filter(|until| *until > now)
        });
        if let Some(probed) = order.first().and_then(|first| failing.get_mut(first))
            && probed.until.is_some()
        {
            probed.until = Some(later(now, PROBE));
        }
        order
    }

    pub(super) fn answered(&self, server: SocketAddr) {
        let was = self.0.lock().remove(&server);
        if was.is_some_and(|was| was.until.is_some()) {
            tracing::info!(target: "dns", "DNS server {server} answers again");
        }
    }

    /// A query was not answered in time.
    pub(super) fn missed(&self, server: SocketAddr, now: Instant) {
        self.note(server, "does not answer", 0, now);
    }

    /// The server cannot be reached, or its reply is broken.
    pub(super) fn failed(&self, server: SocketAddr, now: Instant) {
        self.note(server, "fails", MISSES, now);
    }

    fn note(&self, server: SocketAddr, why: &str, least: u32, now: Instant) {
        let mut failing = self.0.lock();
        let state = failing.entry(server).or_default();
        state.misses = state.misses.saturating_add(1).max(least);
        let Some(doublings) = state.misses.checked_sub(MISSES) else {
            return;
        };
        if state.until.is_none() {
            tracing::info!(target: "dns", "upstream failure: DNS server {server} {why}; asking it last");
        }
        let pause = MIN_PAUSE.saturating_mul(1 << doublings.min(5));
        state.until = Some(later(now, pause.min(MAX_PAUSE)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers() -> [SocketAddr; 2] {
        ["127.0.0.1:1", "127.0.0.1:2"].map(|text| text.parse().expect("an address"))
    }

    /// How often the first of two servers is asked first, of a hundred times.
    fn is_first(health: &Health, now: Instant) -> usize {
        let all = servers();
        (0..100)
            .filter(|_| health.order(&all, now)[0] == all[0])
            .count()
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_answer_share_the_queries() {
        let share = is_first(&Health::default(), Instant::now());
        assert!((20..80).contains(&share), "{share}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_is_asked_last_after_a_failure_or_several_misses() {
        let [server, other] = servers();
        let now = Instant::now();
        let health = Health::default();
        health.missed(server, now);
        health.missed(server, now);
        assert!(is_first(&health, now) > 0);
        health.missed(server, now);
        assert_eq!(is_first(&health, now), 0);
        health.answered(server);
        assert!(is_first(&health, now) > 0);
        health.failed(server, now);
        assert_eq!(is_first(&health, now), 0);
        health.failed(other, now);
        assert_eq!(health.order(&servers(), now).len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn one_query_finds_out_whether_it_answers_again() {
        let [server, _] = servers();
        let mut now = Instant::now();
        let health = Health::default();
        for pause in [1, 2, 4, 8, 16, 30, 30] {
            health.failed(server, now);
            now += Duration::from_secs(pause);
            assert_eq!(is_first(&health, now - Duration::from_millis(1)), 0);
            assert_eq!(is_first(&health, now), 1, "after {pause} s");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn servers_no_longer_listed_are_forgotten() {
        let [server, other] = servers();
        let now = Instant::now();
        let health = Health::default();
        health.failed(server, now);
        health.order(&[other], now);
        assert!(health.0.lock().is_empty());
    }
}
