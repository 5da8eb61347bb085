//! Orders a restart on SIGHUP, and when a file that Envoy is started from has changed.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::envoy::handle::Envoy;
use crate::file_watch::FileWatch;

/// What changes together, such as the files of one volume, is read once.
const SETTLES: Duration = Duration::from_secs(2);

/// Watches `files` and for SIGHUP. Both are noticed from the call on; the future never ends.
pub fn changes(
    envoy: Envoy,
    files: &[PathBuf],
) -> io::Result<impl Future<Output = ()> + Send + use<>> {
    let hangups = signal(SignalKind::hangup())?;
    let files: Arc<[PathBuf]> = files.into();
    // From before the first Envoy starts, which these have been read for.
    let watch = watch(&files);
    Ok(async move { tokio::join!(on_hangup(hangups, &envoy), on_change(watch, &files, &envoy)).0 })
}

fn watch(files: &[PathBuf]) -> io::Result<FileWatch> {
    let watch = FileWatch::new()?;
    watch_all(&watch, files);
    Ok(watch)
}

fn watch_all(watch: &FileWatch, files: &[PathBuf]) {
    for file in files {
        if let Err(error) = watch.watch(file) {
            tracing::debug!(%error, file = %file.display(), "not watching all of a file's way");
        }
    }
}

async fn on_hangup(mut hangups: Signal, envoy: &Envoy) {
    while hangups.recv().await.is_some() {
        envoy.restart("received signal: hangup").await;
    }
}

async fn on_change(watch: io::Result<FileWatch>, files: &Arc<[PathBuf]>, envoy: &Envoy) {
    let failed = async {
        let watch = Arc::new(watch?);
        loop {
            watch.changed().await?;
            tokio::time::sleep(SETTLES).await;
            // What came meanwhile is about to be read.
            while let Ok(more) = tokio::time::timeout(Duration::ZERO, watch.changed()).await {
                more?;
            }
            // Links may lead elsewhere now, and the file system may block.
            let (again, files) = (Arc::clone(&watch), Arc::clone(files));
            tokio::task::spawn_blocking(move || watch_all(&again, &files)).await?;
            envoy.restart("a file has changed").await;
        }
    };
    let failed: io::Result<Infallible> = failed.await;
    let Err(error) = failed;
    tracing::warn!(%error, "cannot watch Envoy's inputs; only SIGHUP restarts it");
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::Ipv4Addr;

    use super::*;
    use crate::envoy::admin::Admin;
    use crate::envoy::handle::Report;

    #[tokio::test(start_paused = true)]
    async fn what_changes_while_files_settle_is_part_of_one_restart() {
        let place = tempfile::tempdir().expect("a directory");
        let files = ["mesh", "override"].map(|name| place.path().join(name));
        let files: Arc<[PathBuf]> = files.into();
        let (_publish, report) = tokio::sync::watch::channel(Report::default());
        let (give, mut orders) = tokio::sync::mpsc::channel(8);
        let admin = Admin::new(Ipv4Addr::LOCALHOST.into(), 1, SETTLES);
        let envoy = Envoy::new(admin, report, give);
        let watch = watch(&files);
        let story = async {
            fs::write(&files[0], "1").expect("written");
            tokio::time::sleep(SETTLES / 2).await;
            fs::write(&files[1], "1").expect("written");
            orders.recv().await.expect("an order");
            let quiet = tokio::time::timeout(SETTLES * 9, orders.recv()).await;
            assert!(quiet.is_err(), "{quiet:?}");
            fs::write(&files[0], "2").expect("written");
            orders.recv().await.expect("another order");
        };
        tokio::select! {
            () = story => {}
            () = on_change(watch, &files, &envoy) => panic!("nothing is watched"),
        }
    }
}
