//! Hands what passes on a stream of Envoy to the writer.
//!
//! The bytes are those Envoy gets, not copied, up to [`BATCH`] at once. A slow disk delays one response
//! by up to [`PATIENCE`]; later ones do not wait until it has recovered. What is kept of the types of
//! which it has missed something is deleted.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::file::{head, retained_frame};
use super::subscription::Subscription;
use super::writer::{Coverage, StreamInfo, WriteOp};
use super::{EXTENSION, EnvoyCache, TYPES, Type, WORKLOAD};
use crate::xds::Protocol;
use crate::xds::observe::Source;
use crate::xds::request::Request;
use crate::xds::response::{Captured, Received};
use crate::xds::stream::LISTENER;

/// Responses are written in parts of this size.
pub(super) const BATCH: usize = 64 * 1024;

/// How long responses wait for the disk in all, until it follows again.
const PATIENCE: Duration = Duration::from_secs(1);

/// What passes on one stream. Without an Envoy for which configuration is kept, it does nothing.
#[derive(Debug)]
pub(in crate::xds) struct Recorder {
    envoy: Option<EnvoyCache>,
    /// Whether istiod answers, not what is kept.
    is_recording: bool,
    /// Envoy's last request, once it has answered listeners.
    settling_since: Option<Instant>,
    stream: u32,
    protocol: Protocol,
    has_node: bool,
    types: HashMap<Type, TypeState>,
    /// The type of the response that passes, if it is kept.
    passing: Option<Type>,
    /// For the writer.
    pub(super) pending: Vec<(Type, WriteOp)>,
    /// In `pending`: bytes, and whether the writer has missed something.
    bytes: usize,
    has_lost: bool,
    /// What is left of [`PATIENCE`].
    patience: Duration,
}

/// The subscription to a type.
#[derive(Debug, Default)]
struct TypeState {
    /// SotW: how many names the newest request has. Delta: how many resources Envoy had when the stream
    /// began.
    names: usize,
    /// The names of the latter, until the first response.
    held: Vec<Bytes>,
    responses: u64,
    /// Whether istiod is to answer a request that answers no response itself.
    is_awaited: bool,
}

impl Recorder {
    pub(in crate::xds) fn new(envoy: Option<EnvoyCache>, stream: u32, protocol: Protocol) -> Self {
        Self {
            is_recording: envoy.is_some(),
            envoy,
            settling_since: None,
            stream,
            protocol,
            has_node: false,
            types: HashMap::new(),
            passing: None,
            pending: Vec::new(),
            bytes: 0,
            has_lost: false,
            patience: PATIENCE,
        }
    }

    /// From now on the responses are those that are kept.
    pub(in crate::xds) fn stop(&mut self) {
        self.is_recording = false;
        self.pending.clear();
    }

    pub(in crate::xds) fn source(&self) -> Source {
        match self.envoy.is_none() || self.is_recording {
            true => Source::Istiod,
            false => Source::Kept,
        }
    }

    pub(in crate::xds) fn settling_since(&self) -> Option<Instant> {
        self.settling_since
    }

    /// Takes a request of Envoy: its subscription, and the ACK or NACK in it.
    pub(in crate::xds) fn requested(&mut self, request: &Request) {
        let Some(envoy) = &self.envoy else {
            return;
        };
        if request.nonce.is_empty() {
            envoy.requested();
        }
        let answers_listeners = request.type_url == LISTENER && !request.nonce.is_empty();
        if answers_listeners || self.settling_since.is_some() {
            envoy.end_waiting();
            self.settling_since = Some(Instant::now());
        }
        // It has been decoded before.
        if self.is_recording
            && let Ok(subscription) = Subscription::read(self.protocol, &request.frame)
        {
            self.record(request, subscription, envoy.envoy.generation);
        }
    }

    fn record(&mut self, request: &Request, subscription: Subscription, generation: u64) {
        if !self.has_node {
            self.has_node = true;
            if let Some(identity) = subscription.identity(self.protocol) {
                let protocol = self.protocol;
                let info = StreamInfo {
                    protocol,
                    identity,
                    generation,
                };
                self.push("", WriteOp::Begin(info));
            }
        }
        let Some(type_url) = self.kept(&request.type_url) else {
            return;
        };
        let is_first = !self.types.contains_key(type_url);
        let state = self.types.entry(type_url).or_default();
        match self.protocol {
            Protocol::Sotw => state.names = subscription.names.len(),
            Protocol::Delta if is_first => {
                (state.names, state.held) = (subscription.held.len(), subscription.held);
            }
            Protocol::Delta => {}
        }
        match request.nonce.is_empty() {
            true => state.is_awaited = true,
            false => self.answered(type_url, &request.nonce, request.nack.is_none()),
        }
    }

    /// The type, if it is kept. Secrets are not.
    fn kept(&self, type_url: &str) -> Option<Type> {
        let found = TYPES.into_iter().find(|it| *it == type_url);
        found.filter(|it| *it != WORKLOAD || self.protocol == Protocol::Delta)
    }

    /// Whether the bytes that follow are of a type that is kept.
    pub(in crate::xds) fn begins(&mut self, type_url: &str) {
        let kept = self.kept(type_url).filter(|it| *it != EXTENSION);
        self.passing = kept.filter(|_| self.is_recording);
        let is_stalled = |envoy: &EnvoyCache| envoy.kept.is_stalled.load(Ordering::Relaxed);
        if !self.envoy.as_ref().is_some_and(is_stalled) {
            self.patience = PATIENCE;
        }
        if let Some(type_url) = self.passing {
            self.retain(type_url);
        }
    }

    /// What a reconnecting Envoy has not named is removed with the first response.
    fn retain(&mut self, type_url: Type) {
        let state = self.types.get_mut(type_url);
        let held = state.map(|state| std::mem::take(&mut state.held));
        if let Some(held) = held.filter(|held| !held.is_empty())
            && let Ok(frame) = retained_frame(held)
        {
            self.push(type_url, WriteOp::Bytes(frame));
        }
    }

    /// Takes bytes of a response that passes.
    pub(in crate::xds) fn passes(&mut self, bytes: &Bytes) {
        if let Some(envoy) = self.envoy.as_ref().filter(|_| self.is_recording) {
            envoy.heard_of_istiod(true);
        }
        if let Some(type_url) = self.passing {
            self.bytes += bytes.len();
            self.push(type_url, WriteOp::Bytes(bytes.clone()));
        }
    }

    /// The response that passes is complete. It counts from its ACK.
    pub(in crate::xds) fn passed(&mut self, received: &Received) {
        if let Some(state) = self.types.get_mut(&*received.type_url) {
            state.is_awaited = false;
        }
        if let Some(envoy) = self.envoy.as_ref().filter(|_| self.is_recording) {
            envoy.heard_of_istiod(self.types.values().any(|state| state.is_awaited));
        }
        if let Some(type_url) = self.passing.take() {
            self.complete(type_url, received, false);
        }
    }

    /// Takes a message without its head that Envoy gets in place of istiod's.
    pub(in crate::xds) fn rewritten(&mut self, received: &Received, message: &Bytes) {
        self.message(received, message, false);
    }

    /// Takes a message that the agent has consumed. It is all there is of its type.
    pub(in crate::xds) fn consumed(&mut self, captured: &Captured) {
        let received = &captured.received;
        if let Some(type_url) = self.message(received, &captured.message, true) {
            self.answered(type_url, &received.nonce, true);
        }
    }

    fn message(&mut self, received: &Received, message: &Bytes, is_all: bool) -> Option<Type> {
        let type_url = self
            .kept(&received.type_url)
            .filter(|_| self.is_recording)?;
        let head = head(message.len() as u64).ok()?;
        self.retain(type_url);
        self.push(type_url, WriteOp::Bytes(Bytes::copy_from_slice(&head)));
        self.push(type_url, WriteOp::Bytes(message.clone()));
        self.complete(type_url, received, is_all);
        Some(type_url)
    }

    fn complete(&mut self, type_url: Type, received: &Received, is_all: bool) {
        let state = self.types.entry(type_url).or_default();
        let is_first = state.responses == 0;
        state.responses += 1;
        let has_all = received.resources as usize >= state.names;
        let coverage = match self.protocol {
            _ if is_all => Coverage::All,
            Protocol::Sotw if has_all => Coverage::All,
            Protocol::Delta if is_first && state.names == 0 => Coverage::All,
            Protocol::Sotw if is_first => Coverage::Initial,
            Protocol::Delta if is_first && has_all => Coverage::Initial,
            _ => Coverage::Part,
        };
        self.push(type_url, WriteOp::Complete(received.clone(), coverage));
    }

    fn answered(&mut self, type_url: Type, nonce: &str, is_accepted: bool) {
        let nonce = nonce.to_owned();
        self.push(type_url, WriteOp::Answered { nonce, is_accepted });
    }

    pub(super) fn push(&mut self, type_url: Type, op: WriteOp) {
        self.pending.push((type_url, op));
    }

    /// Waits until the writer has room for what it has missed; for ever if there is nothing. Cancel
    /// safe.
    pub(in crate::xds) async fn has_room(&self) {
        match &self.envoy {
            Some(envoy) if self.has_lost => drop(envoy.kept.batches.reserve().await),
            _ => std::future::pending().await,
        }
    }

    /// Gives the writer what it is to write.
    pub(in crate::xds) async fn flush(&mut self) {
        let last = self.pending.last();
        let is_part = matches!(last, None | Some((_, WriteOp::Bytes(_)))) && self.bytes < BATCH;
        let has_work = self.has_lost || !is_part;
        let Some(EnvoyCache { kept, .. }) = self.envoy.as_ref().filter(|_| has_work) else {
            return;
        };
        if kept.is_stalled.load(Ordering::Relaxed) {
            self.patience = Duration::ZERO;
        }
        let began = Instant::now();
        let room = timeout(self.patience, kept.batches.reserve()).await;
        self.patience = self.patience.saturating_sub(began.elapsed());
        kept.is_stalled.store(room.is_err(), Ordering::Relaxed);
        self.bytes = 0;
        let ops = std::mem::take(&mut self.pending);
        let mut lost = BTreeSet::new();
        match room {
            Ok(Ok(room)) => room.send((self.stream, ops)),
            _ => ops.into_iter().for_each(|(type_url, op)| match op {
                WriteOp::Begin(_) => self.pending.push((type_url, op)),
                _ => drop(lost.insert(type_url)),
            }),
        }
        self.has_lost = !lost.is_empty();
        // Without its beginning the response that passes does not count.
        self.passing.take_if(|type_url| lost.contains(type_url));
        let lost = lost.into_iter().map(|type_url| (type_url, WriteOp::Lost));
        self.pending.extend(lost);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(EnvoyCache { kept, .. }) = &self.envoy {
            let mut ops = std::mem::take(&mut self.pending);
            // A frozen disk is not to fill the memory.
            ops.retain(|_| !kept.is_stalled.load(Ordering::Relaxed));
            ops.push(("", WriteOp::End));
            kept.ended.lock().push((self.stream, ops));
        }
    }
}
