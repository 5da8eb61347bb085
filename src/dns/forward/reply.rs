//! A server's reply: whether it is one to our query, and what forwarding must know of it.
//!
//! The bytes stay as they came. Where the TTLs and the OPT record stand is found once, so that the
//! cache can age a reply, and a client without EDNS gets one it understands.
//!
//! Does not look into the data of records, but for the TTL of a negative answer.

use std::sync::Arc;

use bytes::Bytes;

use super::query::Query;
use crate::dns::wire::{self, NOERROR, NXDOMAIN, OPCODE, QR, RCODE, Record, SERVFAIL, Section, TC};

/// A reply to one of our queries, with everything it announces.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    bytes: Bytes,
    opt: Option<Opt>,
    /// Where TTLs stand.
    ttls: Arc<[u16]>,
    life: Option<Life>,
}

/// How long a reply may be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) seconds: u32,
    pub(super) is_negative: bool,
}

#[derive(Clone, Copy, Debug)]
struct Opt {
    start: usize,
    /// How many additional records stand before it.
    before: u16,
    /// Upper bits of a result that does not fit the header.
    extended: u8,
}

/// What came in answer to a query.
#[derive(Clone, Debug)]
pub(super) enum Arrival {
    Reply(Reply),
    /// There is more, over TCP. What is left of the reply says so.
    Truncated(Reply),
    /// An error with nothing behind the header: too little to pass on.
    Bare(u8),
    /// Something else: another id, another question, a query.
    NotOurs,
    /// Ours by id and question, and broken behind it.
    Broken,
}

impl Arrival {
    pub(super) fn read(bytes: &[u8], id: u16, query: &Query) -> Self {
        let is_ours = |bytes: &[u8]| {
            let flags = bytes[wire::FLAGS];
            let opcode = query.with_id(id)[wire::FLAGS] & OPCODE;
            wire::u16_at(bytes, 0) == Some(id) && flags & QR != 0 && flags & OPCODE == opcode
        };
        if bytes.len() < wire::HEADER || !is_ours(bytes) {
            return Self::NotOurs;
        }
        if wire::u16_at(bytes, wire::QUESTIONS) == Some(0) && bytes[3] & RCODE != NOERROR {
            return Self::Bare(bytes[3] & RCODE);
        }
        if !query.is_asked_in(bytes) {
            return Self::NotOurs;
        }
        if bytes[wire::FLAGS] & TC != 0 {
            let left = Reply::parse(bytes, query).map(Reply::passing);
            return Self::Truncated(left.unwrap_or_else(|| Reply::emptied(bytes, query)));
        }
        Reply::parse(bytes, query).map_or(Self::Broken, Self::Reply)
    }

    /// What a reply longer than its buffer is: what came does not matter.
    pub(super) fn cut(self, bytes: &[u8], query: &Query) -> Self {
        match self {
            Self::Reply(_) | Self::Broken => Self::Truncated(Reply::emptied(bytes, query)),
            other => other,
        }
    }
}

impl Reply {
    fn parse(bytes: &[u8], query: &Query) -> Option<Self> {
        let records = wire::records(bytes, query.question_end())?;
        let end = records.last().map_or(query.question_end(), |r| r.end);
        let additional = |record: &&Record| record.section == Section::Additional;
        let opt = records
            .iter()
            .filter(additional)
            .zip(0..)
            .find(|(record, _)| record.kind == wire::OPT)
            .map(|(record, before)| Opt {
                start: record.start,
                before,
                extended: bytes[record.ttl_at()],
            });
        let has_ttl = |record: &&Record| ![wire::OPT, wire::TSIG].contains(&record.kind);
        let ttl_at = |record: &Record| u16::try_from(record.ttl_at()).ok();
        Some(Self {
            bytes: Bytes::copy_from_slice(&bytes[..end]),
            opt,
            ttls: records.iter().filter(has_ttl).filter_map(ttl_at).collect(),
            life: life(bytes, &records, query.kind()).filter(|_| opt.is_none_or(Opt::is_plain)),
        })
    }

    /// The same reply, never to be kept.
    fn passing(self) -> Self {
        Self { life: None, ..self }
    }

    /// Header and question of a reply, with the sign that there is more.
    fn emptied(bytes: &[u8], query: &Query) -> Self {
        let mut left = bytes[..query.question_end()].to_vec();
        left[wire::FLAGS] |= TC;
        wire::put(&mut left, wire::ANSWERS, &[0; 6]);
        Self {
            bytes: left.into(),
            opt: None,
            ttls: Arc::default(),
            life: None,
        }
    }

    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    pub(super) fn rcode(&self) -> u8 {
        self.bytes[3] & RCODE
    }

    pub(super) fn has_opt(&self) -> bool {
        self.opt.is_some()
    }

    /// Nothing when it must not be kept.
    pub(super) fn life(&self) -> Option<Life> {
        self.life
    }

    /// How much memory it takes, about.
    pub(super) fn weight(&self) -> usize {
        self.bytes.len() + 2 * self.ttls.len() + size_of::<Self>()
    }

    /// The same reply with other TTLs.
    pub(super) fn with_ttls(&self, change: impl Fn(u32) -> u32) -> Self {
        let mut bytes = self.bytes.to_vec();
        for at in self.ttls.iter().copied().map(usize::from) {
            let ttl = wire::u32_at(&bytes, at).map_or(0, sane_ttl);
            wire::put(&mut bytes, at, &change(ttl).to_be_bytes());
        }
        Self {
            bytes: bytes.into(),
            ..self.clone()
        }
    }

    /// For a client that sent no OPT record. What stands behind the record goes with it: names
    /// there may refer to each other by place, and it is additional. Servers put the record last.
    pub(super) fn without_opt(&self) -> Vec<u8> {
        let Some(opt) = self.opt else {
            return self.bytes.to_vec();
        };
        let mut bytes = self.bytes[..opt.start].to_vec();
        wire::put(&mut bytes, wire::ADDITIONALS, &opt.before.to_be_bytes());
        if !opt.is_plain() {
            // Half a result would read as another one.
            bytes[3] = bytes[3] & !RCODE | SERVFAIL;
        }
        bytes
    }
}

impl Opt {
    fn is_plain(self) -> bool {
        self.extended == 0
    }
}

/// Source: RFC 2308, sections 2, 4 and 5.
fn life(bytes: &[u8], records: &[Record], kind: u16) -> Option<Life> {
    let answers = || records.iter().filter(|r| r.section == Section::Answer);
    let is_asked = |r: &Record| r.kind == kind || kind == wire::ANY;
    let is_negative = match bytes[3] & RCODE {
        NOERROR => !answers().any(is_asked),
        NXDOMAIN => true,
        _ => return None,
    };
    let ttl = |record: &Record| wire::u32_at(bytes, record.ttl_at()).map(sane_ttl);
    let of_answers = answers().filter_map(ttl).min();
    let seconds = if is_negative {
        let is_soa = |r: &&Record| r.section == Section::Authority && r.kind == wire::SOA;
        let soa = records.iter().find(is_soa)?;
        let minimum = wire::u32_at(bytes, soa.end.checked_sub(4)?).map(sane_ttl)?;
        ttl(soa)?.min(minimum).min(of_answers.unwrap_or(u32::MAX))
    } else {
        of_answers?
    };
    (seconds > 0).then_some(Life {
        seconds,
        is_negative,
    })
}

/// A TTL with the highest bit set is none. Source: RFC 2181, section 8.
fn sane_ttl(ttl: u32) -> u32 {
    if ttl > i32::MAX.unsigned_abs() {
        0
    } else {
        ttl
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Answer, query, query_with_opt};
    use super::*;

    fn parsed(bytes: Vec<u8>) -> Query {
        Query::parse(bytes.into()).expect("a query")
    }

    fn read(bytes: &[u8], query: &Query) -> Reply {
        match Arrival::read(bytes, 1, query) {
            Arrival::Reply(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_client_without_opt_record_gets_none() {
        let asked = query(1, "a.test");
        let with_opt = Answer::address(1).to(&query_with_opt(1, "a.test", 1232, &[]));
        let query = parsed(asked.clone());
        let restored = query.restore(&read(&with_opt, &query));
        assert_eq!(restored, Answer::address(1).to(&asked));
    }

    #[test]
    fn what_stands_behind_an_opt_record_goes_with_it() {
        let asked = query(1, "a.test");
        let mut bytes = Answer::address(1).to(&query_with_opt(1, "a.test", 1232, &[]));
        bytes[11] = 2;
        bytes.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 1, 2, 3, 4]);
        let query = parsed(asked.clone());
        let restored = query.restore(&read(&bytes, &query));
        assert_eq!(restored, Answer::address(1).to(&asked));
    }

    #[test]
    fn half_a_result_is_not_passed_on_as_another() {
        let asked = query(1, "a.test");
        let mut bytes = Answer::address(1).to(&query_with_opt(1, "a.test", 1232, &[]));
        let extended = bytes.len() - 6;
        bytes[extended] = 1;
        let query = parsed(asked);
        let reply = read(&bytes, &query);
        assert_eq!(query.restore(&reply)[3] & RCODE, SERVFAIL);
        assert_eq!(reply.life(), None);
    }

    #[test]
    fn bytes_behind_the_last_record_are_cut_off() {
        let asked = query_with_opt(1, "a.test", 1232, &[]);
        let mut bytes = Answer::address(1).to(&asked);
        bytes.extend([1, 2, 3]);
        let query = parsed(asked.clone());
        let restored = query.restore(&read(&bytes, &query));
        assert_eq!(restored, Answer::address(1).to(&asked));
    }

    #[test]
    fn a_reply_without_all_it_promises_is_broken() {
        let asked = query_with_opt(1, "a.test", 1232, &[]);
        let bytes = Answer::address(1).to(&asked);
        let query = parsed(asked.clone());
        for length in asked.len() - 11..bytes.len() {
            let arrival = Arrival::read(&bytes[..length], 1, &query);
            assert!(matches!(arrival, Arrival::Broken), "{length}: {arrival:?}");
        }
    }
}
