//! Remembers the families that are declared on a page, and the series of earlier sources.
//!
//! They are stored as 64-bit hashes, at most [`MAX_HASHES`] of each kind. Beyond that, a family may be declared again
//! or after its samples, and a series may appear twice; Prometheus then takes one of its samples.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use super::sample::Sample;

/// The maximum number of hashes: the capacity of a hash set with 2^15 slots.
const MAX_HASHES: usize = 7 << 12;

#[derive(Default)]
pub(super) struct Seen {
    state: RandomState,
    declared: HashSet<u64>,
    /// The names of all samples.
    sampled: HashSet<u64>,
    /// Series of the sources before the current one, and the names of their families and samples.
    earlier: HashSet<u64>,
    /// Series and names of the current source, if another one follows.
    current: Vec<u64>,
    /// True if no source follows the current one.
    is_final: bool,
}

impl Seen {
    /// Begins a source. The series of the final source are not remembered, because none follows it.
    pub(super) fn begin_source(&mut self, is_final: bool) {
        self.earlier.extend(std::mem::take(&mut self.current));
        self.is_final = is_final;
    }

    /// Returns true if the series of the current source are remembered: another one follows, and there is room.
    pub(super) fn remembers(&self) -> bool {
        !self.is_final && self.earlier.len() + self.current.len() < MAX_HASHES
    }

    /// Records a HELP, TYPE or UNIT line. Returns false if the page has one for that family.
    pub(super) fn declare(&mut self, keyword: &str, name: &str) -> bool {
        let key = self.state.hash_one((keyword, name));
        if self.declared.len() < MAX_HASHES {
            self.declared.insert(key)
        } else {
            !self.declared.contains(&key)
        }
    }

    pub(super) fn has_type(&self, name: &str) -> bool {
        self.declared.contains(&self.state.hash_one(("TYPE", name)))
    }

    /// Returns true if the page has samples of that name.
    pub(super) fn has_samples(&self, name: &str) -> bool {
        self.sampled.contains(&self.state.hash_one(name))
    }

    /// Records the name of a sample. Returns true if an earlier source has it, too.
    pub(super) fn record_sample_name(&mut self, name: &str) -> bool {
        let key = self.state.hash_one(name);
        if self.sampled.len() < MAX_HASHES {
            self.sampled.insert(key);
        }
        self.record(key)
    }

    /// Records the name of a family. Returns true if an earlier source has it, too.
    pub(super) fn record_name(&mut self, name: &str) -> bool {
        self.record(self.state.hash_one(name))
    }

    /// Records a series. Returns true if an earlier source has it, too.
    pub(super) fn record_series(&mut self, sample: &mut Sample<'_>) -> bool {
        sample.labels.sort_unstable();
        self.record(self.state.hash_one((sample.name, &sample.labels)))
    }

    fn record(&mut self, key: u64) -> bool {
        let is_known = self.earlier.contains(&key);
        if !is_known && self.remembers() {
            self.current.push(key);
        }
        is_known
    }
}
