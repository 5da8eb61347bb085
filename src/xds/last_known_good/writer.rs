//! Writes what passes on the newest stream to disk, on a thread of its own.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::file::{Header, TypeFile, temporary};
use super::{Config, DIRECTORY, Shared, TYPES, Type};
use crate::directory::Directory;
use crate::xds::response::Received;

/// The most bytes kept, responses that wait for their ACK included.
const MAX_BYTES: u64 = 1 << 30;
/// The most bytes of responses in memory.
const MAX_HELD: usize = 2 << 20;

pub(super) const OTHER_NODE: &str = "it is stored for another node";

/// An error with the file of the type that it is about, or with the directory.
pub(super) fn named(config: &Config, type_url: Type, error: impl std::fmt::Display) -> io::Error {
    let path = config.directory.join(DIRECTORY).join(file_name(type_url));
    io::Error::other(format!("{}: {error}", path.display()))
}

/// What a stream has to tell the writer of a type.
#[derive(Debug)]
pub(super) enum WriteOp {
    /// The first request has come, of any type: of which node, and of which generation its Envoy is.
    Begin(String, usize),
    /// The first request of the type has come: the digests of the names that Envoy holds.
    Subscribed(HashSet<u64>),
    /// Bytes of a response.
    Bytes(Bytes),
    /// A response has passed; whether it is all there is of its type, whatever Envoy holds.
    Complete(Received, bool),
    /// Envoy has answered the response of this nonce, and accepted it or not.
    Answered(String, bool),
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
    directory: Option<Directory>,
    pub(super) files: BTreeMap<Type, TypeFile>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            generation: 0,
            stream: None,
            directory: None,
            files: BTreeMap::new(),
        }
    }

    pub(super) fn take(&mut self, (stream, ops): Batch) {
        if self.shared.is_stalled.swap(false, Ordering::Relaxed) {
            self.fail("", "the disk is too slow");
        }
        for (type_url, op) in ops {
            if let Err(error) = self.apply(stream, type_url, op) {
                self.fail(type_url, error);
            }
        }
    }

    fn apply(&mut self, stream: u32, type_url: Type, op: WriteOp) -> io::Result<()> {
        let is_recorded = self.stream == Some(stream);
        let size = self.files.values().map(TypeFile::size).sum::<u64>();
        let held = self.files.values().map(TypeFile::held).sum::<usize>();
        let file = self.files.get_mut(type_url).filter(|_| is_recorded);
        match (op, file.zip(self.directory.as_ref())) {
            (WriteOp::Begin(identity, generation), _) => self.begin(stream, &identity, generation),
            // Of an older Envoy, which drains after a hot restart, or one that could not be kept.
            (_, None) => Ok(()),
            (WriteOp::Subscribed(held), Some((file, _))) => {
                file.held = Some(held);
                Ok(())
            }
            (WriteOp::Bytes(bytes), Some(_)) if size + bytes.len() as u64 > MAX_BYTES => {
                let problem = format!("more than {MAX_BYTES} bytes would be stored");
                Err(io::Error::other(problem))
            }
            (WriteOp::Bytes(bytes), Some((file, directory))) => {
                let is_large = held + bytes.len() > MAX_HELD;
                file.passes(bytes);
                if is_large {
                    file.spill(directory)
                } else {
                    Ok(())
                }
            }
            (WriteOp::Complete(response, is_all), Some((file, _))) => file.passed(response, is_all),
            (WriteOp::Answered(nonce, is_accepted), Some((file, directory))) => {
                file.answered(directory, &nonce, is_accepted)?;
                self.publish();
                Ok(())
            }
        }
    }

    /// Records a stream, unless a newer Envoy has had one. What is kept for another node, or cannot be
    /// used, is removed.
    fn begin(&mut self, stream: u32, identity: &str, generation: usize) -> io::Result<()> {
        if generation < self.generation {
            return Ok(());
        }
        self.generation = generation;
        self.files.clear();
        let directory = Directory::private(&self.shared.config.directory, DIRECTORY, true)?;
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
            let file = TypeFile::new(name, found, identity);
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
        if let Some(directory) = self.directory.take() {
            for type_url in TYPES {
                let _ = directory.remove_file(file_name(type_url)); // Else the last that counts stays.
            }
        }
        self.stream = None;
        self.files.clear();
        self.publish();
    }
}
