//! Writes answers record by record, as far as they fit, and cuts messages to a length.
//!
//! The question is copied as it came, names point back into it where they can, and room for the OPT
//! record is kept from the start. What does not fit is left out, and the TC bit says so.

use super::question::Edns;
use super::{
    AA, ADDITIONALS, ANSWERS, AUTHORITIES, CD, CODE, FLAGS, HEADER, IN, MIN_UDP, NOERROR, OPCODE,
    OPT, OWN_UDP, QR, QUESTIONS, Question, RA, RCODE, RD, Section, TC, put, question_end, records,
};

/// An OPT record without options.
const OPT_LENGTH: usize = 11;

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
    let mut end = question_end.unwrap_or(HEADER);
    let opt = records.iter().find(|record| record.kind == OPT);
    let opt = opt.map_or(&[][..], |opt| &message[opt.start..opt.end]);
    // A question is shorter than the least limit.
    let opt = if end + opt.len() <= limit { opt } else { &[] };
    let (mut answers, mut authorities) = (0_u16, 0_u16);
    for record in &records {
        if record.section == Section::Additional || record.end + opt.len() > limit {
            break;
        }
        match record.section {
            Section::Answer => answers += 1,
            _ => authorities += 1,
        }
        end = record.end;
    }
    out.truncate(end);
    out.extend_from_slice(opt);
    out[FLAGS] |= TC;
    let counts = [
        (QUESTIONS, u16::from(question_end.is_some())),
        (ANSWERS, answers),
        (AUTHORITIES, authorities),
        (ADDITIONALS, u16::from(!opt.is_empty())),
    ];
    for (at, count) in counts {
        put(out, at, &count.to_be_bytes());
    }
}
