//! Orders a restart of Envoy on SIGHUP, and when one of its input files has changed.
//!
//! The agent polls the future of [`restart_on_change`] while it serves.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::envoy::handle::{Envoy, Order};
use crate::files::file_watch::FileWatch;

/// The wait for further changes, because the files of a volume change together.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// Watches for changes of `files` and for SIGHUP, both from the call on. The future never ends.
pub fn restart_on_change(
    envoy: Envoy,
    files: &[PathBuf],
) -> io::Result<impl Future<Output = ()> + Send + use<>> {
    let hangups = signal(SignalKind::hangup())?;
    let files: Arc<[PathBuf]> = files.into();
    // The files have been read for the first Envoy, so changes before its start count, too.
    let watch = watch(&files);
    Ok(async move {
        let on_files = on_file_change(watch, &files, &envoy);
        tokio::join!(on_hangup(hangups, &envoy), on_files).0
    })
}

fn watch(files: &[PathBuf]) -> io::Result<FileWatch> {
    let watch = FileWatch::new()?;
    watch_all(&watch, files);
    Ok(watch)
}

fn watch_all(watch: &FileWatch, files: &[PathBuf]) {
    for file in files {
        if let Err(error) = watch.watch(file) {
            tracing::debug!(%error, file = %file.display(), "not watching all directories of a file");
        }
    }
}

async fn on_hangup(mut hangups: Signal, envoy: &Envoy) {
    while hangups.recv().await.is_some() {
        envoy.order(Order::Restart { reason: "received signal: hangup" }).await;
    }
}

async fn on_file_change(watch: io::Result<FileWatch>, files: &Arc<[PathBuf]>, envoy: &Envoy) {
    let Err(error) = until_error(watch, files, envoy).await;
    tracing::warn!(%error, "cannot watch Envoy's inputs; only SIGHUP restarts it");
}

/// Orders a restart after each change that has settled.
async fn until_error(
    watch: io::Result<FileWatch>,
    files: &Arc<[PathBuf]>,
    envoy: &Envoy,
) -> io::Result<Infallible> {
    let watch = Arc::new(watch?);
    loop {
        watch.changed().await?;
        tokio::time::sleep(SETTLE_TIME).await;
        // The restart will read the files with all changes so far, so these changes need no other
        // restart.
        while let Ok(changed) = tokio::time::timeout(Duration::ZERO, watch.changed()).await {
            changed?;
        }
        // A changed link may lead to other files. Watching may block on the file system.
        let watch = Arc::clone(&watch);
        let files = Arc::clone(files);
        tokio::task::spawn_blocking(move || watch_all(&watch, &files)).await?;
        envoy.order(Order::Restart { reason: "a file has changed" }).await;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::Ipv4Addr;

    use super::*;
    use crate::envoy::admin::Admin;
    use crate::envoy::handle::Report;

    #[tokio::test(start_paused = true)]
    async fn changes_within_the_settling_time_cause_one_restart() {
        let place = tempfile::tempdir().expect("a directory");
        let files = ["mesh", "override"].map(|name| place.path().join(name));
        let files: Arc<[PathBuf]> = files.into();
        let (_publish, report) = tokio::sync::watch::channel(Report::default());
        let (give, mut orders) = tokio::sync::mpsc::channel(8);
        let admin = Admin::new(Ipv4Addr::LOCALHOST.into(), 1, SETTLE_TIME);
        let envoy = Envoy::new(admin, report, give);
        let watch = watch(&files);
        let story = async {
            fs::write(&files[0], "1").expect("written");
            tokio::time::sleep(SETTLE_TIME / 2).await;
            fs::write(&files[1], "1").expect("written");
            orders.recv().await.expect("an order");
            let quiet = tokio::time::timeout(SETTLE_TIME * 9, orders.recv()).await;
            assert!(quiet.is_err(), "{quiet:?}");
            fs::write(&files[0], "2").expect("written");
            orders.recv().await.expect("another order");
        };
        tokio::select! {
            () = story => {}
            () = on_file_change(watch, &files, &envoy) => panic!("nothing is watched"),
        }
    }
}
