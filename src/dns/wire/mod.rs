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
/// The longest query this agent takes, which it tells clients.
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

/// Longest name, without its root label.
const LONGEST: usize = 254;

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
pub(crate) enum Read {
    /// Nothing to answer: a fragment, or itself an answer.
    Nothing,
    /// To be refused with this code; the question, as far as it could be read, ends here.
    Wrong(Rcode, Option<usize>),
    Question(Question),
}

/// One question; its name is in the [`Name`] it was read into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    /// Of the name as text.
    length: u8,
    /// Whether the name reads the same as text: no dot inside of a label, nothing unprintable.
    pub(crate) is_plain: bool,
    /// Whether the name was lower case as it came.
    pub(crate) was_lower: bool,
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

/// Room for the name of one question after the other: lower case, each label behind a dot.
///
/// It is read eight bytes at a time, hence its size, and not cleared in between.
pub(crate) struct Name([u8; 264]);

impl Name {
    pub(crate) const fn new() -> Self {
        Self([0; 264])
    }

    /// The name of a question, without the dot before its first label.
    pub(crate) fn text(&self, question: &Question) -> &[u8] {
        &self.0[1..=usize::from(question.length)]
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

/// Reads a query, and its name into `name`. What it says about itself is not trusted.
pub(crate) fn read(message: &[u8], name: &mut Name) -> Read {
    if message.len() < HEADER || message[2] & QR != 0 {
        return Read::Nothing;
    }
    if message.len() > usize::from(OWN_UDP) {
        return Read::Wrong(Rcode::FormErr, None);
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
    let Some(mut question) = question(message, name) else {
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

fn question(message: &[u8], name: &mut Name) -> Option<Question> {
    let (length, labels) = name.read(message)?;
    let end = HEADER + length + 1;
    let fixed = message.get(end..end + 4)?;
    let (is_plain, was_lower) = name.lower(length, labels);
    Some(Question {
        // The dot before the first label is not text. A name has 254 bytes at the most.
        length: length.saturating_sub(1) as u8,
        is_plain: is_plain || is_plain_on_wire(&message[HEADER..HEADER + length]),
        was_lower,
        kind: u16_at(fixed, 0),
        class: u16_at(fixed, 2),
        end: end + 4,
        edns: None,
    })
}

impl Name {
    /// Takes the name behind the header, in its own case; a pointer there could only lead into the
    /// header. Returns its length without the root label, and how many labels it has.
    fn read(&mut self, message: &[u8]) -> Option<(usize, u64)> {
        let rest = &message[HEADER..];
        let taken = rest.len().min(LONGEST + 1);
        self.0[..taken].copy_from_slice(&rest[..taken]);
        let (mut at, mut labels) = (0, 0);
        while at < taken {
            match self.0[at] {
                0 => return Some((at, labels)),
                length @ 1..=63 => {
                    self.0[at] = b'.';
                    at += 1 + usize::from(length);
                    labels += 1;
                }
                _ => return None,
            }
        }
        None
    }

    /// Makes what was read lower case, eight bytes at a time. Returns whether it is of letters, digits
    /// and what stands among them, as nearly all are, and whether it was lower case.
    fn lower(&mut self, length: usize, labels: u64) -> (bool, bool) {
        // Another name may have left something there.
        self.0[length..length + 8].fill(b'a');
        let (mut upper, mut odd, mut dots) = (0, 0, 0);
        let (words, _) = self.0.as_chunks_mut::<8>();
        for bytes in &mut words[..length.div_ceil(8)] {
            let word = u64::from_ne_bytes(*bytes);
            let is_upper = within(word, b'A', b'Z') & !word;
            // From the high bit of a byte to that which tells the cases apart.
            let lower = word | is_upper >> 2;
            upper |= is_upper;
            odd |= word | !(within(lower, b'a', b'z') | within(lower, b'-', b'9'));
            dots += within(word, b'.', b'.') >> 7;
            *bytes = lower.to_ne_bytes();
        }
        // The sum of the counts in each byte, of which there are no more than bytes in a name.
        let dots = dots.wrapping_mul(each(1)) >> 56;
        (odd & each(0x80) == 0 && dots == labels, upper == 0)
    }
}

/// The high bit of each byte from `low` to `high`. What it says of bytes above 0x7f has no meaning.
fn within(bytes: u64, low: u8, high: u8) -> u64 {
    // Without their high bits, sums stay within their bytes.
    let bytes = bytes & !each(0x80);
    (bytes + each(0x80 - low)) & !(bytes + each(0x7f - high)) & each(0x80)
}

const fn each(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// The same for any name, byte by byte.
fn is_plain_on_wire(mut labels: &[u8]) -> bool {
    while let Some((length, rest)) = labels.split_first() {
        let (label, rest) = rest.split_at(usize::from(*length));
        if !label.iter().all(|byte| PLAIN[usize::from(*byte)]) {
            return false;
        }
        labels = rest;
    }
    true
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
