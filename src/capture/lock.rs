//! Keeps two processes from changing the rules of one network namespace at the same time.

use std::fs::File;
use std::io;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use tokio::time::{Instant, sleep};

const NAMESPACE: &str = "/proc/thread-self/ns/net";
/// Longer than a program may take.
const LIMIT: Duration = Duration::from_secs(90);

/// Waits until no other process changes rules here; others wait until this is dropped. Programs inherit
/// it: one that outlives a killed agent keeps others waiting until it is done.
pub async fn acquire() -> io::Result<File> {
    let failed = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot lock {NAMESPACE}: {error}"))
    };
    let file = File::open(NAMESPACE).map_err(failed)?;
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::WOULDBLOCK) if start.elapsed() > LIMIT => {
                let text = "another process has been changing the rules of this network namespace";
                let text = format!("{text} for {} s", LIMIT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(Errno::WOULDBLOCK) => sleep(Duration::from_millis(20)).await,
            Err(error) => return Err(failed(error.into())),
        }
    }
    fcntl_setfd(&file, FdFlags::empty()).map_err(|error| failed(error.into()))?;
    Ok(file)
}
