//! DNS messages as bytes: the question is read in place, answers are written into a caller's buffer.
//!
//! [`read`] knows one plain question and steps over what follows it, which is all that is needed to
//! answer from the table or to pass the message on. Nothing here allocates. Sources: RFC 1035
//! section 4, RFC 6891 for EDNS.
//!
//! Does not know the table, and does not decode records.

mod fit;
mod write;

pub(crate) use fit::fit;
pub(super) use write::header;
pub(crate) use write::{Owner, Writer};

pub(crate) const HEADER: usize = 12;
/// What every client takes by UDP.
pub(crate) const LEAST_UDP: usize = 512;
/// What this agent takes by UDP, and tells clients.
pub(crate) const OWN_UDP: u16 = 4096;

pub(crate) const A: u16 = 1;
pub(crate) const CNAME: u16 = 5;
pub(crate) const AAAA: u16 = 28;
pub(crate) const OPT: u16 = 41;
pub(crate) const ANY: u16 = 255;
pub(crate) const IN: u16 = 1;

/// The third byte of a message: response, opcode, authoritative, truncated, recursion desired.
pub(super) const QR: u8 = 0x80;
pub(super) const OPCODE: u8 = 0x78;
pub(super) const AA: u8 = 0x04;
pub(super) const TC: u8 = 0x02;
pub(super) const RD: u8 = 0x01;
/// The fourth byte: recursion available, checking disabled.
pub(super) const RA: u8 = 0x80;
pub(super) const CD: u8 = 0x10;

const NOTIFY: u8 = 4 << 3;

/// How a query went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Rcode {
    NoError = 0,
    FormErr = 1,
    ServFail = 2,
    NotImp = 4,
    Refused = 5,
    BadVers = 16,
}

/// What a message turned out to be.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack, and boxing would allocate for each query"
)]
pub(crate) enum Read {
    /// Nothing to answer: a fragment, or itself an answer.
    Nothing,
    /// To be refused with this code; the question, as far as it could be read, ends here.
    Wrong(Rcode, Option<usize>),
    Question(Question),
}

/// One question.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub(crate) name: Name,
    pub(crate) kind: u16,
    pub(crate) class: u16,
    /// Where the question section ends.
    pub(crate) end: usize,
    pub(crate) edns: Option<Edns>,
}

/// What a client says by EDNS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edns {
    pub(crate) udp_size: u16,
    pub(crate) version: u8,
    pub(crate) dnssec_ok: bool,
}

/// A name, lower case, as text and on the wire at once: before each label stands a dot or, on the
/// wire, its length.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    /// The text, behind one byte that is not part of it.
    bytes: [u8; 256],
    /// Of the text.
    length: u8,
    /// Whether it reads the same as text: no dot inside of a label, nothing unprintable.
    pub(crate) is_plain: bool,
    /// Whether it was lower case as it came.
    pub(crate) was_lower: bool,
}

impl Name {
    pub(crate) fn text(&self) -> &[u8] {
        &self.bytes[1..=usize::from(self.length)]
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.", self.text().escape_ascii())
    }
}

impl Question {
    /// Most bytes of an answer by UDP.
    pub(crate) fn udp_limit(&self) -> usize {
        // What a packet has room for, headers deducted.
        const MOST: usize = 65_507;
        let size = self.edns.map_or(0, |edns| usize::from(edns.udp_size));
        size.clamp(LEAST_UDP, MOST)
    }
}

/// Reads a query. What it says about itself is not trusted.
pub(crate) fn read(message: &[u8]) -> Read {
    if message.len() < HEADER || message[2] & QR != 0 {
        return Read::Nothing;
    }
    let opcode = message[2] & OPCODE;
    if opcode != 0 && opcode != NOTIFY {
        return Read::Wrong(Rcode::NotImp, None);
    }
    let [questions, answers, authorities, additionals] =
        [4, 6, 8, 10].map(|at| u16_at(message, at));
    if questions != 1 || answers > 1 || authorities > 1 || additionals > 2 {
        return Read::Wrong(Rcode::FormErr, None);
    }
    if message.len() == HEADER {
        return Read::Wrong(Rcode::Refused, None);
    }
    let Some(mut question) = question(message) else {
        return Read::Wrong(Rcode::FormErr, None);
    };
    let records = answers + authorities + additionals;
    match edns(message, question.end, records) {
        Some(edns) => question.edns = edns,
        None => return Read::Wrong(Rcode::FormErr, Some(question.end)),
    }
    if question.edns.is_some_and(|edns| edns.version > 0) {
        return Read::Wrong(Rcode::BadVers, Some(question.end));
    }
    Read::Question(question)
}

fn question(message: &[u8]) -> Option<Question> {
    let name = name(message)?;
    let end = HEADER + name.text().len() + 2 - usize::from(name.text().is_empty());
    let fixed = message.get(end..end + 4)?;
    Some(Question {
        name,
        kind: u16_at(fixed, 0),
        class: u16_at(fixed, 2),
        end: end + 4,
        edns: None,
    })
}

/// The name behind the header. A pointer there could only lead into the header.
fn name(message: &[u8]) -> Option<Name> {
    let mut name = Name {
        bytes: [0; 256],
        length: 0,
        is_plain: true,
        was_lower: true,
    };
    let mut at = HEADER;
    // Where the length of the next label stands, or the dot before it.
    let mut to = 0;
    let (mut is_plain, mut changed) = (true, 0);
    loop {
        let length = usize::from(*message.get(at)?);
        if length == 0 {
            // The dot after the last label is not text.
            name.length = u8::try_from(to).ok()?.saturating_sub(1);
            name.is_plain = is_plain;
            name.was_lower = changed == 0;
            return Some(name);
        }
        if length > 63 || to + length + 1 > 254 {
            return None;
        }
        let label = message.get(at + 1..at + 1 + length)?;
        name.bytes[to] = b'.';
        for (into, byte) in name.bytes[to + 1..].iter_mut().zip(label) {
            let lower = byte.to_ascii_lowercase();
            *into = lower;
            changed |= lower ^ byte;
            is_plain &= PLAIN[usize::from(*byte)];
        }
        at += length + 1;
        to += length + 1;
    }
}

/// Whether a byte of a label stands for itself in text.
const PLAIN: [bool; 256] = {
    let special = br#".'@;()"\"#;
    let mut plain = [false; 256];
    let mut byte = b'!';
    while byte <= b'~' {
        plain[byte as usize] = true;
        byte += 1;
    }
    let mut at = 0;
    while at < special.len() {
        plain[special[at] as usize] = false;
        at += 1;
    }
    plain
};

/// Steps over `count` records and notes what the one for EDNS says; nothing if they are cut short.
fn edns(message: &[u8], mut at: usize, count: u16) -> Option<Option<Edns>> {
    let mut found = None;
    for _ in 0..count {
        let record = record(message, at)?;
        if record.kind == OPT {
            let fixed = &message[record.fixed..];
            found = Some(Edns {
                udp_size: u16_at(fixed, 2),
                version: fixed[5],
                dnssec_ok: fixed[6] & 0x80 != 0,
            });
        }
        at = record.end;
    }
    Some(found)
}

/// Where the parts of a record are.
struct Record {
    kind: u16,
    /// Where its type stands, behind its owner.
    fixed: usize,
    end: usize,
}

fn record(message: &[u8], start: usize) -> Option<Record> {
    let fixed = skip_name(message, start)?;
    let header = message.get(fixed..fixed + 10)?;
    let end = fixed + 10 + usize::from(u16_at(header, 8));
    (end <= message.len()).then(|| Record {
        kind: u16_at(header, 0),
        fixed,
        end,
    })
}

/// Where the name that begins at `start` ends. Pointers are not followed, so they cannot loop, but
/// must point back.
fn skip_name(message: &[u8], start: usize) -> Option<usize> {
    let mut at = start;
    loop {
        let length = *message.get(at)?;
        match length {
            0 => return Some(at + 1),
            1..64 => at += usize::from(length) + 1,
            192.. => {
                let target = u16_at(message.get(at..at + 2)?, 0) & 0x3fff;
                return (usize::from(target) < start).then_some(at + 2);
            }
            _ => return None,
        }
        if at - start > 254 {
            return None;
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}
