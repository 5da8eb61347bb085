//! The file of a type, and the responses that change it.
//!
//! A file has a [`Header`] of fixed size, and then fields of discovery responses: resources, and names of
//! removed ones. Together they are a message as well, in which a later resource replaces an earlier one of
//! the same name, as in Envoy. The header says how many bytes count. It is written in one page when all of
//! them are in the file, so that a kill leaves the state before or the state after. A file that has twice
//! its size is replaced by one with the resources in force.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;

use bytes::Bytes;
use crc32fast::Hasher;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::Type;
use super::after_nack::{Missing, PATIENCE};
use crate::clock::after;
use crate::directory::Directory;
use crate::xds::observe::{now, unix_seconds};
use crate::xds::request::shortened;
use crate::xds::response::Received;
use crate::xds::wire::{Walker, digest};

/// How much is copied at once.
pub(super) const BLOCK: usize = 64 * 1024;

/// Bytes of the header: a checksum, JSON and spaces.
const HEADER: u64 = 4096;
const SUM: usize = size_of::<u32>();

/// How many responses may wait for their ACK.
const MAX_UNANSWERED: usize = 64;

/// Bytes of accepted fields that wait to be written.
pub(super) const MAX_CHANGED: usize = 2 << 20;

/// Before the names in Envoy's reason if it has refused single resources, and applied the others. Names
/// and their reasons are separated by commas or lines.
const REFUSED: [&str; 2] = [
    "Error adding/updating cluster(s) ",
    "Error adding/updating listener(s) ",
];
/// Ends a reason that Envoy has cut.
const CUT: &str = "(truncated)";

/// What counts of a file. One of another form, with other members, is not used.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Header {
    /// Of the node whose Envoy has accepted it.
    pub(super) identity: String,
    /// Of the last response.
    pub(super) version: String,
    /// When istiod's stream was last open, in seconds of Unix time.
    pub(super) current: u64,
    /// The same for the resources that Envoy has refused since; None if there are none.
    refused: Option<u64>,
    /// Bytes of the fields.
    pub(super) length: u64,
    crc: u32,
    /// Bytes of the fields when the file was new.
    first: u64,
}

impl Header {
    pub(super) fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; HEADER as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let (sum, json) = bytes.split_at(SUM);
        match sum == crc32fast::hash(json).to_be_bytes() {
            true => Ok(serde_json::from_slice(json)?),
            false => Err(io::Error::other("the checksum of its header is wrong")),
        }
    }

    /// Returns when resources that Envoy lacks were last current, in seconds of Unix time.
    pub(super) fn missing_current(&self) -> u64 {
        self.refused.unwrap_or(self.current)
    }

    fn write(&self, file: &File) -> io::Result<()> {
        if file.metadata()?.nlink() == 0 {
            return Err(io::Error::other("the file has been removed"));
        }
        let mut bytes = vec![0; SUM];
        serde_json::to_writer(&mut bytes, self)?;
        if bytes.len() as u64 > HEADER {
            return Err(io::Error::other("the version is too long"));
        }
        bytes.resize(HEADER as usize, b' ');
        let sum = crc32fast::hash(&bytes[SUM..]).to_be_bytes();
        bytes[..SUM].copy_from_slice(&sum);
        file.write_all_at(&bytes, 0)
    }

    /// Writes bytes behind those that count. They count once the header is written.
    fn append(&mut self, file: &File, bytes: &[u8]) -> io::Result<()> {
        file.write_all_at(bytes, HEADER + self.length)?;
        let mut crc = Hasher::new_with_initial_len(self.crc, self.length);
        crc.update(bytes);
        self.crc = crc.finalize();
        self.length += bytes.len() as u64;
        Ok(())
    }
}

/// A response, or the beginning of one, that Envoy has not answered.
#[derive(Debug, Default)]
struct Message {
    /// All before what is in memory.
    spilled: Option<File>,
    pieces: Vec<Bytes>,
    /// Bytes in memory.
    held: usize,
    length: u64,
}

impl Message {
    /// Reads the fields, with the digests of their names and whether they remove a resource.
    fn fields(
        &self,
        mut each: impl FnMut(u64, bool, Box<[u8]>) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut walker, mut found) = (Walker::of_names(self.length), Vec::new());
        // What is behind the last field that was found.
        let (mut rest, mut at) = (Vec::new(), 0);
        let mut read = |bytes: &[u8]| {
            let walked = walker.find(bytes, |it| found.push(it));
            walked.map_err(io::Error::other)?;
            let mut taken = 0;
            for field in found.drain(..) {
                let end = (field.place.end - at) as usize;
                rest.extend_from_slice(&bytes[taken..end]);
                taken = end;
                let length = (field.place.end - field.place.start) as usize;
                rest.drain(..rest.len() - length);
                each(
                    field.name,
                    field.is_removed,
                    std::mem::take(&mut rest).into(),
                )?;
            }
            rest.extend_from_slice(&bytes[taken..]);
            at += bytes.len() as u64;
            Ok(())
        };
        if let Some(file) = &self.spilled {
            let length = self.length - self.held as u64;
            blocks(file, 0..length, &mut read)?;
        }
        self.pieces.iter().try_for_each(|bytes| read(bytes))?;
        walker.finish().map(drop).map_err(io::Error::other)
    }
}

/// A resource of which Envoy may have no version.
#[derive(Clone, Debug)]
pub(super) struct MissingResource {
    /// When the stream is asked to send the stored version; None once it has looked for one.
    pub(super) due: Option<Instant>,
    pub(super) reason: Arc<str>,
}

/// The file of a type, and what is to be written to it.
#[derive(Debug, Default)]
pub(super) struct TypeFile {
    name: &'static str,
    /// None while nothing is kept.
    pub(super) file: Option<File>,
    /// The file that is to replace it.
    new: Option<File>,
    /// Of the file, or of the new one.
    pub(super) header: Header,
    /// Whether Envoy, or the agent, subscribes to the type on the stream.
    pub(super) is_subscribed: bool,
    /// What Envoy held when the stream began, until the first response.
    pub(super) held: Option<HashSet<u64>>,
    passing: Message,
    /// Those that have passed, and the resources before them that remain, if others do not.
    unanswered: VecDeque<(Received, Message, Option<HashSet<u64>>)>,
    /// The resources of the file that remain, if others do not.
    retained: Option<HashSet<u64>>,
    /// Accepted fields that are not in the file, by the digests of their names, and their bytes.
    changes: HashMap<u64, Box<[u8]>>,
    pub(super) changed: usize,
    /// Whether something waits to be written, if only a version.
    pub(super) is_changed: bool,
    /// How many responses Envoy has answered on the stream.
    answered: u32,
    /// Resources of which Envoy may have no version, by the digests of their names: it has refused them, or
    /// istiod has not sent them.
    pub(super) missing: HashMap<u64, MissingResource>,
}

impl TypeFile {
    /// Continues a file, or begins one.
    pub(super) fn new(name: &'static str, found: Option<(File, Header)>, identity: &str) -> Self {
        let (file, header) = found.unzip();
        let empty = || Header {
            identity: identity.to_owned(),
            ..Header::default()
        };
        Self {
            name,
            file,
            header: header.unwrap_or_else(empty),
            ..Self::default()
        }
    }

    fn messages(&self) -> impl Iterator<Item = &Message> {
        let unanswered = self.unanswered.iter().map(|(_, message, _)| message);
        unanswered.chain([&self.passing])
    }

    /// Bytes of responses in memory.
    pub(super) fn held(&self) -> usize {
        self.messages().map(|message| message.held).sum()
    }

    /// Bytes that count, or may from their ACK.
    pub(super) fn size(&self) -> u64 {
        let waiting: u64 = self.messages().map(|message| message.length).sum();
        self.header.length + self.changed as u64 + waiting
    }

    /// Takes bytes of the response that passes.
    pub(super) fn passes(&mut self, bytes: Bytes) {
        self.passing.length += bytes.len() as u64;
        self.passing.held += bytes.len();
        self.passing.pieces.push(bytes);
    }

    /// Moves what has passed of a response to a file without a name.
    pub(super) fn spill(&mut self, directory: &Directory) -> io::Result<()> {
        let message = &mut self.passing;
        if message.spilled.is_none() {
            let name = temporary(self.name);
            message.spilled = Some(directory.create_file(&name)?);
            directory.remove_file(&name)?;
        }
        if let Some(file) = &mut message.spilled {
            let mut pieces = message.pieces.drain(..);
            pieces.try_for_each(|bytes| file.write_all(&bytes))?;
        }
        message.held = 0;
        Ok(())
    }

    /// The response has passed, and waits for its ACK.
    pub(super) fn passed(&mut self, received: Received, is_all: bool) -> io::Result<()> {
        self.is_subscribed = true;
        let held = self.held.take();
        let retained = if is_all { Some(HashSet::new()) } else { held };
        let message = std::mem::take(&mut self.passing);
        self.unanswered.push_back((received, message, retained));
        match self.unanswered.len() {
            ..=MAX_UNANSWERED => Ok(()),
            _ => Err(io::Error::other("too many responses wait for their ACK")),
        }
    }

    /// Envoy has answered a response, which it does in their order, and says why if it has refused it.
    pub(super) fn answered(
        &mut self,
        directory: &Directory,
        nonce: &str,
        refusal: Option<&str>,
    ) -> io::Result<()> {
        let Some((received, message, mut retained)) = self.unanswered.pop_front() else {
            return Ok(());
        };
        if received.nonce != nonce {
            return Err(io::Error::other("Envoy has skipped the ACK of a response"));
        }
        self.answered += 1;
        // With less than Envoy held it is a part. Of a part alone, the rest is missing.
        let held = retained.as_ref().map(HashSet::len);
        let is_whole = held.is_some_and(|held| received.resources as usize >= held);
        if self.file.is_none() && !self.is_changed && !is_whole {
            return Ok(());
        }
        let mut fields = Vec::new();
        if refusal.is_some() || held.is_some_and(|held| held > 0) || !self.missing.is_empty() {
            message.fields(|name, is_removed, _| {
                fields.push((name, is_removed));
                Ok(())
            })?;
        }
        let named = refusal.map(named).unwrap_or_default();
        let names = fields.iter().map(|(name, _)| *name);
        let refused: HashSet<_> = names.filter(|name| named.contains(name)).collect();
        let is_refused = refusal.is_some() && refused.is_empty();
        let reason = refusal.map(|it| Arc::<str>::from(shortened(it)));
        for (name, is_removed) in &fields {
            match &reason {
                Some(reason) if refused.contains(name) || is_refused && !is_removed => {
                    let (due, reason) = (Some(Instant::now()), reason.clone());
                    self.missing.insert(*name, MissingResource { due, reason });
                }
                _ if is_refused => {}
                _ => _ = self.missing.remove(name),
            }
        }
        let refused_since = self.header.refused.unwrap_or(self.header.current);
        self.header.refused = (!self.missing.is_empty()).then_some(refused_since);
        if is_refused {
            return Ok(());
        }
        // What is replaced does not remain, and what is refused does.
        if let Some(retained) = &mut retained {
            fields
                .iter()
                .for_each(|(name, _)| _ = retained.remove(name));
        }
        if let Some(mut retained) = retained {
            retained.extend(&refused);
            self.changes.retain(|name, _| retained.contains(name));
            self.changed = self.changes.values().map(|it| it.len()).sum();
            if let Some(before) = &self.retained {
                retained.retain(|name| before.contains(name));
            }
            self.retained = Some(retained);
        }
        self.header.version = received.version;
        self.is_changed = true;
        let mut is_written = false;
        message.fields(|name, _, field| {
            if refused.contains(&name) {
                return Ok(());
            }
            self.changed += field.len();
            let before = self.changes.insert(name, field);
            self.changed -= before.map_or(0, |before| before.len());
            if self.changed < MAX_CHANGED {
                return Ok(());
            }
            is_written = true;
            self.append(directory)
        })?;
        if is_written {
            self.commit(directory)
        } else {
            Ok(())
        }
    }

    /// Lets the resources of the file remain, whatever the responses name that Envoy has not answered.
    pub(super) fn retain_all(&mut self) {
        if self.file.is_some() {
            (self.held, self.retained) = (None, None);
            let unanswered = self.unanswered.iter_mut();
            unanswered.for_each(|(_, _, retained)| *retained = None);
        }
    }

    /// Notes names that Envoy has subscribed to, and others from which it has unsubscribed.
    pub(super) fn subscribed(&mut self, names: &[u64], unsubscribed: &[u64], reason: &Arc<str>) {
        for name in unsubscribed {
            self.missing.remove(name);
        }
        for name in names {
            let missing = || MissingResource {
                due: Some(after(PATIENCE)),
                reason: reason.clone(),
            };
            self.missing.entry(*name).or_insert_with(missing);
        }
    }

    /// Returns when stored versions are to be looked for. Newer ones may be in responses that Envoy has not
    /// answered.
    pub(super) fn missing_due(&self) -> Option<Instant> {
        let is_quiet = self.unanswered.is_empty() && self.passing.length == 0;
        let due = self.missing.values().filter_map(|it| it.due).min();
        due.filter(|_| is_quiet)
    }

    /// Returns the resources whose stored versions are to be looked for now. They are due again later, unless
    /// the stream has looked for them.
    pub(super) fn due_missing(&mut self, type_url: Type) -> Option<Missing> {
        let now = Instant::now();
        self.missing_due().filter(|due| *due <= now)?;
        let due = self.missing.iter_mut();
        let due = due.filter(|(_, it)| it.due.is_some_and(|due| due <= now));
        let names = due.map(|(name, it)| {
            it.due = Some(after(PATIENCE));
            (*name, it.reason.clone())
        });
        Some(Missing {
            type_url,
            answered: self.answered,
            names: names.collect(),
        })
    }

    /// Lets the changes count.
    pub(super) fn commit(&mut self, directory: &Directory) -> io::Result<()> {
        if std::mem::take(&mut self.is_changed) {
            self.append(directory)?;
        }
        self.header.current = unix_seconds(now()) as u64;
        if let Some(new) = self.new.take() {
            self.header.first = self.header.length;
            self.header.write(&new)?;
            directory.rename(&temporary(self.name), self.name)?;
            self.file = Some(new);
        } else if let Some(file) = &self.file {
            self.header.write(file)?;
        }
        Ok(())
    }

    /// Writes changes behind what counts, to a new file if only some of before remain or at twice the size.
    fn append(&mut self, directory: &Directory) -> io::Result<()> {
        let most = self.header.first.saturating_mul(2) + BLOCK as u64;
        let length = self.header.length + self.changed as u64;
        let is_large = self.new.is_none() && length > most;
        if self.retained.is_some() || self.file.is_none() && self.new.is_none() || is_large {
            self.renew(directory)?;
        }
        let Some(file) = self.new.as_ref().or(self.file.as_ref()) else {
            return Ok(());
        };
        let mut block = Vec::with_capacity(BLOCK.min(self.changed));
        for (_, field) in std::mem::take(&mut self.changes) {
            if block.len() + field.len() > BLOCK {
                self.header.append(file, &block)?;
                block.clear();
            }
            block.extend_from_slice(&field);
        }
        self.changed = 0;
        self.header.append(file, &block)
    }

    /// Begins a new file with the resources that remain.
    fn renew(&mut self, directory: &Directory) -> io::Result<()> {
        let new = directory.create_file(&temporary(self.name))?;
        let header = Header {
            length: 0,
            crc: 0,
            ..self.header.clone()
        };
        let old = std::mem::replace(&mut self.header, header);
        let retained = self.retained.take();
        if let Some(file) = self.new.take().or(self.file.take())
            && retained.as_ref().is_none_or(|names| !names.is_empty())
        {
            let mut index = Index::read(&old, file)?;
            let places = index.resources.drain().filter(|(name, _)| {
                !self.changes.contains_key(name)
                    && retained.as_ref().is_none_or(|names| names.contains(name))
            });
            let places = places.map(|(_, place)| place).collect();
            index.copy(places, |block| self.header.append(&new, block))?;
        }
        self.new = Some(new);
        Ok(())
    }
}

/// The digests of the names in Envoy's reason, if it is about single resources and not cut. Texts beside
/// them may be taken for names.
pub(super) fn named(reason: &str) -> HashSet<u64> {
    let names = REFUSED.iter().find_map(|it| reason.strip_prefix(it));
    let names = names.filter(|it| !it.ends_with(CUT));
    let parts = names.into_iter().flat_map(|it| it.split([',', '\n']));
    let names = parts.filter_map(|part| part.trim_start().split_once(": "));
    names.map(|(name, _)| digest(name.as_bytes())).collect()
}

pub(super) fn temporary(name: &str) -> String {
    format!("{name}.tmp")
}

/// The resources in force of a type.
#[derive(Debug)]
pub(super) struct Index {
    file: File,
    /// Where they are, tag included, by the digest of their names.
    pub(super) resources: HashMap<u64, Range<u64>>,
}

impl Index {
    /// Reads what counts of a file, and compares its checksum.
    pub(super) fn read(header: &Header, file: File) -> io::Result<Self> {
        let mut resources = HashMap::new();
        let (mut walker, mut crc) = (Walker::of_names(header.length), Hasher::new());
        let place = HEADER..HEADER.saturating_add(header.length);
        blocks(&file, place, |block| {
            crc.update(block);
            let walked = walker.find(block, |found| {
                let place = HEADER + found.place.start..HEADER + found.place.end;
                if found.is_removed {
                    resources.remove(&found.name);
                } else {
                    resources.insert(found.name, place);
                }
            });
            walked.map_err(io::Error::other)
        })?;
        walker.finish().map_err(io::Error::other)?;
        match crc.finalize() == header.crc {
            true => Ok(Self { file, resources }),
            false => Err(io::Error::other("the checksum of its responses is wrong")),
        }
    }

    /// Reads the resources at these places.
    pub(super) fn copy(
        &self,
        mut places: Vec<Range<u64>>,
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        // In the order of their bytes on disk, neighbours at once.
        places.sort_unstable_by_key(|place| place.start);
        places.dedup_by(|next, last| {
            let is_next = last.end == next.start;
            if is_next {
                last.end = next.end;
            }
            is_next
        });
        // Resources are small, and may all be apart.
        let mut copied = Vec::with_capacity(BLOCK);
        for place in places {
            blocks(&self.file, place, |block| {
                if copied.len() + block.len() > BLOCK {
                    each(&copied)?;
                    copied.clear();
                }
                copied.extend_from_slice(block);
                Ok(())
            })?;
        }
        if copied.is_empty() {
            return Ok(());
        }
        each(&copied)
    }
}

/// Reads a part of a file, block by block.
fn blocks(
    file: &File,
    mut place: Range<u64>,
    mut each: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let within = |left: u64| usize::try_from(left).unwrap_or(BLOCK).min(BLOCK);
    let mut block = vec![0; within(place.end - place.start)];
    while !place.is_empty() {
        let block = &mut block[..within(place.end - place.start)];
        file.read_exact_at(block, place.start)?;
        each(block)?;
        place.start += block.len() as u64;
    }
    Ok(())
}
