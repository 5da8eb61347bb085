//! Implements the ledger without I/O: the store, the views, and what the file has.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::file::{Batch, Record, TypeRecord};
use super::rejected::{self, MAX_NAMES, Rejected, Stored, problem, rejected, subject};
use super::store::{Piece, Place, Store};
use super::view::{Field, Response, View};
use super::{BY_NAME, NEEDED, OTHER_NODE, StoredResource, Type, unix_now, unix_rfc3339};
use crate::runtime::clock::{after, later};
use crate::xds::on_demand::Catalog;
use crate::xds::request::{Subscription, shortened};
use crate::xds::wire::{self, NameDigest};

/// The time in which changes are collected before they are written.
const DELAY: Duration = Duration::from_secs(5);
/// The time between two attempts to write while something is missing for a record.
const RETRY: Duration = Duration::from_millis(100);
/// The time between two attempts after the disk has failed.
const FAILURE_PAUSE: Duration = Duration::from_secs(60);
/// The time after which the log says why no record is written.
const PATIENCE: Duration = Duration::from_secs(60);
/// The interval in which an unchanged file is marked as current.
const REFRESH: Duration = Duration::from_secs(3600);

/// The bytes that a file may have beyond twice the bytes in use.
const SLACK: u64 = 64 * 1024;

/// The most Envoy processes with a view. Older ones have ended.
const MAX_VIEWS: usize = 4;

/// The resources of a type in the file.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    pub(super) version: String,
    pub(super) bytes: u64,
    pub(super) current: u64,
}

#[derive(Debug, Default)]
pub(in crate::xds) struct State {
    max_bytes: u64,
    on_nack: bool,
    /// True if Envoy gets clusters on demand, for which the ledger is needed in memory.
    on_demand: bool,
    /// What the agent knows of clusters, if Envoy gets them on demand.
    pub(in crate::xds) catalog: Catalog,
    /// False if nothing is written to the directory.
    pub(super) is_stored: bool,
    /// False if the ledger is not used.
    pub(in crate::xds) is_on: bool,
    pub(in crate::xds) store: Store,
    /// The node whose Envoys have accepted what is stored; None while nothing is.
    identity: Option<String>,
    types: BTreeMap<Type, TypeRecord>,
    /// The last time at which istiod's stream was known to be open, in seconds of Unix time.
    pub(super) current: u64,
    /// Changes whenever the store is dropped, after which earlier places are not valid.
    pub(in crate::xds) store_number: usize,
    /// The views of Envoys, by the ids of their processes.
    views: BTreeMap<i32, View>,
    next_generation: usize,
    /// The first names of the resources that Envoy has rejected in its last NACK of a type.
    pub(super) rejected: BTreeMap<Type, Vec<String>>,
    /// Resources of which the newest Envoy has the stored version, because it has rejected istiod's.
    pub(super) after_nack: BTreeMap<Type, Vec<StoredResource>>,
    /// What the file has.
    pub(super) written: BTreeMap<Type, Written>,
    /// The error of the last write; None after a success.
    pub(in crate::xds) write_failure: Option<String>,
    file_length: u64,
    /// True if the next batch must have all that is stored.
    is_whole_due: bool,
    is_removal_due: bool,
    /// The time since which something has to be written.
    dirty_since: Option<Instant>,
    /// The time before which nothing is written.
    not_before: Option<Instant>,
    last_record: Option<Instant>,
    /// True once the log has said why nothing is written.
    has_said_obstacle: bool,
    has_said_too_large: bool,
}

impl State {
    pub(super) fn new(max_bytes: u64, on_nack: bool, on_demand: bool) -> Self {
        Self {
            max_bytes,
            on_nack,
            on_demand,
            is_stored: true,
            is_on: true,
            is_whole_due: true,
            ..Self::default()
        }
    }

    /// Stops the use of the directory, and of the ledger unless it is needed in memory.
    pub(super) fn turn_off(&mut self) {
        self.is_stored = false;
        if !self.on_demand {
            self.is_on = false;
            self.clear();
        }
    }

    /// Adds the view of an Envoy process, if it is new.
    pub(super) fn add_view(&mut self, pid: i32) {
        if self.views.contains_key(&pid) {
            return;
        }
        let oldest = self.views.iter().min_by_key(|(_, view)| view.generation);
        if self.views.len() >= MAX_VIEWS
            && let Some(pid) = oldest.map(|(pid, _)| *pid)
            && let Some(mut view) = self.views.remove(&pid)
        {
            self.release(view.end());
        }
        self.views.insert(pid, View::new(self.next_generation));
        self.next_generation += 1;
        // The new Envoy has no stored version yet.
        self.after_nack.clear();
        self.rejected.clear();
    }

    /// Returns the view of an Envoy process.
    pub(in crate::xds) fn view(&mut self, pid: i32) -> &mut View {
        self.views.entry(pid).or_insert_with(|| View::new(0))
    }

    /// Returns the newest view that has a stream of istiod, or else the newest.
    fn newest_view(&self) -> Option<(i32, &View)> {
        let views = self.views.iter().map(|(pid, view)| (*pid, view));
        views.max_by_key(|(_, view)| (view.is_live, view.generation))
    }

    pub(in crate::xds) fn is_newest(&self, pid: i32) -> bool {
        self.newest_view().is_some_and(|(newest, _)| newest == pid)
    }

    pub(super) fn accepted(&self) -> BTreeMap<&'static str, usize> {
        let newest = self.newest_view().filter(|_| self.is_on).into_iter();
        let types = newest.flat_map(|(_, view)| &view.types);
        types.map(|(type_of, it)| (type_of.url(), it.accepted.len())).collect()
    }

    pub(super) fn can_serve(&self) -> bool {
        self.is_stored && NEEDED.into_iter().all(|type_of| self.has(type_of))
    }

    /// Returns the time since istiod's stream was last known to be open.
    pub(super) fn age(&self) -> Duration {
        Duration::from_secs(unix_now().saturating_sub(self.current))
    }

    /// Returns true if the configuration is of this node.
    pub(super) fn is_of(&self, identity: Option<&str>) -> bool {
        self.identity.as_deref() == identity
    }

    /// Takes what the file of an earlier agent has, unless an Envoy of this agent has accepted anything before.
    pub(super) fn install(&mut self, store: Store, record: Record) {
        let is_other_node = self.identity.as_ref().is_some_and(|it| *it != record.identity);
        if is_other_node {
            log_other_node();
        }
        // They are valid for any version of Istio.
        self.catalog.restore_used(&record.used);
        if is_other_node || !self.store.is_empty() {
            return;
        }
        self.store = store;
        self.describe_written(&record);
        self.identity = Some(record.identity);
        self.current = record.current;
        let types = record.types.into_iter();
        self.types = types.filter_map(|(url, it)| Some((Type::of(&url)?, it))).collect();
    }

    /// Describes the file by its last record. Newer versions may have been accepted since.
    fn describe_written(&mut self, record: &Record) {
        let bytes = self.store.bytes();
        let described = record.types.iter().filter_map(|(url, it)| {
            let type_of = Type::of(url)?;
            let written = Written {
                version: it.version.clone(),
                bytes: bytes.get(&type_of).copied().unwrap_or_default(),
                current: record.current,
            };
            Some((type_of, written))
        });
        self.written = described.collect();
    }

    /// Begins a stream of an Envoy with this identity. What is stored for another node is dropped. Its file stays until
    /// this node's is valid.
    pub(super) fn begin_stream(&mut self, pid: i32, stream: u32, identity: String) {
        if self.identity.as_ref().is_some_and(|it| *it != identity) {
            log_other_node();
            self.clear();
        }
        let dropped = self.view(pid).begin(stream);
        self.release(dropped);
        self.identity = Some(identity);
    }

    /// Takes the first request of a type on a stream, with the resources that Envoy has.
    pub(super) fn begin_type(&mut self, pid: i32, type_of: Type, initial: HashSet<NameDigest>) {
        let lacking = initial.iter().filter(|name| self.store.get(type_of, **name).is_none());
        let lacking = lacking.copied().collect();
        let it = self.view(pid).of(type_of);
        (it.subscribed, it.awaits_first) = (Some(Instant::now()), true);
        it.lacking = lacking;
        // istiod does not say that it has removed a resource that Envoy does not name.
        it.rejected.retain(|name, _| initial.contains(name));
        it.accepted = initial;
    }

    /// Takes the names that Envoy subscribes to and unsubscribes from. istiod does not say that it has removed a resource
    /// without a subscription, so the newest Envoy's unsubscriptions remove resources.
    pub(super) fn change_subscription(
        &mut self,
        pid: i32,
        type_of: Type,
        subscription: &Subscription,
    ) {
        if !BY_NAME.contains(&type_of) {
            return;
        }
        let [added, removed] = [&subscription.names, &subscription.unsubscribed]
            .map(|names| names.iter().map(|name| NameDigest::of(name)));
        self.view(pid).change_subscription(type_of, added, removed.clone());
        if !self.is_newest(pid) {
            return;
        }
        for (digest, name) in removed.zip(&subscription.unsubscribed) {
            if self.store.get(type_of, digest).is_some() {
                let mut field = Vec::new();
                prost::encoding::bytes::encode(wire::REMOVED, name, &mut field);
                let place = self.store.append(type_of, &field);
                self.store.remove(type_of, digest, place);
                self.mark_dirty();
            }
        }
    }

    /// Adds a complete response. Returns false if configuration has become too large.
    pub(in crate::xds) fn complete(&mut self, pid: i32, type_of: Type, response: Response) -> bool {
        let view = self.view(pid);
        view.note_response();
        let replaced = view.of(type_of).complete(response);
        self.release(replaced.iter().map(|field| field.place));
        // Until Envoy has answered, the old and the new version of a resource both use memory.
        self.enforce_limit(self.max_bytes.saturating_mul(2))
    }

    /// Applies Envoy's ACK of a response, or its NACK with the reason.
    pub(super) fn answer(&mut self, pid: i32, type_of: Type, nonce: &str, rejection: Option<&str>) {
        let find = |fields: &[Field]| {
            rejection.map(|reason| rejected(reason, &fields.iter().map(|it| it.name).collect()))
        };
        let reason = rejection.map(|it| Arc::<str>::from(shortened(it)));
        let it = self.view(pid).of(type_of);
        let first = it.unanswered.front().and_then(|it| find(&it.fields));
        let (response, unused) = it.take_answered(nonce, |field| {
            first.as_ref().is_some_and(|it| it.contains(&field.name))
        });
        if response.is_none()
            && let Some(reason) = &reason
        {
            for field in unused.iter().filter(|field| !field.is_removed) {
                if it.wants(type_of, field.name) {
                    it.reject(field.name, reason);
                }
            }
        }
        self.release(unused.iter().map(|field| field.place));
        if let Some(response) = response {
            let rejected = find(&response.fields).zip(reason);
            self.apply(pid, type_of, response, rejected);
        }
        self.end_after_nack(pid, type_of);
    }

    fn apply(
        &mut self,
        pid: i32,
        type_of: Type,
        response: Response,
        rejected: Option<(Rejected, Arc<str>)>,
    ) {
        let lacking = response.fields.iter().filter(|field| {
            rejected.as_ref().is_some_and(|(it, _)| !field.is_removed && it.contains(&field.name))
        });
        let lacking = Vec::from_iter(lacking.take(MAX_NAMES).map(|field| field.place));
        if lacking.is_empty() {
            self.rejected.remove(&type_of);
        } else if let Ok(names) = rejected::names(self.store.pieces(lacking)) {
            self.rejected.insert(type_of, names);
        }
        // An Envoy that drains after a hot restart may answer late.
        let generation = self.view(pid).generation;
        let is_superseded = self.views.values_mut().any(|view| {
            view.is_live && view.generation > generation && view.of(type_of).has_answered
        });
        for field in &response.fields {
            let it = self.view(pid).of(type_of);
            // Envoy also answers for resources that it no longer subscribes to, and does not have them.
            if !field.is_removed && !it.wants(type_of, field.name) {
                self.release([field.place]);
                continue;
            }
            if let Some((rejected, reason)) = &rejected
                && rejected.contains(&field.name)
            {
                if !field.is_removed {
                    it.reject(field.name, reason);
                }
                self.release([field.place]);
                continue;
            }
            it.accept(field);
            if is_superseded {
                self.release([field.place]);
            } else if field.is_removed {
                self.store.remove(type_of, field.name, field.place);
            } else {
                self.store.set(type_of, field.name, field.place);
                if type_of == Type::CLUSTER {
                    self.catalog.unaccepted.remove(&field.name);
                }
            }
        }
        // A stored version of a rejected resource may need others by name that istiod has not sent.
        let keeps_others = BY_NAME.contains(&type_of) && self.view(pid).has_rejected();
        let it = self.views.entry(pid).or_insert_with(|| View::new(0)).of(type_of);
        it.has_answered = true;
        it.asks_envoy |= matches!(rejected, Some((Rejected::Unknown, _)));
        if matches!(rejected, Some((Rejected::All | Rejected::Unknown, _))) {
            it.awaits_first |= response.is_first;
        } else if !is_superseded {
            self.types.entry(type_of).or_default().version = response.version;
            if response.is_first && !keeps_others {
                self.is_whole_due |= self.store.retain(type_of, |name| {
                    it.accepted.contains(name) || it.rejected.contains_key(name)
                });
            }
        }
        let has_rejected = !self.view(pid).of(type_of).rejected.is_empty();
        let current = self.written.get(&type_of).map_or(self.current, |it| it.current);
        if let Some(record) = self.types.get_mut(&type_of) {
            record.rejected = has_rejected.then(|| record.rejected.unwrap_or(current));
        }
        self.mark_dirty();
    }

    /// Ends a stream. `stream` is its id; a newer one of the same Envoy may have begun.
    pub(super) fn end_stream(&mut self, pid: i32, stream: u32) {
        let view = self.view(pid);
        if view.stream != Some(stream) {
            return;
        }
        let was_current = view.is_current();
        let dropped = view.end();
        self.release(dropped);
        if was_current {
            self.current = unix_now();
            self.mark_dirty();
        }
    }

    pub(in crate::xds) fn release(&mut self, places: impl IntoIterator<Item = Place>) {
        places.into_iter().for_each(|place| self.store.release(place));
    }

    /// Builds a response with stored versions of one type, of resources that Envoy has rejected or that istiod has not sent
    /// in time. Also returns true if there may be others after Envoy has answered more responses.
    pub(super) fn take_stored(&mut self, pid: i32) -> (Option<(Bytes, Stored)>, bool) {
        let mut may_have_more = false;
        if !self.on_nack || !self.is_on {
            return (None, false);
        }
        for type_of in NEEDED.into_iter().chain(BY_NAME) {
            let mut due = self.view(pid).take_due(type_of);
            if type_of == Type::CLUSTER {
                due.retain(|(name, _)| !self.catalog.unaccepted.contains(name));
            }
            let it = self.view(pid).of(type_of);
            may_have_more |= it.rejected.values().any(|it| !it.is_handled);
            if due.is_empty() {
                continue;
            }
            let record = self.types.get(&type_of).cloned().unwrap_or_default();
            // After a rejection, the stored versions were current only until then.
            let current = record.rejected.unwrap_or(self.current);
            let names = due.clone();
            match rejected::read(&mut self.store, &record.version, type_of, due, current) {
                Ok(Some(found)) => {
                    let view = self.view(pid);
                    view.has_sent_stored = true;
                    for (name, reason) in names {
                        view.of(type_of).note_missing(name, reason);
                    }
                    return (Some(found), true);
                }
                Ok(None) => {}
                Err(error) => {
                    let type_url = type_of.url();
                    tracing::warn!(target: "xdsproxy", "cannot read stored versions of {type_url}: {error}");
                }
            }
        }
        (None, may_have_more)
    }

    /// Records and logs that Envoy has stored versions instead of istiod's, or that it has rejected them as well.
    pub(super) fn answer_stored(&mut self, pid: i32, stored: Stored, rejection: Option<&str>) {
        let type_of = stored.type_of;
        let names: HashSet<_> = stored.resources.iter().map(StoredResource::digest).collect();
        let found = rejection.map(|reason| rejected(reason, &names));
        let (rejected, accepted): (Vec<_>, Vec<_>) = stored
            .resources
            .into_iter()
            .partition(|it| found.as_ref().is_some_and(|found| found.contains(&it.digest())));
        if let Some(reason) = rejection {
            let reason = shortened(reason);
            let subject = subject(type_of.url(), &rejected);
            tracing::error!(target: "xdsproxy", "Envoy refuses the stored version of {subject} as well: {reason}");
        }
        if accepted.is_empty() {
            return;
        }
        tracing::error!(target: "xdsproxy", "{}", problem(type_of.url(), &accepted));
        self.view(pid).of(type_of).accepted.extend(accepted.iter().map(StoredResource::digest));
        if self.is_newest(pid) {
            let resources = self.after_nack.entry(type_of).or_default();
            resources.retain(|old| accepted.iter().all(|new| new.name != old.name));
            resources.extend(accepted);
        }
    }

    /// Takes the names of the resources of which Envoy has a version, where its reason did not say it; None if it did not
    /// answer.
    pub(super) fn note_accepted(
        &mut self,
        pid: i32,
        type_of: Type,
        accepted: Option<HashSet<NameDigest>>,
    ) {
        let it = self.view(pid).of(type_of);
        it.asks_envoy = false;
        match accepted {
            Some(accepted) => it.accepted.extend(accepted),
            None => it.rejected.values_mut().for_each(|it| it.is_handled = true),
        }
    }

    /// Removes resources of which Envoy has istiod's version again, or that istiod has removed.
    pub(super) fn end_after_nack(&mut self, pid: i32, type_of: Type) {
        if !self.is_newest(pid) {
            return;
        }
        let Some(resources) = self.after_nack.get_mut(&type_of) else { return };
        let Some(view) = self.views.get_mut(&pid) else { return };
        let rejected = &view.of(type_of).rejected;
        let ended: Vec<_> =
            resources.extract_if(.., |it| !rejected.contains_key(&it.digest())).collect();
        if resources.is_empty() {
            self.after_nack.remove(&type_of);
        }
        if !ended.is_empty() {
            let subject = subject(type_of.url(), &ended);
            tracing::info!(
                target: "xdsproxy",
                "Envoy no longer has the stored version of {subject}: istiod has removed it or sent an acceptable one"
            );
        }
    }

    /// Returns the blocks of resources, their length, and the version of their type.
    pub(super) fn read(
        &mut self,
        type_of: Type,
        names: Option<&[NameDigest]>,
    ) -> (Vec<Piece>, u64, String) {
        let places = match names {
            None => self.store.all(type_of),
            Some(names) => names.iter().filter_map(|name| self.store.get(type_of, *name)).collect(),
        };
        let version = self.types.get(&type_of).map(|it| it.version.clone());
        (self.store.pieces(places.clone()), Store::length(&places), version.unwrap_or_default())
    }

    /// Returns the place of the newest version of a resource: one that this Envoy has not answered, or the stored one.
    pub(in crate::xds) fn newest(
        &mut self,
        pid: i32,
        type_of: Type,
        name: NameDigest,
    ) -> Option<Place> {
        let unanswered = self.view(pid).of(type_of).unanswered.iter().rev();
        match unanswered.flat_map(|it| &it.fields).find(|field| field.name == name) {
            Some(field) => (!field.is_removed).then_some(field.place),
            None => self.store.get(type_of, name),
        }
    }

    /// Returns the fields of the newest versions of resources, and the version of their type.
    pub(in crate::xds) fn read_newest(
        &mut self,
        pid: i32,
        type_of: Type,
        names: &[NameDigest],
    ) -> io::Result<(Vec<u8>, String)> {
        let places: Vec<_> =
            names.iter().filter_map(|name| self.newest(pid, type_of, *name)).collect();
        let mut bytes = Vec::new();
        for piece in self.store.pieces(places) {
            bytes.append(&mut piece.bytes()?);
        }
        let version = self.types.get(&type_of).map(|it| it.version.clone());
        Ok((bytes, version.unwrap_or_default()))
    }

    /// Returns true for a type of which a response has been accepted. It may have no resources.
    pub(super) fn has(&self, type_of: Type) -> bool {
        self.types.contains_key(&type_of)
    }

    pub(in crate::xds) fn mark_dirty(&mut self) {
        self.dirty_since.get_or_insert_with(Instant::now);
    }

    /// Drops what is stored in memory, and ends the recording of all streams, whose responses have places in the store.
    /// The file stays.
    fn clear(&mut self) {
        for view in self.views.values_mut() {
            view.end();
            view.stream = None;
        }
        self.store = Store::default();
        self.catalog.unaccepted.clear();
        self.store_number += 1;
        self.types.clear();
        self.written.clear();
        self.after_nack.clear();
        self.rejected.clear();
        self.is_whole_due = true;
        self.dirty_since = None;
    }

    /// Drops everything if it needs more memory than configured, until the next stream. Returns false then.
    fn enforce_limit(&mut self, limit: u64) -> bool {
        if self.store.memory() as u64 <= limit {
            return true;
        }
        if !std::mem::replace(&mut self.has_said_too_large, true) {
            tracing::info!(
                target: "xdsproxy",
                "configuration is not stored: it needs more than {} bytes (ISTIO_AGENT_KEEP_CONFIG_MAX_BYTES)",
                self.max_bytes
            );
        }
        if self.on_demand {
            // Clusters that Envoy may ask for are needed in memory.
            self.is_removal_due |= std::mem::take(&mut self.is_stored);
            return true;
        }
        self.fail_streams();
        false
    }

    /// Drops everything, and removes the file, because the changes that Envoy accepts are no longer followed.
    pub(super) fn fail_streams(&mut self) {
        self.clear();
        self.is_removal_due = true;
        self.mark_dirty();
    }

    /// Returns when something has to be written.
    pub(super) fn write_due(&self) -> Option<Instant> {
        let changes = self.dirty_since.map(|since| later(since, DELAY));
        let is_live = self.newest_view().is_some_and(|(_, view)| view.is_live);
        let refresh = self.last_record.filter(|_| is_live).map(|last| later(last, REFRESH));
        let due = changes.into_iter().chain(refresh).min()?;
        Some(self.not_before.map_or(due, |not_before| due.max(not_before)))
    }

    /// Merges blocks that are mostly unused, one at a time. Returns true if there is more to do.
    pub(super) fn compact(&mut self) -> bool {
        self.store.compact(self.is_stored).unwrap_or_else(|error| {
            tracing::warn!(target: "xdsproxy", "stored configuration is damaged in memory: {error}");
            false
        })
    }

    /// Returns true if the file has to be removed.
    pub(super) fn take_removal(&mut self) -> bool {
        std::mem::take(&mut self.is_removal_due)
    }

    /// Returns what has to be written. Returns None unless the newest Envoy has all that istiod has sent, so that the file
    /// never has a mix that was not in force.
    pub(super) fn take_batch(&mut self, is_last: bool) -> Option<Batch> {
        if !self.is_stored {
            (self.dirty_since, self.not_before) = (None, None);
            return None;
        }
        if self.newest_view().is_some_and(|(_, view)| view.is_current()) {
            self.current = unix_now();
        } else if self.dirty_since.is_none() && is_last {
            return None;
        }
        if let Some(obstacle) = self.obstacle() {
            let has_waited = self.dirty_since.is_some_and(|since| since.elapsed() > PATIENCE);
            if has_waited && !std::mem::replace(&mut self.has_said_obstacle, true) {
                let current = self.written.values().map(|it| unix_rfc3339(it.current)).max();
                let since = current.map(|it| format!(" since {it}")).unwrap_or_default();
                tracing::info!(
                    target: "xdsproxy",
                    "configuration is not stored{since}: {obstacle}"
                );
            }
            self.not_before = Some(after(if has_waited { DELAY } else { RETRY }));
            return None;
        }
        (self.dirty_since, self.not_before) = (None, None);
        self.has_said_obstacle = false;
        if !self.enforce_limit(self.max_bytes) || !self.is_stored {
            return None;
        }
        let in_use: u64 = self.store.bytes().values().sum();
        let is_whole = std::mem::take(&mut self.is_whole_due)
            || self.file_length > in_use.saturating_mul(2) + SLACK;
        let types = self.types.iter();
        let record = Record {
            identity: self.identity.clone()?,
            current: self.current,
            used: self.catalog.used(),
            types: types.map(|(type_of, it)| (type_of.url().to_owned(), it.clone())).collect(),
        };
        Some(Batch { is_whole, blocks: self.store.take_blocks(is_whole), record })
    }

    /// Says why nothing can be written now.
    fn obstacle(&self) -> Option<String> {
        if let Some((_, view)) = self.newest_view()
            && let Some(obstacle) = view.obstacle(|type_of| self.has(type_of))
        {
            return Some(obstacle);
        }
        (!self.can_serve()).then(|| "Envoy has not accepted clusters and listeners".to_owned())
    }

    /// Takes the result of writing a batch. Returns an error that has to be logged.
    pub(super) fn conclude(&mut self, written: io::Result<(Record, u64)>) -> Option<io::Error> {
        match written {
            Ok((record, length)) => {
                self.file_length = length;
                self.last_record = Some(Instant::now());
                self.write_failure = None;
                self.describe_written(&record);
                None
            }
            Err(error) => {
                self.write_failure = Some(error.to_string());
                self.written.clear();
                self.is_whole_due = true;
                self.last_record = None;
                self.mark_dirty();
                self.not_before = Some(after(FAILURE_PAUSE));
                Some(error)
            }
        }
    }
}

fn log_other_node() {
    tracing::info!(target: "xdsproxy", "stored configuration is not used: {OTHER_NODE}");
}
