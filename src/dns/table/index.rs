//! Where a name is: a hash table of eight bytes a slot, made once.
//!
//! A slot holds part of the name's hash and a reference; the names stay where they are, and whoever
//! looks compares. Hashes are keyed at random, so that nobody who may name a service can choose
//! names that meet. Of one name no more than [`MOST_OF_ONE`] references are kept, the best ones.
//!
//! Does not know what a reference refers to.

use std::cmp::Ordering;

/// Nobody needs several things of one name; a table in which all have the same must not take its
/// square in time.
const MOST_OF_ONE: usize = 8;

const FREE: u32 = u32::MAX;

/// References by the hash of their names.
#[derive(Debug)]
pub(super) struct Index {
    slots: Box<[Slot]>,
    seed: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    hash: u32,
    reference: u32,
}

impl Index {
    /// Room for `count` references.
    pub(super) fn new(count: usize) -> Self {
        let free = Slot {
            hash: 0,
            reference: FREE,
        };
        Self {
            // Two in three slots are taken, and always one is free, where a search ends.
            slots: vec![free; count + count / 2 + 1].into(),
            seed: fastrand::u64(..),
        }
    }

    /// The hash of a lower-case name.
    pub(super) fn hash(&self, name: &[u8]) -> u32 {
        let mut state = self.seed ^ name.len() as u64;
        let mut chunks = name.chunks_exact(8);
        for chunk in &mut chunks {
            // The chunks are exact.
            let word = chunk.try_into().map_or(0, u64::from_le_bytes);
            state = fold(state ^ word);
        }
        let mut last = [0; 8];
        last[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
        let state = fold(state ^ u64::from_le_bytes(last));
        (state >> 32) as u32
    }

    /// Whether `wanted` holds for any reference that may have the name of this hash.
    pub(super) fn any(&self, hash: u32, mut wanted: impl FnMut(u32) -> bool) -> bool {
        let mut at = self.home(hash);
        loop {
            let Some(slot) = self.slots.get(at) else {
                at = 0;
                continue;
            };
            if slot.reference == FREE {
                return false;
            }
            if slot.hash == hash && wanted(slot.reference) {
                return true;
            }
            at += 1;
        }
    }

    /// Adds a reference. `compare` tells how another stands to it: nothing if it has another name,
    /// equal if this one replaces it, less if it is the better one of two with the same name.
    /// Returns what was replaced.
    pub(super) fn insert(
        &mut self,
        hash: u32,
        reference: u32,
        compare: impl Fn(u32, u32) -> Option<Ordering>,
    ) -> Option<u32> {
        let new = Slot { hash, reference };
        let mut same = 0;
        let mut worst = None;
        let mut free = None;
        for at in self.probe(hash) {
            let there = self.slots[at];
            if there.reference == FREE {
                free = Some(at);
                break;
            }
            if there.hash != hash {
                continue;
            }
            match compare(there.reference, reference) {
                None => {}
                Some(Ordering::Equal) => {
                    self.slots[at] = new;
                    return Some(there.reference);
                }
                Some(_) => {
                    same += 1;
                    let is_worst = worst.is_none_or(|worst: usize| {
                        let worst = self.slots[worst].reference;
                        compare(worst, there.reference) == Some(Ordering::Less)
                    });
                    if is_worst {
                        worst = Some(at);
                    }
                }
            }
            if same == MOST_OF_ONE {
                break;
            }
        }
        match (free, worst) {
            (Some(free), _) => self.slots[free] = new,
            (None, Some(worst)) => {
                let worse = compare(self.slots[worst].reference, reference);
                if worse == Some(Ordering::Greater) {
                    self.slots[worst] = new;
                }
            }
            (None, None) => {}
        }
        None
    }

    /// All slots, from the one a hash belongs in.
    fn probe(&self, hash: u32) -> impl Iterator<Item = usize> + use<> {
        let (count, home) = (self.slots.len(), self.home(hash));
        (home..count).chain(0..home)
    }

    /// The slot a hash belongs in.
    fn home(&self, hash: u32) -> usize {
        // Less than the count, by the shift.
        ((u64::from(hash) * self.slots.len() as u64) >> 32) as usize
    }
}

fn fold(word: u64) -> u64 {
    // An odd number without a pattern: the first 64 bits of pi's fraction.
    let product = u128::from(word) * 0x243f_6a88_85a3_08d3;
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_name_all_have_costs_no_more_than_the_best_of_them() {
        let count = 20_000;
        let mut index = Index::new(count);
        let compared = Cell::new(0);
        // The worst order: each is better than those before.
        for reference in (0..count as u32).rev() {
            index.insert(7, reference, |there, new| {
                compared.set(compared.get() + 1);
                Some(there.cmp(&new))
            });
        }
        let mut kept = Vec::new();
        index.any(7, |reference| {
            kept.push(reference);
            false
        });
        kept.sort();
        assert_eq!(kept, [0, 1, 2, 3, 4, 5, 6, 7]);
        let each = compared.get() / count;
        assert!(each <= 17, "{each} comparisons for each");
    }
}
