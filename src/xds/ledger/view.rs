//! Follows what one Envoy process has: the responses that it has not answered, and the resources that it has accepted,
//! rejected or waits for.
//!
//! A view lasts as long as its process, across its streams. Envoy answers the responses of a type in their order.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::store::Place;
use super::{BY_NAME, NEEDED, TYPES, Type};
use crate::runtime::clock::later;
use crate::xds::wire::NameDigest;

/// The most responses of a type that wait for their ACK. Above it the oldest ones are merged.
pub(super) const MAX_UNANSWERED: usize = 64;

/// The time after which a record of the file no longer waits for a resource or a type that Envoy may not get.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time that istiod has to send the resources that a stored resource needs.
pub(super) const STORED_VERSION_DELAY: Duration = Duration::from_secs(5);

/// The reason why Envoy has no version of a resource that a stored one needs.
const NOT_SENT: &str = "istiod has not sent it within 5 s";

/// A resource in a response, or the name of a removed one.
#[derive(Clone, Copy, Debug)]
pub(in crate::xds) struct Field {
    pub(in crate::xds) name: NameDigest,
    pub(in crate::xds) place: Place,
    pub(in crate::xds) is_removed: bool,
    /// The number of its response.
    pub(in crate::xds) response: u32,
}

/// A complete response, or several that were merged, each name with its newest field.
#[derive(Debug, Default)]
pub(in crate::xds) struct Response {
    /// The number of the last one.
    pub(super) number: u32,
    pub(super) nonce: String,
    pub(super) version: String,
    pub(in crate::xds) fields: Vec<Field>,
    /// True for the first response of a stream. Once Envoy has accepted it, stored resources that Envoy does not have are
    /// removed: istiod no longer has them.
    pub(super) is_first: bool,
    /// The number of merged responses that Envoy has not answered, besides the last.
    pub(super) older: usize,
}

/// The reason why Envoy does not have istiod's version of a resource.
#[derive(Clone, Debug)]
pub(in crate::xds) struct Rejection {
    pub(super) reason: Arc<str>,
    /// True once the stored version has been sent, or has been looked for in vain.
    pub(super) is_handled: bool,
}

#[derive(Debug, Default)]
pub(in crate::xds) struct TypeView {
    /// The time of the subscription by Envoy, or the agent, on the stream.
    pub(super) subscribed: Option<Instant>,
    /// True until the first response on the stream.
    pub(in crate::xds) awaits_first: bool,
    pub(in crate::xds) unanswered: VecDeque<Response>,
    responses: u32,
    /// The resources of which this Envoy has accepted a version.
    pub(in crate::xds) accepted: HashSet<NameDigest>,
    /// The resources of which Envoy lacks istiod's version, also those that istiod has not sent.
    pub(in crate::xds) rejected: HashMap<NameDigest, Rejection>,
    /// The resources that Envoy had when the stream began, and that are not stored.
    pub(super) lacking: HashSet<NameDigest>,
    /// The resources of a type in [`BY_NAME`] that Envoy has subscribed to and not got, with the time since which.
    waiting: HashMap<NameDigest, Waiting>,
    /// True once Envoy has answered a response on the newest stream.
    pub(super) has_answered: bool,
    /// True if it is not known which resources in `rejected` Envoy has accepted.
    pub(super) asks_envoy: bool,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Instant,
    /// True if a stored resource may need it, and its stored version has not been sent.
    needs_stored: bool,
}

/// The view of one Envoy process.
#[derive(Debug)]
pub(in crate::xds) struct View {
    /// The number of Envoys before it. A newer Envoy has a larger one.
    pub(super) generation: usize,
    /// The newest stream, also after its end.
    pub(in crate::xds) stream: Option<u32>,
    /// True while istiod's stream is known to be open.
    pub(in crate::xds) is_live: bool,
    /// True while a response passes.
    pub(super) is_receiving: bool,
    /// The time of the first response on the newest stream.
    began: Instant,
    /// True if the newest stream ended while something was missing.
    was_cut_off: bool,
    /// True once Envoy has answered listeners, or stored configuration could not be served.
    pub(in crate::xds) no_longer_served: bool,
    /// True if Envoy has got a stored version on the stream, and may subscribe to resources that it needs.
    pub(super) has_sent_stored: bool,
    /// True if this Envoy cannot discover clusters.
    pub(in crate::xds) gets_all_clusters: bool,
    pub(super) types: BTreeMap<Type, TypeView>,
}

impl View {
    pub(super) fn new(generation: usize) -> Self {
        Self {
            generation,
            gets_all_clusters: false,
            stream: None,
            is_live: false,
            is_receiving: false,
            began: Instant::now(),
            was_cut_off: false,
            no_longer_served: false,
            has_sent_stored: false,
            types: TYPES.into_iter().map(|type_of| (type_of, TypeView::default())).collect(),
        }
    }

    /// Begins a stream, on which Envoy subscribes again. Returns the fields of responses that it has not answered.
    pub(super) fn begin(&mut self, stream: u32) -> Vec<Place> {
        let dropped = self.end();
        self.stream = Some(stream);
        self.has_sent_stored = false;
        dropped
    }

    /// Notes a response on the stream. Until the first one, what Envoy had on the stream before is in force.
    pub(in crate::xds) fn note_response(&mut self) {
        if !std::mem::replace(&mut self.is_live, true) {
            (self.began, self.was_cut_off) = (Instant::now(), false);
            self.types.values_mut().for_each(|it| it.has_answered = false);
        }
    }

    /// Returns true if istiod's stream is known to be open, and Envoy has answered what it needs on it.
    pub(super) fn is_current(&self) -> bool {
        self.is_live
            && NEEDED.into_iter().all(|it| self.types.get(&it).is_some_and(|it| it.has_answered))
    }

    /// Ends the stream. Returns the fields of responses that Envoy has not answered.
    pub(super) fn end(&mut self) -> Vec<Place> {
        self.was_cut_off |= self.obstacle(|_| false).is_some();
        (self.is_live, self.is_receiving) = (false, false);
        let mut dropped = Vec::new();
        for it in self.types.values_mut() {
            let responses = it.unanswered.drain(..);
            dropped.extend(responses.flat_map(|it| it.fields).map(|field| field.place));
            (it.subscribed, it.awaits_first) = (None, false);
            it.waiting.clear();
            // The question to Envoy ends with the stream.
            it.asks_envoy = false;
        }
        dropped
    }

    /// Returns the view of a type.
    pub(in crate::xds) fn of(&mut self, type_of: Type) -> &mut TypeView {
        self.types.entry(type_of).or_default()
    }

    pub(super) fn has_rejected(&self) -> bool {
        self.types.values().any(|it| !it.rejected.is_empty())
    }

    /// Returns the reason why no record may be written now. `is_stored` returns true for types of which a response is
    /// stored.
    pub(super) fn obstacle(&self, is_stored: impl Fn(Type) -> bool) -> Option<String> {
        if self.is_receiving {
            return Some("a response is incomplete".to_owned());
        }
        if self.was_cut_off {
            return Some("the stream ended before Envoy had all that it asked for".to_owned());
        }
        let is_new = self.began.elapsed() < PATIENCE;
        self.types.iter().find_map(|(type_of, it)| {
            let name = type_of.name();
            let mut waiting = it.waiting.values();
            if !it.unanswered.is_empty() {
                Some(format!("Envoy has not answered a response ({name})"))
            } else if !it.lacking.is_empty() {
                Some(format!("Envoy has resources that are not stored ({name})"))
            } else if !it.has_answered
                && (it.subscribed.is_some_and(|since| since.elapsed() < PATIENCE)
                    || is_stored(*type_of) && (is_new || NEEDED.contains(type_of)))
            {
                Some(format!("Envoy has not answered its first response ({name})"))
            } else if waiting.any(|it| it.since.elapsed() < PATIENCE) {
                Some(format!("istiod has not sent all resources that Envoy asks for ({name})"))
            } else {
                None
            }
        })
    }

    /// Returns when [`View::take_due`] has resources next.
    pub(super) fn stored_due(&self) -> Option<Instant> {
        if !self.has_sent_stored {
            return None;
        }
        let waiting = self.types.values().filter(|it| it.unanswered.is_empty());
        let waiting = waiting.flat_map(|it| it.waiting.values()).filter(|it| it.needs_stored);
        waiting.map(|it| later(it.since, STORED_VERSION_DELAY)).min()
    }

    /// Returns the resources of a type whose stored versions Envoy should get now, with the reasons, and takes them as
    /// handled: it has rejected istiod's version or has not got any, and has accepted none. While it has not answered a
    /// response of the type, which may have newer versions, there are none.
    pub(super) fn take_due(&mut self, type_of: Type) -> Vec<(NameDigest, Arc<str>)> {
        let it = self.of(type_of);
        if !it.unanswered.is_empty() || it.asks_envoy {
            return Vec::new();
        }
        let mut due = Vec::new();
        for (name, rejection) in it.rejected.iter_mut().filter(|(_, it)| !it.is_handled) {
            rejection.is_handled = true;
            if !it.accepted.contains(name) {
                due.push((*name, rejection.reason.clone()));
            }
        }
        for (name, waiting) in it.waiting.iter_mut().filter(|(_, it)| it.needs_stored) {
            if waiting.since.elapsed() >= STORED_VERSION_DELAY {
                waiting.needs_stored = false;
                if !it.accepted.contains(name) {
                    due.push((*name, Arc::from(NOT_SENT)));
                }
            }
        }
        due
    }

    /// Takes the names of a type in [`BY_NAME`] that Envoy subscribes to and unsubscribes from.
    pub(super) fn change_subscription(
        &mut self,
        type_of: Type,
        added: impl Iterator<Item = NameDigest>,
        removed: impl Iterator<Item = NameDigest>,
    ) {
        let needs_stored = self.has_sent_stored;
        let it = self.of(type_of);
        for name in removed {
            it.waiting.remove(&name);
            it.accepted.remove(&name);
            it.rejected.remove(&name);
            it.lacking.remove(&name);
        }
        for name in added.filter(|name| !it.accepted.contains(name)) {
            it.waiting.entry(name).or_insert(Waiting { since: Instant::now(), needs_stored });
        }
    }
}

impl TypeView {
    /// Adds a complete response. Above [`MAX_UNANSWERED`], merges the two oldest ones. Returns the fields that newer ones
    /// of the same names replace.
    pub(super) fn complete(&mut self, response: Response) -> Vec<Field> {
        let is_first = std::mem::take(&mut self.awaits_first);
        let number = self.responses;
        self.responses = number.wrapping_add(1);
        let mut response = Response { is_first, number, ..response };
        response.fields.iter_mut().for_each(|field| field.response = number);
        self.unanswered.push_back(response);
        if self.unanswered.len() <= MAX_UNANSWERED {
            return Vec::new();
        }
        let [Some(older), Some(newer)] = [self.unanswered.pop_front(), self.unanswered.pop_front()]
        else {
            return Vec::new();
        };
        let (merged, replaced) = older.merged_with(newer);
        self.unanswered.push_front(merged);
        replaced
    }

    /// Takes the response that an ACK or NACK with this nonce answers. Returns None if there is none, or if responses that
    /// were merged with it are unanswered. Also returns the rejected fields of such a response, and those that newer ones
    /// replace.
    pub(super) fn take_answered(
        &mut self,
        nonce: &str,
        rejects: impl Fn(&Field) -> bool,
    ) -> (Option<Response>, Vec<Field>) {
        let Some(first) = self.unanswered.front_mut() else {
            return (None, Vec::new());
        };
        // Merged responses have lost their nonces. Envoy answers in order, so this answers the oldest one.
        if first.older > 0 {
            // A field of a rejected response must not count as accepted with a later response.
            let oldest = first.number.wrapping_sub(first.older as u32);
            first.older -= 1;
            let dropped = first.fields.extract_if(.., |it| it.response == oldest && rejects(it));
            return (None, dropped.collect());
        }
        let Some(index) = self.unanswered.iter().position(|it| it.nonce == nonce) else {
            return (None, Vec::new());
        };
        // Envoy answers in order: the answer to a response counts for earlier ones, whose answers were not seen.
        let mut answered = self.unanswered.drain(..=index);
        let mut response = answered.next().unwrap_or_default();
        let mut unused = Vec::new();
        for next in answered {
            let (merged, replaced) = response.merged_with(next);
            unused.extend(replaced);
            response = merged;
        }
        (Some(response), unused)
    }

    /// Returns true if Envoy subscribes to a resource.
    pub(in crate::xds) fn wants(&self, type_of: Type, name: NameDigest) -> bool {
        !BY_NAME.contains(&type_of)
            || self.accepted.contains(&name)
            || self.waiting.contains_key(&name)
            || self.rejected.contains_key(&name)
            || self.lacking.contains(&name)
    }

    /// Takes the unanswered versions of resources that Envoy does not subscribe to. Its answer does not concern newer ones.
    pub(in crate::xds) fn take_unanswered(&mut self, names: &HashSet<NameDigest>) -> Vec<Field> {
        let responses = self.unanswered.iter_mut();
        let fields =
            responses.flat_map(|it| it.fields.extract_if(.., |it| names.contains(&it.name)));
        fields.collect()
    }

    /// Resources that Envoy has accepted, or that istiod has removed, are no longer awaited or rejected.
    pub(super) fn accept(&mut self, field: &Field) {
        self.rejected.remove(&field.name);
        self.waiting.remove(&field.name);
        self.lacking.remove(&field.name);
        if field.is_removed {
            self.accepted.remove(&field.name);
        } else {
            self.accepted.insert(field.name);
        }
    }

    /// Counts a resource for which a stored version was looked for as one that Envoy lacks.
    pub(super) fn note_missing(&mut self, name: NameDigest, reason: Arc<str>) {
        self.rejected.entry(name).or_insert(Rejection { reason, is_handled: true });
    }

    /// Names that Envoy rejects are not awaited from istiod.
    pub(super) fn reject(&mut self, name: NameDigest, reason: &Arc<str>) {
        self.waiting.remove(&name);
        self.rejected.insert(name, Rejection { reason: reason.clone(), is_handled: false });
    }
}

impl Response {
    pub(in crate::xds) fn new(nonce: String, version: String, fields: Vec<Field>) -> Self {
        Self { nonce, version, fields, ..Self::default() }
    }

    /// Merges a response with the next one: the newest field of each name stays. Returns the others, too.
    fn merged_with(self, newer: Self) -> (Self, Vec<Field>) {
        let names: HashSet<_> = newer.fields.iter().map(|field| field.name).collect();
        let mut fields = self.fields;
        let replaced = fields.extract_if(.., |field| names.contains(&field.name));
        let replaced = replaced.collect();
        fields.extend(newer.fields);
        let older = self.older + newer.older + 1;
        let is_first = self.is_first || newer.is_first;
        (Self { fields, older, is_first, ..newer }, replaced)
    }
}
