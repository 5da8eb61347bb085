//! What happened while somebody was on the way there, whom nobody knows of yet.
//!
//! Each is numbered, so that a walk asks only for what came after it began. They are many in a busy
//! directory: beyond a bound, all walks on the way count as met.
//!
//! Does not know who is on the way.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};

const MOST: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Strays {
    count: u64,
    /// The number of the last one of each name in each directory; no name is the directory itself.
    last: HashMap<(i32, OsString), u64>,
    /// The number of the last one that was forgotten.
    lost: u64,
}

impl Strays {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn note(&mut self, descriptor: i32, name: OsString) {
        if self.last.len() >= MOST {
            self.clear();
            self.lost = self.count;
        }
        self.count += 1;
        self.last.insert((descriptor, name), self.count);
    }

    /// Whether something came after `since` to a name, or to the directory it is in.
    pub(super) fn had(&self, descriptor: i32, name: &OsStr, since: u64) -> bool {
        let had = |name: &OsStr| {
            let last = self.last.get(&(descriptor, name.to_owned()));
            last.is_some_and(|last| *last > since)
        };
        self.lost > since || had(name) || had(OsStr::new(""))
    }

    pub(super) fn clear(&mut self) {
        self.last.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_meets_what_came_after_it_began_and_everything_once_too_much_came() {
        let mut strays = Strays::default();
        strays.note(1, "before".into());
        let since = strays.count();
        strays.note(1, "after".into());
        strays.note(2, OsString::new());
        for (descriptor, name, expected) in [
            (1, "before", false),
            (1, "after", true),
            (1, "never", false),
            (2, "after", true),
            (3, "after", false),
        ] {
            let name = OsStr::new(name);
            assert_eq!(strays.had(descriptor, name, since), expected, "{name:?}");
        }
        for number in 0..=MOST {
            strays.note(4, number.to_string().into());
        }
        assert!(strays.had(3, OsStr::new("never"), since));
        assert!(strays.last.len() <= MOST);
        assert!(!strays.had(3, OsStr::new("never"), strays.count()));
    }
}
