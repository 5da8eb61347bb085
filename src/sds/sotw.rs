//! State-of-the-world (SotW) variant of the protocol: the names asked for, what was sent of each, the
//! last nonce.
//!
//! A state machine without I/O. A secret is due when it was not sent since it was asked for, or when it
//! differs from the one sent last: pushes that wait for Envoy fall together. A secret that cannot be had
//! delays no other; SotW has no way to report it.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tonic::Status;

use super::context::StreamContext;
use super::resource::{Lookup, Resource, TYPE_URL, Version};
use super::stream::{Protocol, ResponseId};
use crate::secrets::SecretState;
use crate::secrets::name::Name;

/// The protocol state of one stream.
#[derive(Debug, Default)]
pub(super) struct StateOfTheWorld {
    /// The names subscribed to, each with what was sent of it since it was asked for.
    subscribed: Option<BTreeMap<Name, Option<Version>>>,
    /// The nonce of the latest response.
    nonce: Option<String>,
}

impl Protocol for StateOfTheWorld {
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;

    fn apply(
        &mut self,
        context: &mut StreamContext,
        request: &DiscoveryRequest,
    ) -> Result<(), Status> {
        if context.is_skipped(&request.type_url, request.node.as_ref())?
            || !self.subscribes(context, request)
        {
            return Ok(());
        }
        let names = served(context, &request.resource_names)?;
        // Without a nonce Envoy starts over: all it names is due again.
        let mut sent = match self.subscribed.take() {
            Some(sent) if !request.response_nonce.is_empty() => sent,
            _ => BTreeMap::new(),
        };
        let names = names.into_iter().map(|name| {
            let version = sent.remove(&name).flatten();
            (name, version)
        });
        self.subscribed = Some(names.collect());
        Ok(())
    }

    fn names(&self) -> BTreeSet<Name> {
        let subscribed = self.subscribed.iter().flatten();
        subscribed.map(|(name, _)| name.clone()).collect()
    }

    fn unanswered(&self) -> impl Iterator<Item = &Name> {
        let subscribed = self.subscribed.iter().flatten();
        subscribed.filter_map(|(name, sent)| sent.is_none().then_some(name))
    }

    fn answer(
        &mut self,
        lookup: &Lookup<'_>,
        is_batching: bool,
        id: impl FnOnce() -> ResponseId,
    ) -> Option<DiscoveryResponse> {
        let due = self.due(lookup, is_batching);
        if due.is_empty() {
            return None;
        }
        let ResponseId { version, nonce } = id();
        self.nonce = Some(nonce.clone());
        let resources = due.iter().map(|(name, resource)| resource.encode(name));
        let resources = resources.collect();
        for (name, resource) in due {
            let subscribed = self.subscribed.get_or_insert_default();
            subscribed.insert(name, Some(resource.version()));
        }
        Some(DiscoveryResponse {
            version_info: version,
            resources,
            type_url: TYPE_URL.to_owned(),
            nonce,
            ..Default::default()
        })
    }
}

impl StateOfTheWorld {
    /// Whether the names of a request count. NACKs, unsubscriptions and answers to an older response
    /// are dealt with here.
    fn subscribes(&mut self, context: &StreamContext, request: &DiscoveryRequest) -> bool {
        let id = context.id;
        if let Some(error) = &request.error_detail {
            context.nack(error);
            return false;
        }
        if request.resource_names.is_empty() && request.type_url == TYPE_URL {
            tracing::debug!(target: "ads", "ADS:SDS: UNSUBSCRIBE {id}");
            self.subscribed = None;
            return false;
        }
        if self.is_stale(&request.response_nonce) {
            context.metrics.expired_nonces.inc();
            tracing::debug!(target: "ads", "ADS:SDS: REQ {id} Expired nonce received");
            return false;
        }
        true
    }

    /// Whether a request answers a response older than the latest. Before the first response, a nonce
    /// is one of an earlier stream, and the request subscribes.
    fn is_stale(&self, nonce: &str) -> bool {
        let latest = self.nonce.as_deref();
        !nonce.is_empty()
            && self.subscribed.is_some()
            && latest.is_some_and(|latest| latest != nonce)
    }

    /// What the next response carries. Names just asked for go together, while batching not before the
    /// files of all are read; changed ones go one by one, roots first.
    fn due<'a>(&self, lookup: &Lookup<'a>, is_batching: bool) -> Vec<(Name, Resource<'a>)> {
        let mut asked = Vec::new();
        let mut changed = Vec::new();
        let mut is_complete = true;
        for (name, sent) in self.subscribed.iter().flatten() {
            match (sent, lookup(name)) {
                (None, SecretState::Available(now)) => asked.push((name.clone(), now)),
                (None, SecretState::Reading) => is_complete = false,
                (Some(sent), SecretState::Available(now)) if *sent != now.version() => {
                    changed.push((name.clone(), now));
                }
                _ => {}
            }
        }
        if asked.is_empty() || (is_batching && !is_complete) {
            changed.truncate(1);
            changed
        } else {
            asked
        }
    }
}

/// The names that are served. Unknown ones beside them are logged once; alone they end the stream.
fn served(context: &mut StreamContext, names: &[String]) -> Result<BTreeSet<Name>, Status> {
    context.check_count(names.len())?;
    let mut served = BTreeSet::new();
    let mut unserved = Vec::new();
    for text in names {
        match context.parse(text) {
            Ok(name) => drop(served.insert(name)),
            Err(error) => unserved.push((text, error)),
        }
    }
    if let (true, Some((_, error))) = (served.is_empty(), unserved.first()) {
        return Err(Status::invalid_argument(error));
    }
    for (text, error) in &unserved {
        context.report_unserved(text, error)?;
    }
    Ok(served)
}
