//! What becomes of a query: answered from the table, passed on, refused or dropped.
//!
//! Names of the table are answered for addresses of both families, with a CNAME where a search
//! domain was appended; a family without addresses is an empty answer. All other names, and all
//! other types, are for somebody else. ANY is answered with the addresses there are, as RFC 8482
//! allows: whoever asks a resolver would hear that a name only the mesh knows does not exist.
//!
//! Does not send or wait: bytes in, bytes out, nothing allocated.

use super::Transport;
use super::table::{Found, Table};
use super::wire::{self, HEADER, Name, Owner, Question, Rcode, Read, Writer};

/// How answers are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Seconds an answer is good for.
    pub ttl: u32,
    /// Passes queries on while there is no table, instead of failing them.
    pub forward_before_first_table: bool,
}

/// What to do with a query.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    /// Send this many bytes back.
    Reply(usize),
    /// Ask somebody else.
    Forward,
    /// Nothing.
    Drop,
}

/// A query, seen through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) answer: Answer,
    /// What was asked, if it was a proper question.
    pub(crate) question: Option<Question>,
}

/// Answers a query into `out`, which holds any UDP message; `name` is room to work in.
pub(crate) fn answer(
    query: &[u8],
    transport: Transport,
    table: Option<&Table>,
    policy: Policy,
    name: &mut Name,
    out: &mut [u8],
) -> Outcome {
    let question = match wire::read(query, name) {
        Read::Nothing => return refusal(Answer::Drop),
        Read::Wrong(Rcode::BadVers, Some(end)) => {
            return refusal(Answer::Reply(bad_version(query, end, out)));
        }
        Read::Wrong(rcode, end) => {
            return refusal(Answer::Reply(wire::header(query, rcode, end, out)));
        }
        Read::Question(question) => question,
    };
    let answer = match table {
        None if policy.forward_before_first_table => Answer::Forward,
        None => Answer::Reply(fail(query, &question, out)),
        Some(table) => match find(table, &question, name) {
            Some(found) => {
                let limit = limit(&question, transport);
                Answer::Reply(write(query, &question, &found, limit, policy.ttl, out))
            }
            None => Answer::Forward,
        },
    };
    Outcome {
        answer,
        question: Some(question),
    }
}

/// Most bytes the client takes.
pub(crate) fn limit(question: &Question, transport: Transport) -> usize {
    match transport {
        Transport::Udp => question.udp_limit(),
        Transport::Tcp => usize::from(u16::MAX),
    }
}

/// Says that nobody could answer.
pub(crate) fn fail(query: &[u8], question: &Question, out: &mut [u8]) -> usize {
    let limit = out.len();
    let mut writer = Writer::new(query, question, limit, out);
    writer.set_rcode(Rcode::ServFail);
    writer.finish()
}

fn refusal(answer: Answer) -> Outcome {
    Outcome {
        answer,
        question: None,
    }
}

/// The version of EDNS this agent knows is 0; the upper part of the code is in the EDNS record.
fn bad_version(query: &[u8], end: usize, out: &mut [u8]) -> usize {
    let length = wire::header(query, Rcode::BadVers, Some(end), out);
    let [high, low] = wire::OWN_UDP.to_be_bytes();
    let record = [0, 0, wire::OPT as u8, high, low, 1, 0, 0, 0, 0, 0];
    out[length..length + record.len()].copy_from_slice(&record);
    out[11] = 1;
    length + record.len()
}

fn find<'a>(table: &'a Table, question: &Question, name: &Name) -> Option<Found<'a>> {
    let ours = matches!(question.kind, wire::A | wire::AAAA | wire::ANY)
        && matches!(question.class, wire::IN | wire::ANY)
        && question.is_plain;
    ours.then(|| table.find(name.text(question)))?
}

fn write(
    query: &[u8],
    question: &Question,
    found: &Found<'_>,
    limit: usize,
    ttl: u32,
    out: &mut [u8],
) -> usize {
    let v4 = match question.kind {
        wire::AAAA => &[],
        _ => found.v4,
    };
    let v6 = match question.kind {
        wire::A => &[],
        _ => found.v6,
    };
    let mut writer = Writer::new(query, question, limit, out);
    writer.authoritative(ttl);
    if v4.is_empty() && v6.is_empty() {
        return writer.finish();
    }
    // The question ends with type and class.
    let mut owner = owner(&query[HEADER..question.end - 4], question);
    if let Some(end) = found.target_end {
        let start = found.wildcard.unwrap_or(0);
        let star: &[u8] = if found.wildcard.is_some() {
            b"\x01*"
        } else {
            b""
        };
        // Where a label begins in the text, its length stands on the wire. A bare `*.` has nothing
        // behind it, which no table holds.
        let target = query
            .get(HEADER + start..HEADER + end + 1)
            .unwrap_or_default();
        match writer.cname(owner, [star, target]) {
            Some(pointer) => owner = Owner::At(pointer),
            None => return writer.finish(),
        }
    }
    let written = writer.v4(owner, v4);
    writer.v6(written.map_or(owner, Owner::At), v6);
    writer.finish()
}

/// The question's name, which is lower case in answers.
fn owner<'a>(name: &'a [u8], question: &Question) -> Owner<'a> {
    match question.was_lower {
        true => Owner::At(Writer::question_name()),
        false => Owner::Name(name),
    }
}

#[cfg(test)]
pub(crate) mod tests;
