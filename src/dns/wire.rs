//! DNS messages as bytes: where their parts are, the question of a query, and writing of answers.
//!
//! Offsets and a few fields are all that answering and forwarding need, so what is not understood
//! passes as it came. Nothing is trusted: each step checks that the message goes that far. Compressed
//! names are not followed, so no message can loop, but must point back. Sources: RFC 1035 section 4,
//! RFC 6891 for EDNS.
//!
//! In answers that are written here the question stands as it came, names point back into it where they
//! can, and room for the OPT record is kept from the start. What does not fit is left out, and the TC bit
//! says so.

use smallvec::SmallVec;

use super::Transport;

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

/// The longest query this agent takes, which it tells clients.
pub(crate) const OWN_UDP: u16 = 4096;

const NOTIFY: u8 = 4 << 3;

/// The response code of a version of EDNS other than 0.
const BADVERS: u8 = 16;

/// An OPT record without options.
const OPT_LENGTH: usize = 11;

pub(crate) const A: u16 = 1;
pub(crate) const CNAME: u16 = 5;
pub(crate) const SOA: u16 = 6;
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

/// Why a message is no question.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NoQuestion {
    /// Nothing to answer: a fragment, or itself an answer.
    Nothing,
    /// To be refused with this response code; the question, as far as it can be read, ends here.
    Wrong(u8, Option<usize>),
}

/// One question.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
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
    pub(crate) dnssec_ok: bool,
}

impl Question {
    /// Most bytes of an answer that the client takes.
    pub(crate) fn limit(&self, transport: Transport) -> usize {
        // What a packet has room for, headers deducted.
        const MAX_UDP: usize = 65_507;
        let size = self.edns.map_or(0, |edns| usize::from(edns.udp_size));
        match transport {
            Transport::Udp => size.clamp(MIN_UDP, MAX_UDP),
            Transport::Tcp => usize::from(u16::MAX),
        }
    }

    /// The name in the query, as it came: labels and the root label.
    pub(crate) fn name<'a>(&self, query: &'a [u8]) -> &'a [u8] {
        &query[HEADER..self.end - 4]
    }

    /// The name as text: lower case, without a dot at its end. `None` if it reads otherwise as text:
    /// a label has a dot inside, or a byte that is written with a backslash.
    pub(crate) fn text(&self, query: &[u8]) -> Option<SmallVec<[u8; 128]>> {
        let name = self.name(query);
        // Without the length of its first label and without the root label.
        let mut text = SmallVec::from_slice(name.get(1..name.len() - 1).unwrap_or_default());
        let mut at = 0;
        while let length @ 1.. = usize::from(*name.get(at)?) {
            if at > 0 {
                text[at - 1] = b'.';
            }
            let label = text.get(at..at + length)?;
            if !label.iter().fold(true, |is, byte| is & is_plain(*byte)) {
                return None;
            }
            at += 1 + length;
        }
        text.make_ascii_lowercase();
        Some(text)
    }
}

/// Whether a byte of a label stands for itself in text.
fn is_plain(byte: u8) -> bool {
    let is_special = matches!(
        byte,
        b'.' | b'\'' | b'@' | b';' | b'(' | b')' | b'"' | b'\\'
    );
    byte.is_ascii_graphic() && !is_special
}

/// Reads a query.
pub(crate) fn read(message: &[u8]) -> Result<Question, NoQuestion> {
    if message.len() < HEADER || message[FLAGS] & QR != 0 {
        return Err(NoQuestion::Nothing);
    }
    if message.len() > usize::from(OWN_UDP) {
        return Err(NoQuestion::Wrong(FORMERR, None));
    }
    let opcode = message[FLAGS] & OPCODE;
    if opcode != 0 && opcode != NOTIFY {
        return Err(NoQuestion::Wrong(NOTIMP, None));
    }
    let count = |at| u16_at(message, at).unwrap_or_default();
    let has_too_many = count(ANSWERS) > 1 || count(AUTHORITIES) > 1 || count(ADDITIONALS) > 2;
    if count(QUESTIONS) != 1 || has_too_many {
        return Err(NoQuestion::Wrong(FORMERR, None));
    }
    if message.len() == HEADER {
        return Err(NoQuestion::Wrong(REFUSED, None));
    }
    let end = question_end(message).ok_or(NoQuestion::Wrong(FORMERR, None))?;
    let records = records(message, end).ok_or(NoQuestion::Wrong(FORMERR, Some(end)))?;
    let opt = records.iter().rfind(|record| record.kind == OPT);
    let edns = opt.map(|opt| Edns {
        udp_size: u16_at(message, opt.class_at()).unwrap_or_default(),
        dnssec_ok: message[opt.ttl_at() + 2] & 0x80 != 0,
    });
    if opt.is_some_and(|opt| message[opt.ttl_at() + 1] > 0) {
        return Err(NoQuestion::Wrong(BADVERS, Some(end)));
    }
    Ok(Question {
        kind: count(end - 4),
        class: count(end - 2),
        end,
        edns,
    })
}

/// An answer being written.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    limit: usize,
    ttl: u32,
    answers: u16,
    edns: Option<Edns>,
}

/// The owner of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner<'a> {
    /// It stands at this offset of the answer.
    At(usize),
    /// A name on the wire, in any case, with its root label; written in lower case.
    Name(&'a [u8]),
}

impl<'a> Writer<'a> {
    /// Begins the answer to `query` in place of what `out` holds, no longer than `limit`.
    pub(crate) fn new(
        query: &[u8],
        question: &Question,
        limit: usize,
        out: &'a mut Vec<u8>,
    ) -> Self {
        header(query, NOERROR, Some(question.end), out);
        let reserved = question.edns.map_or(0, |_| OPT_LENGTH);
        Self {
            out,
            limit: limit - reserved,
            ttl: 0,
            answers: 0,
            edns: question.edns,
        }
    }

    /// Sets the AA bit, and the TTL of the records that follow.
    pub(crate) fn authoritative(&mut self, ttl: u32) {
        self.out[FLAGS] |= AA;
        self.ttl = ttl;
    }

    pub(crate) fn set_rcode(&mut self, rcode: u8) {
        self.out[CODE] = self.out[CODE] & !RCODE | rcode;
    }

    /// Adds a record whose data is all of `parts`. Returns the offsets of its owner and of its data;
    /// `None`, and a truncated answer, if it does not fit.
    pub(crate) fn record(
        &mut self,
        owner: Owner<'_>,
        kind: u16,
        parts: &[&[u8]],
    ) -> Option<(usize, usize)> {
        let start = self.out.len();
        let owner_at = match owner {
            Owner::At(at) => {
                // The first owners stand in the first 700 bytes, and an offset has 14 bits.
                self.out.extend((0xc000 | at as u16).to_be_bytes());
                at
            }
            Owner::Name(name) => {
                // Lengths of labels are below the letters.
                self.out.extend(name.iter().map(u8::to_ascii_lowercase));
                start
            }
        };
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let [kind_high, kind_low] = kind.to_be_bytes();
        let [class_high, class_low] = IN.to_be_bytes();
        let [t0, t1, t2, t3] = self.ttl.to_be_bytes();
        // An address or a name.
        let [high, low] = (length as u16).to_be_bytes();
        self.out.extend_from_slice(&[
            kind_high, kind_low, class_high, class_low, t0, t1, t2, t3, high, low,
        ]);
        let data_at = self.out.len();
        for part in parts {
            self.out.extend_from_slice(part);
        }
        if self.out.len() > self.limit {
            self.out.truncate(start);
            self.out[FLAGS] |= TC;
            return None;
        }
        self.answers += 1;
        Some((owner_at, data_at))
    }

    /// Ends the answer, with an OPT record if the query had one.
    pub(crate) fn finish(self) {
        put(self.out, ANSWERS, &self.answers.to_be_bytes());
        if let Some(edns) = self.edns {
            push_opt(self.out, 0, edns.dnssec_ok);
        }
    }
}

/// Writes an answer without records: the header, and the question up to `end`. Of a response code that
/// does not fit the header, an OPT record holds the upper bits.
pub(crate) fn header(query: &[u8], rcode: u8, end: Option<usize>, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&query[..end.unwrap_or(HEADER)]);
    let opcode = query[FLAGS] & OPCODE;
    let is_query = opcode == 0;
    out[FLAGS] = QR | opcode | if is_query { query[FLAGS] & RD } else { 0 };
    out[CODE] = RA | if is_query { query[CODE] & CD } else { 0 } | rcode & RCODE;
    out[QUESTIONS..HEADER].fill(0);
    out[QUESTIONS + 1] = u8::from(end.is_some());
    if rcode > RCODE {
        push_opt(out, rcode >> 4, false);
    }
}

/// Adds the only additional record.
fn push_opt(out: &mut Vec<u8>, extended_rcode: u8, dnssec_ok: bool) {
    let [_, kind] = OPT.to_be_bytes();
    let [high, low] = OWN_UDP.to_be_bytes();
    let flags = if dnssec_ok { 0x80 } else { 0 };
    let record: [u8; OPT_LENGTH] = [0, 0, kind, high, low, extended_rcode, 0, flags, 0, 0, 0];
    out.extend(record);
    put(out, ADDITIONALS, &[0, 1]);
}

/// Copies `message` to `out`; one longer than `limit` is cut to whole answers and authorities from the
/// front and the OPT record, with the TC bit. Names only point back, so what is left reads as before.
pub(crate) fn fit(message: &[u8], limit: usize, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(message);
    let limit = limit.max(MIN_UDP);
    if message.len() <= limit {
        return;
    }
    let question_end = question_end(message);
    let records = question_end.and_then(|end| records(message, end));
    let records = records.unwrap_or_default();
    let end = question_end.unwrap_or(HEADER);
    let opt = records.iter().find(|record| record.kind == OPT);
    let opt = opt.map_or(&[][..], |opt| &message[opt.start..opt.end]);
    // A question is shorter than the least limit.
    let opt = if end + opt.len() <= limit { opt } else { &[] };
    let fits =
        |record: &&Record| record.section != Section::Additional && record.end + opt.len() <= limit;
    let kept: SmallVec<[&Record; 8]> = records.iter().take_while(fits).collect();
    let count = |section| {
        kept.iter()
            .filter(|record| record.section == section)
            .count() as u16
    };
    out.truncate(kept.last().map_or(end, |last| last.end));
    out.extend_from_slice(opt);
    out[FLAGS] |= TC;
    let counts = [
        u16::from(question_end.is_some()),
        count(Section::Answer),
        count(Section::Authority),
        u16::from(!opt.is_empty()),
    ];
    put(out, QUESTIONS, &counts.map(u16::to_be_bytes).concat());
}
