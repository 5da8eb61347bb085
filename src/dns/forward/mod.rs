//! Forwards queries to the pod's resolvers, and brings back their replies.
//!
//! A query goes through: the cache, if the configuration lets it answer; the queries in flight, where
//! the same one may be waited for; the servers of `resolv.conf`. Messages are passed on as they are but
//! for id, question, options of EDNS and, from the cache, TTLs: what is not understood cannot be damaged.
//! Waiting clients, sockets, time and the cache are bounded.
//!
//! By default nothing is answered from the cache: a workload that asks again expects to see what has
//! changed since, such as the pods of a headless service, and clusters leave their own names uncached
//! for that reason. Nor is a stale answer given in place of a failure unless that is configured: its
//! address may belong to another pod by now, and a client that hears of the failure asks again.

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

use self::cache::{Cache, Found};
use self::in_flight::InFlight;
use self::message::{Query, Reply};
use self::servers::Servers;
use self::upstream::Upstream;
use super::metrics::ForwardMetrics as Metrics;
use super::{Forward, Transport};
use crate::metrics::Registry;

/// How long to wait for servers where a stale answer is at hand. Source: RFC 8767, section 5.
const STALE_WAIT: Duration = Duration::from_millis(1800);

/// How queries are forwarded.
#[derive(Clone, Debug, Default)]
pub struct Config {
    pub resolv_conf: PathBuf,
    /// All servers are asked at once.
    pub parallel: bool,
    /// What a query may take, with all its tries.
    pub timeout: Duration,
    /// Where this agent answers DNS itself.
    pub own_addresses: Vec<SocketAddr>,
    pub cache: cache::Config,
}

/// Forwards queries. Clones share everything.
#[derive(Clone, Debug)]
pub struct Forwarder(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    servers: Servers,
    timeout: Duration,
    /// `None` where nothing is to be kept.
    cache: Option<Mutex<Cache>>,
    in_flight: InFlight,
    upstream: Upstream,
    metrics: Metrics,
    is_failing: AtomicBool,
}

impl Forwarder {
    pub fn new(config: Config, registry: &Registry) -> Self {
        let metrics = Metrics::new(registry);
        let cache = Some(config.cache).filter(cache::Config::keeps);
        Self(Arc::new(Inner {
            servers: Servers::new(config.resolv_conf, config.own_addresses),
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
        let reply = self.0.forward(&query, transport).await?;
        Some(query.restore(&reply))
    }
}

impl Inner {
    async fn forward(&self, query: &Query, transport: Transport) -> Option<Reply> {
        let stale = match self.look_up(query) {
            Found::Fresh(reply) => return Some(reply),
            Found::Stale(reply) => Some(reply),
            Found::Nothing => None,
        };
        let timeout = match stale {
            Some(_) => STALE_WAIT.min(crate::duration::scaled(self.timeout, 0.8)),
            None => self.timeout,
        };
        let reply = self.answer(query, transport, timeout).await;
        if reply.is_none() && stale.is_some() {
            self.metrics.cache.with(["stale"]).inc();
        }
        reply.or(stale)
    }

    /// The servers' answer, which another client's query may be waiting for already.
    async fn answer(
        &self,
        query: &Query,
        transport: Transport,
        timeout: Duration,
    ) -> Option<Reply> {
        let servers = self.servers.current();
        let transport = match servers.use_tcp {
            true => Transport::Tcp,
            false => transport,
        };
        let slot = match self.in_flight.join(query, transport) {
            Ok(slot) => slot,
            Err((label, reason)) => {
                tracing::debug!(target: "dns", "not forwarding a query: {reason}");
                self.metrics.refused.with([label]).inc();
                return None;
            }
        };
        let ask = async || {
            self.metrics.requests.inc();
            let started = Instant::now();
            let servers = &servers.nameservers;
            let upstream = &self.upstream;
            let asking = upstream.ask(query, &slot.query, servers, transport, timeout);
            let mut reply = asking.await;
            if let Some(plain) = reply.as_ref().and_then(|reply| query.without_edns(reply)) {
                let left = timeout.saturating_sub(started.elapsed());
                let asking = upstream.ask(&plain, &slot.query, servers, transport, left);
                reply = asking.await;
            }
            let seconds = started.elapsed().as_secs_f64();
            self.metrics.duration.observe(seconds);
            self.note(query, reply.as_ref());
            reply
        };
        slot.query.answer.get_or_init(ask).await.clone()
    }

    fn look_up(&self, query: &Query) -> Found {
        let (Some(cache), Some(key)) = (&self.cache, query.cache_key()) else {
            return Found::Nothing;
        };
        let found = cache.lock().get(&key, Instant::now());
        let result = match found {
            Found::Fresh(_) => "hit",
            Found::Stale(_) | Found::Nothing => "miss",
        };
        self.metrics.cache.with([result]).inc();
        found
    }

    /// Keeps a reply, and logs when failures begin, not each.
    fn note(&self, query: &Query, reply: Option<&Reply>) {
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
    fn kept(&self) -> (usize, usize) {
        let cache = self.0.cache.as_ref();
        cache.map_or((0, 0), |cache| cache.lock().size())
    }
}

#[cfg(test)]
mod tests;
