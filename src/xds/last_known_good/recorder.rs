//! Hands what passes on a stream of Envoy to the writer.
//!
//! The bytes are those Envoy gets, not copied, up to [`HANDOVER`] at once. A slow disk delays a response by
//! up to [`PATIENCE`]. After that neither this stream is recorded any more, nor another without delay
//! until the disk has recovered, and what is kept is deleted.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::after_nack::{self, Missing, Stored, StoredStream};
use super::writer::WriteOp;
use super::{BY_NAME, CLUSTER, EXTENSION, EnvoyCache, TYPES, Type};
use crate::clock::after;
use crate::xds::request::{ErrorDetail, HEAD, Request};
use crate::xds::response::Received;
use crate::xds::stream::LISTENER;
use crate::xds::wire;

/// How much the writer is given at once.
pub(super) const HANDOVER: usize = 256 * 1024;

/// How long istiod's responses wait for stored clusters after Envoy has refused some.
const CLUSTERS_PATIENCE: Duration = Duration::from_secs(2);

/// How long a response waits for the disk in all.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a request says of the subscription to its type. Names are not copied.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Subscription {
    #[prost(message, optional, tag = "1")]
    node: Option<Node>,
    #[prost(string, tag = "2")]
    pub(super) type_url: String,
    /// Those added.
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub(super) names: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "4")]
    unsubscribed: Vec<Bytes>,
    /// The resources that Envoy has when the stream begins.
    #[prost(message, repeated, tag = "5")]
    pub(super) held: Vec<Held>,
    #[prost(message, optional, tag = "7")]
    refusal: Option<ErrorDetail>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Held {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) name: Bytes,
}

/// The fields of a node that istiod's answers follow from. Maps are ordered, unlike Envoy's.
#[derive(Clone, PartialEq, Message)]
struct Node {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "3")]
    metadata: Option<prost_types::Struct>,
}

impl Subscription {
    /// A digest of the node's id and metadata, Istio's version among it: what is kept for one is not
    /// served to another.
    pub(super) fn identity(&self) -> Option<String> {
        let node = self.node.as_ref()?.encode_to_vec();
        Some(BASE64_STANDARD.encode(digest(&SHA256, &node)))
    }
}

/// What passes on one stream. Without an Envoy for which configuration is kept, it does nothing.
#[derive(Debug)]
pub(crate) struct Recorder {
    envoy: Option<EnvoyCache>,
    is_recording: bool,
    stream: u32,
    /// The types that it has asked for.
    subscribed: HashSet<Type>,
    /// The type of the response that passes, if it is kept, and how much of its gRPC head is to come.
    passing: Option<(Type, usize)>,
    /// For the writer.
    pub(super) pending: Vec<(Type, WriteOp)>,
    /// In `pending`.
    bytes: usize,
    /// What is left of [`PATIENCE`].
    patience: Duration,
    /// How many responses of a type have begun.
    begun: HashMap<Type, u32>,
    /// Requests of the writer for stored versions.
    missing: (mpsc::Sender<Missing>, Option<mpsc::Receiver<Missing>>),
    /// Stored versions that Envoy has not answered.
    unanswered: VecDeque<Stored>,
    /// Whether Envoy has got a stored version on the stream, and may subscribe to what it needs.
    has_stored: bool,
    /// Until when istiod's responses wait for stored clusters, which listeners may need.
    pub(crate) clusters_due: Option<Instant>,
}

impl Recorder {
    pub(crate) fn new(envoy: Option<EnvoyCache>, stream: u32) -> Self {
        let missing = mpsc::channel(after_nack::MAX_WAITING);
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
            missing: (missing.0, Some(missing.1)),
            unanswered: VecDeque::new(),
            has_stored: false,
            clusters_due: None,
        }
    }

    /// Returns the stored versions of resources that Envoy lacks, as they are found.
    pub(crate) fn stored_versions(&mut self) -> StoredStream {
        match self.envoy.as_ref().zip(self.missing.1.take()) {
            Some((envoy, missing)) => after_nack::stored(envoy.kept.shared.clone(), missing),
            None => Box::pin(tokio_stream::pending()),
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

    /// Takes Envoy's answer to the oldest response with stored versions of a type.
    pub(crate) fn stored_answered(&mut self, request: &Request) {
        let mut unanswered = self.unanswered.iter();
        let index = unanswered.position(|it| it.missing.type_url == request.type_url);
        let stored = index.and_then(|index| self.unanswered.remove(index));
        let refusal = Subscription::decode(request.frame.slice(HEAD..)).ok();
        let refusal = refusal.and_then(|it| it.refusal).map(ErrorDetail::text);
        if let Some((envoy, stored)) = self.envoy.as_ref().zip(stored) {
            envoy
                .kept
                .shared
                .stored_answered(stored, refusal.as_deref());
        }
    }

    /// From now on nothing is kept of this stream.
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
        // It has been decoded before.
        let subscription = Subscription::decode(request.frame.slice(HEAD..)).ok();
        let Some(subscription) = subscription.filter(|_| self.is_recording) else {
            return;
        };
        if self.subscribed.is_empty()
            && let Some(identity) = subscription.identity()
        {
            let begin = WriteOp::Begin(identity, envoy.generation, self.missing.0.clone());
            self.pending.push(("", begin));
        }
        let Some(type_url) = kept(&request.type_url) else {
            return;
        };
        if !request.nonce.is_empty() {
            let shared = &envoy.kept.shared;
            if subscription.refusal.is_some()
                && type_url == CLUSTER
                && shared.admin.is_some()
                && shared.types.lock().contains_key(CLUSTER)
            {
                self.clusters_due = Some(after(CLUSTERS_PATIENCE));
            }
            let refusal = subscription.refusal.map(ErrorDetail::text);
            self.answered(type_url, &request.nonce, refusal);
        }
        if self.has_stored && BY_NAME.contains(&type_url) {
            let [names, unsubscribed] = [&subscription.names, &subscription.unsubscribed]
                .map(|names| names.iter().map(|name| wire::digest(name)).collect());
            let changed = WriteOp::Changed(names, unsubscribed);
            self.pending.push((type_url, changed));
        }
        if self.subscribed.insert(type_url) {
            let held = subscription.held.iter().map(|it| wire::digest(&it.name));
            let subscribed = WriteOp::Subscribed(held.collect());
            self.pending.push((type_url, subscribed));
        }
    }

    /// Whether the bytes that follow are of a type that is kept.
    pub(crate) fn begins(&mut self, type_url: &str) {
        let kept = kept(type_url).filter(|it| self.is_recording && *it != EXTENSION);
        self.passing = kept.map(|type_url| (type_url, HEAD));
        if let Some(type_url) = kept {
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

    /// The response that passes is complete. It counts from its ACK.
    pub(crate) fn passed(&mut self, received: &Received) {
        if let Some((type_url, _)) = self.passing.take() {
            self.complete(type_url, received, false);
        }
    }

    /// Takes a message without its head: one that Envoy gets in place of istiod's, or one that the agent
    /// has consumed, which is all there is of its type.
    pub(crate) fn replaced(&mut self, received: &Received, message: &Bytes, is_all: bool) {
        let Some(type_url) = kept(&received.type_url).filter(|_| self.is_recording) else {
            return;
        };
        *self.begun.entry(type_url).or_default() += 1;
        self.pending
            .push((type_url, WriteOp::Bytes(message.clone())));
        self.complete(type_url, received, is_all);
        if is_all {
            self.answered(type_url, &received.nonce, None);
        }
    }

    fn complete(&mut self, type_url: Type, received: &Received, is_all: bool) {
        let complete = WriteOp::Complete(received.clone(), is_all);
        self.pending.push((type_url, complete));
    }

    fn answered(&mut self, type_url: Type, nonce: &str, refusal: Option<String>) {
        let answered = WriteOp::Answered(nonce.to_owned(), refusal);
        self.pending.push((type_url, answered));
    }

    /// Gives the writer what it is to write. A writer without room for it is given up.
    pub(crate) async fn flush(&mut self) {
        let last = self.pending.last();
        let is_part = matches!(
            last,
            None | Some((_, WriteOp::Bytes(_) | WriteOp::Complete(..)))
        );
        let is_part = is_part && self.bytes < HANDOVER;
        let Some(EnvoyCache { kept, .. }) = self.envoy.as_ref().filter(|_| !is_part) else {
            return;
        };
        let is_stalled = &kept.shared.is_stalled;
        if is_stalled.load(Ordering::Relaxed) {
            self.patience = Duration::ZERO;
        }
        let began = Instant::now();
        let room = timeout(self.patience, kept.batches.reserve()).await;
        self.patience = self.patience.saturating_sub(began.elapsed());
        self.bytes = 0;
        if let Ok(Ok(room)) = room {
            room.send((self.stream, std::mem::take(&mut self.pending)));
            return;
        }
        // Without a writer, the agent stops.
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
            let _ = envoy.kept.batches.try_send(batch); // Without it, the configuration looks older.
        }
    }
}

/// The type, if it is kept. Secrets are not.
fn kept(type_url: &str) -> Option<Type> {
    TYPES.into_iter().find(|it| *it == type_url)
}
