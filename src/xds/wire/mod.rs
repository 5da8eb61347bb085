//! Reads type, version, nonce and number of resources of a discovery response while its bytes pass, and
//! finds the place of each resource.
//!
//! A [`Walker`] takes the bytes of one message in chunks of any size. It skips fields by their length
//! and stores only the strings in [`Fields`], so a message of any size costs the same memory. Unknown fields
//! are skipped too. Skipped bytes are not validated. Field numbers are from
//! `envoy/service/discovery/v3/discovery.proto`, the encoding from the protobuf guide.

use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::LazyLock;

use prost::encoding::{WireType, decode_key, decode_varint};
use smallvec::SmallVec;

use super::Protocol;

/// The longest string that is read, in bytes. No control plane sends a longer type URL or nonce.
const MAX_STRING: u64 = 16 * 1024;

/// The number of the field of a delta response that has the name of a removed resource.
pub(super) const REMOVED: u32 = 6;

/// The most bytes of a field's tag and the length or number after it: two varints.
const MAX_HEADER: usize = 20;

/// The error that bytes are not a protobuf message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a protobuf message: {0}")]
pub struct Malformed(pub(super) &'static str);

/// The fields of a message that have been read so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    pub type_url: String,
    pub nonce: String,
    pub version: String,
    /// The type of the first resource, known long before `type_url`, which control planes write last.
    pub resource_type: Option<String>,
    /// The number of resources that have begun.
    pub resources: u32,
    /// The number of names of removed resources.
    pub removed: u32,
}

/// The field of a resource, or of the name of a removed one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResourceField {
    pub(super) name: NameDigest,
    /// The bytes of the field in the message, tag included.
    pub(super) range: Range<u64>,
    pub(super) is_removed: bool,
}

/// A digest that stands for the name of a resource, in this process only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NameDigest(u64);

impl NameDigest {
    pub(super) fn of(name: &[u8]) -> Self {
        let mut hasher = hasher();
        hasher.write(name);
        Self(hasher.finish())
    }
}

fn hasher() -> DefaultHasher {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.build_hasher()
}

/// Walks one message.
#[derive(Clone, Debug)]
pub struct Walker {
    protocol: Protocol,
    /// The hasher of the name that is being read; None if names are not read.
    name_hasher: Option<DefaultHasher>,
    /// The beginning of the last field outside of resources.
    field_start: u64,
    /// The length of the message.
    end: u64,
    /// The ends of the nested messages that are being read, outermost first: a resource, and its `Any`.
    nested_ends: SmallVec<[u64; 2]>,
    /// The number of bytes that have been read.
    position: u64,
    step: Step,
    /// The part of a header or of a stored string from earlier chunks.
    partial: Vec<u8>,
    /// The fields so far. The message may be incomplete or malformed.
    pub(super) fields: Fields,
}

/// The part of a field that the next byte belongs to.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A [`Header`].
    Header,
    /// A value that is skipped up to this position.
    Skip(u64),
    /// A string that ends at this position, and its member of [`Fields`].
    Store(u64, Member),
    /// A name that ends at this position.
    Name(u64),
}

type Member = fn(&mut Fields) -> &mut String;

impl Walker {
    /// Creates a walker of a discovery response of `length` bytes.
    pub fn new(protocol: Protocol, length: u64) -> Self {
        Self {
            protocol,
            name_hasher: None,
            field_start: 0,
            end: length,
            nested_ends: SmallVec::new(),
            position: 0,
            step: Step::Header,
            partial: Vec::new(),
            fields: Fields::default(),
        }
    }

    /// Creates a walker of a delta response, for [`Walker::find`].
    pub(super) fn finder(length: u64) -> Self {
        Self { name_hasher: Some(hasher()), ..Self::new(Protocol::Delta, length) }
    }

    /// Returns the fields of a complete message. Fails if bytes are missing.
    pub fn finish(self) -> Result<Fields, Malformed> {
        if self.position == self.end {
            Ok(self.fields)
        } else {
            Err(Malformed("it ends inside a field"))
        }
    }

    /// Reads the next bytes of the message.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        self.find(bytes, |_| ())
    }

    /// Reads the next bytes of the message, and calls `each` for the resources that end in them.
    pub(super) fn find(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(ResourceField),
    ) -> Result<(), Malformed> {
        while !bytes.is_empty() {
            let read = match self.step {
                Step::Header => self.read_header(bytes)?,
                Step::Skip(end) | Step::Store(end, _) | Step::Name(end) => {
                    let part = &bytes[..available(end - self.position, bytes)];
                    match (self.step, &mut self.name_hasher) {
                        (Step::Store(..), _) => self.partial.extend_from_slice(part),
                        (Step::Name(_), Some(hasher)) => hasher.write(part),
                        _ => {}
                    }
                    part.len()
                }
            };
            self.position += read as u64;
            bytes = &bytes[read..];
            self.end_fields(&mut each)?;
        }
        Ok(())
    }

    /// Returns the number of bytes that have been read.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Returns the beginning of the outermost field that has begun and not ended, or the position if there is none.
    pub(super) fn field_start(&self) -> u64 {
        match self.step {
            Step::Header if self.nested_ends.is_empty() => {
                self.position - self.partial.len() as u64
            }
            _ => self.field_start,
        }
    }

    /// Returns the end of the innermost message.
    fn inner_end(&self) -> u64 {
        self.nested_ends.last().copied().unwrap_or(self.end)
    }

    /// Reads the header of a field, or the part of it in `bytes`. Returns the number of bytes it has read.
    fn read_header(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        let start = self.position - self.partial.len() as u64;
        let left = self.inner_end() - self.position;
        let (read, header) = read_header(&mut self.partial, bytes, left)?;
        let Some(Header { number, wire_type, length }) = header else {
            return Ok(read);
        };
        if self.nested_ends.is_empty() {
            self.field_start = start;
        }
        let end = self.position + read as u64 + length;
        self.step = match wire_type {
            WireType::LengthDelimited => self.begin_value(number, length, end)?,
            _ => Step::Skip(end),
        };
        Ok(read)
    }

    /// Returns the step that reads the value of a length-delimited field.
    fn begin_value(&mut self, number: u32, length: u64, end: u64) -> Result<Step, Malformed> {
        let fields = &mut self.fields;
        let finds_names = self.name_hasher.is_some();
        let has_type = fields.resource_type.is_some();
        if (self.protocol, self.nested_ends.len(), number) == (Protocol::Delta, 0, REMOVED) {
            fields.removed = fields.removed.saturating_add(1);
        }
        let member: Member = match (self.nested_ends.len(), number) {
            (0, 1) => |fields| &mut fields.version,
            (0, 4) => |fields| &mut fields.type_url,
            (0, 5) => |fields| &mut fields.nonce,
            (0, 2) => {
                fields.resources = fields.resources.saturating_add(1);
                if has_type && !finds_names {
                    return Ok(Step::Skip(end));
                }
                return Ok(self.enter(end));
            }
            (depth, _) => match (self.protocol, depth, number) {
                (Protocol::Sotw, 1, 1) | (Protocol::Delta, 2, 1) if !has_type => {
                    |fields| fields.resource_type.get_or_insert_default()
                }
                (Protocol::Delta, 1, 2) if !has_type => return Ok(self.enter(end)),
                (Protocol::Delta, 1, 3) | (Protocol::Delta, 0, REMOVED) if finds_names => {
                    self.name_hasher = Some(hasher());
                    return Ok(Step::Name(end));
                }
                _ => return Ok(Step::Skip(end)),
            },
        };
        if length > MAX_STRING {
            return Err(Malformed("a type URL, version or nonce over 16 KiB"));
        }
        Ok(Step::Store(end, member))
    }

    /// Begins a nested message.
    fn enter(&mut self, end: u64) -> Step {
        self.nested_ends.push(end);
        Step::Header
    }

    /// Ends the values and nested messages that are complete.
    fn end_fields(&mut self, each: &mut impl FnMut(ResourceField)) -> Result<(), Malformed> {
        match self.step {
            Step::Store(end, member) if end == self.position => {
                let text = String::from_utf8(std::mem::take(&mut self.partial));
                *member(&mut self.fields) = text.map_err(|_| Malformed("a string not UTF-8"))?;
                self.step = Step::Header;
            }
            Step::Skip(end) if end == self.position => self.step = Step::Header,
            Step::Name(end) if end == self.position => {
                self.step = Step::Header;
                if self.nested_ends.is_empty() {
                    self.end_resource(true, each);
                }
            }
            _ => {}
        }
        while self.nested_ends.last() == Some(&self.position) {
            self.nested_ends.pop();
            if self.nested_ends.is_empty() {
                self.end_resource(false, each);
            }
        }
        Ok(())
    }

    /// Calls `each` for a resource that is complete, if names are read.
    fn end_resource(&mut self, is_removed: bool, each: &mut impl FnMut(ResourceField)) {
        if let Some(name_hasher) = &mut self.name_hasher {
            each(ResourceField {
                name: NameDigest(std::mem::replace(name_hasher, hasher()).finish()),
                range: self.field_start..self.position,
                is_removed,
            });
        }
    }
}

/// All of a field before its value, or the whole field if the value is a varint.
pub(super) struct Header {
    pub(super) number: u32,
    pub(super) wire_type: WireType,
    /// The length of the value. The message is at least that long.
    pub(super) length: u64,
}

/// Reads the header of a field, or the part of it in `bytes`. `partial` has the part of the header from earlier chunks,
/// and the message has `left` more bytes. Returns the number of bytes it has read, and the header once it is complete.
pub(super) fn read_header(
    partial: &mut Vec<u8>,
    bytes: &[u8],
    left: u64,
) -> Result<(usize, Option<Header>), Malformed> {
    let longest = left.min((MAX_HEADER - partial.len()) as u64);
    let tried = available(longest, bytes);
    partial.extend_from_slice(&bytes[..tried]);
    let mut rest = &partial[..];
    let Some(header) = decode_header(&mut rest) else {
        if tried as u64 == longest {
            return Err(Malformed("a field without a valid tag and length"));
        }
        return Ok((tried, None));
    };
    let read = tried - rest.len();
    partial.clear();
    if header.length > left - read as u64 {
        return Err(Malformed("a field is longer than its message"));
    }
    Ok((read, Some(header)))
}

/// Splits a complete and valid header off `bytes`.
pub(super) fn decode_header(bytes: &mut &[u8]) -> Option<Header> {
    let (number, wire_type) = decode_key(bytes).ok()?;
    let length = match wire_type {
        WireType::Varint => decode_varint(bytes).map(|_| 0).ok()?,
        WireType::LengthDelimited => decode_varint(bytes).ok()?,
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        // Messages of proto3 do not have groups.
        WireType::StartGroup | WireType::EndGroup => return None,
    };
    Some(Header { number, wire_type, length })
}

/// Returns how many of `bytes` belong to a value that has `left` more bytes.
pub(super) fn available(left: u64, bytes: &[u8]) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len())
}

#[cfg(test)]
mod tests;
