//! Finds its way through a DNS message without decoding it.
//!
//! Offsets and a few fields are all that forwarding needs, so that what is not understood passes as
//! it came. Nothing is trusted: each step looks whether the message goes that far.
//! Source: RFC 1035, section 4.1.
//!
//! Does not follow compressed names, so no message can send it in circles.

/// Id, flags and four counts.
pub(super) const HEADER: usize = 12;
pub(super) const FLAGS: usize = 2;
pub(super) const QUESTIONS: usize = 4;
pub(super) const ANSWERS: usize = 6;
pub(super) const AUTHORITIES: usize = 8;
pub(super) const ADDITIONALS: usize = 10;

pub(super) const SOA: u16 = 6;
pub(super) const SIG: u16 = 24;
pub(super) const OPT: u16 = 41;
pub(super) const TSIG: u16 = 250;
pub(super) const ANY: u16 = 255;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    Answer,
    Authority,
    Additional,
}

/// Where a record is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) section: Section,
    pub(super) kind: u16,
    pub(super) start: usize,
    /// Where its type stands, behind the name.
    pub(super) fields: usize,
    pub(super) end: usize,
}

impl Record {
    pub(super) const fn class_at(&self) -> usize {
        self.fields + 2
    }

    pub(super) const fn ttl_at(&self) -> usize {
        self.fields + 4
    }

    pub(super) const fn data_at(&self) -> usize {
        self.fields + 10
    }
}

pub(super) fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    let bytes = message.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

pub(super) fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    let high = u32::from(u16_at(message, at)?);
    Some(high << 16 | u32::from(u16_at(message, at + 2)?))
}

/// Writes over what is there; past the end it writes nothing.
pub(super) fn put(message: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = message.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// The end of the one question of a message.
pub(super) fn question_end(message: &[u8]) -> Option<usize> {
    if u16_at(message, QUESTIONS)? != 1 {
        return None;
    }
    let (name_end, is_compressed) = name_end(message, HEADER)?;
    let end = name_end + 4;
    (!is_compressed && end <= message.len()).then_some(end)
}

/// Every record behind the question, if all are there.
pub(super) fn records(message: &[u8], question_end: usize) -> Option<Vec<Record>> {
    let mut records = Vec::new();
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
    let (fields, _) = name_end(message, start)?;
    let kind = u16_at(message, fields)?;
    let end = fields + 10 + usize::from(u16_at(message, fields + 8)?);
    (end <= message.len()).then_some(Record {
        section,
        kind,
        start,
        fields,
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
            0xc0.. => return (at + 2 <= message.len()).then_some((at + 2, true)),
            _ => return None,
        }
    }
    None
}
