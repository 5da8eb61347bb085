//! Forwards queries to the pod's resolvers, and returns their replies.
//!
//! A query passes through three stages: the cache, if that is configured; the queries in flight, which
//! may already contain the same one; the servers of `resolv.conf`. Messages pass unchanged except for id,
//! question, EDNS options and, from the cache, TTLs, so nothing unknown is damaged. Waiting clients,
//! sockets, time and the cache are bounded.
//!
//! By default the cache answers nothing: a workload that repeats a query expects recent changes, such as
//! new pods of a headless service, and clusters leave their own names uncached for that reason. A stale
//! answer takes the place of a failure only if that is configured: its address may belong to another pod
//! by now, and a client that learns of the failure retries.

pub mod cache;
mod in_flight;
mod message;
mod probe;
pub mod resolv_conf;
mod servers;
mod upstream;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

use self::cache::{Cache, Lookup};
use self::in_flight::{InFlight, NotForwarded};
use self::message::{Query, Reply};
use self::servers::Servers;
use self::upstream::Upstream;
use super::metrics::ForwardMetrics as Metrics;
use super::{Forward, Transport};
use crate::metrics::Registry;
use crate::runtime::clock::after;
use crate::runtime::duration::scaled;

/// Time limit of servers if there is a stale answer. Source: RFC 8767, section 5.
const STALE_WAIT: Duration = Duration::from_millis(1800);

/// Settings of forwarding.
#[derive(Clone, Debug, Default)]
pub struct Config {
    pub resolv_conf: PathBuf,
    /// Sends each query to all servers at once.
    pub parallel: bool,
    /// Time limit of a query with all its attempts.
    pub timeout: Duration,
    /// Addresses of this agent's own DNS server.
    pub listen_addresses: Vec<SocketAddr>,
    pub cache: cache::Config,
}

/// Forwards queries. Clones share everything.
#[derive(Clone, Debug)]
pub struct Forwarder(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    servers: Servers,
    timeout: Duration,
    /// `None` if the configuration stores nothing.
    cache: Option<Mutex<Cache>>,
    in_flight: InFlight,
    upstream: Upstream,
    metrics: Metrics,
    is_failing: AtomicBool,
}

impl Forwarder {
    pub fn new(config: Config, registry: &Registry) -> Self {
        let metrics = Metrics::new(registry);
        let cache = Some(config.cache).filter(cache::Config::is_enabled);
        Self(Arc::new(Inner {
            servers: Servers::new(config.resolv_conf, config.listen_addresses),
            timeout: config.timeout,
            cache: cache.map(|config| Mutex::new(Cache::new(config))),
            in_flight: InFlight::default(),
            upstream: Upstream::new(config.parallel, config.timeout, metrics.clone()),
            metrics,
            is_failing: AtomicBool::new(false),
        }))
    }
}

impl Forward for Forwarder {
    async fn forward(&self, query: Bytes, transport: Transport) -> Option<Bytes> {
        let query = Query::parse(query)?;
        Some(query.restore(&self.0.forward(&query, transport).await?))
    }
}

impl Inner {
    /// Returns a fresh reply from the cache, or a server's reply, or a stale one instead of none or of a failure.
    async fn forward(&self, query: &Query, transport: Transport) -> Option<Reply> {
        let stale = match self.look_up(query) {
            Lookup::Fresh(reply) => return Some(reply),
            Lookup::Stale(reply) => Some(reply),
            Lookup::Miss => None,
        };
        let timeout = match stale {
            Some(_) => STALE_WAIT.min(scaled(self.timeout, 0.8)),
            None => self.timeout,
        };
        let reply = self.ask_once(query, transport, timeout).await;
        if stale.is_some() && reply.as_ref().is_none_or(Reply::is_failure) {
            self.metrics.cache.with(["stale"]).inc();
            return stale;
        }
        reply
    }

    /// Asks the servers, or waits for their reply if another client's query is in flight.
    async fn ask_once(
        &self,
        query: &Query,
        transport: Transport,
        timeout: Duration,
    ) -> Option<Reply> {
        let servers = self.servers.current();
        let slot = match self.in_flight.join(query, transport) {
            Ok(slot) => slot,
            Err(NotForwarded { label, reason }) => {
                tracing::debug!(target: "dns", "not forwarding a query: {reason}");
                self.metrics.refused.with([label]).inc();
                return None;
            }
        };
        let answer = slot.query.answer.get_or_init(async || {
            self.metrics.requests.inc();
            let started = Instant::now();
            let deadline = after(timeout);
            let upstream = &self.upstream;
            let mut reply = upstream.ask(query, &slot.query, &servers, transport, deadline).await;
            // A server that does not support EDNS is asked again without it.
            if let Some(plain) = reply.as_ref().and_then(|reply| query.without_edns(reply)) {
                reply = upstream.ask(&plain, &slot.query, &servers, transport, deadline).await;
            }
            self.metrics.duration.observe(started.elapsed().as_secs_f64());
            self.record(query, reply.as_ref());
            reply
        });
        answer.await.clone()
    }

    /// Looks for a reply in the cache, and counts hits and misses.
    fn look_up(&self, query: &Query) -> Lookup {
        let (Some(cache), Some(key)) = (&self.cache, query.cache_key()) else {
            return Lookup::Miss;
        };
        let lookup = cache.lock().get(&key, Instant::now());
        let result = if matches!(lookup, Lookup::Fresh(_)) { "hit" } else { "miss" };
        self.metrics.cache.with([result]).inc();
        lookup
    }

    /// Stores a reply. Counts failures, and logs the first one of consecutive failures.
    fn record(&self, query: &Query, reply: Option<&Reply>) {
        let was_failing = self.is_failing.swap(reply.is_none(), Ordering::Relaxed);
        let Some(reply) = reply else {
            self.metrics.failures.inc();
            if !was_failing {
                tracing::info!(target: "dns", "all upstream failed");
            }
            return;
        };
        if let Some(cache) = &self.cache
            && let Some(key) = query.cache_key()
        {
            cache.lock().put(key, reply, Instant::now());
        }
    }
}

#[cfg(test)]
impl Forwarder {
    fn cache_size(&self) -> (usize, usize) {
        let cache = self.0.cache.as_ref();
        cache.map_or((0, 0), |cache| cache.lock().size())
    }
}

#[cfg(test)]
mod tests;
