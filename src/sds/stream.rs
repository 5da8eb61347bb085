//! One Envoy stream: the names asked for, what was sent of each, the last nonce.
//!
//! A state machine without I/O. Requests change what is watched; what is watched and what there is
//! to serve decide which response is due. A secret is due when it was never sent since it was asked
//! for, or when it is not the one sent last: pushes that nobody waited for fall together.
//!
//! Does not await, and does not send.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tonic::Status;

use super::metrics::Metrics;
use super::secret::{self, TYPE_URL, Version};
use crate::secrets::State;
use crate::secrets::name::{Name, UnknownName, escaped};

/// The most names one stream may ask for, and the most unknown ones it may ask for in its life.
const MOST_NAMES: usize = 10_000;

/// How many bytes of Envoy's reason for a refusal are logged.
const LONGEST_REASON: usize = 1024;

/// A request some clients of the shared discovery engine begin with; it asks for nothing.
const HEALTH_TYPE_URL: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// What makes one response different from the others.
pub(super) struct Stamp {
    pub(super) version: String,
    pub(super) nonce: String,
}

/// The protocol's side of one stream.
#[derive(Debug)]
pub(super) struct Stream {
    id: u64,
    /// Whether a request has said which node this is.
    introduced: bool,
    /// The names watched, each with what was sent of it since it was asked for.
    watch: Option<BTreeMap<Name, Option<Version>>>,
    /// The nonce of the latest response.
    nonce: Option<String>,
    /// Hashes of the unknown names that were logged.
    unknown: HashSet<u64>,
    metrics: Metrics,
}

impl Stream {
    pub(super) fn new(id: u64, metrics: Metrics) -> Self {
        Self {
            id,
            introduced: false,
            watch: None,
            nonce: None,
            unknown: HashSet::new(),
            metrics,
        }
    }

    /// Takes in a request of Envoy. An error is the status to end the stream with.
    pub(super) fn apply(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        if !self.introduced {
            if request.type_url == HEALTH_TYPE_URL {
                tracing::warn!(target: "ads", "ADS: {} skipped a leading health report", self.id);
                return Ok(());
            }
            self.introduce(request)?;
        }
        if !self.concerns_names(request) {
            return Ok(());
        }
        let names = self.known(&request.resource_names)?;
        // Without a nonce Envoy starts over: all it names is due again.
        let sent = match self.watch.take() {
            Some(sent) if !request.response_nonce.is_empty() => sent,
            _ => BTreeMap::new(),
        };
        self.watch = Some(
            names
                .into_iter()
                .map(|name| (name, sent.get(&name).cloned().flatten()))
                .collect(),
        );
        Ok(())
    }

    /// Envoy says which node it is in the first request only.
    fn introduce(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        if request.node.as_ref().is_none_or(|node| node.id.is_empty()) {
            return Err(Status::invalid_argument("missing node information"));
        }
        self.introduced = true;
        Ok(())
    }

    /// Deals with the requests whose names do not count: refusals, unsubscriptions and answers to
    /// an older response. Whether it is another one.
    fn concerns_names(&mut self, request: &DiscoveryRequest) -> bool {
        let id = self.id;
        if let Some(refusal) = &request.error_detail {
            let (code, reason) = (refusal.code, escaped(&refusal.message, LONGEST_REASON));
            self.metrics.rejects.inc();
            tracing::warn!(target: "ads", "ADS:SDS: ACK ERROR {id} {code}:{reason}");
            return false;
        }
        if request.resource_names.is_empty() && request.type_url == TYPE_URL {
            tracing::debug!(target: "ads", "ADS:SDS: UNSUBSCRIBE {id}");
            self.watch = None;
            return false;
        }
        if self.is_stale(&request.response_nonce) {
            self.metrics.expired_nonces.inc();
            tracing::debug!(target: "ads", "ADS:SDS: REQ {id} Expired nonce received");
            return false;
        }
        true
    }

    /// Whether a request answers a response older than the latest. Before the first response any
    /// nonce is one of an earlier stream, and the request a subscription.
    fn is_stale(&self, nonce: &str) -> bool {
        let latest = self.nonce.as_deref();
        !nonce.is_empty() && self.watch.is_some() && latest.is_some_and(|latest| latest != nonce)
    }

    /// The names that can be served. Unknown ones beside them are logged once; alone they end the
    /// stream.
    fn known(&mut self, asked: &[String]) -> Result<BTreeSet<Name>, Status> {
        if asked.len() > MOST_NAMES {
            return Err(Status::resource_exhausted(format!(
                "{} names in one request, expected at most {MOST_NAMES}",
                asked.len()
            )));
        }
        let mut known = BTreeSet::new();
        let mut unknown = Vec::new();
        for text in asked {
            match text.parse::<Name>() {
                Ok(name) => {
                    known.insert(name);
                }
                Err(error) => unknown.push((text, error)),
            }
        }
        if let (true, Some((_, error))) = (known.is_empty(), unknown.first()) {
            return Err(Status::invalid_argument(error.to_string()));
        }
        for (text, error) in &unknown {
            self.warn_once(text, error)?;
        }
        Ok(known)
    }

    fn warn_once(&mut self, text: &str, error: &UnknownName) -> Result<(), Status> {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        if !self.unknown.insert(hasher.finish()) {
            return Ok(());
        }
        if self.unknown.len() > MOST_NAMES {
            return Err(Status::resource_exhausted(format!(
                "more than {MOST_NAMES} unknown names on one stream"
            )));
        }
        tracing::warn!(target: "sds", "stream {}: {error}; left unanswered", self.id);
        Ok(())
    }

    /// The names the next response carries; empty when there is nothing to say. Names just asked
    /// for go together, changed ones each by itself, roots first.
    pub(super) fn due(&self, state: &State) -> Vec<Name> {
        let mut asked = Vec::new();
        let mut changed = Vec::new();
        for (&name, sent) in self.watch.iter().flatten() {
            match (sent, secret::version(name, state)) {
                (None, Some(_)) => asked.push(name),
                (Some(sent), Some(now)) if *sent != now => changed.push(name),
                _ => {}
            }
        }
        if asked.is_empty() {
            changed.truncate(1);
            changed
        } else {
            asked
        }
    }

    /// Whether a name was asked for whose secret is not to be had now.
    pub(super) fn is_kept_waiting(&self, state: &State) -> bool {
        self.watch
            .iter()
            .flatten()
            .any(|(&name, sent)| sent.is_none() && secret::version(name, state).is_none())
    }

    /// The response that is due, which counts as sent from now on.
    pub(super) fn answer(&mut self, state: &State, stamp: Stamp) -> DiscoveryResponse {
        let due = self.due(state);
        let watch = self.watch.get_or_insert_default();
        for &name in &due {
            watch.insert(name, secret::version(name, state));
        }
        self.nonce = Some(stamp.nonce.clone());
        DiscoveryResponse {
            version_info: stamp.version,
            resources: due
                .into_iter()
                .filter_map(|name| secret::resource(name, state))
                .collect(),
            type_url: TYPE_URL.to_owned(),
            nonce: stamp.nonce,
            ..Default::default()
        }
    }
}
