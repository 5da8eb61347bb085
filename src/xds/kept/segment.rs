//! Responses on disk, a file each: writing one, and finding the resources that several leave in force.
//!
//! A file holds a message as it came, gRPC head included. A later response of a type replaces the
//! resources of the same names, as in Envoy.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;

use crc32fast::Hasher;
use prost::encoding::{WireType, encode_key, encode_varint};
use serde::{Deserialize, Serialize};

use crate::xds::Protocol;
use crate::xds::request::HEAD;
use crate::xds::wire::decode_header;

/// Field numbers of a response in both protocols, and of the removed names in delta.
pub(super) const VERSION: u32 = 1;
pub(super) const RESOURCES: u32 = 2;
pub(super) const TYPE_URL: u32 = 4;
pub(super) const NONCE: u32 = 5;
const REMOVED: u32 = 6;

/// Of the name in a `Resource` of delta, and of the resource itself.
pub(super) const NAME: u32 = 3;
pub(super) const RESOURCE: u32 = 2;
/// Of the type and the value of an `Any`. Types of Envoy begin with their name.
pub(super) const TYPE_OF_ANY: u32 = 1;
pub(super) const VALUE: u32 = 2;
pub(super) const NAME_IN_VALUE: u32 = 1;

/// No resource is larger: it is read whole to find its name.
const LARGEST_RESOURCE: u64 = 256 << 20;

/// How much is copied at once.
pub(super) const BLOCK: usize = 64 * 1024;

/// A whole file that counts, as the manifest names it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Segment {
    pub(super) file: u64,
    pub(super) length: u64,
    pub(super) crc: u32,
}

/// A file that is being written, with what will identify it.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) number: u64,
    pub(super) file: File,
    pub(super) length: u64,
    crc: Hasher,
}

impl Draft {
    pub(super) fn new(number: u64, file: File) -> Self {
        Self {
            number,
            file,
            length: 0,
            crc: Hasher::new(),
        }
    }

    /// What the manifest says of it once it is on disk.
    pub(super) fn segment(&self) -> Segment {
        Segment {
            file: self.number,
            length: self.length,
            crc: self.crc.clone().finalize(),
        }
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.crc.update(&bytes[..written]);
        self.length += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where the bytes of a resource or of a removed name are, tag and length included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// The index among the files.
    file: usize,
    start: u64,
    pub(super) length: u64,
}

/// The resources in force of a type, and the names removed.
#[derive(Debug, Default)]
pub(super) struct Index {
    files: Vec<File>,
    /// By a digest of the name, which takes less memory than the name; and whether it is removed.
    names: HashMap<u128, (Place, bool)>,
    digest: [RandomState; 2],
}

impl Index {
    /// Reads the files of a type from the oldest to the newest, and compares their checksums.
    pub(super) fn read(
        protocol: Protocol,
        segments: &[Segment],
        open: impl Fn(u64) -> io::Result<File>,
    ) -> io::Result<Self> {
        let mut index = Self::default();
        for segment in segments {
            let file = open(segment.file)?;
            let found = file.metadata()?.len();
            if found != segment.length {
                let expected = segment.length;
                return Err(broken(
                    segment,
                    &format!("it has {found} bytes, expected {expected}"),
                ));
            }
            index
                .add(protocol, segment, &file)
                .map_err(|error| broken(segment, &error.to_string()))?;
            index.files.push(file);
        }
        Ok(index)
    }

    fn add(&mut self, protocol: Protocol, segment: &Segment, file: &File) -> io::Result<()> {
        let mut fields = Fields::new(file, segment.length)?;
        while let Some((number, place)) = fields.next(self.files.len())? {
            let name = match (number, protocol) {
                (RESOURCES, _) => name(protocol, &fields.content)?,
                (REMOVED, Protocol::Delta) => &fields.content,
                _ => continue,
            };
            let digest = self.digest(name);
            self.names.insert(digest, (place, number == REMOVED));
        }
        match fields.input.into_inner().crc.finalize() == segment.crc {
            true => Ok(()),
            false => Err(io::Error::other("its checksum is wrong")),
        }
    }

    /// Writes what several files leave in force as one response. Those removed are part of it if there
    /// are older files.
    pub(super) fn merge(&self, has_older: bool, draft: &mut Draft) -> io::Result<()> {
        let names = self.names.values();
        let names = names.filter(|(_, is_removed)| has_older || !is_removed);
        let places = sorted(names.map(|(place, _)| *place).collect());
        draft.write_all(&head(places.iter().map(|place| place.length).sum())?)?;
        places
            .into_iter()
            .try_for_each(|place| self.copy(place, |block| draft.write_all(block)))
    }

    /// The resources in force.
    pub(super) fn resources(&self) -> impl Iterator<Item = Place> {
        let names = self.names.values();
        names.filter_map(|(place, is_removed)| (!is_removed).then_some(*place))
    }

    /// The resource in force of this name.
    pub(super) fn get(&self, name: &[u8]) -> Option<Place> {
        let (place, is_removed) = self.names.get(&self.digest(name))?;
        (!is_removed).then_some(*place)
    }

    fn digest(&self, name: &[u8]) -> u128 {
        let [high, low] = self.digest.each_ref().map(|digest| digest.hash_one(name));
        u128::from(high) << 64 | u128::from(low)
    }

    /// Reads the bytes at a place, block by block.
    pub(super) fn copy(
        &self,
        place: Place,
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut block = vec![0; BLOCK.min(usize::try_from(place.length).unwrap_or(BLOCK))];
        let (mut at, end) = (place.start, place.start + place.length);
        while at < end {
            let now = block
                .len()
                .min(usize::try_from(end - at).unwrap_or(usize::MAX));
            self.files[place.file].read_exact_at(&mut block[..now], at)?;
            each(&block[..now])?;
            at += now as u64;
        }
        Ok(())
    }
}

/// In the order of their bytes on disk, neighbours joined.
pub(super) fn sorted(mut places: Vec<Place>) -> Vec<Place> {
    places.sort_unstable();
    let mut joined: Vec<Place> = Vec::new();
    for place in places {
        match joined.last_mut() {
            Some(last) if last.file == place.file && last.start + last.length == place.start => {
                last.length += place.length;
            }
            _ => joined.push(place),
        }
    }
    joined
}

/// The gRPC head of a message.
pub(super) fn head(length: u64) -> io::Result<[u8; HEAD]> {
    let length = u32::try_from(length).map_err(|_| io::Error::other("a message over 4 GiB"))?;
    let [a, b, c, d] = length.to_be_bytes();
    Ok([0, a, b, c, d])
}

/// A file with a message of removed names only: what Envoy has unsubscribed from.
pub(super) fn write_removed(names: &[bytes::Bytes], draft: &mut Draft) -> io::Result<()> {
    let mut message = Vec::new();
    for name in names {
        field(REMOVED, name, &mut message);
    }
    draft.write_all(&head(message.len() as u64)?)?;
    draft.write_all(&message)
}

/// Appends a length-delimited field.
pub(super) fn field(number: u32, content: &[u8], message: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, message);
    encode_varint(content.len() as u64, message);
    message.extend_from_slice(content);
}

/// The name of a resource: the wrapper's, or the first field of the resource itself.
fn name(protocol: Protocol, resource: &[u8]) -> io::Result<&[u8]> {
    match protocol {
        Protocol::Delta => last(resource, NAME),
        Protocol::Sotw => last(last(resource, VALUE)?, NAME_IN_VALUE),
    }
}

/// The content of the last field of a number; empty if there is none.
fn last(mut message: &[u8], wanted: u32) -> io::Result<&[u8]> {
    let mut found = &message[..0];
    while !message.is_empty() {
        let header = decode_header(&mut message);
        let (number, kind, length) = header.ok_or_else(malformed)?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let (content, rest) = message.split_at_checked(length).ok_or_else(malformed)?;
        if (number, kind) == (wanted, WireType::LengthDelimited) {
            found = content;
        }
        message = rest;
    }
    Ok(found)
}

/// The fields of a message on disk, one by one.
struct Fields<'a> {
    input: BufReader<Summed<'a>>,
    at: u64,
    end: u64,
    /// The content of the last field, if it is length-delimited.
    content: Vec<u8>,
}

/// A file whose bytes are summed up as they are read.
struct Summed<'a> {
    file: &'a File,
    crc: Hasher,
}

impl Read for Summed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(bytes)?;
        self.crc.update(&bytes[..read]);
        Ok(read)
    }
}

impl<'a> Fields<'a> {
    fn new(file: &'a File, end: u64) -> io::Result<Self> {
        let crc = Hasher::new();
        let mut input = BufReader::with_capacity(BLOCK, Summed { file, crc });
        let mut found = [0; HEAD];
        input.read_exact(&mut found)?;
        let at = HEAD as u64;
        match found == head(end - at)? {
            true => Ok(Self {
                input,
                at,
                end,
                content: Vec::new(),
            }),
            false => Err(malformed()),
        }
    }

    /// The number and place of the next field.
    fn next(&mut self, file: usize) -> io::Result<Option<(u32, Place)>> {
        if self.at == self.end {
            return Ok(None);
        }
        let start = self.at;
        let key = self.varint()?;
        let length = match WireType::try_from(key & 7).map_err(|_| malformed())? {
            WireType::Varint => self.varint().map(|_| 0)?,
            WireType::LengthDelimited => self.varint()?,
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::StartGroup | WireType::EndGroup => return Err(malformed()),
        };
        if length > LARGEST_RESOURCE || length > self.end.saturating_sub(self.at) {
            return Err(malformed());
        }
        self.content.resize(usize::try_from(length).unwrap_or(0), 0);
        self.input.read_exact(&mut self.content)?;
        self.at += length;
        let number = u32::try_from(key >> 3).map_err(|_| malformed())?;
        let length = self.at - start;
        Ok(Some((
            number,
            Place {
                file,
                start,
                length,
            },
        )))
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let mut byte = [0];
            self.input.read_exact(&mut byte)?;
            self.at += 1;
            value |= u64::from(byte[0] & 0x7f) << shift;
            if byte[0] < 0x80 {
                return Ok(value);
            }
        }
        Err(malformed())
    }
}

fn malformed() -> io::Error {
    io::Error::other("it holds no discovery response")
}

fn broken(segment: &Segment, why: &str) -> io::Error {
    io::Error::other(format!("file {}: {why}", segment.file))
}
