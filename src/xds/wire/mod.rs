//! Reads type, version, nonce and number of resources of a discovery response while its bytes pass, and
//! where each resource is.
//!
//! A [`Walker`] takes the bytes of one message in chunks of any size. It skips fields by their length
//! and keeps only the strings it is there for, so a message of any size costs the same memory, and
//! unknown fields make no difference. What is skipped is not validated. Field numbers are from
//! `envoy/service/discovery/v3/discovery.proto`, the encoding from the protobuf guide.

use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::LazyLock;

use prost::encoding::{WireType, decode_key, decode_varint};
use smallvec::SmallVec;

use super::Protocol;

/// Longest string kept. No control plane sends a longer type URL or nonce.
const MAX_STRING: u64 = 16 * 1024;

/// The most bytes a field's tag and the length or number behind it take: two varints.
const MAX_HEADER: usize = 20;

/// The bytes are no protobuf message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a protobuf message: {0}")]
pub struct Malformed(&'static str);

/// What has been read of a message so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    pub type_url: String,
    pub nonce: String,
    pub version: String,
    /// The type of the first resource, known long before `type_url`, which is written last.
    pub resource_type: Option<String>,
    /// How many resources have begun.
    pub resources: u32,
}

/// A resource or the name of a removed one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The [`digest`] of its name.
    pub(super) name: u64,
    /// Where the field is in the message, tag included.
    pub(super) place: Range<u64>,
    pub(super) is_removed: bool,
}

/// Stands for a name, in this process.
pub(super) fn digest(name: &[u8]) -> u64 {
    let mut hasher = hasher();
    hasher.write(name);
    hasher.finish()
}

fn hasher() -> DefaultHasher {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.build_hasher()
}

/// Walks one message.
#[derive(Clone, Debug)]
pub struct Walker {
    protocol: Protocol,
    /// Of the name that is being read, if names are looked for at all.
    name: Option<DefaultHasher>,
    /// Where the last field outside of resources begins.
    field: u64,
    /// Length of the message.
    end: u64,
    /// Ends of the messages entered inside it, outermost first: a resource, and its `Any`.
    entered: SmallVec<[u64; 2]>,
    /// How many bytes have been read.
    at: u64,
    step: Step,
    /// The part of a header or of a kept string that earlier chunks had.
    held: Vec<u8>,
    /// What has been read so far, of a message that may not be whole or well-formed.
    pub(super) fields: Fields,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The header of a field: all up to its value, or all of it if that is a varint.
    Header,
    /// A value that is skipped up to this position.
    Skip(u64),
    /// A string that ends at this position, and where it is kept.
    Keep(u64, Place),
    /// A name that ends at this position.
    Name(u64),
}

type Place = fn(&mut Fields) -> &mut String;

impl Walker {
    /// A walker of a discovery response of `length` bytes.
    pub fn new(protocol: Protocol, length: u64) -> Self {
        Self {
            protocol,
            name: None,
            field: 0,
            end: length,
            entered: SmallVec::new(),
            at: 0,
            step: Step::Header,
            held: Vec::new(),
            fields: Fields::default(),
        }
    }

    /// Like [`Walker::new`] of a delta response, for [`Walker::find`].
    pub(super) fn of_names(length: u64) -> Self {
        Self {
            name: Some(hasher()),
            ..Self::new(Protocol::Delta, length)
        }
    }

    /// The fields of a message that was fed whole.
    pub fn finish(self) -> Result<Fields, Malformed> {
        match self.at == self.end {
            true => Ok(self.fields),
            false => Err(Malformed("it ends inside a field")),
        }
    }

    /// Reads the next bytes of the message.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        self.find(bytes, |_| ())
    }

    /// Reads the next bytes of the message, and reports what ends in them.
    pub(super) fn find(
        &mut self,
        mut bytes: &[u8],
        mut found: impl FnMut(Found),
    ) -> Result<(), Malformed> {
        while !bytes.is_empty() {
            let read = match self.step {
                Step::Header => self.header(bytes)?,
                Step::Skip(end) => within(end - self.at, bytes),
                Step::Keep(end, _) => {
                    let read = within(end - self.at, bytes);
                    self.held.extend_from_slice(&bytes[..read]);
                    read
                }
                Step::Name(end) => {
                    let read = within(end - self.at, bytes);
                    if let Some(name) = &mut self.name {
                        name.write(&bytes[..read]);
                    }
                    read
                }
            };
            self.at += read as u64;
            bytes = &bytes[read..];
            self.settle(&mut found)?;
        }
        Ok(())
    }

    /// The end of the innermost message.
    fn inner_end(&self) -> u64 {
        self.entered.last().copied().unwrap_or(self.end)
    }

    /// Reads the header of a field, or what `bytes` have of it. Returns how many of them it took.
    fn header(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        let known = self.held.len();
        let longest = (self.inner_end() - self.at).min((MAX_HEADER - known) as u64);
        let now = within(longest, bytes);
        self.held.extend_from_slice(&bytes[..now]);
        let mut rest = &self.held[..];
        let Some((number, wire_type, length)) = decode_header(&mut rest) else {
            return match now as u64 == longest {
                true => Err(Malformed("a field without a valid tag and length")),
                false => Ok(now),
            };
        };
        let read = now - rest.len();
        self.held.clear();
        if self.entered.is_empty() {
            self.field = self.at - known as u64;
        }
        let end = (self.at + read as u64).checked_add(length);
        let end = end.filter(|end| *end <= self.inner_end());
        let end = end.ok_or(Malformed("a field is longer than its message"))?;
        self.step = match wire_type {
            WireType::LengthDelimited => self.field(number, length, end)?,
            _ => Step::Skip(end),
        };
        Ok(read)
    }

    /// What to do with the value of a length-delimited field.
    fn field(&mut self, number: u32, length: u64, end: u64) -> Result<Step, Malformed> {
        let (fields, finds_names) = (&mut self.fields, self.name.is_some());
        let has_type = fields.resource_type.is_some();
        let place: Place = match (self.entered.len(), number) {
            (0, 1) => |fields| &mut fields.version,
            (0, 4) => |fields| &mut fields.type_url,
            (0, 5) => |fields| &mut fields.nonce,
            (0, 2) => {
                fields.resources = fields.resources.saturating_add(1);
                return Ok(match has_type && !finds_names {
                    true => Step::Skip(end),
                    false => self.enter(end),
                });
            }
            (depth, _) => match (self.protocol, depth, number) {
                (Protocol::Sotw, 1, 1) | (Protocol::Delta, 2, 1) if !has_type => {
                    |fields| fields.resource_type.get_or_insert_default()
                }
                (Protocol::Delta, 1, 2) if !has_type => return Ok(self.enter(end)),
                (Protocol::Delta, 1, 3) | (Protocol::Delta, 0, 6) if finds_names => {
                    self.name = Some(hasher());
                    return Ok(Step::Name(end));
                }
                _ => return Ok(Step::Skip(end)),
            },
        };
        if length > MAX_STRING {
            return Err(Malformed("a type URL, version or nonce over 16 KiB"));
        }
        Ok(Step::Keep(end, place))
    }

    fn enter(&mut self, end: u64) -> Step {
        self.entered.push(end);
        Step::Header
    }

    /// Ends what is complete: a kept string, a name, a skipped value, entered messages.
    fn settle(&mut self, found: &mut impl FnMut(Found)) -> Result<(), Malformed> {
        match self.step {
            Step::Keep(end, place) if end == self.at => {
                let text = std::mem::take(&mut self.held);
                let text = String::from_utf8(text).map_err(|_| Malformed("a string not UTF-8"))?;
                *place(&mut self.fields) = text;
                self.step = Step::Header;
            }
            Step::Skip(end) if end == self.at => self.step = Step::Header,
            Step::Name(end) if end == self.at => {
                self.step = Step::Header;
                if self.entered.is_empty() {
                    self.found(true, found);
                }
            }
            _ => {}
        }
        while self.entered.last() == Some(&self.at) {
            self.entered.pop();
            if self.entered.is_empty() {
                self.found(false, found);
            }
        }
        Ok(())
    }

    fn found(&mut self, is_removed: bool, found: &mut impl FnMut(Found)) {
        if let Some(name) = &mut self.name {
            found(Found {
                name: std::mem::replace(name, hasher()).finish(),
                place: self.field..self.at,
                is_removed,
            });
        }
    }
}

/// Takes the header off `bytes`, if they hold it whole and it is one: the field's number, its wire
/// type, and the length of what follows.
pub(super) fn decode_header(bytes: &mut &[u8]) -> Option<(u32, WireType, u64)> {
    let (number, wire_type) = decode_key(bytes).ok()?;
    let length = match wire_type {
        WireType::Varint => decode_varint(bytes).map(|_| 0).ok()?,
        WireType::LengthDelimited => decode_varint(bytes).ok()?,
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        // No message of proto3 has groups.
        WireType::StartGroup | WireType::EndGroup => return None,
    };
    Some((number, wire_type, length))
}

/// How many of `bytes` are among the next `left`.
fn within(left: u64, bytes: &[u8]) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len())
}

#[cfg(test)]
mod tests;
