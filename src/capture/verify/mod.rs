//! Compares the rules of a machine with the wanted rules.
//!
//! [`findings`] reads the rules of this machine and compares them with a configuration; [`compare`] compares
//! layouts. Istio's rules must be complete, in order, and without rules of others between them, or they are the
//! rules of another version of Istio. Rules of others matter if they come before Istio's and may take packets
//! from them.

use std::collections::BTreeSet;
use std::fmt;

use super::iptables::apply::{self, Request};
use super::iptables::{appended, jumps_to_istio, target};
use super::layout::{Entry, Layout};
use super::rules::{Chain, Criterion, Family, Match, Protocol, Rules, Table, Verdict};
use super::{nftables, routes};
use crate::problem::Problem;

/// Targets after which the packet passes to the next rule, without a change that Istio's rules could see.
const PASSING: [&str; 10] =
    ["AUDIT", "CHECKSUM", "CLASSIFY", "DSCP", "LOG", "NFLOG", "SET", "TCPMSS", "TRACE", "TTL"];

/// A difference between the wanted rules and the rules of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub family: Family,
    pub kind: Kind,
    /// A text with the rules in the syntax of iptables, each after the name of its table.
    pub detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Missing,
    /// A rule of Istio that is not wanted, or a rule of others in a chain of Istio.
    Unwanted,
    /// A rule of Istio in the place of another one.
    Order,
    /// A rule of others before Istio's rules, which may take packets from them.
    Others,
    /// A chain of another Istio version.
    UnknownChain,
    /// The rules are pilot-agent's or of another Istio version.
    Version,
    /// A route, or what it needs, is missing.
    Route,
}

impl Finding {
    fn new(family: Family, kind: Kind, detail: String) -> Self {
        Self { family, kind, detail }
    }

    /// Returns true if traffic may take a wrong path. Other differences are harmless.
    pub fn affects_traffic(&self) -> bool {
        !matches!(self.kind, Kind::UnknownChain | Kind::Version)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.kind {
            Kind::Missing => "a rule is missing",
            Kind::Unwanted => "a rule is extra",
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
        write!(f, "{family}: {text}: {}", self.detail)
    }
}

/// Reads the rules of a family on this machine, whichever program set them up. `path` has the directories of
/// programs, separated by colons.
pub async fn read_rules(family: Family, path: &str) -> Result<Layout, Problem> {
    if nftables::has_tables() {
        return nftables::read_rules(family).await;
    }
    apply::read_rules(family, None, path).await
}

/// Compares this machine's rules and routes with a configuration. Reads the rules by iptables or, if
/// `is_native`, by nft. Changes nothing.
pub async fn findings(request: &Request<'_>, is_native: bool) -> Result<Vec<Finding>, Problem> {
    let config = request.config;
    let versions = [Rules::new(config), Rules::earlier(config)];
    let mut findings = Vec::new();
    for family in [Family::V4, Family::V6] {
        let (wanted, found) = if is_native {
            (nftables::versions(&versions[0], family), nftables::read_rules(family).await?)
        } else {
            let wanted = versions.each_ref().map(|rules| Layout::new(rules, family));
            let found = apply::read_rules(family, config.kind, request.path).await;
            (wanted.into(), request.tolerate_optional_ipv6_error(family, found)?)
        };
        findings.extend(compare(&wanted, &found, family));
    }
    for (family, route) in routes::missing(config)? {
        findings.push(Finding::new(family, Kind::Route, route));
    }
    Ok(findings)
}

/// Compares rules; differences of Istio's own rules come first. `versions` are the wanted rules, and then the
/// rules of other versions.
pub fn compare(versions: &[Layout], found: &Layout, family: Family) -> Vec<Finding> {
    let by_version: Vec<_> =
        versions.iter().map(|wanted| differences(wanted, found, family)).collect();
    let equal = by_version.iter().position(Vec::is_empty);
    let mut findings = by_version.into_iter().next().unwrap_or_default();
    if equal.is_some_and(|index| index > 0) {
        let detail = "they capture the same traffic".to_owned();
        findings = vec![Finding::new(family, Kind::Version, detail)];
    }
    for (table, name) in &found.unknown_chains {
        let chain = format!("{}: {name}", table.name());
        findings.push(Finding::new(family, Kind::UnknownChain, chain));
    }
    for rule in &found.earlier_dns {
        findings.push(Finding::new(family, Kind::Unwanted, rule.clone()));
    }
    if let Some(wanted) = versions.get(equal.unwrap_or_default()) {
        findings.extend(find_others(wanted, found, family));
    }
    findings
}

/// Compares Istio's own rules.
fn differences(wanted: &Layout, found: &Layout, family: Family) -> Vec<Finding> {
    let mut findings = Vec::new();
    let chains: BTreeSet<_> = wanted.chains.keys().chain(found.chains.keys()).collect();
    for chain in chains {
        let wanted = wanted.entries(*chain);
        let mut present = found.entries(*chain).to_vec();
        present.retain(|entry| belongs_to_istio(wanted, *chain, entry));

        let (expected, missing) = split(wanted, &present);
        let (common, unwanted) = split(&present, wanted);
        for (kind, entries) in [(Kind::Missing, missing), (Kind::Unwanted, unwanted)] {
            for entry in entries {
                findings.push(Finding::new(family, kind, appended(*chain, entry)));
            }
        }
        let mut pairs = common.into_iter().zip(expected);
        if let Some((found, expected)) = pairs.find(|(found, expected)| found != expected) {
            let found = appended(*chain, found);
            let order = format!("found {found}, expected {}", appended(*chain, expected));
            findings.push(Finding::new(family, Kind::Order, order));
        }
    }
    findings
}

/// Finds rules of others in the kernel's chains that may take packets before the last rule of Istio.
pub(super) fn find_others(wanted: &Layout, found: &Layout, family: Family) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (chain, entries) in &found.chains {
        let is_own = |entry: &Entry| belongs_to_istio(wanted.entries(*chain), *chain, entry);
        let last = entries.iter().rposition(is_own).unwrap_or_default();
        for entry in &entries[..last] {
            if !is_own(entry) && may_take(wanted, chain.0, entry) {
                findings.push(Finding::new(family, Kind::Others, appended(*chain, entry)));
            }
        }
    }
    findings
}

/// Returns true if a rule of others can keep packets from Istio's rules of the table, or change what these match.
fn may_take(wanted: &Layout, table: Table, entry: &Entry) -> bool {
    let is_udp = match entry {
        Entry::Rule { matches, .. } => {
            matches.contains(&Match::Is(Criterion::Protocol(Protocol::Udp)))
        }
        // Rules of nft are JSON.
        Entry::Foreign(text) if text.starts_with('[') => false,
        Entry::Foreign(text) if target(text).is_none_or(|target| PASSING.contains(&target)) => {
            return false;
        }
        Entry::Foreign(text) => {
            let words = format!(" {text} ");
            words.contains(" -p udp ") && !words.contains(" ! -p udp ")
        }
    };
    !is_udp || captures_udp(wanted, table)
}

fn captures_udp(wanted: &Layout, table: Table) -> bool {
    let tcp = Match::Is(Criterion::Protocol(Protocol::Tcp));
    let chains = wanted.chains.keys().filter(|(it, _)| *it == table);
    chains.flat_map(|(table, chain)| wanted.rules(*table, *chain)).any(|(matches, verdict)| {
        !matches!(verdict, Verdict::Return | Verdict::Jump(_)) && !matches.contains(&tcp)
    })
}

/// Returns true for rules in Istio's chains, wanted rules, and jumps to Istio's chains.
fn belongs_to_istio(wanted: &[Entry], (_, chain): (Table, Chain), entry: &Entry) -> bool {
    !chain.is_builtin()
        || wanted.contains(entry)
        || match entry {
            Entry::Rule { verdict, .. } => matches!(verdict, Verdict::Jump(_)),
            Entry::Foreign(text) => jumps_to_istio(text),
        }
}

/// Separates entries that are among the others as well from entries that are not.
fn split<'a>(entries: &'a [Entry], others: &[Entry]) -> (Vec<&'a Entry>, Vec<&'a Entry>) {
    let mut others: Vec<_> = others.iter().collect();
    entries.iter().partition(|entry| {
        let index = others.iter().position(|other| other == entry);
        index.map(|index| others.remove(index)).is_some()
    })
}

#[cfg(test)]
mod tests;
