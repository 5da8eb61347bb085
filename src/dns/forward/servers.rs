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
use crate::problem::Problem;

const READ_AGAIN: Duration = Duration::from_secs(1);

/// Unanswered queries that make a server a failing one: single packets get lost.
const MISSES: u32 = 3;

/// How long a failing server is asked last.
const PAUSE: Duration = Duration::from_secs(10);

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
    /// What the file said last, or why it could not be read.
    found: Option<Result<ResolvConf, Problem>>,
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
            state.read_at = Some(now);
            let found = ResolvConf::read(&self.path);
            if state.found.as_ref() != Some(&found) {
                state.found = Some(found.clone());
                self.take(&mut state, found);
            }
        }
        state.usable.clone()
    }

    /// Takes what was found. The last servers stay in force if there are no new ones.
    fn take(&self, state: &mut State, found: Result<ResolvConf, Problem>) {
        let mut found = found.unwrap_or_else(|problem| {
            tracing::warn!(target: "dns", "{problem}");
            ResolvConf::default()
        });
        for problem in found.without_own(&self.own, &self.path) {
            tracing::warn!(target: "dns", "{problem}");
        }
        let servers = &found.nameservers;
        if !servers.is_empty() {
            let texts: Vec<_> = servers.iter().map(SocketAddr::to_string).collect();
            tracing::info!(target: "dns", "forwarding to the DNS servers {}", texts.join(", "));
            state.usable = Arc::new(found);
        } else if !state.usable.nameservers.is_empty() {
            tracing::warn!(target: "dns", "the DNS servers known so far are used");
        }
    }
}

/// Which servers answer.
///
/// Servers are asked in random order. One that leaves several queries in a row unanswered is asked last
/// for a while; then one query tries it again, and the first answer ends it. No server is left out: when
/// all fail, all are tried.
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

    /// A query was not answered, or not in time.
    pub(super) fn missed(&self, server: SocketAddr, now: Instant) {
        let mut failing = self.0.lock();
        let state = failing.entry(server).or_default();
        state.misses = state.misses.saturating_add(1);
        if state.misses < MISSES {
            return;
        }
        if state.until.is_none() {
            tracing::info!(target: "dns", "upstream failure: DNS server {server} timed out repeatedly; it is asked last for {} s", PAUSE.as_secs());
        }
        state.until = Some(later(now, PAUSE));
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
    async fn a_server_is_asked_last_after_several_misses() {
        let [server, other] = servers();
        let now = Instant::now();
        let health = Health::default();
        for _ in 1..MISSES {
            health.missed(server, now);
            assert!(is_first(&health, now) > 0);
        }
        health.missed(server, now);
        assert_eq!(is_first(&health, now), 0);
        health.answered(server);
        assert!(is_first(&health, now) > 0);
        for _ in 0..MISSES {
            health.missed(server, now);
            health.missed(other, now);
        }
        assert_eq!(health.order(&servers(), now).len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn one_query_finds_out_whether_it_answers_again() {
        let [server, _] = servers();
        let mut now = Instant::now();
        let health = Health::default();
        for _ in 1..MISSES {
            health.missed(server, now);
        }
        for round in 0..5 {
            health.missed(server, now);
            now += PAUSE;
            assert_eq!(is_first(&health, now - Duration::from_millis(1)), 0);
            assert_eq!(is_first(&health, now), 1, "in round {round}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn servers_no_longer_listed_are_forgotten() {
        let [server, other] = servers();
        let now = Instant::now();
        let health = Health::default();
        health.missed(server, now);
        health.order(&[other], now);
        assert!(health.0.lock().is_empty());
    }
}
