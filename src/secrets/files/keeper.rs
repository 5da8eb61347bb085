//! Reads files when they are wanted first, when they change, and now and then.
//!
//! A change is looked at after a rest, as a key follows its certificate. Watches can miss something
//! (a network file system, a directory moved as a whole, too few watches), so every file is read
//! again once a minute, and every few seconds where watches failed. Without secrets from files
//! nothing here wakes up. Reads happen beside the runtime's thread, several at a time.
//!
//! Does not decide who wants what.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::metrics::Metrics;
use super::source::{Content, FileError, Source};
use super::table::Shared;
use super::{Found, Secret};
use crate::clock::{Clock, rfc3339};
use crate::file_watch::{Changed, FileWatch};

/// How often files are read whatever the watches say.
const POLL: Duration = Duration::from_secs(60);

/// The same where watches failed.
const POLL_UNWATCHED: Duration = Duration::from_secs(5);

/// How many files are read at once.
const MOST_READS: usize = 16;

type Read = (Source, Result<Content, FileError>);

#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    clock: Clock,
    debounce: Duration,
    metrics: Metrics,
    watch: Option<FileWatch>,
    /// Whether a path could not be watched since the last poll.
    has_failed: bool,
    /// Whether that was logged, and has been so ever since.
    has_logged: bool,
    /// The sources each path is part of.
    paths: HashMap<PathBuf, HashSet<Source>>,
    queue: VecDeque<Source>,
    queued: HashSet<Source>,
    reading: HashSet<Source>,
    /// To be read once more when the read under way is done.
    again: HashSet<Source>,
    reads: JoinSet<Read>,
    /// What has changed, and when it is looked at.
    changed: HashSet<Source>,
    look_at: Option<Instant>,
    poll_at: Instant,
    /// What was last logged about each source that cannot be read.
    problems: HashMap<Source, String>,
}

impl Keeper {
    pub(super) fn new(
        shared: Arc<Shared>,
        clock: Clock,
        debounce: Duration,
        metrics: Metrics,
    ) -> Self {
        let mut keeper = Self {
            shared,
            clock,
            debounce,
            metrics,
            watch: None,
            has_failed: false,
            has_logged: false,
            paths: HashMap::new(),
            queue: VecDeque::new(),
            queued: HashSet::new(),
            reading: HashSet::new(),
            again: HashSet::new(),
            reads: JoinSet::new(),
            changed: HashSet::new(),
            look_at: None,
            poll_at: Instant::now() + POLL,
            problems: HashMap::new(),
        };
        match FileWatch::new() {
            Ok(watch) => keeper.watch = Some(watch),
            Err(error) => keeper.watch_failed(&error),
        }
        keeper
    }

    /// A keeper that must do without watches.
    #[cfg(test)]
    pub(super) fn unwatched(shared: Arc<Shared>, metrics: Metrics) -> Self {
        let mut keeper = Self::new(shared, Clock::system(), Duration::ZERO, metrics);
        keeper.watch = None;
        keeper.watch_failed(&io::Error::other("told to"));
        keeper
    }

    /// Reads a source that stays, now.
    pub(super) fn pin(&mut self, source: Source, is_optional: bool) {
        self.watch(&source);
        self.shared.pin(source.clone(), Found::Pending, is_optional);
        let read = source.read();
        self.take(source, read);
    }

    pub(super) async fn run(mut self) {
        loop {
            let fresh = self.shared.fresh();
            fresh.into_iter().for_each(|source| self.enqueue(source));
            self.start_reads();
            let (look_at, is_polled) = (self.look_at, self.shared.is_polled());
            tokio::select! {
                () = self.shared.wanted.notified() => self.begin_polling(),
                Some(read) = self.reads.join_next() => self.finish(read),
                changed = next_change(&mut self.watch) => self.note(changed),
                () = wait_until(look_at) => self.look(),
                () = tokio::time::sleep_until(self.poll_at), if is_polled => self.poll(),
            }
        }
    }

    /// Sources that come after a time without any are not polled at once.
    fn begin_polling(&mut self) {
        let now = Instant::now();
        if self.poll_at <= now {
            self.poll_at = now + POLL;
        }
    }

    fn enqueue(&mut self, source: Source) {
        if self.reading.contains(&source) {
            self.again.insert(source);
        } else if self.queued.insert(source.clone()) {
            self.queue.push_back(source);
        }
    }

    /// A file is watched before it is read, so that no change falls in between.
    fn start_reads(&mut self) {
        while self.reads.len() < MOST_READS
            && let Some(source) = self.queue.pop_front()
        {
            self.queued.remove(&source);
            self.watch(&source);
            self.reading.insert(source.clone());
            self.reads.spawn_blocking(move || {
                let read = source.read();
                (source, read)
            });
        }
    }

    fn watch(&mut self, source: &Source) {
        for path in source.paths() {
            let sources = self.paths.entry(path.to_owned()).or_default();
            if sources.insert(source.clone()) {
                tracing::info!(
                    target: "cache",
                    "adding watcher for file certificate {}",
                    path.display()
                );
            }
            let watched = self.watch.as_mut().map(|watch| watch.watch(path));
            if let Some(Err(error)) = watched {
                self.watch_failed(&error);
            }
        }
    }

    fn watch_failed(&mut self, error: &io::Error) {
        self.metrics.watcher_failures.inc();
        if !self.has_logged {
            tracing::error!(
                target: "cache",
                "certificate watch error: {error}; files are read every {POLL_UNWATCHED:?} instead"
            );
        }
        self.has_failed = true;
        self.has_logged = true;
        self.poll_at = self.poll_at.min(Instant::now() + POLL_UNWATCHED);
    }

    fn finish(&mut self, read: Result<Read, JoinError>) {
        let (source, read) = match read {
            Ok(read) => read,
            Err(error) => {
                // Reading does not panic; if it did, the source stays as it is until the poll.
                tracing::error!(target: "cache", "reading a file ended early: {error}");
                self.reading.clear();
                return;
            }
        };
        self.reading.remove(&source);
        if self.again.remove(&source) {
            self.enqueue(source.clone());
        }
        self.take(source, read);
    }

    fn take(&mut self, source: Source, read: Result<Content, FileError>) {
        match read {
            Ok(content) => self.take_content(source, content),
            Err(error) => self.take_error(source, error),
        }
    }

    fn take_content(&mut self, source: Source, content: Content) {
        self.problems.remove(&source);
        if let Found::There(held) = self.shared.found(&source)
            && held.content == content
        {
            return;
        }
        tracing::info!(target: "cache", resource = %source, "read certificate from file");
        self.warn_of_oddities(&source, &content);
        self.metrics.reloaded(&source, self.clock.now());
        let secret = Arc::new(Secret { content });
        self.shared.publish(&source, Found::There(secret));
    }

    fn warn_of_oddities(&self, source: &Source, content: &Content) {
        match content {
            Content::Pair { not_after, .. } if *not_after <= self.clock.now() => tracing::warn!(
                target: "cache",
                "the certificate of {source} expired at {}; it is served as it is",
                rfc3339(*not_after)
            ),
            Content::Roots { broken, .. } if *broken > 0 => tracing::error!(
                target: "cache",
                "failed to parse some certs from {source}: {broken} left out"
            ),
            Content::Pair { .. } | Content::Roots { .. } => {}
        }
    }

    /// Logs a problem once, and counts it each time it is met anew.
    fn take_error(&mut self, source: Source, error: FileError) {
        let held = self.shared.found(&source);
        let is_held = matches!(held, Found::There(_));
        // A file that need not be there is no failure until there has been one.
        if !is_held && self.shared.is_optional(&source) && is_absent(&error) {
            return self
                .shared
                .publish(&source, Found::Missing(Arc::new(error)));
        }
        let text = error.to_string();
        if self.problems.get(&source) != Some(&text) {
            let next = match is_held {
                true => "what was read before stays in use",
                false => "who asks waits until the files are good",
            };
            self.metrics.failed(&source);
            tracing::error!(
                target: "cache",
                "resource:{source} failed to generate secret for proxy from file: {text}; {next}"
            );
        }
        self.problems.insert(source.clone(), text);
        if !is_held {
            self.shared
                .publish(&source, Found::Missing(Arc::new(error)));
        }
    }

    fn note(&mut self, changed: io::Result<Changed>) {
        match changed {
            Ok(Changed::Paths(paths)) => {
                for path in paths {
                    self.note_path(&path);
                }
            }
            Ok(Changed::Anything) => {
                self.changed.extend(self.paths.values().flatten().cloned());
            }
            Err(error) => {
                self.watch = None;
                return self.watch_failed(&error);
            }
        }
        // Not put off by what follows, or a busy directory could do so for ever.
        self.look_at.get_or_insert(Instant::now() + self.debounce);
    }

    fn note_path(&mut self, path: &Path) {
        tracing::debug!(target: "cache", "event for file certificate {}", path.display());
        let sources = self.paths.get(path).into_iter().flatten();
        self.changed.extend(sources.cloned());
    }

    fn look(&mut self) {
        self.look_at = None;
        for source in std::mem::take(&mut self.changed) {
            self.enqueue(source);
        }
    }

    fn poll(&mut self) {
        for source in self.shared.sweep() {
            self.forget(&source);
        }
        // Watches that failed are tried again with each read.
        let has_failed = std::mem::take(&mut self.has_failed) || self.watch.is_none();
        self.has_logged = has_failed;
        let period = match has_failed {
            true => POLL_UNWATCHED,
            false => POLL,
        };
        self.poll_at = Instant::now() + period;
        for source in self.shared.sources() {
            self.enqueue(source);
        }
    }

    fn forget(&mut self, source: &Source) {
        self.problems.remove(source);
        self.metrics.dropped(source);
        for path in source.paths() {
            let Some(sources) = self.paths.get_mut(path) else {
                continue;
            };
            sources.remove(source);
            if sources.is_empty() {
                self.paths.remove(path);
                if let Some(watch) = &mut self.watch {
                    watch.unwatch(path);
                }
            }
        }
    }
}

async fn next_change(watch: &mut Option<FileWatch>) -> io::Result<Changed> {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

async fn wait_until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// Whether there is no file, or nothing in it.
fn is_absent(error: &FileError) -> bool {
    match error {
        FileError::Unreadable { source, .. } => source.kind() == io::ErrorKind::NotFound,
        FileError::NoCertificate { bytes, .. } | FileError::NoKey { bytes, .. } => *bytes == 0,
        _ => false,
    }
}
