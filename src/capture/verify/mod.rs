//! Compares the rules that a machine has with those that are wanted.
//!
//! Differing rules alone do not say what happens, so packets that they may tell apart are sent through
//! both (see [`packets`]): a difference matters if one of them ends elsewhere.

pub mod live;
mod others;
mod packets;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use fastrand::Rng;
pub use packets::Values;

use super::iptables::{chain_name, table_name};
use super::layout::{Entry, Layout};
use super::packet::{Decision, Matched, Packet, State, Trace, simulate};
use super::rules::{Chain, Family, Match, Table};

/// Differing rules that packets are made for, at most.
const MOST_TRIED: usize = 100;
/// Packets for each of them.
const PACKETS: usize = 50;
/// Packets besides.
const ANY_PACKETS: usize = 500;
/// Any number: the same rules give the same findings.
const SEED: u64 = 15001;

/// A difference between the rules that are wanted and those that a machine has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub family: Family,
    pub kind: Kind,
    /// Rules are spelled as iptables does, behind their table.
    pub detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Missing,
    Changed,
    /// A rule in a chain of ours that is not wanted there, or one too often.
    Unwanted,
    /// The rules of a chain are in another order.
    Order,
    /// A rule of others before ours, which may take traffic.
    Before,
    /// A chain of another Istio version.
    UnknownChain,
    /// A packet that does not end where it should.
    Elsewhere,
    /// A route, or what it needs, is missing.
    Route,
}

impl Finding {
    /// Whether traffic does not go where it should. Other differences are harmless.
    pub fn misleads(&self) -> bool {
        matches!(self.kind, Kind::Elsewhere | Kind::Route)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            Kind::Missing => "a rule is missing",
            Kind::Changed => "a rule is changed",
            Kind::Unwanted => "a rule is not asked for",
            Kind::Order => "rules are in another order",
            Kind::Before => "a rule of others comes first and may take traffic",
            Kind::UnknownChain => "a chain is not of this version of Istio",
            Kind::Elsewhere => "a packet ends elsewhere",
            Kind::Route => "captured packets have no route",
        };
        let family = match self.family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        write!(f, "{family}: {what}: {}", self.detail)
    }
}

/// The differences, those of rules first. Names of users and groups in `wanted` are to be resolved.
pub fn compare(wanted: &Layout, found: &Layout, family: Family) -> Vec<Finding> {
    let (mut kinds, mut differing) = (Vec::new(), Vec::new());
    let chains: BTreeSet<_> = wanted.chains.keys().chain(found.chains.keys()).collect();
    for place in chains {
        let entries = |layout: &Layout| layout.chains.get(place).cloned().unwrap_or_default();
        let (wanted, found) = (entries(wanted), entries(found));
        if wanted != found {
            compare_chain(*place, &wanted, &found, &mut kinds);
            differing.extend(between(&wanted, &found));
        }
    }
    for (table, name) in &found.unknown_chains {
        let chain = format!("{}: {name}", table_name(*table));
        kinds.push((Kind::UnknownChain, chain));
    }
    if !differing.is_empty() {
        let examples = examples(wanted, &others::readable_layout(found), &differing, family);
        kinds.extend(examples.map(|example| (Kind::Elsewhere, example)));
    }
    let finding = |(kind, detail)| Finding {
        family,
        kind,
        detail,
    };
    kinds.into_iter().map(finding).collect()
}

fn compare_chain(
    place: (Table, Chain),
    wanted: &[Entry],
    found: &[Entry],
    kinds: &mut Vec<(Kind, String)>,
) {
    let line = |entry: &Entry| line(place, entry);
    let (wanted_there, missing) = split(wanted, found);
    let (found_rightly, mut extra) = split(found, wanted);
    for absent in missing {
        let at = extra.iter().position(|entry| is_changed(absent, entry));
        kinds.push(match at.map(|at| extra.remove(at)) {
            Some(found) => {
                let change = format!("found {}, expected {}", line(found), line(absent));
                (Kind::Changed, change)
            }
            None => (Kind::Missing, line(absent)),
        });
    }
    let last_of_ours = found.iter().rposition(|entry| wanted.contains(entry));
    let before = &found[..last_of_ours.unwrap_or_default()];
    for entry in extra {
        if !place.1.is_builtin() || wanted.contains(entry) {
            kinds.push((Kind::Unwanted, line(entry)));
        } else if before.contains(entry) && others::may_take(entry) {
            kinds.push((Kind::Before, line(entry)));
        }
    }
    if wanted_there != found_rightly {
        let chain = format!("{}: {}", table_name(place.0), chain_name(place.1));
        kinds.push((Kind::Order, chain));
    }
}

/// Those that are among the others as well, and those that are not.
fn split<'a>(entries: &'a [Entry], others: &[Entry]) -> (Vec<&'a Entry>, Vec<&'a Entry>) {
    let mut others: Vec<_> = others.iter().collect();
    entries.iter().partition(|entry| {
        let at = others.iter().position(|other| other == entry);
        at.map(|at| others.remove(at)).is_some()
    })
}

/// Whether one rule looks like the other after a change.
fn is_changed(wanted: &Entry, found: &Entry) -> bool {
    match (wanted, found) {
        (
            Entry::Rule {
                matches: m,
                verdict: v,
            },
            Entry::Rule { matches, verdict },
        ) => m == matches || v == verdict,
        _ => false,
    }
}

/// What is matched by the rules between the common begin and the common end.
fn between(wanted: &[Entry], found: &[Entry]) -> Vec<Vec<Match>> {
    let begin = wanted.iter().zip(found).take_while(|(a, b)| a == b).count();
    let (wanted, found) = (&wanted[begin..], &found[begin..]);
    let backwards = wanted.iter().rev().zip(found.iter().rev());
    let end = backwards.take_while(|(a, b)| a == b).count();
    let (wanted, found) = (&wanted[..wanted.len() - end], &found[..found.len() - end]);
    let rules = wanted.iter().chain(found).map(others::readable);
    let matches = rules.filter_map(|entry| match entry {
        Entry::Rule { matches, .. } => Some(matches),
        Entry::Foreign(_) => None,
    });
    matches.collect()
}

fn line((table, chain): (Table, Chain), entry: &Entry) -> String {
    match entry {
        Entry::Rule { matches, verdict } => matched(&Matched {
            table,
            chain,
            matches,
            verdict: *verdict,
        }),
        Entry::Foreign(text) => format!("{}: -A {} {text}", table_name(table), chain_name(chain)),
    }
}

fn matched(rule: &Matched<'_>) -> String {
    format!("{}: {rule}", table_name(rule.table))
}

/// An example of each way in which packets end elsewhere.
fn examples(
    wanted: &Layout,
    found: &Layout,
    differing: &[Vec<Match>],
    family: Family,
) -> impl Iterator<Item = String> + use<> {
    let mut rng = Rng::with_seed(SEED);
    let tried = || differing.iter().take(MOST_TRIED).map(Vec::as_slice);
    let values = Values::new(tried().chain(wanted.matches()), family);
    let mut packets: Vec<_> = (0..ANY_PACKETS).map(|_| values.draw(&mut rng)).collect();
    for matches in tried() {
        packets.extend((0..PACKETS).map(|_| values.draw_for(matches, &mut rng)));
    }
    packets.sort_by_key(oddness);
    let mut examples = BTreeMap::new();
    for packet in packets {
        let (wanted, found) = (simulate(wanted, &packet), simulate(found, &packet));
        if let Some(difference) = difference(&packet, &wanted, &found) {
            let rule = found.rules.last().map(matched);
            let rule = rule.map_or_else(String::new, |rule| format!("; it matches {rule}"));
            let way = (wanted.decision, found.decision, rule.clone());
            let example = || format!("{packet} {difference}{rule}");
            examples.entry(way).or_insert_with(example);
        }
    }
    examples.into_values()
}

/// In which way a packet ends elsewhere, if it does. What is not to be captured may be taken, and marked,
/// by rules of others. Marks decide on the route.
fn difference(packet: &Packet, wanted: &Trace<'_>, found: &Trace<'_>) -> Option<String> {
    if wanted.decision != found.decision {
        let last = found.rules.last();
        let is_ours = wanted.decision != Decision::Untouched
            || last.is_some_and(|rule| !rule.chain.is_builtin());
        let (wanted, found) = (wanted.decision, found.decision);
        return is_ours.then(|| format!("{found}, expected that it {wanted}"));
    }
    let marks = [
        ("mark", packet.mark, wanted.mark, found.mark),
        (
            "mark of its connection",
            packet.connection_mark,
            wanted.connection_mark,
            found.connection_mark,
        ),
    ];
    let mut differing = marks
        .into_iter()
        .filter(|(_, given, wanted, found)| wanted != given && wanted != found);
    let (kind, _, wanted, found) = differing.next()?;
    Some(format!("gets {kind} {found}, expected {wanted}"))
}

/// How unusual a packet is. The least unusual ones are the clearest examples.
fn oddness(packet: &Packet) -> usize {
    let odd = [
        packet.state != State::New,
        packet.mark != 0,
        packet.connection_mark != 0,
        packet.source.ip().is_loopback(),
        packet.destination.ip().is_loopback(),
    ];
    odd.into_iter().filter(|is_odd| *is_odd).count()
}

#[cfg(test)]
mod tests;
