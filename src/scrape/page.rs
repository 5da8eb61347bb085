//! The page as it grows: what has been written of it, and the names that are taken.
//!
//! A family whose names are taken already is refused and counted: a page that has one twice is
//! unreadable as a whole. Names are kept as hashes, up to a number no real page comes near.
//!
//! Does not send anything.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::mem;

use super::counts::{Counts, Origin};
use super::family::Family;
use super::line::Format;
use super::merge::Sink;

/// Most names of a page: what a hash set of 2^17 places holds.
const MOST_NAMES: usize = 7 << 14;

pub(super) struct Page {
    pub to: Format,
    /// Whose families come now.
    pub origin: Origin,
    out: Vec<u8>,
    names: Names,
    counts: Counts,
}

/// The names of a page's families and of their samples.
#[derive(Default)]
pub(super) struct Names {
    hashes: HashSet<u64>,
    state: RandomState,
}

impl Names {
    /// Takes all names of a family, or none. One that has other names to offer is changed to those
    /// if they are free and its first ones are not.
    pub(super) fn take(&mut self, family: &mut Family, to: Format) -> bool {
        self.take_these(family, to) || family.give_way(to) && self.take_these(family, to)
    }

    fn take_these(&mut self, family: &Family, to: Format) -> bool {
        let hashes: Vec<_> = family.names(to).map(|name| self.hash(&name)).collect();
        let is_free = self.hashes.len() + hashes.len() <= MOST_NAMES
            && !hashes.iter().any(|hash| self.hashes.contains(hash));
        if is_free {
            self.hashes.extend(hashes);
        }
        is_free
    }

    pub(super) fn hash(&self, name: &str) -> u64 {
        self.state.hash_one(name)
    }
}

impl Page {
    pub(super) fn new(to: Format, counts: Counts) -> Self {
        Self {
            to,
            origin: Origin::Agent,
            out: Vec::new(),
            names: Names::default(),
            counts,
        }
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// How much has been written and not been taken.
    pub(super) fn len(&self) -> usize {
        self.out.len()
    }

    pub(super) fn take(&mut self) -> Vec<u8> {
        mem::take(&mut self.out)
    }

    pub(super) fn end(&mut self) {
        if self.to == Format::OpenMetrics {
            self.out.extend_from_slice(b"# EOF\n");
        }
    }
}

impl Sink for Page {
    fn open(&mut self, family: &mut Family) -> bool {
        let is_free = self.names.take(family, self.to);
        if is_free {
            family.write_head(self.to, &mut self.out);
        } else {
            self.counts.duplicate(self.origin, &family.name);
        }
        is_free
    }

    fn write(&mut self, samples: &[u8]) {
        self.out.extend_from_slice(samples);
    }
}
