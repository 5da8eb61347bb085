//! Decides what a cluster waits for before Envoy gets it, and resolves the host names of DNS clusters.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::net::lookup_host;
use tokio::time::{Instant, sleep};

use super::{Discovery, Offer, OnDemand};
use crate::xds::ledger::{State, Type};
use crate::xds::wire::NameDigest;
use crate::xds::{ENDPOINTS, SECRET};

/// The time after which an error of a lookup means that no resolver has answered.
const ANSWER: Duration = Duration::from_secs(1);
/// The time between two lookups of a name for which no resolver answers.
const PAUSE: Duration = Duration::from_secs(5);
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

/// The lookups for DNS clusters that are held.
#[derive(Default)]
pub(super) struct Lookups {
    running: FuturesUnordered<BoxFuture<'static, (NameDigest, NameDigest)>>,
    waiting: Vec<(NameDigest, NameDigest, Vec<String>)>,
    /// The version of each cluster whose host names have been resolved.
    done: HashMap<NameDigest, NameDigest>,
}

impl Lookups {
    fn start(&mut self, cluster: NameDigest, version: NameDigest, hosts: Vec<String>) {
        self.waiting.push((cluster, version, hosts));
        self.fill();
    }

    fn fill(&mut self) {
        while self.running.len() < MAX_LOOKUPS
            && let Some((cluster, version, hosts)) = self.waiting.pop()
        {
            self.running.push(Box::pin(async move {
                for host in hosts {
                    resolve(&host).await;
                }
                (cluster, version)
            }));
        }
    }

    /// Waits for the end of a lookup. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<NameDigest> {
        let (cluster, version) = self.running.next().await?;
        self.done.insert(cluster, version);
        self.fill();
        Some(version)
    }
}

/// Waits until a resolver has answered for a name. An answer that the name does not exist, or a failure, is enough: Envoy
/// gets the same, and does not wait.
async fn resolve(host: &str) {
    loop {
        let begin = Instant::now();
        if lookup_host((host, 0)).await.is_ok() || begin.elapsed() < ANSWER {
            return;
        }
        sleep(PAUSE).await;
    }
}

impl OnDemand {
    /// Returns what a cluster waits for. Before Envoy is ready, no request waits for clusters, and none is held.
    pub(super) fn need(&mut self, state: &mut State, cluster: &Offer) -> Option<Need> {
        if !self.is_ready {
            return None;
        }
        if let Discovery::Endpoints(name) = &cluster.facts.discovery {
            let digest = NameDigest::of(name.as_bytes());
            if state.newest(self.cache.pid(), Type::ENDPOINTS, digest).is_none() {
                if self.subscribed.insert(digest) {
                    self.subscribe(ENDPOINTS, name, false);
                }
                return Some(Need::Endpoints(digest));
            }
        }
        for name in &cluster.facts.secrets {
            let digest = NameDigest::of(name.as_bytes());
            if !self.secrets.contains(&digest) {
                if self.awaited_secrets.insert(digest, name.clone()).is_none() {
                    self.subscribe(SECRET, name, false);
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
                    self.lookups.start(cluster.digest, version, hosts.clone());
                }
                return Some(Need::Lookup(version));
            }
        }
        None
    }
}
