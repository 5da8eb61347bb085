//! DNS messages as bytes: where their parts are, the question of a query, and writing of answers.
//!
//! Offsets and a few fields are all that answering and forwarding need, so what is not understood
//! passes as it came. Nothing is trusted: each step checks that the message goes that far. Compressed
//! names are not followed, so no message can loop, but must point back. EDNS is between neighbours: options
//! pass in neither direction, and an answer has our own OPT record if its query had one. Sources: RFC 1035
//! section 4, RFC 6891.
//!
//! In answers that are written here the question stands as it came, names point back into it where they
//! can, and room for the OPT record is kept from the start. What does not fit is left out, and the TC bit
//! says so.

use std::io;

use smallvec::SmallVec;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

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
/// The sections of records, in their order, and where their counts are.
const SECTIONS: [(Section, usize); 3] = [
    (Section::Answer, ANSWERS),
    (Section::Authority, AUTHORITIES),
    (Section::Additional, ADDITIONALS),
];

/// What every client takes by UDP.
pub(crate) const MIN_UDP: usize = 512;

/// The longest query this agent takes, which it tells clients.
pub(crate) const OWN_UDP: u16 = 4096;

/// An OPT record without options.
const OPT_LENGTH: usize = 11;

pub(crate) const A: u16 = 1;
pub(crate) const CNAME: u16 = 5;
pub(crate) const SOA: u16 = 6;
pub(crate) const AAAA: u16 = 28;
pub(crate) const OPT: u16 = 41;
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
const BADVERS: u8 = 16;

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
    pub(crate) const fn ttl_at(&self) -> usize {
        self.fixed + 4
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
    for (section, count) in SECTIONS {
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

/// Reads a message that comes by TCP behind its length. Memory grows with what comes, not with what is
/// promised.
pub(crate) async fn read_framed(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = Vec::new();
    let read = stream.take(length.into()).read_to_end(&mut message).await?;
    if read < usize::from(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(message)
}

/// An OPT record without its options. Source: RFC 6891, section 6.1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edns {
    /// The longest message that its sender takes by UDP.
    pub(crate) udp_size: u16,
    /// Upper bits of the response code.
    pub(crate) extended: u8,
    version: u8,
    is_dnssec: bool,
}

impl Edns {
    pub(crate) fn read(message: &[u8], opt: &Record) -> Self {
        let word = |at| u16_at(message, opt.fixed + at).unwrap_or_default();
        let [extended, version] = word(4).to_be_bytes();
        Self {
            udp_size: word(2).max(MIN_UDP as u16),
            extended,
            version,
            is_dnssec: word(6) & 0x8000 != 0,
        }
    }

    /// The record for the other side.
    pub(crate) fn without_options(self, udp_size: u16, extended: u8) -> [u8; OPT_LENGTH] {
        let ([_, kind], [high, low]) = (OPT.to_be_bytes(), udp_size.to_be_bytes());
        let flags = u8::from(self.is_dnssec) << 7;
        [0, 0, kind, high, low, extended, 0, flags, 0, 0, 0]
    }
}

/// Adds our OPT record to an answer if its query had one.
pub(crate) fn push_opt(answer: &mut Vec<u8>, asked: Option<Edns>, extended: u8) {
    if let Some(asked) = asked {
        answer.extend(asked.without_options(OWN_UDP, extended));
        let count = u16_at(answer, ADDITIONALS).unwrap_or_default();
        put(answer, ADDITIONALS, &count.saturating_add(1).to_be_bytes());
    }
}

/// Cuts a message off behind the first records, which are kept.
pub(crate) fn keep(message: &mut Vec<u8>, question_end: usize, kept: &[Record]) {
    message.truncate(kept.last().map_or(question_end, |last| last.end));
    for (section, at) in SECTIONS {
        let count = kept.iter().filter(|record| record.section == section);
        put(message, at, &(count.count() as u16).to_be_bytes());
    }
}

/// Why a message is no question.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NoQuestion {
    /// Nothing to answer: a fragment, or itself an answer.
    Nothing,
    /// To be refused with this response code; the question, as far as it can be read, ends here.
    Wrong(u8, Option<usize>, Option<Edns>),
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

impl Question {
    /// Most bytes of an answer that the client takes.
    pub(crate) fn limit(&self, transport: Transport) -> usize {
        // What a packet has room for, headers deducted.
        const MAX_UDP: usize = 65_507;
        let size = self.edns.map_or(MIN_UDP, |edns| edns.udp_size.into());
        match transport {
            Transport::Udp => size.min(MAX_UDP),
            Transport::Tcp => usize::from(u16::MAX),
        }
    }

    /// The name in the query, as it came: labels and the root label.
    pub(crate) fn name<'a>(&self, query: &'a [u8]) -> &'a [u8] {
        &query[HEADER..self.end - 4]
    }

    /// The name as text: lower case, without a dot at its end. `None` if a label has a dot inside, or a
    /// byte that is no visible ASCII.
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
            let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'.';
            if !label.iter().fold(true, |is, byte| is & is_plain(*byte)) {
                return None;
            }
            at += 1 + length;
        }
        text.make_ascii_lowercase();
        Some(text)
    }
}

/// Reads a query.
pub(crate) fn read(message: &[u8]) -> Result<Question, NoQuestion> {
    if message.len() < HEADER || message[FLAGS] & QR != 0 {
        return Err(NoQuestion::Nothing);
    }
    if message.len() > usize::from(OWN_UDP) {
        return Err(NoQuestion::Wrong(FORMERR, None, None));
    }
    let end = question_end(message);
    let records = end.and_then(|end| records(message, end));
    let mut opts = records.iter().flatten().filter(|record| record.kind == OPT);
    let opt = opts.next();
    let edns = opt.map(|opt| Edns::read(message, opt));
    if message[FLAGS] & OPCODE != 0 {
        return Err(NoQuestion::Wrong(NOTIMP, None, edns));
    }
    // In its section, at the root, whose name is one byte, and alone.
    let is_proper = |opt: &Record| opt.section == Section::Additional && opt.fixed == opt.start + 1;
    let has_proper_opt = opt.is_none_or(is_proper) && opts.next().is_none();
    let Some(whole) = end.filter(|_| records.is_some() && has_proper_opt) else {
        return Err(NoQuestion::Wrong(FORMERR, end, edns));
    };
    if edns.is_some_and(|edns| edns.version > 0) {
        return Err(NoQuestion::Wrong(BADVERS, end, edns));
    }
    Ok(Question {
        kind: u16_at(message, whole - 4).unwrap_or_default(),
        class: u16_at(message, whole - 2).unwrap_or_default(),
        end: whole,
        edns,
    })
}

/// An answer with records, being written.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    limit: usize,
    ttl: u32,
    answers: u16,
    edns: Option<Edns>,
}

impl<'a> Writer<'a> {
    /// Begins an authoritative answer to `query` in place of what `out` holds, no longer than `limit`,
    /// whose records have this TTL.
    pub(crate) fn new(
        query: &[u8],
        question: &Question,
        limit: usize,
        ttl: u32,
        out: &'a mut Vec<u8>,
    ) -> Self {
        header(query, NOERROR, Some(question.end), out);
        out[FLAGS] |= AA;
        Self {
            out,
            limit: limit - question.edns.map_or(0, |_| OPT_LENGTH),
            ttl,
            answers: 0,
            edns: question.edns,
        }
    }

    /// Adds a record whose owner stands at an offset of the answer. Returns the offset of its data. If it does
    /// not fit, the answer is truncated, and this record and all later ones are left out.
    pub(crate) fn record(&mut self, owner: usize, kind: u16, data: &[u8]) -> usize {
        let start = self.out.len();
        if self.out[FLAGS] & TC != 0 {
            return start;
        }
        // The first owners stand in the first 700 bytes, and an offset has 14 bits.
        let fixed = [0xc000 | owner as u16, kind, IN].map(u16::to_be_bytes);
        self.out.extend_from_slice(fixed.as_flattened());
        self.out.extend_from_slice(&self.ttl.to_be_bytes());
        // An address or a name.
        self.out
            .extend_from_slice(&(data.len() as u16).to_be_bytes());
        let data_at = self.out.len();
        self.out.extend_from_slice(data);
        if self.out.len() > self.limit {
            self.out.truncate(start);
            self.out[FLAGS] |= TC;
        } else {
            self.answers += 1;
        }
        data_at
    }

    /// Ends the answer, with an OPT record if the query had one.
    pub(crate) fn finish(self) {
        put(self.out, ANSWERS, &self.answers.to_be_bytes());
        push_opt(self.out, self.edns, 0);
    }
}

/// Writes an answer without records: the header, and the question up to `end`.
pub(crate) fn header(query: &[u8], rcode: u8, end: Option<usize>, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&query[..end.unwrap_or(HEADER)]);
    out[FLAGS] = QR | query[FLAGS] & (OPCODE | RD);
    out[CODE] = RA | query[CODE] & CD | rcode & RCODE;
    out[QUESTIONS..HEADER].fill(0);
    out[QUESTIONS + 1] = u8::from(end.is_some());
}

/// Copies `message` to `out`; one longer than `limit` is cut to whole answers from the front, with its OPT
/// record if it had one, and the TC bit. Names only point back, so what is left reads as before.
pub(crate) fn fit(message: &[u8], limit: usize, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(message);
    let limit = limit.max(MIN_UDP);
    if message.len() <= limit {
        return;
    }
    let question_end = question_end(message).unwrap_or(HEADER);
    let records = records(message, question_end).unwrap_or_default();
    let opt = records.iter().find(|record| record.kind == OPT);
    let opt = opt.map_or(&[][..], |opt| &message[opt.start..opt.end]);
    // A question is shorter than the least limit.
    let room = limit.saturating_sub(opt.len());
    let fits = |record: &&Record| record.section == Section::Answer && record.end <= room;
    let count = records.iter().take_while(fits).count();
    keep(out, question_end, &records[..count]);
    out[FLAGS] |= TC;
    out[ADDITIONALS + 1] = u8::from(!opt.is_empty());
    out.extend(opt);
}
