//! Remembers which families are declared on a page and which series earlier sources have.
//!
//! Both are kept as 64-bit hashes, at most [`MAX_NAMES`] each. Beyond that, a family may be declared again
//! and a series may be there twice: Prometheus then takes one of its samples.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use super::sample::Sample;

/// What a hash set of 2^15 places holds.
const MAX_NAMES: usize = 7 << 12;

#[derive(Default)]
pub(super) struct Seen {
    state: RandomState,
    declared: HashSet<u64>,
    /// Series of the sources before the present one, and the names of their families and samples.
    earlier: HashSet<u64>,
    /// The same of the present source, if another one follows.
    present: Vec<u64>,
    is_last: bool,
}

impl Seen {
    /// Begins a source. Nothing has to be remembered of the last one.
    pub(super) fn begin(&mut self, is_last: bool) {
        self.earlier.extend(std::mem::take(&mut self.present));
        self.is_last = is_last;
    }

    pub(super) fn remembers(&self) -> bool {
        !self.is_last && self.earlier.len() + self.present.len() < MAX_NAMES
    }

    /// Notes a HELP, TYPE or UNIT line. False if the page has one for that family.
    pub(super) fn declare(&mut self, keyword: &str, name: &str) -> bool {
        let key = self.state.hash_one((keyword, name));
        if self.declared.len() < MAX_NAMES {
            self.declared.insert(key)
        } else {
            !self.declared.contains(&key)
        }
    }

    pub(super) fn has_type(&self, name: &str) -> bool {
        self.declared.contains(&self.state.hash_one(("TYPE", name)))
    }

    /// Notes that the present source has a family or samples of a name. True if an earlier one has, too.
    pub(super) fn name(&mut self, name: &str) -> bool {
        self.note(self.state.hash_one(name))
    }

    /// Notes a series of the present source. True if an earlier one has it, too.
    pub(super) fn series(&mut self, sample: &mut Sample<'_>) -> bool {
        sample.labels.sort_unstable();
        self.note(self.state.hash_one((sample.name, &sample.labels)))
    }

    fn note(&mut self, key: u64) -> bool {
        let is_known = self.earlier.contains(&key);
        if !is_known && self.remembers() {
            self.present.push(key);
        }
        is_known
    }
}
