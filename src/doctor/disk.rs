//! Free space of the directories the agent writes to.

use std::path::PathBuf;

use super::report::Check;
use super::{Subject, aside};

/// Enough for certificates and the bootstrap.
const LEAST_FREE: u64 = 8 << 20;

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    let sockets = subject.config.xds_socket.parent();
    let mut checks = Vec::new();
    if let Some(directory) = sockets {
        checks.push(free(directory.to_owned()).await);
    }
    checks
}

async fn free(directory: PathBuf) -> Check {
    let name = directory.display().to_string();
    let found = aside(move || rustix::fs::statvfs(&directory)).await;
    match found {
        Ok(Ok(found)) => {
            let free = found.f_bavail.saturating_mul(found.f_frsize);
            let words = format!("{} MiB free", free >> 20);
            match free < LEAST_FREE {
                true => Check::error(name, words).expected(format!("{} MiB", LEAST_FREE >> 20)),
                false => Check::ok(name, words),
            }
        }
        Ok(Err(error)) => Check::error(name, error),
        Err(late) => Check::error(name, late),
    }
}
