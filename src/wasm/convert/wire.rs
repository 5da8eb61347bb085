//! Splits encoded protobuf messages into their fields, and replaces single fields. All others, unknown
//! ones too, stay byte for byte.

use std::cmp::Ordering;

use bytes::{Buf, Bytes};
pub(crate) use prost::DecodeError;
use prost::encoding::{
    self, DecodeContext, WireType, decode_key, encode_key, encode_varint, skip_field,
};

/// A field of an encoded message.
pub(crate) struct Field {
    pub(crate) number: u32,
    /// The bytes of the field: key, length and content.
    pub(crate) record: Bytes,
    /// The content of a length-delimited field.
    pub(crate) content: Option<Bytes>,
}

/// Splits a message into its fields.
pub(crate) fn fields(message: &Bytes) -> Result<Vec<Field>, DecodeError> {
    let mut rest = message.clone();
    let mut fields = Vec::new();
    while rest.has_remaining() {
        let begin = rest.clone();
        let (number, wire_type) = decode_key(&mut rest)?;
        let context = DecodeContext::default();
        let mut content = None;
        if wire_type == WireType::LengthDelimited {
            // A slice of the message, not a copy.
            let content = content.insert(Bytes::new());
            encoding::bytes::merge(wire_type, content, &mut rest, context)?;
        } else {
            skip_field(wire_type, number, &mut rest, context)?;
        }
        let record = begin.slice(..begin.len() - rest.len());
        fields.push(Field { number, record, content });
    }
    Ok(fields)
}

/// Returns the content of the last field with this number, which is the one that counts in protobuf.
pub(crate) fn last(message: &Bytes, number: u32) -> Result<Option<Bytes>, DecodeError> {
    let last = fields(message)?.into_iter().rfind(|field| field.number == number);
    Ok(last.and_then(|field| field.content))
}

/// Appends a length-delimited field.
pub(crate) fn append(message: &mut Vec<u8>, number: u32, content: &[u8]) {
    encode_key(number, WireType::LengthDelimited, message);
    encode_varint(content.len() as u64, message);
    message.extend_from_slice(content);
}

/// Replaces the embedded message `number` by the result of `edit`, or removes it if that is empty. If the
/// message is not set, `edit` gets an empty one.
pub(crate) fn edit_field(
    message: &Bytes,
    number: u32,
    edit: impl FnOnce(Bytes) -> Result<Bytes, DecodeError>,
) -> Result<Bytes, DecodeError> {
    let mut before = Vec::with_capacity(message.len());
    let mut content = Vec::new();
    let mut after = Vec::new();
    for field in fields(message)? {
        match field.number.cmp(&number) {
            Ordering::Less => before.extend_from_slice(&field.record),
            // Several fields of one embedded message are merged by concatenating them.
            Ordering::Equal => content.extend_from_slice(&field.content.unwrap_or_default()),
            Ordering::Greater => after.extend_from_slice(&field.record),
        }
    }
    let edited = edit(content.into())?;
    if !edited.is_empty() {
        append(&mut before, number, &edited);
    }
    before.append(&mut after);
    Ok(before.into())
}
