//! Which sources are being read, and whether there is room for another.
//!
//! A read that hangs, as on a network file system that has gone, gives up its place to others, but
//! not its thread. So there is a bound to those as well.
//!
//! Does not read.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::source::Source;

/// How many files are read at once.
const MOST: usize = 16;

/// How many reads may hang beside them.
const MOST_SLOW: usize = 64;

/// A read that takes longer hangs.
const SLOW: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Slots(HashMap<Source, Slot>);

#[derive(Debug)]
struct Slot {
    since: Instant,
    is_slow: bool,
}

impl Slots {
    pub(super) fn has_room(&self) -> bool {
        let slow = self.0.values().filter(|slot| slot.is_slow).count();
        self.0.len() - slow < MOST && slow <= MOST_SLOW
    }

    pub(super) fn contains(&self, source: &Source) -> bool {
        self.0.contains_key(source)
    }

    pub(super) fn begin(&mut self, source: Source) {
        let since = Instant::now();
        let is_slow = false;
        self.0.insert(source, Slot { since, is_slow });
    }

    pub(super) fn end(&mut self, source: &Source) {
        self.0.remove(source);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// When the next read turns out to hang.
    pub(super) fn slow_at(&self) -> Option<Instant> {
        let quick = self.0.values().filter(|slot| !slot.is_slow);
        quick.map(|slot| slot.since + SLOW).min()
    }

    /// Logs those that hang, each once.
    pub(super) fn note_slow(&mut self) {
        for (source, slot) in &mut self.0 {
            if !slot.is_slow && slot.since.elapsed() >= SLOW {
                slot.is_slow = true;
                tracing::warn!(
                    target: "cache",
                    "{source} has not been read within {SLOW:?}; others are, meanwhile"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn reads_that_hang_make_room_for_others_up_to_a_bound() {
        let mut slots = Slots::default();
        let source = |n: usize| Source::Roots(n.to_string().into());
        let mut begun = 0;
        while begun < 1000 {
            while slots.has_room() {
                slots.begin(source(begun));
                begun += 1;
            }
            match slots.slow_at() {
                Some(at) => tokio::time::sleep_until(at).await,
                None => break,
            }
            slots.note_slow();
        }
        assert!((MOST_SLOW..=MOST_SLOW + MOST).contains(&begun), "{begun}");
        (0..begun).for_each(|n| slots.end(&source(n)));
        assert!(slots.has_room() && slots.slow_at().is_none());
    }
}
