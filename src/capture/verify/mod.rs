//! Compares the rules that a machine has with those that are wanted.
//!
//! Rules of ours are all there, in their order, and no others among them, or they are those of another
//! version of Istio. Rules of others matter if some packet takes another way because of them: see
//! [`packets`].

pub mod live;
mod others;
mod packets;

use std::collections::BTreeSet;
use std::fmt;

#[cfg(test)]
pub(super) use packets::ways;

use super::iptables::{chain_name, table_name};
use super::layout::{Entry, Layout};
use super::packet::Matched;
use super::rules::{Chain, Family, Table, Verdict};

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
    /// A rule of ours that is not wanted, or a rule of others in a chain of ours.
    Unwanted,
    /// A rule of ours stands where another one is wanted.
    Order,
    /// A rule of others by which packets end elsewhere, with an example.
    Diverts,
    /// A rule of others before ours, of which it cannot be told.
    Unclear,
    /// A chain of another Istio version.
    UnknownChain,
    /// The rules are those of another Istio version.
    Version,
    /// A route, or what it needs, is missing.
    Route,
}

impl Finding {
    /// Whether traffic may not go where it should. Other differences are harmless.
    pub fn affects_traffic(&self) -> bool {
        !matches!(
            self.kind,
            Kind::Unclear | Kind::UnknownChain | Kind::Version
        )
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            Kind::Missing => "a rule is missing",
            Kind::Unwanted => "a rule is not asked for",
            Kind::Order => "rules are in another order",
            Kind::Diverts => "a rule of others diverts traffic",
            Kind::Unclear => "a rule of others comes first and may take traffic",
            Kind::UnknownChain => "a chain is not of this version of Istio",
            Kind::Version => "the rules are of another version of Istio",
            Kind::Route => "captured packets have no route",
        };
        let family = match self.family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        write!(f, "{family}: {what}: {}", self.detail)
    }
}

/// The differences, those of our rules first. `versions` are the rules that are wanted, and then those of
/// other versions; their names of users and groups are to be resolved.
pub fn compare(versions: &[Layout], found: &Layout, family: Family) -> Vec<Finding> {
    let of_each: Vec<_> = versions
        .iter()
        .map(|wanted| differences(wanted, found))
        .collect();
    let equal = of_each.iter().position(Vec::is_empty);
    let mut kinds = match equal {
        Some(0) => Vec::new(),
        Some(_) => vec![(Kind::Version, "they capture the same traffic".to_owned())],
        None => of_each.into_iter().next().unwrap_or_default(),
    };
    for (table, name) in &found.unknown_chains {
        let chain = format!("{}: {name}", table_name(*table));
        kinds.push((Kind::UnknownChain, chain));
    }
    if let Some(wanted) = versions.get(equal.unwrap_or_default()) {
        kinds.extend(others::differences(wanted, found, family));
    }
    let finding = |(kind, detail)| Finding {
        family,
        kind,
        detail,
    };
    kinds.into_iter().map(finding).collect()
}

/// The differences of our own rules.
fn differences(wanted: &Layout, found: &Layout) -> Vec<(Kind, String)> {
    let mut kinds = Vec::new();
    let chains: BTreeSet<_> = wanted.chains.keys().chain(found.chains.keys()).collect();
    for place in chains {
        let wanted = entries(wanted, *place);
        let own = entries(found, *place).iter();
        let own: Vec<_> = own
            .filter(|entry| is_ours(wanted, *place, entry))
            .cloned()
            .collect();
        if wanted == own {
            continue;
        }
        let line = |entry| line(*place, entry);
        let (expected, missing) = split(wanted, &own);
        let (there, extra) = split(&own, wanted);
        kinds.extend(
            missing
                .into_iter()
                .map(|entry| (Kind::Missing, line(entry))),
        );
        kinds.extend(extra.into_iter().map(|entry| (Kind::Unwanted, line(entry))));
        let mut pairs = there.into_iter().zip(expected);
        if let Some((there, expected)) = pairs.find(|(there, expected)| there != expected) {
            let detail = format!("found {}, expected {}", line(there), line(expected));
            kinds.push((Kind::Order, detail));
        }
    }
    kinds
}

fn entries(layout: &Layout, place: (Table, Chain)) -> &[Entry] {
    layout.chains.get(&place).map_or(&[], Vec::as_slice)
}

/// Whether a rule is where others have none, one of the wanted ones, or a jump to a chain of Istio's.
fn is_ours(wanted: &[Entry], (_, chain): (Table, Chain), entry: &Entry) -> bool {
    !chain.is_builtin()
        || wanted.contains(entry)
        || match entry {
            Entry::Rule { verdict, .. } => matches!(verdict, Verdict::Jump(_)),
            Entry::Foreign(text) => super::iptables::jumps_to_istio(text),
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

fn line((table, chain): (Table, Chain), entry: &Entry) -> String {
    let rule = match entry {
        Entry::Rule { matches, verdict } => Matched {
            table,
            chain,
            matches,
            verdict: *verdict,
        }
        .to_string(),
        Entry::Foreign(text) => format!("-A {} {text}", chain_name(chain)),
    };
    format!("{}: {rule}", table_name(table))
}

#[cfg(test)]
mod tests;
