//! Ids nobody can guess, drawn from the system's secure source a few hundred at a time.

use std::fmt;

use aws_lc_rs::error::Unspecified;
use aws_lc_rs::rand;
use parking_lot::Mutex;

const BATCH: usize = 512;

pub(super) struct Ids(Mutex<Batch>);

struct Batch {
    bytes: [u8; BATCH],
    used: usize,
}

impl Ids {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Batch {
            bytes: [0; BATCH],
            used: BATCH,
        }))
    }

    pub(super) fn next(&self) -> Result<u16, Unspecified> {
        let mut batch = self.0.lock();
        if batch.used + 2 > BATCH {
            rand::fill(&mut batch.bytes)?;
            batch.used = 0;
        }
        let id = u16::from_be_bytes([batch.bytes[batch.used], batch.bytes[batch.used + 1]]);
        batch.used += 2;
        Ok(id)
    }
}

impl fmt::Debug for Ids {
    /// Ids to come are secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ids")
    }
}
