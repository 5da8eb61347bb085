//! Gives Envoy the clusters that it uses. All others stay in the ledger.
//!
//! An Envoy with every cluster of a large mesh needs memory for each, and CPU time for each change. With
//! `ISTIO_AGENT_ON_DEMAND_CLUSTERS`, the agent answers Envoy's requests for clusters itself. Envoy gets clusters that are
//! pinned ([`catalog`]: it cannot discover them), that an earlier Envoy has used, and that it asks for, which the filters
//! do that [`listener`] inserts. Endpoints, routes and other types are relayed.
//!
//! While a cluster warms, Envoy sends no request for clusters, so that each first request to another service would fail.
//! Therefore a cluster that would warm is held: until its endpoints are in the ledger, its host names have been resolved,
//! and its secrets have come ([`need`]).
//!
//! [`super::stream`] calls an [`OnDemand`] for each request and response of its types, and sends what is in `to_envoy` and
//! `to_istiod`.

mod answers;
mod catalog;
mod cluster;
mod listener;
#[cfg(test)]
mod listener_tests;
mod listeners;
mod mention;
mod need;
mod routes;
mod status;
#[cfg(test)]
mod tests;
mod version;

use std::collections::{HashMap, HashSet, VecDeque};

use bytes::Bytes;
use prost::Message;
use tokio::time::Instant;
use tonic::Status;

use super::interceptor::encode_request;
use super::ledger::rejected::head_and_rest;
use super::ledger::{EnvoyCache, Field, Response, State, Type};
use super::observe::Observer;
use super::request::{Request, Subscription, encode_subscription, frame, without_nonce};
use super::response::Received;
use super::wire::{NameDigest, ResourceField, Walker};
use super::{CLUSTER, ENDPOINTS, EXTENSION, LISTENER, Protocol, SECRET};
pub(super) use answers::Event;
use answers::{Answer, Kind};
pub(super) use catalog::Catalog;
use catalog::OUTBOUND;
use cluster::{ClusterFacts, Discovery};
use listeners::{Originals, Rewritten, WaitingListeners};
use need::{Lookups, Missing, Need};
pub use status::OnDemandSnapshot;
use status::Progress;

/// The beginning of the nonces of the agent's own responses. istiod uses UUIDs.
const NONCE: &str = "istio-agent/";

/// The most names that an Envoy may ask for, and the longest one in bytes.
const MAX_ASKED: usize = 4096;
const MAX_NAME: usize = 512;

/// The clusters of one Envoy, on one stream.
pub(super) struct OnDemand {
    cache: EnvoyCache,
    id: u32,
    observer: Observer,
    /// The number of the store when the stream began.
    store_number: usize,
    nonces: u64,
    has_begun: bool,
    has_said_limit: bool,
    /// True once Envoy has subscribed to endpoints on this stream.
    has_endpoints: bool,
    /// True once istiod has said which clusters exist.
    knows_clusters: bool,
    /// True once Envoy has got listeners, so that requests may wait for clusters.
    is_ready: bool,
    /// The newest nonce of istiod's responses with clusters.
    newest: Option<String>,
    /// The clusters that Envoy has, or that are on their way to it.
    sent: HashSet<NameDigest>,
    /// Clusters of the ledger that Envoy needs and does not have, which istiod is to send again.
    expected: HashMap<NameDigest, Bytes>,
    /// The names that Envoy has asked for.
    asked: HashMap<NameDigest, Bytes>,
    /// Those that do not exist, or that Envoy has rejected.
    absent: HashMap<NameDigest, Bytes>,
    repeat_absent_at: Option<Instant>,
    /// Clusters that would warm in Envoy.
    held: HashMap<NameDigest, Need>,
    lookups: Lookups,
    /// The responses with clusters that Envoy has not answered, in their order.
    answers: VecDeque<Answer>,
    /// The endpoints that are subscribed to at istiod on this stream.
    subscribed: HashSet<NameDigest>,
    /// Envoy's requests for endpoints that have no answer, with their times.
    open: HashMap<NameDigest, (Bytes, Instant)>,
    /// The secrets that have come on this stream, and those that the agent awaits.
    secrets: HashSet<NameDigest>,
    awaited_secrets: HashMap<NameDigest, String>,
    /// Envoy's first listeners, and those that have come since.
    waiting_listeners: VecDeque<WaitingListeners>,
    /// Responses with rewritten listeners that Envoy has not answered.
    rewritten: VecDeque<Rewritten>,
    /// Responses with istiod's listeners in place of rejected ones.
    originals: VecDeque<Originals>,
    passing: Option<Passing>,
    progress: Progress,
    pub(super) to_envoy: Vec<Bytes>,
    pub(super) to_istiod: Vec<Bytes>,
}

/// A response that passes, and in which the agent looks for names.
enum Passing {
    /// The bytes of the gRPC head that are to come, and the walker of the message.
    Routes(usize, routes::RouteWalker),
    Secrets(usize, Walker),
}

/// The resources in a delta response, or in a part of one. Nothing is copied.
#[derive(Clone, PartialEq, Message)]
struct Resources {
    #[prost(message, repeated, tag = "2")]
    resources: Vec<Resource>,
    #[prost(bytes = "bytes", repeated, tag = "6")]
    removed: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(bytes = "bytes", tag = "1")]
    version: Bytes,
    #[prost(message, optional, tag = "2")]
    resource: Option<Any>,
    #[prost(bytes = "bytes", tag = "3")]
    name: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

/// The first request of a stream. The node is as Envoy has sent it.
#[derive(Clone, PartialEq, Message)]
struct FirstRequest {
    #[prost(bytes = "bytes", optional, tag = "1")]
    node: Option<Bytes>,
    #[prost(string, tag = "2")]
    type_url: String,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    names: Vec<Bytes>,
    #[prost(message, repeated, tag = "5")]
    initial_resource_versions: Vec<Version>,
}

/// An entry of `initial_resource_versions`.
#[derive(Clone, PartialEq, Message)]
struct Version {
    #[prost(bytes = "bytes", tag = "1")]
    name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    version: Bytes,
}

/// A cluster on its way to Envoy.
struct Offer {
    name: Bytes,
    digest: NameDigest,
    version: Bytes,
    /// The bytes of its field in a response.
    field: Bytes,
    facts: ClusterFacts,
}

impl Offer {
    /// Splits the fields of a message into clusters. Also returns the names of the removed ones.
    fn all(message: &Bytes) -> Result<(Vec<Self>, Vec<Bytes>), Status> {
        let malformed = |error: String| {
            Status::internal(format!("discovery response from istiod: clusters: {error}"))
        };
        let decoded = Resources::decode(message.clone()).map_err(|it| malformed(it.to_string()))?;
        let mut walker = Walker::finder(message.len() as u64);
        let mut ranges = Vec::new();
        let walked = walker.find(message, |ResourceField { range, is_removed, .. }| {
            if !is_removed {
                ranges.push(range.start as usize..range.end as usize);
            }
        });
        walked.map_err(|it| malformed(it.to_string()))?;
        let offers = decoded.resources.into_iter().zip(ranges).map(|(resource, range)| {
            let value = resource.resource.map(|it| it.value).unwrap_or_default();
            Self {
                digest: NameDigest::of(&resource.name),
                name: resource.name,
                version: resource.version,
                field: message.slice(range),
                // Envoy says what is wrong with a malformed cluster.
                facts: ClusterFacts::read(&value)
                    .unwrap_or(ClusterFacts { discovery: Discovery::Other, secrets: Vec::new() }),
            }
        });
        Ok((offers.collect(), decoded.removed))
    }

    fn name(&self) -> &str {
        std::str::from_utf8(&self.name).unwrap_or_default()
    }

    /// Returns true if Envoy cannot discover such a cluster on demand.
    fn is_pinned_by_kind(&self) -> bool {
        !self.name.starts_with(OUTBOUND.as_bytes())
            || !matches!(self.facts.discovery, Discovery::Endpoints(_))
            || !self.facts.secrets.is_empty()
    }
}

impl OnDemand {
    pub(super) fn new(cache: EnvoyCache, id: u32, observer: Observer) -> Self {
        let is_ready = cache.lock().view(cache.pid()).no_longer_served;
        Self {
            is_ready,
            cache,
            id,
            observer,
            store_number: 0,
            nonces: 0,
            has_begun: false,
            has_said_limit: false,
            has_endpoints: false,
            knows_clusters: false,
            newest: None,
            sent: HashSet::new(),
            expected: HashMap::new(),
            asked: HashMap::new(),
            absent: HashMap::new(),
            repeat_absent_at: None,
            held: HashMap::new(),
            lookups: Lookups::default(),
            answers: VecDeque::new(),
            subscribed: HashSet::new(),
            open: HashMap::new(),
            secrets: HashSet::new(),
            awaited_secrets: HashMap::new(),
            waiting_listeners: VecDeque::new(),
            rewritten: VecDeque::new(),
            originals: VecDeque::new(),
            passing: None,
            progress: Progress::default(),
            to_envoy: Vec::new(),
            to_istiod: Vec::new(),
        }
    }

    /// Takes a request of Envoy, after the recorder. Returns true if istiod gets it, without the agent's nonces.
    pub(super) fn read_request(&mut self, request: &mut Request) -> bool {
        let is_forwarded = match &*request.type_url {
            CLUSTER => {
                self.read_clusters_request(request);
                false
            }
            LISTENER => self.read_listeners_request(request),
            SECRET => {
                self.read_secrets_request(request);
                true
            }
            ENDPOINTS => {
                self.read_endpoints_request(request);
                self.withdraw(&request.nonce);
                true
            }
            _ => true,
        };
        if !is_forwarded || !request.nonce.starts_with(NONCE) {
            return is_forwarded;
        }
        let Some(frame) = without_nonce(&request.frame) else { return false };
        request.frame = frame;
        true
    }

    /// Takes a request of Envoy for secrets. istiod does not send those again that Envoy has when the stream begins.
    fn read_secrets_request(&mut self, request: &Request) {
        self.secrets.extend(request.subscription().unwrap_or_default().initial_names());
    }

    /// Takes a request of Envoy for clusters. istiod gets the first one, changed, and later ones only as ACK or NACK.
    fn read_clusters_request(&mut self, request: &Request) {
        let Ok(subscription) = request.subscription() else { return };
        if !std::mem::replace(&mut self.has_begun, true) {
            let first = self.first_request(&subscription);
            self.to_istiod.push(frame(&first.encode_to_vec()));
        }
        self.read_answer(request);
        for name in &subscription.unsubscribed {
            let digest = NameDigest::of(name);
            self.asked.remove(&digest);
            self.absent.remove(&digest);
            self.progress.forget(digest);
        }
        let mut wanted = Vec::new();
        for name in subscription.names.iter().filter(|name| ***name != *b"*") {
            if self.asked.len() >= MAX_ASKED || name.len() > MAX_NAME {
                self.note_limit();
            } else {
                let digest = NameDigest::of(name);
                self.asked.insert(digest, Bytes::copy_from_slice(name));
                if !self.sent.contains(&digest) {
                    self.observer.metrics.on_demand.requests.inc();
                    self.progress.ask(digest);
                }
                wanted.push(digest);
            }
        }
        if !wanted.is_empty() {
            self.want(&wanted);
        }
    }

    /// Logs once that Envoy asks for more than it gets.
    fn note_limit(&mut self) {
        if !std::mem::replace(&mut self.has_said_limit, true) {
            tracing::warn!(
                target: "xdsproxy",
                id = self.id,
                "Envoy asks for more than {MAX_ASKED} clusters, or for a name of more than {MAX_NAME} bytes; \
                 requests to them fail after the timeout of the filter"
            );
        }
    }

    /// Builds istiod's first request. It has the versions of all clusters in the ledger, so that istiod says which of them
    /// it has removed, except for those that Envoy needs and does not have.
    fn first_request(&mut self, subscription: &Subscription) -> FirstRequest {
        let initial = subscription.initial_resource_versions.iter();
        let mut versions: Vec<_> =
            initial.filter_map(|entry| Version::decode(entry.clone()).ok()).collect();
        self.sent = versions.iter().map(|it| NameDigest::of(&it.name)).collect();
        let cache = self.cache.clone();
        let mut state = cache.lock();
        self.store_number = state.store_number;
        state.view(cache.pid()).of(Type::CLUSTER).awaits_first = false;
        each_stored(&mut state, |state, cluster| {
            let name = Bytes::copy_from_slice(&cluster.name);
            if self.sent.contains(&cluster.digest) {
                self.note_sent(state, &cluster);
                return;
            }
            if self.is_wanted(state, &cluster) {
                self.expected.insert(cluster.digest, name);
            } else {
                versions.push(Version { name, version: Bytes::copy_from_slice(&cluster.version) });
            }
        });
        let names = subscription.names.iter().filter(|name| ***name == *b"*").cloned();
        FirstRequest {
            node: subscription.node.clone(),
            type_url: CLUSTER.to_owned(),
            names: names.collect(),
            initial_resource_versions: versions,
        }
    }

    /// Gives Envoy clusters that it has asked for, or says that they do not exist.
    fn want(&mut self, names: &[NameDigest]) {
        let cache = self.cache.clone();
        let mut state = cache.lock();
        let mut known = Vec::new();
        for name in names {
            let Some(text) = self.asked.get(name) else { continue };
            if self.is_known(&state, *name) {
                state.catalog.note_used(&String::from_utf8_lossy(text));
                state.mark_dirty();
                if !self.sent.contains(name) {
                    known.push(*name);
                }
            } else if self.knows_clusters
                && !state.view(cache.pid()).of(Type::CLUSTER).rejected.contains_key(name)
            {
                self.absent.insert(*name, text.clone());
            }
        }
        self.offer_stored(&mut state, &known);
        drop(state);
        self.deny_absent();
    }

    /// Returns true if the ledger has been dropped since the stream began. Only another stream brings all clusters again.
    pub(super) fn has_lost_clusters(&self) -> bool {
        self.has_begun && self.cache.lock().store_number != self.store_number
    }

    /// Returns the types of responses that [`OnDemand::read_response`] takes. Envoy drops endpoints without an answer before
    /// it has subscribed to any.
    pub(super) fn replaced_types(&self) -> &'static [&'static str] {
        if self.has_endpoints {
            &[CLUSTER, LISTENER, EXTENSION]
        } else {
            &[CLUSTER, LISTENER, EXTENSION, ENDPOINTS]
        }
    }

    /// Takes a complete response of istiod. Returns the one that Envoy gets in its place, if there is one besides those in
    /// `to_envoy`, which precede it.
    pub(super) fn read_response(
        &mut self,
        received: &Received,
        message: &Bytes,
    ) -> Result<Option<Bytes>, Status> {
        match &*received.type_url {
            CLUSTER => self.read_clusters(received, message).map(|()| None),
            LISTENER => self.read_listeners(received, message),
            EXTENSION => {
                self.read_extensions(message);
                Ok(Some(message.clone()))
            }
            _ => {
                self.store_endpoints(received, message);
                Ok(None)
            }
        }
    }

    /// Stores a response with endpoints that only the agent has subscribed to.
    fn store_endpoints(&mut self, received: &Received, message: &Bytes) {
        let cache = self.cache.clone();
        let mut state = cache.lock();
        let mut fields = append_endpoints(&mut state, message);
        drop(state);
        self.read_endpoints(&mut fields);
        cache.lock().release(fields.iter().map(|field| field.place));
        self.send_ack_or_nack(ENDPOINTS, &received.nonce, None);
    }

    /// Takes a complete response of istiod with clusters.
    fn read_clusters(&mut self, received: &Received, message: &Bytes) -> Result<(), Status> {
        let (clusters, removed) = Offer::all(message)?;
        let cache = self.cache.clone();
        let mut state = cache.lock();
        let is_first = !std::mem::replace(&mut self.knows_clusters, true);
        self.newest = Some(received.nonce.clone());
        // The Envoy that drains after a hot restart does not change what is stored.
        let view = state.view(cache.pid());
        let is_new = !view.is_live;
        view.note_response();
        let may_store = is_new || state.is_newest(cache.pid());
        let mut wanted = Vec::new();
        for cluster in clusters {
            self.absent.remove(&cluster.digest);
            if self.asked.contains_key(&cluster.digest) {
                state.catalog.note_used(cluster.name());
            }
            self.expected.remove(&cluster.digest);
            // The text of its own name may end with bytes of the next field.
            mention::find(&cluster.field, |text| {
                if !text.starts_with(cluster.name()) {
                    state.catalog.add_mention(text);
                }
            });
            if self.is_wanted(&state, &cluster) {
                wanted.push(cluster);
            } else if may_store {
                store(&mut state, &cluster);
            }
        }
        let mut gone = Vec::new();
        for name in removed {
            let digest = NameDigest::of(&name);
            self.held.remove(&digest);
            if self.sent.remove(&digest) {
                gone.push(name.clone());
            } else if may_store {
                remove(&mut state, &name);
            }
            if let Some(name) = self.asked.get(&digest) {
                self.absent.insert(digest, name.clone());
            }
        }
        if is_first {
            for name in std::mem::take(&mut self.expected).values() {
                if may_store {
                    remove(&mut state, name);
                }
            }
            let unknown = self.asked.iter().filter(|(name, _)| {
                !self.sent.contains(*name) && state.store.get(Type::CLUSTER, **name).is_none()
            });
            let unknown = unknown.filter(|(name, _)| wanted.iter().all(|it| it.digest != **name));
            self.absent.extend(unknown.map(|(digest, name)| (*digest, name.clone())));
        }
        let ready = self.hold_back(&mut state, wanted, may_store);
        if is_first || !ready.is_empty() || !gone.is_empty() {
            self.send(&mut state, &received.version, Some(received.nonce.clone()), ready, gone);
        } else {
            self.send_ack_or_nack(CLUSTER, &received.nonce, None);
        }
        self.offer_mentioned(&mut state);
        drop(state);
        self.deny_absent();
        Ok(())
    }

    /// Returns true if istiod has a cluster.
    fn is_known(&self, state: &State, name: NameDigest) -> bool {
        self.sent.contains(&name) || state.store.get(Type::CLUSTER, name).is_some()
    }

    /// Returns true if Envoy gets a cluster now, or has it.
    fn is_wanted(&self, state: &State, cluster: &Offer) -> bool {
        self.sent.contains(&cluster.digest)
            || self.asked.contains_key(&cluster.digest)
            || is_needed(state, cluster)
    }

    /// Returns the clusters that do not warm in Envoy. Holds the others, subscribes to what they wait for, and stores them
    /// if `may_store`.
    fn hold_back(
        &mut self,
        state: &mut State,
        clusters: Vec<Offer>,
        may_store: bool,
    ) -> Vec<Offer> {
        let mut ready = Vec::new();
        let mut missing = Missing::new();
        for cluster in clusters {
            match self.need(state, &cluster, &mut missing) {
                None => {
                    self.held.remove(&cluster.digest);
                    ready.push(cluster);
                }
                Some(need) => {
                    self.held.insert(cluster.digest, need);
                    if may_store {
                        store(state, &cluster);
                    }
                }
            }
        }
        for (type_url, names) in missing {
            self.to_istiod.push(encode_subscription(type_url, names, false));
        }
        ready
    }

    /// Gives Envoy clusters of the ledger, unless they would warm.
    fn offer_stored(&mut self, state: &mut State, names: &[NameDigest]) {
        if names.is_empty() {
            return;
        }
        let read = state.read_newest(self.cache.pid(), Type::CLUSTER, names);
        let read = read.map_err(|error| Status::internal(error.to_string()));
        match read.and_then(|(bytes, version)| Ok((Offer::all(&bytes.into())?.0, version))) {
            Ok((clusters, version)) => {
                let ready = self.hold_back(state, clusters, false);
                if !ready.is_empty() {
                    self.send(state, &version, None, ready, Vec::new());
                }
            }
            Err(error) => {
                let error = error.message();
                tracing::warn!(target: "xdsproxy", id = self.id, "cannot read clusters: {error}");
            }
        }
    }

    /// Gives Envoy the clusters that other resources name.
    fn offer_mentioned(&mut self, state: &mut State) {
        let is_known = |name: &str| self.is_known(state, NameDigest::of(name.as_bytes()));
        let named = state.catalog.named(is_known).into_iter().map(ToOwned::to_owned);
        let mut names = Vec::new();
        for name in named.collect::<Vec<_>>() {
            let digest = NameDigest::of(name.as_bytes());
            if !self.sent.contains(&digest) && !self.held.contains_key(&digest) {
                state.catalog.note_named(&name);
                names.push(digest);
            }
        }
        self.offer_stored(state, &names);
    }

    /// Sends Envoy a response with clusters, and with the endpoints of those that it has, because it does not ask for
    /// these again. Before the first listeners, it sends the endpoints of all, so that no cluster warms when the listeners
    /// come. `response` is the nonce of istiod's response.
    fn send(
        &mut self,
        state: &mut State,
        version: &str,
        response: Option<String>,
        clusters: Vec<Offer>,
        removed: Vec<Bytes>,
    ) {
        let mut bytes = Vec::new();
        let mut fields = Vec::new();
        let mut new = Vec::new();
        let mut repeated = Vec::new();
        let mut unasked = Vec::new();
        for cluster in clusters {
            self.note_sent(state, &cluster);
            bytes.extend_from_slice(&cluster.field);
            fields.push(Field {
                name: cluster.digest,
                place: state.store.append_any(Type::CLUSTER, &cluster.field),
                is_removed: false,
                response: 0,
            });
            let is_new = self.sent.insert(cluster.digest);
            if is_new && self.is_ready {
                new.push(Bytes::copy_from_slice(&cluster.name));
            }
            if let Discovery::Endpoints(name) = &cluster.facts.discovery {
                let name = NameDigest::of(name.as_bytes());
                if is_new || repeated.is_empty() {
                    repeated.push(name);
                }
                if !is_new || !self.waiting_listeners.is_empty() {
                    unasked.push(name);
                }
            }
        }
        for name in removed {
            let start = bytes.len();
            prost::encoding::bytes::encode(6, &name, &mut bytes);
            fields.push(Field {
                name: NameDigest::of(&name),
                place: state.store.append_any(Type::CLUSTER, &bytes[start..]),
                is_removed: true,
                response: 0,
            });
        }
        let nonce = self.respond(state, Type::CLUSTER, version, &bytes, fields);
        self.answers.push_back(Answer {
            nonce,
            response,
            sent: Instant::now(),
            new,
            repeated,
            kind: Kind::Clusters,
        });
        if self.is_ready {
            self.give_endpoints(state, &unasked);
        }
    }

    /// Builds a response of the agent. Returns its nonce.
    fn respond(
        &mut self,
        state: &mut State,
        type_of: Type,
        version: &str,
        bytes: &[u8],
        fields: Vec<Field>,
    ) -> String {
        let nonce = self.next_nonce();
        // A response of 4 GB does not fit into memory.
        if let Ok((mut frame, rest)) = head_and_rest(version, type_of, &nonce, bytes.len() as u64) {
            frame.extend_from_slice(bytes);
            frame.extend_from_slice(&rest);
            self.to_envoy.push(frame.into());
        }
        let response = Response::new(nonce.clone(), version.to_owned(), fields);
        state.complete(self.cache.pid(), type_of, response);
        nonce
    }

    fn next_nonce(&mut self) -> String {
        self.nonces += 1;
        format!("{NONCE}{}", self.nonces)
    }

    /// Sends Envoy the endpoints that the ledger has. Returns the nonce; None if it has none.
    fn give_endpoints(&mut self, state: &mut State, names: &[NameDigest]) -> Option<String> {
        let read = state.read_newest(self.cache.pid(), Type::ENDPOINTS, names);
        let (bytes, version) = read.ok().filter(|(bytes, _)| !bytes.is_empty())?;
        let fields = append_endpoints(state, &bytes);
        Some(self.respond(state, Type::ENDPOINTS, &version, &bytes, fields))
    }

    /// Takes a request of Envoy for endpoints. Those that the ledger has are sent at once: istiod does not answer for names
    /// that the agent has subscribed to before.
    fn read_endpoints_request(&mut self, request: &Request) {
        let Ok(subscription) = request.subscription() else { return };
        self.has_endpoints = true;
        for name in &subscription.unsubscribed {
            let digest = NameDigest::of(name);
            self.subscribed.remove(&digest);
            self.open.remove(&digest);
        }
        let had: HashSet<_> = subscription
            .initial_resource_versions
            .iter()
            .filter_map(|entry| Version::decode(entry.clone()).ok())
            .map(|it| NameDigest::of(&it.name))
            .collect();
        let mut stored = Vec::new();
        let cache = self.cache.clone();
        let mut state = cache.lock();
        // The ledger also has endpoints that Envoy has not asked for yet. They stay when Envoy has answered the first ones.
        state.view(cache.pid()).of(Type::ENDPOINTS).awaits_first = false;
        for name in &subscription.names {
            let digest = NameDigest::of(name);
            self.subscribed.insert(digest);
            if !self.is_ready || had.contains(&digest) {
                continue;
            }
            if state.newest(cache.pid(), Type::ENDPOINTS, digest).is_some() {
                stored.push(digest);
            } else {
                self.open.insert(digest, (Bytes::copy_from_slice(name), Instant::now()));
            }
        }
        if !stored.is_empty() {
            self.give_endpoints(&mut state, &stored);
        }
    }

    /// Takes the fields of a complete response with endpoints. Those that only the agent has subscribed to are stored, and
    /// taken out of `fields`.
    pub(super) fn read_endpoints(&mut self, fields: &mut Vec<Field>) {
        let cache = self.cache.clone();
        let mut state = cache.lock();
        for field in &*fields {
            self.open.remove(&field.name);
        }
        let names: HashSet<_> = fields.iter().map(|field| field.name).collect();
        let is_own = |field: &mut Field| {
            !field.is_removed
                && self.subscribed.contains(&field.name)
                && !state.view(cache.pid()).of(Type::ENDPOINTS).wants(Type::ENDPOINTS, field.name)
        };
        let own: Vec<_> = fields.extract_if(.., is_own).collect();
        let own_names = own.iter().map(|field| field.name).collect();
        let unanswered = state.view(cache.pid()).of(Type::ENDPOINTS).take_unanswered(&own_names);
        state.release(unanswered.iter().map(|field| field.place));
        for field in own {
            state.store.set(Type::ENDPOINTS, field.name, field.place);
        }
        drop(state);
        self.release(|need| matches!(need, Need::Endpoints(name) if names.contains(name)));
    }

    /// Offers the clusters whose need is met.
    fn release(&mut self, is_met: impl Fn(&Need) -> bool) {
        let released: Vec<_> =
            self.held.extract_if(|_, need| is_met(need)).map(|(name, _)| name).collect();
        if !released.is_empty() {
            let cache = self.cache.clone();
            self.offer_stored(&mut cache.lock(), &released);
        }
    }

    /// Sends istiod the ACK of a response, or its NACK with the reason.
    fn send_ack_or_nack(&mut self, type_url: &str, nonce: &str, problem: Option<&str>) {
        self.observer.record_ack_or_nack(type_url, nonce, problem);
        self.to_istiod.push(encode_request(Protocol::Delta, type_url, "", nonce, problem));
    }
}

/// Appends the fields of a message with endpoints to the store. Those after malformed bytes are left out.
fn append_endpoints(state: &mut State, message: &[u8]) -> Vec<Field> {
    let mut fields = Vec::new();
    let mut walker = Walker::finder(message.len() as u64);
    let _ = walker.find(message, |ResourceField { name, range, is_removed }| {
        let field = &message[range.start as usize..range.end as usize];
        let place = state.store.append_any(Type::ENDPOINTS, field);
        fields.push(Field { name, place, is_removed, response: 0 });
    });
    fields
}

/// Calls `each` for all stored clusters.
fn each_stored(state: &mut State, mut each: impl FnMut(&State, Offer)) {
    for piece in state.store.pieces(state.store.all(Type::CLUSTER)) {
        let bytes = piece.bytes().map(Bytes::from).map_err(|it| Status::internal(it.to_string()));
        match bytes.and_then(|bytes| Offer::all(&bytes)) {
            Ok((clusters, _)) => clusters.into_iter().for_each(|cluster| each(state, cluster)),
            // istiod sends again what is not named.
            Err(error) => {
                tracing::warn!(target: "xdsproxy", "cannot read clusters: {}", error.message());
            }
        }
    }
}

/// Returns the stored clusters that a new Envoy needs: those that are pinned, and those that were used.
pub(super) fn needed(state: &mut State) -> Vec<NameDigest> {
    let mut names = Vec::new();
    each_stored(state, |state, cluster| {
        if is_needed(state, &cluster) {
            names.push(cluster.digest);
        }
    });
    names
}

fn is_needed(state: &State, cluster: &Offer) -> bool {
    cluster.is_pinned_by_kind()
        || state.catalog.is_used(cluster.digest)
        || is_mentioned(state, cluster)
}

/// Returns true if another resource names a cluster.
fn is_mentioned(state: &State, cluster: &Offer) -> bool {
    state.catalog.is_mentioned(cluster.name(), |name| {
        state.store.get(Type::CLUSTER, NameDigest::of(name.as_bytes())).is_some()
    })
}

/// Makes a cluster that Envoy was not offered the stored version.
fn store(state: &mut State, cluster: &Offer) {
    let place = state.store.append_any(Type::CLUSTER, &cluster.field);
    state.store.set(Type::CLUSTER, cluster.digest, place);
    state.catalog.unaccepted.insert(cluster.digest);
    state.mark_dirty();
}

/// Removes a cluster that Envoy does not have.
fn remove(state: &mut State, name: &[u8]) {
    if state.store.get(Type::CLUSTER, NameDigest::of(name)).is_some() {
        let mut field = Vec::new();
        prost::encoding::bytes::encode(6, &name.to_vec(), &mut field);
        let place = state.store.append_any(Type::CLUSTER, &field);
        state.store.remove(Type::CLUSTER, NameDigest::of(name), place);
        state.catalog.unaccepted.remove(&NameDigest::of(name));
        state.mark_dirty();
    }
}
