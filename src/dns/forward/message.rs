//! Parses queries and replies for forwarding. Both pass byte for byte except for the id, the OPT record,
//! which loses its options, and the question of a reply, which becomes the client's.

use bytes::Bytes;

use crate::dns::Transport;
use crate::dns::wire::{
    self, CODE, Edns, FLAGS, FORMERR, HEADER, NOERROR, NOTIMP, NXDOMAIN, OPCODE, OPT, QR,
    QUESTIONS, RCODE, SERVFAIL, TC,
};

/// A client's query.
#[derive(Clone, Debug)]
pub(super) struct Query {
    bytes: Bytes,
    question_end: usize,
    edns: Option<Edns>,
    /// True if only an OPT record follows the question.
    is_plain: bool,
}

impl Query {
    /// Returns `None` if the message does not have one question and all records that it announces.
    pub(super) fn parse(client: Bytes) -> Option<Self> {
        let question_end = wire::question_end(&client)?;
        let records = wire::records(&client, question_end)?;
        let end = records.last().map_or(question_end, |last| last.end);
        let mut bytes = client[..end].to_vec();
        let mut edns = None;
        for opt in records.iter().rev().filter(|record| record.kind == OPT) {
            let read = Edns::read(&client, opt);
            bytes.splice(opt.start..opt.end, read.without_options(read.udp_size, 0));
            edns = Some(read);
        }
        Some(Self {
            bytes: bytes.into(),
            question_end,
            edns,
            is_plain: records.iter().all(|record| record.kind == OPT),
        })
    }

    /// Returns the query without EDNS if the reply is from a server that does not support EDNS. Source:
    /// RFC 6891, section 7.
    pub(super) fn without_edns(&self, reply: &Reply) -> Option<Self> {
        let is_error = [FORMERR, NOTIMP].contains(&reply.rcode());
        if self.edns.is_none() || reply.extended.is_some() || !is_error {
            return None;
        }
        let mut bytes = self.bytes.to_vec();
        wire::truncate_to(&mut bytes, self.question_end, &[]);
        Self::parse(bytes.into())
    }

    pub(super) fn id(&self) -> u16 {
        wire::u16_at(&self.bytes, 0).unwrap_or_default()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    fn question(&self) -> &[u8] {
        &self.bytes[HEADER..self.question_end]
    }

    /// Returns the bytes in which equal queries over one transport agree: all but the id and the name's case.
    pub(super) fn key(&self, transport: Transport) -> Vec<u8> {
        let mut key = self.message(0);
        key[HEADER..self.question_end - 4].make_ascii_lowercase();
        key.push(transport as u8);
        key
    }

    /// Returns the key for the cache; `None` if the answer may be meant for this client alone.
    pub(super) fn cache_key(&self) -> Option<Vec<u8>> {
        // The cache does not distinguish transports.
        if self.is_plain { Some(self.key(Transport::Tcp)) } else { None }
    }

    /// Returns the bytes to send.
    pub(super) fn message(&self, id: u16) -> Vec<u8> {
        let mut bytes = self.bytes.to_vec();
        wire::put(&mut bytes, 0, &id.to_be_bytes());
        bytes
    }

    /// Returns whether `message` has the same question.
    fn has_same_question(&self, message: &[u8]) -> bool {
        let type_at = self.question_end - 4;
        wire::u16_at(message, QUESTIONS) == Some(1)
            && message.get(type_at..self.question_end)
                == Some(&self.bytes[type_at..self.question_end])
            && message[HEADER..type_at].eq_ignore_ascii_case(&self.bytes[HEADER..type_at])
    }

    /// Returns the reply with the client's id and question.
    pub(super) fn restore(&self, reply: &Reply) -> Bytes {
        let mut bytes = reply.bytes.to_vec();
        wire::put(&mut bytes, 0, &self.bytes[..2]);
        wire::put(&mut bytes, HEADER, self.question());
        wire::push_opt(&mut bytes, self.edns, reply.extended.unwrap_or_default());
        bytes.into()
    }
}

/// A reply to a forwarded query.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    /// The message up to its OPT record.
    pub(super) bytes: Bytes,
    /// The upper bits of the response code, from the OPT record if there is one.
    pub(super) extended: Option<u8>,
}

impl Reply {
    /// Returns `None` if the message is not a reply to this query under this id.
    pub(super) fn read(bytes: &[u8], id: u16, query: &Query) -> Option<Self> {
        let is_ours = bytes.len() >= HEADER
            && wire::u16_at(bytes, 0) == Some(id)
            && bytes[FLAGS] & QR != 0
            && bytes[FLAGS] & OPCODE == query.bytes[FLAGS] & OPCODE;
        if !is_ours {
            return None;
        }
        // Servers leave out the question of an error if they could not read it.
        if is_failure(wire::rcode(bytes)) && wire::u16_at(bytes, QUESTIONS) == Some(0) {
            return Some(Self::header_and_question(bytes, query));
        }
        if !query.has_same_question(bytes) {
            return None;
        }
        let Some(records) = wire::records(bytes, query.question_end) else {
            // Some servers cut a record in two. If they do not set TC, the server has failed.
            let mut header = bytes[..HEADER].to_vec();
            if header[FLAGS] & TC == 0 {
                header[CODE] = header[CODE] & !RCODE | SERVFAIL;
            }
            return Some(Self::header_and_question(&header, query));
        };
        let before_opt = records.iter().take_while(|record| record.kind != OPT);
        let (records, opt) = records.split_at(before_opt.count());
        let mut reply = bytes.to_vec();
        wire::truncate_to(&mut reply, query.question_end, records);
        Some(Self {
            bytes: reply.into(),
            extended: opt.first().map(|opt| Edns::read(bytes, opt).extended),
        })
    }

    fn header_and_question(bytes: &[u8], query: &Query) -> Self {
        let mut reply = [&bytes[..HEADER], query.question()].concat();
        wire::put(&mut reply, QUESTIONS, &[0, 1]);
        wire::truncate_to(&mut reply, query.question_end, &[]);
        Self { bytes: reply.into(), extended: None }
    }

    /// Returns the response code, or 255 for a higher one.
    pub(super) fn rcode(&self) -> u8 {
        self.extended.unwrap_or_default().saturating_mul(16) | wire::rcode(&self.bytes)
    }

    pub(super) fn is_failure(&self) -> bool {
        is_failure(self.rcode())
    }
}

/// Returns true for a code that does not say whether the name exists, as SERVFAIL or REFUSED. Source: RFC 8767,
/// section 4.
fn is_failure(rcode: u8) -> bool {
    ![NOERROR, NXDOMAIN].contains(&rcode)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Answer, query, query_with_opt};
    use super::*;

    fn parsed(bytes: Vec<u8>) -> Query {
        Query::parse(bytes.into()).expect("a query")
    }

    #[test]
    fn a_query_is_forwarded_unchanged_except_its_id() {
        let mut signed = query(7, "a.test");
        signed[11] = 1;
        signed.extend([0, 0, 250, 0, 255, 0, 0, 0, 0, 0, 2, 1, 2]);
        assert_eq!(parsed(signed.clone()).cache_key(), None);
        for asked in [query(7, "a.test"), query_with_opt(7, "a.test", 512, &[]), signed] {
            let sent = parsed(asked.clone()).message(9);
            assert_eq!(sent[..2], [0, 9]);
            assert_eq!(sent[2..], asked[2..]);
        }
    }

    #[test]
    fn options_of_a_query_are_dropped_and_its_opt_record_passes() {
        let cookie = [0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8];
        let subnet = [0, 8, 0, 7, 0, 1, 24, 0, 10, 1, 2];
        for (size, options, sent_size) in [
            (1232, &cookie[..], 1232),
            (4096, &[subnet.as_slice(), &cookie].concat(), 4096),
            // The length of the option exceeds the record.
            (0, &[0, 10, 0, 9, 1], 512),
        ] {
            let mut asked = query_with_opt(7, "a.test", size, options);
            let opt = asked.len() - options.len() - 11;
            // The DO bit and undefined flags, of which only the DO bit passes.
            asked[opt + 7..opt + 9].copy_from_slice(&[0xc0, 1]);
            let mut expected = query_with_opt(9, "a.test", sent_size, &[]);
            expected[opt + 7] = 0x80;
            assert_eq!(parsed(asked.clone()).message(9), expected);
            // A TSIG record after the OPT record.
            let signature = [0, 0, 250, 0, 255, 0, 0, 0, 0, 0, 2, 1, 2];
            (asked[11], expected[11]) = (2, 2);
            asked.extend(signature);
            expected.extend(signature);
            assert_eq!(parsed(asked).message(9), expected);
        }
    }

    #[test]
    fn a_reply_has_the_agents_opt_record_in_place_of_the_servers() {
        let plain = query(1, "a.test");
        let with_opt = query_with_opt(1, "a.test", 1232, &[]);
        let cookie = [0, 10, 0, 16, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9, 9];
        let server = |records: u8, opt: &[u8]| {
            let mut bytes = Answer::address(1).to(&plain);
            bytes[11] = records;
            [&bytes, opt].concat()
        };
        let opt = |extended, options: &[u8]| {
            let length = options.len() as u8;
            [&[0, 0, 41, 4, 208, extended, 0, 0x80, 0, 0, length], options].concat()
        };
        let own = |extended| [0, 0, 41, 16, 0, extended, 0, 0, 0, 0, 0];
        let glue = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 1, 2, 3, 4];
        for (what, records, additional, expected, rcode) in [
            ("none", 0, vec![], server(1, &own(0)), 0),
            ("a cookie", 1, opt(0, &cookie), server(1, &own(0)), 0),
            ("two", 2, opt(0, &cookie).repeat(2), server(1, &own(0)), 0),
            (
                "a record before",
                2,
                [&glue[..], &opt(0, &cookie)].concat(),
                server(2, &[&glue[..], &own(0)].concat()),
                0,
            ),
            // Records after the OPT record are dropped, because compressed names may point to removed bytes.
            ("a record behind", 2, [&opt(0, &cookie)[..], &glue].concat(), server(1, &own(0)), 0),
            ("BADVERS", 1, opt(1, &[]), server(1, &own(1)), 16),
            ("a private code", 1, opt(0xf0, &[]), server(1, &own(0xf0)), 255),
        ] {
            let bytes = server(records, &additional);
            let query = parsed(with_opt.clone());
            let reply = Reply::read(&bytes, 1, &query).expect("a reply");
            assert_eq!(
                (reply.rcode(), query.restore(&reply)),
                (rcode, expected.clone().into()),
                "{what}"
            );
            assert!(!reply.bytes.windows(3).any(|found| found == [0, 0, 41]), "{what}");
            let query = parsed(plain.clone());
            let reply = Reply::read(&bytes, 1, &query).expect("a reply");
            // Without EDNS in the query, the reply has no OPT record, which is the last record of `expected`.
            let without = &expected[..expected.len() - 11];
            assert_eq!(query.restore(&reply)[12..], without[12..], "{what}");
        }
    }

    #[test]
    fn the_cache_key_has_every_field_that_can_change_the_answer() {
        let key = |bytes: Vec<u8>| parsed(bytes).cache_key();
        let base = key(query_with_opt(1, "a.test", 1232, &[]));
        assert!(base.is_some());
        assert_eq!(key(query_with_opt(2, "A.Test", 1232, &[])), base);
        assert_ne!(key(query(1, "a.test")), base);
        assert!(key(query(1, "a.test")).is_some());
        // Offsets in a query with an OPT record, and the new values of these bytes.
        for (what, at, value) in [
            ("recursion", 2, 0),
            ("checking disabled", 3, 0x10),
            ("authentic data", 3, 0x20),
            ("name", 13, b'b'),
            ("type", 21, 28),
            ("class", 23, 3),
            ("DNSSEC", 31, 0x80),
        ] {
            let mut other = query_with_opt(1, "a.test", 1232, &[]);
            other[at] = value;
            assert_ne!(key(other), base, "{what}");
        }
        // Options are not forwarded, so that they are not part of the key.
        assert_eq!(key(query_with_opt(1, "a.test", 1232, &[0, 10, 0, 1, 5])), base);
    }

    #[test]
    fn only_a_message_with_one_valid_question_is_forwarded() {
        let whole = query_with_opt(1, "a.test", 1232, &[]);
        for length in 0..whole.len() {
            assert!(Query::parse(whole[..length].to_vec().into()).is_none(), "{length}");
        }
        for (at, value) in [(5, 0), (5, 2), (12, 0xc0), (12, 0x40), (11, 2)] {
            let mut bad = whole.clone();
            bad[at] = value;
            assert!(Query::parse(bad.into()).is_none(), "{at} {value}");
        }
        let long = vec!["a"; 127].join(".");
        assert!(Query::parse(query(1, &long).into()).is_some());
        let longer = vec!["a"; 128].join(".");
        assert!(Query::parse(query(1, &longer).into()).is_none());
    }

    #[test]
    fn bytes_behind_the_last_record_are_cut_off() {
        let asked = query_with_opt(1, "a.test", 1232, &[]);
        let mut bytes = Answer::address(1).to(&asked);
        bytes.extend([1, 2, 3]);
        let query = parsed(asked.clone());
        let reply = Reply::read(&bytes, 1, &query).expect("a reply");
        assert_eq!(query.restore(&reply), Answer::address(1).to(&asked));
    }

    #[test]
    fn an_error_without_the_question_gets_it_back() {
        let asked = query_with_opt(1, "a.test", 1232, &[]);
        let query = parsed(asked.clone());
        for rcode in 0..6 {
            let mut bytes = Answer::rcode(rcode).to(&asked);
            let mut expected = bytes[..asked.len() - 11].to_vec();
            expected[11] = 0;
            bytes.truncate(12);
            bytes[5] = 0;
            bytes[11] = 0;
            let reply = Reply::read(&bytes, 1, &query);
            match rcode {
                0 | 3 => assert!(reply.is_none()),
                _ => assert_eq!(reply.expect("a reply").bytes, expected),
            }
        }
    }

    #[test]
    fn a_reply_with_missing_records_becomes_servfail() {
        let asked = query_with_opt(1, "a.test", 1232, &[]);
        let bytes = Answer::address(1).to(&asked);
        let query = parsed(asked.clone());
        for length in asked.len() - 11..bytes.len() {
            let reply = Reply::read(&bytes[..length], 1, &query).expect("a reply");
            assert_eq!(reply.rcode(), SERVFAIL, "{length}");
            assert_eq!(reply.bytes[HEADER..], asked[HEADER..asked.len() - 11]);
        }
    }
}
