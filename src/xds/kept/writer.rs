//! Writes what passes to disk, on a thread of its own, and lets it count once Envoy has accepted it.
//!
//! A response is a file; several of a type are merged so that each is over twice the size of the next,
//! which keeps their number small and what is replaced below half of what is kept.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::Status;
use super::segment::{Draft, Index, Segment, write_removed};
use super::store::{self, KeptType, Store};
use crate::clock::Clock;
use crate::xds::Protocol;

/// How many responses of a stream may wait for their ACK before the oldest is forgotten.
const MOST_UNANSWERED: usize = 64;

/// What a stream has to tell the writer.
#[derive(Debug)]
pub(super) enum Note {
    /// The first request has come, from the node with this identity.
    Node {
        protocol: Protocol,
        identity: String,
    },
    /// Bytes of the response that passes.
    Bytes(Vec<Bytes>),
    Complete(Complete),
    /// A whole response, which is not the one that passes.
    Message(Vec<Bytes>, Complete),
    Answered {
        type_url: String,
        nonce: String,
        is_accepted: bool,
    },
    Unsubscribed {
        type_url: String,
        names: Vec<Bytes>,
    },
    Ended,
}

/// A response whose last byte has passed.
#[derive(Debug)]
pub(super) struct Complete {
    pub(super) type_url: String,
    pub(super) version: String,
    pub(super) nonce: String,
    /// Of all its bytes, head included.
    pub(super) length: u64,
    /// Whether it takes the place of all that is kept of the type.
    pub(super) replaces: bool,
    /// Whether it can be kept where nothing is kept of the type: it has all resources.
    pub(super) is_whole: bool,
}

/// A response that waits for its ACK.
#[derive(Debug)]
struct Pending {
    response: Complete,
    draft: Draft,
}

#[derive(Debug, Default)]
struct Stream {
    draft: Option<Draft>,
    /// Whether the response that passes could not be written.
    has_failed: bool,
    pending: VecDeque<Pending>,
}

/// The thread's state.
#[derive(Debug)]
pub(super) struct Writer {
    parent: PathBuf,
    status: Status,
    protocol: Protocol,
    /// None until a stream begins, and after a failure until the next one does.
    store: Option<Store>,
    streams: HashMap<u32, Stream>,
}

impl Writer {
    pub(super) fn new(parent: PathBuf, status: Status) -> Self {
        Self {
            parent,
            status,
            protocol: Protocol::Sotw,
            store: None,
            streams: HashMap::new(),
        }
    }

    /// Runs until all senders are gone. `has_lost` says that a note found the channel full for too long.
    pub(super) fn run(
        mut self,
        mut notes: mpsc::Receiver<(u32, Note)>,
        has_lost: &Arc<AtomicBool>,
    ) {
        while let Some((stream, note)) = notes.blocking_recv() {
            let is_part = matches!(note, Note::Bytes(_));
            if has_lost.swap(false, Ordering::AcqRel) {
                while notes.try_recv().is_ok() {}
                self.fail(&io::Error::other("the disk does not follow"));
            } else if let Err(error) = self.take(stream, note) {
                self.fail(&error);
            } else if is_part {
                continue;
            }
            self.status
                .publish(self.store.as_ref().map(|store| &store.manifest));
        }
    }

    /// From now on nothing is kept, until a stream begins.
    fn fail(&mut self, error: &io::Error) {
        self.status
            .give_up(&self.parent, "the configuration", error);
        self.streams.clear();
        if let Some(store) = self.store.take() {
            store.wipe();
        }
    }

    pub(super) fn take(&mut self, id: u32, note: Note) -> io::Result<()> {
        match note {
            Note::Node { protocol, identity } => self.begin(protocol, identity)?,
            Note::Bytes(bytes) => self.write(id, &bytes),
            Note::Complete(response) => {
                let stream = self.streams.entry(id).or_default();
                stream.has_failed = false;
                let draft = stream.draft.take();
                self.complete(id, response, draft)?;
            }
            Note::Message(bytes, response) => {
                let draft = self.append(None, &bytes);
                self.complete(id, response, draft)?;
            }
            Note::Answered {
                type_url,
                nonce,
                is_accepted,
            } => {
                let pending = self.streams.get_mut(&id).and_then(|stream| {
                    let is_it = |it: &Pending| {
                        it.response.type_url == type_url && it.response.nonce == nonce
                    };
                    let index = stream.pending.iter().position(is_it)?;
                    stream.pending.remove(index)
                });
                if let (Some(pending), Some(store)) = (pending, &self.store) {
                    match is_accepted {
                        true => self.accept(pending)?,
                        false => store.remove(pending.draft.number),
                    }
                }
            }
            Note::Unsubscribed { type_url, names } => self.unsubscribe(&type_url, &names)?,
            Note::Ended => {
                let ended = self.streams.remove(&id).unwrap_or_default();
                let drafts = ended.pending.into_iter().map(|pending| pending.draft);
                if let Some(store) = &self.store {
                    drafts
                        .chain(ended.draft)
                        .for_each(|draft| store.remove(draft.number));
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, protocol: Protocol, identity: String) -> io::Result<()> {
        self.protocol = protocol;
        let store = match self.store.take() {
            Some(store) => store,
            None => Store::open(&self.parent)?,
        };
        let store = self.store.insert(store);
        if store.manifest.identity == identity {
            return Ok(());
        }
        if !store.manifest.types.is_empty() {
            tracing::warn!(
                target: "xdsproxy",
                "the configuration kept in {} is not used: it is of another node, another Envoy or \
                 the other protocol",
                self.parent.display()
            );
        }
        store.reset(identity)
    }

    /// Writes bytes of the response that passes.
    fn write(&mut self, id: u32, bytes: &[Bytes]) {
        let stream = self.streams.entry(id).or_default();
        if !stream.has_failed {
            let draft = stream.draft.take();
            let draft = self.append(draft, bytes);
            let stream = self.streams.entry(id).or_default();
            stream.has_failed = draft.is_none();
            stream.draft = draft;
        }
    }

    /// Writes bytes to a draft, or to a new one. None if that fails.
    fn append(&mut self, draft: Option<Draft>, bytes: &[Bytes]) -> Option<Draft> {
        let drafts = drafts(&self.streams).chain(&draft);
        let drafts = drafts.map(|draft| draft.length).sum();
        let store = self.store.as_mut()?;
        let length: usize = bytes.iter().map(Bytes::len).sum();
        let draft = draft.map_or_else(|| store.draft(), Ok);
        let written = draft.and_then(|mut draft| {
            let written = store.has_space_for(drafts, length as u64);
            let written =
                written.and_then(|()| bytes.iter().try_for_each(|it| draft.write_all(it)));
            written.inspect_err(|_| store.remove(draft.number))?;
            Ok(draft)
        });
        written
            .inspect_err(|error| self.status.give_up(&self.parent, "a response", error))
            .ok()
    }

    /// Lets a response wait for its ACK. If it could not be written, nothing of its type is kept.
    fn complete(&mut self, id: u32, response: Complete, draft: Option<Draft>) -> io::Result<()> {
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        // A draft is shorter if it was begun after a failure.
        if let Some(draft) = draft.filter(|draft| draft.length == response.length) {
            let pending = &mut self.streams.entry(id).or_default().pending;
            pending.push_back(Pending { response, draft });
            if pending.len() > MOST_UNANSWERED
                && let Some(oldest) = pending.pop_front()
            {
                store.remove(oldest.draft.number);
            }
        } else if store.manifest.types.remove(&response.type_url).is_some() {
            self.commit()?;
        }
        Ok(())
    }

    /// Lets a response count.
    fn accept(&mut self, pending: Pending) -> io::Result<()> {
        let Pending { response, draft } = pending;
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        let older = store.manifest.types.remove(&response.type_url);
        let older = older.filter(|_| !response.replaces);
        if older.is_none() && !response.replaces && !response.is_whole {
            store.remove(draft.number);
            return Ok(());
        }
        let mut segments = older.map(|of| of.segments).unwrap_or_default();
        segments.push(draft.segment());
        let since_epoch = Clock::system().now().duration_since(SystemTime::UNIX_EPOCH);
        let of = KeptType {
            version: response.version,
            accepted: since_epoch.unwrap_or_default().as_secs(),
            segments,
        };
        self.change(response.type_url, of, draft)
    }

    fn unsubscribe(&mut self, type_url: &str, names: &[Bytes]) -> io::Result<()> {
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        let Some(mut of) = store.manifest.types.get(type_url).cloned() else {
            return Ok(());
        };
        let mut draft = store.draft()?;
        write_removed(names, &mut draft)?;
        of.segments.push(draft.segment());
        self.change(type_url.to_owned(), of, draft)
    }

    /// Lets the segments of a type count, of which `newest` is the last. A type whose files cannot be
    /// merged is not kept.
    fn change(&mut self, type_url: String, mut of: KeptType, newest: Draft) -> io::Result<()> {
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        let first = first_to_merge(&of.segments);
        let merged = if of.segments.len() - first > 1 {
            merge(store, &self.parent, self.protocol, &mut of.segments, first)
        } else {
            Ok(newest)
        };
        match merged.and_then(|draft| draft.file.sync_data()) {
            Ok(()) => {
                self.status.is_failing.store(false, Ordering::Relaxed);
                store.manifest.types.insert(type_url, of);
            }
            Err(error) => {
                store.manifest.types.remove(&type_url);
                self.status.give_up(&self.parent, &type_url, &error);
            }
        }
        self.commit()
    }

    fn commit(&mut self) -> io::Result<()> {
        let numbers: HashSet<_> = drafts(&self.streams).map(|draft| draft.number).collect();
        match &mut self.store {
            Some(store) => store.commit(&numbers),
            None => Ok(()),
        }
    }
}

/// The files that do not count yet.
fn drafts(streams: &HashMap<u32, Stream>) -> impl Iterator<Item = &Draft> {
    streams.values().flat_map(|stream| {
        let pending = stream.pending.iter().map(|pending| &pending.draft);
        pending.chain(&stream.draft)
    })
}

/// The first of the segments that become one: those behind it are together over half its size.
fn first_to_merge(segments: &[Segment]) -> usize {
    let (mut first, mut sum) = (segments.len(), 0u64);
    for (index, segment) in segments.iter().enumerate().rev() {
        if first < segments.len() && segment.length / 2 > sum {
            break;
        }
        first = index;
        sum = sum.saturating_add(segment.length);
    }
    first
}

/// Makes one segment of those from `first` on.
fn merge(
    store: &mut Store,
    parent: &std::path::Path,
    protocol: Protocol,
    segments: &mut Vec<Segment>,
    first: usize,
) -> io::Result<Draft> {
    let index = Index::read(protocol, &segments[first..], |file| {
        store::open(parent, file)
    })?;
    let mut draft = store.draft()?;
    index.merge(first > 0, &mut draft)?;
    segments.truncate(first);
    segments.push(draft.segment());
    Ok(draft)
}
