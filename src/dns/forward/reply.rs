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

/// What a server sent in answer to a query.
#[derive(Clone, Debug)]
pub(super) struct Received {
    pub(super) rcode: u8,
    /// `None` of an error with nothing behind the header: too little to pass on.
    pub(super) reply: Option<Reply>,
    /// There is more, over TCP. What is left of the reply says so.
    pub(super) is_truncated: bool,
}

/// Why a message is no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    #[error("the reply over TCP is to another query")]
    NotOurs,
    #[error("the reply's records do not fit its length")]
    Broken,
}

impl Received {
    /// Of a message that `is_cut` by the end of its buffer, only header and question count.
    pub(super) fn read(
        bytes: &[u8],
        id: u16,
        query: &Query,
        is_cut: bool,
    ) -> Result<Self, Unusable> {
        let is_ours = bytes.len() >= HEADER
            && wire::u16_at(bytes, 0) == Some(id)
            && bytes[FLAGS] & QR != 0
            && bytes[FLAGS] & OPCODE == query.opcode();
        if !is_ours {
            return Err(Unusable::NotOurs);
        }
        let rcode = wire::rcode(bytes);
        if wire::u16_at(bytes, QUESTIONS) == Some(0) && rcode != NOERROR {
            return Ok(Self {
                rcode,
                reply: None,
                is_truncated: false,
            });
        }
        if !query.is_asked_in(bytes) {
            return Err(Unusable::NotOurs);
        }
        let is_truncated = is_cut || bytes[FLAGS] & TC != 0;
        let reply = match Reply::parse(bytes, query).filter(|_| !is_cut) {
            Some(reply) => reply,
            None if is_truncated => Reply::emptied(bytes, query),
            None => return Err(Unusable::Broken),
        };
        Ok(Self {
            rcode,
            reply: Some(reply),
            is_truncated,
        })
    }

    /// Whether the server cannot bear an OPT record. Source: RFC 6891, section 7.
    pub(super) fn lacks_opt(&self) -> bool {
        let has_opt = self.reply.as_ref().is_some_and(|it| it.opt().is_some());
        !has_opt && !self.is_truncated && [FORMERR, NOTIMP].contains(&self.rcode)
    }
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
        self.opt().is_some_and(|(opt, _)| self.0[opt.ttl_at()] != 0)
    }

    /// For a client that sent no OPT record. What stands behind the record goes with it: names there
    /// may refer to each other by place, and it is additional. Servers put the record last.
    pub(super) fn without_opt(&self) -> Vec<u8> {
        let Some((opt, before)) = self.opt() else {
            return self.0.to_vec();
        };
        let mut bytes = self.0[..opt.start].to_vec();
        wire::put(&mut bytes, ADDITIONALS, &before.to_be_bytes());
        if self.0[opt.ttl_at()] != 0 {
            // Half a response code would read as another one.
            bytes[CODE] = bytes[CODE] & !RCODE | SERVFAIL;
        }
        bytes
    }

    /// The OPT record, and how many additional records stand before it.
    fn opt(&self) -> Option<(wire::Record, u16)> {
        let records = wire::records(&self.0, wire::question_end(&self.0)?)?;
        let is_additional = |record: &wire::Record| record.section == Section::Additional;
        let mut additional = records.into_iter().filter(is_additional).zip(0..);
        additional.find(|(record, _)| record.kind == OPT)
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
        let received = Received::read(bytes, 1, query, false).expect("a reply");
        assert!(!received.is_truncated);
        received.reply.expect("more than a header")
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
            let received = Received::read(&bytes[..length], 1, &query, false);
            assert_eq!(received.err(), Some(Unusable::Broken), "{length}");
        }
    }
}
