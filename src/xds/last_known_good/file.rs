//! Stores the accepted resources of a type in a file.
//!
//! A file has a [`Header`] of fixed size, followed by fields of discovery responses: resources, and names of
//! removed ones. Together the fields are a message, in which a later resource replaces an earlier one of the
//! same name, as in Envoy. The header says how many bytes are valid. It is written in one page after these
//! bytes, so that a kill leaves the old or the new state. A file that has grown to twice its size is replaced
//! by one with the current resources only.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Seek as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crc32fast::Hasher;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use prost::Message as _;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::Type;
use crate::files::directory::Directory;
use crate::files::regular_file::if_exists;
use crate::runtime::clock::{after, rfc3339};
use crate::xds::request::shortened;
use crate::xds::response::Received;
use crate::xds::wire::{ResourceField, Walker, digest};

/// The most bytes that are copied at once.
const BLOCK: usize = 64 * 1024;

/// Bytes of the header: a checksum, JSON and spaces.
const HEADER: u64 = 4096;
const SUM: usize = size_of::<u32>();

/// The most responses that wait for their ACK.
const MAX_UNANSWERED: usize = 64;

/// The most bytes of accepted fields of a type that wait to be written.
pub(super) const MAX_PENDING: usize = 2 << 20;

/// The time that istiod has to send the resources that a stored resource needs.
pub(super) const STORED_VERSION_DELAY: Duration = Duration::from_secs(5);

/// The beginnings of Envoy's reason for a partial NACK: it has refused single resources and applied the others.
/// Pairs of a name and a reason follow, separated by commas or newlines. After any other NACK nothing of the
/// response is stored.
const PARTIAL_NACKS: [&str; 2] =
    ["Error adding/updating cluster(s) ", "Error adding/updating listener(s) "];
/// The end of a reason that Envoy has truncated.
const CUT: &str = "(truncated)";

/// The description of the valid bytes of a file. A file whose header has other members is not used.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Header {
    /// The identity of the node whose Envoy has accepted the resources.
    pub(super) identity: String,
    /// The version of the last response of which Envoy has accepted all or a part.
    pub(super) version: String,
    /// The last time at which istiod's stream was open, in seconds of Unix time.
    pub(super) current: u64,
    /// The value of `current` when Envoy refused resources that it still lacks: until then, istiod had their stored
    /// versions. None if Envoy lacks none.
    refused: Option<u64>,
    /// The bytes of the fields.
    pub(super) length: u64,
    crc: u32,
    /// The bytes of the fields when the file was new.
    first: u64,
}

impl Header {
    /// Reads and verifies the header of a file.
    pub(super) fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; HEADER as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let (sum, json) = bytes.split_at(SUM);
        if sum != crc32fast::hash(json).to_be_bytes() {
            return Err(io::Error::other("the checksum of its header is wrong"));
        }
        let header: Self = serde_json::from_slice(json)?;
        if header.size() > file.metadata()?.len() {
            return Err(io::Error::other("it is shorter than its header says"));
        }
        Ok(header)
    }

    /// Returns the size of the file.
    pub(super) fn size(&self) -> u64 {
        HEADER.saturating_add(self.length)
    }

    /// Returns the last time at which the stored versions of refused resources were istiod's, in seconds of Unix
    /// time.
    pub(super) fn refused_current_at(&self) -> u64 {
        self.refused.unwrap_or(self.current)
    }

    /// Writes the header, which makes all bytes in it valid. Fails if the file has been removed.
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

    /// Writes bytes after the valid ones. They become valid when the header is written.
    fn append(&mut self, file: &File, bytes: &[u8]) -> io::Result<()> {
        file.write_all_at(bytes, HEADER + self.length)?;
        let mut crc = Hasher::new_with_initial_len(self.crc, self.length);
        crc.update(bytes);
        self.crc = crc.finalize();
        self.length += bytes.len() as u64;
        Ok(())
    }
}

/// A response, complete or not, that Envoy has neither accepted nor refused.
#[derive(Debug, Default)]
struct Response {
    /// The bytes, if they are in memory.
    bytes: Vec<u8>,
    /// The file without a name that has all bytes, if they are too many for the memory.
    spilled: Option<File>,
    length: u64,
    /// The resources that Envoy had when the stream began, if this is the first response. Once it is accepted,
    /// the others that the file has are removed. None if all remain.
    initial_resources: Option<HashSet<u64>>,
}

impl Response {
    /// Returns a reader of all bytes. Readers of a file share its position, so only one may be in use.
    fn reader(&self) -> io::Result<Box<dyn BufRead + '_>> {
        let Some(mut file) = self.spilled.as_ref() else {
            return Ok(Box::new(self.bytes.as_slice()));
        };
        file.rewind()?;
        Ok(Box::new(BufReader::with_capacity(BLOCK, file)))
    }

    /// Finds the resources and the names of removed ones.
    fn fields(&self) -> io::Result<Vec<ResourceField>> {
        let (mut walker, mut fields) = (Walker::finder(self.length), Vec::new());
        let mut reader = self.reader()?;
        while let block = reader.fill_buf()?
            && !block.is_empty()
        {
            let walked = walker.find(block, |field| fields.push(field));
            walked.map_err(io::Error::other)?;
            let length = block.len();
            reader.consume(length);
        }
        walker.finish().map_err(io::Error::other)?;
        Ok(fields)
    }
}

/// A request to look up stored versions: resources of a type of which Envoy may have no version.
#[derive(Clone, Debug)]
pub(super) struct LookupRequest {
    pub(super) type_url: Type,
    /// The number of responses of the type that Envoy had answered on the stream.
    pub(super) answered_count: u32,
    /// The reasons why Envoy has no version, by the digests of the names.
    pub(super) reasons: HashMap<u64, Arc<str>>,
}

/// A resource of which Envoy may have no version.
#[derive(Clone, Debug)]
pub(super) struct MissingResource {
    /// The time at which the stream is asked for the stored version; None once it has looked for one.
    pub(super) due: Option<Instant>,
    pub(super) reason: Arc<str>,
}

/// The file of a type, and the changes that wait to be written to it.
#[derive(Debug, Default)]
pub(super) struct TypeFile {
    name: &'static str,
    /// None while nothing is stored.
    pub(super) file: Option<File>,
    /// The file that will replace it, under its temporary name.
    replacement: Option<File>,
    /// The header of the replacement, if there is one, or of the file. On disk it may be older.
    pub(super) header: Header,
    /// True if Envoy, or the agent, subscribes to the type on the stream.
    pub(super) is_subscribed: bool,
    /// The resources that Envoy had when the stream began; None after the first response.
    pub(super) initial_resources: Option<HashSet<u64>>,
    /// The response that is being received.
    receiving: Response,
    /// Complete responses, in the order in which Envoy answers them.
    unanswered: VecDeque<(Received, Response)>,
    /// The only resources of the file that remain when it is written next; None if all remain.
    retained: Option<HashSet<u64>>,
    /// Accepted fields that are not in the file, by the digests of their names.
    pending: HashMap<u64, Vec<u8>>,
    /// The bytes of `pending`.
    pub(super) pending_bytes: usize,
    /// True if the file has to be written, even if only a version has changed.
    pub(super) is_dirty: bool,
    /// True while the file of this name on disk is another node's, and is not to be replaced yet.
    pub(super) is_held: bool,
    /// The number of responses that Envoy has answered on the stream.
    answered_count: u32,
    /// Resources of which Envoy may have no version, by the digests of their names: Envoy has refused them, or
    /// istiod has not sent them.
    pub(super) missing: HashMap<u64, MissingResource>,
}

impl TypeFile {
    /// Continues a file with its header, or begins one.
    pub(super) fn new(name: &'static str, found: Option<(File, Header)>, identity: &str) -> Self {
        let (file, header) = found.unzip();
        Self {
            name,
            file,
            header: header
                .unwrap_or_else(|| Header { identity: identity.to_owned(), ..Header::default() }),
            ..Self::default()
        }
    }

    /// Returns all responses that Envoy has not answered.
    fn responses(&self) -> impl Iterator<Item = &Response> {
        let unanswered = self.unanswered.iter().map(|(_, response)| response);
        unanswered.chain([&self.receiving])
    }

    /// Returns the bytes of responses in memory.
    pub(super) fn memory(&self) -> usize {
        self.responses().map(|response| response.bytes.len()).sum()
    }

    /// Returns the size of the file in bytes if Envoy accepts all responses.
    pub(super) fn size(&self) -> u64 {
        let unanswered: u64 = self.responses().map(|response| response.length).sum();
        self.header.length + self.pending_bytes as u64 + unanswered
    }

    /// Takes the next bytes of a response. Writes them to disk if the response was moved there.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> io::Result<()> {
        let response = &mut self.receiving;
        response.length += bytes.len() as u64;
        match &mut response.spilled {
            Some(file) => file.write_all(bytes)?,
            None => response.bytes.extend_from_slice(bytes),
        }
        Ok(())
    }

    /// Moves the bytes of the incomplete response from memory to a file without a name, which takes the next ones.
    pub(super) fn spill(&mut self, directory: &Directory) -> io::Result<()> {
        let response = &mut self.receiving;
        if response.spilled.is_none() {
            let name = spilled(self.name);
            let mut file = directory.create_file(&name)?;
            directory.remove_file(&name)?;
            file.write_all(&std::mem::take(&mut response.bytes))?;
            response.spilled = Some(file);
        }
        Ok(())
    }

    /// Ends a response, which then waits for its ACK. Fails if too many do.
    pub(super) fn complete(&mut self, received: Received) -> io::Result<()> {
        let mut response = std::mem::take(&mut self.receiving);
        response.initial_resources = self.initial_resources.take();
        self.unanswered.push_back((received, response));
        if self.unanswered.len() > MAX_UNANSWERED {
            return Err(io::Error::other("too many responses wait for their ACK"));
        }
        Ok(())
    }

    /// Applies Envoy's ACK of the oldest response, or its NACK with the reason. What Envoy has accepted becomes
    /// pending, and what it has refused, missing. Has no effect while nothing is stored, unless this is the stream's
    /// first response and covers all resources that Envoy had.
    ///
    /// Writes to disk only if more than [`MAX_PENDING`] bytes are pending. Fails if the nonce is of another response,
    /// or if disk or response are unusable. The file may then lack accepted resources, and has to be deleted.
    pub(super) fn apply_ack_or_nack(
        &mut self,
        directory: &Directory,
        nonce: &str,
        refusal: Option<&str>,
    ) -> io::Result<()> {
        let Some((received, mut response)) = self.unanswered.pop_front() else {
            return Ok(());
        };
        if received.nonce != nonce {
            return Err(io::Error::other("Envoy has skipped the ACK of a response"));
        }
        self.answered_count += 1;
        // A response with fewer resources than Envoy had covers only some of them. It cannot begin a file, which would
        // lack the others.
        let initial_resources = response.initial_resources.take();
        let initial_count = initial_resources.as_ref().map(HashSet::len);
        let covers_all = initial_count.is_some_and(|count| received.resources as usize >= count);
        if self.file.is_none() && !self.is_dirty && !covers_all {
            return Ok(());
        }
        let fields = response.fields()?;
        let named = refusal.map(refused_names).unwrap_or_default();
        let names = fields.iter().map(|field| field.name);
        let refused: HashSet<_> = names.filter(|name| named.contains(name)).collect();
        self.note_missing(&fields, refusal, &refused);
        if refusal.is_some() && refused.is_empty() {
            return Ok(());
        }
        if let Some(mut remaining) = initial_resources {
            // The old version of a replaced resource does not remain. The old version of a refused one does.
            for field in &fields {
                remaining.remove(&field.name);
            }
            remaining.extend(&refused);
            self.pending.retain(|name, _| remaining.contains(name));
            self.pending_bytes = self.pending.values().map(Vec::len).sum();
            if let Some(before) = &self.retained {
                remaining.retain(|name| before.contains(name));
            }
            self.retained = Some(remaining);
        }
        self.header.version = received.version;
        self.is_dirty = true;
        let mut is_written = false;
        let (mut reader, mut position) = (response.reader()?, 0);
        for field in fields.into_iter().filter(|it| !refused.contains(&it.name)) {
            // Fields that are not resources and refused resources lie between.
            let mut skipped = reader.by_ref().take(field.range.start - position);
            io::copy(&mut skipped, &mut io::sink())?;
            let mut content = vec![0; (field.range.end - field.range.start) as usize];
            reader.read_exact(&mut content)?;
            position = field.range.end;
            self.pending_bytes += content.len();
            let before = self.pending.insert(field.name, content);
            self.pending_bytes -= before.map_or(0, |before| before.len());
            if self.pending_bytes >= MAX_PENDING {
                is_written = true;
                self.append(directory)?;
            }
        }
        if is_written {
            self.commit(directory)?;
        }
        Ok(())
    }

    /// Adds the resources of a response that Envoy has refused to the missing ones, and removes the others from them.
    /// If the reason names none, all are refused.
    fn note_missing(
        &mut self,
        fields: &[ResourceField],
        refusal: Option<&str>,
        refused: &HashSet<u64>,
    ) {
        let reason = refusal.map(|it| Arc::<str>::from(shortened(it)));
        for field in fields {
            match &reason {
                Some(_) if refused.is_empty() && field.is_removed => {}
                Some(reason) if refused.is_empty() || refused.contains(&field.name) => {
                    let (due, reason) = (Some(Instant::now()), reason.clone());
                    let missing = MissingResource { due, reason };
                    self.missing.insert(field.name, missing);
                }
                _ => _ = self.missing.remove(&field.name),
            }
        }
        let refused_since = self.header.refused_current_at();
        self.header.refused = (!self.missing.is_empty()).then_some(refused_since);
    }

    /// Lets all resources of the file remain, even those that unanswered responses would replace completely.
    pub(super) fn retain_all(&mut self) {
        if self.file.is_some() {
            (self.initial_resources, self.retained) = (None, None);
            for (_, response) in &mut self.unanswered {
                response.initial_resources = None;
            }
        }
    }

    /// Counts names that Envoy has subscribed to as missing until istiod sends them, and no longer those from which
    /// it has unsubscribed.
    pub(super) fn change_subscription(
        &mut self,
        added: &[u64],
        removed: &[u64],
        reason: &Arc<str>,
    ) {
        for name in removed {
            self.missing.remove(name);
        }
        for name in added {
            let entry = self.missing.entry(*name);
            entry.or_insert_with(|| MissingResource {
                due: Some(after(STORED_VERSION_DELAY)),
                reason: reason.clone(),
            });
        }
    }

    /// Returns when stored versions have to be looked up. None while Envoy has not answered a response, which
    /// may have newer versions.
    pub(super) fn lookup_due(&self) -> Option<Instant> {
        let is_quiet = self.unanswered.is_empty() && self.receiving.length == 0;
        let earliest = self.missing.values().filter_map(|it| it.due).min();
        earliest.filter(|_| is_quiet)
    }

    /// Returns the resources whose stored versions have to be looked up now, and makes them due again later, unless
    /// the stream reports before that it has looked them up.
    pub(super) fn take_lookup_request(&mut self, type_url: Type) -> Option<LookupRequest> {
        let now = Instant::now();
        self.lookup_due().filter(|due| *due <= now)?;
        let missing = self.missing.iter_mut();
        let due = missing.filter(|(_, it)| it.due.is_some_and(|due| due <= now));
        let reasons = due.map(|(name, it)| {
            it.due = Some(after(STORED_VERSION_DELAY));
            (*name, it.reason.clone())
        });
        Some(LookupRequest {
            type_url,
            answered_count: self.answered_count,
            reasons: reasons.collect(),
        })
    }

    /// Writes what is pending and makes it valid. Gives the replacement, if there is one, the name of the file, unless
    /// that is held.
    pub(super) fn commit(&mut self, directory: &Directory) -> io::Result<()> {
        if self.is_dirty {
            self.append(directory)?;
        }
        if self.is_held {
            return Ok(());
        }
        self.is_dirty = false;
        self.header.current = unix_now();
        if let Some(replacement) = self.replacement.take() {
            self.header.first = self.header.length;
            self.header.write(&replacement)?;
            directory.rename(&temporary(self.name), self.name)?;
            self.file = Some(replacement);
        } else if let Some(file) = &self.file {
            self.header.write(file)?;
        }
        Ok(())
    }

    /// Writes what is pending after the valid bytes. It becomes valid with [`Self::commit`]. Begins a replacement if
    /// there is no file, if only some resources remain, or if the file has twice its size.
    fn append(&mut self, directory: &Directory) -> io::Result<()> {
        let max_length = self.header.first.saturating_mul(2) + BLOCK as u64;
        let length = self.header.length + self.pending_bytes as u64;
        let is_large = self.replacement.is_none() && length > max_length;
        if self.retained.is_some() || self.file.is_none() && self.replacement.is_none() || is_large
        {
            self.begin_replacement(directory)?;
        }
        let Some(file) = self.replacement.as_ref().or(self.file.as_ref()) else {
            return Ok(());
        };
        let mut block = Vec::with_capacity(BLOCK.min(self.pending_bytes));
        for (_, field) in std::mem::take(&mut self.pending) {
            if block.len() + field.len() > BLOCK {
                self.header.append(file, &block)?;
                block.clear();
            }
            block.extend_from_slice(&field);
        }
        self.pending_bytes = 0;
        self.header.append(file, &block)
    }

    /// Begins a replacement with the resources that remain and are not pending.
    fn begin_replacement(&mut self, directory: &Directory) -> io::Result<()> {
        let replacement = directory.create_file(&temporary(self.name))?;
        let header = Header { length: 0, crc: 0, ..self.header.clone() };
        let old = std::mem::replace(&mut self.header, header);
        let retained = self.retained.take();
        if let Some(file) = self.replacement.take().or(self.file.take())
            && retained.as_ref().is_none_or(|names| !names.is_empty())
        {
            let mut index = Index::read(old, file)?;
            index.resources.retain(|name, _| {
                !self.pending.contains_key(name)
                    && retained.as_ref().is_none_or(|names| names.contains(name))
            });
            let ranges = index.resources.values().cloned().collect();
            index.copy(ranges, |block| self.header.append(&replacement, block))?;
        }
        self.replacement = Some(replacement);
        Ok(())
    }
}

/// Returns the digests of the names in Envoy's reason, if it is that of a partial NACK and not truncated. Some may be
/// digests of other parts of the text.
pub(super) fn refused_names(reason: &str) -> HashSet<u64> {
    let list = PARTIAL_NACKS.iter().find_map(|it| reason.strip_prefix(it));
    let whole = list.filter(|it| !it.ends_with(CUT));
    let entries = whole.into_iter().flat_map(|it| it.split([',', '\n']));
    let pairs = entries.filter_map(|entry| entry.trim_start().split_once(": "));
    pairs.map(|(name, _)| digest(name.as_bytes())).collect()
}

/// Returns the name of the file that will replace the file of this name.
pub(super) fn temporary(name: &str) -> String {
    format!("{name}.tmp")
}

/// Returns the name under which a response is moved to disk. The name is removed at once.
pub(super) fn spilled(name: &str) -> String {
    format!("{name}.response.tmp")
}

/// Returns the last part of a type URL, the name of its file.
pub(super) fn file_name(type_url: &str) -> &str {
    type_url.rsplit('.').next().unwrap_or(type_url)
}

/// Opens the file of a type and reads its header. Returns None if there is no file.
pub(super) fn open(directory: &Directory, type_url: Type) -> io::Result<Option<(File, Header)>> {
    let found = if_exists(directory.open_private_file(file_name(type_url)))?;
    let read = found.map(|file| Header::read(&file).map(|header| (file, header)));
    read.transpose()
}

/// The current resources of a type, in their file.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) header: Header,
    file: File,
    /// The bytes of the resources in the file, tags included, by the digests of their names.
    pub(super) resources: HashMap<u64, Range<u64>>,
}

impl Index {
    /// Reads the file of a type. Returns None if there is none.
    pub(super) fn open(directory: &Directory, type_url: Type) -> io::Result<Option<Self>> {
        let found = open(directory, type_url)?;
        let read = found.map(|(file, header)| Self::read(header, file));
        read.transpose()
    }

    /// Reads the valid bytes of a file, and verifies their checksum.
    pub(super) fn read(header: Header, file: File) -> io::Result<Self> {
        let mut resources = HashMap::new();
        let (mut walker, mut crc) = (Walker::finder(header.length), Hasher::new());
        let valid = HEADER..header.size();
        read_blocks(&file, valid, |block| {
            crc.update(block);
            let walked = walker.find(block, |field| {
                if field.is_removed {
                    resources.remove(&field.name);
                } else {
                    let range = HEADER + field.range.start..HEADER + field.range.end;
                    resources.insert(field.name, range);
                }
            });
            walked.map_err(io::Error::other)
        })?;
        walker.finish().map_err(io::Error::other)?;
        if crc.finalize() != header.crc {
            return Err(io::Error::other("the checksum of its responses is wrong"));
        }
        Ok(Self { header, file, resources })
    }

    /// Copies the header and the valid bytes to a new file.
    pub(super) fn copy_to(&self, file: &File) -> io::Result<()> {
        let mut header = Header { length: 0, crc: 0, ..self.header.clone() };
        read_blocks(&self.file, HEADER..self.header.size(), |block| header.append(file, block))?;
        header.write(file)
    }

    /// Returns the time since istiod's stream was last known to be open.
    pub(super) fn age(&self) -> Duration {
        Duration::from_secs(unix_now().saturating_sub(self.header.current))
    }

    /// Sends a response with the resources in these ranges, as a gRPC frame.
    pub(super) fn respond(
        &self,
        ranges: Vec<Range<u64>>,
        type_url: &str,
        nonce: &str,
        mut send: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let rest = DeltaDiscoveryResponse {
            system_version_info: self.header.version.clone(),
            type_url: type_url.to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        }
        .encode_to_vec();
        let resources: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let length = u32::try_from(resources + rest.len() as u64).map_err(io::Error::other)?;
        send(&[&[0], &length.to_be_bytes()[..]].concat())?;
        self.copy(ranges, &mut send)?;
        rest.chunks(BLOCK).try_for_each(send)
    }

    /// Reads the resources in these ranges and calls `each` with blocks of them.
    pub(super) fn copy(
        &self,
        mut ranges: Vec<Range<u64>>,
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        // Resources are read in the order of their bytes on disk, adjacent ones at once.
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, last| {
            let is_adjacent = last.end == next.start;
            if is_adjacent {
                last.end = next.end;
            }
            is_adjacent
        });
        // Small resources that are not adjacent are collected, so that `each` gets few blocks.
        let mut copied = Vec::with_capacity(BLOCK);
        for range in ranges {
            read_blocks(&self.file, range, |block| {
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

/// Reads a range of a file, and calls `each` with blocks of it.
fn read_blocks(
    file: &File,
    mut range: Range<u64>,
    mut each: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut block = Vec::new();
    while !range.is_empty() {
        block.resize((range.end - range.start).min(BLOCK as u64) as usize, 0);
        file.read_exact_at(&mut block, range.start)?;
        each(&block)?;
        range.start += block.len() as u64;
    }
    Ok(())
}

/// Returns the seconds of Unix time, at least 0.
fn unix_now() -> u64 {
    let elapsed = SystemTime::UNIX_EPOCH.elapsed();
    elapsed.unwrap_or_default().as_secs()
}

/// Formats seconds of Unix time. The epoch stands for a time out of range.
pub(super) fn unix_rfc3339(seconds: u64) -> String {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    rfc3339(time.unwrap_or(SystemTime::UNIX_EPOCH))
}
