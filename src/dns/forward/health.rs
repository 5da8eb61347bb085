//! Which servers answer.
//!
//! Servers are asked in random order. One that refuses, or leaves several queries in a row
//! unanswered, is asked last for a while; then one query tries it again. The while grows as long as
//! it fails, and the first answer ends it.
//!
//! Does not ask anybody, and never leaves a server out: when all fail, all are tried.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Lost packets do not make a bad server.
const MISSES: u32 = 3;

const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// How long one query may find out about a server on behalf of all.
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
        let mut failing = self.lock();
        failing.retain(|server, _| servers.contains(server));
        let mut order = servers.to_vec();
        fastrand::shuffle(&mut order);
        order.sort_by_key(|server| failing.get(server).and_then(|f| f.wait(now)));
        if let Some(probed) = order.first().and_then(|first| failing.get_mut(first))
            && probed.until.is_some()
        {
            probed.until = Some(now + PROBE);
        }
        order
    }

    pub(super) fn all_fail(&self, servers: &[SocketAddr], now: Instant) -> bool {
        let failing = self.lock();
        let fails = |server| failing.get(server).is_some_and(|f| f.wait(now).is_some());
        servers.iter().all(fails)
    }

    pub(super) fn answered(&self, server: SocketAddr) {
        if self
            .lock()
            .remove(&server)
            .is_some_and(|f| f.until.is_some())
        {
            tracing::info!(target: "dns", "DNS server {server} answers again");
        }
    }

    /// A query was not answered in time.
    pub(super) fn missed(&self, server: SocketAddr, now: Instant) {
        let mut failing = self.lock();
        let state = failing.entry(server).or_default();
        state.misses = state.misses.saturating_add(1);
        if state.misses >= MISSES {
            state.put_last(server, "does not answer", now);
        }
    }

    /// There is nobody to answer.
    pub(super) fn failed(&self, server: SocketAddr, now: Instant) {
        let mut failing = self.lock();
        let state = failing.entry(server).or_default();
        state.misses = state.misses.saturating_add(1).max(MISSES);
        state.put_last(server, "fails", now);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SocketAddr, Failing>> {
        // What a panic may have left behind is a wrong order.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Failing {
    /// When it may be asked early again; nothing when it may now.
    fn wait(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }

    fn put_last(&mut self, server: SocketAddr, why: &str, now: Instant) {
        let doublings = (self.misses - MISSES).min(5);
        let pause = SHORTEST.saturating_mul(1 << doublings).min(LONGEST);
        if self.until.is_none() {
            tracing::info!(target: "dns", "upstream failure: DNS server {server} {why}; asking it last");
        }
        self.until = Some(now + pause);
    }
}
