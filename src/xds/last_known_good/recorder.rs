//! Hands what passes on a stream of Envoy to the writer.
//!
//! The bytes are those Envoy gets, not copied, up to [`BATCH`] at once. A response waits for the writer
//! for [`PATIENCE`] in all. Then it goes on without, and what is kept of its type is lost, so that a
//! disk that hangs stops no configuration.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::time::Instant;

use super::subscription::Subscription;
use super::writer::{Coverage, WriteOp};
use super::{EnvoyCache, file};
use crate::xds::Protocol;
use crate::xds::observe::Source;
use crate::xds::request::Request;
use crate::xds::response::{Captured, Received};
use crate::xds::stream::LISTENER;

/// Responses are written in parts of this size.
pub(super) const BATCH: usize = 64 * 1024;

/// How long a response waits for the disk, once until the disk follows again.
const PATIENCE: Duration = Duration::from_secs(1);

/// How many ops without bytes wait for a disk that hangs before all that is kept is given up.
const MAX_PENDING: usize = 64;

const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// As it came it may hold pull secrets of Wasm modules.
const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// Resources of this type do not begin with their name, which SotW needs.
const WORKLOAD: &str = "type.googleapis.com/istio.workload.Workload";

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
    types: HashMap<String, TypeState>,
    /// Whether the response that passes is kept.
    is_passing: bool,
    batch: Vec<Bytes>,
    batch_bytes: usize,
    pending: VecDeque<WriteOp>,
    /// What is left of [`PATIENCE`].
    patience: Duration,
}

/// The subscription to a type.
#[derive(Debug, Default)]
struct TypeState {
    /// SotW: the names in the newest request. Delta: the resources Envoy had when the stream began.
    names: usize,
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
            is_passing: false,
            batch: Vec::new(),
            batch_bytes: 0,
            pending: VecDeque::new(),
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
        if self.is_recording {
            self.record(request);
        }
    }

    fn record(&mut self, request: &Request) {
        let Ok(subscription) = Subscription::read(self.protocol, &request.frame) else {
            return; // It has been decoded before.
        };
        if !self.has_node {
            self.has_node = true;
            if let Some(identity) = subscription.identity(self.protocol) {
                let protocol = self.protocol;
                self.pending.push_back(WriteOp::Node { protocol, identity });
            }
        }
        if !self.keeps(&request.type_url) {
            return;
        }
        let type_url = request.type_url.clone();
        let is_first = !self.types.contains_key(&type_url);
        let state = self.types.entry(type_url.clone()).or_default();
        match self.protocol {
            Protocol::Sotw => state.names = subscription.names.len(),
            Protocol::Delta if is_first => state.names = subscription.held,
            Protocol::Delta => {}
        }
        state.is_awaited |= request.nonce.is_empty();
        if !request.nonce.is_empty() {
            let nonce = request.nonce.clone();
            self.answered(type_url.clone(), nonce, request.nack.is_none());
        }
        let names = subscription.unsubscribed;
        if !names.is_empty() {
            self.pending
                .push_back(WriteOp::Unsubscribed { type_url, names });
        }
    }

    /// Whether the bytes that follow are of a type that is kept.
    pub(in crate::xds) fn begins(&mut self, type_url: &str) {
        self.is_passing = self.is_recording && type_url != EXTENSION && self.keeps(type_url);
        if self.pending.is_empty() {
            self.patience = PATIENCE;
        }
    }

    /// Takes bytes of a response that passes.
    pub(in crate::xds) fn passes(&mut self, bytes: &Bytes) {
        if let Some(envoy) = self.envoy.as_ref().filter(|_| self.is_recording) {
            envoy.heard_of_istiod(true);
        }
        if !self.is_passing {
            return;
        }
        self.batch.push(bytes.clone());
        self.batch_bytes += bytes.len();
        if self.batch_bytes >= BATCH {
            self.send_batch();
        }
    }

    /// The response that passes is complete. It counts from its ACK.
    pub(in crate::xds) fn passed(&mut self, received: &Received) {
        if let Some(state) = self.types.get_mut(&received.type_url) {
            state.is_awaited = false;
        }
        if let Some(envoy) = self.envoy.as_ref().filter(|_| self.is_recording) {
            envoy.heard_of_istiod(self.types.values().any(|state| state.is_awaited));
        }
        if !std::mem::take(&mut self.is_passing) {
            return;
        }
        self.send_batch();
        let coverage = self.coverage(received);
        let op = WriteOp::Complete(received.clone(), coverage);
        self.pending.push_back(op);
    }

    /// Takes a message without its head that Envoy gets in place of istiod's.
    pub(in crate::xds) fn rewritten(&mut self, received: &Received, message: &Bytes) {
        if self.is_recording {
            let coverage = self.coverage(received);
            self.message(received, message, coverage);
        }
    }

    /// Takes a message that the agent has consumed. It is all there is of its type.
    pub(in crate::xds) fn consumed(&mut self, captured: &Captured) {
        if self.is_recording {
            let received = &captured.received;
            self.message(received, &captured.message, Coverage::All);
            self.answered(received.type_url.clone(), received.nonce.clone(), true);
        }
    }

    /// Another response may just pass in part.
    fn message(&mut self, received: &Received, message: &Bytes, coverage: Coverage) {
        let bytes = message.len() as u64;
        if let Ok(head) = file::head(bytes) {
            let parts = vec![Bytes::copy_from_slice(&head), message.clone()];
            let received = Received {
                bytes,
                ..received.clone()
            };
            let op = WriteOp::Message(parts, received, coverage);
            self.pending.push_back(op);
        }
    }

    fn coverage(&mut self, received: &Received) -> Coverage {
        let state = self.types.entry(received.type_url.clone()).or_default();
        let is_first = state.responses == 0;
        state.responses += 1;
        let has_all = received.resources as usize >= state.names;
        match self.protocol {
            Protocol::Sotw if has_all => Coverage::All,
            Protocol::Delta if is_first && state.names == 0 => Coverage::All,
            Protocol::Sotw if is_first => Coverage::Initial,
            Protocol::Delta if is_first && has_all => Coverage::Initial,
            _ => Coverage::Part,
        }
    }

    fn keeps(&self, type_url: &str) -> bool {
        type_url != SECRET && (type_url != WORKLOAD || self.protocol == Protocol::Delta)
    }

    fn answered(&mut self, type_url: String, nonce: String, is_accepted: bool) {
        self.pending.push_back(WriteOp::Answered {
            type_url,
            nonce,
            is_accepted,
        });
    }

    fn send_batch(&mut self) {
        self.batch_bytes = 0;
        let batch = std::mem::take(&mut self.batch);
        if !batch.is_empty() {
            self.pending.push_back(WriteOp::Bytes(batch));
        }
    }

    /// Waits until the writer has room for what it did not take in time; for ever if there is nothing.
    /// Cancel safe.
    pub(in crate::xds) async fn has_room(&self) {
        match &self.envoy {
            Some(envoy) if !self.pending.is_empty() => drop(envoy.kept.ops.reserve().await),
            _ => std::future::pending().await,
        }
    }

    /// Gives the writer what it is to write.
    pub(in crate::xds) async fn flush(&mut self) {
        let Some(EnvoyCache { kept, .. }) = &self.envoy else {
            return;
        };
        while let Some(op) = self.pending.pop_front() {
            let began = Instant::now();
            let sent = kept.ops.send_timeout((self.stream, op), self.patience);
            let sent = sent.await;
            self.patience = self.patience.saturating_sub(began.elapsed());
            if let Err(SendTimeoutError::Timeout((_, op))) = sent {
                self.patience = Duration::ZERO;
                self.pending.push_front(op);
                break;
            }
        }
        if self.patience.is_zero() {
            // Without its bytes a response does not count, nor does what is kept of its type.
            let ops = std::mem::take(&mut self.pending).into_iter();
            let without_bytes = ops.filter_map(|op| match op {
                WriteOp::Bytes(_) => None,
                WriteOp::Message(_, received, coverage) => {
                    Some(WriteOp::Message(Vec::new(), received, coverage))
                }
                op => Some(op),
            });
            self.pending = without_bytes.collect();
        }
        if self.pending.len() > MAX_PENDING {
            self.pending.clear();
            kept.has_lost.store(true, Ordering::Release);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(EnvoyCache { kept, .. }) = &self.envoy {
            kept.ended.lock().push(self.stream);
        }
    }
}
