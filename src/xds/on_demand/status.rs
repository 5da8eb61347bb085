//! Counts what the debug page, the metrics and the doctor show of clusters on demand.

use std::collections::HashMap;

use bytes::Bytes;
use serde::Serialize;
use tokio::time::Instant;

use super::need::Need;
use super::{Discovery, OUTBOUND, Offer, OnDemand, is_mentioned};
use crate::problem::{Code, Problem};
use crate::xds::ledger::{State, Type};
use crate::xds::wire::NameDigest;

/// The most names in a list of a snapshot.
const MAX_NAMES: usize = 10;

/// The clusters of the newest Envoy, which gets clusters on demand.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OnDemandSnapshot {
    /// Clusters that istiod has sent to the agent.
    pub known: usize,
    /// Clusters that the agent has sent to Envoy: the pinned and the used ones.
    pub sent: usize,
    /// The sent clusters that Envoy cannot discover, by the reason.
    pub pinned: Pinned,
    /// The sent clusters that requests have needed.
    pub used: usize,
    /// Clusters that are not sent yet, by what they wait for.
    pub held: Held,
    /// Names that Envoy has asked for.
    pub asked: usize,
    /// Names that Envoy has asked for, and that istiod does not have or Envoy has rejected.
    pub absent: usize,
    /// The first of these names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub absent_names: Vec<String>,
    /// The first names of withdrawn clusters, which Envoy has not loaded within a second.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub withdrawn_names: Vec<String>,
    /// Envoy's reason to reject listeners that the agent has rewritten. It has istiod's in place of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_listeners: Option<String>,
}

/// Numbers of clusters that Envoy gets without a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pinned {
    /// Clusters other than `outbound|…` with endpoints over ADS.
    pub kind: usize,
    /// Clusters that a listener, an extension, a mirror or another cluster names.
    pub named: usize,
    /// Clusters with a secret over ADS.
    pub secret: usize,
}

/// Numbers of clusters that wait.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Held {
    pub endpoints: usize,
    pub secret: usize,
    pub lookup: usize,
    /// Clusters that Envoy has not loaded within a second. They are offered again 30 s later.
    pub withdrawn: usize,
}

/// The reason why Envoy has a cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reason {
    Kind,
    Secret,
    Named,
    Used,
}

/// What is known of the clusters of a stream beyond the fields of [`OnDemand`].
#[derive(Debug, Default)]
pub(super) struct Progress {
    reasons: HashMap<NameDigest, Reason>,
    /// The times at which Envoy has asked for clusters that it does not have yet.
    waiting: HashMap<NameDigest, Instant>,
    /// The names of the clusters that were withdrawn.
    withdrawn: HashMap<NameDigest, Bytes>,
}

impl OnDemandSnapshot {
    /// Returns the numbers of clusters by their state, for the metric.
    pub(in crate::xds) fn by_state(&self) -> [(&'static str, usize); 7] {
        let Self { known, sent, pinned, used, held, absent, .. } = self;
        let waiting = held.endpoints + held.secret + held.lookup;
        [
            ("known", *known),
            ("sent", *sent),
            ("pinned", pinned.kind + pinned.named + pinned.secret),
            ("used", *used),
            ("held", waiting),
            ("withdrawn", held.withdrawn),
            ("absent", *absent),
        ]
    }

    /// Lists what an operator has to repair.
    pub fn problems(&self) -> Vec<Problem> {
        let names = self.withdrawn_names.join(", ");
        let withdrawn = (self.held.withdrawn > 0)
            .then(|| Problem::new(Code::OnDemandClusterWarms, "clusters on demand", names));
        let rejected = self.rejected_listeners.as_ref().map(|reason| {
            Problem::new(Code::OnDemandListenerRefused, "clusters on demand", reason)
        });
        withdrawn.into_iter().chain(rejected).collect()
    }

    /// Tells clusters that Envoy has not loaded from names that do not exist.
    pub fn summary(&self) -> String {
        let Self { known, sent, absent, absent_names, .. } = self;
        let not_loaded = known.saturating_sub(*sent);
        let mut text = format!(
            "{known} clusters exist, Envoy has {sent} of them and loads the other {not_loaded} when they are needed"
        );
        if *absent > 0 {
            let more = if absent_names.len() < *absent { ", …" } else { "" };
            let names = absent_names.join(", ");
            text += &format!("; requests need {absent} that do not exist: {names}{more}");
        }
        text
    }
}

impl Progress {
    /// Notes that Envoy has asked for a cluster.
    pub(super) fn ask(&mut self, name: NameDigest) {
        self.waiting.entry(name).or_insert_with(Instant::now);
    }

    /// Notes that Envoy does not ask for a cluster any more.
    pub(super) fn forget(&mut self, name: NameDigest) {
        self.waiting.remove(&name);
    }

    pub(super) fn withdraw(&mut self, names: &[Bytes]) {
        self.withdrawn.extend(names.iter().map(|name| (NameDigest::of(name), name.clone())));
    }
}

impl OnDemand {
    /// Notes that a cluster is on its way to Envoy, or that Envoy has it.
    pub(super) fn note_sent(&mut self, state: &State, cluster: &Offer) {
        let is_outbound = cluster.name.starts_with(OUTBOUND.as_bytes());
        let reason = match &cluster.facts.discovery {
            Discovery::Endpoints(_) if !is_outbound => Reason::Kind,
            Discovery::Endpoints(_) if !cluster.facts.secrets.is_empty() => Reason::Secret,
            Discovery::Endpoints(_) if is_mentioned(state, cluster) => Reason::Named,
            Discovery::Endpoints(_) => Reason::Used,
            Discovery::Dns(_) | Discovery::Other => Reason::Kind,
        };
        self.progress.reasons.insert(cluster.digest, reason);
        if let Some(since) = self.progress.waiting.remove(&cluster.digest) {
            self.observer.metrics.on_demand.wait.observe(since.elapsed().as_secs_f64());
        }
    }

    /// Publishes a snapshot, unless a newer Envoy serves.
    pub(in crate::xds) fn publish(&mut self) {
        let cache = self.cache.clone();
        let mut state = cache.lock();
        if state.is_newest(cache.pid()) {
            state.catalog.snapshot = Some(self.snapshot(&state));
        }
    }

    fn snapshot(&mut self, state: &State) -> OnDemandSnapshot {
        let Progress { reasons, waiting, withdrawn } = &mut self.progress;
        reasons.retain(|name, _| self.sent.contains(name));
        waiting.retain(|name, _| !self.absent.contains_key(name));
        withdrawn.retain(|name, _| matches!(self.held.get(name), Some(Need::Time(_))));
        let count = |wanted| reasons.values().filter(|it| **it == wanted).count();
        let held = |wanted: fn(&Need) -> bool| self.held.values().filter(|it| wanted(it)).count();
        let is_unstored = |name: &&NameDigest| state.store.get(Type::CLUSTER, **name).is_none();
        let names = |names: &HashMap<NameDigest, Bytes>| {
            let texts = names.values().map(|name| String::from_utf8_lossy(name).into_owned());
            texts.take(MAX_NAMES).collect()
        };
        OnDemandSnapshot {
            // A cluster is stored when Envoy has accepted it.
            known: state.store.count(Type::CLUSTER) + self.sent.iter().filter(is_unstored).count(),
            sent: self.sent.len(),
            pinned: Pinned {
                kind: count(Reason::Kind),
                named: count(Reason::Named),
                secret: count(Reason::Secret),
            },
            used: count(Reason::Used),
            held: Held {
                endpoints: held(|it| matches!(it, Need::Endpoints(_))),
                secret: held(|it| matches!(it, Need::Secret(_))),
                lookup: held(|it| matches!(it, Need::Lookup(_))),
                withdrawn: held(|it| matches!(it, Need::Time(_))),
            },
            asked: self.asked.len(),
            absent: self.absent.len(),
            absent_names: names(&self.absent),
            withdrawn_names: names(withdrawn),
            rejected_listeners: state.catalog.rejected_listeners.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_and_summary_distinguish_unloaded_clusters_from_absent_ones() {
        let mut snapshot = OnDemandSnapshot { known: 30, sent: 4, ..Default::default() };
        assert_eq!(snapshot.problems(), []);
        let expected =
            "30 clusters exist, Envoy has 4 of them and loads the other 26 when they are needed";
        assert_eq!(snapshot.summary(), expected);
        (snapshot.absent, snapshot.absent_names) = (2, vec!["outbound|80||a.b".to_owned()]);
        let absent = "; requests need 2 that do not exist: outbound|80||a.b, …";
        assert_eq!(snapshot.summary(), format!("{expected}{absent}"));
        snapshot.held.withdrawn = 1;
        snapshot.withdrawn_names = vec!["outbound|80||c.d".to_owned()];
        snapshot.rejected_listeners = Some("no such filter".to_owned());
        let problems = snapshot.problems();
        let found: Vec<_> = problems.iter().map(|it| (it.code.name(), &*it.found)).collect();
        let warms = ("ON_DEMAND_CLUSTER_WARMS", "outbound|80||c.d");
        assert_eq!(found, [warms, ("ON_DEMAND_LISTENER_REFUSED", "no such filter")]);
    }
}
