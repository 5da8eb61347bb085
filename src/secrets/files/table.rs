//! Cached file secrets: each source with its state, its paths, and how many subscribers it has.
//!
//! The lock is held for look-ups only, never while a file is read.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::source::{FileError, Source};
use crate::secrets::{Secret, SecretState};

/// More than the largest gateway has.
pub(super) const MAX_SOURCES: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Table {
    inner: Mutex<Inner>,
    /// Notified of new sources.
    pub(super) wanted: Notify,
    /// Sent to when any secret has changed, or there is room for another source.
    changes: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<Source, Entry>,
    /// Sources whose first read has not begun.
    fresh: Vec<Source>,
}

#[derive(Debug)]
struct Entry {
    state: SecretState,
    subscribers: usize,
    /// Sent to when the files may have changed.
    changed: watch::Sender<()>,
    /// Its files need not exist.
    is_optional: bool,
    /// What was last logged about files that cannot be used.
    problem: Option<String>,
}

impl Table {
    /// Receives changes of all secrets.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Wakes all subscribers.
    pub(super) fn notify(&self) {
        self.changes.send_replace(());
    }

    pub(super) fn state(&self, source: &Source) -> SecretState {
        let too_many = || FileError::TooMany { most: MAX_SOURCES };
        let inner = self.inner.lock();
        match inner.entries.get(source) {
            Some(entry) => entry.state.clone(),
            None => SecretState::Unusable(Arc::new(too_many())),
        }
    }

    /// Subscribes to a source. Returns whether there was room for it.
    pub(super) fn subscribe(&self, source: &Source, is_optional: bool) -> bool {
        let mut inner = self.inner.lock();
        if let Some(entry) = inner.entries.get_mut(source) {
            entry.subscribers += 1;
            return true;
        }
        if inner.entries.len() >= MAX_SOURCES {
            return false;
        }
        let entry = Entry {
            state: SecretState::Reading,
            subscribers: 1,
            changed: watch::Sender::new(()),
            is_optional,
            problem: None,
        };
        inner.entries.insert(source.clone(), entry);
        inner.fresh.push(source.clone());
        self.wanted.notify_one();
        true
    }

    pub(super) fn unsubscribe(&self, source: &Source) {
        if let Some(entry) = self.inner.lock().entries.get_mut(source) {
            entry.subscribers -= 1;
        }
    }

    /// Takes the sources that are to be read for the first time.
    pub(super) fn take_fresh(&self) -> Vec<Source> {
        std::mem::take(&mut self.inner.lock().fresh)
    }

    /// Receives changes of a source's files.
    pub(super) fn follow(&self, source: &Source) -> Option<watch::Receiver<()>> {
        let inner = self.inner.lock();
        Some(inner.entries.get(source)?.changed.subscribe())
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
        self.notify();
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
            self.notify();
        }
        is_new.then_some(is_available)
    }

    /// Has sources read again.
    pub(super) fn changed(&self, is_affected: impl Fn(&Source) -> bool) {
        for (source, entry) in &self.inner.lock().entries {
            if is_affected(source) {
                entry.changed.send_replace(());
            }
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
        let is_idle = entry.subscribers == 0;
        if !std::mem::replace(was_idle, is_idle) || !is_idle {
            return None;
        }
        inner.entries.remove(source);
        self.notify();
        let mut unused: Vec<_> = source.paths().map(Path::to_owned).collect();
        for used in inner.entries.keys().flat_map(Source::paths) {
            // Not compared as paths, which takes longer.
            unused.retain(|path| path.as_os_str() != used.as_os_str());
        }
        Some(unused)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.inner.lock().entries.len()
    }
}

impl Entry {
    fn is_available(&self) -> bool {
        matches!(self.state, SecretState::Available(_))
    }
}
