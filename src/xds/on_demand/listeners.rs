//! Sends Envoy rewritten listeners, and istiod's own if Envoy rejects those. Looks for names in responses that pass.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tonic::Status;

use super::need::Need;
use super::routes::RouteWalker;
use super::{OnDemand, Passing, listener};
use crate::problem::{Code, Problem};
use crate::runtime::clock::after;
use crate::xds::ledger::rejected::rejected;
use crate::xds::ledger::{Field, Type};
use crate::xds::request::{HEAD, Request, encode_subscription, shortened};
use crate::xds::response::Received;
use crate::xds::wire::{NameDigest, ResourceField, Walker};
use crate::xds::{LISTENER, ROUTES, SECRET};

/// The time for which the first listeners wait for clusters.
const WAIT: Duration = Duration::from_secs(1);

/// A response with Envoy's first listeners, or one that follows it. They wait for the endpoints of clusters that they name: the first requests may need these
/// clusters, and Envoy does not wait for them as for the clusters that precede its listeners.
pub(super) struct WaitingListeners {
    received: Received,
    message: Bytes,
    pub(super) until: Instant,
}

/// A response with rewritten listeners.
pub(super) struct Rewritten {
    nonce: String,
    version: String,
    /// The names of all listeners in it, with istiod's field of those that were rewritten.
    listeners: Vec<(NameDigest, Option<Bytes>)>,
}

/// A response with istiod's listeners.
pub(super) struct Originals {
    nonce: String,
    /// The nonce of istiod's response, and Envoy's reason if it has rejected other listeners in it.
    response: String,
    rejection: Option<String>,
}

impl OnDemand {
    /// Takes a complete response of istiod with listeners. Returns the response for Envoy, unless it waits. The clusters that
    /// the listeners name are sent before it.
    pub(in crate::xds) fn read_listeners(
        &mut self,
        received: &Received,
        message: &Bytes,
    ) -> Result<Option<Bytes>, Status> {
        let cache = self.cache.clone();
        let mut state = cache.lock();
        let rewritten =
            listener::rewrite(message, |name| state.catalog.is_plain(name)).map_err(|error| {
                Status::internal(format!("discovery response from istiod: listeners: {error}"))
            })?;
        let mut listeners = Vec::new();
        for listener in rewritten.listeners {
            for mention in listener.mentions {
                state.catalog.add_mention(mention);
            }
            state.catalog.add_whole_tables(listener.route_tables);
            let original = listener.is_rewritten.then(|| message.slice(listener.original));
            listeners.push((NameDigest::of(listener.name.as_bytes()), original));
        }
        if listeners.iter().any(|(_, original)| original.is_some()) {
            let nonce = received.nonce.clone();
            let version = received.version.clone();
            self.rewritten.push_back(Rewritten { nonce, version, listeners });
        }
        // Later listeners do not overtake the first ones.
        let waits =
            !std::mem::replace(&mut self.is_ready, true) || !self.waiting_listeners.is_empty();
        if waits {
            self.waiting_listeners.push_back(WaitingListeners {
                received: received.clone(),
                message: rewritten.message.clone(),
                until: after(WAIT),
            });
        }
        self.offer_mentioned(&mut state);
        Ok((!waits).then_some(rewritten.message))
    }

    /// Returns listeners that no longer wait. They follow what is in `to_envoy`.
    pub(in crate::xds) fn take_listeners(&mut self) -> Option<(Received, Bytes)> {
        let is_waiting = self.held.values().any(|need| matches!(need, Need::Endpoints(_)));
        if is_waiting && self.waiting_listeners.front()?.until > Instant::now() {
            return None;
        }
        let listeners = self.waiting_listeners.pop_front()?;
        Some((listeners.received, listeners.message))
    }

    /// Takes a request of Envoy for listeners. Returns true if istiod gets it. If Envoy rejects rewritten listeners, istiod
    /// gets the answer to its own, which Envoy gets now.
    pub(in crate::xds) fn read_listeners_request(&mut self, request: &Request) -> bool {
        self.is_ready |= !request.nonce.is_empty();
        if let Some(index) = self.originals.iter().position(|it| it.nonce == request.nonce) {
            let answered = self.originals.drain(..=index).next_back();
            let rejection = request.rejection.as_deref().map(shortened);
            if let Some(Originals { response, rejection: other, .. }) = answered {
                self.send_ack_or_nack(LISTENER, &response, rejection.or(other).as_deref());
            }
            return false;
        }
        let found = self.rewritten.iter().position(|it| it.nonce == request.nonce);
        let answered = found.and_then(|index| self.rewritten.drain(..=index).next_back());
        let (Some(answered), Some(reason)) = (answered, &request.rejection) else {
            return true;
        };
        let names = answered.listeners.iter().map(|(name, _)| *name).collect();
        let rejected = rejected(reason, &names);
        let mut originals = Vec::new();
        let mut fields = Vec::new();
        let mut rejects_others = false;
        let cache = self.cache.clone();
        let mut state = cache.lock();
        for (name, original) in answered.listeners {
            if !rejected.contains(&name) {
                continue;
            }
            let Some(original) = original else {
                rejects_others = true;
                continue;
            };
            state.catalog.add_mentions_in(&original);
            state.catalog.add_plain(name);
            let place = state.store.append_any(Type::LISTENER, &original);
            fields.push(Field { name, place, is_removed: false, response: 0 });
            originals.extend_from_slice(&original);
        }
        if fields.is_empty() {
            return true;
        }
        let reason = shortened(reason);
        let problem = Problem::new(Code::OnDemandListenerRefused, "a listener", &reason);
        tracing::error!(target: "xdsproxy", id = self.id, "{problem}");
        state.catalog.rejected_listeners = Some(reason.clone());
        self.offer_mentioned(&mut state);
        let nonce = self.respond(&mut state, Type::LISTENER, &answered.version, &originals, fields);
        let rejection = rejects_others.then_some(reason);
        self.originals.push_back(Originals { nonce, response: answered.nonce, rejection });
        false
    }

    /// Begins a response that passes to Envoy.
    pub(in crate::xds) fn begin_response(&mut self, type_url: &str, length: u64) {
        self.passing = match type_url {
            ROUTES => Some(Passing::Routes(HEAD, RouteWalker::new(length))),
            SECRET => Some(Passing::Secrets(HEAD, Walker::finder(length))),
            _ => None,
        };
    }

    /// Looks for names in the bytes of the response that passes. Envoy says what is wrong with a malformed one.
    pub(in crate::xds) fn read_bytes(&mut self, bytes: &Bytes) {
        let message = |head: &mut usize| {
            let skipped = bytes.len().min(*head);
            *head -= skipped;
            bytes.slice(skipped..)
        };
        let cache = self.cache.clone();
        match self.passing.take() {
            Some(Passing::Routes(mut head, mut walker)) => {
                let message = message(&mut head);
                let mut state = cache.lock();
                let mut found = Vec::new();
                let is_whole = |name: &str| state.catalog.is_whole_table(name);
                let read = walker.read(&message, is_whole, |_, name| found.push(name.to_owned()));
                found.iter().for_each(|name| state.catalog.add_mention(name.as_str()));
                self.passing = read.is_ok().then_some(Passing::Routes(head, walker));
            }
            Some(Passing::Secrets(mut head, mut walker)) => {
                let message = message(&mut head);
                let mut found = Vec::new();
                let read = walker.find(&message, |ResourceField { name, .. }| found.push(name));
                self.passing = read.is_ok().then_some(Passing::Secrets(head, walker));
                found.into_iter().for_each(|name| self.read_secret(name));
            }
            None => {}
        }
    }

    /// Ends the response that passes. Clusters that it names follow it.
    pub(in crate::xds) fn end_response(&mut self) {
        if let Some(Passing::Routes(..)) = self.passing.take() {
            let cache = self.cache.clone();
            self.offer_mentioned(&mut cache.lock());
        }
    }

    /// Takes the name of a secret that has come. The agent's own subscription ends, so that istiod answers Envoy's.
    fn read_secret(&mut self, name: NameDigest) {
        self.secrets.insert(name);
        if let Some(text) = self.awaited_secrets.remove(&name) {
            self.to_istiod.push(encode_subscription(SECRET, vec![text], true));
            self.release(|need| *need == Need::Secret(name));
        }
    }

    /// Takes a response with extension configurations, which may name clusters.
    pub(in crate::xds) fn read_extensions(&mut self, message: &Bytes) {
        let cache = self.cache.clone();
        let mut state = cache.lock();
        state.catalog.add_mentions_in(message);
        self.offer_mentioned(&mut state);
    }
}
