//! The open streams, each with the secrets it asks for and what they wait for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;

use crate::clock::Clock;

/// How many names of a stream are kept. Envoy opens a stream for each secret.
pub(super) const MAX_NAMES: usize = 16;

/// The open streams. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Consumers(Arc<Mutex<BTreeMap<u64, Consumer>>>);

/// One stream.
#[derive(Clone, Debug)]
pub struct Consumer {
    pub since: SystemTime,
    /// Some of the names it has been sent.
    pub served: Vec<String>,
    /// Some of the other names, each with what it waits for.
    pub waits: Vec<(String, String)>,
    /// The reason of its last NACK, until a response is sent again.
    pub refused: Option<String>,
}

/// The entry of a stream, which ends with it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: u64,
    consumers: Consumers,
}

impl Consumers {
    /// All streams, the oldest first.
    pub fn all(&self) -> Vec<Consumer> {
        self.0.lock().values().cloned().collect()
    }

    pub(super) fn add(&self, id: u64) -> Entry {
        let consumer = Consumer {
            since: Clock::system().now(),
            served: Vec::new(),
            waits: Vec::new(),
            refused: None,
        };
        self.0.lock().insert(id, consumer);
        Entry {
            id,
            consumers: self.clone(),
        }
    }
}

impl Entry {
    pub(super) fn change(&self, change: impl FnOnce(&mut Consumer)) {
        self.consumers.0.lock().get_mut(&self.id).map(change);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.consumers.0.lock().remove(&self.id);
    }
}
