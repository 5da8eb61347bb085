//! Reads files when they are first requested, when they change, and once a minute.
//!
//! Each source has a task. It watches the paths, reads the files, and waits for the next change, which it
//! reads after a pause, because the key is written after its certificate. inotify misses some changes (on a
//! network file system, of a directory that is moved), so files are also polled; paths that could not be
//! watched are read every few seconds. Files are read on blocking threads, so that a file system that hangs
//! delays its own files only.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::source::{Checked, Source};
use super::table::{Entry, SecretState, Table};
use crate::files::file_watch::FileWatch;
use crate::metrics::{Counter, Registry};
use crate::problem::{Code, Problem};
use crate::runtime::clock::{Clock, after};
use crate::secrets::Secret;

/// The interval at which files are read, even without an event of inotify.
const POLL: Duration = Duration::from_secs(60);

/// The interval at which files are read that could not be watched.
const POLL_UNWATCHED: Duration = Duration::from_secs(5);

/// The number of reads that run at once, including those that hang.
const MAX_READS: usize = 64;

#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) table: Arc<Table>,
    pub(super) clock: Clock,
    pub(super) debounce: Duration,
    pub(super) open: fn() -> io::Result<FileWatch>,
    /// None while the kernel rejects watches.
    watch: Mutex<Option<Arc<FileWatch>>>,
    reads: Semaphore,
    watcher_failures: Counter,
    secret_failures: Counter,
}

impl Watcher {
    pub(super) fn new(
        table: Arc<Table>,
        clock: Clock,
        debounce: Duration,
        registry: &Registry,
    ) -> Self {
        Self {
            table,
            clock,
            debounce,
            open: FileWatch::new,
            watch: Mutex::default(),
            reads: Semaphore::new(MAX_READS),
            watcher_failures: registry.counter(
                "istio_agent_num_file_watcher_failures_total",
                "Number of times file watcher failed to add watchers",
            ),
            secret_failures: registry.counter(
                "istio_agent_num_file_secret_failures_total",
                "Number of times secret generation failed for files",
            ),
        }
    }

    #[cfg(test)]
    pub(super) fn is_watching(&self) -> bool {
        self.watch.lock().is_some()
    }

    /// Adds a source and reads it now. It is not forgotten while the caller holds the entry.
    pub(super) fn pin(&self, source: Source, is_optional: bool) -> Option<Arc<Entry>> {
        let entry = self.table.subscribe(source, is_optional)?;
        self.publish(&entry, entry.source.read());
        Some(entry)
    }

    pub(super) async fn run(self) {
        let watcher = Arc::new(self);
        // The watch is first, so that the first reads find it.
        tokio::join!(watcher.watch_files(), watcher.run_source_tasks());
    }

    /// Reports changes to the entries, and opens a new watch when the kernel ends one or rejects it.
    pub(super) async fn watch_files(&self) {
        let mut is_lost = false;
        loop {
            let lost = match (self.open)() {
                Ok(watch) => {
                    is_lost = false;
                    let watch = Arc::new(watch);
                    *self.watch.lock() = Some(watch.clone());
                    self.report_changes(&watch).await
                }
                Err(error) => error,
            };
            if !std::mem::replace(&mut is_lost, true) {
                *self.watch.lock() = None;
                self.report_unwatched("all files", &lost);
                self.notify(|_| true);
            }
            tokio::time::sleep(POLL_UNWATCHED).await;
        }
    }

    /// Notifies the entries of changes. Returns the error that ends the watch.
    async fn report_changes(&self, watch: &FileWatch) -> io::Error {
        loop {
            match watch.changed().await {
                Ok(paths) => {
                    for path in &paths {
                        let path = path.display();
                        tracing::debug!(target: "cache", "event for file certificate {path}");
                    }
                    self.notify(|source| source.paths().any(|path| paths.contains(path)));
                }
                Err(error) => return error,
            }
        }
    }

    fn notify(&self, is_affected: impl Fn(&Source) -> bool) {
        for entry in self.table.entries() {
            if is_affected(&entry.source) {
                entry.changed.notify_one();
            }
        }
    }

    fn report_unwatched(&self, what: impl ToString, error: &io::Error) {
        self.watcher_failures.inc();
        let problem = Problem::new(Code::SecretFilesNotWatched, what, error);
        tracing::error!(target: "cache", "certificate watch error: {problem}");
    }

    async fn run_source_tasks(self: &Arc<Self>) {
        let mut tasks = JoinSet::new();
        loop {
            for entry in self.table.take_fresh() {
                tasks.spawn(self.clone().keep_up_to_date(entry));
            }
            tokio::select! {
                () = self.table.wanted.notified() => {}
                Some(_) = tasks.join_next() => {}
            }
        }
    }

    /// Watches and reads the files of a source, now, after each change and at each poll. Ends when the source has had
    /// no subscriber at two polls in a row.
    async fn keep_up_to_date(self: Arc<Self>, entry: Arc<Entry>) {
        for path in entry.source.paths() {
            let path = path.display();
            tracing::info!(target: "cache", "adding watcher for file certificate {path}");
        }
        let mut poll = tokio::time::interval_at(after(POLL), POLL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_watched = true;
        let mut is_idle = false;
        loop {
            is_watched = self.watch_and_read(&entry, is_watched).await;
            tokio::select! {
                // Later changes do not delay the read, or a busy directory could delay it forever.
                () = entry.changed.notified() => tokio::time::sleep(self.debounce).await,
                _ = poll.tick(), if entry.is_polled() => {
                    let watch = self.watch.lock().clone();
                    if self.table.forget_if_idle(&entry, &mut is_idle, watch.as_deref()) {
                        return;
                    }
                }
                () = tokio::time::sleep(POLL_UNWATCHED), if !is_watched => {}
            }
        }
    }

    /// Watches and reads the files, and publishes their content. Returns true if all of them are watched; a failure
    /// to watch is reported only if they `were_watched` before.
    async fn watch_and_read(&self, entry: &Entry, were_watched: bool) -> bool {
        let source = &entry.source;
        let watch = self.watch.lock().clone();
        let files = source.clone();
        // The semaphore is never closed.
        let _permit = self.reads.acquire().await;
        let reading = tokio::task::spawn_blocking(move || {
            // The watch begins before the read, so that no change is missed in between.
            let watched = watch
                .map(|watch| files.paths().map(|path| watch.watch(path)).fold(Ok(()), Result::and));
            (watched, files.read())
        });
        let (watched, content) = match reading.await {
            Ok(finished) => finished,
            Err(error) => {
                // Reading should not panic. If it does, the source keeps its state until the next poll.
                tracing::error!(target: "cache", "reading {source} ended early: {error}");
                return were_watched;
            }
        };
        self.publish(entry, content);
        if let Some(Err(error)) = &watched
            && were_watched
        {
            self.report_unwatched(source, error);
        }
        matches!(watched, Some(Ok(())))
    }

    /// Publishes a secret if it differs, or the problem if there has been no usable secret. A problem is
    /// logged and counted once, and again when it is another one.
    fn publish(&self, entry: &Entry, read: Result<Checked, Problem>) {
        let source = &entry.source;
        let mut content = entry.content.lock();
        let is_available = matches!(content.state, SecretState::Available(_));
        match read {
            Ok(Checked { secret, invalid_certificates, non_pem_text }) => {
                content.logged_problem = None;
                if matches!(&content.state, SecretState::Available(last) if *last == secret) {
                    return;
                }
                tracing::info!(target: "cache", resource = %source, "read certificate from file");
                let subject = source.to_string();
                let now = self.clock.now();
                if let Secret::Certificate(certificate) = &secret
                    && let Some(problem) = certificate.leaf.validity_problem(&subject, now)
                {
                    tracing::warn!(target: "cache", "{problem}");
                }
                if invalid_certificates > 0 {
                    tracing::error!(
                        target: "cache",
                        "failed to parse some certs from {source}: {invalid_certificates} left out"
                    );
                }
                if let Some(found) = non_pem_text {
                    let problem = Problem::new(Code::CertificatesLeftOut, subject, found);
                    tracing::warn!(target: "cache", "{problem}");
                }
                content.state = SecretState::Available(secret);
            }
            Err(mut problem) => {
                // A missing or empty optional file is not a failure, unless it was usable before.
                let is_absent = problem.code == Code::SecretFileMissing;
                let is_failure = is_available || !entry.is_optional || !is_absent;
                if is_available {
                    problem = problem.consequence("the secret that was read before stays in use");
                }
                if is_failure && content.logged_problem.as_ref() != Some(&problem) {
                    self.secret_failures.inc();
                    tracing::error!(
                        target: "cache",
                        "resource:{source} failed to generate secret for proxy from file: {problem}"
                    );
                    content.logged_problem = Some(problem.clone());
                }
                if is_available {
                    return;
                }
                content.state = SecretState::Unusable(Arc::new(problem));
            }
        }
        drop(content);
        self.table.changes.send_replace(());
    }
}
