//! Finds the parts of encoded DNS messages, reads the question of a query, and writes answers.
//!
//! Answering and forwarding need offsets and a few fields only, so everything else passes unchanged.
//! Nothing is trusted: each step checks that the message is long enough. Compressed names must point
//! back and are not followed, so no message causes a loop. EDNS is hop by hop: options pass in neither
//! direction, and an answer has our own OPT record if its query has one. Sources: RFC 1035 section 4,
//! RFC 6891.
//!
//! An answer that is written here repeats the question unchanged, and its names point back into it where
//! possible.

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
/// Offset of the number of questions.
pub(crate) const QUESTIONS: usize = 4;

/// Bytes that every client accepts by UDP.
pub(crate) const MIN_UDP: usize = 512;

/// The longest query that this agent accepts, which its OPT records tell.
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

/// A section of records. Its value is the offset of the number of its records in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    Answer = 6,
    Authority = 8,
    Additional = 10,
}

/// The sections in the order of the message.
const SECTIONS: [Section; 3] = [Section::Answer, Section::Authority, Section::Additional];

/// The offsets of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) section: Section,
    pub(crate) kind: u16,
    pub(crate) start: usize,
    /// The offset of its type, which follows its owner.
    fixed: usize,
    pub(crate) end: usize,
}

impl Record {
    pub(crate) const fn ttl_at(&self) -> usize {
        self.fixed + 4
    }
}

pub(crate) fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*message.get(at..)?.first_chunk()?))
}

pub(crate) fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*message.get(at..)?.first_chunk()?))
}

/// Overwrites the bytes at an offset, unless they would pass the end.
pub(crate) fn put(message: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = message.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Returns the response code of a message that has a header.
pub(crate) fn rcode(message: &[u8]) -> u8 {
    message.get(CODE).map_or(0, |code| code & RCODE)
}

/// Finds the end of the only question of a message. Its name cannot be compressed, because only the
/// header precedes it.
pub(crate) fn question_end(message: &[u8]) -> Option<usize> {
    if u16_at(message, QUESTIONS)? != 1 {
        return None;
    }
    let (name_end, is_compressed) = name_end(message, HEADER)?;
    let end = name_end + 4;
    if is_compressed || end > message.len() { None } else { Some(end) }
}

/// Finds the records after the question; `None` if one is missing.
pub(crate) fn records(message: &[u8], question_end: usize) -> Option<SmallVec<[Record; 8]>> {
    let mut records = SmallVec::new();
    let mut at = question_end;
    for section in SECTIONS {
        for _ in 0..u16_at(message, section as usize)? {
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
    if end > message.len() { None } else { Some(Record { section, kind, start, fixed, end }) }
}

/// Returns the end of a name, and whether it is compressed, so that a pointer ends it.
fn name_end(message: &[u8], start: usize) -> Option<(usize, bool)> {
    let mut at = start;
    // A name has at most 255 bytes.
    while at - start < 255 {
        match *message.get(at)? {
            0 => return Some((at + 1, false)),
            length @ 1..=63 => at += 1 + usize::from(length),
            0xc0.. => {
                let target = usize::from(u16_at(message, at)? & 0x3fff);
                return if target < start { Some((at + 2, true)) } else { None };
            }
            _ => return None,
        }
    }
    None
}

/// Reads a message and the length before it from a TCP stream. Memory grows with the bytes received,
/// not with the announced length.
pub(crate) async fn read_framed(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = Vec::new();
    if stream.take(length.into()).read_to_end(&mut message).await? < usize::from(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(message)
}

/// An OPT record without its options. Source: RFC 6891, section 6.1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edns {
    /// The longest message that its sender accepts by UDP.
    pub(crate) udp_size: u16,
    /// Upper bits of the response code.
    pub(crate) extended: u8,
    version: u8,
    is_dnssec: bool,
}

impl Edns {
    pub(crate) fn read(message: &[u8], opt: &Record) -> Self {
        let after_type = message.get(opt.fixed + 2..).and_then(<[u8]>::first_chunk);
        let [high, low, extended, version, flags] = *after_type.unwrap_or(&[0; 5]);
        Self {
            udp_size: u16::from_be_bytes([high, low]).max(MIN_UDP as u16),
            extended,
            version,
            is_dnssec: flags & 0x80 != 0,
        }
    }

    /// Encodes the record for the other side.
    pub(crate) fn without_options(self, udp_size: u16, extended: u8) -> [u8; OPT_LENGTH] {
        let [high, low] = udp_size.to_be_bytes();
        [0, 0, OPT as u8, high, low, extended, 0, u8::from(self.is_dnssec) << 7, 0, 0, 0]
    }
}

/// Adds our OPT record to an answer if its query had one.
pub(crate) fn push_opt(answer: &mut Vec<u8>, query_edns: Option<Edns>, extended: u8) {
    if let Some(edns) = query_edns {
        answer.extend(edns.without_options(OWN_UDP, extended));
        count_record(answer, Section::Additional);
    }
}

/// Adds a record whose owner name is at offset `owner` of the answer. Returns the offset of its data.
pub(crate) fn push_record(
    answer: &mut Vec<u8>,
    owner: usize,
    kind: u16,
    ttl: u32,
    data: &[u8],
) -> usize {
    // Owners are in the first 700 bytes, and a pointer has 14 bits.
    answer.extend([0xc000 | owner as u16, kind, IN].map(u16::to_be_bytes).as_flattened());
    answer.extend_from_slice(&ttl.to_be_bytes());
    // The data is an address or a name, so its length fits.
    answer.extend_from_slice(&(data.len() as u16).to_be_bytes());
    answer.extend_from_slice(data);
    count_record(answer, Section::Answer);
    answer.len() - data.len()
}

/// Counts a record that was added to a section.
fn count_record(message: &mut [u8], section: Section) {
    let count_at = section as usize;
    let count = u16_at(message, count_at).unwrap_or_default();
    put(message, count_at, &count.saturating_add(1).to_be_bytes());
}

/// Cuts off what follows `records`, the first ones of the message, and corrects the header's counts.
pub(crate) fn truncate_to(message: &mut Vec<u8>, question_end: usize, records: &[Record]) {
    message.truncate(records.last().map_or(question_end, |last| last.end));
    for section in SECTIONS {
        let in_section = records.iter().filter(|record| record.section == section);
        put(message, section as usize, &(in_section.count() as u16).to_be_bytes());
    }
}

/// The error that a message is not a query that can be answered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum InvalidQuery {
    /// The message gets no reply, because it is a fragment, or a reply itself.
    Unanswerable,
    /// The message gets an error: the response code, the end of the question if that can be read, and the OPT
    /// record.
    Refused(u8, Option<usize>, Option<Edns>),
}

/// The question of a query.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub(crate) kind: u16,
    pub(crate) class: u16,
    /// Offset of the end of the question section.
    pub(crate) end: usize,
    pub(crate) edns: Option<Edns>,
}

impl Question {
    /// Returns the bytes that the client accepts at most.
    pub(crate) fn limit(&self, transport: Transport) -> usize {
        // The payload of the largest IPv4 packet, without the IP and UDP headers.
        const MAX_UDP: usize = 65_507;
        let size = self.edns.map_or(MIN_UDP, |edns| edns.udp_size.into());
        match transport {
            Transport::Udp => size.min(MAX_UDP),
            Transport::Tcp => usize::from(u16::MAX),
        }
    }

    /// Returns the name in the query: its labels and the root label.
    pub(crate) fn name<'a>(&self, query: &'a [u8]) -> &'a [u8] {
        &query[HEADER..self.end - 4]
    }

    /// Returns the name as text: lower case, without a dot at its end. `None` if a label contains a dot,
    /// or a byte that is not visible ASCII.
    pub(crate) fn text(&self, query: &[u8]) -> Option<SmallVec<[u8; 128]>> {
        let name = self.name(query);
        // Without the length of its first label and without the root label.
        let mut text = SmallVec::from_slice(name.get(1..name.len() - 1).unwrap_or_default());
        let mut at = 0;
        while let length @ 1.. = usize::from(*name.get(at)?) {
            if at > 0 {
                text[at - 1] = b'.';
            }
            let label: &[u8] = text.get(at..at + length)?;
            let is_plain =
                label.iter().fold(true, |all, it| all & it.is_ascii_graphic() & (*it != b'.'));
            if !is_plain {
                return None;
            }
            at += 1 + length;
        }
        text.make_ascii_lowercase();
        Some(text)
    }
}

/// Reads a query.
pub(crate) fn read_query(message: &[u8]) -> Result<Question, InvalidQuery> {
    if message.len() < HEADER || message[FLAGS] & QR != 0 {
        return Err(InvalidQuery::Unanswerable);
    }
    if message.len() > usize::from(OWN_UDP) {
        return Err(InvalidQuery::Refused(FORMERR, None, None));
    }
    let end = question_end(message);
    let records = end.and_then(|end| records(message, end));
    let mut opts = records.iter().flatten().filter(|record| record.kind == OPT);
    let opt = opts.next();
    let edns = opt.map(|opt| Edns::read(message, opt));
    if message[FLAGS] & OPCODE != 0 {
        return Err(InvalidQuery::Refused(NOTIMP, None, edns));
    }
    // An OPT record is alone, in the additional section, and its owner is the root, which has one byte.
    let has_valid_opt = opts.next().is_none()
        && opt.is_none_or(|opt| opt.section == Section::Additional && opt.fixed == opt.start + 1);
    let (Some(question_end), Some(_), true) = (end, &records, has_valid_opt) else {
        return Err(InvalidQuery::Refused(FORMERR, end, edns));
    };
    if edns.is_some_and(|edns| edns.version > 0) {
        return Err(InvalidQuery::Refused(BADVERS, end, edns));
    }
    Ok(Question {
        kind: u16_at(message, question_end - 4).unwrap_or_default(),
        class: u16_at(message, question_end - 2).unwrap_or_default(),
        end: question_end,
        edns,
    })
}

/// Writes an answer without records to `out`: the header, and the question up to `end`.
pub(crate) fn write_empty(query: &[u8], rcode: u8, end: Option<usize>, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&query[..end.unwrap_or(HEADER)]);
    out[FLAGS] = QR | query[FLAGS] & (OPCODE | RD);
    out[CODE] = RA | query[CODE] & CD | rcode & RCODE;
    out[QUESTIONS..HEADER].fill(0);
    out[QUESTIONS + 1] = u8::from(end.is_some());
}

/// Cuts a message that is longer than `limit`: sets the TC bit, and leaves only the first answers that fit
/// and the OPT record. Names only point back, so the remaining ones stay valid.
pub(crate) fn truncate(message: &mut Vec<u8>, limit: usize) {
    let limit = limit.max(MIN_UDP);
    if message.len() <= limit {
        return;
    }
    let question_end = question_end(message).unwrap_or(HEADER);
    let records = records(message, question_end).unwrap_or_default();
    let opt = records.iter().find(|record| record.kind == OPT);
    let opt = opt.map(|opt| message[opt.start..opt.end].to_vec()).unwrap_or_default();
    // A question is shorter than the smallest limit.
    let room = limit.saturating_sub(opt.len());
    let answers = records.iter().take_while(|record| record.section == Section::Answer);
    let count = answers.take_while(|record| record.end <= room).count();
    truncate_to(message, question_end, &records[..count]);
    message[FLAGS] |= TC;
    message[Section::Additional as usize + 1] = u8::from(!opt.is_empty());
    message.extend(opt);
}
