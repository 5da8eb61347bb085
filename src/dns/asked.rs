//! The names of the mesh that were asked for, for `pilot-agent scope`.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// How many names are remembered.
const MAX_NAMES: usize = 2048;

/// Remembers names. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Asked(Arc<Mutex<HashSet<Box<[u8]>>>>);

/// Whether all names that were asked for are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Names {
    Known,
    /// There were more than are remembered.
    Incomplete,
    /// The agent does not answer DNS.
    #[default]
    Unknown,
}

impl Asked {
    pub(super) fn remember(&self, name: &[u8]) {
        let mut names = self.0.lock();
        if names.len() < MAX_NAMES && !names.contains(name) {
            names.insert(name.into());
        }
    }

    pub(super) fn snapshot(&self) -> (Vec<Box<[u8]>>, Names) {
        let names = self.0.lock();
        let known = match names.len() < MAX_NAMES {
            true => Names::Known,
            false => Names::Incomplete,
        };
        (names.iter().cloned().collect(), known)
    }
}
