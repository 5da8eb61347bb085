//! A server's reply: whether it is one to our query, and whether it is whole.
//!
//! The bytes stay as they came, but for the OPT record, which a client without EDNS does not get.

use bytes::Bytes;

use super::query::Query;
use crate::dns::wire::{
    self, ADDITIONALS, ANSWERS, CODE, FLAGS, FORMERR, HEADER, NOERROR, NOTIMP, OPCODE, OPT, QR,
    QUESTIONS, RCODE, SERVFAIL, Section, TC,
};

/// A reply to one of our queries, with all the records it announces.
#[derive(Clone, Debug)]
pub(super) struct Reply(Bytes);

/// What came in answer to a query.
#[derive(Clone, Debug)]
pub(super) enum Received {
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

impl Received {
    pub(super) fn read(bytes: &[u8], id: u16, query: &Query) -> Self {
        let is_ours = bytes.len() >= HEADER
            && wire::u16_at(bytes, 0) == Some(id)
            && bytes[FLAGS] & QR != 0
            && bytes[FLAGS] & OPCODE == query.opcode();
        if !is_ours {
            return Self::NotOurs;
        }
        let rcode = wire::rcode(bytes);
        if wire::u16_at(bytes, QUESTIONS) == Some(0) && rcode != NOERROR {
            return Self::Bare(rcode);
        }
        if !query.is_asked_in(bytes) {
            return Self::NotOurs;
        }
        let reply = Reply::parse(bytes, query);
        if bytes[FLAGS] & TC != 0 {
            return Self::Truncated(reply.unwrap_or_else(|| Reply::emptied(bytes, query)));
        }
        reply.map_or(Self::Broken, Self::Reply)
    }

    /// What a reply longer than its buffer is: what came does not matter.
    pub(super) fn cut(self, bytes: &[u8], query: &Query) -> Self {
        match self {
            Self::Reply(_) | Self::Broken => Self::Truncated(Reply::emptied(bytes, query)),
            other => other,
        }
    }

    pub(super) fn into_reply(self) -> Option<Reply> {
        match self {
            Self::Reply(reply) | Self::Truncated(reply) => Some(reply),
            Self::Bare(_) | Self::NotOurs | Self::Broken => None,
        }
    }

    pub(super) fn rcode(&self) -> u8 {
        match self {
            Self::Reply(reply) | Self::Truncated(reply) => reply.rcode(),
            Self::Bare(rcode) => *rcode,
            Self::NotOurs | Self::Broken => SERVFAIL,
        }
    }

    pub(super) fn is_bare(&self) -> bool {
        matches!(self, Self::Bare(_))
    }

    /// Whether the server cannot bear an OPT record. Source: RFC 6891, section 7.
    pub(super) fn lacks_opt(&self) -> bool {
        let has_none = match self {
            Self::Reply(reply) => reply.opt().is_none(),
            other => other.is_bare(),
        };
        has_none && [FORMERR, NOTIMP].contains(&self.rcode())
    }
}

/// The OPT record of a reply.
struct Opt {
    start: usize,
    /// How many additional records stand before it.
    before: u16,
    /// Upper bits of a response code that does not fit the header.
    extended_rcode: u8,
}

impl Reply {
    fn parse(bytes: &[u8], query: &Query) -> Option<Self> {
        let records = wire::records(bytes, query.question_end())?;
        let end = records.last().map_or(query.question_end(), |last| last.end);
        Some(Self(Bytes::copy_from_slice(&bytes[..end])))
    }

    /// Header and question of a reply, with the TC bit.
    fn emptied(bytes: &[u8], query: &Query) -> Self {
        let mut left = bytes[..query.question_end()].to_vec();
        left[FLAGS] |= TC;
        wire::put(&mut left, ANSWERS, &[0; 6]);
        Self(left.into())
    }

    pub(super) fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }

    pub(super) fn bytes(&self) -> &Bytes {
        &self.0
    }

    pub(super) fn rcode(&self) -> u8 {
        wire::rcode(&self.0)
    }

    /// Whether the response code is more than the header holds.
    pub(super) fn has_extended_rcode(&self) -> bool {
        self.opt().is_some_and(|opt| opt.extended_rcode != 0)
    }

    /// For a client that sent no OPT record. What stands behind the record goes with it: names there
    /// may refer to each other by place, and it is additional. Servers put the record last.
    pub(super) fn without_opt(&self) -> Vec<u8> {
        let Some(opt) = self.opt() else {
            return self.0.to_vec();
        };
        let mut bytes = self.0[..opt.start].to_vec();
        wire::put(&mut bytes, ADDITIONALS, &opt.before.to_be_bytes());
        if opt.extended_rcode != 0 {
            // Half a response code would read as another one.
            bytes[CODE] = bytes[CODE] & !RCODE | SERVFAIL;
        }
        bytes
    }

    fn opt(&self) -> Option<Opt> {
        let records = wire::records(&self.0, wire::question_end(&self.0)?)?;
        let is_additional = |record: &&wire::Record| record.section == Section::Additional;
        let mut additional = records.iter().filter(is_additional).zip(0..);
        let (record, before) = additional.find(|(record, _)| record.kind == OPT)?;
        Some(Opt {
            start: record.start,
            before,
            extended_rcode: self.0[record.ttl_at()],
        })
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
        match Received::read(bytes, 1, query) {
            Received::Reply(reply) => reply,
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
        assert!(reply.has_extended_rcode());
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
            let received = Received::read(&bytes[..length], 1, &query);
            assert!(
                matches!(received, Received::Broken),
                "{length}: {received:?}"
            );
        }
    }
}
