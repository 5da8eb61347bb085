//! One Envoy stream, state of the world: the names asked for, what was sent of each, the last nonce.
//!
//! A state machine without I/O. Requests change what is watched; what is watched and what there is
//! to serve decide which response is due. A secret is due when it was never sent since it was asked
//! for, or when it is not the one sent last: pushes that nobody waited for fall together. A secret
//! that is not to be had keeps no other waiting; the protocol has no way to say so of one.
//!
//! Does not await, and does not send.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tonic::Status;

use super::desk::{Desk, Waits};
use super::secret::{self, Shelf, Shown, TYPE_URL, Version};
use super::session::{Protocol, Stamp};
use crate::secrets::name::Name;

/// The protocol's side of one stream.
#[derive(Debug)]
pub(super) struct Stream {
    desk: Desk,
    /// The names watched, each with what was sent of it since it was asked for.
    watch: Option<BTreeMap<Name, Option<Version>>>,
    /// The nonce of the latest response.
    nonce: Option<String>,
}

impl Protocol for Stream {
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;

    fn new(desk: Desk) -> Self {
        Self {
            desk,
            watch: None,
            nonce: None,
        }
    }

    fn desk(&self) -> &Desk {
        &self.desk
    }

    fn apply(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        if self
            .desk
            .is_skipped(&request.type_url, request.node.as_ref())?
        {
            return Ok(());
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
                .map(|name| {
                    let sent = sent.get(&name).cloned().flatten();
                    (name, sent)
                })
                .collect(),
        );
        Ok(())
    }

    fn names(&self) -> BTreeSet<Name> {
        self.watch
            .iter()
            .flatten()
            .map(|(name, _)| name.clone())
            .collect()
    }

    fn is_due(&self, shelf: &impl Shelf, is_patient: bool) -> bool {
        !self.due(shelf, is_patient).is_empty()
    }

    fn waits(&self, shelf: &impl Shelf) -> Waits {
        let unsent = self
            .watch
            .iter()
            .flatten()
            .filter(|(_, sent)| sent.is_none());
        Waits::of(unsent.map(|(name, _)| shelf.shown(name)))
    }

    fn answer(&mut self, shelf: &impl Shelf, is_patient: bool, stamp: Stamp) -> DiscoveryResponse {
        let due = self.due(shelf, is_patient);
        let watch = self.watch.get_or_insert_default();
        for (name, version) in &due {
            watch.insert(name.clone(), Some(version.clone()));
        }
        self.nonce = Some(stamp.nonce.clone());
        DiscoveryResponse {
            version_info: stamp.version,
            resources: due
                .iter()
                .filter_map(|(name, _)| secret::resource(name, shelf))
                .collect(),
            type_url: TYPE_URL.to_owned(),
            nonce: stamp.nonce,
            ..Default::default()
        }
    }
}

impl Stream {
    /// Deals with the requests whose names do not count: refusals, unsubscriptions and answers to
    /// an older response. Whether it is another one.
    fn concerns_names(&mut self, request: &DiscoveryRequest) -> bool {
        if let Some(refusal) = &request.error_detail {
            self.desk.refused(refusal);
            return false;
        }
        let id = self.desk.id;
        if request.resource_names.is_empty() && request.type_url == TYPE_URL {
            tracing::debug!(target: "ads", "ADS:SDS: UNSUBSCRIBE {id}");
            self.watch = None;
            return false;
        }
        if self.is_stale(&request.response_nonce) {
            self.desk.metrics.expired_nonces.inc();
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
        self.desk.bound(asked.len())?;
        let mut known = BTreeSet::new();
        let mut unknown = Vec::new();
        for text in asked {
            match self.desk.parse(text) {
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
            self.desk.warn_once(text, error)?;
        }
        Ok(known)
    }

    /// What the next response carries; empty when there is nothing to say. Names just asked for go
    /// together, and if somebody is patient not before all are looked at; changed ones go each by
    /// itself, roots first.
    fn due(&self, shelf: &impl Shelf, is_patient: bool) -> Vec<(Name, Version)> {
        let mut asked = Vec::new();
        let mut changed = Vec::new();
        let mut is_complete = true;
        for (name, sent) in self.watch.iter().flatten() {
            match (sent, shelf.shown(name)) {
                (None, Shown::There(now)) => asked.push((name.clone(), now)),
                (None, Shown::Pending) => is_complete = false,
                (Some(sent), Shown::There(now)) if *sent != now => {
                    changed.push((name.clone(), now));
                }
                _ => {}
            }
        }
        if asked.is_empty() || (is_patient && !is_complete) {
            changed.truncate(1);
            changed
        } else {
            asked
        }
    }
}
