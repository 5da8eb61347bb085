//! Writes the responses that Envoy has accepted on the newest stream to disk, every few seconds.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::file::{
    LookupRequest, MAX_PENDING, STORED_VERSION_DELAY, TypeFile, file_name, open, spilled, temporary,
};
use super::{BY_NAME, Config, DIRECTORY, NEEDED, Shared, TYPES, Type};
use crate::files::directory::Directory;
use crate::runtime::clock::{after, later};
use crate::xds::response::Received;

/// The most bytes in memory of responses that wait for their ACK.
const MAX_UNANSWERED_BYTES: usize = 2 << 20;

/// The most bytes in memory of responses that wait for their ACK or to be written.
const MAX_MEMORY: usize = 3 << 20;

/// The time in which changes are collected before they are written.
const DELAY: Duration = Duration::from_secs(5);

/// The interval in which unchanged files are marked as current.
const REFRESH: Duration = Duration::from_secs(3600);

/// The reason why Envoy has no version of a resource that a stored one needs.
const NOT_SENT: &str = "istiod has not sent it within 5 s";

pub(super) const OTHER_NODE: &str = "it is stored for another node";

/// Adds the path of a type's file to an error, or the path of the directory if the type is empty.
pub(super) fn with_path(config: &Config, type_url: Type, error: impl Display) -> io::Error {
    let directory = config.volume.directory.join(DIRECTORY);
    let path = directory.join(file_name(type_url));
    io::Error::other(format!("{}: {error}", path.display()))
}

/// An operation of a stream on the file of a type.
#[derive(Debug)]
pub(super) enum WriteOp {
    /// The first request of the stream: the identity of the node, the generation of its Envoy, and the queue
    /// in which the stream takes requests for stored versions. The type is empty.
    Begin(String, usize, mpsc::Sender<LookupRequest>),
    /// The first request of the type: the digests of the names of resources that Envoy has. A response that the agent
    /// consumes has all resources of its type, and follows this operation without names.
    FirstRequest { initial_resources: HashSet<u64> },
    /// Bytes of a response.
    Bytes(Bytes),
    /// A response is complete.
    Complete(Received),
    /// Envoy has sent the ACK of the response with this nonce, or the NACK with its reason.
    AckOrNack(String, Option<String>),
    /// Envoy has subscribed to names and unsubscribed from others, of a type in [`BY_NAME`].
    SubscriptionChange { added: Vec<u64>, removed: Vec<u64> },
    /// The stream has looked up stored versions of these resources.
    LookedUp(Vec<u64>),
    /// The stream has ended. The type is empty.
    End,
}

/// The id of a stream, and its operations on the files of types.
pub(super) type Batch = (u32, Vec<(Type, WriteOp)>);

/// The state of the writer's thread.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    /// The generation of the newest Envoy that has begun a stream.
    generation: usize,
    /// The stream that is recorded, or the last that was.
    stream: Option<u32>,
    /// None if the directory cannot be used.
    pub(super) directory: Option<Directory>,
    pub(super) files: BTreeMap<Type, TypeFile>,
    /// The bytes of another node's files. They stay until they can be replaced.
    held_bytes: u64,
    /// The last time at which files were marked as current; None before istiod's first response on the stream,
    /// and after its end.
    refreshed: Option<Instant>,
    /// The time since which files have to be written.
    dirty_since: Option<Instant>,
    /// The queue in which the stream takes requests for stored versions.
    lookup_requests: Option<mpsc::Sender<LookupRequest>>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            generation: 0,
            stream: None,
            directory: None,
            files: BTreeMap::new(),
            held_bytes: 0,
            refreshed: None,
            dirty_since: None,
            lookup_requests: None,
        }
    }

    /// Returns when files have to be written, or stored versions looked up.
    pub(super) fn due(&self) -> Option<Instant> {
        let refresh = self.refreshed.map(|at| later(at, REFRESH));
        let write = self.dirty_since.map(|at| later(at, DELAY));
        let lookups = self.files.values().filter_map(TypeFile::lookup_due);
        refresh.into_iter().chain(write).chain(lookups).min()
    }

    /// Applies the operations of a batch, and asks the recorded stream for stored versions that are due. After an
    /// error, or if the disk was too slow, deletes all files and stops recording.
    pub(super) fn apply_batch(&mut self, (stream, ops): Batch) {
        if self.shared.is_stalled.swap(false, Ordering::Relaxed) {
            self.fail("", "the disk is too slow");
        }
        for (type_url, op) in ops {
            let applied = self.apply(stream, type_url, op);
            // A stored version of a missing resource may need others by name that istiod has not sent.
            if self.files.values().any(|file| !file.missing.is_empty()) {
                let files = self.files.iter_mut();
                let by_name = files.filter(|(type_url, _)| BY_NAME.contains(type_url));
                by_name.for_each(|(_, file)| file.retain_all());
            }
            if let Err(error) = applied.and_then(|()| self.enforce_limits(type_url)) {
                self.fail(type_url, error);
            }
        }
        if let Some(lookup_requests) = &self.lookup_requests {
            let files = self.files.iter_mut();
            let due = files.filter_map(|(type_url, file)| file.take_lookup_request(type_url));
            // If the queue is full, they are due again later.
            due.for_each(|request| _ = lookup_requests.try_send(request));
        }
        let is_dirty = self.files.values().any(|file| file.is_dirty);
        self.dirty_since = is_dirty.then(|| self.dirty_since.unwrap_or_else(Instant::now));
    }

    /// Writes dirty files. Marks the other files as current, if `is_last` or after [`REFRESH`], while istiod's stream
    /// is open. After an error, deletes all files and stops recording.
    pub(super) fn write(&mut self, is_last: bool) {
        let refreshed = self.refreshed;
        let refreshes = refreshed.is_some_and(|at| is_last || at.elapsed() >= REFRESH);
        if refreshes {
            self.refreshed = Some(Instant::now());
        }
        self.dirty_since = None;
        let Some(directory) = &self.directory else {
            return;
        };
        let is_accepted = |it| self.files.get(it).is_some_and(|file| file.is_dirty);
        if self.held_bytes > 0 && NEEDED.into_iter().all(is_accepted) {
            if let Err(error) = self.release() {
                self.fail("", error);
            }
            return;
        }
        for (type_url, file) in &mut self.files {
            if (file.is_dirty || refreshes && file.is_subscribed)
                && let Err(error) = file.commit(directory)
            {
                let type_url = *type_url;
                return self.fail(type_url, error);
            }
        }
        self.publish();
    }

    /// Removes the files of another node, and writes the accepted resources of this node.
    fn release(&mut self) -> io::Result<()> {
        let Some(directory) = &self.directory else {
            return Ok(());
        };
        self.held_bytes = 0;
        for (type_url, file) in &mut self.files {
            directory.remove_file(file_name(type_url))?;
            file.is_held = false;
            file.commit(directory)?;
        }
        self.publish();
        Ok(())
    }

    /// Applies an operation. Operations of streams that are not recorded have no effect.
    fn apply(&mut self, stream: u32, type_url: Type, op: WriteOp) -> io::Result<()> {
        let is_recorded = self.stream == Some(stream);
        let file = self.files.get_mut(type_url).filter(|_| is_recorded);
        match (op, file.zip(self.directory.as_ref())) {
            (WriteOp::Begin(identity, generation, lookup_requests), _) => {
                self.begin(stream, &identity, generation, lookup_requests)?;
            }
            (WriteOp::End, _) if is_recorded => {
                self.write(true);
                self.refreshed = None;
            }
            // The stream is one of an older Envoy, which drains after a hot restart, or recording it has failed.
            (_, None) | (WriteOp::End, _) => {}
            (WriteOp::FirstRequest { mut initial_resources }, Some((file, _))) => {
                // Envoy does not name resources that it has refused, whichever version it has.
                initial_resources.extend(file.missing.keys());
                file.initial_resources = Some(initial_resources);
                file.is_subscribed = true;
            }
            (WriteOp::Bytes(bytes), Some((file, _))) => file.receive(&bytes)?,
            (WriteOp::Complete(response), Some((file, _))) => {
                self.refreshed.get_or_insert_with(Instant::now);
                file.complete(response)?;
            }
            (WriteOp::AckOrNack(nonce, refusal), Some((file, directory))) => {
                let applied = file.apply_ack_or_nack(directory, &nonce, refusal.as_deref());
                // Without the admin port, or for a type that Envoy's config dump does not list, the agent cannot ask
                // Envoy which resources it lacks.
                let is_in_config_dump = NEEDED.contains(&type_url) || BY_NAME.contains(&type_url);
                if self.shared.admin.is_none() || !is_in_config_dump {
                    file.missing.clear();
                }
                self.shared.end_after_nack(type_url, file);
                applied?;
            }
            (WriteOp::SubscriptionChange { added, removed }, Some((file, _))) => {
                file.change_subscription(&added, &removed, &Arc::from(NOT_SENT));
                self.shared.end_after_nack(type_url, file);
            }
            (WriteOp::LookedUp(names), Some((file, _))) => {
                for name in names {
                    if let Some(missing) = file.missing.get_mut(&name) {
                        missing.due = None;
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves bytes from memory to disk above the limits: pending fields of all types, and the response that is received
    /// of this type. Deletes all files and stops recording if they would be larger than configured.
    fn enforce_limits(&mut self, type_url: Type) -> io::Result<()> {
        let unanswered: usize = self.files.values().map(TypeFile::memory).sum();
        let pending: usize = self.files.values().map(|file| file.pending_bytes).sum();
        let size: u64 = self.files.values().map(TypeFile::size).sum();
        // The disk has two copies of the largest file while it is replaced.
        let largest = self.files.values().map(|file| file.header.length).max();
        let max_bytes = self.shared.config.max_bytes;
        let all = self.held_bytes.saturating_add(size + largest.unwrap_or_default());
        if self.held_bytes > 0 && all > max_bytes {
            self.release()?;
        }
        if size + largest.unwrap_or_default() > max_bytes {
            tracing::info!(
                target: "xdsproxy",
                "configuration is not stored: it needs more than {max_bytes} bytes (ISTIO_AGENT_KEEP_CONFIG_MAX_BYTES)"
            );
            self.delete_all();
        }
        if pending > MAX_PENDING || pending > 0 && unanswered + pending > MAX_MEMORY {
            self.write(false);
        }
        match self.files.get_mut(type_url).zip(self.directory.as_ref()) {
            Some((file, directory)) if unanswered > MAX_UNANSWERED_BYTES => file.spill(directory),
            _ => Ok(()),
        }
    }

    /// Records a stream, unless a newer Envoy has had one. Removes unusable files. Files of another node stay until Envoy
    /// has accepted clusters and listeners.
    fn begin(
        &mut self,
        stream: u32,
        identity: &str,
        generation: usize,
        lookup_requests: mpsc::Sender<LookupRequest>,
    ) -> io::Result<()> {
        if generation < self.generation {
            return Ok(());
        }
        self.write(false);
        let mut before = std::mem::take(&mut self.files);
        if generation > self.generation {
            before.clear();
            self.shared.after_nack.lock().clear();
        }
        self.generation = generation;
        self.lookup_requests = Some(lookup_requests);
        self.refreshed = None;
        let parent = &self.shared.config.volume.directory;
        let opened = Directory::private(parent, DIRECTORY, true)?;
        let directory = self.directory.insert(opened);
        let mut found = BTreeMap::new();
        for type_url in TYPES {
            let name = file_name(type_url);
            directory.remove_file(&temporary(name))?;
            directory.remove_file(&spilled(name))?;
            match open(directory, type_url) {
                Ok(file) => found.extend(file.map(|file| (type_url, file))),
                Err(error) => {
                    self.shared.failures.inc();
                    let why = with_path(&self.shared.config, type_url, error);
                    tracing::error!(target: "xdsproxy", "removing stored configuration: {why}");
                    directory.remove_file(name)?;
                }
            }
        }
        self.held_bytes = 0;
        if found.values().any(|(_, header)| header.identity != identity) {
            let sizes = found.values().map(|(_, header)| header.size());
            self.held_bytes = sizes.fold(0, u64::saturating_add);
            found.clear();
        }
        for type_url in TYPES {
            let mut file = TypeFile::new(file_name(type_url), found.remove(type_url), identity);
            file.is_held = self.held_bytes > 0;
            let missing = before.remove(type_url).map(|before| before.missing);
            file.missing = missing.unwrap_or_default();
            // The same Envoy still lacks what it has refused. istiod may send that first on this stream.
            let due = file.missing.values_mut().filter_map(|it| it.due.as_mut());
            due.for_each(|due| *due = after(STORED_VERSION_DELAY));
            self.files.insert(type_url, file);
        }
        self.stream = Some(stream);
        self.publish();
        Ok(())
    }

    /// Publishes the headers of all files, for the metrics and for [`super::EnvoyCache::can_be_served`].
    fn publish(&self) {
        let stored = self.files.iter().filter(|(_, file)| file.file.is_some());
        let headers = stored.map(|(type_url, file)| (*type_url, file.header.clone()));
        *self.shared.types.lock() = headers.collect();
    }

    /// Stops recording and deletes all files, because they will not follow the changes that Envoy accepts.
    fn fail(&mut self, type_url: Type, error: impl Display) {
        self.shared.failures.inc();
        let error = with_path(&self.shared.config, type_url, error);
        tracing::error!(
            target: "xdsproxy",
            "cannot store configuration in {error}; an Envoy that starts while istiod is unreachable will get none"
        );
        self.delete_all();
    }

    /// Deletes all files. Nothing is recorded until another stream begins.
    fn delete_all(&mut self) {
        if let Some(directory) = self.directory.take() {
            for name in TYPES.map(file_name) {
                let _ = directory.remove_file(name); // A file that stays has the last accepted state.
                let _ = directory.remove_file(&temporary(name));
            }
        }
        (self.stream, self.refreshed, self.held_bytes) = (None, None, 0);
        self.files.clear();
        self.shared.after_nack.lock().clear();
        self.publish();
    }
}
