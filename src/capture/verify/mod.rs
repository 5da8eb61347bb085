//! Compares the rules that a machine has with those that are wanted.
//!
//! Rules of ours are all there, in their order, and no others among them, or they are those of another
//! version of Istio. Rules of others matter if they come before ours and may take packets from them.

use std::collections::BTreeSet;
use std::fmt;

use super::iptables::apply::{self, Request};
use super::iptables::{appended, jumps_to_istio, target};
use super::layout::{Entry, Layout};
use super::rules::{Chain, Criterion, Family, Match, Protocol, Rules, Table, Verdict};
use super::{nftables, routes};
use crate::problem::Problem;

/// Targets after which the next rule sees the packet, unchanged in all that ours look at.
const PASSING: [&str; 10] = [
    "AUDIT", "CHECKSUM", "CLASSIFY", "DSCP", "LOG", "NFLOG", "SET", "TCPMSS", "TRACE", "TTL",
];

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
    /// A rule of others before ours, which may take packets from them.
    Others,
    /// A chain of another Istio version.
    UnknownChain,
    /// The rules are pilot-agent's or of another Istio version.
    Version,
    /// A route, or what it needs, is missing.
    Route,
}

impl Finding {
    /// Whether traffic may not go where it should. Other differences are harmless.
    pub fn affects_traffic(&self) -> bool {
        !matches!(self.kind, Kind::UnknownChain | Kind::Version)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            Kind::Missing => "a rule is missing",
            Kind::Unwanted => "a rule is not asked for",
            Kind::Order => "rules are in another order",
            Kind::Others => "a rule of others comes first and may take traffic",
            Kind::UnknownChain => "a chain is not of this version of Istio",
            Kind::Version => "the rules are of pilot-agent or another version of Istio",
            Kind::Route => "captured packets have no route",
        };
        let family = match self.family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        write!(f, "{family}: {what}: {}", self.detail)
    }
}

/// The rules of a family that this machine has, however they were set up. `path` has the directories of
/// programs, separated by colons.
pub async fn live(family: Family, path: &str) -> Result<Layout, Problem> {
    Ok(match nftables::has_tables() {
        true => nftables::live(family).await?,
        false => apply::live(family, None, path).await?,
    })
}

/// The differences of this machine's rules and routes from those of a configuration, by iptables or, if
/// `is_native`, by nft. Changes nothing.
pub async fn findings(request: &Request<'_>, is_native: bool) -> Result<Vec<Finding>, Problem> {
    let config = request.config;
    let versions = [Rules::new(config), Rules::earlier(config)];
    let mut findings = Vec::new();
    for family in [Family::V4, Family::V6] {
        let (wanted, found) = match is_native {
            true => {
                let wanted = nftables::versions(&versions[0], family);
                (wanted, nftables::live(family).await?)
            }
            false => {
                let wanted = versions.iter().map(|rules| Layout::new(rules, family));
                let found = apply::live(family, config.kind, request.path).await;
                (wanted.collect(), request.if_needed(family, found)?)
            }
        };
        findings.extend(compare(&wanted, &found, family));
    }
    let missing = routes::missing(config)?.into_iter();
    findings.extend(missing.map(|(family, detail)| Finding {
        family,
        kind: Kind::Route,
        detail,
    }));
    Ok(findings)
}

/// The differences, those of our rules first. `versions` are the rules that are wanted, and then those of
/// other versions.
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
        let chain = format!("{}: {name}", table.name());
        kinds.push((Kind::UnknownChain, chain));
    }
    let earlier = found.earlier_dns.iter().cloned();
    kinds.extend(earlier.map(|rule| (Kind::Unwanted, rule)));
    if let Some(wanted) = versions.get(equal.unwrap_or_default()) {
        kinds.extend(others(wanted, found));
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
        let wanted = wanted.entries(*place);
        let own = found.entries(*place).iter();
        let own: Vec<_> = own
            .filter(|entry| is_ours(wanted, *place, entry))
            .cloned()
            .collect();
        if wanted == own {
            continue;
        }
        let line = |entry| appended(*place, entry);
        let (expected, missing) = split(wanted, &own);
        let (there, extra) = split(&own, wanted);
        for (kind, entries) in [(Kind::Missing, missing), (Kind::Unwanted, extra)] {
            kinds.extend(entries.into_iter().map(|entry| (kind, line(entry))));
        }
        let mut pairs = there.into_iter().zip(expected);
        if let Some((there, expected)) = pairs.find(|(there, expected)| there != expected) {
            let detail = format!("found {}, expected {}", line(there), line(expected));
            kinds.push((Kind::Order, detail));
        }
    }
    kinds
}

/// Rules of others in the kernel's chains, before the last one of ours.
fn others(wanted: &Layout, found: &Layout) -> Vec<(Kind, String)> {
    let mut others = Vec::new();
    for (place, rules) in &found.chains {
        let is_ours = |entry: &Entry| is_ours(wanted.entries(*place), *place, entry);
        let last = rules.iter().rposition(is_ours).unwrap_or_default();
        let before = rules[..last].iter().filter(|entry| !is_ours(entry));
        let taking = before.filter(|entry| may_take(wanted, place.0, entry));
        others.extend(taking.map(|entry| (Kind::Others, appended(*place, entry))));
    }
    others
}

/// Whether a rule of others can keep packets from our rules of the table, or change what they look at.
fn may_take(wanted: &Layout, table: Table, entry: &Entry) -> bool {
    let (is_taking, is_udp) = match entry {
        Entry::Rule { matches, .. } => {
            let udp = Match::Is(Criterion::Protocol(Protocol::Udp));
            (true, matches.contains(&udp))
        }
        // Those of nft are JSON.
        Entry::Foreign(text) if text.starts_with('[') => (true, false),
        Entry::Foreign(text) => {
            let is_taking = target(text).is_some_and(|target| !PASSING.contains(&target));
            let text = format!(" {text} ");
            let is_udp = text.contains(" -p udp ") && !text.contains(" ! -p udp ");
            (is_taking, is_udp)
        }
    };
    is_taking && (!is_udp || captures_udp(wanted, table))
}

fn captures_udp(wanted: &Layout, table: Table) -> bool {
    let tcp = Match::Is(Criterion::Protocol(Protocol::Tcp));
    let chains = wanted.chains.keys().filter(|(it, _)| *it == table);
    let mut rules = chains.flat_map(|(table, chain)| wanted.rules(*table, *chain));
    rules.any(|(matches, verdict)| {
        !matches!(verdict, Verdict::Return | Verdict::Jump(_)) && !matches.contains(&tcp)
    })
}

/// Whether a rule is where others have none, one of the wanted ones, or a jump to a chain of Istio's.
fn is_ours(wanted: &[Entry], (_, chain): (Table, Chain), entry: &Entry) -> bool {
    !chain.is_builtin()
        || wanted.contains(entry)
        || match entry {
            Entry::Rule { verdict, .. } => matches!(verdict, Verdict::Jump(_)),
            Entry::Foreign(text) => jumps_to_istio(text),
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

#[cfg(test)]
mod tests;
