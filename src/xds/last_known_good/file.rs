//! One file for each type: the responses that Envoy has accepted, and behind them those that wait for
//! its answer.
//!
//! It begins with a [`Header`] of fixed size, which says where the accepted responses are. They are as
//! they came, gRPC heads included; a later one replaces resources of the same names, as in Envoy. The
//! header is written in one page once all it refers to is in the file, so that a kill leaves the state
//! before or the state after. What no longer counts is given back to the file system as a hole.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use crc32fast::Hasher;
use prost::Message as _;
use rustix::fs::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};

use super::subscription::Fields;
use super::writer::Coverage;
use crate::clock::Clock;
use crate::xds::Protocol;
use crate::xds::request::HEAD;
use crate::xds::response::Received;
use crate::xds::wire::{Walker, digest};

/// How much is copied at once.
pub(super) const BLOCK: usize = 64 * 1024;

/// Of header and responses. Another is not used.
const FORMAT: u32 = 3;

/// Bytes of the header: a checksum, JSON and spaces.
const HEADER: u64 = 4096;
const SUM: usize = size_of::<u32>();

/// What is appended, beyond the size of the first response, before the file is compacted.
const SLACK: u64 = 4096;

/// How many responses may wait for their ACK before the oldest is forgotten.
const MAX_PENDING: usize = 64;

/// The first byte of a frame in place of a response, which names the only resources that remain.
const RETAINED: u8 = 0xff;

/// What counts of a file.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Header {
    format: u32,
    /// Of the node whose Envoy has accepted it.
    pub(super) identity: String,
    /// Of the last response.
    pub(super) version: String,
    /// When it was accepted, in seconds of Unix time.
    pub(super) accepted: u64,
    /// Where the responses begin, and how long they are. Without any, nothing is kept.
    start: u64,
    pub(super) length: u64,
    crc: u32,
    /// The length of the first response, which has all there was.
    first: u64,
    /// The sum of the digests of the names in it, if it is known.
    #[serde(skip)]
    names: Option<u64>,
}

impl Header {
    pub(super) fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; HEADER as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let (sum, json) = bytes.split_at(SUM);
        if sum != crc32fast::hash(json).to_be_bytes() {
            return Err(io::Error::other("the checksum of its header is wrong"));
        }
        let header: Self = serde_json::from_slice(json)?;
        match header.format {
            FORMAT
                if header.start >= HEADER && header.start.checked_add(header.length).is_some() =>
            {
                Ok(header)
            }
            FORMAT => Err(io::Error::other("its responses are nowhere")),
            other => Err(io::Error::other(format!(
                "its format is {other}, expected {FORMAT}"
            ))),
        }
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
}

pub(super) fn unix_time() -> Duration {
    let since_epoch = Clock::system().now().duration_since(SystemTime::UNIX_EPOCH);
    since_epoch.unwrap_or_default()
}

/// Bytes behind those that count.
#[derive(Debug)]
struct Segment {
    length: u64,
    crc: Hasher,
    /// Reads the names of its resources, if they are to be known, and the sum of their digests so far.
    names: Option<(Walker, u64)>,
}

impl Segment {
    fn new(protocol: Protocol) -> Self {
        // SotW says with the request whether a response has all there is.
        let walker = || (Walker::of_names(protocol, u64::MAX), 0);
        Self {
            length: 0,
            crc: Hasher::new(),
            names: (protocol == Protocol::Delta).then(walker),
        }
    }

    fn read(&mut self, bytes: &[u8]) {
        self.crc.update(bytes);
        if self.length == 0 && bytes.first() == Some(&RETAINED) {
            self.names = None;
        }
        let of_head = (HEAD as u64).saturating_sub(self.length) as usize;
        self.length += bytes.len() as u64;
        if let (Some((walker, names)), Some(message)) = (&mut self.names, bytes.get(of_head..)) {
            let walked = walker.find(message, |found| {
                let name = if found.is_removed { 0 } else { found.name };
                *names = names.wrapping_add(name);
            });
            if walked.is_err() {
                self.names = None;
            }
        }
    }
}

/// The file of a type, open for changes.
#[derive(Debug)]
pub(super) struct TypeFile {
    protocol: Protocol,
    file: File,
    pub(super) header: Header,
    /// In the order in which they follow what counts.
    pending: VecDeque<(Received, Coverage, Segment)>,
    /// The response that passes.
    passing: Segment,
}

impl TypeFile {
    /// Continues a file, or begins a new one.
    pub(super) fn new(protocol: Protocol, file: File, header: Option<Header>) -> io::Result<Self> {
        let empty = || Header {
            format: FORMAT,
            start: HEADER,
            ..Header::default()
        };
        if header.is_none() {
            empty().write(&file)?;
        }
        Ok(Self {
            protocol,
            file,
            header: header.unwrap_or_else(empty),
            pending: VecDeque::new(),
            passing: Segment::new(protocol),
        })
    }

    /// Bytes that count, or may from their ACK.
    pub(super) fn size(&self) -> u64 {
        self.tail() - self.header.start
    }

    fn end(&self) -> u64 {
        self.header.start + self.header.length
    }

    fn tail(&self) -> u64 {
        let pending: u64 = self
            .pending
            .iter()
            .map(|(.., segment)| segment.length)
            .sum();
        self.end() + pending + self.passing.length
    }

    /// Writes bytes of the response that passes.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.tail())?;
        self.passing.read(bytes);
        Ok(())
    }

    /// The response has passed, and waits for its ACK.
    pub(super) fn passed(&mut self, response: Received, coverage: Coverage) -> io::Result<()> {
        let passed = std::mem::replace(&mut self.passing, Segment::new(self.protocol));
        self.pending.push_back((response, coverage, passed));
        match self.pending.len() {
            ..=MAX_PENDING => Ok(()),
            _ => Err(io::Error::other("too many responses wait for their ACK")),
        }
    }

    pub(super) fn is_passing(&self) -> bool {
        self.passing.length > 0
    }

    /// Forgets what does not count.
    pub(super) fn forget_pending(&mut self) {
        self.passing = Segment::new(self.protocol);
        self.pending.clear();
    }

    /// The place of a response that waits for its ACK.
    pub(super) fn position(&self, nonce: &str) -> Option<usize> {
        self.pending
            .iter()
            .position(|(response, ..)| response.nonce == nonce)
    }

    /// Envoy has answered the response at this place. It has passed over those before.
    pub(super) fn answered(&mut self, position: usize, is_accepted: bool) -> io::Result<()> {
        for later in (0..=position).rev() {
            let Some((response, coverage, segment)) = self.pending.pop_front() else {
                return Ok(());
            };
            // Of a part alone, the rest is missing.
            let is_alone = self.header.length == 0 && coverage == Coverage::Part;
            match later == 0 && is_accepted && !is_alone {
                true => {
                    self.header.version = response.version;
                    self.header.accepted = unix_time().as_secs();
                    self.commit(segment, coverage == Coverage::All)?;
                }
                false => self.cut(segment.length)?,
            }
        }
        let most = self.header.first.saturating_mul(2).saturating_add(SLACK);
        let is_large = self.header.length > most;
        if !is_large || self.tail() > self.end() {
            return Ok(());
        }
        let index = Index::read(self.protocol, &self.header, self.file.try_clone()?)?;
        let places = index.resources.values().cloned().collect();
        index.message(places, 0, |block| self.write(block))?;
        let compact = std::mem::replace(&mut self.passing, Segment::new(self.protocol));
        self.commit(compact, true)
    }

    /// Lets the segment behind what counts count as well, or alone.
    fn commit(&mut self, segment: Segment, is_all: bool) -> io::Result<()> {
        let names = segment.names.map(|(_, names)| names);
        let has_same_names = names.is_some() && names == self.header.names;
        let header = &mut self.header;
        header.names = None;
        if is_all || has_same_names || header.length == 0 {
            header.start += std::mem::take(&mut header.length);
            (header.crc, header.first, header.names) = (0, segment.length, names);
        }
        let mut crc = Hasher::new_with_initial_len(header.crc, header.length);
        crc.combine(&segment.crc);
        header.crc = crc.finalize();
        header.length += segment.length;
        self.file.sync_data()?;
        header.write(&self.file)
    }

    /// Takes so many bytes out, behind what counts.
    fn cut(&mut self, length: u64) -> io::Result<()> {
        let (mut block, mut at) = (vec![0; BLOCK], self.end());
        while at < self.tail() {
            let block = &mut block[..within(self.tail() - at, BLOCK)];
            self.file.read_exact_at(block, at + length)?;
            self.file.write_all_at(block, at)?;
            at += block.len() as u64;
        }
        Ok(())
    }

    /// Lets nothing count that another node has accepted.
    pub(super) fn take_over(&mut self, identity: &str) -> io::Result<()> {
        if self.header.identity != identity {
            self.header = Header {
                format: FORMAT,
                identity: identity.to_owned(),
                start: self.end(),
                ..Header::default()
            };
            self.header.write(&self.file)?;
        }
        Ok(())
    }

    /// Gives back what is before the responses that count.
    pub(super) fn punch_hole(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Without holes the file grows until it is too large.
        let _ = fallocate(&self.file, flags, HEADER, self.header.start - HEADER);
    }
}

/// A frame with the names of the only resources that remain, in place of a response.
pub(super) fn retained_frame(names: Vec<Bytes>) -> io::Result<Bytes> {
    let message = Fields {
        sixth: names,
        ..Fields::default()
    };
    let message = message.encode_to_vec();
    let mut head = head(message.len() as u64)?;
    head[0] = RETAINED;
    Ok([&head, &message[..]].concat().into())
}

/// The gRPC head of a message.
pub(super) fn head(length: u64) -> io::Result<[u8; HEAD]> {
    let length = u32::try_from(length).map_err(|_| io::Error::other("a message over 4 GiB"))?;
    let [a, b, c, d] = length.to_be_bytes();
    Ok([0, a, b, c, d])
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
    pub(super) fn read(protocol: Protocol, header: &Header, file: File) -> io::Result<Self> {
        let (mut resources, mut crc, mut at) = (HashMap::new(), Hasher::new(), header.start);
        let end = at.saturating_add(header.length);
        let mut input = BufReader::with_capacity(BLOCK, &file);
        input.seek(SeekFrom::Start(at))?;
        while at < end {
            let mut head = [0; HEAD];
            input.read_exact(&mut head)?;
            crc.update(&head);
            let [flag, length @ ..] = head;
            let mut left = u64::from(u32::from_be_bytes(length));
            let start = at + HEAD as u64;
            at = start + left;
            let (mut walker, mut retained) = (Walker::of_names(protocol, left), HashSet::new());
            while left > 0 {
                let block = input.fill_buf()?;
                let block = &block[..within(left, block.len())];
                if block.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                crc.update(block);
                let walked = walker.find(block, |found| match (found.is_removed, flag) {
                    (true, RETAINED) => drop(retained.insert(found.name)),
                    (true, _) => drop(resources.remove(&found.name)),
                    (false, _) => {
                        let place = start + found.place.start..start + found.place.end;
                        resources.insert(found.name, place);
                    }
                });
                walked.map_err(io::Error::other)?;
                let read = block.len();
                input.consume(read);
                left -= read as u64;
            }
            walker.finish().map_err(io::Error::other)?;
            if flag == RETAINED {
                resources.retain(|name, _| retained.contains(name));
            }
        }
        match at == end && crc.finalize() == header.crc {
            true => Ok(Self { file, resources }),
            false => Err(io::Error::other("the checksum of its responses is wrong")),
        }
    }

    /// The resource of this name.
    pub(super) fn get(&self, name: &[u8]) -> Option<Range<u64>> {
        self.resources.get(&digest(name)).cloned()
    }

    /// Reads a message with the resources at these places, its head first, without the `rest` of it,
    /// block by block.
    pub(super) fn message(
        &self,
        mut places: Vec<Range<u64>>,
        rest: u64,
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let length: u64 = places.iter().map(|place| place.end - place.start).sum();
        each(&head(length + rest)?)?;
        // In the order of their bytes on disk, neighbours at once.
        places.sort_unstable_by_key(|place| place.start);
        places.dedup_by(|next, last| {
            let is_next = last.end == next.start;
            if is_next {
                last.end = next.end;
            }
            is_next
        });
        let mut block = vec![0; BLOCK];
        for mut place in places {
            while !place.is_empty() {
                let block = &mut block[..within(place.end - place.start, BLOCK)];
                self.file.read_exact_at(block, place.start)?;
                each(block)?;
                place.start += block.len() as u64;
            }
        }
        Ok(())
    }
}

/// At most this many of the bytes that are left.
fn within(left: u64, most: usize) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(most)
}
