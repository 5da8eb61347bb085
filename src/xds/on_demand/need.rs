//! Decides what a cluster waits for before Envoy gets it, and resolves the host names of DNS clusters.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::net::lookup_host;
use tokio::time::Instant;

use super::{Discovery, Offer, OnDemand};
use crate::xds::ledger::{State, Type};
use crate::xds::wire::NameDigest;
use crate::xds::{ENDPOINTS, SECRET};

/// The time after which an error of a lookup means that no resolver has answered.
const ANSWER: Duration = Duration::from_secs(1);
/// The most lookups at a time. Each has a thread.
const MAX_LOOKUPS: usize = 4;

/// What a cluster that is held waits for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Need {
    /// The endpoints of this name.
    Endpoints(NameDigest),
    /// The secret of this name.
    Secret(NameDigest),
    /// The lookup of the host names in this version of the cluster.
    Lookup(NameDigest),
    /// The time at which a cluster that was withdrawn is offered again.
    Time(Instant),
}

/// The resources that clusters wait for and that the agent has not subscribed to, by type.
pub(super) type Missing = BTreeMap<&'static str, Vec<String>>;

/// The lookup of the host names in a version of a cluster.
pub(in crate::xds) struct Lookup {
    cluster: NameDigest,
    version: NameDigest,
    hosts: Vec<String>,
}

/// The lookups for DNS clusters that are held.
#[derive(Default)]
pub(super) struct Lookups {
    running: FuturesUnordered<BoxFuture<'static, (Lookup, bool)>>,
    waiting: VecDeque<Lookup>,
    /// The version of each cluster whose host names have been resolved.
    done: HashMap<NameDigest, NameDigest>,
}

impl Lookups {
    fn start(&mut self, lookup: Lookup) {
        self.waiting.push_back(lookup);
        self.fill();
    }

    fn fill(&mut self) {
        while self.running.len() < MAX_LOOKUPS
            && let Some(lookup) = self.waiting.pop_front()
        {
            self.running.push(Box::pin(async move {
                for host in &lookup.hosts {
                    if !is_answered(host).await {
                        return (lookup, false);
                    }
                }
                (lookup, true)
            }));
        }
    }

    /// Waits for the end of a lookup. Returns true with it if a resolver has answered for all names. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<(Lookup, bool)> {
        let ended = self.running.next().await?;
        self.fill();
        Some(ended)
    }
}

/// Returns true if a resolver answers for a name. An answer that the name does not exist, or a failure, is enough: Envoy
/// gets the same, and does not wait.
async fn is_answered(host: &str) -> bool {
    let begin = Instant::now();
    lookup_host((host, 0)).await.is_ok() || begin.elapsed() < ANSWER
}

impl OnDemand {
    /// Takes a lookup that has ended. A name for which no resolver answers is looked up again after the others, unless a
    /// newer version of the cluster has come.
    pub(super) fn end_lookup(&mut self, lookup: Lookup, is_answered: bool) {
        if is_answered {
            self.lookups.done.insert(lookup.cluster, lookup.version);
            self.release(|need| *need == Need::Lookup(lookup.version));
        } else if self.held.get(&lookup.cluster) == Some(&Need::Lookup(lookup.version)) {
            self.lookups.start(lookup);
        }
    }

    /// Returns the first thing that a cluster waits for; it is called again when that has come. Adds to `missing` what the
    /// agent must subscribe to, and starts lookups. Before Envoy is ready, no cluster is held, because no request waits
    /// for one.
    pub(super) fn need(
        &mut self,
        state: &mut State,
        cluster: &Offer,
        missing: &mut Missing,
    ) -> Option<Need> {
        if !self.is_ready {
            return None;
        }
        if let Discovery::Endpoints(name) = &cluster.facts.discovery {
            let digest = NameDigest::of(name.as_bytes());
            if state.newest(self.cache.pid(), Type::ENDPOINTS, digest).is_none() {
                if self.subscribed.insert(digest) {
                    missing.entry(ENDPOINTS).or_default().push(name.clone());
                }
                return Some(Need::Endpoints(digest));
            }
        }
        for name in &cluster.facts.secrets {
            let digest = NameDigest::of(name.as_bytes());
            if !self.secrets.contains(&digest) {
                if self.awaited_secrets.insert(digest, name.clone()).is_none() {
                    missing.entry(SECRET).or_default().push(name.clone());
                }
                return Some(Need::Secret(digest));
            }
        }
        if let Discovery::Dns(hosts) = &cluster.facts.discovery
            && !hosts.is_empty()
        {
            let version = NameDigest::of(&cluster.field);
            if self.lookups.done.get(&cluster.digest) != Some(&version) {
                if self.held.get(&cluster.digest) != Some(&Need::Lookup(version)) {
                    let hosts = hosts.clone();
                    self.lookups.start(Lookup { cluster: cluster.digest, version, hosts });
                }
                return Some(Need::Lookup(version));
            }
        }
        None
    }
}
