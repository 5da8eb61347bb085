//! Decides whether a query is answered from the name table, forwarded, refused or dropped.
//!
//! Queries of types A and AAAA for a name of the table are answered, with a CNAME where a search domain
//! was appended to a host that is not a wildcard; a family without addresses is an empty answer. All other
//! names and types are forwarded. ANY is answered with the addresses of the name, as RFC 8482 allows:
//! resolvers would reply NXDOMAIN for a name that only the mesh knows.

use super::Transport;
use super::name_table::{NameTable, ResolvedName};
use super::wire::{self, InvalidQuery, Question};

/// Bytes of the shortest record of an answer.
const MIN_RECORD: usize = 16;

/// Settings of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The TTL of answers, in seconds.
    pub ttl: u32,
    /// Forwards queries while there is no name table, instead of failing them.
    pub forward_before_first_table: bool,
}

/// The treatment of a query.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// Send the answer to this question.
    Reply(Question),
    /// Send the error reply to a message that is not a valid query.
    Refuse,
    /// Ask the resolvers.
    Forward(Question),
    /// Send nothing.
    Drop,
}

/// Decides on a query, and writes the reply, if there is one yet, to `out` in place of its content.
pub(crate) fn answer(
    query: &[u8],
    transport: Transport,
    table: Option<&NameTable>,
    policy: Policy,
    out: &mut Vec<u8>,
) -> Action {
    let question = match wire::read_query(query) {
        Ok(question) => question,
        Err(InvalidQuery::Unanswerable) => return Action::Drop,
        Err(InvalidQuery::Refused(rcode, end, edns)) => {
            wire::write_empty(query, rcode, end, out);
            wire::push_opt(out, edns, rcode >> 4);
            return Action::Refuse;
        }
    };
    match table {
        None if policy.forward_before_first_table => return Action::Forward(question),
        None => write_servfail(query, &question, out),
        Some(table) => {
            let Some(resolved) = resolve(table, query, &question) else {
                return Action::Forward(question);
            };
            let limit = question.limit(transport);
            write_addresses(query, &question, &resolved, policy.ttl, limit, out);
            wire::truncate(out, limit);
        }
    }
    Action::Reply(question)
}

/// Writes a SERVFAIL reply to `out`.
pub(crate) fn write_servfail(query: &[u8], question: &Question, out: &mut Vec<u8>) {
    wire::write_empty(query, wire::SERVFAIL, Some(question.end), out);
    wire::push_opt(out, question.edns, 0);
}

/// Looks up the name of a question for addresses; `None` if the table has no answer.
fn resolve(table: &NameTable, query: &[u8], question: &Question) -> Option<ResolvedName> {
    match (question.kind, question.class) {
        (wire::A | wire::AAAA | wire::ANY, wire::IN | wire::ANY) => {
            table.find(&question.text(query)?)
        }
        _ => None,
    }
}

/// Writes an authoritative answer. It has all addresses, or more than fit in `limit` bytes.
fn write_addresses(
    query: &[u8],
    question: &Question,
    resolved: &ResolvedName,
    ttl: u32,
    limit: usize,
    out: &mut Vec<u8>,
) {
    wire::write_empty(query, wire::NOERROR, Some(question.end), out);
    out[wire::FLAGS] |= wire::AA;
    let v4: &[_] = if [wire::A, wire::ANY].contains(&question.kind) { &resolved.v4 } else { &[] };
    let v6: &[_] =
        if [wire::AAAA, wire::ANY].contains(&question.kind) { &resolved.v6 } else { &[] };
    let mut owner = wire::HEADER;
    // The labels have one byte more than the text: the length of the first label.
    if let Some(end) = resolved.target_end
        && let Some(labels) = question.name(query).get(..=end)
        && !(v4.is_empty() && v6.is_empty())
    {
        let mut target = [labels, &[0]].concat();
        // The lengths of labels are smaller than the codes of letters, so they stay.
        target.make_ascii_lowercase();
        owner = wire::push_record(out, owner, wire::CNAME, ttl, &target);
    }
    // One record more than can fit, so that the caller truncates the answer and sets TC.
    let max_records = limit / MIN_RECORD + 1;
    for address in rotated(v4).take(max_records) {
        wire::push_record(out, owner, wire::A, ttl, &address.octets());
    }
    for address in rotated(v6).take(max_records) {
        wire::push_record(out, owner, wire::AAAA, ttl, &address.octets());
    }
    wire::push_opt(out, question.edns, 0);
}

/// Iterates over all addresses, from a random one on, so that clients that take the first one spread.
fn rotated<T>(addresses: &[T]) -> impl Iterator<Item = &T> {
    let (before, from) = addresses.split_at(fastrand::usize(..addresses.len().max(1)));
    from.iter().chain(before)
}

#[cfg(test)]
pub(crate) mod tests;
