//! Reads queries of clients: whether a message is one plain question, and what it says.

use smallvec::SmallVec;

use super::{
    ADDITIONALS, ANSWERS, AUTHORITIES, FLAGS, FORMERR, HEADER, MIN_UDP, NOTIMP, OPCODE, OPT, QR,
    QUESTIONS, REFUSED, question_end, records, u16_at,
};

/// The longest query this agent takes, which it tells clients.
pub(crate) const OWN_UDP: u16 = 4096;

const NOTIFY: u8 = 4 << 3;

/// The response code of a version of EDNS other than 0.
const BADVERS: u8 = 16;

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
    /// Most bytes of an answer by UDP.
    pub(crate) fn udp_limit(&self) -> usize {
        // What a packet has room for, headers deducted.
        const MOST: usize = 65_507;
        let size = self.edns.map_or(0, |edns| usize::from(edns.udp_size));
        size.clamp(MIN_UDP, MOST)
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
