//! Cuts protobuf messages into the records of their fields, and replaces some, so that all others,
//! unknown ones too, stay byte for byte.

use bytes::{Buf, Bytes};
pub(crate) use prost::DecodeError;
use prost::encoding::{
    self, DecodeContext, WireType, decode_key, encode_key, encode_varint, skip_field,
};

/// A field as it was written.
pub(crate) struct Field {
    pub(crate) number: u32,
    /// Key, length and content.
    pub(crate) record: Bytes,
    /// Of a length-delimited field.
    pub(crate) content: Option<Bytes>,
}

/// Cuts a message into its fields.
pub(crate) fn fields(message: &Bytes) -> Result<Vec<Field>, DecodeError> {
    let (mut rest, mut fields) = (message.clone(), Vec::new());
    while rest.has_remaining() {
        let begin = rest.clone();
        let (number, wire_type) = decode_key(&mut rest)?;
        let (mut content, context) = (None, DecodeContext::default());
        if wire_type == WireType::LengthDelimited {
            // A slice of the message, not a copy.
            let content = content.insert(Bytes::new());
            encoding::bytes::merge(wire_type, content, &mut rest, context)?;
        } else {
            skip_field(wire_type, number, &mut rest, context)?;
        }
        let record = begin.slice(..begin.len() - rest.len());
        fields.push(Field {
            number,
            record,
            content,
        });
    }
    Ok(fields)
}

/// The content of the last field of this number, which is the one that counts.
pub(crate) fn last(message: &Bytes, number: u32) -> Result<Option<Bytes>, DecodeError> {
    let mut fields = fields(message)?.into_iter().rev();
    Ok(fields
        .find(|field| field.number == number)
        .and_then(|field| field.content))
}

/// Appends a length-delimited field.
pub(crate) fn append(message: &mut Vec<u8>, number: u32, content: &[u8]) {
    encode_key(number, WireType::LengthDelimited, message);
    encode_varint(content.len() as u64, message);
    message.extend_from_slice(content);
}

/// The message with its embedded message `number` edited. What was not set is edited as an empty
/// message; the field goes where `edit` returns none.
pub(crate) fn edited(
    message: &Bytes,
    number: u32,
    edit: impl FnOnce(Bytes) -> Result<Option<Bytes>, DecodeError>,
) -> Result<Bytes, DecodeError> {
    let fields = fields(message)?;
    let is_other = |field: &&Field| field.number != number;
    // Where a field is written twice, its messages are to be merged: they are concatenated.
    let contents = fields.iter().filter(|field| !is_other(field));
    let contents: Vec<_> = contents.filter_map(|field| field.content.clone()).collect();
    let edited = edit(contents.concat().into())?;
    let mut before = Vec::with_capacity(message.len());
    let mut after = Vec::new();
    for field in fields.iter().filter(is_other) {
        let half = match field.number < number {
            true => &mut before,
            false => &mut after,
        };
        half.extend_from_slice(&field.record);
    }
    if let Some(edited) = edited {
        append(&mut before, number, &edited);
    }
    before.append(&mut after);
    Ok(before.into())
}
