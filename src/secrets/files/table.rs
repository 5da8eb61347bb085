//! Cached file secrets: each source with its state, its subscribers and its paths.
//!
//! The lock is held for look-ups only, never while a file is read.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::source::{FileError, Source};
use crate::secrets::{Secret, SecretState};

/// More than the largest gateway has.
pub(super) const MOST_SOURCES: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Table {
    inner: Mutex<Inner>,
    /// Notified of new sources.
    pub(super) wanted: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<Source, Entry>,
    /// The sources each watched path is part of.
    paths: HashMap<PathBuf, HashSet<Source>>,
    /// Sources whose first read has not begun.
    fresh: Vec<Source>,
    /// Subscribers for whose sources there was no room.
    refused: HashMap<u64, Arc<Notify>>,
    subscribers: u64,
}

#[derive(Debug)]
struct Entry {
    state: SecretState,
    subscribers: HashMap<u64, Arc<Notify>>,
    /// Sent to when the files may have changed.
    changed: watch::Sender<()>,
    /// Stays without subscribers.
    is_pinned: bool,
    /// Its files need not exist.
    is_optional: bool,
    /// What was last logged about files that cannot be used.
    problem: Option<String>,
}

impl Table {
    /// A new subscriber: its number, and what it is notified by.
    pub(super) fn subscriber(&self) -> (u64, Arc<Notify>) {
        let mut inner = self.inner.lock();
        inner.subscribers += 1;
        (inner.subscribers, Arc::default())
    }

    pub(super) fn state(&self, source: &Source) -> SecretState {
        let too_many = || FileError::TooMany { most: MOST_SOURCES };
        let inner = self.inner.lock();
        match inner.entries.get(source) {
            Some(entry) => entry.state.clone(),
            None => SecretState::Unusable(Arc::new(too_many())),
        }
    }

    /// Subscribes to sources. Returns whether there was room for all; `changed` is notified when there
    /// may be room for the others.
    pub(super) fn subscribe(
        &self,
        subscriber: u64,
        changed: &Arc<Notify>,
        sources: impl IntoIterator<Item = Source>,
    ) -> bool {
        let mut inner = self.inner.lock();
        inner.refused.remove(&subscriber);
        for source in sources {
            if !inner.entries.contains_key(&source) {
                if inner.entries.len() >= MOST_SOURCES {
                    inner.refused.insert(subscriber, changed.clone());
                    continue;
                }
                inner.add(source.clone(), false, false);
            }
            if let Some(entry) = inner.entries.get_mut(&source) {
                entry.subscribers.insert(subscriber, changed.clone());
            }
        }
        if !inner.fresh.is_empty() {
            self.wanted.notify_one();
        }
        !inner.refused.contains_key(&subscriber)
    }

    pub(super) fn unsubscribe(&self, subscriber: u64, sources: impl IntoIterator<Item = Source>) {
        let mut inner = self.inner.lock();
        inner.refused.remove(&subscriber);
        for source in sources {
            if let Some(entry) = inner.entries.get_mut(&source) {
                entry.subscribers.remove(&subscriber);
            }
        }
    }

    /// Adds a source that stays without subscribers.
    pub(super) fn pin(&self, source: Source, is_optional: bool) {
        self.inner.lock().add(source, true, is_optional);
    }

    /// Takes the sources that are to be read for the first time.
    pub(super) fn take_fresh(&self) -> Vec<Source> {
        std::mem::take(&mut self.inner.lock().fresh)
    }

    /// Receives changes of a source's files. Returns its paths that were in use by no other source too.
    pub(super) fn follow(&self, source: &Source) -> Option<(watch::Receiver<()>, Vec<PathBuf>)> {
        let mut inner = self.inner.lock();
        let changed = inner.entries.get(source)?.changed.subscribe();
        let mut added = Vec::new();
        for path in source.paths() {
            let sources = inner.paths.entry(path.to_owned()).or_default();
            if sources.is_empty() {
                added.push(path.to_owned());
            }
            sources.insert(source.clone());
        }
        Some((changed, added))
    }

    /// Whether a source is read now and then: all but those that need not exist and never did.
    pub(super) fn is_polled(&self, source: &Source) -> bool {
        let inner = self.inner.lock();
        let entry = inner.entries.get(source);
        entry.is_some_and(|entry| !entry.is_optional || entry.is_available())
    }

    /// Publishes a secret that was read, if it differs. Returns whether it does.
    pub(super) fn publish(&self, source: &Source, secret: Secret) -> bool {
        let mut inner = self.inner.lock();
        let Some(entry) = inner.entries.get_mut(source) else {
            return false;
        };
        entry.problem = None;
        if matches!(&entry.state, SecretState::Available(last) if *last == secret) {
            return false;
        }
        entry.state = SecretState::Available(secret);
        entry.notify();
        true
    }

    /// Publishes that files cannot be used, unless they could be before. Returns whether there is a
    /// secret, if the problem is a failure that was not reported before.
    pub(super) fn publish_error(&self, source: &Source, error: FileError) -> Option<bool> {
        let mut inner = self.inner.lock();
        let entry = inner.entries.get_mut(source)?;
        let is_available = entry.is_available();
        let text = error.to_string();
        // A file that need not exist is no failure until it has existed.
        let is_failure = is_available || !entry.is_optional || !error.is_absence();
        let is_new = is_failure && entry.problem.as_ref() != Some(&text);
        if is_failure {
            entry.problem = Some(text);
        }
        if !is_available {
            entry.state = SecretState::Unusable(Arc::new(error));
            entry.notify();
        }
        is_new.then_some(is_available)
    }

    /// Wakes the subscribers of a source.
    pub(super) fn notify(&self, source: &Source) {
        if let Some(entry) = self.inner.lock().entries.get(source) {
            entry.notify();
        }
    }

    /// Has the sources of a path read again.
    pub(super) fn path_changed(&self, path: &Path) {
        let inner = self.inner.lock();
        for source in inner.paths.get(path).into_iter().flatten() {
            if let Some(entry) = inner.entries.get(source) {
                entry.changed.send_replace(());
            }
        }
    }

    /// Has all sources read again.
    pub(super) fn all_changed(&self) {
        for entry in self.inner.lock().entries.values() {
            entry.changed.send_replace(());
        }
    }

    /// Forgets a source if it has no subscriber now and had none when `was_idle` was set. Returns the
    /// paths that no source uses any more.
    pub(super) fn forget_if_idle(
        &self,
        source: &Source,
        was_idle: &mut bool,
    ) -> Option<Vec<PathBuf>> {
        let mut inner = self.inner.lock();
        let entry = inner.entries.get(source)?;
        let is_idle = entry.subscribers.is_empty() && !entry.is_pinned;
        if !std::mem::replace(was_idle, is_idle) || !is_idle {
            return None;
        }
        inner.entries.remove(source);
        let refused = inner.refused.values();
        refused.for_each(|subscriber| subscriber.notify_one());
        let mut unused = Vec::new();
        for path in source.paths() {
            let sources = inner.paths.get_mut(path);
            if sources.is_some_and(|sources| sources.remove(source) && sources.is_empty()) {
                inner.paths.remove(path);
                unused.push(path.to_owned());
            }
        }
        Some(unused)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.inner.lock().entries.len()
    }
}

impl Inner {
    fn add(&mut self, source: Source, is_pinned: bool, is_optional: bool) {
        let entry = Entry {
            state: SecretState::Reading,
            subscribers: HashMap::new(),
            changed: watch::Sender::new(()),
            is_pinned,
            is_optional,
            problem: None,
        };
        self.fresh.push(source.clone());
        self.entries.insert(source, entry);
    }
}

impl Entry {
    fn is_available(&self) -> bool {
        matches!(self.state, SecretState::Available(_))
    }

    fn notify(&self) {
        let subscribers = self.subscribers.values();
        subscribers.for_each(|subscriber| subscriber.notify_one());
    }
}
