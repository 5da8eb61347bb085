//! The encoded name table: where its strings are, without copying them.
//!
//! [`fields`] steps over one message and tells where each length-delimited field lies. Source: the
//! protobuf encoding guide.
//!
//! Does not know what a field means; [`super::build`] does.

use std::ops::Range;

/// The bytes are no name table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("byte {0} begins no protobuf field")]
    Field(usize),
    #[error("the field at byte {0} is longer than its message")]
    Length(usize),
    #[error("the string at byte {0} is not UTF-8")]
    Text(usize),
    #[error("{0} bytes, expected at most 1073741824")]
    TooLarge(usize),
}

/// The length-delimited fields of the message at `message`, each with its number and place. Other
/// fields are stepped over.
pub(super) fn fields(
    bytes: &[u8],
    message: Range<usize>,
) -> impl Iterator<Item = Result<(u64, Range<usize>), Malformed>> {
    let mut at = message.start;
    std::iter::from_fn(move || {
        while at < message.end {
            let start = at;
            match field(bytes, &mut at, message.end) {
                Ok(Some(found)) => return Some(Ok(found)),
                Ok(None) => {}
                Err(error) => {
                    at = message.end;
                    return Some(Err(error(start)));
                }
            }
        }
        None
    })
}

/// The text at a place, checked.
pub(super) fn text(bytes: &[u8], place: Range<usize>) -> Result<&str, Malformed> {
    let start = place.start;
    std::str::from_utf8(&bytes[place]).map_err(|_| Malformed::Text(start))
}

type Wrong = fn(usize) -> Malformed;

/// Reads one field; none if it is not length-delimited.
fn field(bytes: &[u8], at: &mut usize, end: usize) -> Result<Option<(u64, Range<usize>)>, Wrong> {
    let tag = varint(bytes, at, end)?;
    let length = match tag & 7 {
        0 => {
            varint(bytes, at, end)?;
            0
        }
        1 => 8,
        2 => varint(bytes, at, end)?,
        5 => 4,
        _ => return Err(Malformed::Field),
    };
    let left = end - *at;
    let length = usize::try_from(length).map_err(|_| Malformed::Length as Wrong)?;
    if length > left {
        return Err(Malformed::Length);
    }
    let place = *at..*at + length;
    *at = place.end;
    Ok((tag & 7 == 2).then_some((tag >> 3, place)))
}

fn varint(bytes: &[u8], at: &mut usize, end: usize) -> Result<u64, Wrong> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        if *at >= end {
            break;
        }
        let byte = bytes[*at];
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Malformed::Field)
}
