//! Keeps two processes from changing the rules of one network namespace at the same time.

use std::fs::File;
use std::io;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use tokio::time::{Instant, sleep};

pub const NAMESPACE: &str = "/proc/thread-self/ns/net";
/// Longer than a program may take.
const LIMIT: Duration = Duration::from_secs(90);

/// Waits until no other process changes rules here; others wait until this is dropped. Programs inherit
/// it: one that outlives a killed agent keeps others waiting until it is done.
pub async fn acquire() -> io::Result<File> {
    let file = File::open(NAMESPACE)?;
    let start = Instant::now();
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != Errno::WOULDBLOCK {
            return Err(error.into());
        }
        if start.elapsed() > LIMIT {
            return Err(io::ErrorKind::TimedOut.into());
        }
        sleep(Duration::from_millis(20)).await;
    }
    fcntl_setfd(&file, FdFlags::empty())?;
    Ok(file)
}
