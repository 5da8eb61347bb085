//! Reads files when they are first asked for, when they change, and once a minute.
//!
//! One task follows each source. It watches the paths, reads the files, and waits for the next
//! change, which it reads after a pause, as a key follows its certificate. inotify misses some changes
//! (on a network file system, of a directory moved as a whole), hence the poll; paths that could not
//! be watched are read every few seconds. Files are read on threads, so that a file system that hangs
//! holds up its own files only.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::source::{Content, Source};
use super::table::{Entry, Table};
use crate::clock::{Clock, after};
use crate::file_watch::{Changed, FileWatch};
use crate::metrics::{Counter, Registry};
use crate::problem::{Problem, codes};
use crate::secrets::{Secret, SecretState};

/// How often files are read whatever inotify reports.
const POLL: Duration = Duration::from_secs(60);

/// How often files are read that could not be watched.
const POLL_UNWATCHED: Duration = Duration::from_secs(5);

/// How many reads run at once, those included that hang.
const MAX_READS: usize = 64;

#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) table: Arc<Table>,
    pub(super) clock: Clock,
    pub(super) debounce: Duration,
    pub(super) open: fn() -> io::Result<FileWatch>,
    /// None while the kernel refuses to watch.
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

    /// Adds a source and reads it now. It stays as long as the entry is held.
    pub(super) fn pin(&self, source: Source, is_optional: bool) -> Option<Arc<Entry>> {
        let entry = self.table.subscribe(source, is_optional)?;
        self.publish(&entry, entry.source.read());
        Some(entry)
    }

    pub(super) async fn run(self) {
        let watcher = Arc::new(self);
        // In this order, so that the first reads find a watch.
        tokio::join!(watcher.watch_files(), watcher.follow_all());
    }

    /// Reports changes to the sources, as long as the kernel watches; tries again when it refuses.
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
                self.changed(|_| true);
            }
            tokio::time::sleep(POLL_UNWATCHED).await;
        }
    }

    async fn report_changes(&self, watch: &FileWatch) -> io::Error {
        loop {
            match watch.changed().await {
                Ok(Changed::Paths(paths)) => {
                    for path in &paths {
                        let path = path.display();
                        tracing::debug!(target: "cache", "event for file certificate {path}");
                    }
                    self.changed(|source| source.paths().any(|path| paths.contains(path)));
                }
                Ok(Changed::Anything) => self.changed(|_| true),
                Err(error) => return error,
            }
        }
    }

    /// Has sources read again.
    fn changed(&self, is_affected: impl Fn(&Source) -> bool) {
        let entries = self.table.entries().into_iter();
        let affected = entries.filter(|entry| is_affected(&entry.source));
        affected.for_each(|entry| entry.changed.notify_one());
    }

    fn report_unwatched(&self, what: impl ToString, error: &io::Error) {
        self.watcher_failures.inc();
        let problem = Problem::new(codes::SECRET_FILES_NOT_WATCHED, what, error);
        tracing::error!(target: "cache", "certificate watch error: {problem}");
    }

    /// Runs a task for each source.
    async fn follow_all(self: &Arc<Self>) {
        let mut followers = JoinSet::new();
        loop {
            for entry in self.table.take_fresh() {
                followers.spawn(self.clone().follow(entry));
            }
            tokio::select! {
                () = self.table.wanted.notified() => {}
                Some(_) = followers.join_next() => {}
            }
        }
    }

    /// Keeps the state of a source up to date, until it has had no subscriber for a whole interval of
    /// the poll.
    async fn follow(self: Arc<Self>, entry: Arc<Entry>) {
        for path in entry.source.paths() {
            let path = path.display();
            tracing::info!(target: "cache", "adding watcher for file certificate {path}");
        }
        let mut poll = tokio::time::interval_at(after(POLL), POLL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut is_watched, mut is_idle) = (true, false);
        let unused = loop {
            is_watched = self.read(&entry, is_watched).await;
            tokio::select! {
                // Later changes do not put the read off, or a busy directory could do so for ever.
                () = entry.changed.notified() => tokio::time::sleep(self.debounce).await,
                _ = poll.tick(), if entry.is_polled() => {
                    if let Some(unused) = self.table.forget_if_idle(&entry, &mut is_idle) {
                        break unused;
                    }
                }
                () = tokio::time::sleep(POLL_UNWATCHED), if !is_watched => {}
            }
        };
        if let Some(watch) = &*self.watch.lock() {
            unused.iter().for_each(|path| watch.unwatch(path));
        }
    }

    /// Watches and reads the files. Returns whether all of them are watched; a failure to watch is
    /// reported unless they `were_watched`.
    async fn read(&self, entry: &Entry, were_watched: bool) -> bool {
        let source = &entry.source;
        let (watch, files) = (self.watch.lock().clone(), source.clone());
        let read = move || {
            // Watched before it is read, so that no change falls in between.
            let watched = watch.map(|watch| {
                let watched = files.paths().map(|path| watch.watch(path));
                watched.fold(Ok(()), Result::and)
            });
            (watched, files.read())
        };
        // The semaphore is never closed.
        let _permit = self.reads.acquire().await;
        let (watched, content) = match tokio::task::spawn_blocking(read).await {
            Ok(finished) => finished,
            Err(error) => {
                // Reading does not panic; if it did, the source stays as it is until the poll.
                tracing::error!(target: "cache", "reading {source} ended early: {error}");
                return were_watched;
            }
        };
        self.publish(entry, content);
        match watched {
            Some(Ok(())) => true,
            Some(Err(error)) if were_watched => {
                self.report_unwatched(source.to_string(), &error);
                false
            }
            Some(Err(_)) | None => false,
        }
    }

    /// Publishes what was read, if it differs, or that files cannot be used, unless they could be before.
    /// A failure is logged and counted once, and again when it is another one.
    fn publish(&self, entry: &Entry, read: Result<Content, Problem>) {
        let (source, mut content) = (&entry.source, entry.content.lock());
        let is_available = matches!(content.state, SecretState::Available(_));
        match read {
            Ok((secret, broken, left_over)) => {
                content.problem = None;
                if matches!(&content.state, SecretState::Available(last) if *last == secret) {
                    return;
                }
                tracing::info!(target: "cache", resource = %source, "read certificate from file");
                let (subject, now) = (source.to_string(), self.clock.now());
                if let Secret::Certificate(certificate) = &secret
                    && let Some(problem) = certificate.leaf.validity_problem(&subject, now)
                {
                    tracing::warn!(target: "cache", "{problem}");
                }
                if broken > 0 {
                    tracing::error!(
                        target: "cache",
                        "failed to parse some certs from {source}: {broken} left out"
                    );
                }
                if let Some(left_over) = left_over {
                    let problem = Problem::new(codes::CERTIFICATES_LEFT_OUT, subject, left_over);
                    tracing::warn!(target: "cache", "{problem}");
                }
                content.state = SecretState::Available(secret);
            }
            Err(mut problem) => {
                // A file that need not exist is no failure until it has existed.
                let is_absent = problem.code == codes::SECRET_FILE_MISSING;
                let is_failure = is_available || !entry.is_optional || !is_absent;
                if is_available {
                    problem = problem.consequence("the secret that was read before stays in use");
                }
                if is_failure && content.problem.as_ref() != Some(&problem) {
                    self.secret_failures.inc();
                    tracing::error!(
                        target: "cache",
                        "resource:{source} failed to generate secret for proxy from file: {problem}"
                    );
                    content.problem = Some(problem.clone());
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
