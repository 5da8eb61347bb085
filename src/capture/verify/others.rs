//! Rules of others: which packets go another way because of them.

use std::collections::BTreeMap;

use super::{Kind, entries, is_ours, line, packets};
use crate::capture::iptables;
use crate::capture::layout::{Entry, Layout};
use crate::capture::packet::{Decision, Packet, Trace};
use crate::capture::rules::Family;

/// Targets after which the next rule sees the packet. CT may take it from all rules of nat.
const PASSING: [&str; 12] = [
    "AUDIT", "CHECKSUM", "CLASSIFY", "CONNMARK", "DSCP", "LOG", "MARK", "NFLOG", "SET", "TCPMSS",
    "TRACE", "TTL",
];
/// Targets that take a packet from the rules that follow.
const TAKING: [&str; 9] = [
    "ACCEPT", "DNAT", "DROP", "NETMAP", "NFQUEUE", "REDIRECT", "REJECT", "RETURN", "TPROXY",
];

/// What rules of others do with packets, beside those of ours that are there.
pub(super) fn differences(wanted: &Layout, found: &Layout, family: Family) -> Vec<(Kind, String)> {
    let (mut all, mut ours) = (found.clone(), found.clone());
    let mut unclear = Vec::new();
    for (place, rules) in &mut all.chains {
        let is_ours = |entry: &Entry| is_ours(entries(wanted, *place), *place, entry);
        if let Some(own) = ours.chains.get_mut(place) {
            own.retain(is_ours);
        }
        let last = rules.iter().rposition(is_ours).unwrap_or_default();
        for (at, entry) in rules.iter_mut().enumerate() {
            if is_ours(entry) {
                continue;
            }
            let read = readable(entry);
            if let Entry::Foreign(text) = &read
                && at < last
                && may_take(text)
            {
                unclear.push((Kind::Unclear, line(*place, entry)));
            }
            *entry = read;
        }
    }
    if all == ours {
        return unclear;
    }
    let mut examples = BTreeMap::new();
    for (packet, expected, way) in packets::ways([&ours, &all], family) {
        let of_others = way.rules.iter().find(|rule| !expected.rules.contains(rule));
        let difference = difference(&packet, &expected, &way);
        let Some((difference, rule)) = difference.zip(of_others) else {
            continue;
        };
        let place = (rule.table, rule.chain);
        let read = Entry::Rule {
            matches: rule.matches.to_vec(),
            verdict: rule.verdict,
        };
        let at = entries(&all, place).iter().position(|entry| *entry == read);
        if let Some(entry) = at.and_then(|at| entries(found, place).get(at)) {
            let rule = line(place, entry);
            let example = format!("{rule}: {packet} {difference}");
            examples.entry(rule).or_insert(example);
        }
    }
    let examples = examples.into_values();
    let examples = examples.map(|example| (Kind::Diverts, example));
    examples.chain(unclear).collect()
}

/// In which way a packet ends elsewhere, if it does. What is not to be captured may be taken, and marked,
/// by rules of others. Marks decide on the route, and zones on the answers.
fn difference(packet: &Packet, wanted: &Trace<'_>, found: &Trace<'_>) -> Option<String> {
    if wanted.decision != found.decision {
        let last = found.rules.last();
        let is_ours = wanted.decision != Decision::Untouched
            || last.is_some_and(|rule| !rule.chain.is_builtin());
        let (wanted, found) = (wanted.decision, found.decision);
        return is_ours.then(|| format!("{found}, expected that it {wanted}"));
    }
    let zone = |trace: &Trace<'_>| trace.zone.map(u32::from).unwrap_or_default();
    let numbers = [
        ("mark", packet.mark, wanted.mark, found.mark),
        (
            "mark of its connection",
            packet.connection_mark,
            wanted.connection_mark,
            found.connection_mark,
        ),
        ("conntrack zone", 0, zone(wanted), zone(found)),
    ];
    let is_captured = wanted.decision != Decision::Untouched;
    let mut differing = numbers.into_iter().filter(|(kind, given, wanted, found)| {
        wanted != found && (wanted != given || *kind == "conntrack zone" && is_captured)
    });
    let (kind, _, wanted, found) = differing.next()?;
    Some(format!("gets {kind} {found}, expected {wanted}"))
}

/// Whether a rule whose matches cannot be read can keep a packet from the rules that follow. A jump to a
/// chain of others can.
pub(super) fn may_take(text: &str) -> bool {
    // Those of nft are JSON.
    text.starts_with('[') || target(text).is_some_and(|(_, target)| !PASSING.contains(&target))
}

/// A rule of others as one of the model, if only its comment or its target is none: what another target
/// takes is accepted or, by DROP and REJECT, dropped.
pub(super) fn readable(entry: &Entry) -> Entry {
    let Entry::Foreign(text) = entry else {
        return entry.clone();
    };
    let text = without_comment(text);
    let read = iptables::entry(&text);
    match (&read, target(&text)) {
        (Entry::Foreign(_), Some((matches, target))) if TAKING.contains(&target) => {
            let target = match target {
                "DROP" | "REJECT" => "DROP",
                _ => "ACCEPT",
            };
            iptables::entry(format!("{matches} -j {target}").trim_start())
        }
        _ => read,
    }
}

/// The text up to the target, and the target's name.
fn target(text: &str) -> Option<(&str, &str)> {
    let at = [" -j ", " -g "]
        .iter()
        .find_map(|option| text.rfind(option));
    let (matches, rest) = match at {
        Some(at) => (&text[..at], &text[at + 4..]),
        None => ("", text.strip_prefix("-j ").or(text.strip_prefix("-g "))?),
    };
    Some((matches, rest.split(' ').next()?))
}

/// Cuts a comment out. One with blanks stands in quotes.
fn without_comment(text: &str) -> String {
    let text = text.replace(r#"\""#, "");
    let Some((before, comment)) = text.split_once("-m comment --comment ") else {
        return text;
    };
    let end = match comment.strip_prefix('"') {
        Some(quoted) => quoted.split_once("\" "),
        None => comment.split_once(' '),
    };
    format!("{before}{}", end.map_or("", |(_, after)| after))
}
