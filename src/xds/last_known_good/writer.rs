//! Writes what Envoy has accepted on the newest stream to disk, every few seconds.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::after_nack::{Missing, PATIENCE};
use super::file::{Header, MAX_CHANGED, TypeFile, temporary};
use super::{BY_NAME, Config, DIRECTORY, NEEDED, Shared, TYPES, Type};
use crate::clock::{after, later};
use crate::directory::Directory;
use crate::xds::response::Received;

/// The most bytes in memory: of responses that wait for their ACK, and with those that wait to be written.
const MAX_UNANSWERED: usize = 2 << 20;
const MAX_HELD: usize = 3 << 20;

/// How long changes wait to be written, together.
const DELAY: Duration = Duration::from_secs(5);

/// How often files say that they are current, without changes.
const REFRESH: Duration = Duration::from_secs(3600);

/// The reason for a resource that a stored one needs.
const NOT_SENT: &str = "istiod has not sent it within 5 s";

pub(super) const OTHER_NODE: &str = "it is stored for another node";

/// An error with the file of the type that it is about, or with the directory.
pub(super) fn named(config: &Config, type_url: Type, error: impl std::fmt::Display) -> io::Error {
    let path = config
        .volume
        .directory
        .join(DIRECTORY)
        .join(file_name(type_url));
    io::Error::other(format!("{}: {error}", path.display()))
}

/// What a stream has to tell the writer of a type.
#[derive(Debug)]
pub(super) enum WriteOp {
    /// The first request has come, of any type: of which node, of which generation its Envoy
    /// is, and where the stream is asked for stored versions.
    Begin(String, usize, mpsc::Sender<Missing>),
    /// The first request of the type has come: the digests of the names that Envoy holds.
    Subscribed(HashSet<u64>),
    /// Bytes of a response.
    Bytes(Bytes),
    /// A response has passed; whether it is all there is of its type, whatever Envoy holds.
    Complete(Received, bool),
    /// Envoy has answered the response of this nonce, and says why if it has refused it.
    Answered(String, Option<String>),
    /// Envoy has subscribed to names and unsubscribed from others, of a type that it asks for by name.
    Changed(Vec<u64>, Vec<u64>),
    /// The stream has looked for stored versions of these resources.
    LookedUp(Vec<u64>),
    /// The stream has ended.
    End,
}

/// A stream, and what it has to tell of which types.
pub(super) type Batch = (u32, Vec<(Type, WriteOp)>);

/// Opens the file of a type, and reads what counts of it.
pub(super) fn open(directory: &Directory, type_url: Type) -> io::Result<(File, Header)> {
    let file = directory.private_file(file_name(type_url))?;
    let header = Header::read(&file)?;
    Ok((file, header))
}

pub(super) fn file_name(type_url: Type) -> &'static str {
    type_url.rsplit('.').next().unwrap_or(type_url)
}

/// The thread's state.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    /// Of the newest Envoy that has begun a stream.
    generation: usize,
    /// The stream that is recorded, or was last.
    stream: Option<u32>,
    /// None if it cannot be used.
    pub(super) directory: Option<Directory>,
    pub(super) files: BTreeMap<Type, TypeFile>,
    /// When files were last said to be current, if istiod has answered on the stream, which is open.
    refreshed: Option<Instant>,
    /// When changes began to wait.
    changed: Option<Instant>,
    /// Where the stream is asked for stored versions.
    missing: Option<mpsc::Sender<Missing>>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            generation: 0,
            stream: None,
            directory: None,
            files: BTreeMap::new(),
            refreshed: None,
            changed: None,
            missing: None,
        }
    }

    /// When files are to be written.
    pub(super) fn due(&self) -> Option<Instant> {
        let refresh = self.refreshed.map(|at| later(at, REFRESH));
        let changed = self.changed.map(|at| later(at, DELAY));
        let missing = self.files.values().filter_map(TypeFile::missing_due);
        refresh.into_iter().chain(changed).chain(missing).min()
    }

    /// Asks the stream for the stored versions of resources of which Envoy may have no version.
    fn ask(&mut self) {
        let files = self.files.iter_mut();
        let missing = files.filter_map(|(type_url, file)| file.due_missing(type_url));
        if let Some(stream) = &self.missing {
            // Without room they are asked for again later.
            missing.for_each(|missing| _ = stream.try_send(missing));
        }
    }

    pub(super) fn take(&mut self, (stream, ops): Batch) {
        if self.shared.is_stalled.swap(false, Ordering::Relaxed) {
            self.fail("", "the disk is too slow");
        }
        for (type_url, op) in ops {
            let applied = self.apply(stream, type_url, op);
            // Stored resources may need others, which istiod has not sent.
            if self.files.values().any(|file| !file.missing.is_empty()) {
                let files = self.files.iter_mut();
                let by_name = files.filter(|(type_url, _)| BY_NAME.contains(type_url));
                by_name.for_each(|(_, file)| file.retain_all());
            }
            if let Err(error) = applied.and_then(|()| self.bound(type_url)) {
                self.fail(type_url, error);
            }
        }
        self.ask();
        let waits = self.files.values().any(|file| file.is_changed);
        self.changed = waits.then(|| self.changed.unwrap_or_else(Instant::now));
    }

    /// Writes what has changed, and at most once in a while what is only current still.
    pub(super) fn write(&mut self, is_refresh: bool) {
        let refreshed = self.refreshed;
        let is_refresh = refreshed.is_some_and(|at| is_refresh || at.elapsed() >= REFRESH);
        if is_refresh {
            self.refreshed = Some(Instant::now());
        }
        self.changed = None;
        let Some(directory) = &self.directory else {
            return;
        };
        let due = |(_, file): &(&Type, &mut TypeFile)| {
            file.is_changed || is_refresh && file.is_subscribed
        };
        let mut due = self.files.iter_mut().filter(due);
        let failed = due.find_map(|(of, file)| Some((*of, file.commit(directory).err()?)));
        match failed {
            Some((type_url, error)) => self.fail(type_url, error),
            None => self.publish(),
        }
    }

    fn apply(&mut self, stream: u32, type_url: Type, op: WriteOp) -> io::Result<()> {
        let is_recorded = self.stream == Some(stream);
        let file = self.files.get_mut(type_url).filter(|_| is_recorded);
        match (op, file.zip(self.directory.as_ref())) {
            (WriteOp::Begin(identity, generation, missing), _) => {
                self.begin(stream, &identity, generation, missing)
            }
            (WriteOp::End, _) => {
                if is_recorded {
                    self.write(true);
                    self.refreshed = None;
                }
                Ok(())
            }
            // Of an older Envoy, which drains after a hot restart, or one that could not be kept.
            (_, None) => Ok(()),
            (WriteOp::Subscribed(mut held), Some((file, _))) => {
                // Envoy does not name what it has refused, whichever version it has.
                held.extend(file.missing.keys());
                (file.held, file.is_subscribed) = (Some(held), true);
                Ok(())
            }
            (WriteOp::Bytes(bytes), Some((file, _))) => {
                file.passes(bytes);
                Ok(())
            }
            (WriteOp::Complete(response, is_all), Some((file, _))) => {
                self.refreshed.get_or_insert_with(Instant::now);
                file.passed(response, is_all)
            }
            (WriteOp::Answered(nonce, refusal), Some((file, directory))) => {
                let answered = file.answered(directory, &nonce, refusal.as_deref());
                let is_of_envoy = NEEDED.contains(&type_url) || BY_NAME.contains(&type_url);
                if self.shared.admin.is_none() || !is_of_envoy {
                    file.missing.clear();
                }
                self.shared.end_after_nack(type_url, file);
                answered
            }
            (WriteOp::Changed(names, unsubscribed), Some((file, _))) => {
                let reason = Arc::from(NOT_SENT);
                file.subscribed(&names, &unsubscribed, &reason);
                self.shared.end_after_nack(type_url, file);
                Ok(())
            }
            (WriteOp::LookedUp(names), Some((file, _))) => {
                for name in names {
                    if let Some(missing) = file.missing.get_mut(&name) {
                        missing.due = None;
                    }
                }
                Ok(())
            }
        }
    }

    /// Has no more in memory than may be, and deletes all if the disk would hold too much.
    fn bound(&mut self, type_url: Type) -> io::Result<()> {
        let files = || self.files.values();
        let held: usize = files().map(TypeFile::held).sum();
        let changed: usize = files().map(|file| file.changed).sum();
        // The largest is there twice while it is replaced.
        let largest = files().map(|file| file.header.length).max();
        let size = files().map(TypeFile::size).sum::<u64>() + largest.unwrap_or_default();
        let most = self.shared.config.max_bytes;
        if size > most {
            tracing::info!(
                target: "xdsproxy",
                "configuration is not stored: it needs more than {most} bytes (ISTIO_AGENT_KEEP_CONFIG_MAX_BYTES)"
            );
            self.delete();
        }
        if changed > MAX_CHANGED || changed > 0 && held + changed > MAX_HELD {
            self.write(false);
        }
        match self.files.get_mut(type_url).zip(self.directory.as_ref()) {
            Some((file, directory)) if held > MAX_UNANSWERED => file.spill(directory),
            _ => Ok(()),
        }
    }

    /// Records a stream, unless a newer Envoy has had one. What is kept for another node, or cannot be
    /// used, is removed.
    fn begin(
        &mut self,
        stream: u32,
        identity: &str,
        generation: usize,
        missing: mpsc::Sender<Missing>,
    ) -> io::Result<()> {
        if generation < self.generation {
            return Ok(());
        }
        self.write(false);
        let mut before = std::mem::take(&mut self.files);
        if generation > self.generation {
            before.clear();
            self.shared.after_nack.lock().clear();
        }
        self.generation = generation;
        self.missing = Some(missing);
        self.refreshed = None;
        let directory = Directory::private(&self.shared.config.volume.directory, DIRECTORY, true)?;
        let directory = self.directory.insert(directory);
        for type_url in TYPES {
            let name = file_name(type_url);
            directory.remove_file(&temporary(name))?;
            let found = match open(directory, type_url) {
                Ok(found) if found.1.identity == identity => Some(found),
                found => {
                    let why = match found {
                        Ok(_) => Some(OTHER_NODE.to_owned()),
                        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                        Err(error) => {
                            self.shared.failures.inc();
                            Some(error.to_string())
                        }
                    };
                    if let Some(why) = why {
                        let why = named(&self.shared.config, type_url, why);
                        tracing::error!(target: "xdsproxy", "removing stored configuration: {why}");
                    }
                    directory.remove_file(name)?;
                    None
                }
            };
            let mut file = TypeFile::new(name, found, identity);
            let missing = before.remove(type_url).map(|before| before.missing);
            file.missing = missing.unwrap_or_default();
            // istiod may send them first on this stream.
            let due = file.missing.values_mut().filter_map(|it| it.due.as_mut());
            due.for_each(|due| *due = after(PATIENCE));
            self.files.insert(type_url, file);
        }
        self.stream = Some(stream);
        self.publish();
        Ok(())
    }

    fn publish(&self) {
        let kept = self.files.iter().filter(|(_, file)| file.file.is_some());
        let headers = kept.map(|(type_url, file)| (*type_url, file.header.clone()));
        *self.shared.types.lock() = headers.collect();
    }

    /// Ends the recording and deletes all that is kept, as Envoy may soon have nothing of it any more.
    fn fail(&mut self, type_url: Type, error: impl std::fmt::Display) {
        self.shared.failures.inc();
        let error = named(&self.shared.config, type_url, error);
        tracing::error!(
            target: "xdsproxy",
            "cannot store configuration in {error}; an Envoy that starts while istiod is unreachable will get none"
        );
        self.delete();
    }

    fn delete(&mut self) {
        if let Some(directory) = self.directory.take() {
            for name in TYPES.map(file_name) {
                let _ = directory.remove_file(name); // Else the last that counts stays.
                let _ = directory.remove_file(&temporary(name));
            }
        }
        (self.stream, self.refreshed) = (None, None);
        self.files.clear();
        self.shared.after_nack.lock().clear();
        self.publish();
    }
}
