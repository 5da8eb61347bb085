//! Sends the requests and responses of a stream of Envoy to the writer.
//!
//! The bytes are not copied, and are sent in batches of up to [`HANDOVER`]. A slow disk delays a response by up
//! to [`MAX_DISK_WAIT`]. If that is not enough, the stream is no longer recorded, and the stored configuration is
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
use super::file::LookupRequest;
use super::writer::WriteOp;
use super::{BY_NAME, CLUSTER, EXTENSION, EnvoyCache, LISTENER, TYPES, Type};
use crate::runtime::clock::after;
use crate::xds::request::{HEAD, Request, Subscription};
use crate::xds::response::Received;
use crate::xds::{CHANGING_METADATA, wire};

/// The bytes of responses after which a batch is sent to the writer.
pub(super) const HANDOVER: usize = 256 * 1024;

/// The time that istiod's responses wait for stored clusters after Envoy has refused some.
const MAX_CLUSTERS_WAIT: Duration = Duration::from_secs(2);

/// The time that a response waits for the disk in all.
const MAX_DISK_WAIT: Duration = Duration::from_secs(1);

/// A resource that Envoy has when the stream begins: an entry of `initial_resource_versions`.
#[derive(Clone, PartialEq, Message)]
struct InitialResource {
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

/// Returns a digest of the node's id and metadata, which include Istio's version, without [`CHANGING_METADATA`].
/// Configuration of one identity is not served to another. The digest begins with the version of this rule.
pub(super) fn identity(subscription: &Subscription) -> Option<String> {
    let mut node = Node::decode(subscription.node.clone()?).ok()?;
    if let Some(metadata) = &mut node.metadata {
        metadata.fields.retain(|name, _| !CHANGING_METADATA.contains(&&**name));
    }
    let digest = digest(&SHA256, &node.encode_to_vec());
    Some(format!("2:{}", BASE64_STANDARD.encode(digest)))
}

/// The recorder of one stream. It does nothing if configuration is not stored for the client.
pub(crate) struct Recorder {
    cache: Option<EnvoyCache>,
    /// True until [`Recorder::stop`]; never if configuration is not stored for the client.
    is_recording: bool,
    stream: u32,
    /// The stored types that Envoy has subscribed to.
    subscribed: HashSet<Type>,
    /// The type of the passing response, if it is stored, and the bytes of its gRPC head that are to come.
    passing: Option<(Type, usize)>,
    /// The next batch for the writer.
    pub(super) batch: Vec<(Type, WriteOp)>,
    /// The bytes of responses in `batch`.
    batch_bytes: usize,
    /// The rest of [`MAX_DISK_WAIT`].
    disk_wait_left: Duration,
    /// The number of responses of each type that have begun.
    begun_counts: HashMap<Type, u32>,
    /// The queue in which the writer asks for stored versions.
    lookup_requests: mpsc::Sender<LookupRequest>,
    /// The stored versions that the writer has asked for.
    pub(crate) stored_versions: StoredStream,
    /// Responses with stored versions that Envoy has neither accepted nor refused.
    stored_unanswered: VecDeque<Stored>,
    /// True if Envoy has got a stored version on the stream, and may subscribe to resources that it needs.
    has_sent_stored: bool,
    /// The time until which no response of istiod is read, so that stored clusters reach Envoy before listeners
    /// that need them. None if no stored clusters are awaited.
    pub(crate) clusters_due: Option<Instant>,
}

impl Recorder {
    pub(crate) fn new(cache: Option<EnvoyCache>, stream: u32) -> Self {
        let (lookup_requests, received) = mpsc::channel(after_nack::MAX_WAITING);
        let stored_versions: StoredStream = match &cache {
            Some(cache) => after_nack::look_up_each(cache.store.shared.clone(), received),
            None => Box::pin(tokio_stream::pending()),
        };
        Self {
            is_recording: cache.is_some(),
            cache,
            stream,
            subscribed: HashSet::new(),
            passing: None,
            batch: Vec::new(),
            batch_bytes: 0,
            disk_wait_left: MAX_DISK_WAIT,
            begun_counts: HashMap::new(),
            lookup_requests,
            stored_versions,
            stored_unanswered: VecDeque::new(),
            has_sent_stored: false,
            clusters_due: None,
        }
    }

    /// Takes the result of a lookup. Returns the response for Envoy, whose answer is awaited then. Returns None if
    /// there are no stored versions, or if istiod has sent others meanwhile, after which the writer asks again.
    pub(crate) fn use_stored(&mut self, mut stored: Stored) -> Option<Bytes> {
        let type_url = stored.request.type_url;
        let begun = self.begun_counts.get(type_url).copied().unwrap_or_default();
        if !self.is_recording || begun != stored.request.answered_count {
            return None;
        }
        if type_url == CLUSTER {
            self.clusters_due = None;
        }
        let names = stored.request.reasons.keys().copied().collect();
        self.batch.push((type_url, WriteOp::LookedUp(names)));
        let frame = stored.frame.take()?;
        self.has_sent_stored = true;
        self.stored_unanswered.push_back(stored);
        Some(frame)
    }

    /// Records Envoy's ACK or NACK of the oldest response with stored versions of a type.
    pub(crate) fn record_stored_ack_or_nack(&mut self, request: &Request) {
        let mut unanswered = self.stored_unanswered.iter();
        let index = unanswered.position(|it| it.request.type_url == request.type_url);
        let stored = index.and_then(|index| self.stored_unanswered.remove(index));
        if let Some((cache, stored)) = self.cache.as_ref().zip(stored) {
            let shared = &cache.store.shared;
            shared.record_stored_ack_or_nack(stored, request.rejection.as_deref());
        }
    }

    /// Stops recording the stream. What has not reached the writer is dropped.
    pub(crate) fn stop(&mut self) {
        self.is_recording = false;
        self.passing = None;
        self.batch.clear();
    }

    /// Records a request of Envoy: its subscription, and the ACK or NACK in it. After a NACK of clusters, istiod's
    /// responses wait for stored ones.
    pub(crate) fn record_request(&mut self, request: &Request) {
        let Some(cache) = &self.cache else {
            return;
        };
        if request.type_url == LISTENER && !request.nonce.is_empty() {
            let no_longer_served = &cache.generation.no_longer_served;
            no_longer_served.store(true, Ordering::Relaxed);
        }
        let Some(subscription) = request.subscription().ok().filter(|_| self.is_recording) else {
            return;
        };
        if self.subscribed.is_empty()
            && let Some(identity) = identity(&subscription)
        {
            let generation = cache.generation.number;
            let begin = WriteOp::Begin(identity, generation, self.lookup_requests.clone());
            self.batch.push(("", begin));
        }
        let Some(type_url) = stored_type(&request.type_url) else {
            return;
        };
        if !request.nonce.is_empty() {
            let shared = &cache.store.shared;
            if request.rejection.is_some()
                && type_url == CLUSTER
                && shared.admin.is_some()
                && shared.types.lock().contains_key(CLUSTER)
            {
                self.clusters_due = Some(after(MAX_CLUSTERS_WAIT));
            }
            let answer = WriteOp::AckOrNack(request.nonce.clone(), request.rejection.clone());
            self.batch.push((type_url, answer));
        }
        if self.has_sent_stored && BY_NAME.contains(&type_url) {
            let [added, removed] = [&subscription.names, &subscription.unsubscribed]
                .map(|names| names.iter().map(|name| wire::digest(name)).collect());
            let change = WriteOp::SubscriptionChange { added, removed };
            self.batch.push((type_url, change));
        }
        if self.subscribed.insert(type_url) {
            let entries = subscription.initial_resource_versions.into_iter();
            let initial_resources = entries
                .flat_map(InitialResource::decode)
                .map(|it| wire::digest(&it.name))
                .collect();
            let first = WriteOp::FirstRequest { initial_resources };
            self.batch.push((type_url, first));
        }
    }

    /// Begins a response that passes to Envoy.
    pub(crate) fn begin_response(&mut self, type_url: &str) {
        let recorded = stored_type(type_url).filter(|it| self.is_recording && *it != EXTENSION);
        self.passing = recorded.map(|type_url| (type_url, HEAD));
        if let Some(type_url) = recorded {
            *self.begun_counts.entry(type_url).or_default() += 1;
        }
        self.disk_wait_left = MAX_DISK_WAIT;
    }

    /// Records bytes of the response that passes.
    pub(crate) fn record_bytes(&mut self, bytes: &Bytes) {
        if let Some((type_url, head)) = &mut self.passing {
            let message = bytes.slice(bytes.len().min(*head)..);
            *head -= bytes.len() - message.len();
            self.batch_bytes += message.len();
            self.batch.push((type_url, WriteOp::Bytes(message)));
        }
    }

    /// Ends the response that passes.
    pub(crate) fn complete_response(&mut self, received: &Received) {
        if let Some((type_url, _)) = self.passing.take() {
            let complete = WriteOp::Complete(received.clone());
            self.batch.push((type_url, complete));
        }
    }

    /// Records a complete message without its head: one that Envoy gets instead of istiod's, or, if `is_all`, one
    /// that the agent has consumed, with all resources of its type.
    pub(crate) fn record_message(&mut self, received: &Received, message: &Bytes, is_all: bool) {
        let recorded = stored_type(&received.type_url).filter(|_| self.is_recording);
        let Some(type_url) = recorded else {
            return;
        };
        *self.begun_counts.entry(type_url).or_default() += 1;
        let first = is_all.then(|| WriteOp::FirstRequest { initial_resources: HashSet::new() });
        let bytes = WriteOp::Bytes(message.clone());
        let complete = WriteOp::Complete(received.clone());
        let accepted = is_all.then(|| WriteOp::AckOrNack(received.nonce.clone(), None));
        let ops = first.into_iter().chain([bytes, complete]).chain(accepted);
        self.batch.extend(ops.map(|op| (type_url, op)));
    }

    /// Sends the batch to the writer, unless it is empty or small and a response continues or waits for its ACK. If
    /// the writer has no room for it in time, recording stops.
    pub(crate) async fn flush(&mut self) {
        let can_wait = self.batch_bytes < HANDOVER
            && matches!(
                self.batch.last(),
                None | Some((_, WriteOp::Bytes(_) | WriteOp::Complete(..)))
            );
        let Some(EnvoyCache { store, .. }) = self.cache.as_ref().filter(|_| !can_wait) else {
            return;
        };
        let is_stalled = &store.shared.is_stalled;
        if is_stalled.load(Ordering::Relaxed) {
            self.disk_wait_left = Duration::ZERO;
        }
        let began = Instant::now();
        let room = timeout(self.disk_wait_left, store.batches.reserve()).await;
        self.disk_wait_left = self.disk_wait_left.saturating_sub(began.elapsed());
        self.batch_bytes = 0;
        if let Ok(Ok(room)) = room {
            room.send((self.stream, std::mem::take(&mut self.batch)));
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
        if let Some(cache) = self.cache.as_ref().filter(|_| self.is_recording) {
            self.batch.push(("", WriteOp::End));
            let batch = (self.stream, std::mem::take(&mut self.batch));
            let _ = cache.store.batches.try_send(batch); // If it is lost, the files look older than they are.
        }
    }
}

/// Returns the type if it is stored. Secrets are not.
fn stored_type(type_url: &str) -> Option<Type> {
    TYPES.into_iter().find(|it| *it == type_url)
}
