//! Which servers answer.
//!
//! Servers are asked in random order. One that refuses, or leaves several queries in a row unanswered,
//! is asked last for a while; then one query tries it again. The while doubles as long as it fails, and
//! the first answer ends it. No server is left out: when all fail, all are tried.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::clock::later;

/// Unanswered queries that make a server a failing one: single packets get lost.
const MISSES: u32 = 3;

const MIN: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// How long one query may try a failing server on behalf of all.
const PROBE: Duration = Duration::from_secs(1);

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
        let pause = MIN.saturating_mul(1 << doublings.min(5));
        state.until = Some(later(now, pause.min(LONGEST)));
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
