//! Reads a few fields of a protobuf message while its bytes pass, without holding the message.
//!
//! A [`Walker`] takes the bytes of one message in chunks of any size. It skips fields by their length
//! and keeps only the strings its schema names, so a message of any size costs the same memory, and
//! unknown fields make no difference. What is skipped is not validated. Field numbers
//! are from `envoy/service/discovery/v3/discovery.proto`, the encoding from the protobuf guide.

use prost::encoding::{WireType, decode_key, decode_varint};

use super::Protocol;

/// Longest string kept. No control plane sends a longer type URL or nonce.
const LONGEST_STRING: usize = 16 * 1024;

/// How much is kept of the reason of a NACK, which may list every resource of a response.
const LONGEST_REASON: usize = 1024;

/// The most bytes a field's tag and the length or number behind it take: two varints.
const LONGEST_HEADER: usize = 20;

/// What to do with a length-delimited field.
#[derive(Clone, Copy, Debug)]
enum Action {
    Keep(Kept),
    Enter(Schema),
    /// A resource, which is counted, and entered while the type is unknown.
    Resource(Schema),
    /// The error detail of a request, which makes it a NACK.
    ErrorDetail(Schema),
    Skip,
}

/// The fields to look at, by number.
type Schema = &'static [(u32, Action)];

/// A string that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    TypeUrl,
    Nonce,
    Version,
    ResourceType,
    Reason,
}

const ANY: Schema = &[(1, Action::Keep(Kept::ResourceType))];
const RESOURCE: Schema = &[(2, Action::Enter(ANY))];
/// Source: `google/rpc/status.proto`.
const STATUS: Schema = &[(2, Action::Keep(Kept::Reason))];

const RESPONSE: Schema = &[
    (1, Action::Keep(Kept::Version)),
    (2, Action::Resource(ANY)),
    (4, Action::Keep(Kept::TypeUrl)),
    (5, Action::Keep(Kept::Nonce)),
];
const DELTA_RESPONSE: Schema = &[
    (1, Action::Keep(Kept::Version)),
    (2, Action::Resource(RESOURCE)),
    (4, Action::Keep(Kept::TypeUrl)),
    (5, Action::Keep(Kept::Nonce)),
];
const REQUEST: Schema = &[
    (1, Action::Keep(Kept::Version)),
    (4, Action::Keep(Kept::TypeUrl)),
    (5, Action::Keep(Kept::Nonce)),
    (6, Action::ErrorDetail(STATUS)),
];
const DELTA_REQUEST: Schema = &[
    (2, Action::Keep(Kept::TypeUrl)),
    (6, Action::Keep(Kept::Nonce)),
    (7, Action::ErrorDetail(STATUS)),
];

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
    /// The beginning of the reason, if the message is a NACK.
    pub nack: Option<String>,
}

/// Walks one message.
#[derive(Clone, Debug)]
pub struct Walker {
    /// The message and those entered inside it, outermost first.
    levels: Vec<Level>,
    /// How many bytes have been read.
    at: u64,
    step: Step,
    fields: Fields,
}

#[derive(Clone, Copy, Debug)]
struct Level {
    schema: Schema,
    end: u64,
    /// Depth of the groups (wire types 3 and 4) the walker is in; all in them is skipped.
    groups: u32,
}

/// What the next byte belongs to.
#[derive(Clone, Debug)]
enum Step {
    /// The header of a field, of which earlier chunks had these bytes.
    Header(Vec<u8>),
    /// A value that is skipped up to this position.
    Skip(u64),
    /// A string that ends at this position.
    Keep(Kept, u64, Vec<u8>),
}

/// The beginning of a field: all up to its value, or all of it if that is a varint.
struct Header {
    number: u32,
    wire_type: WireType,
    /// Bytes of the value.
    value: u64,
    /// Bytes of the header.
    length: usize,
}

impl Walker {
    /// A walker of a discovery response of `length` bytes.
    pub fn response(protocol: Protocol, length: u64) -> Self {
        let schema = match protocol {
            Protocol::Sotw => RESPONSE,
            Protocol::Delta => DELTA_RESPONSE,
        };
        Self::new(schema, length)
    }

    /// A walker of a discovery request of `length` bytes.
    pub fn request(protocol: Protocol, length: u64) -> Self {
        let schema = match protocol {
            Protocol::Sotw => REQUEST,
            Protocol::Delta => DELTA_REQUEST,
        };
        Self::new(schema, length)
    }

    fn new(schema: Schema, end: u64) -> Self {
        Self {
            levels: vec![Level::new(schema, end)],
            at: 0,
            step: Step::Header(Vec::new()),
            fields: Fields::default(),
        }
    }

    pub fn fields(&self) -> &Fields {
        &self.fields
    }

    /// What has been read so far, of a message that may not be whole or well-formed.
    pub(super) fn into_fields(self) -> Fields {
        self.fields
    }

    /// The fields of a message that was fed whole.
    pub fn finish(self) -> Result<Fields, Malformed> {
        match *self.levels {
            [message] if message.end == self.at && message.groups == 0 => Ok(self.fields),
            _ => Err(Malformed("it ends inside a field")),
        }
    }

    /// Reads the next bytes of the message.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Malformed> {
        while !bytes.is_empty() {
            let read = match &mut self.step {
                Step::Header(_) => self.header(bytes)?,
                Step::Skip(end) => within(*end - self.at, bytes),
                Step::Keep(kept, end, text) => {
                    let read = within(*end - self.at, bytes);
                    let room = kept.longest() - text.len();
                    text.extend_from_slice(&bytes[..read.min(room)]);
                    read
                }
            };
            self.at += read as u64;
            bytes = &bytes[read..];
            self.settle()?;
        }
        Ok(())
    }

    /// Reads the header of a field, or what `bytes` have of it. Returns how many of them it took.
    fn header(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        let end = self.level()?.end;
        let Step::Header(before) = &mut self.step else {
            return Ok(0);
        };
        let known = before.len();
        let longest = (end - self.at).min((LONGEST_HEADER - known) as u64);
        let now = &bytes[..within(longest, bytes)];
        let is_all = now.len() as u64 == longest;
        let header = if known == 0 {
            Header::decode(now)
        } else {
            before.extend_from_slice(now);
            Header::decode(before)
        };
        match header {
            Some(header) => {
                let read = header.length - known;
                self.step = self.field(&header, self.at + read as u64)?;
                Ok(read)
            }
            None if is_all => Err(Malformed("a field without a valid tag and length")),
            None => {
                if known == 0 {
                    before.extend_from_slice(now);
                }
                Ok(now.len())
            }
        }
    }

    /// What comes after the header of a field, whose value begins at `from`.
    fn field(&mut self, header: &Header, from: u64) -> Result<Step, Malformed> {
        let level = self.level()?;
        match header.wire_type {
            WireType::StartGroup => level.groups += 1,
            WireType::EndGroup => {
                let outer = level.groups.checked_sub(1);
                level.groups = outer.ok_or(Malformed("a group ends that did not begin"))?;
            }
            _ => {}
        }
        let end = from
            .checked_add(header.value)
            .filter(|end| *end <= level.end);
        let end = end.ok_or(Malformed("a field is longer than its message"))?;
        let action = match header.wire_type {
            WireType::LengthDelimited if level.groups == 0 => {
                let known = level
                    .schema
                    .iter()
                    .find(|(known, _)| *known == header.number);
                known.map_or(Action::Skip, |(_, action)| *action)
            }
            _ => Action::Skip,
        };
        match action {
            Action::Skip => Ok(Step::Skip(end)),
            Action::Keep(Kept::Reason) => Ok(Step::Keep(Kept::Reason, end, Vec::new())),
            Action::Keep(kept) if header.value <= LONGEST_STRING as u64 => {
                Ok(Step::Keep(kept, end, Vec::new()))
            }
            Action::Keep(_) => Err(Malformed("a type URL, version or nonce over 16 KiB")),
            Action::Enter(schema) => Ok(self.enter(schema, end)),
            Action::Resource(schema) => {
                self.fields.resources = self.fields.resources.saturating_add(1);
                match self.fields.resource_type {
                    Some(_) => Ok(Step::Skip(end)),
                    None => Ok(self.enter(schema, end)),
                }
            }
            Action::ErrorDetail(schema) => {
                self.fields.nack = Some(String::new());
                Ok(self.enter(schema, end))
            }
        }
    }

    /// Goes into a message within the message.
    fn enter(&mut self, schema: Schema, end: u64) -> Step {
        self.levels.push(Level::new(schema, end));
        Step::Header(Vec::new())
    }

    /// Ends what is complete: a kept string, a skipped value, an entered message.
    fn settle(&mut self) -> Result<(), Malformed> {
        match &mut self.step {
            Step::Keep(kept, end, text) if *end == self.at => {
                let (kept, text) = (*kept, std::mem::take(text));
                self.keep(kept, text)?;
                self.step = Step::Header(Vec::new());
            }
            Step::Skip(end) if *end == self.at => self.step = Step::Header(Vec::new()),
            _ => {}
        }
        while let [_, .., last] = *self.levels
            && last.end == self.at
        {
            if last.groups > 0 {
                return Err(Malformed("a message ends inside a group"));
            }
            self.levels.pop();
        }
        Ok(())
    }

    fn keep(&mut self, kept: Kept, text: Vec<u8>) -> Result<(), Malformed> {
        let fields = &mut self.fields;
        let text = match kept {
            // It may be cut within a character.
            Kept::Reason => String::from_utf8_lossy(&text).into_owned(),
            _ => String::from_utf8(text).map_err(|_| Malformed("a string not UTF-8"))?,
        };
        match kept {
            Kept::TypeUrl => fields.type_url = text,
            Kept::Nonce => fields.nonce = text,
            Kept::Version => fields.version = text,
            Kept::ResourceType => fields.resource_type = Some(text),
            Kept::Reason => fields.nack = Some(text),
        }
        Ok(())
    }

    fn level(&mut self) -> Result<&mut Level, Malformed> {
        self.levels.last_mut().ok_or(Malformed("nothing is open"))
    }
}

impl Level {
    const fn new(schema: Schema, end: u64) -> Self {
        let groups = 0;
        Self {
            schema,
            end,
            groups,
        }
    }
}

impl Header {
    /// The header `bytes` begin with, if they hold it whole and it is one.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let (number, wire_type) = decode_key(&mut rest).ok()?;
        let value = match wire_type {
            WireType::Varint => {
                decode_varint(&mut rest).ok()?;
                0
            }
            WireType::LengthDelimited => decode_varint(&mut rest).ok()?,
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::StartGroup | WireType::EndGroup => 0,
        };
        Some(Self {
            number,
            wire_type,
            value,
            length: bytes.len() - rest.len(),
        })
    }
}

impl Kept {
    const fn longest(self) -> usize {
        match self {
            Self::Reason => LONGEST_REASON,
            Self::TypeUrl | Self::Nonce | Self::Version | Self::ResourceType => LONGEST_STRING,
        }
    }
}

/// How many of `bytes` are among the next `left`.
fn within(left: u64, bytes: &[u8]) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len())
}

#[cfg(test)]
mod tests;
