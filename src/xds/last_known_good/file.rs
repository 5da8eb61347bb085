//! Files of what is kept, one for each type: writing one, and finding the resources in it.
//!
//! A file holds responses as they came, one behind the other, gRPC heads included. A later one
//! replaces the resources of the same names, as in Envoy.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::xds::Protocol;
use crate::xds::request::HEAD;
use crate::xds::wire::{Found, Walker, digest};

/// How much is copied at once.
pub(super) const BLOCK: usize = 64 * 1024;

/// What is appended to a file, beyond the size of its first response, before it is compacted.
const SLACK: u64 = 4096;

/// What counts of a file. Bytes behind it do not.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct KeptFile {
    pub(super) name: String,
    pub(super) length: u64,
    pub(super) crc: u32,
    /// Its first response, which has all there was.
    pub(super) first: u64,
    /// A digest of the names in it, if it is known.
    #[serde(skip)]
    pub(super) names: Option<u64>,
}

/// A file that is being written. It is removed when dropped.
#[derive(Debug)]
pub(super) struct Draft {
    file: NamedTempFile,
    pub(super) length: u64,
    crc: Hasher,
    /// Reads the names of the first response, if they are to be known, and their digest so far.
    names: Option<(Walker, u64)>,
}

impl Draft {
    pub(super) fn new(file: NamedTempFile, protocol: Protocol) -> Self {
        // SotW says with the request whether a response has all there is.
        let walker = || (Walker::of_names(protocol, u64::MAX), 0);
        Self {
            file,
            length: 0,
            crc: Hasher::new(),
            names: (protocol == Protocol::Delta).then(walker),
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.crc.update(bytes);
        let of_head = (HEAD as u64).saturating_sub(self.length) as usize;
        self.length += bytes.len() as u64;
        if let (Some((walker, names)), Some(message)) = (&mut self.names, bytes.get(of_head..)) {
            let add =
                |it: Found| *names = names.wrapping_add(if it.is_removed { 0 } else { it.name });
            if walker.find(message, add).is_err() {
                self.names = None;
            }
        }
        Ok(())
    }

    /// Whether it has resources of the same names as the file, and so takes its place.
    pub(super) fn replaces(&self, file: &KeptFile) -> bool {
        let names = self.names.as_ref().map(|(_, names)| *names);
        names.is_some() && names == file.names
    }

    /// Makes it stay, on disk.
    pub(super) fn keep(self) -> io::Result<KeptFile> {
        self.file.as_file().sync_data()?;
        let (_, path) = self.file.keep()?;
        let name = path.file_name().unwrap_or_default();
        Ok(KeptFile {
            name: name.to_string_lossy().into_owned(),
            length: self.length,
            crc: self.crc.finalize(),
            first: self.length,
            names: self.names.map(|(_, names)| names),
        })
    }

    /// Puts it behind what counts of another file.
    pub(super) fn append_to(mut self, kept: &mut KeptFile, mut file: File) -> io::Result<()> {
        file.seek(io::SeekFrom::Start(kept.length))?;
        self.file.rewind()?;
        io::copy(&mut self.file, &mut file)?;
        file.sync_data()?;
        let mut crc = Hasher::new_with_initial_len(kept.crc, kept.length);
        crc.combine(&self.crc);
        kept.crc = crc.finalize();
        kept.length += self.length;
        kept.names = None;
        Ok(())
    }
}

impl KeptFile {
    /// Whether it stays below twice what is in force, as far as is known, with a response appended.
    pub(super) fn has_room_for(&self, response: &Draft) -> bool {
        let most = self.first.saturating_mul(2).saturating_add(SLACK);
        self.length.saturating_add(response.length) <= most
    }
}

/// The resources in force of a type.
#[derive(Debug)]
pub(super) struct Index {
    file: File,
    /// Where they are, tag included, by the digest of their names.
    resources: HashMap<u64, Range<u64>>,
}

impl Index {
    /// Reads what counts of a file, and compares its checksum.
    pub(super) fn read(protocol: Protocol, kept: &KeptFile, file: File) -> io::Result<Self> {
        let mut resources = HashMap::new();
        let mut found = |start: u64, found: Found| match found.is_removed {
            true => drop(resources.remove(&found.name)),
            false => {
                let place = start + found.place.start..start + found.place.end;
                resources.insert(found.name, place);
            }
        };
        match read(protocol, &file, kept.length, &mut found) {
            Ok(crc) if crc == kept.crc => Ok(Self { file, resources }),
            Ok(_) => Err(io::Error::other("its checksum is wrong")),
            Err(error) => Err(error),
        }
        .map_err(|error| io::Error::other(format!("file {}: {error}", kept.name)))
    }

    /// Writes what a newer response leaves in force, and that response behind it, as one.
    pub(super) fn merge(
        mut self,
        protocol: Protocol,
        mut newer: Draft,
        merged: &mut Draft,
    ) -> io::Result<()> {
        newer.file.rewind()?;
        let file = newer.file.as_file();
        read(protocol, file, newer.length, &mut |_, found| {
            self.resources.remove(&found.name);
        })?;
        let places = joined(self.resources().collect());
        let older: u64 = places.iter().map(|place| place.end - place.start).sum();
        let message = HEAD as u64..newer.length;
        merged.write(&head(older + message.end - message.start)?)?;
        for place in places {
            copy(&self.file, place, |block| merged.write(block))?;
        }
        copy(file, message, |block| merged.write(block))
    }

    pub(super) fn resources(&self) -> impl ExactSizeIterator<Item = Range<u64>> {
        self.resources.values().cloned()
    }

    /// The resource of this name.
    pub(super) fn get(&self, name: &[u8]) -> Option<Range<u64>> {
        self.resources.get(&digest(name)).cloned()
    }

    /// Reads the bytes at a place, block by block.
    pub(super) fn copy(
        &self,
        place: Range<u64>,
        each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        copy(&self.file, place, each)
    }
}

fn copy(
    file: &File,
    place: Range<u64>,
    mut each: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut block = vec![0; within(place.end - place.start, BLOCK)];
    let mut at = place.start;
    while at < place.end {
        let now = within(place.end - at, BLOCK);
        file.read_exact_at(&mut block[..now], at)?;
        each(&block[..now])?;
        at += now as u64;
    }
    Ok(())
}

/// Reads the responses in a file, reports what is in each with the place where its message begins, and
/// returns the checksum of the file.
fn read(
    protocol: Protocol,
    file: &File,
    end: u64,
    found: &mut impl FnMut(u64, Found),
) -> io::Result<u32> {
    let (mut input, mut crc, mut at) = (BufReader::with_capacity(BLOCK, file), Hasher::new(), 0);
    while at < end {
        let mut head = [0; HEAD];
        input.read_exact(&mut head)?;
        crc.update(&head);
        let [_, length @ ..] = head;
        let length = u64::from(u32::from_be_bytes(length));
        let start = at + HEAD as u64;
        at = start + length;
        let mut walker = Walker::of_names(protocol, length);
        let mut left = length;
        while left > 0 {
            let block = input.fill_buf()?;
            let block = &block[..within(left, block.len())];
            if block.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            crc.update(block);
            let walked = walker.find(block, |it| found(start, it));
            walked.map_err(io::Error::other)?;
            let read = block.len();
            input.consume(read);
            left -= read as u64;
        }
        walker.finish().map_err(io::Error::other)?;
    }
    match at == end {
        true => Ok(crc.finalize()),
        false => Err(io::Error::other(
            "its last response is longer than expected",
        )),
    }
}

/// At most this many of the bytes that are left.
fn within(left: u64, most: usize) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(most)
}

/// In the order of their bytes on disk, neighbours joined.
pub(super) fn joined(mut places: Vec<Range<u64>>) -> Vec<Range<u64>> {
    places.sort_unstable_by_key(|place| place.start);
    places.dedup_by(|next, last| {
        let is_next = last.end == next.start;
        if is_next {
            last.end = next.end;
        }
        is_next
    });
    places
}

/// The gRPC head of a message.
pub(super) fn head(length: u64) -> io::Result<[u8; HEAD]> {
    let length = u32::try_from(length).map_err(|_| io::Error::other("a message over 4 GiB"))?;
    let [a, b, c, d] = length.to_be_bytes();
    Ok([0, a, b, c, d])
}
