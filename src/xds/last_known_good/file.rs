//! One file for each type: the responses that Envoy has accepted, and behind them those that wait for
//! its answer.
//!
//! It begins with a [`Header`] of fixed size, which says where the accepted responses are. They follow
//! one another as they came, without gRPC heads. Together they are a message as well, in which a later
//! resource replaces an earlier one of the same name, as in Envoy. The header is written in one page
//! once all it refers to is in the file, so that a kill leaves the state before or the state after. What
//! no longer counts is given back to the file system as a hole.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use bytes::Bytes;
use crc32fast::Hasher;
use prost::Message;
use rustix::fs::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};

use super::writer::Coverage;
use crate::xds::observe::{now, unix_seconds};
use crate::xds::response::Received;
use crate::xds::wire::{Walker, digest};

/// How much is copied at once.
pub(super) const BLOCK: usize = 64 * 1024;

/// Bytes of the header: a checksum, JSON and spaces.
const HEADER: u64 = 4096;
const SUM: usize = size_of::<u32>();

/// How many responses may wait for their ACK.
const MAX_PENDING: usize = 64;

/// Stands among the names of removed resources before and behind those that are all that remains. No
/// resource is named so, as it is not UTF-8.
const RETAINED: &[u8] = &[0xff];

/// What counts of a file. One of another form, with other members, is not used.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Header {
    /// Of the node whose Envoy has accepted it.
    pub(super) identity: String,
    /// Of the last response.
    pub(super) version: String,
    /// When it was accepted, in seconds of Unix time.
    pub(super) accepted: u64,
    /// Where the responses are. Without any, nothing is kept.
    pub(super) place: Range<u64>,
    crc: u32,
    /// The length of the first response, which has all there was.
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

    pub(super) fn length(&self) -> u64 {
        self.place.end.saturating_sub(self.place.start)
    }
}

/// A response behind those that count.
#[derive(Debug, Default)]
struct Segment {
    length: u64,
    crc: Hasher,
}

/// The file of a type, open for changes.
#[derive(Debug)]
pub(super) struct TypeFile {
    file: File,
    pub(super) header: Header,
    /// In the order in which they follow what counts.
    pending: VecDeque<(Received, Coverage, Segment)>,
    /// The response that passes.
    passing: Segment,
}

impl TypeFile {
    /// Continues a file, or begins one for a node without a header.
    pub(super) fn new(file: File, header: Option<Header>, identity: &str) -> io::Result<Self> {
        let empty = || Header {
            identity: identity.to_owned(),
            place: HEADER..HEADER,
            ..Header::default()
        };
        let header = header.unwrap_or_else(empty);
        header.write(&file)?;
        Ok(Self {
            file,
            header,
            pending: VecDeque::new(),
            passing: Segment::default(),
        })
    }

    /// Where the next bytes go.
    fn tail(&self) -> u64 {
        let pending = self.pending.iter().map(|(.., segment)| segment.length);
        self.header.place.end + pending.sum::<u64>() + self.passing.length
    }

    /// Bytes that count, or may from their ACK.
    pub(super) fn size(&self) -> u64 {
        self.tail() - self.header.place.start
    }

    /// Writes bytes of the response that passes.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.tail())?;
        self.passing.length += bytes.len() as u64;
        self.passing.crc.update(bytes);
        Ok(())
    }

    /// The response has passed, and waits for its ACK.
    pub(super) fn passed(&mut self, response: Received, coverage: Coverage) -> io::Result<()> {
        let passed = std::mem::take(&mut self.passing);
        self.pending.push_back((response, coverage, passed));
        match self.pending.len() {
            ..=MAX_PENDING => Ok(()),
            _ => Err(io::Error::other("too many responses wait for their ACK")),
        }
    }

    /// Envoy has answered a response, which it does in their order.
    pub(super) fn answered(&mut self, nonce: &str, is_accepted: bool) -> io::Result<()> {
        let Some((response, coverage, segment)) = self.pending.pop_front() else {
            return Ok(());
        };
        let is_empty = self.header.place.is_empty();
        let is_last = self.tail() == self.header.place.end;
        if response.nonce != nonce {
            return Err(io::Error::other("Envoy has skipped the ACK of a response"));
        } else if is_accepted && !(is_empty && coverage == Coverage::Part) {
            self.header.version = response.version;
            self.header.accepted = unix_seconds(now()) as u64;
            self.commit(segment, coverage == Coverage::All)?;
        } else if is_empty {
            // Of a part alone, the rest is missing.
            let end = self.header.place.end + segment.length;
            self.header.place = end..end;
        } else if !is_last {
            return Err(io::Error::other(
                "Envoy has rejected a response after later ones were stored",
            ));
        }
        let most = self.header.first.saturating_mul(2) + BLOCK as u64;
        match is_last && self.header.length() > most {
            true => self.compact(),
            false => Ok(()),
        }
    }

    fn compact(&mut self) -> io::Result<()> {
        let index = Index::read(&self.header, self.file.try_clone()?)?;
        let places = index.resources.values().cloned().collect();
        // Without resources it has this.
        self.write(&retained(std::iter::empty()))?;
        index.copy(places, |block| self.write(block))?;
        let compact = std::mem::take(&mut self.passing);
        self.commit(compact, true)
    }

    /// Lets the segment behind what counts count as well, or alone.
    fn commit(&mut self, segment: Segment, is_all: bool) -> io::Result<()> {
        let header = &mut self.header;
        if is_all || header.place.is_empty() {
            header.place.start = header.place.end;
            (header.crc, header.first) = (0, segment.length);
        }
        let mut crc = Hasher::new_with_initial_len(header.crc, header.length());
        crc.combine(&segment.crc);
        header.crc = crc.finalize();
        header.place.end += segment.length;
        self.file.sync_data()?;
        header.write(&self.file)
    }

    /// Gives back what is before the responses that count.
    pub(super) fn punch_hole(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let length = self.header.place.start.saturating_sub(HEADER);
        // Without holes the file grows until it is too large.
        let _ = fallocate(&self.file, flags, HEADER, length);
    }
}

/// What has only the resources of these names remain of those before it: the beginning of a response.
pub(super) fn retained(names: impl Iterator<Item = Bytes>) -> Bytes {
    #[derive(Clone, PartialEq, Message)]
    struct Removed {
        #[prost(bytes = "bytes", repeated, tag = "6")]
        names: Vec<Bytes>,
    }
    let mark = || std::iter::once(Bytes::from_static(RETAINED));
    let names = mark().chain(names).chain(mark()).collect();
    Removed { names }.encode_to_vec().into()
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
        let (mark, mut retained) = (digest(RETAINED), None::<HashSet<_>>);
        let (mut walker, mut crc) = (Walker::of_names(header.length()), Hasher::new());
        let start = header.place.start;
        blocks(&file, header.place.clone(), |block| {
            crc.update(block);
            let walked = walker.find(block, |found| {
                if !found.is_removed {
                    let place = start + found.place.start..start + found.place.end;
                    resources.insert(found.name, place);
                } else if found.name == mark {
                    match retained.take() {
                        None => retained = Some(HashSet::new()),
                        Some(names) => resources.retain(|name, _| names.contains(name)),
                    }
                } else if let Some(names) = &mut retained {
                    names.insert(found.name);
                } else {
                    resources.remove(&found.name);
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
        let mut places = places.into_iter();
        places.try_for_each(|place| blocks(&self.file, place, &mut each))
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
