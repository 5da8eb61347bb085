//! The names of the mesh that the application asked for, for `pilot-agent scope`.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// How many names are remembered: more than a workload uses.
const MAX_NAMES: usize = 10_000;

/// Remembers names. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Asked(Arc<Mutex<HashSet<Box<[u8]>>>>);

impl Asked {
    pub(super) fn remember(&self, name: &[u8]) {
        let mut names = self.0.lock();
        if names.len() < MAX_NAMES && !names.contains(name) {
            names.insert(name.into());
        }
    }

    pub(super) fn names(&self) -> Vec<Box<[u8]>> {
        self.0.lock().iter().cloned().collect()
    }
}
