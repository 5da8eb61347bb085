//! Passes questions on to the resolvers the machine was given, and brings back their replies.
//!
//! A query goes through: the cache, if the configuration lets it answer; the queries under way,
//! where the same one may be waited for; the servers of `resolv.conf`. Messages are passed on as
//! they are but for id, question, OPT record and, from the cache, TTLs: what is not understood
//! cannot be damaged. Everything that grows is bounded: who waits, sockets, time, what is kept.
//!
//! By default nothing is answered from the cache: a workload that asks again expects to see what has
//! changed since, such as the pods of a headless service, and clusters leave their own names
//! uncached for that reason. Nor is an old answer given in place of a failure unless that is asked
//! for: its address may belong to another pod by now, and who hears of the failure asks again.
//!
//! Does not answer anything of its own, nor cut replies to what a client can take.

mod attempt;
pub mod cache;
mod exchange;
mod health;
mod in_flight;
mod metrics;
mod query;
mod random;
mod reply;
pub mod resolv_conf;
mod servers;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use self::cache::{Cache, Found};
use self::exchange::{Exchange, Manner};
use self::in_flight::{Flight, InFlight};
use self::metrics::Metrics;
use self::query::Query;
use self::reply::Reply;
use self::servers::Watched;
use super::{Forward, Transport};
use crate::metrics::Registry;

/// Queries that may wait for an answer at one time.
const MAX_WAITING: usize = 4096;

/// How questions are passed on.
#[derive(Clone, Debug)]
pub struct Config {
    pub resolv_conf: PathBuf,
    /// All servers are asked at once.
    pub parallel: bool,
    /// What a question may take, with all its tries.
    pub timeout: Duration,
    /// Where this agent answers DNS itself.
    pub own_addresses: Vec<SocketAddr>,
    pub cache: cache::Config,
}

/// Passes questions on. Clones share everything.
#[derive(Clone, Debug)]
pub struct Forwarder(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    servers: Watched,
    parallel: bool,
    timeout: Duration,
    /// None where nothing is to be kept.
    cache: Option<Mutex<Cache>>,
    in_flight: InFlight,
    exchange: Exchange,
    metrics: Metrics,
    is_failing: AtomicBool,
}

impl Forwarder {
    pub fn new(config: Config, registry: &Registry) -> Self {
        let metrics = Metrics::new(registry);
        let cache = Some(config.cache).filter(cache::Config::keeps);
        Self(Arc::new(Inner {
            servers: Watched::new(config.resolv_conf, config.own_addresses),
            parallel: config.parallel,
            timeout: config.timeout,
            cache: cache.map(|config| Mutex::new(Cache::new(config))),
            in_flight: InFlight::new(MAX_WAITING),
            exchange: Exchange::new(config.timeout, metrics.clone()),
            metrics,
            is_failing: AtomicBool::new(false),
        }))
    }
}

#[cfg(test)]
impl Forwarder {
    fn kept(&self) -> (usize, usize) {
        self.0.cache().map_or((0, 0), |cache| cache.size())
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
        let servers = self.servers.current();
        let transport = if servers.use_tcp {
            Transport::Tcp
        } else {
            transport
        };
        let stale = match self.look_up(query) {
            Found::Fresh(reply) => return Some(reply),
            Found::Stale(reply) => Some(reply),
            Found::Nothing => None,
        };
        let manner = Manner {
            transport,
            is_parallel: self.parallel,
            limit: match stale {
                Some(_) => self.exchange.patience(&servers.addresses, self.timeout),
                None => self.timeout,
            },
        };
        let reply = self.answer(query, &servers.addresses, manner).await;
        reply.or_else(|| {
            stale.as_ref()?;
            self.metrics.cache.with(["stale"]).inc();
            stale
        })
    }

    /// What the servers say, or have been asked to say by somebody else.
    async fn answer(&self, query: &Query, servers: &[SocketAddr], manner: Manner) -> Option<Reply> {
        let mut key = query.key();
        key.push(manner.transport as u8);
        let seat = match self.in_flight.join(key, query.id(), query.len()) {
            Ok(seat) => seat,
            Err(reason) => {
                tracing::debug!(target: "dns", "not forwarding a query: {reason}");
                self.metrics.refused.with([reason.label()]).inc();
                return None;
            }
        };
        if !seat.is_first {
            self.metrics.merged.inc();
        }
        let flight = seat.flight();
        let outcome = flight
            .outcome
            .get_or_init(|| self.ask(query, flight, servers, manner));
        outcome.await.clone()
    }

    async fn ask(
        &self,
        query: &Query,
        flight: &Flight,
        servers: &[SocketAddr],
        manner: Manner,
    ) -> Option<Reply> {
        self.metrics.requests.inc();
        let started = Instant::now();
        let reply = self.exchange.ask(query, flight, servers, manner).await;
        let taken = Instant::now() - started;
        self.metrics.duration.observe(taken.as_secs_f64());
        self.note(reply.is_none());
        if let (Some(reply), Some(mut cache), Some(key)) = (&reply, self.cache(), query.cache_key())
        {
            cache.put(key, reply, Instant::now());
        }
        reply
    }

    fn look_up(&self, query: &Query) -> Found {
        let (Some(mut cache), Some(key)) = (self.cache(), query.cache_key()) else {
            return Found::Nothing;
        };
        let found = cache.get(&key, Instant::now());
        let result = match found {
            Found::Fresh(_) => "hit",
            Found::Stale(_) | Found::Nothing => "miss",
        };
        self.metrics.cache.with([result]).inc();
        found
    }

    /// Says so when failures begin, and not for each.
    fn note(&self, is_failure: bool) {
        if is_failure {
            self.metrics.failures.inc();
        }
        let was_failing = self.is_failing.swap(is_failure, Ordering::Relaxed);
        if is_failure && !was_failing {
            tracing::info!(target: "dns", "all upstream failed");
        }
    }

    fn cache(&self) -> Option<MutexGuard<'_, Cache>> {
        let cache = self.cache.as_ref()?;
        Some(cache.lock())
    }
}
