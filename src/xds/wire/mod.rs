//! Reads a few fields of a protobuf message while its bytes pass, without holding the message.
//!
//! A [`Walker`] is fed the bytes of one message in any chunking. It steps over everything by length
//! and keeps only the strings a [`Schema`] names, so a message of any size costs no memory, and
//! fields the agent has never heard of are nobody's business. Source: the protobuf encoding guide;
//! field numbers from `envoy/service/discovery/v3/discovery.proto`.
//!
//! Does not validate what it steps over: Envoy and istiod judge their own messages.

use super::Protocol;

/// Longest string kept. A longer type URL or nonce is none that any control plane sends.
const LONGEST_STRING: u64 = 16 * 1024;

/// How much is kept of the reason for a refusal, which may list every resource of a response.
const LONGEST_REASON: u64 = 1024;

/// What to do with one field of a message.
#[derive(Clone, Copy, Debug)]
enum Action {
    Keep(Slot),
    Enter(&'static Schema),
    /// A resource, which is counted, and entered until one has told its type.
    Resource(&'static Schema),
    /// What a request holds only if it refuses a response.
    Refusal(&'static Schema),
    Skip,
}

/// The fields worth stopping at, by number.
#[derive(Debug)]
struct Schema(&'static [(u32, Action)]);

/// Where a kept string goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    TypeUrl,
    Nonce,
    Version,
    ResourceType,
    Reason,
}

const ANY: Schema = Schema(&[(1, Action::Keep(Slot::ResourceType))]);
const RESOURCE: Schema = Schema(&[(2, Action::Enter(&ANY))]);

/// Field 2 of either response, with a length.
const RESOURCE_TAG: u8 = 2 << 3 | 2;

const RESPONSE: Schema = Schema(&[
    (1, Action::Keep(Slot::Version)),
    (2, Action::Resource(&ANY)),
    (4, Action::Keep(Slot::TypeUrl)),
    (5, Action::Keep(Slot::Nonce)),
]);
const DELTA_RESPONSE: Schema = Schema(&[
    (1, Action::Keep(Slot::Version)),
    (2, Action::Resource(&RESOURCE)),
    (4, Action::Keep(Slot::TypeUrl)),
    (5, Action::Keep(Slot::Nonce)),
]);
/// Source: `google/rpc/status.proto`.
const STATUS: Schema = Schema(&[(2, Action::Keep(Slot::Reason))]);
const REQUEST: Schema = Schema(&[
    (1, Action::Keep(Slot::Version)),
    (4, Action::Keep(Slot::TypeUrl)),
    (5, Action::Keep(Slot::Nonce)),
    (6, Action::Refusal(&STATUS)),
]);
const DELTA_REQUEST: Schema = Schema(&[
    (2, Action::Keep(Slot::TypeUrl)),
    (6, Action::Keep(Slot::Nonce)),
    (7, Action::Refusal(&STATUS)),
]);

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
    /// Why a request refuses a response, cut to a bounded length; None if it does not.
    pub refusal: Option<String>,
}

/// Walks one message.
#[derive(Clone, Debug)]
pub struct Walker {
    /// The message and those entered inside it, outermost first.
    levels: Vec<Level>,
    step: Step,
    fields: Fields,
}

#[derive(Clone, Debug)]
struct Level {
    schema: &'static Schema,
    /// Bytes of this message not read yet.
    left: u64,
    /// Depth of the groups (wire types 3 and 4) the walker is in; all in them is skipped.
    groups: u32,
}

/// What the next byte belongs to.
#[derive(Clone, Debug)]
enum Step {
    Tag(Varint),
    SkipVarint(Varint),
    Length(Action, Varint),
    SkipBytes(u64),
    Keep(Slot, u64, Vec<u8>),
}

#[derive(Clone, Copy, Debug, Default)]
struct Varint {
    value: u64,
    bytes: u8,
}

impl Walker {
    /// A walker of a discovery response of `length` bytes.
    pub fn response(protocol: Protocol, length: u64) -> Self {
        Self::new(
            match protocol {
                Protocol::StateOfTheWorld => &RESPONSE,
                Protocol::Delta => &DELTA_RESPONSE,
            },
            length,
        )
    }

    /// A walker of a discovery request of `length` bytes.
    pub fn request(protocol: Protocol, length: u64) -> Self {
        Self::new(
            match protocol {
                Protocol::StateOfTheWorld => &REQUEST,
                Protocol::Delta => &DELTA_REQUEST,
            },
            length,
        )
    }

    fn new(schema: &'static Schema, left: u64) -> Self {
        Self {
            levels: vec![Level {
                schema,
                left,
                groups: 0,
            }],
            step: Step::next(),
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
        match self.levels.as_slice() {
            [message] if message.left == 0 && message.groups == 0 && self.between_fields() => {
                Ok(self.fields)
            }
            _ => Err(Malformed("it ends inside a field")),
        }
    }

    /// Reads the next bytes of the message.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Malformed> {
        while let Some(&byte) = bytes.first() {
            let skipped = self.skip_resources(bytes);
            if skipped > 0 {
                self.charge(skipped as u64)?;
                bytes = &bytes[skipped..];
                continue;
            }
            let used = match &self.step {
                Step::SkipBytes(left) | Step::Keep(_, left, _) => usize::try_from(*left)
                    .unwrap_or(usize::MAX)
                    .min(bytes.len()),
                Step::Tag(_) | Step::Length(..) | Step::SkipVarint(_) => 1,
            };
            let (now, rest) = bytes.split_at(used);
            self.charge(used as u64)?;
            self.read(byte, now)?;
            self.settle()?;
            bytes = rest;
        }
        Ok(())
    }

    /// Counts the resources that lie whole at the start of `bytes`, if there is nothing more to learn
    /// from them, and returns their length. The same comes out byte by byte, but slower: large
    /// messages are mostly this.
    fn skip_resources(&mut self, bytes: &[u8]) -> usize {
        let [message] = self.levels.as_slice() else {
            return 0;
        };
        if message.groups > 0 || self.fields.resource_type.is_none() || !self.between_fields() {
            return 0;
        }
        let within = usize::try_from(message.left).unwrap_or(usize::MAX);
        let bytes = &bytes[..within.min(bytes.len())];
        let mut at = 0;
        while let Some(length) = resource_length(&bytes[at..]) {
            at += length;
            self.fields.resources = self.fields.resources.saturating_add(1);
        }
        at
    }

    /// Takes `bytes` off what every open message has left.
    fn charge(&mut self, bytes: u64) -> Result<(), Malformed> {
        for level in &mut self.levels {
            level.left = level
                .left
                .checked_sub(bytes)
                .ok_or(Malformed("a field is longer than its message"))?;
        }
        Ok(())
    }

    /// Handles `bytes`, of which `byte` is the first and for tags and numbers the only one.
    fn read(&mut self, byte: u8, bytes: &[u8]) -> Result<(), Malformed> {
        match &mut self.step {
            Step::Tag(varint) => {
                if let Some(tag) = varint.push(byte)? {
                    self.step = self.field(tag)?;
                }
            }
            Step::Length(action, varint) => {
                let action = *action;
                if let Some(length) = varint.push(byte)? {
                    self.step = self.value(action, length)?;
                }
            }
            Step::SkipVarint(varint) => {
                if varint.push(byte)?.is_some() {
                    self.step = Step::next();
                }
            }
            Step::SkipBytes(left) => *left -= bytes.len() as u64,
            Step::Keep(slot, left, kept) => {
                let room = slot.longest() as usize - kept.len();
                kept.extend_from_slice(&bytes[..room.min(bytes.len())]);
                *left -= bytes.len() as u64;
            }
        }
        Ok(())
    }

    /// What comes after the tag of a field.
    fn field(&mut self, tag: u64) -> Result<Step, Malformed> {
        let level = self.level()?;
        let number = u32::try_from(tag >> 3).map_err(|_| Malformed("a field number too large"))?;
        if number == 0 {
            return Err(Malformed("a field numbered 0"));
        }
        Ok(match tag & 7 {
            0 => Step::SkipVarint(Varint::default()),
            1 => level.skip(8)?,
            2 => {
                let action = match level.groups {
                    0 => level.schema.action(number),
                    _ => Action::Skip,
                };
                Step::Length(action, Varint::default())
            }
            3 => {
                level.groups += 1;
                Step::next()
            }
            4 => {
                level.groups = level
                    .groups
                    .checked_sub(1)
                    .ok_or(Malformed("a group ends that did not begin"))?;
                Step::next()
            }
            5 => level.skip(4)?,
            _ => return Err(Malformed("an unknown wire type")),
        })
    }

    /// What comes after the length of a field.
    fn value(&mut self, action: Action, length: u64) -> Result<Step, Malformed> {
        let skipped = self.level()?.skip(length)?;
        match action {
            Action::Skip => Ok(skipped),
            Action::Keep(slot) if slot == Slot::Reason || length <= slot.longest() => {
                Ok(Step::Keep(slot, length, Vec::new()))
            }
            Action::Keep(_) => Err(Malformed("a type URL, version or nonce over 16 KiB")),
            Action::Resource(schema) => {
                self.fields.resources = self.fields.resources.saturating_add(1);
                Ok(self.enter(schema, length))
            }
            Action::Refusal(schema) => {
                self.fields.refusal = Some(String::new());
                Ok(self.enter(schema, length))
            }
            Action::Enter(schema) => Ok(self.enter(schema, length)),
        }
    }

    /// Goes into a message within the message, unless a resource before it has told its type.
    fn enter(&mut self, schema: &'static Schema, length: u64) -> Step {
        if self.fields.resource_type.is_some() {
            return Step::SkipBytes(length);
        }
        self.levels.push(Level {
            schema,
            left: length,
            groups: 0,
        });
        Step::next()
    }

    /// Ends what is complete: a kept string, a skipped field, an entered message.
    fn settle(&mut self) -> Result<(), Malformed> {
        match &mut self.step {
            Step::Keep(slot, 0, kept) => {
                let (slot, kept) = (*slot, std::mem::take(kept));
                let text = slot.text(kept)?;
                match slot {
                    Slot::TypeUrl => self.fields.type_url = text,
                    Slot::Nonce => self.fields.nonce = text,
                    Slot::Version => self.fields.version = text,
                    Slot::ResourceType => self.fields.resource_type = Some(text),
                    Slot::Reason => self.fields.refusal = Some(text),
                }
                self.step = Step::next();
            }
            Step::SkipBytes(0) => self.step = Step::next(),
            _ => {}
        }
        while let [_, .., last] = self.levels.as_slice() {
            if last.left > 0 {
                break;
            }
            if last.groups > 0 || !self.between_fields() {
                return Err(Malformed("a message ends inside a field"));
            }
            self.levels.pop();
        }
        Ok(())
    }

    fn between_fields(&self) -> bool {
        matches!(self.step, Step::Tag(Varint { bytes: 0, .. }))
    }

    fn level(&mut self) -> Result<&mut Level, Malformed> {
        self.levels.last_mut().ok_or(Malformed("nothing is open"))
    }
}

impl Level {
    /// Steps over a field of `length` bytes.
    fn skip(&self, length: u64) -> Result<Step, Malformed> {
        if length > self.left {
            return Err(Malformed("a field is longer than its message"));
        }
        Ok(Step::SkipBytes(length))
    }
}

impl Step {
    /// The start of the next field.
    fn next() -> Self {
        Self::Tag(Varint::default())
    }
}

impl Slot {
    /// How many bytes of it are kept.
    const fn longest(self) -> u64 {
        match self {
            Self::Reason => LONGEST_REASON,
            Self::TypeUrl | Self::Nonce | Self::Version | Self::ResourceType => LONGEST_STRING,
        }
    }

    /// A reason may be cut within a character, and only people read it.
    fn text(self, kept: Vec<u8>) -> Result<String, Malformed> {
        match self {
            Self::Reason => Ok(String::from_utf8_lossy(&kept).into_owned()),
            _ => String::from_utf8(kept).map_err(|_| Malformed("a string not UTF-8")),
        }
    }
}

impl Schema {
    fn action(&self, number: u32) -> Action {
        self.0
            .iter()
            .find(|(wanted, _)| *wanted == number)
            .map_or(Action::Skip, |(_, action)| *action)
    }
}

/// How long the resource is that `bytes` begin with, tag and length included, if it lies in them
/// whole.
fn resource_length(bytes: &[u8]) -> Option<usize> {
    // Nearly all have a length of one or two bytes.
    let (length, head) = match *bytes {
        [RESOURCE_TAG, length @ ..0x80, ..] => (usize::from(length), 2),
        [RESOURCE_TAG, low, high @ ..0x80, ..] => {
            (usize::from(low & 0x7f) | usize::from(high) << 7, 3)
        }
        [RESOURCE_TAG, ref rest @ ..] => long_length(rest)?,
        _ => return None,
    };
    let length = length.checked_add(head)?;
    (length <= bytes.len()).then_some(length)
}

/// A resource's length by the bytes behind its tag, and how many bytes both take.
fn long_length(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut varint = Varint::default();
    for (index, &byte) in bytes.iter().enumerate() {
        // What is no number is found out by whoever reads it byte by byte.
        if let Some(length) = varint.push(byte).ok()? {
            return Some((usize::try_from(length).ok()?, index + 2));
        }
    }
    None
}

impl Varint {
    /// The value, once its last byte is in.
    fn push(&mut self, byte: u8) -> Result<Option<u64>, Malformed> {
        if self.bytes >= 10 || (self.bytes == 9 && byte > 1) {
            return Err(Malformed("a number of more than 64 bits"));
        }
        self.value |= u64::from(byte & 0x7f) << (7 * self.bytes);
        self.bytes += 1;
        Ok((byte < 0x80).then_some(self.value))
    }
}

#[cfg(test)]
mod tests;
