//! A client's query, and the form in which it goes upstream.
//!
//! Upstream it has an id of ours and an OPT record that takes answers of 1232 bytes, the most that
//! passes any network in one piece; both are taken back in the reply. The rest is the client's, byte
//! for byte.

use bytes::Bytes;

use super::reply::Reply;
use crate::dns::wire::{self, ADDITIONALS, FLAGS, HEADER, OPCODE, OPT, QUESTIONS, SIG, TSIG};

/// Largest answer that fits the smallest packet of IPv6. Source: DNS flag day 2020.
pub(super) const SAFE_SIZE: u16 = 1232;

/// What a server may send in reply to a query without an OPT record.
const PLAIN_SIZE: u16 = 512;

#[derive(Clone, Debug)]
pub(super) struct Query {
    client: Bytes,
    question_end: usize,
    /// As it goes upstream, but for the id.
    upstream: Vec<u8>,
    /// `None` if the client signed its query.
    opt: Option<wire::Record>,
    /// Whether the OPT record is ours, and stands at the end.
    is_opt_added: bool,
}

impl Query {
    /// `None` if it is not a message with one question and all the records it announces.
    pub(super) fn parse(client: Bytes) -> Option<Self> {
        let question_end = wire::question_end(&client)?;
        let records = wire::records(&client, question_end)?;
        let end = records.last().map_or(question_end, |last| last.end);
        let mut upstream = client[..end].to_vec();
        wire::put(&mut upstream, 0, &[0, 0]);
        let find = |kinds: &[u16]| records.iter().copied().find(|r| kinds.contains(&r.kind));
        let is_signed = find(&[TSIG, SIG]).is_some();
        let mut opt = find(&[OPT]).filter(|_| !is_signed);
        let is_opt_added = opt.is_none() && !is_signed;
        if let Some(own) = opt {
            let size = wire::u16_at(&upstream, own.class_at()).unwrap_or_default();
            let size = size.max(SAFE_SIZE).to_be_bytes();
            wire::put(&mut upstream, own.class_at(), &size);
        } else if is_opt_added {
            count_additionals(&mut upstream, 1);
            upstream.push(0);
            upstream.extend([OPT, SAFE_SIZE].map(u16::to_be_bytes).concat());
            upstream.extend([0; 6]);
            opt = wire::records(&upstream, question_end)?.last().copied();
        }
        Some(Self {
            client,
            question_end,
            upstream,
            opt,
            is_opt_added,
        })
    }

    pub(super) fn id(&self) -> u16 {
        wire::u16_at(&self.client, 0).unwrap_or_default()
    }

    /// Its length as it came.
    pub(super) fn len(&self) -> usize {
        self.client.len()
    }

    pub(super) fn opcode(&self) -> u8 {
        self.upstream[FLAGS] & OPCODE
    }

    pub(super) fn question_end(&self) -> usize {
        self.question_end
    }

    /// What makes two queries the same: all of it but the id and the case of the name.
    pub(super) fn key(&self) -> Vec<u8> {
        let mut key = self.upstream.clone();
        key[HEADER..self.question_end - 4].make_ascii_lowercase();
        key
    }

    /// What makes two queries the same to the cache, whatever size of answer they take. `None` if the
    /// answer may be meant for this client alone.
    pub(super) fn cache_key(&self) -> Option<Vec<u8>> {
        let opt = self.opt?;
        let is_query = self.upstream[FLAGS] & 0xf8 == 0;
        let is_alone = opt.start == self.question_end && opt.end == self.upstream.len();
        let has_no_options = opt.data_at() == opt.end;
        let mut key = self.key();
        wire::put(&mut key, opt.class_at(), &[0, 0]);
        (is_query && is_alone && has_no_options).then_some(key)
    }

    /// Whether it can be sent without an OPT record, to servers that cannot bear one.
    pub(super) fn can_omit_opt(&self) -> bool {
        self.is_opt_added
    }

    /// The bytes to send. `with_opt` concerns our OPT record only.
    pub(super) fn message(&self, id: u16, with_opt: bool) -> Vec<u8> {
        let mut bytes = self.upstream.clone();
        wire::put(&mut bytes, 0, &id.to_be_bytes());
        if let Some(opt) = self.opt.filter(|_| self.is_opt_added && !with_opt) {
            bytes.truncate(opt.start);
            count_additionals(&mut bytes, -1);
        }
        bytes
    }

    /// The largest answer a server may send in one datagram.
    pub(super) fn size(&self, with_opt: bool) -> usize {
        let opt = self.opt.filter(|_| with_opt || !self.is_opt_added);
        let size = opt.and_then(|opt| wire::u16_at(&self.upstream, opt.class_at()));
        size.unwrap_or(PLAIN_SIZE).into()
    }

    /// Whether the question of a message is this one.
    pub(super) fn is_asked_in(&self, message: &[u8]) -> bool {
        let name = HEADER..self.question_end - 4;
        let fixed = self.question_end - 4..self.question_end;
        let same_name = |found: &[u8]| found.eq_ignore_ascii_case(&self.client[name.clone()]);
        wire::u16_at(message, QUESTIONS) == Some(1)
            && message.get(name.clone()).is_some_and(same_name)
            && message.get(fixed.clone()) == Some(&self.client[fixed])
    }

    /// The reply as the client expects it: its id, its question, and an OPT record only if it sent
    /// one.
    pub(super) fn restore(&self, reply: &Reply) -> Bytes {
        let mut bytes = match self.is_opt_added {
            true => reply.without_opt(),
            false => reply.bytes().to_vec(),
        };
        wire::put(&mut bytes, 0, &self.client[..2]);
        let question = HEADER..self.question_end;
        wire::put(&mut bytes, HEADER, &self.client[question]);
        bytes.into()
    }
}

fn count_additionals(message: &mut [u8], change: i16) {
    let count = wire::u16_at(message, ADDITIONALS).unwrap_or_default();
    let count = count.saturating_add_signed(change);
    wire::put(message, ADDITIONALS, &count.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::super::tests::{query, query_with_opt};
    use super::*;

    fn parsed(bytes: Vec<u8>) -> Query {
        Query::parse(bytes.into()).expect("a query")
    }

    #[test]
    fn goes_upstream_with_room_for_answers() {
        let plain = query(7, "a.test");
        let cases = [
            (plain.clone(), query_with_opt(9, "a.test", 1232, &[])),
            (
                query_with_opt(7, "a.test", 512, &[]),
                query_with_opt(9, "a.test", 1232, &[]),
            ),
            (
                query_with_opt(7, "a.test", 4096, &[]),
                query_with_opt(9, "a.test", 4096, &[]),
            ),
            (
                query_with_opt(7, "a.test", 0, &[0, 10, 0, 1, 5]),
                query_with_opt(9, "a.test", 1232, &[0, 10, 0, 1, 5]),
            ),
        ];
        for (asked, expected) in cases {
            assert_eq!(parsed(asked).message(9, true), expected);
        }
        assert!(parsed(plain.clone()).can_omit_opt());
        assert_eq!(parsed(plain.clone()).message(7, false), plain);
        let own = query_with_opt(7, "a.test", 4096, &[]);
        assert!(!parsed(own.clone()).can_omit_opt());
        assert_eq!(parsed(own.clone()).message(7, false), own);
    }

    #[test]
    fn a_signed_query_passes_untouched() {
        let mut signed = query(7, "a.test");
        signed[11] = 1;
        signed.extend([0, 0, 250, 0, 255, 0, 0, 0, 0, 0, 2, 1, 2]);
        let query = parsed(signed.clone());
        assert_eq!(query.message(7, true), signed);
        assert_eq!(query.cache_key(), None);
    }

    #[test]
    fn the_cache_minds_all_that_may_change_the_answer() {
        let key = |bytes: Vec<u8>| parsed(bytes).cache_key();
        let base = key(query(1, "a.test"));
        assert!(base.is_some());
        assert_eq!(key(query(2, "A.Test")), base);
        assert_eq!(key(query_with_opt(1, "a.test", 4096, &[])), base);
        // Bytes of the message with an OPT record, and what they are changed to.
        for (what, at, value) in [
            ("recursion", 2, 0),
            ("checking disabled", 3, 0x10),
            ("authentic data", 3, 0x20),
            ("name", 13, b'b'),
            ("type", 21, 28),
            ("class", 23, 3),
            ("DNSSEC", 31, 0x80),
        ] {
            let mut other = query_with_opt(1, "a.test", 4096, &[]);
            other[at] = value;
            assert_ne!(key(other), base, "{what}");
        }
        assert_eq!(
            key(query_with_opt(1, "a.test", 4096, &[0, 10, 0, 1, 5])),
            None
        );
        let mut notify = query(1, "a.test");
        notify[2] |= 0x20;
        assert_eq!(key(notify), None);
    }

    #[test]
    fn what_is_no_single_question_is_not_forwarded() {
        let whole = query_with_opt(1, "a.test", 1232, &[]);
        for length in 0..whole.len() {
            assert!(
                Query::parse(whole[..length].to_vec().into()).is_none(),
                "{length}"
            );
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
}
