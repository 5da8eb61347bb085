//! Keeps two processes from changing the rules of one network namespace at the same time: a command holds the
//! file of [`acquire`] while it changes rules.

use std::fs::File;
use std::io;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use tokio::time::{Instant, sleep};

use crate::files::regular_file;

pub const NAMESPACE: &str = "/proc/thread-self/ns/net";
/// Limit of the wait; longer than the time limit of any program.
const LIMIT: Duration = Duration::from_secs(90);

/// Waits until no other process changes rules here. Other processes wait until the returned file is closed.
/// Programs inherit the file, so a program that outlives a killed agent still holds the lock.
pub async fn acquire() -> io::Result<File> {
    let file = regular_file::open(NAMESPACE.as_ref())?;
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
