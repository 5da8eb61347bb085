//! Compares the rules that a machine has with those that are wanted.
//!
//! Differing rules alone do not say what happens, so packets that they may tell apart are sent through
//! both (see [`packets`]): a difference matters if one of them ends elsewhere.

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
}

/// Rules are spelled as iptables does, behind their table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Missing(String),
    Changed {
        wanted: String,
        found: String,
    },
    /// A rule in a chain of ours that is not wanted there, or one too often.
    Unwanted(String),
    /// The rules of this chain are in another order.
    Order(String),
    /// A rule of others before ours, which may take traffic.
    Before(String),
    /// A chain of another Istio version.
    UnknownChain(String),
    /// A packet that does not end where it should.
    Elsewhere(Box<Elsewhere>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elsewhere {
    pub packet: Packet,
    pub wanted: End,
    pub found: End,
    /// The rule that decides.
    pub because: Option<String>,
}

/// Where a packet ends, and with which marks: they decide on the route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct End {
    pub decision: Decision,
    pub mark: u32,
    pub connection_mark: u32,
}

impl Finding {
    /// Whether traffic does not go where it should. Other differences are harmless.
    pub fn misleads(&self) -> bool {
        matches!(self.kind, Kind::Elsewhere(_))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.family {
            Family::V4 => "IPv4: ",
            Family::V6 => "IPv6: ",
        })?;
        match &self.kind {
            Kind::Missing(rule) => write!(f, "a rule is missing: {rule}"),
            Kind::Changed { wanted, found } => {
                write!(f, "a rule is changed: found {found}, expected {wanted}")
            }
            Kind::Unwanted(rule) => write!(f, "a rule is not asked for: {rule}"),
            Kind::Order(chain) => write!(f, "rules are in another order: {chain}"),
            Kind::Before(rule) => {
                write!(
                    f,
                    "a rule of others comes first and may take traffic: {rule}"
                )
            }
            Kind::UnknownChain(chain) => {
                write!(f, "a chain is not of this version of Istio: {chain}")
            }
            Kind::Elsewhere(elsewhere) => write!(f, "{elsewhere}"),
        }
    }
}

impl fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (packet, wanted, found) = (&self.packet, self.wanted, self.found);
        if wanted.decision == found.decision {
            let (mark, connection) = (found.mark, found.connection_mark);
            write!(
                f,
                "{packet} gets mark {mark}, its connection {connection}, expected "
            )?;
            let (mark, connection) = (wanted.mark, wanted.connection_mark);
            write!(f, "{mark} and {connection}")?;
        } else {
            let (wanted, found) = (wanted.decision, found.decision);
            write!(f, "{packet} {found}, expected that it {wanted}")?;
        }
        let because = self.because.as_ref();
        because.map_or(Ok(()), |rule| write!(f, "; it matches {rule}"))
    }
}

impl From<&Trace<'_>> for End {
    fn from(trace: &Trace<'_>) -> Self {
        Self {
            decision: trace.decision,
            mark: trace.mark,
            connection_mark: trace.connection_mark,
        }
    }
}

/// The differences, those of rules first. Names of users and groups in `wanted` are to be resolved.
pub fn compare(wanted: &Layout, found: &Layout, family: Family) -> Vec<Finding> {
    let mut kinds = Vec::new();
    let mut differing = Vec::new();
    let chains: BTreeSet<_> = wanted.chains.keys().chain(found.chains.keys()).collect();
    for place in chains {
        let entries = |layout: &'_ Layout| layout.chains.get(place).cloned().unwrap_or_default();
        if wanted.chains.get(place) == found.chains.get(place) {
            continue;
        }
        let chain = Comparison::new(*place, entries(wanted), entries(found));
        chain.report(&mut kinds);
        differing.extend(chain.differing());
    }
    for (table, name) in &found.unknown_chains {
        kinds.push(Kind::UnknownChain(format!(
            "{}: {name}",
            table_name(*table)
        )));
    }
    kinds.extend(elsewhere(wanted, found, &differing, family));
    let finding = |kind| Finding { family, kind };
    kinds.into_iter().map(finding).collect()
}

/// A chain, wanted and found.
struct Comparison {
    place: (Table, Chain),
    wanted: Vec<Entry>,
    found: Vec<Entry>,
    missing: Vec<Entry>,
    /// Found and not wanted, each with the number of wanted ones that follow.
    extra: Vec<(Entry, usize)>,
    is_ordered: bool,
}

impl Comparison {
    fn new(place: (Table, Chain), wanted: Vec<Entry>, found: Vec<Entry>) -> Self {
        let mut missing = wanted.clone();
        let (mut extra, mut common) = (Vec::new(), Vec::new());
        for entry in &found {
            match missing.iter().position(|each| each == entry) {
                Some(at) => common.push(missing.remove(at)),
                None => extra.push((entry.clone(), common.len())),
            }
        }
        for (_, following) in &mut extra {
            *following = common.len() - *following;
        }
        let mut absent = missing.clone();
        let kept = wanted.iter().filter(|entry| {
            let at = absent.iter().position(|each| each == *entry);
            at.map(|at| absent.remove(at)).is_none()
        });
        let is_ordered = kept.eq(&common);
        Self {
            place,
            wanted,
            found,
            missing,
            extra,
            is_ordered,
        }
    }

    fn report(&self, kinds: &mut Vec<Kind>) {
        let line = |entry: &Entry| line(self.place, entry);
        let mut extra: Vec<_> = self.extra.iter().collect();
        for missing in &self.missing {
            let at = extra
                .iter()
                .position(|(entry, _)| is_changed(missing, entry));
            kinds.push(match at.map(|at| extra.remove(at)) {
                Some((found, _)) => Kind::Changed {
                    wanted: line(missing),
                    found: line(found),
                },
                None => Kind::Missing(line(missing)),
            });
        }
        for (entry, following) in extra {
            if !self.place.1.is_builtin() || self.wanted.contains(entry) {
                kinds.push(Kind::Unwanted(line(entry)));
            } else if *following > 0 && others::may_take(entry) {
                kinds.push(Kind::Before(line(entry)));
            }
        }
        if !self.is_ordered {
            let (table, chain) = self.place;
            let (table, chain) = (table_name(table), chain_name(chain));
            kinds.push(Kind::Order(format!("{table}: {chain}")));
        }
    }

    /// The rules between the common begin and the common end, of both.
    fn differing(&self) -> Vec<Vec<Match>> {
        let (wanted, found) = (&self.wanted, &self.found);
        let begin = wanted.iter().zip(found).take_while(|(a, b)| a == b).count();
        let (wanted, found) = (&wanted[begin..], &found[begin..]);
        let backwards = wanted.iter().rev().zip(found.iter().rev());
        let end = backwards.take_while(|(a, b)| a == b).count();
        let both = wanted[..wanted.len() - end]
            .iter()
            .chain(&found[..found.len() - end]);
        let rules = both.filter_map(|entry| match others::readable(entry) {
            Entry::Rule { matches, .. } => Some(matches),
            Entry::Foreign(_) => None,
        });
        rules.collect()
    }
}

/// Whether one rule looks like the other after a change.
fn is_changed(wanted: &Entry, found: &Entry) -> bool {
    match (wanted, found) {
        (
            Entry::Rule { matches, verdict },
            Entry::Rule {
                matches: found_matches,
                verdict: found_verdict,
            },
        ) => verdict == found_verdict || matches == found_matches,
        _ => false,
    }
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
fn elsewhere(
    wanted: &Layout,
    found: &Layout,
    differing: &[Vec<Match>],
    family: Family,
) -> Vec<Kind> {
    if differing.is_empty() {
        return Vec::new();
    }
    let found = others::readable_layout(found);
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
        let (wanted, found) = (simulate(wanted, &packet), simulate(&found, &packet));
        if ends_elsewhere(&packet, &wanted, &found) {
            let because = found.rules.last().map(matched);
            let (wanted, found) = (End::from(&wanted), End::from(&found));
            let way = (wanted.decision, found.decision, because.clone());
            examples.entry(way).or_insert(Elsewhere {
                packet,
                wanted,
                found,
                because,
            });
        }
    }
    let kind = |example| Kind::Elsewhere(Box::new(example));
    examples.into_values().map(kind).collect()
}

/// What is not to be captured may be taken, and marked, by rules of others.
fn ends_elsewhere(packet: &Packet, wanted: &Trace<'_>, found: &Trace<'_>) -> bool {
    if wanted.decision != found.decision {
        let mut by = found.rules.iter().rev();
        return wanted.decision != Decision::Untouched
            || by.next().is_some_and(|rule| !rule.chain.is_builtin());
    }
    let is_other = |given: u32, wanted: u32, found: u32| wanted != given && wanted != found;
    is_other(packet.mark, wanted.mark, found.mark)
        || is_other(
            packet.connection_mark,
            wanted.connection_mark,
            found.connection_mark,
        )
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
