//! Writes what passes on the newest stream to disk, on a thread of its own.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::fs::fstatvfs;
use tokio::sync::mpsc;

use super::file::{Header, TypeFile};
use super::{DIRECTORY, Status, TYPES, Type};
use crate::directory::Directory;
use crate::xds::Protocol;
use crate::xds::response::Received;

/// The most bytes kept, responses that wait for their ACK included.
pub(super) const MAX_BYTES: u64 = 1 << 30;

/// What is left free of the file system.
const MIN_FREE: u64 = 64 << 20;

/// What a stream has to tell the writer of a type.
#[derive(Debug)]
pub(super) enum WriteOp {
    /// The first request has come, of any type.
    Begin(StreamInfo),
    /// Bytes of a response.
    Bytes(Bytes),
    Complete(Received, Coverage),
    Answered {
        nonce: String,
        is_accepted: bool,
    },
    /// Others have found no room.
    Lost,
    /// The stream has ended, for all types.
    End,
}

/// A stream, and what it has to tell of which types.
pub(super) type Batch = (u32, Vec<(Type, WriteOp)>);

/// The Envoy that a stream is of.
#[derive(Debug)]
pub(super) struct StreamInfo {
    pub(super) protocol: Protocol,
    /// Of its node.
    pub(super) identity: String,
    /// Larger for an Envoy that was started later.
    pub(super) generation: u64,
}

/// What a response holds of the resources of its type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Coverage {
    /// All. It takes the place of what is kept.
    All,
    /// The first of a stream: in SotW what istiod has so far of what was asked for, in delta as much as
    /// Envoy holds. It is kept where nothing is, else added.
    Initial,
    /// What has changed. It is added to what is kept; alone it is not kept.
    Part,
}

/// Opens the file of a type, and reads what counts of it.
pub(super) fn open(directory: &Directory, type_url: Type) -> io::Result<(File, Header)> {
    let name = file_name(type_url);
    let file = directory.private_file(name)?;
    match Header::read(&file) {
        Ok(header) => Ok((file, header)),
        Err(error) => Err(io::Error::other(format!("file {name}: {error}"))),
    }
}

fn file_name(type_url: Type) -> &'static str {
    type_url.rsplit('.').next().unwrap_or(type_url)
}

/// Fails if nothing can be kept below `parent`. Changes nothing.
pub(crate) fn check(parent: &Path) -> io::Result<()> {
    match Directory::private(parent, DIRECTORY, false) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => has_space(&Directory::open(parent)?, 0),
    }
}

/// Fails if there is no space for so many bytes.
pub(super) fn has_space(directory: &Directory, bytes: u64) -> io::Result<()> {
    let found = fstatvfs(directory)?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free >= MIN_FREE + bytes {
        return Ok(());
    }
    let problem = format!("{free} bytes are free, expected at least {MIN_FREE}");
    Err(io::Error::new(io::ErrorKind::StorageFull, problem))
}

/// The thread's state.
#[derive(Debug)]
pub(super) struct Writer {
    parent: PathBuf,
    pub(super) status: Status,
    /// The stream that is recorded, or was last, and whether it has ended.
    stream: Option<(u32, StreamInfo)>,
    is_ended: bool,
    /// None if it could not be opened when the stream began.
    directory: Option<Directory>,
    files: BTreeMap<Type, TypeFile>,
    /// The type of a response that passes and could not be written.
    failed: Option<Type>,
}

impl Writer {
    pub(super) fn new(parent: PathBuf, status: Status) -> Self {
        Self {
            parent,
            status,
            stream: None,
            is_ended: false,
            directory: None,
            files: BTreeMap::new(),
            failed: None,
        }
    }

    /// Runs until all senders are gone.
    pub(super) fn run(mut self, mut batches: mpsc::Receiver<Batch>, ended: &Mutex<Vec<Batch>>) {
        while let Some(batch) = batches.blocking_recv() {
            self.take(batch);
            // What a stream said before its end counts.
            if batches.is_empty() {
                let ended = std::mem::take(&mut *ended.lock());
                ended.into_iter().for_each(|batch| self.take(batch));
            }
        }
    }

    pub(super) fn take(&mut self, (stream, ops): Batch) {
        for (type_url, op) in ops {
            if let Err(error) = self.apply(stream, type_url, op) {
                self.lose(type_url, &error);
            }
        }
    }

    fn apply(&mut self, stream: u32, type_url: Type, op: WriteOp) -> io::Result<()> {
        let is_recorded = matches!(&self.stream, Some((recorded, _)) if *recorded == stream);
        let has_failed = self.failed == Some(type_url);
        let file = self.files.get_mut(type_url);
        match op {
            WriteOp::Begin(info) => return self.begin(stream, info),
            // Of an older Envoy, which drains after a hot restart.
            _ if !is_recorded => {}
            WriteOp::Bytes(_) if has_failed => {}
            WriteOp::Bytes(bytes) => {
                let written = self.write(type_url, &bytes);
                return written.inspect_err(|_| self.failed = Some(type_url));
            }
            WriteOp::Complete(..) if has_failed => self.failed = None,
            WriteOp::Complete(response, coverage) => {
                return file.map_or(Ok(()), |file| file.passed(response, coverage));
            }
            WriteOp::Answered { nonce, is_accepted } => {
                if let Some(position) = file.and_then(|file| file.position(&nonce)) {
                    return self.answered(type_url, position, is_accepted);
                }
            }
            WriteOp::Lost => {
                // What has passed so far is all there is of a response.
                file.into_iter().for_each(TypeFile::forget_pending);
                self.failed.take_if(|_| has_failed);
                return Err(io::Error::other("the disk is too slow"));
            }
            WriteOp::End => {
                self.is_ended = true;
                self.files.values_mut().for_each(TypeFile::forget_pending);
            }
        }
        Ok(())
    }

    fn publish(&self) {
        let counts = self.files.iter().filter(|(_, file)| file.header.length > 0);
        let headers = counts.map(|(type_url, file)| (*type_url, file.header.clone()));
        *self.status.types.lock() = headers.collect();
    }

    fn begin(&mut self, id: u32, stream: StreamInfo) -> io::Result<()> {
        if let Some((_, last)) = &self.stream
            && stream.generation < last.generation
            && !(self.is_ended && stream.identity == last.identity)
        {
            return Ok(());
        }
        let protocol = stream.protocol;
        *self = Self::new(self.parent.clone(), self.status.clone());
        self.stream = Some((id, stream));
        let directory = Directory::private(&self.parent, DIRECTORY, true)?;
        let opened = TYPES.map(|type_url| (type_url, open(&directory, type_url)));
        self.directory = Some(directory);
        for (type_url, opened) in opened {
            match opened {
                Ok((file, header)) => {
                    let file = TypeFile::new(protocol, file, Some(header))?;
                    self.files.insert(type_url, file);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => self.lose(type_url, &error),
            }
        }
        self.publish();
        Ok(())
    }

    fn write(&mut self, type_url: Type, bytes: &[u8]) -> io::Result<()> {
        let (Some(directory), Some((_, stream))) = (&self.directory, &self.stream) else {
            return Ok(());
        };
        let kept: u64 = self.files.values().map(TypeFile::size).sum();
        if kept + bytes.len() as u64 > MAX_BYTES {
            let problem = format!("over {MAX_BYTES} bytes would be kept");
            return Err(io::Error::other(problem));
        }
        has_space(directory, bytes.len() as u64)?;
        let file = match self.files.entry(type_url) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => {
                let file = directory.create_file(file_name(type_url))?;
                place.insert(TypeFile::new(stream.protocol, file, None)?)
            }
        };
        file.write(bytes)
    }

    /// Lets the responses of a type count, or not.
    fn answered(&mut self, type_url: Type, position: usize, is_accepted: bool) -> io::Result<()> {
        if let Some((_, stream)) = self.stream.as_ref().filter(|_| is_accepted) {
            let mut files = self.files.values_mut();
            files.try_for_each(|file| file.take_over(&stream.identity))?;
        }
        if let Some(file) = self.files.get_mut(type_url) {
            file.answered(position, is_accepted)?;
            self.status.is_failing.store(false, Ordering::Relaxed);
            // Places in the file that are being served stay as they are.
            if self.status.reading.try_write().is_some() {
                file.punch_hole();
            }
        }
        self.publish();
        Ok(())
    }

    /// Keeps nothing of a type. The rest of a response that passes does not count.
    fn lose(&mut self, type_url: Type, error: &io::Error) {
        self.status.give_up(&self.parent, type_url, error);
        let file = self.files.remove(type_url);
        if file.is_some_and(|file| file.is_passing()) {
            self.failed = Some(type_url);
        }
        if let Some(directory) = &self.directory {
            let _ = directory.remove_file(file_name(type_url)); // Else the last that counts stays.
        }
        self.publish();
    }
}
