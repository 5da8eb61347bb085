//! Implements the state-of-the-world (SotW) protocol as a state machine without I/O.
//!
//! Each request lists all names, and acknowledges or rejects the response with its nonce. A secret is due
//! if it has not been sent since it was requested, or if it differs from the one sent last, so pushes that
//! wait for Envoy are merged. A missing secret does not delay others; SotW cannot report it.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tonic::{Code, Status};

use super::metrics::Metrics;
use super::resource::{Resource, TYPE_URL, Version};
use crate::problem::{self, Problem};
use crate::secrets::name::{Name, escaped};

/// The most names of one request.
const MAX_NAMES: usize = 10_000;

/// The number of bytes of Envoy's reason for a NACK that are logged.
const MAX_REASON: usize = 1024;

/// The type of a leading request without names, which some xDS clients send.
const HEALTH_TYPE_URL: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// Looks up the resource of a name; None if it does not exist now.
pub(super) type Lookup<'a> = dyn Fn(&Name) -> Option<Resource<'a>> + 'a;

#[derive(Debug)]
pub(super) struct StateOfTheWorld {
    pub(super) id: u64,
    pub(super) metrics: Metrics,
    /// True if `default` and `ROOTCA` are served on this socket.
    serves_workload: bool,
    /// True once a request has named the node.
    has_node: bool,
    /// The requested names, each with the version that was last sent since the request. None if none was sent.
    names: BTreeMap<Name, Option<Version>>,
    nonce: Option<String>,
    /// True once Envoy has a version of the secret. Each of its streams requests one secret.
    has_version: bool,
}

impl Drop for StateOfTheWorld {
    fn drop(&mut self) {
        self.metrics.rejections.lock().remove(&self.id);
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
            nonce: None,
            has_version: false,
        }
    }

    /// Applies a request of Envoy. An error is the status to end the stream with.
    pub(super) fn apply(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        if !self.has_node && request.type_url == HEALTH_TYPE_URL {
            tracing::warn!(target: "ads", "ADS: {} skipped a leading health report", self.id);
            return Ok(());
        }
        self.check_first_request(request)?;
        let Some(texts) = self.process_nonce_and_error(request) else {
            return Ok(());
        };
        if texts.len() > MAX_NAMES {
            return Err(Status::resource_exhausted(format!(
                "{} names in one request, expected at most {MAX_NAMES}",
                texts.len()
            )));
        }
        // Without a nonce Envoy starts over: all requested names are due again.
        let mut before = std::mem::take(&mut self.names);
        if request.response_nonce.is_empty() {
            before.clear();
        }
        let begins = before.is_empty() || self.nonce.is_none();
        let mut unserved = None;
        let mut added = Vec::new();
        for text in texts {
            match self.parse(text) {
                Ok(name) => {
                    // Nothing has been sent for a name that is new.
                    let sent = before.remove(&name);
                    if sent.is_none() && !self.names.contains_key(&name) {
                        added.push(text);
                    }
                    self.names.entry(name).or_insert(sent.flatten());
                }
                Err(problem) => _ = unserved.get_or_insert(problem),
            }
        }
        let DiscoveryRequest { version_info: version, response_nonce: nonce, .. } = request;
        if begins {
            tracing::debug!(target: "ads", "ADS:SDS: INIT/RECONNECT {} {version} {nonce}", self.id);
        } else if added.is_empty() && before.is_empty() {
            tracing::debug!(target: "ads", "ADS:SDS: ACK {} {version} {nonce}", self.id);
        } else {
            tracing::debug!(
                target: "ads",
                "ADS:SDS: RESOURCE CHANGE added {added:?} removed {:?} {} {version} {nonce}",
                before.keys().map(Name::to_string).collect::<Vec<_>>(), self.id
            );
        }
        if let Some(problem) = unserved {
            // Without any served name the stream ends.
            if self.names.is_empty() {
                return Err(Status::invalid_argument(problem.to_string()));
            }
            tracing::warn!(target: "sds", "stream {}: {problem}", self.id);
        }
        Ok(())
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &Name> {
        self.names.keys()
    }

    pub(super) fn unsent(&self) -> impl Iterator<Item = &Name> {
        self.names.iter().filter_map(|(name, sent)| if sent.is_none() { Some(name) } else { None })
    }

    /// Returns the response that is due, if any, and marks it as sent. It has all newly requested names, or
    /// one changed name, roots first. `empty` returns a response with a version and a nonce.
    pub(super) fn next_response(
        &mut self,
        lookup: &Lookup<'_>,
        empty: impl FnOnce() -> DiscoveryResponse,
    ) -> Option<DiscoveryResponse> {
        let mut due = Vec::new();
        let mut changed = None;
        for (name, sent) in &mut self.names {
            match lookup(name) {
                Some(now) if sent.is_none() => due.push((name, sent, now)),
                Some(now) if changed.is_none() && *sent != Some(now.version()) => {
                    changed = Some((name, sent, now));
                }
                _ => {}
            }
        }
        if due.is_empty() {
            let changed = changed?;
            tracing::debug!(target: "sds", "Trigger on secret update, resource name: {}", changed.0);
            due.push(changed);
        }
        let response = empty();
        self.nonce = Some(response.nonce.clone());
        let resources = due.into_iter().map(|(name, sent, resource)| {
            *sent = Some(resource.version());
            resource.encode(name)
        });
        Some(DiscoveryResponse {
            resources: resources.collect(),
            type_url: TYPE_URL.to_owned(),
            ..response
        })
    }

    /// Fails, which ends the stream, if its first request does not name the node.
    fn check_first_request(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        if !self.has_node && request.node.as_ref().is_none_or(|node| node.id.is_empty()) {
            return Err(Status::invalid_argument("missing node information"));
        }
        self.has_node = true;
        Ok(())
    }

    /// Processes the nonce and error of a request, and an unsubscription. Returns the names to apply; None if they are
    /// not: after a NACK, an unsubscription or an acknowledgement of an older response.
    fn process_nonce_and_error<'a>(
        &mut self,
        request: &'a DiscoveryRequest,
    ) -> Option<&'a [String]> {
        let id = self.id;
        let nonce = &request.response_nonce;
        // Before the first response, a nonce is one of an earlier stream, and the request subscribes.
        let latest = if self.names.is_empty() { None } else { self.nonce.as_ref() };
        // The version may come from an earlier stream.
        self.has_version |= !request.version_info.is_empty();
        if let Some(error) = &request.error_detail {
            self.metrics.rejects.inc();
            self.report_rejection(error.code, &escaped(&error.message, MAX_REASON));
        } else if request.resource_names.is_empty() && request.type_url == TYPE_URL {
            tracing::debug!(target: "ads", "ADS:SDS: UNSUBSCRIBE {id} {} {nonce}", request.version_info);
            self.names.clear();
            self.metrics.rejections.lock().remove(&id);
        } else if !nonce.is_empty() && latest.is_some_and(|latest| latest != nonce) {
            self.metrics.expired_nonces.inc();
            let sent = latest.map_or("", String::as_str);
            tracing::debug!(target: "ads", "ADS:SDS: REQ {id} Expired nonce received {nonce}, sent {sent}");
        } else {
            if latest == Some(nonce) {
                self.has_version = true;
                self.metrics.rejections.lock().remove(&id);
            }
            return Some(&request.resource_names);
        }
        None
    }

    /// Logs a NACK. While Envoy has no version of the secret, the pod is not ready.
    fn report_rejection(&self, code: i32, reason: &str) {
        let id = self.id;
        let names = Vec::from_iter(self.names.keys().map(Name::to_string)).join(", ");
        let names = escaped(&names, MAX_REASON);
        let problem_code = if self.has_version {
            problem::Code::SecretUpdateRefused
        } else {
            problem::Code::SecretRefused
        };
        let found = format!("Envoy refuses it: {reason}");
        let problem = Problem::new(problem_code, format!("secret {names}"), found);
        tracing::error!(target: "ads", "ADS:SDS: ACK ERROR {id} {code}:{reason}; {problem}");
        if !names.is_empty() {
            self.metrics.rejections.lock().insert(id, problem);
        }
    }

    /// Parses a name. The error says why it is not served on this socket.
    fn parse(&self, text: &str) -> Result<Name, Problem> {
        let name = text.parse()?;
        match name {
            Name::Default | Name::RootCa if !self.serves_workload => {
                let found = "served on the workload's socket; this one serves secrets from files";
                Err(Problem::new(problem::Code::SecretNameUnknown, name, found))
            }
            _ => Ok(name),
        }
    }

    pub(super) fn report_end(&self, status: &Status) {
        let id = self.id;
        let code = status.code();
        let message = status.message();
        match code {
            // These are the codes when Envoy closes the stream or exits.
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
