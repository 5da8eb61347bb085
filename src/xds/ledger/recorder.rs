//! Feeds the ledger with the requests and responses of a delta stream of Envoy, while their bytes pass.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::MutexGuard;
use prost::Message;
use tokio::time::Instant;

use super::rejected::Stored;
use super::state::State;
use super::store::{BLOCK, BlockNumber, Store};
use super::view::{Field, Response};
use super::{EnvoyCache, Type};
use crate::envoy::admin::Admin;
use crate::envoy::inspect;
use crate::runtime::clock::{after, until};
use crate::xds::on_demand::OnDemand;
use crate::xds::request::{HEAD, Request, Subscription};
use crate::xds::response::Received;
use crate::xds::wire::{Malformed, NameDigest, ResourceField, Walker};
use crate::xds::{CHANGING_METADATA, LISTENER};

/// The time that istiod's responses wait for stored clusters after Envoy has rejected some.
const MAX_CLUSTERS_WAIT: Duration = Duration::from_secs(2);

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
    Some(format!("2:{}", BASE64_STANDARD.encode(digest(&SHA256, &node.encode_to_vec()))))
}

/// The recorder of one stream. It does nothing if configuration is not stored for the client.
pub(crate) struct Recorder {
    cache: Option<EnvoyCache>,
    /// True until [`Recorder::stop`]; never if configuration is not stored for the client.
    is_recording: bool,
    stream: u32,
    has_begun: bool,
    /// The types that Envoy, or the agent, has subscribed to.
    subscribed: HashSet<Type>,
    passing: Option<Passing>,
    /// Responses with stored versions that Envoy has neither accepted nor rejected.
    stored_unanswered: VecDeque<Stored>,
    /// True if Envoy may have to get stored versions now.
    may_need_stored: bool,
    /// Questions to Envoy which resources of a type it has.
    asking: FuturesUnordered<BoxFuture<'static, (Type, Option<HashSet<NameDigest>>)>>,
    /// The time until which no response of istiod is read, so that stored clusters reach Envoy before listeners that need
    /// them. None if no stored clusters are awaited.
    pub(crate) clusters_due: Option<Instant>,
}

/// A response that passes.
struct Passing {
    /// The number of the store that has its fields.
    store_number: usize,
    /// The bytes of its gRPC head that are to come.
    head: usize,
    reader: FieldReader,
}

/// Splits a message into its fields, and appends them to the store.
struct FieldReader {
    type_of: Type,
    walker: Walker,
    /// The bytes of the field that has not ended, without those in `long`.
    partial: Vec<u8>,
    /// The beginning of the field that has not ended, if it is larger than a block, and its block.
    long: Option<(u64, BlockNumber)>,
    fields: Vec<Field>,
}

impl FieldReader {
    fn new(type_of: Type, length: u64) -> Self {
        Self {
            type_of,
            walker: Walker::finder(length),
            partial: Vec::new(),
            long: None,
            fields: Vec::new(),
        }
    }

    /// Takes the next bytes of the message.
    fn read(&mut self, store: &mut Store, bytes: &[u8]) -> Result<(), Malformed> {
        let begin = self.walker.position();
        let mut ended = Vec::new();
        self.walker.find(bytes, |field| ended.push(field))?;
        let offset = |position: u64| position.saturating_sub(begin) as usize;
        for ResourceField { name, range, is_removed } in ended {
            let long = self.take_long(store, range.start);
            let part = &bytes[offset(range.start)..offset(range.end)];
            let rest = if range.start < begin {
                self.partial.extend_from_slice(part);
                &self.partial
            } else {
                part
            };
            let place = if long.is_none() && rest.len() <= BLOCK {
                store.append(self.type_of, rest)
            } else {
                let long = store.extend(long, self.type_of, rest);
                store.end(long)
            };
            self.fields.push(Field { name, place, is_removed, response: 0 });
        }
        let start = self.walker.field_start();
        let long = self.take_long(store, start);
        if start >= begin {
            self.partial.clear();
        }
        self.partial.extend_from_slice(&bytes[offset(start)..]);
        if long.is_some() || self.partial.len() > BLOCK {
            self.long = Some((start, store.extend(long, self.type_of, &self.partial)));
            self.partial.clear();
        }
        Ok(())
    }

    /// Takes the long field that begins at this place in the message. Ends the use of another one, which has turned out not
    /// to be a resource.
    fn take_long(&mut self, store: &mut Store, start: u64) -> Option<BlockNumber> {
        let (began, long) = self.long.take()?;
        if began == start {
            return Some(long);
        }
        let place = store.end(long);
        store.release(place);
        None
    }

    /// Hands over a complete response. Returns false if configuration has become too large.
    fn complete(mut self, state: &mut State, pid: i32, received: &Received) -> bool {
        self.take_long(&mut state.store, u64::MAX);
        let response = Response::new(received.nonce.clone(), received.version.clone(), self.fields);
        state.complete(pid, self.type_of, response)
    }

    /// Ends the use of all fields.
    fn drop_fields(mut self, state: &mut State) {
        self.take_long(&mut state.store, u64::MAX);
        state.release(self.fields.iter().map(|field| field.place));
    }
}

impl Recorder {
    pub(crate) fn new(cache: Option<EnvoyCache>, stream: u32) -> Self {
        Self {
            is_recording: cache.is_some(),
            cache,
            stream,
            has_begun: false,
            subscribed: HashSet::new(),
            passing: None,
            stored_unanswered: VecDeque::new(),
            may_need_stored: false,
            asking: FuturesUnordered::new(),
            clusters_due: None,
        }
    }

    /// Returns the ledger and the process. Returns None if the stream is not recorded, if a newer stream of the Envoy is, or
    /// if the ledger has dropped what it had.
    fn state(&self) -> Option<(MutexGuard<'_, State>, i32)> {
        let cache = self.cache.as_ref().filter(|_| self.is_recording)?;
        let mut state = cache.ledger.0.state.lock();
        if !state.is_on {
            return None;
        }
        let is_current = !self.has_begun || state.view(cache.pid).stream == Some(self.stream);
        is_current.then_some((state, cache.pid))
    }

    /// Returns a response with stored versions that Envoy should get now, whose answer is awaited then.
    pub(crate) fn take_stored(&mut self) -> Option<Bytes> {
        if !self.may_need_stored {
            return None;
        }
        let (mut state, pid) = self.state()?;
        let (found, may_have_more) = state.take_stored(pid);
        drop(state);
        self.may_need_stored = may_have_more;
        if !may_have_more || found.as_ref().is_some_and(|(_, it)| it.type_of == Type::CLUSTER) {
            self.clusters_due = None;
        }
        let (frame, stored) = found?;
        self.stored_unanswered.push_back(stored);
        Some(frame)
    }

    /// Records Envoy's ACK or NACK of the oldest response with stored versions of a type.
    pub(crate) fn record_stored_ack_or_nack(&mut self, request: &Request) {
        let mut unanswered = self.stored_unanswered.iter();
        let index = unanswered.position(|it| it.type_of.url() == request.type_url);
        let stored = index.and_then(|index| self.stored_unanswered.remove(index));
        if let Some(stored) = stored
            && let Some((mut state, pid)) = self.state()
        {
            state.answer_stored(pid, stored, request.rejection.as_deref());
        }
    }

    /// Waits until stored versions may have to be sent: Envoy has said which resources it has, or istiod has not sent in time
    /// what a stored resource needs. Also ends the time in which istiod's responses wait for stored clusters. Cancel safe.
    pub(crate) async fn next(&mut self) {
        let stored_due = self.stored_due();
        let (type_of, accepted) = tokio::select! {
            Some(answer) = self.asking.next() => answer,
            () = until(self.clusters_due) => {
                self.clusters_due = None;
                return;
            }
            () = until(stored_due) => {
                self.may_need_stored = true;
                return;
            }
        };
        let Some((mut state, pid)) = self.state() else { return };
        state.note_accepted(pid, type_of, accepted);
        drop(state);
        self.may_need_stored = true;
    }

    /// Returns when istiod should have sent what a stored resource needs.
    fn stored_due(&self) -> Option<Instant> {
        let (mut state, pid) = self.state().filter(|_| !self.may_need_stored)?;
        state.view(pid).stored_due()
    }

    /// Stops recording the stream.
    pub(crate) fn stop(&mut self) {
        self.end();
        self.is_recording = false;
    }

    fn end(&mut self) {
        if let Some(passing) = self.passing.take() {
            self.drop_response(passing);
        }
        let Some((mut state, pid)) = self.state().filter(|_| self.has_begun) else {
            return;
        };
        state.end_stream(pid, self.stream);
        drop(state);
        self.notify();
    }

    /// Wakes the task that writes.
    fn notify(&self) {
        if let Some(cache) = &self.cache {
            cache.ledger.0.changed.notify_one();
        }
    }

    /// Records a request of Envoy: its subscription, and the ACK or NACK in it.
    pub(crate) fn record_request(&mut self, request: &Request) {
        let Some(cache) = &self.cache else { return };
        if request.type_url == LISTENER && !request.nonce.is_empty() {
            cache.ledger.0.state.lock().view(cache.pid).no_longer_served = true;
        }
        let Some(subscription) = request.subscription().ok().filter(|_| self.is_recording) else {
            return;
        };
        let stream = self.stream;
        if !self.has_begun {
            let Some(identity) = identity(&subscription) else { return };
            let Some((mut state, pid)) = self.state() else { return };
            state.begin_stream(pid, stream, identity);
            drop(state);
            self.has_begun = true;
        }
        let Some(type_of) = Type::of(&request.type_url) else { return };
        let is_first = self.subscribed.insert(type_of);
        let Some((mut state, pid)) = self.state() else { return };
        if !request.nonce.is_empty() {
            state.answer(pid, type_of, &request.nonce, request.rejection.as_deref());
        }
        if is_first {
            state.begin_type(pid, type_of, subscription.initial_names());
        }
        state.change_subscription(pid, type_of, &subscription);
        state.end_after_nack(pid, type_of);
        let it = state.view(pid).of(type_of);
        let asks_envoy = it.asks_envoy;
        let awaits_answers = !it.unanswered.is_empty();
        drop(state);
        if asks_envoy && request.rejection.is_some() {
            self.asking.push(Box::pin(ask(cache.ledger.0.admin.clone(), type_of)));
        }
        self.may_need_stored |= request.rejection.is_some();
        if type_of == Type::CLUSTER && request.rejection.is_some() && (awaits_answers || asks_envoy)
        {
            self.clusters_due = Some(after(MAX_CLUSTERS_WAIT));
        }
        if !request.nonce.is_empty() || !subscription.unsubscribed.is_empty() {
            self.notify();
        }
    }

    /// Begins a response that passes to Envoy.
    pub(crate) fn begin_response(&mut self, type_url: &str, length: u64) {
        let Some(type_of) = Type::of(type_url).filter(|it| *it != Type::EXTENSION) else {
            return;
        };
        let Some((mut state, pid)) = self.state() else { return };
        state.view(pid).is_receiving = true;
        let store_number = state.store_number;
        drop(state);
        let reader = FieldReader::new(type_of, length);
        self.passing = Some(Passing { store_number, head: HEAD, reader });
    }

    /// Records bytes of the response that passes.
    pub(crate) fn record_bytes(&mut self, bytes: &Bytes) {
        let Some(mut passing) = self.passing.take() else { return };
        let Some((mut state, _)) = self.state() else {
            return self.drop_response(passing);
        };
        let message = &bytes[bytes.len().min(passing.head)..];
        passing.head -= bytes.len() - message.len();
        if let Err(error) = passing.reader.read(&mut state.store, message) {
            tracing::error!(target: "xdsproxy", "configuration is not stored: a response is malformed: {error}");
            state.fail_streams();
            drop(state);
            self.cache.iter().for_each(|cache| cache.ledger.0.failures.inc());
            return self.notify();
        }
        drop(state);
        self.passing = Some(passing);
    }

    /// Ends the response that passes.
    pub(crate) fn complete_response(
        &mut self,
        received: &Received,
        on_demand: Option<&mut OnDemand>,
    ) {
        let Some(mut passing) = self.passing.take() else { return };
        if let Some(on_demand) = on_demand.filter(|_| passing.reader.type_of == Type::ENDPOINTS) {
            on_demand.read_endpoints(&mut passing.reader.fields);
        }
        let Some((mut state, pid)) = self.state() else {
            return self.drop_response(passing);
        };
        state.view(pid).is_receiving = false;
        let fits = passing.reader.complete(&mut state, pid, received);
        drop(state);
        if !fits {
            self.notify();
        }
    }

    /// Ends the use of the fields of a response that has not passed completely, or whose stream is no longer recorded.
    fn drop_response(&self, passing: Passing) {
        if let Some(cache) = &self.cache {
            let mut state = cache.ledger.0.state.lock();
            if state.store_number == passing.store_number {
                passing.reader.drop_fields(&mut state);
            }
        }
    }

    /// Records a complete message without its head: one that Envoy gets instead of istiod's, or, if `is_all`, one
    /// that the agent has consumed, with all resources of its type.
    pub(crate) fn record_message(&mut self, received: &Received, message: &Bytes, is_all: bool) {
        let Some(type_of) = Type::of(&received.type_url) else { return };
        let Some((mut state, pid)) = self.state() else { return };
        if is_all {
            state.begin_type(pid, type_of, HashSet::new());
        }
        let mut reader = FieldReader::new(type_of, message.len() as u64);
        if reader.read(&mut state.store, message).is_err() {
            // The interceptor has decoded the message.
            return reader.drop_fields(&mut state);
        }
        let fits = reader.complete(&mut state, pid, received);
        if is_all && fits {
            state.answer(pid, type_of, &received.nonce, None);
        }
        drop(state);
        if is_all || !fits {
            self.notify();
        }
    }
}

/// Asks Envoy which resources of a type it has a version of. Logs an error.
async fn ask(admin: Option<Admin>, type_of: Type) -> (Type, Option<HashSet<NameDigest>>) {
    let Some(admin) = admin else { return (type_of, None) };
    let type_url = type_of.url();
    match inspect::accepted_names(&admin, type_url).await {
        Ok(names) => {
            (type_of, Some(names.iter().map(|name| NameDigest::of(name.as_bytes())).collect()))
        }
        Err(error) => {
            tracing::warn!(target: "xdsproxy", "cannot look for stored versions of {type_url}: {error}");
            (type_of, None)
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.end();
    }
}
