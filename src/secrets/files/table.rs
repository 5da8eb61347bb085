//! Holds the files in use: each source with its state, for as long as there is a subscriber.
//!
//! Locks are held for look-ups only, never while a file is read.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::source::Source;
use crate::files::file_watch::FileWatch;
use crate::problem::{Code, Problem};
use crate::secrets::Secret;

#[derive(Clone, Debug)]
pub enum SecretState {
    /// The authority has not signed it yet.
    Unsigned,
    /// Its files are about to be read.
    Reading,
    /// Its files have never been usable so far.
    Unusable(Arc<Problem>),
    Available(Secret),
}

impl SecretState {
    pub fn available(self) -> Option<Secret> {
        match self {
            Self::Available(secret) => Some(secret),
            Self::Unsigned | Self::Reading | Self::Unusable(_) => None,
        }
    }
}

/// The most sources that are read, more than the largest gateway has.
pub(super) const MAX_SOURCES: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Table {
    inner: Mutex<Inner>,
    pub(super) wanted: Notify,
    /// The notification of subscribers: a secret has changed, or the files of an unusable secret were read again.
    pub(super) changes: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<Source, Arc<Entry>>,
    /// Entries without a task that keeps them up to date.
    fresh: Vec<Arc<Entry>>,
}

/// A source. Subscribers hold it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) source: Source,
    /// True if its files need not exist.
    pub(super) is_optional: bool,
    pub(super) content: Mutex<Content>,
    pub(super) changed: Notify,
}

#[derive(Debug)]
pub(super) struct Content {
    pub(super) state: SecretState,
    /// The problem that was last logged, if the files cannot be used.
    pub(super) logged_problem: Option<Problem>,
}

impl Table {
    pub(super) fn state(&self, source: &Source) -> SecretState {
        if let Some(entry) = self.inner.lock().entries.get(source) {
            return entry.state();
        }
        let found = format!("{MAX_SOURCES} secrets are read from files already");
        SecretState::Unusable(Arc::new(Problem::new(Code::SecretFilesTooMany, source, found)))
    }

    /// Returns the entry of a source, which is read from now on. None if there are [`MAX_SOURCES`] already.
    pub(super) fn subscribe(&self, source: Source, is_optional: bool) -> Option<Arc<Entry>> {
        let mut inner = self.inner.lock();
        if let Some(entry) = inner.entries.get(&source) {
            return Some(entry.clone());
        }
        if inner.entries.len() >= MAX_SOURCES {
            return None;
        }
        let content = Content { state: SecretState::Reading, logged_problem: None };
        let entry = Arc::new(Entry {
            source: source.clone(),
            is_optional,
            content: Mutex::new(content),
            changed: Notify::new(),
        });
        inner.entries.insert(source, entry.clone());
        inner.fresh.push(entry.clone());
        self.wanted.notify_one();
        Some(entry)
    }

    pub(super) fn take_fresh(&self) -> Vec<Arc<Entry>> {
        std::mem::take(&mut self.inner.lock().fresh)
    }

    pub(super) fn entries(&self) -> Vec<Arc<Entry>> {
        self.inner.lock().entries.values().cloned().collect()
    }

    /// Removes an entry that does not have a subscriber now and did not have one when `was_idle` was set, and
    /// ends the watches of its paths. Returns true if it did. The watches end under the lock, so a new subscriber
    /// of a path watches it afterwards.
    pub(super) fn forget_if_idle(
        &self,
        entry: &Arc<Entry>,
        was_idle: &mut bool,
        watch: Option<&FileWatch>,
    ) -> bool {
        let mut inner = self.inner.lock();
        // The table and the task of the entry hold it.
        let is_idle = Arc::strong_count(entry) <= 2;
        if !std::mem::replace(was_idle, is_idle) || !is_idle {
            return false;
        }
        inner.entries.remove(&entry.source);
        for path in entry.source.paths() {
            let mut used = inner.entries.keys().flat_map(Source::paths);
            // Comparing them as paths takes longer.
            let is_used = used.any(|used| used.as_os_str() == path.as_os_str());
            if !is_used && let Some(watch) = watch {
                watch.unwatch(path);
            }
        }
        true
    }
}

impl Entry {
    pub(super) fn state(&self) -> SecretState {
        self.content.lock().state.clone()
    }

    /// Returns true if it is read periodically: all entries but those that need not exist and never did.
    pub(super) fn is_polled(&self) -> bool {
        !self.is_optional || matches!(self.content.lock().state, SecretState::Available(_))
    }
}
