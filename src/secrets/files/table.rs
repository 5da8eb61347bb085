//! What subscribers and the keeper share: each source, what it holds, and who waits for it.
//!
//! The lock is held for look-ups only, never while a file is read.
//!
//! Does not read files.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::Found;
use super::source::{FileError, Source};

/// More than the largest gateway has.
pub(super) const MOST_SOURCES: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Shared {
    table: Mutex<Table>,
    /// Tells the keeper of new sources.
    pub(super) wanted: Notify,
    next: AtomicU64,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Source, Entry>,
    /// Sources nobody has read yet.
    fresh: Vec<Source>,
    /// Readers for whose sources there was no room.
    refused: HashMap<u64, Arc<Notify>>,
    /// Those for whom there may be some now.
    admissible: HashSet<u64>,
}

#[derive(Debug)]
struct Entry {
    found: Found,
    readers: HashMap<u64, Arc<Notify>>,
    /// Stays without readers.
    is_pinned: bool,
    /// May well not exist.
    is_optional: bool,
    /// Had no reader when it was last looked at.
    is_idle: bool,
}

impl Shared {
    pub(super) fn subscriber(&self) -> (u64, Arc<Notify>) {
        (self.next.fetch_add(1, Ordering::Relaxed), Arc::default())
    }

    pub(super) fn found(&self, source: &Source) -> Found {
        let table = self.lock();
        let entry = table.entries.get(source);
        entry.map_or_else(too_many, |entry| entry.found.clone())
    }

    pub(super) fn want(&self, reader: u64, changed: &Arc<Notify>, sources: Vec<Source>) {
        let mut table = self.lock();
        for source in sources {
            if table.entries.len() >= MOST_SOURCES && !table.entries.contains_key(&source) {
                table.refused.insert(reader, changed.clone());
                continue;
            }
            if !table.entries.contains_key(&source) {
                table.fresh.push(source.clone());
                table.entries.insert(source.clone(), Entry::new());
            }
            if let Some(entry) = table.entries.get_mut(&source) {
                entry.readers.insert(reader, changed.clone());
            }
        }
        if !table.fresh.is_empty() {
            self.wanted.notify_one();
        }
    }

    pub(super) fn leave(&self, reader: u64, sources: impl Iterator<Item = Source>) {
        let mut table = self.lock();
        for source in sources {
            if let Some(entry) = table.entries.get_mut(&source) {
                entry.readers.remove(&reader);
            }
        }
    }

    /// Whether a reader may find room that it did not find before. It is told once.
    pub(super) fn is_admissible(&self, reader: u64) -> bool {
        self.lock().admissible.remove(&reader)
    }

    pub(super) fn leave_for_good(&self, reader: u64, sources: impl Iterator<Item = Source>) {
        self.leave(reader, sources);
        let mut table = self.lock();
        table.refused.remove(&reader);
        table.admissible.remove(&reader);
    }

    /// Whether a source has not been forgotten.
    pub(super) fn holds(&self, source: &Source) -> bool {
        self.lock().entries.contains_key(source)
    }

    /// Enters a source that stays, with what it holds.
    pub(super) fn pin(&self, source: Source, found: Found, is_optional: bool) {
        let entry = Entry {
            found,
            is_pinned: true,
            is_optional,
            ..Entry::new()
        };
        self.lock().entries.insert(source, entry);
    }

    /// The sources to read for the first time.
    pub(super) fn fresh(&self) -> Vec<Source> {
        std::mem::take(&mut self.lock().fresh)
    }

    /// The sources to look at now and then: all but those that need not exist and do not.
    pub(super) fn sources(&self) -> Vec<Source> {
        let table = self.lock();
        let entries = table.entries.iter();
        let polled = entries.filter(|(_, entry)| entry.is_polled());
        polled.map(|(source, _)| source.clone()).collect()
    }

    pub(super) fn is_polled(&self) -> bool {
        self.lock().entries.values().any(Entry::is_polled)
    }

    pub(super) fn is_optional(&self, source: &Source) -> bool {
        let table = self.lock();
        table
            .entries
            .get(source)
            .is_some_and(|entry| entry.is_optional)
    }

    /// Tells the readers of a source. One that was forgotten meanwhile stays forgotten.
    pub(super) fn publish(&self, source: &Source, found: Found) {
        if let Some(entry) = self.lock().entries.get_mut(source) {
            entry.found = found;
            entry.tell();
        }
    }

    /// Has the readers of a source look again.
    pub(super) fn tell(&self, source: &Source) {
        if let Some(entry) = self.lock().entries.get(source) {
            entry.tell();
        }
    }

    /// Forgets sources that had no reader the last time and have none now. Who found no room is told.
    pub(super) fn sweep(&self) -> Vec<Source> {
        let mut gone = Vec::new();
        let mut table = self.lock();
        table.entries.retain(|source, entry| {
            let is_idle = entry.readers.is_empty() && !entry.is_pinned;
            let stays = !is_idle || !entry.is_idle;
            entry.is_idle = is_idle;
            if !stays {
                gone.push(source.clone());
            }
            stays
        });
        if !gone.is_empty() {
            for (reader, changed) in std::mem::take(&mut table.refused) {
                table.admissible.insert(reader);
                changed.notify_one();
            }
        }
        gone
    }

    /// A panic leaves entries, not a broken table.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }
}

impl Entry {
    fn new() -> Self {
        Self {
            found: Found::Pending,
            readers: HashMap::new(),
            is_pinned: false,
            is_optional: false,
            is_idle: false,
        }
    }

    fn tell(&self) {
        let readers = self.readers.values();
        readers.for_each(|reader| reader.notify_one());
    }

    fn is_polled(&self) -> bool {
        !self.is_optional || matches!(self.found, Found::There(_))
    }
}

fn too_many() -> Found {
    Found::Missing(Arc::new(FileError::TooMany { most: MOST_SOURCES }))
}
