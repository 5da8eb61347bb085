//! Sends the requests and responses of a stream of Envoy to the writer.
//!
//! The bytes are not copied, and are sent in batches of up to [`HANDOVER`]. A slow disk delays a response by up
//! to [`PATIENCE`]. If that is not enough, the stream is no longer recorded, and the stored configuration is
//! deleted. Other streams do not wait for the disk until it has recovered.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::after_nack::{self, Stored, StoredStream};
use super::file::Missing;
use super::writer::WriteOp;
use super::{BY_NAME, CLUSTER, EXTENSION, EnvoyCache, LISTENER, TYPES, Type};
use crate::clock::after;
use crate::xds::request::{HEAD, Request, Subscription};
use crate::xds::response::Received;
use crate::xds::wire;

/// The bytes of responses after which a batch is sent to the writer.
pub(super) const HANDOVER: usize = 256 * 1024;

/// The time that istiod's responses wait for stored clusters after Envoy has refused some.
const CLUSTERS_PATIENCE: Duration = Duration::from_secs(2);

/// The time that a response waits for the disk in all.
const PATIENCE: Duration = Duration::from_secs(1);

/// A resource that Envoy has when the stream begins.
#[derive(Clone, PartialEq, Message)]
struct Held {
    #[prost(bytes = "bytes", tag = "1")]
    name: Bytes,
}

/// The fields of a node that determine istiod's responses. Their maps are ordered, unlike Envoy's.
#[derive(Clone, PartialEq, Message)]
struct Node {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "3")]
    metadata: Option<prost_types::Struct>,
}

/// Returns a digest of the node's id and metadata, which include Istio's version. Configuration of one identity is
/// not served to another.
pub(super) fn identity(subscription: &Subscription) -> Option<String> {
    let node = Node::decode(subscription.node.clone()?).ok()?;
    Some(BASE64_STANDARD.encode(digest(&SHA256, &node.encode_to_vec())))
}

/// The recorder of one stream. It does nothing if configuration is not stored for the client.
pub(crate) struct Recorder {
    envoy: Option<EnvoyCache>,
    is_recording: bool,
    stream: u32,
    /// The types that Envoy has subscribed to.
    subscribed: HashSet<Type>,
    /// The type of the passing response, if it is stored, and the bytes of its gRPC head that are to come.
    passing: Option<(Type, usize)>,
    /// The next batch for the writer.
    pub(super) pending: Vec<(Type, WriteOp)>,
    /// The bytes of responses in `pending`.
    bytes: usize,
    /// The rest of [`PATIENCE`].
    patience: Duration,
    /// The number of responses of a type that have begun.
    begun: HashMap<Type, u32>,
    /// The queue in which the writer asks for stored versions.
    missing: mpsc::Sender<Missing>,
    /// The stored versions that the writer has asked for.
    pub(crate) stored_versions: StoredStream,
    /// Stored versions that Envoy has not answered.
    unanswered: VecDeque<Stored>,
    /// True if Envoy has got a stored version on the stream, and may subscribe to resources that it needs.
    has_stored: bool,
    /// The end of the wait of istiod's responses for stored clusters, which listeners may need.
    pub(crate) clusters_due: Option<Instant>,
}

impl Recorder {
    pub(crate) fn new(envoy: Option<EnvoyCache>, stream: u32) -> Self {
        let (missing, requests) = mpsc::channel(after_nack::MAX_WAITING);
        let stored_versions: StoredStream = match &envoy {
            Some(envoy) => after_nack::stored(envoy.store.shared.clone(), requests),
            None => Box::pin(tokio_stream::pending()),
        };
        Self {
            is_recording: envoy.is_some(),
            envoy,
            stream,
            subscribed: HashSet::new(),
            passing: None,
            pending: Vec::new(),
            bytes: 0,
            patience: PATIENCE,
            begun: HashMap::new(),
            missing,
            stored_versions,
            unanswered: VecDeque::new(),
            has_stored: false,
            clusters_due: None,
        }
    }

    /// Returns the response with stored versions, unless istiod has sent others meanwhile.
    pub(crate) fn stored(&mut self, mut stored: Stored) -> Option<Bytes> {
        let type_url = stored.missing.type_url;
        let begun = self.begun.get(type_url).copied().unwrap_or_default();
        if !self.is_recording || begun != stored.missing.answered {
            return None;
        }
        if type_url == CLUSTER {
            self.clusters_due = None;
        }
        let names = stored.missing.names.keys().copied().collect();
        self.pending.push((type_url, WriteOp::LookedUp(names)));
        let frame = stored.frame.take()?;
        self.has_stored = true;
        self.unanswered.push_back(stored);
        Some(frame)
    }

    /// Takes Envoy's ACK or NACK of the oldest response with stored versions of a type.
    pub(crate) fn stored_answered(&mut self, request: &Request) {
        let mut unanswered = self.unanswered.iter();
        let index = unanswered.position(|it| it.missing.type_url == request.type_url);
        let stored = index.and_then(|index| self.unanswered.remove(index));
        if let Some((envoy, stored)) = self.envoy.as_ref().zip(stored) {
            let shared = &envoy.store.shared;
            shared.stored_answered(stored, request.refusal.as_deref());
        }
    }

    /// Stops recording the stream.
    pub(crate) fn stop(&mut self) {
        self.is_recording = false;
        self.passing = None;
        self.pending.clear();
    }

    /// Takes a request of Envoy: its subscription, and the ACK or NACK in it.
    pub(crate) fn requested(&mut self, request: &Request) {
        let Some(envoy) = &self.envoy else {
            return;
        };
        if request.type_url == LISTENER && !request.nonce.is_empty() {
            envoy.is_over.store(true, Ordering::Relaxed);
        }
        let Some(subscription) = request.subscription().ok().filter(|_| self.is_recording) else {
            return;
        };
        if self.subscribed.is_empty()
            && let Some(identity) = identity(&subscription)
        {
            let begin = WriteOp::Begin(identity, envoy.generation, self.missing.clone());
            self.pending.push(("", begin));
        }
        let Some(type_url) = stored_type(&request.type_url) else {
            return;
        };
        if !request.nonce.is_empty() {
            let shared = &envoy.store.shared;
            if request.refusal.is_some()
                && type_url == CLUSTER
                && shared.admin.is_some()
                && shared.types.lock().contains_key(CLUSTER)
            {
                self.clusters_due = Some(after(CLUSTERS_PATIENCE));
            }
            let answered = WriteOp::Answered(request.nonce.clone(), request.refusal.clone());
            self.pending.push((type_url, answered));
        }
        if self.has_stored && BY_NAME.contains(&type_url) {
            let [names, unsubscribed] = [&subscription.names, &subscription.unsubscribed]
                .map(|names| names.iter().map(|name| wire::digest(name)).collect());
            let changed = WriteOp::Changed(names, unsubscribed);
            self.pending.push((type_url, changed));
        }
        if self.subscribed.insert(type_url) {
            let held = subscription.held.into_iter().flat_map(Held::decode);
            let names = held.map(|it| wire::digest(&it.name)).collect();
            let subscribed = WriteOp::Subscribed(names);
            self.pending.push((type_url, subscribed));
        }
    }

    /// Begins a response that passes.
    pub(crate) fn begins(&mut self, type_url: &str) {
        let recorded = stored_type(type_url).filter(|it| self.is_recording && *it != EXTENSION);
        self.passing = recorded.map(|type_url| (type_url, HEAD));
        if let Some(type_url) = recorded {
            *self.begun.entry(type_url).or_default() += 1;
        }
        self.patience = PATIENCE;
    }

    /// Takes bytes of a response that passes.
    pub(crate) fn passes(&mut self, bytes: &Bytes) {
        if let Some((type_url, head)) = &mut self.passing {
            let message = bytes.slice(bytes.len().min(*head)..);
            *head -= bytes.len() - message.len();
            self.bytes += message.len();
            self.pending.push((type_url, WriteOp::Bytes(message)));
        }
    }

    /// Ends the response that passes.
    pub(crate) fn passed(&mut self, received: &Received) {
        if let Some((type_url, _)) = self.passing.take() {
            let complete = WriteOp::Complete(received.clone());
            self.pending.push((type_url, complete));
        }
    }

    /// Takes a complete message without its head: one that Envoy gets instead of istiod's, or, if `is_all`, one
    /// that the agent has consumed, with all resources of its type.
    pub(crate) fn replaced(&mut self, received: &Received, message: &Bytes, is_all: bool) {
        let recorded = stored_type(&received.type_url).filter(|_| self.is_recording);
        let Some(type_url) = recorded else {
            return;
        };
        *self.begun.entry(type_url).or_default() += 1;
        let begins = is_all.then(|| WriteOp::Subscribed(HashSet::new()));
        let bytes = WriteOp::Bytes(message.clone());
        let complete = WriteOp::Complete(received.clone());
        let accepted = is_all.then(|| WriteOp::Answered(received.nonce.clone(), None));
        let ops = begins.into_iter().chain([bytes, complete]).chain(accepted);
        self.pending.extend(ops.map(|op| (type_url, op)));
    }

    /// Sends a batch to the writer if it is large enough or ends a response. If the writer has no room for it in
    /// time, recording stops.
    pub(crate) async fn flush(&mut self) {
        let is_part = self.bytes < HANDOVER
            && matches!(
                self.pending.last(),
                None | Some((_, WriteOp::Bytes(_) | WriteOp::Complete(..)))
            );
        let Some(EnvoyCache { store, .. }) = self.envoy.as_ref().filter(|_| !is_part) else {
            return;
        };
        let is_stalled = &store.shared.is_stalled;
        if is_stalled.load(Ordering::Relaxed) {
            self.patience = Duration::ZERO;
        }
        let began = Instant::now();
        let room = timeout(self.patience, store.batches.reserve()).await;
        self.patience = self.patience.saturating_sub(began.elapsed());
        self.bytes = 0;
        if let Ok(Ok(room)) = room {
            room.send((self.stream, std::mem::take(&mut self.pending)));
            return;
        }
        // The queue is closed only if the agent stops or the directory is not used.
        is_stalled.fetch_or(room.is_err(), Ordering::Relaxed);
        drop(room);
        self.stop();
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(envoy) = self.envoy.as_ref().filter(|_| self.is_recording) {
            self.pending.push(("", WriteOp::End));
            let batch = (self.stream, std::mem::take(&mut self.pending));
            let _ = envoy.store.batches.try_send(batch); // If it is lost, the files look older than they are.
        }
    }
}

/// Returns the type if it is stored. Secrets are not.
fn stored_type(type_url: &str) -> Option<Type> {
    TYPES.into_iter().find(|it| *it == type_url)
}
