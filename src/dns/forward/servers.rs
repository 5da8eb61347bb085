//! Follows the servers of `resolv.conf`, and chooses the order in which they are queried.
//!
//! The file is read when a query needs it, at most once a second, so an idle agent never wakes up for
//! it. The last usable servers stay in use while the file is missing or lists none, because a writer may
//! not be finished. The agent's own addresses are left out: they would cause a forwarding loop.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::resolv_conf::ResolvConf;
use crate::problem::Problem;
use crate::runtime::clock::later;

const READ_AGAIN: Duration = Duration::from_secs(1);

/// Consecutive unanswered queries that make a server a failing one. Single packets get lost.
const MISSES: u32 = 3;

/// Time in which a failing server is queried last.
const PAUSE: Duration = Duration::from_secs(10);

/// Time in which one query alone tests a failing server.
const PROBE: Duration = Duration::from_secs(1);

/// The servers of a file that may change.
#[derive(Debug)]
pub(super) struct Servers {
    path: PathBuf,
    own: Vec<SocketAddr>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    read_at: Option<Instant>,
    /// The content of the file when it was read last, or why it could not be read.
    found: Option<Result<ResolvConf, Problem>>,
    /// The servers in use, without the agent itself.
    usable: Vec<SocketAddr>,
}

impl Servers {
    pub(super) fn new(path: PathBuf, own: Vec<SocketAddr>) -> Self {
        Self { path, own, state: Mutex::default() }
    }

    /// Returns the servers in use. Reads the file again if the last time was [`READ_AGAIN`] ago.
    pub(super) fn current(&self) -> Vec<SocketAddr> {
        let mut state = self.state.lock();
        let now = Instant::now();
        if state.read_at.is_none_or(|read| now.duration_since(read) >= READ_AGAIN) {
            state.read_at = Some(now);
            let found = ResolvConf::read(&self.path);
            if state.found.as_ref() != Some(&found) {
                state.found = Some(found.clone());
                self.apply(&mut state, found);
            }
        }
        state.usable.clone()
    }

    /// Uses the servers that were found. If there are none, the last ones stay in use.
    fn apply(&self, state: &mut State, found: Result<ResolvConf, Problem>) {
        let mut found = found.unwrap_or_else(|problem| {
            tracing::warn!(target: "dns", "{problem}");
            ResolvConf::default()
        });
        for problem in found.remove_own(&self.own, &self.path) {
            tracing::warn!(target: "dns", "{problem}");
        }
        let servers = &found.nameservers;
        if !servers.is_empty() {
            let texts: Vec<_> = servers.iter().map(SocketAddr::to_string).collect();
            tracing::info!(target: "dns", "forwarding to the DNS servers {}", texts.join(", "));
            state.usable = found.nameservers;
        } else if !state.usable.is_empty() {
            tracing::warn!(target: "dns", "the DNS servers known so far are used");
        }
    }
}

/// Records which servers answer.
///
/// Servers are queried in random order. A server that leaves several consecutive queries unanswered is
/// queried last for a while; then a single query tests it. Its first answer makes it a usual one again.
/// No server is left out, so if all are failing, all are tried.
#[derive(Debug, Default)]
pub(super) struct Health(Mutex<HashMap<SocketAddr, Failing>>);

#[derive(Clone, Copy, Debug, Default)]
struct Failing {
    misses: u32,
    /// Queried last until then.
    until: Option<Instant>,
}

impl Health {
    /// Returns the servers in the order in which they should be queried. If the first one is failing, this query
    /// tests it, and others query it last for a moment.
    pub(super) fn choose_order(&self, servers: &[SocketAddr], now: Instant) -> Vec<SocketAddr> {
        let mut failing = self.0.lock();
        failing.retain(|server, _| servers.contains(server));
        let mut order = servers.to_vec();
        fastrand::shuffle(&mut order);
        // Servers that are not failing or may be tested now have None, which comes first.
        order.sort_by_key(|server| {
            let until = failing.get(server).and_then(|failing| failing.until);
            until.filter(|until| *until > now)
        });
        if let Some(tested) = order.first().and_then(|first| failing.get_mut(first))
            && tested.until.is_some()
        {
            tested.until = Some(later(now, PROBE));
        }
        order
    }

    /// Makes the server a usual one again.
    pub(super) fn record_answer(&self, server: SocketAddr) {
        let failing = self.0.lock().remove(&server);
        if failing.is_some_and(|failing| failing.until.is_some()) {
            tracing::info!(target: "dns", "DNS server {server} answers again");
        }
    }

    /// Records that a query failed or was not answered in time.
    pub(super) fn record_miss(&self, server: SocketAddr, now: Instant) {
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

    /// Counts how often the first of two servers is queried first, in a hundred queries.
    fn count_first(health: &Health, now: Instant) -> usize {
        let all = servers();
        (0..100).filter(|_| health.choose_order(&all, now)[0] == all[0]).count()
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_answer_share_the_queries() {
        let share = count_first(&Health::default(), Instant::now());
        assert!((20..80).contains(&share), "{share}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_is_asked_last_after_several_misses() {
        let [server, other] = servers();
        let now = Instant::now();
        let health = Health::default();
        for _ in 1..MISSES {
            health.record_miss(server, now);
            assert!(count_first(&health, now) > 0);
        }
        health.record_miss(server, now);
        assert_eq!(count_first(&health, now), 0);
        health.record_answer(server);
        assert!(count_first(&health, now) > 0);
        for _ in 0..MISSES {
            health.record_miss(server, now);
            health.record_miss(other, now);
        }
        assert_eq!(health.choose_order(&servers(), now).len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn one_query_checks_whether_a_failed_server_answers_again() {
        let [server, _] = servers();
        let mut now = Instant::now();
        let health = Health::default();
        for _ in 1..MISSES {
            health.record_miss(server, now);
        }
        for round in 0..5 {
            health.record_miss(server, now);
            now += PAUSE;
            assert_eq!(count_first(&health, now - Duration::from_millis(1)), 0);
            assert_eq!(count_first(&health, now), 1, "in round {round}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn servers_no_longer_listed_are_forgotten() {
        let [server, other] = servers();
        let now = Instant::now();
        let health = Health::default();
        health.record_miss(server, now);
        health.choose_order(&[other], now);
        assert!(health.0.lock().is_empty());
    }
}
