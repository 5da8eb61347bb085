//! Follows Envoy's answers to the agent's responses, and what is due after a time.

use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::endpoint::v3::ClusterLoadAssignment;
use envoy_types::pb::envoy::service::discovery::v3 as discovery;
use envoy_types::pb::google::protobuf::Any;
use futures_util::future::OptionFuture;
use prost::Message;
use tokio::time::{Instant, sleep_until};

use super::OnDemand;
use super::need::{Lookup, Need};
use crate::problem::{Code, Problem};
use crate::runtime::clock::{after, later};
use crate::xds::ledger::Type;
use crate::xds::request::{Request, frame, shortened};
use crate::xds::wire::NameDigest;
use crate::xds::{CLUSTER, ENDPOINTS};

/// The time after which a request of Envoy for endpoints gets an empty answer.
const ENDPOINTS_LIMIT: Duration = Duration::from_secs(1);
/// The time after which a response of clusters that Envoy has not answered is taken for one that warms.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// The time after which a cluster that was withdrawn is offered again.
const WITHDRAWN: Duration = Duration::from_secs(30);
/// The time after which Envoy is told again that clusters do not exist. It asks for a name once only.
const REPEAT: Duration = Duration::from_millis(200);
/// The most names that are repeated. Requests to others wait for the timeout of the filter.
const MAX_REPEATED: usize = 1000;

/// A response of the agent with clusters, for which Envoy owes an answer.
pub(super) struct Answer {
    pub(super) nonce: String,
    /// The nonce of istiod's response that it is a part of.
    pub(super) response: Option<String>,
    pub(super) sent: Instant,
    /// The clusters that Envoy did not have, if it was ready.
    pub(super) new: Vec<Bytes>,
    /// The clusters whose endpoints Envoy gets again if it is late: all new clusters or, if there are none, one changed
    /// cluster, because Envoy's answer for one tells whether clusters warm.
    pub(super) repeated: Vec<NameDigest>,
    pub(super) kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    Clusters,
    /// It has waited for long. Envoy has got endpoints of its clusters again, with this nonce: if it answers those first,
    /// clusters warm.
    Late(String),
    /// Its new clusters warm, and have been withdrawn.
    Withdrawn,
    /// Names that do not exist, or that are withdrawn.
    Removal,
}

/// What [`OnDemand::next`] has waited for.
pub(in crate::xds) enum Event {
    /// A lookup has ended. True if a resolver has answered.
    Lookup(Lookup, bool),
    /// Something is due.
    Time,
}

impl OnDemand {
    /// Takes Envoy's answer to a response with clusters, and passes it on to istiod. The answer to a part of a response is
    /// the answer to the response; a cluster that is rejected at first use rejects istiod's newest one.
    pub(super) fn read_answer(&mut self, request: &Request) {
        let found = self.answers.iter().position(|it| it.nonce == request.nonce);
        // Envoy answers in order.
        let Some(answer) = found.and_then(|index| self.answers.drain(..=index).next_back()) else {
            return;
        };
        let rejection = request.rejection.as_deref().map(shortened);
        if let Some(nonce) = &answer.response {
            self.send_ack_or_nack(CLUSTER, nonce, rejection.as_deref());
        } else if let (Some(nonce), Some(reason)) = (self.newest.clone(), &rejection) {
            self.send_ack_or_nack(CLUSTER, &nonce, Some(reason));
        }
        let cache = self.cache.clone();
        let mut state = cache.lock();
        let mut is_denied = false;
        for text in answer.new {
            let name = NameDigest::of(&text);
            let accepted = &mut state.view(cache.pid()).of(Type::CLUSTER).accepted;
            if answer.kind == Kind::Withdrawn {
                accepted.remove(&name);
            } else if rejection.is_some() && !accepted.contains(&name) {
                // A later version is offered again. Without an accepted one, requests do not wait for it.
                self.sent.remove(&name);
                if state.catalog.unaccepted.contains(&name) && self.asked.contains_key(&name) {
                    self.absent.insert(name, text);
                    is_denied = true;
                }
            }
        }
        drop(state);
        // Otherwise the next repetition follows its interval.
        if is_denied {
            self.deny_absent();
        }
    }

    /// Says that clusters do not exist.
    pub(super) fn deny_absent(&mut self) {
        if self.absent.is_empty() {
            self.repeat_absent_at = None;
            return;
        }
        self.repeat_absent_at = Some(after(REPEAT));
        if self.answers.iter().all(|it| it.kind != Kind::Removal) {
            if self.absent.len() > MAX_REPEATED {
                self.note_limit();
            }
            let names: Vec<_> = self.absent.values().take(MAX_REPEATED).cloned().collect();
            self.send_removal(&names);
        }
    }

    /// Sends Envoy a removal that does not concern the ledger.
    fn send_removal(&mut self, names: &[Bytes]) {
        let nonce = self.next_nonce();
        let removed = names.iter().map(|name| String::from_utf8_lossy(name).into_owned());
        let response = discovery::DeltaDiscoveryResponse {
            type_url: CLUSTER.to_owned(),
            nonce: nonce.clone(),
            removed_resources: removed.collect(),
            ..Default::default()
        };
        self.to_envoy.push(frame(&response.encode_to_vec()));
        self.answers.push_back(Answer {
            nonce,
            response: None,
            sent: Instant::now(),
            new: Vec::new(),
            repeated: Vec::new(),
            kind: Kind::Removal,
        });
    }

    /// Waits until something is due, or a lookup has ended. Cancel safe.
    pub(in crate::xds) async fn next(on_demand: &mut Option<Self>) -> Option<Event> {
        let on_demand = on_demand.as_mut()?;
        let due = OptionFuture::from(on_demand.due().map(sleep_until));
        tokio::select! {
            Some((lookup, is_answered)) = on_demand.lookups.next() => {
                Some(Event::Lookup(lookup, is_answered))
            }
            Some(()) = due => Some(Event::Time),
            else => None,
        }
    }

    /// Handles what [`OnDemand::next`] has returned.
    pub(in crate::xds) fn handle(&mut self, event: Event) {
        match event {
            Event::Lookup(lookup, is_answered) => self.end_lookup(lookup, is_answered),
            Event::Time => self.tick(),
        }
    }

    fn due(&self) -> Option<Instant> {
        if !self.is_ready {
            return self.repeat_absent_at;
        }
        let open = self.open.values().map(|(_, since)| later(*since, ENDPOINTS_LIMIT));
        let late = self.last_sent().filter(|_| self.open.is_empty());
        let late = late.map(|it| later(it, ANSWER_LIMIT));
        let retries = self.held.values().filter_map(|need| match need {
            Need::Time(at) => Some(*at),
            _ => None,
        });
        open.chain(late)
            .chain(retries)
            .chain(self.repeat_absent_at)
            .chain(self.waiting_listeners.front().map(|it| it.until))
            .min()
    }

    fn tick(&mut self) {
        let now = Instant::now();
        let overdue = |since: Instant, limit| later(since, limit) <= now;
        let open: Vec<_> = self
            .open
            .extract_if(|_, (_, since)| overdue(*since, ENDPOINTS_LIMIT))
            .map(|(_, (name, _))| name)
            .collect();
        if !open.is_empty() {
            self.observer.metrics.on_demand.timeouts.with(["endpoints"]).add(open.len() as u64);
            self.send_no_endpoints(&open);
            // Their clusters have waited for these until now.
            self.answers.iter_mut().for_each(|it| it.sent = now);
        }
        if self.open.is_empty() && self.last_sent().is_some_and(|it| overdue(it, ANSWER_LIMIT)) {
            self.check_answers();
        }
        let is_due = |need: &Need| matches!(need, Need::Time(at) if *at <= now);
        if self.held.values().any(is_due) {
            self.release(is_due);
        }
        if self.repeat_absent_at.is_some_and(|at| at <= now) {
            self.deny_absent();
        }
    }

    /// Returns the time of the newest response with clusters that Envoy has not answered. Envoy may answer none of them while
    /// it loads the clusters in one.
    fn last_sent(&self) -> Option<Instant> {
        self.answers.iter().filter(|it| it.kind == Kind::Clusters).map(|it| it.sent).max()
    }

    /// Sends Envoy endpoints of the clusters that it has not answered. This is what a new cluster may wait for, and an Envoy
    /// with little CPU time has answered the clusters before it answers these.
    fn check_answers(&mut self) {
        let names: Vec<_> = self
            .answers
            .iter()
            .filter(|it| it.kind == Kind::Clusters)
            .flat_map(|it| &it.repeated)
            .copied()
            .collect();
        let cache = self.cache.clone();
        let nonce = self.give_endpoints(&mut cache.lock(), &names).unwrap_or_default();
        for answer in self.answers.iter_mut().filter(|it| it.kind == Kind::Clusters) {
            answer.kind = Kind::Late(nonce.clone());
        }
        if nonce.is_empty() {
            self.withdraw(&nonce);
        }
    }

    /// Withdraws the new clusters that warm: Envoy has answered the endpoints with this nonce, which were sent after the
    /// clusters, and not the clusters. The nonce is empty if there were no endpoints to send. Envoy asks for no cluster
    /// while one warms.
    pub(super) fn withdraw(&mut self, nonce: &str) {
        let mut new = Vec::new();
        let mut is_stuck = false;
        for answer in &mut self.answers {
            if matches!(&answer.kind, Kind::Late(endpoints) if endpoints == nonce) {
                answer.kind = Kind::Withdrawn;
                new.extend_from_slice(&answer.new);
                is_stuck = true;
            }
        }
        if !is_stuck {
            return;
        }
        let mut found = "no answer for 1 s".to_owned();
        if !new.is_empty() {
            found += "; new clusters: ";
            found += &shortened(&String::from_utf8_lossy(&new.join(&b", "[..])));
        }
        let problem = Problem::new(Code::OnDemandClusterWarms, "Envoy", found);
        tracing::warn!(target: "xdsproxy", id = self.id, "{problem}");
        self.observer.metrics.on_demand.timeouts.with(["clusters"]).inc();
        // Only changed clusters warm: Envoy uses their former versions.
        if new.is_empty() {
            return;
        }
        self.send_removal(&new);
        self.progress.withdraw(&new);
        for name in new.iter().map(|name| NameDigest::of(name)) {
            self.sent.remove(&name);
            self.held.insert(name, Need::Time(after(WITHDRAWN)));
        }
    }

    /// Answers requests for endpoints that istiod does not answer, because no cluster may stay in warming.
    fn send_no_endpoints(&mut self, names: &[Bytes]) {
        let resources = names.iter().map(|name| {
            let name = String::from_utf8_lossy(name).into_owned();
            let empty = ClusterLoadAssignment { cluster_name: name.clone(), ..Default::default() };
            discovery::Resource {
                name,
                resource: Some(Any {
                    type_url: ENDPOINTS.to_owned(),
                    value: empty.encode_to_vec(),
                }),
                ..Default::default()
            }
        });
        let response = discovery::DeltaDiscoveryResponse {
            resources: resources.collect(),
            type_url: ENDPOINTS.to_owned(),
            nonce: self.next_nonce(),
            ..Default::default()
        };
        self.to_envoy.push(frame(&response.encode_to_vec()));
    }
}
