//! Reads files when they are wanted first, when they change, and now and then.
//!
//! A change is looked at after a rest, as a key follows its certificate. Watches can miss something
//! (a network file system, a directory moved as a whole, too few watches), so every file is read
//! again once a minute, and every few seconds those that could not be watched. Without secrets from
//! files nothing here wakes up. Paths are followed and files read beside the runtime's thread, several
//! at a time: a file system that hangs holds up nobody else.
//!
//! Does not decide who wants what.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::metrics::Metrics;
use super::slots::Slots;
use super::source::{Content, FileError, Source};
use super::table::Shared;
use super::{Found, Secret};
use crate::clock::{Clock, rfc3339};
use crate::file_watch::{Changed, FileWatch, Walked, Walker};

/// How often files are read whatever the watches say.
const POLL: Duration = Duration::from_secs(60);

/// The same for those that could not be watched.
const POLL_UNWATCHED: Duration = Duration::from_secs(5);

/// What a source holds, and where its paths led.
struct Read {
    source: Source,
    content: Result<Content, FileError>,
    /// None if there was no watch.
    walked: Option<Vec<Walked>>,
}

#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    clock: Clock,
    debounce: Duration,
    metrics: Metrics,
    watch: Option<FileWatch>,
    /// Sources of which not every path is watched.
    unwatched: HashSet<Source>,
    poll_unwatched_at: Instant,
    /// The sources each path is part of.
    paths: HashMap<PathBuf, HashSet<Source>>,
    queue: VecDeque<Source>,
    queued: HashSet<Source>,
    reading: Slots,
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
            unwatched: HashSet::new(),
            poll_unwatched_at: Instant::now(),
            paths: HashMap::new(),
            queue: VecDeque::new(),
            queued: HashSet::new(),
            reading: Slots::default(),
            again: HashSet::new(),
            reads: JoinSet::new(),
            changed: HashSet::new(),
            look_at: None,
            poll_at: Instant::now() + POLL,
            problems: HashMap::new(),
        };
        match FileWatch::new() {
            Ok(watch) => keeper.watch = Some(watch),
            Err(error) => keeper.watch_lost(&error),
        }
        keeper
    }

    /// A keeper that must do without watches.
    #[cfg(test)]
    pub(super) fn unwatched(shared: Arc<Shared>, metrics: Metrics) -> Self {
        let mut keeper = Self::new(shared, Clock::system(), Duration::ZERO, metrics);
        keeper.watch_lost(&io::Error::other("told to"));
        keeper
    }

    #[cfg(test)]
    pub(super) fn is_watching(&self) -> bool {
        self.watch.is_some()
    }

    /// Reads a source that stays, now.
    pub(super) fn pin(&mut self, source: Source, is_optional: bool) {
        self.note_paths(&source);
        self.shared.pin(source.clone(), Found::Pending, is_optional);
        let walkers = self.walkers(&source);
        self.take(Read::of(source, walkers));
    }

    pub(super) async fn run(mut self) {
        loop {
            let fresh = self.shared.fresh();
            fresh.into_iter().for_each(|source| self.enqueue(source));
            self.start_reads();
            let (look_at, is_polled) = (self.look_at, self.shared.is_polled());
            let slow_at = self.reading.slow_at();
            tokio::select! {
                () = self.shared.wanted.notified() => self.begin_polling(),
                Some(read) = self.reads.join_next() => self.finish(read),
                changed = next_change(&mut self.watch) => self.note(changed),
                () = wait_until(look_at) => self.look(),
                () = wait_until(slow_at) => self.reading.note_slow(),
                () = tokio::time::sleep_until(self.poll_at), if is_polled => self.poll(),
                () = tokio::time::sleep_until(self.poll_unwatched_at),
                    if !self.unwatched.is_empty() => self.poll_unwatched(),
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

    fn start_reads(&mut self) {
        while self.reading.has_room()
            && let Some(source) = self.queue.pop_front()
        {
            self.queued.remove(&source);
            self.note_paths(&source);
            self.reading.begin(source.clone());
            let walkers = self.walkers(&source);
            self.reads.spawn_blocking(move || Read::of(source, walkers));
        }
    }

    /// One for each path.
    fn walkers(&self, source: &Source) -> Option<Vec<Walker>> {
        let watch = self.watch.as_ref()?;
        Some(source.paths().map(|_| watch.walker()).collect())
    }

    fn note_paths(&mut self, source: &Source) {
        for path in source.paths() {
            let sources = self.paths.entry(path.to_owned()).or_default();
            if sources.insert(source.clone()) {
                tracing::info!(
                    target: "cache",
                    "adding watcher for file certificate {}",
                    path.display()
                );
            }
        }
    }

    /// Nothing is watched any more, until that is tried again with the next poll.
    fn watch_lost(&mut self, error: &io::Error) {
        self.watch = None;
        self.metrics.watcher_failures.inc();
        log_unwatched("all files", error);
        let sources: Vec<_> = self.paths.values().flatten().cloned().collect();
        sources
            .into_iter()
            .for_each(|source| self.leave_unwatched(source));
    }

    fn leave_unwatched(&mut self, source: Source) {
        if self.unwatched.is_empty() {
            self.poll_unwatched_at = Instant::now() + POLL_UNWATCHED;
        }
        self.unwatched.insert(source);
    }

    /// Watches the paths of a source where they led.
    fn take_watches(&mut self, source: &Source, walked: Option<Vec<Walked>>) {
        let (Some(watch), Some(walked)) = (&mut self.watch, walked) else {
            return self.leave_unwatched(source.clone());
        };
        let (mut outcome, mut changed) = (Ok(()), BTreeSet::new());
        for walked in walked {
            outcome = outcome.and(watch.take(walked, &mut changed));
        }
        match outcome {
            Ok(()) => {
                self.unwatched.remove(source);
            }
            Err(error) => {
                if !self.unwatched.contains(source) {
                    self.metrics.watcher_failures.inc();
                    log_unwatched(source, &error);
                }
                self.leave_unwatched(source.clone());
            }
        }
        if !changed.is_empty() {
            self.note(Ok(Changed::Paths(changed)));
        }
    }

    fn finish(&mut self, read: Result<Read, JoinError>) {
        let read = match read {
            Ok(read) => read,
            Err(error) => {
                // Reading does not panic; if it did, the source stays as it is until the poll.
                tracing::error!(target: "cache", "reading a file ended early: {error}");
                self.reading.clear();
                return;
            }
        };
        self.reading.end(&read.source);
        if self.again.remove(&read.source) {
            self.enqueue(read.source.clone());
        }
        self.take(read);
    }

    fn take(&mut self, read: Read) {
        let source = read.source;
        self.take_watches(&source, read.walked);
        if !self.shared.holds(&source) {
            // It was forgotten while it was read.
            return self.forget(&source);
        }
        match read.content {
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
            Err(error) => return self.watch_lost(&error),
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
        self.poll_at = Instant::now() + POLL;
        for source in self.shared.sweep() {
            self.forget(&source);
        }
        for source in self.shared.sources() {
            self.enqueue(source);
        }
    }

    /// Each read tries to watch as well.
    pub(super) fn poll_unwatched(&mut self) {
        self.poll_unwatched_at = Instant::now() + POLL_UNWATCHED;
        if self.watch.is_none() {
            self.watch = FileWatch::new().ok();
        }
        for source in self.unwatched.clone() {
            self.enqueue(source);
        }
    }

    fn forget(&mut self, source: &Source) {
        self.problems.remove(source);
        self.unwatched.remove(source);
        self.metrics.dropped(source);
        for path in source.paths() {
            if let Some(sources) = self.paths.get_mut(path) {
                sources.remove(source);
                if !sources.is_empty() {
                    continue;
                }
            }
            self.paths.remove(path);
            if let Some(watch) = &mut self.watch {
                watch.unwatch(path);
            }
        }
    }
}

impl Read {
    /// A file is watched before it is read, so that no change falls in between.
    fn of(source: Source, walkers: Option<Vec<Walker>>) -> Self {
        let walked = walkers.map(|walkers| {
            let ways = walkers.into_iter().zip(source.paths());
            ways.map(|(walker, path)| walker.walk(path)).collect()
        });
        Self {
            content: source.read(),
            source,
            walked,
        }
    }
}

fn log_unwatched(what: impl Display, error: &io::Error) {
    tracing::error!(
        target: "cache",
        "certificate watch error: {error}; {what}: read every {POLL_UNWATCHED:?} instead"
    );
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
pub(super) fn is_absent(error: &FileError) -> bool {
    match error {
        FileError::Unreadable { source, .. } => source.kind() == io::ErrorKind::NotFound,
        FileError::NoCertificate { bytes, .. } | FileError::NoKey { bytes, .. } => *bytes == 0,
        _ => false,
    }
}
