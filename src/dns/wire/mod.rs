//! DNS messages as bytes: where their parts are, the question of a query, and writing of answers.
//!
//! Offsets and a few fields are all that answering and forwarding need, so what is not understood
//! passes as it came. Nothing is trusted: each step checks that the message goes that far. Compressed
//! names are not followed, so no message can loop, but must point back. Sources: RFC 1035 section 4,
//! RFC 6891 for EDNS.

mod question;
mod write;

pub(crate) use question::{NoQuestion, OWN_UDP, Question, read};
pub(crate) use write::{Owner, Writer, fit, header};

use smallvec::SmallVec;

/// Id, flags and four counts.
pub(crate) const HEADER: usize = 12;
/// Response, opcode, authoritative, truncated, recursion desired.
pub(crate) const FLAGS: usize = 2;
/// Recursion available, checking disabled, response code.
pub(crate) const CODE: usize = 3;
/// Offsets of the four counts.
pub(crate) const QUESTIONS: usize = 4;
pub(crate) const ANSWERS: usize = 6;
pub(crate) const AUTHORITIES: usize = 8;
pub(crate) const ADDITIONALS: usize = 10;

/// What every client takes by UDP.
pub(crate) const MIN_UDP: usize = 512;

pub(crate) const A: u16 = 1;
pub(crate) const CNAME: u16 = 5;
pub(crate) const SOA: u16 = 6;
pub(crate) const SIG: u16 = 24;
pub(crate) const AAAA: u16 = 28;
pub(crate) const OPT: u16 = 41;
pub(crate) const TSIG: u16 = 250;
pub(crate) const ANY: u16 = 255;
pub(crate) const IN: u16 = 1;

/// Bits at [`FLAGS`].
pub(crate) const QR: u8 = 0x80;
pub(crate) const OPCODE: u8 = 0x78;
pub(crate) const AA: u8 = 0x04;
pub(crate) const TC: u8 = 0x02;
pub(crate) const RD: u8 = 0x01;
/// Bits at [`CODE`].
pub(crate) const RA: u8 = 0x80;
pub(crate) const CD: u8 = 0x10;
pub(crate) const RCODE: u8 = 0x0f;

/// Response codes.
pub(crate) const NOERROR: u8 = 0;
pub(crate) const FORMERR: u8 = 1;
pub(crate) const SERVFAIL: u8 = 2;
pub(crate) const NXDOMAIN: u8 = 3;
pub(crate) const NOTIMP: u8 = 4;
pub(crate) const REFUSED: u8 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    Answer,
    Authority,
    Additional,
}

/// Where a record is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) section: Section,
    pub(crate) kind: u16,
    pub(crate) start: usize,
    /// Where its type stands, behind its owner.
    fixed: usize,
    pub(crate) end: usize,
}

impl Record {
    pub(crate) const fn class_at(&self) -> usize {
        self.fixed + 2
    }

    pub(crate) const fn ttl_at(&self) -> usize {
        self.fixed + 4
    }

    pub(crate) const fn data_at(&self) -> usize {
        self.fixed + 10
    }
}

pub(crate) fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    let bytes = message.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

pub(crate) fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    let high = u32::from(u16_at(message, at)?);
    Some(high << 16 | u32::from(u16_at(message, at + 2)?))
}

/// Writes over what is there; past the end it writes nothing.
pub(crate) fn put(message: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = message.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Response code of a message that has a header.
pub(crate) fn rcode(message: &[u8]) -> u8 {
    message.get(CODE).map_or(0, |code| code & RCODE)
}

/// The end of the one question of a message. Its name may not be compressed: there is only the
/// header to point to.
pub(crate) fn question_end(message: &[u8]) -> Option<usize> {
    if u16_at(message, QUESTIONS)? != 1 {
        return None;
    }
    let (name_end, is_compressed) = name_end(message, HEADER)?;
    let end = name_end + 4;
    (!is_compressed && end <= message.len()).then_some(end)
}

/// Every record behind the question, if all are there.
pub(crate) fn records(message: &[u8], question_end: usize) -> Option<SmallVec<[Record; 8]>> {
    let mut records = SmallVec::new();
    let mut at = question_end;
    for (section, count) in [
        (Section::Answer, ANSWERS),
        (Section::Authority, AUTHORITIES),
        (Section::Additional, ADDITIONALS),
    ] {
        for _ in 0..u16_at(message, count)? {
            let record = record(message, at, section)?;
            at = record.end;
            records.push(record);
        }
    }
    Some(records)
}

fn record(message: &[u8], start: usize, section: Section) -> Option<Record> {
    let (fixed, _) = name_end(message, start)?;
    let kind = u16_at(message, fixed)?;
    let end = fixed + 10 + usize::from(u16_at(message, fixed + 8)?);
    (end <= message.len()).then_some(Record {
        section,
        kind,
        start,
        fixed,
        end,
    })
}

/// The end of a name as it stands, and whether it goes on elsewhere.
fn name_end(message: &[u8], start: usize) -> Option<(usize, bool)> {
    let mut at = start;
    // A name has at most 255 bytes.
    while at - start < 255 {
        match *message.get(at)? {
            0 => return Some((at + 1, false)),
            length @ 1..=63 => at += 1 + usize::from(length),
            0xc0.. => {
                let target = u16_at(message, at)? & 0x3fff;
                return (usize::from(target) < start).then_some((at + 2, true));
            }
            _ => return None,
        }
    }
    None
}
