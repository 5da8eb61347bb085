//! State-of-the-world (SotW) protocol: each request lists all names, and answers the response with its
//! nonce.
//!
//! A state machine without I/O. A secret is due when it was not sent since it was asked for, or when it
//! differs from the one sent last: pushes that wait for Envoy fall together. A secret that cannot be had
//! delays no other; SotW has no way to report it.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::DataSource;
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tonic::{Code, Status};

use super::metrics::Metrics;
use super::resource::{Resource, TYPE_URL};
use crate::problem::{Problem, codes};
use crate::secrets::name::{Name, escaped};

/// The most names one stream may ask for, and the most unknown ones it may ask for in its life.
const MAX_NAMES: usize = 10_000;

/// How many bytes of Envoy's reason for a NACK are logged.
const MAX_REASON: usize = 1024;

/// The type of a leading request that asks for nothing, as some xDS clients send it.
const HEALTH_TYPE_URL: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// What makes one response different from the others.
#[derive(Debug)]
pub(super) struct ResponseId {
    pub(super) version: String,
    pub(super) nonce: String,
}

/// Looks up the resource of a name; None if it cannot be had now.
pub(super) type Lookup<'a> = dyn Fn(&Name) -> Option<Resource<'a>> + 'a;

/// What was sent of a name since it was asked for: the public part, so that no key is held, and the CRL
/// beside it.
type Sent = Option<(Bytes, Option<DataSource>)>;

/// The protocol state of one stream.
#[derive(Debug)]
pub(super) struct StateOfTheWorld {
    pub(super) id: u64,
    pub(super) metrics: Metrics,
    /// Whether `default` and `ROOTCA` are served on this socket.
    serves_workload: bool,
    /// Whether a request has named the node.
    has_node: bool,
    names: BTreeMap<Name, Sent>,
    /// Hashes of the unknown names that were logged.
    unknown: HashSet<u64>,
    /// The nonce of the latest response.
    nonce: Option<String>,
    /// Whether Envoy has a version of the secret. Its streams ask for one each.
    has_version: bool,
}

impl Drop for StateOfTheWorld {
    fn drop(&mut self) {
        self.metrics.refusals.lock().remove(&self.id);
    }
}

impl StateOfTheWorld {
    pub(super) fn new(id: u64, metrics: Metrics, serves_workload: bool) -> Self {
        Self {
            id,
            metrics,
            serves_workload,
            has_node: false,
            names: BTreeMap::new(),
            unknown: HashSet::new(),
            nonce: None,
            has_version: false,
        }
    }

    /// Applies a request of Envoy. An error is the status to end the stream with.
    pub(super) fn apply(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        if self.is_skipped(request)? || !self.subscribes(request) {
            return Ok(());
        }
        let texts = &request.resource_names;
        if texts.len() > MAX_NAMES {
            return Err(Status::resource_exhausted(format!(
                "{} names in one request, expected at most {MAX_NAMES}",
                texts.len()
            )));
        }
        // Without a nonce Envoy starts over: all it names is due again.
        let mut before = std::mem::take(&mut self.names);
        if request.response_nonce.is_empty() {
            before.clear();
        }
        let mut unserved = Vec::new();
        for text in texts {
            match self.parse(text) {
                Ok(name) => {
                    let sent = before.remove(&name).flatten();
                    self.names.entry(name).or_insert(sent);
                }
                Err(problem) => unserved.push((text, problem)),
            }
        }
        // Unknown names alone end the stream.
        match unserved.first() {
            Some((_, problem)) if self.names.is_empty() => {
                Err(Status::invalid_argument(problem.to_string()))
            }
            _ => self.report(&unserved),
        }
    }

    /// All names asked for.
    pub(super) fn names(&self) -> impl Iterator<Item = &Name> {
        self.names.keys()
    }

    /// The names of which the client has nothing yet.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = &Name> {
        let names = self.names.iter();
        names.filter_map(|(name, sent)| sent.is_none().then_some(name))
    }

    /// The response that is due, if any; it counts as sent. Names just asked for go together, changed
    /// ones one by one, roots first.
    pub(super) fn answer(
        &mut self,
        lookup: &Lookup<'_>,
        id: impl FnOnce() -> ResponseId,
    ) -> Option<DiscoveryResponse> {
        let (mut asked, mut changed) = (Vec::new(), Vec::new());
        for (name, sent) in &mut self.names {
            match lookup(name) {
                Some(now) if sent.is_none() => asked.push((name, sent, now)),
                Some(now) if *sent != Some(now.version()) => changed.push((name, sent, now)),
                _ => {}
            }
        }
        let due = match asked.is_empty() {
            true => changed.into_iter().take(1).collect(),
            false => asked,
        };
        if due.is_empty() {
            return None;
        }
        let ResponseId { version, nonce } = id();
        self.nonce = Some(nonce.clone());
        let resources = due.into_iter().map(|(name, sent, resource)| {
            *sent = Some(resource.version());
            resource.encode(name)
        });
        Some(DiscoveryResponse {
            version_info: version,
            resources: resources.collect(),
            type_url: TYPE_URL.to_owned(),
            nonce,
            ..Default::default()
        })
    }

    /// Whether a request is to be skipped. The first one must name the node, later ones need not.
    fn is_skipped(&mut self, request: &DiscoveryRequest) -> Result<bool, Status> {
        if self.has_node {
            return Ok(false);
        }
        if request.type_url == HEALTH_TYPE_URL {
            tracing::warn!(target: "ads", "ADS: {} skipped a leading health report", self.id);
            return Ok(true);
        }
        if request.node.as_ref().is_none_or(|node| node.id.is_empty()) {
            return Err(Status::invalid_argument("missing node information"));
        }
        self.has_node = true;
        Ok(false)
    }

    /// Whether the names of a request count. NACKs, unsubscriptions and answers to an older response
    /// are dealt with here.
    fn subscribes(&mut self, request: &DiscoveryRequest) -> bool {
        let (id, nonce) = (self.id, &request.response_nonce);
        // Before the first response, a nonce is one of an earlier stream, and the request subscribes.
        let latest = self.nonce.as_ref().filter(|_| !self.names.is_empty());
        // Envoy names the version that it has, also if it is of an earlier stream.
        self.has_version |= !request.version_info.is_empty();
        if let Some(error) = &request.error_detail {
            self.metrics.rejects.inc();
            self.report_refusal(error.code, &escaped(&error.message, MAX_REASON));
        } else if request.resource_names.is_empty() && request.type_url == TYPE_URL {
            tracing::debug!(target: "ads", "ADS:SDS: UNSUBSCRIBE {id}");
            self.names.clear();
            self.metrics.refusals.lock().remove(&id);
        } else if !nonce.is_empty() && latest.is_some_and(|latest| latest != nonce) {
            self.metrics.expired_nonces.inc();
            tracing::debug!(target: "ads", "ADS:SDS: REQ {id} Expired nonce received");
        } else {
            if latest == Some(nonce) {
                self.has_version = true;
                self.metrics.refusals.lock().remove(&id);
            }
            return true;
        }
        false
    }

    /// Logs a NACK. While Envoy has no version of the secret, the pod is not ready.
    fn report_refusal(&self, code: i32, reason: &str) {
        let id = self.id;
        let names = Vec::from_iter(self.names.keys().map(Name::to_string)).join(", ");
        let names = escaped(&names, MAX_REASON);
        let kind = if self.has_version {
            codes::SECRET_UPDATE_REFUSED
        } else {
            codes::SECRET_REFUSED
        };
        let found = format!("Envoy refuses it: {reason}");
        let problem = Problem::new(kind, format!("secret {names}"), found);
        tracing::error!(target: "ads", "ADS:SDS: ACK ERROR {id} {code}:{reason}; {problem}");
        if !names.is_empty() {
            self.metrics.refusals.lock().insert(id, problem);
        }
    }

    /// The name, or why it is not served on this socket.
    fn parse(&self, text: &str) -> Result<Name, Problem> {
        let name = text.parse()?;
        match name {
            Name::Default | Name::RootCa if !self.serves_workload => {
                let found = "served on the workload's socket; this one serves secrets from files";
                Err(Problem::new(codes::SECRET_NAME_UNKNOWN, name, found))
            }
            _ => Ok(name),
        }
    }

    /// Logs unserved names with the reason, each once.
    fn report(&mut self, unserved: &[(&String, Problem)]) -> Result<(), Status> {
        for (text, problem) in unserved {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            if !self.unknown.insert(hasher.finish()) {
                continue;
            }
            if self.unknown.len() > MAX_NAMES {
                return Err(Status::resource_exhausted(format!(
                    "more than {MAX_NAMES} unknown names on one stream"
                )));
            }
            tracing::warn!(target: "sds", "stream {}: {problem}", self.id);
        }
        Ok(())
    }

    /// Logs how the stream ended.
    pub(super) fn report_end(&self, status: &Status) {
        let (id, code, message) = (self.id, status.code(), status.message());
        match code {
            // How it looks when Envoy goes away.
            Code::Cancelled | Code::Unavailable | Code::DeadlineExceeded => {
                tracing::info!(target: "ads", "ADS: \"\" {id} terminated {code:?}: {message}");
            }
            _ => {
                self.metrics.internal_errors.inc();
                tracing::error!(
                    target: "ads",
                    "ADS: \"\" {id} terminated with error: {code:?}: {message}"
                );
            }
        }
    }
}
