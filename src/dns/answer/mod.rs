//! Decides what becomes of a query: answered from the name table, forwarded, refused or dropped.
//!
//! Names of the table are answered for addresses of both families, with a CNAME where a search domain
//! was appended to a host that is not a wildcard; a family without addresses is an empty answer. All other
//! names and all other types are forwarded. ANY is answered with the addresses there are, as RFC 8482
//! allows: resolvers would say that a name only the mesh knows does not exist.

use super::Transport;
use super::name_table::{Found, NameTable};
use super::wire::{self, NoQuestion, Question, Writer};

/// How answers are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Seconds an answer is good for.
    pub ttl: u32,
    /// Forwards queries while there is no name table, instead of failing them.
    pub forward_before_first_table: bool,
}

/// What to do with a query.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// Send the answer to this question.
    Reply(Question),
    /// Send the answer to a message that is no proper question.
    Refuse,
    /// Ask the resolvers.
    Forward(Question),
    /// Send nothing.
    Drop,
}

/// Answers a query in `out`, whatever that held before.
pub(crate) fn answer(
    query: &[u8],
    transport: Transport,
    table: Option<&NameTable>,
    policy: Policy,
    out: &mut Vec<u8>,
) -> Action {
    let question = match wire::read(query) {
        Ok(question) => question,
        Err(NoQuestion::Nothing) => return Action::Drop,
        Err(NoQuestion::Wrong(rcode, end, edns)) => {
            wire::header(query, rcode, end, out);
            wire::push_opt(out, edns, rcode >> 4);
            return Action::Refuse;
        }
    };
    match table {
        None if policy.forward_before_first_table => return Action::Forward(question),
        None => fail(query, &question, out),
        Some(table) => {
            let Some(found) = find(table, query, &question) else {
                return Action::Forward(question);
            };
            let limit = question.limit(transport);
            let writer = Writer::new(query, &question, limit, policy.ttl, out);
            write(writer, query, &question, &found);
        }
    }
    Action::Reply(question)
}

/// Answers with SERVFAIL.
pub(crate) fn fail(query: &[u8], question: &Question, out: &mut Vec<u8>) {
    wire::header(query, wire::SERVFAIL, Some(question.end), out);
    wire::push_opt(out, question.edns, 0);
}

fn find(table: &NameTable, query: &[u8], question: &Question) -> Option<Found> {
    let is_ours = matches!(question.kind, wire::A | wire::AAAA | wire::ANY)
        && matches!(question.class, wire::IN | wire::ANY);
    if !is_ours {
        return None;
    }
    table.find(&question.text(query)?)
}

fn write(mut writer: Writer<'_>, query: &[u8], question: &Question, found: &Found) {
    let is_asked = |kind| [kind, wire::ANY].contains(&question.kind);
    let v4: &[_] = if is_asked(wire::A) { &found.v4 } else { &[] };
    let v6: &[_] = if is_asked(wire::AAAA) { &found.v6 } else { &[] };
    let mut owner = wire::HEADER;
    // One byte more than the text: the length of the first label.
    let target = found
        .target_end
        .and_then(|end| question.name(query).get(..=end));
    if let Some(target) = target.filter(|_| !v4.is_empty() || !v6.is_empty()) {
        let mut target = [target, &[0]].concat();
        // Lengths are below the letters.
        target.make_ascii_lowercase();
        owner = writer.record(owner, wire::CNAME, &target);
    }
    for address in from_random(v4) {
        writer.record(owner, wire::A, &address.octets());
    }
    for address in from_random(v6) {
        writer.record(owner, wire::AAAA, &address.octets());
    }
    writer.finish();
}

/// All of them, beginning with a random one.
fn from_random<T>(addresses: &[T]) -> impl Iterator<Item = &T> {
    let first = match addresses.len() {
        0 | 1 => 0,
        count => fastrand::usize(..count),
    };
    let (before, from) = addresses.split_at(first);
    from.iter().chain(before)
}

#[cfg(test)]
pub(crate) mod tests;
