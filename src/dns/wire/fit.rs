//! Cuts a message to a length: whole records from the front, and the one for EDNS in any case.
//!
//! Names only point back, so what is left of a message reads as before.

use super::{HEADER, LEAST_UDP, OPT, TC, record, skip_name, u16_at};

/// Copies `message` to `out`, cut to `limit` bytes and marked so if it is longer. Returns the length.
pub(crate) fn fit(message: &[u8], limit: usize, out: &mut [u8]) -> usize {
    let limit = limit.max(LEAST_UDP).min(out.len());
    if message.len() <= limit {
        out[..message.len()].copy_from_slice(message);
        return message.len();
    }
    out[..HEADER].copy_from_slice(&message[..HEADER]);
    out[2] |= TC;
    out[4..HEADER].fill(0);
    let Some(start) = questions(message, limit) else {
        return HEADER;
    };
    out[4..6].copy_from_slice(&message[4..6]);
    let edns = find_edns(message, start);
    let reserved = edns.map_or(0, <[u8]>::len);
    let reserved = if start + reserved <= limit {
        reserved
    } else {
        0
    };
    let length = records(message, start, limit - reserved, out);
    out[HEADER..length].copy_from_slice(&message[HEADER..length]);
    let Some(edns) = edns.filter(|_| reserved > 0) else {
        return length;
    };
    out[length..length + reserved].copy_from_slice(edns);
    out[11] = 1;
    length + reserved
}

/// Where the questions end.
fn questions(message: &[u8], limit: usize) -> Option<usize> {
    let mut at = HEADER;
    for _ in 0..u16_at(message, 4) {
        at = skip_name(message, at)? + 4;
        if at > limit {
            return None;
        }
    }
    Some(at)
}

/// The record for EDNS, whole.
fn find_edns(message: &[u8], mut at: usize) -> Option<&[u8]> {
    let count: u32 = [6, 8, 10]
        .map(|at| u32::from(u16_at(message, at)))
        .iter()
        .sum();
    for _ in 0..count {
        let record = record(message, at)?;
        if record.kind == OPT {
            return Some(&message[at..record.end]);
        }
        at = record.end;
    }
    None
}

/// Counts answers and authorities that fit, and returns where they end. Additional records are
/// additional.
fn records(message: &[u8], mut at: usize, limit: usize, out: &mut [u8]) -> usize {
    for section in [6, 8] {
        let count = u16_at(message, section);
        for kept in 0..count {
            match record(message, at) {
                Some(record) if record.end <= limit => at = record.end,
                _ => {
                    out[section..section + 2].copy_from_slice(&kept.to_be_bytes());
                    return at;
                }
            }
        }
        out[section..section + 2].copy_from_slice(&count.to_be_bytes());
    }
    at
}
