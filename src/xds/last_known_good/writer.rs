//! Writes what passes to disk, on a thread of its own, and lets it count once Envoy has accepted it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use bytes::Bytes;
use prost::Message as _;
use tokio::sync::mpsc;

use super::file::Draft;
use super::store::{KeptType, Store};
use super::{Ended, Status};
use crate::clock::Clock;
use crate::xds::Protocol;
use crate::xds::intercept::frame;
use crate::xds::request::HEAD;
use crate::xds::response::Received;

/// How many responses may wait for their ACK before the oldest is forgotten.
const MAX_UNANSWERED: usize = 64;

/// What a stream has to tell the writer.
#[derive(Debug)]
pub(super) enum WriteOp {
    /// The first request has come, from the node with this identity.
    Node {
        protocol: Protocol,
        identity: String,
    },
    /// Bytes of the response that passes.
    Bytes(Vec<Bytes>),
    Complete(Received, Coverage),
    /// A whole response, which is not the one that passes.
    Message(Vec<Bytes>, Received, Coverage),
    Answered {
        type_url: String,
        nonce: String,
        is_accepted: bool,
    },
    Unsubscribed {
        type_url: String,
        names: Vec<Bytes>,
    },
}

/// What a response holds of the resources of its type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Coverage {
    /// All. It takes the place of what is kept.
    All,
    /// The first of a stream: in SotW what istiod has so far of what was asked for, in delta as much as
    /// Envoy holds. It is kept where nothing is, else added.
    Initial,
    /// What has changed. It is added to what is kept; alone it is not kept.
    Part,
}

/// The part of a delta response that names removed resources.
#[derive(Clone, PartialEq, prost::Message)]
struct Removed {
    #[prost(bytes = "bytes", repeated, tag = "6")]
    names: Vec<Bytes>,
}

/// The thread's state.
#[derive(Debug)]
pub(super) struct Writer {
    parent: PathBuf,
    status: Status,
    protocol: Protocol,
    /// None until a stream begins, and after a failure until the next one does.
    store: Option<Store>,
    /// The streams of the node for which configuration is kept.
    streams: HashSet<u32>,
    /// By stream, the response that passes; None if it could not be written.
    passing: HashMap<u32, Option<Draft>>,
    /// Responses that wait for their ACK, and their streams.
    pending: Vec<(u32, Received, Coverage, Draft)>,
}

impl Writer {
    pub(super) fn new(parent: PathBuf, status: Status) -> Self {
        Self {
            parent,
            status,
            protocol: Protocol::Sotw,
            store: None,
            streams: HashSet::new(),
            passing: HashMap::new(),
            pending: Vec::new(),
        }
    }

    /// Runs until all senders are gone. `has_lost` says that a op found the channel full for too long.
    pub(super) fn run(
        mut self,
        mut ops: mpsc::Receiver<(u32, WriteOp)>,
        has_lost: &AtomicBool,
        ended: &Ended,
    ) {
        while let Some((stream, op)) = ops.blocking_recv() {
            let is_part = matches!(op, WriteOp::Bytes(_));
            if has_lost.swap(false, Ordering::AcqRel) {
                while ops.try_recv().is_ok() {}
                self.fail(&io::Error::other("the disk does not follow"));
            } else if let Err(error) = self.take(stream, op) {
                self.fail(&error);
            } else if is_part {
                continue;
            }
            self.status
                .publish(self.store.as_ref().map(|store| &store.manifest));
            // What it said before its end counts.
            if ops.is_empty() {
                std::mem::take(&mut *ended.lock())
                    .into_iter()
                    .for_each(|stream| self.end(stream));
            }
        }
    }

    /// Forgets a stream, and the responses that it has not answered.
    pub(super) fn end(&mut self, id: u32) {
        self.streams.remove(&id);
        self.passing.remove(&id);
        self.pending.retain(|(stream, ..)| *stream != id);
    }

    /// From now on nothing is kept, until a stream begins.
    fn fail(&mut self, error: &io::Error) {
        self.status
            .give_up(&self.parent, "the configuration", error);
        self.passing.clear();
        self.pending.clear();
        if let Some(store) = self.store.take() {
            store.wipe();
        }
    }

    pub(super) fn take(&mut self, id: u32, op: WriteOp) -> io::Result<()> {
        match op {
            WriteOp::Node { protocol, identity } => self.begin(id, protocol, identity)?,
            // Of another node: its Envoy drains after a hot restart.
            _ if !self.streams.contains(&id) => {}
            WriteOp::Bytes(bytes) => {
                let draft = match self.passing.remove(&id) {
                    Some(None) => None,
                    draft => self.write(draft.flatten(), &bytes),
                };
                self.passing.insert(id, draft);
            }
            WriteOp::Complete(response, coverage) => {
                let draft = self.passing.remove(&id).flatten();
                self.complete(id, response, coverage, draft)?;
            }
            WriteOp::Message(bytes, response, coverage) => {
                let draft = self.write(None, &bytes);
                self.complete(id, response, coverage, draft)?;
            }
            WriteOp::Answered {
                type_url,
                nonce,
                is_accepted,
            } => {
                let index = self.pending.iter().position(|(stream, response, ..)| {
                    *stream == id && response.type_url == type_url && response.nonce == nonce
                });
                let pending = index.map(|index| self.pending.remove(index));
                if let Some((_, response, coverage, draft)) = pending.filter(|_| is_accepted) {
                    self.accept(response, coverage, draft)?;
                }
            }
            WriteOp::Unsubscribed { type_url, names } => self.unsubscribe(type_url, names)?,
        }
        Ok(())
    }

    fn begin(&mut self, id: u32, protocol: Protocol, identity: String) -> io::Result<()> {
        self.protocol = protocol;
        let store = match self.store.take() {
            Some(store) => store,
            None => Store::open(&self.parent)?,
        };
        let store = self.store.insert(store);
        if store.manifest.identity == identity {
            self.streams.insert(id);
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
        self.streams = HashSet::from([id]);
        self.passing.clear();
        self.pending.clear();
        store.reset(identity)
    }

    /// Writes bytes to a draft, or to a new one. None if that fails.
    fn write(&mut self, draft: Option<Draft>, bytes: &[Bytes]) -> Option<Draft> {
        let store = self.store.as_ref()?;
        let passing = self.passing.values().flatten().chain(&draft);
        let drafts = passing.chain(self.pending.iter().map(|(.., draft)| draft));
        let drafts = drafts.map(|draft| draft.length).sum();
        let length: usize = bytes.iter().map(Bytes::len).sum();
        let written = store.has_space_for(drafts, length as u64).and_then(|()| {
            let mut draft = draft.map_or_else(|| store.draft(self.protocol), Ok)?;
            bytes.iter().try_for_each(|bytes| draft.write(bytes))?;
            Ok(draft)
        });
        written
            .inspect_err(|error| self.status.give_up(&self.parent, "a response", error))
            .ok()
    }

    /// Lets a response wait for its ACK. If it could not be written, nothing of its type is kept.
    fn complete(
        &mut self,
        id: u32,
        response: Received,
        coverage: Coverage,
        draft: Option<Draft>,
    ) -> io::Result<()> {
        // A draft is shorter if it was begun after a failure.
        match draft {
            Some(draft) if draft.length == response.bytes + HEAD as u64 => {
                self.pending.push((id, response, coverage, draft));
                match self.pending.len() > MAX_UNANSWERED {
                    true => {
                        let (_, oldest, ..) = self.pending.remove(0);
                        self.drop_type(oldest.type_url)
                    }
                    false => Ok(()),
                }
            }
            _ => self.drop_type(response.type_url),
        }
    }

    /// Keeps nothing of a type, as a response is missing.
    fn drop_type(&mut self, type_url: String) -> io::Result<()> {
        self.pending
            .retain(|(_, response, ..)| response.type_url != type_url);
        match &mut self.store {
            Some(store) if store.manifest.types.contains_key(&type_url) => {
                store.set(type_url, None)
            }
            _ => Ok(()),
        }
    }

    /// Lets a response count.
    fn accept(&mut self, response: Received, coverage: Coverage, draft: Draft) -> io::Result<()> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let file = match store.manifest.types.get(&response.type_url) {
            Some(older) if coverage != Coverage::All && !draft.replaces(&older.file) => {
                store.append(self.protocol, older.file.clone(), draft)
            }
            None if coverage == Coverage::Part => return Ok(()),
            _ => draft.keep(),
        };
        let since_epoch = Clock::system().now().duration_since(SystemTime::UNIX_EPOCH);
        let of = file.map(|file| KeptType {
            version: response.version,
            accepted: since_epoch.unwrap_or_default().as_secs(),
            file,
        });
        self.set(response.type_url, of)
    }

    /// Removes resources Envoy no longer asks for.
    fn unsubscribe(&mut self, type_url: String, names: Vec<Bytes>) -> io::Result<()> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let Some(mut of) = store.manifest.types.get(&type_url).cloned() else {
            return Ok(());
        };
        let message = frame(&Removed { names }.encode_to_vec());
        let of = store.draft(self.protocol).and_then(|mut draft| {
            draft.write(&message)?;
            of.file = store.append(self.protocol, of.file, draft)?;
            Ok(of)
        });
        self.set(type_url, of)
    }

    /// Lets this count. A type that could not be written is not kept.
    fn set(&mut self, type_url: String, of: io::Result<KeptType>) -> io::Result<()> {
        match &of {
            Ok(_) => self.status.is_failing.store(false, Ordering::Relaxed),
            Err(error) => self.status.give_up(&self.parent, &type_url, error),
        }
        match &mut self.store {
            Some(store) => store.set(type_url, of.ok()),
            None => Ok(()),
        }
    }
}
