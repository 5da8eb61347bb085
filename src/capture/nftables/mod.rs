//! Traffic capture by nftables: renders the rules as one transaction of `nft`, applies it, and reads the
//! live rules.
//!
//! The tables are ours alone. They are of family inet: IPv4 and IPv6 share their chains.

mod live;

use std::collections::BTreeSet;
use std::time::Duration;

use super::iptables;

use super::layout::{self, Layout};
use super::program;
use super::rules::{
    Chain, Criterion, Family, Id, Match, Owner, Place, Protocol, Rule, Rules, Table, Verdict,
};
use super::types::range;
use crate::address::Cidr;
use crate::netlink::nft_chains;

pub use live::Live;

/// Time limit of `nft`.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "nativeNftables is enabled, but the nft binary is missing in the sidecar container image"
    )]
    Missing,
    #[error(transparent)]
    Program(program::Error),
    #[error("`nft -j list ruleset` printed something else than a rule set")]
    Malformed(#[from] serde_json::Error),
}

/// Replaces all our rules by these, at once.
pub async fn apply(rules: &Rules) -> Result<(), Error> {
    carry_out(&transaction(rules)).await
}

/// Removes all our rules, at once, if there are any.
pub async fn clean() -> Result<(), Error> {
    match has_tables() {
        true => carry_out(&removal()).await,
        false => Ok(()),
    }
}

async fn carry_out(text: &str) -> Result<(), Error> {
    for line in text.lines() {
        tracing::info!("nft: {line}");
    }
    nft(&["-f", "-"], text).await.map(drop)
}

/// Whether the kernel has tables of ours, as far as it tells.
pub fn has_tables() -> bool {
    const INET: u8 = 1;
    let tables = Table::ALL.map(table_name);
    nft_chains().is_ok_and(|chains| {
        let mut chains = chains.iter();
        chains.any(|(family, table, _)| *family == INET && tables.contains(table))
    })
}

/// The rules in the kernel.
pub async fn live() -> Result<Live, Error> {
    let text = nft(&["-j", "list", "ruleset"], "").await?;
    Ok(Live::parse(&text)?)
}

async fn nft(arguments: &[&str], input: &str) -> Result<Vec<u8>, Error> {
    let result = program::run("nft", arguments, input, LIMIT).await;
    result.map_err(|error| match error.is_missing() {
        true => Error::Missing,
        false => Error::Program(error),
    })
}

/// The input of `nft -f -` that removes our tables, whether they exist or not.
pub fn removal() -> String {
    let lines = Table::ALL.map(|table| {
        let table = table_name(table);
        format!("add table inet {table}\ndelete table inet {table}\n")
    });
    lines.concat()
}

/// The input of `nft -f -` that replaces our tables.
pub fn transaction(rules: &Rules) -> String {
    let rules = shared(rules);
    let chains = layout::chains(&rules);
    let mut text = removal();
    let tables: BTreeSet<_> = chains.keys().map(|(table, _)| *table).collect();
    for table in tables {
        text += &format!("add table inet {}\n", table_name(table));
    }
    for (table, chain) in chains.keys() {
        let hook = hook(*table, *chain).map_or_else(String::new, |(kind, hook, priority)| {
            format!(" {{ type {kind} hook {hook} priority {priority} ; }}")
        });
        let (table, chain) = (table_name(*table), chain_name(*chain));
        text += &format!("add chain inet {table} {chain}{hook}\n");
    }
    for ((table, chain), rules) in &chains {
        let (table, chain) = (table_name(*table), chain_name(*chain));
        for rule in rules {
            let statements = statements(rule);
            text += &format!("add rule inet {table} {chain} {statements}\n");
        }
    }
    text
}

/// What a machine has after [`apply`].
pub fn wanted(rules: &Rules) -> Live {
    let rules = shared(rules);
    let [v4, v6] = [Family::V4, Family::V6].map(|family| Layout::shared(&rules, family));
    Live { v4, v6 }
}

/// The rules for chains that both families share. What differs from iptables:
///
/// - without rules for IPv6, its packets leave our chains at once, as rules without an address would
///   capture them;
/// - a jump for the servers of one family is for both, once: the rules behind it have addresses;
/// - only TCP packets are dropped as invalid, as in Istio.
fn shared(rules: &Rules) -> Vec<Rule> {
    let mut shared = Vec::<Rule>::new();
    for rule in rules.all() {
        let mut rule = rule.clone();
        if rule.matches.is_empty() && rule.family.take().is_some() && shared.contains(&rule) {
            continue;
        }
        if rule.matches.contains(&Match::Is(Criterion::StateInvalid)) {
            let tcp = Criterion::Protocol(Protocol::Tcp);
            rule.matches.push(Match::Is(tcp));
        }
        shared.push(rule);
    }
    if !rules.has_v6() {
        let chains = shared.iter().map(|rule| (rule.table, rule.chain));
        let builtin: BTreeSet<_> = chains.filter(|(_, chain)| chain.is_builtin()).collect();
        shared.extend(builtin.into_iter().map(|(table, chain)| Rule {
            family: Some(Family::V6),
            table,
            chain,
            place: Place::At(1),
            matches: Vec::new(),
            verdict: Verdict::Return,
        }));
    }
    shared
}

/// A rule without its chain.
fn statements(rule: &Rule) -> String {
    let is_v6 = rule.family == Some(Family::V6);
    let udp = Match::Is(Criterion::Protocol(Protocol::Udp));
    let is_udp = rule.matches.contains(&udp);
    let protocol = if is_udp { "udp" } else { "tcp" };
    let matches = rule.matches.iter().map(|each| match each {
        Match::Is(criterion) => condition(protocol, "", criterion),
        Match::Not(criterion) => condition(protocol, "!= ", criterion),
    });
    let mut text: String = matches.collect();
    if is_v6 && rule.matches.is_empty() {
        text += "meta nfproto ipv6 ";
    }
    if let Verdict::Tproxy { port, mark } = rule.verdict {
        let family = if is_v6 { "ip6" } else { "ip" };
        text += &format!("tproxy {family} to :{port} meta mark set {mark} ");
    }
    text += "counter ";
    text + &match rule.verdict {
        Verdict::Return => "return".to_owned(),
        Verdict::Accept | Verdict::Tproxy { .. } => "accept".to_owned(),
        Verdict::Drop => "drop".to_owned(),
        Verdict::Reject => "reject with tcp reset".to_owned(),
        Verdict::Jump(chain) => format!("jump {}", chain_name(chain)),
        Verdict::Redirect(port) => format!("redirect to :{port}"),
        Verdict::SetMark(mark) => format!("meta mark set {mark}"),
        Verdict::SaveMark => "ct mark set mark".to_owned(),
        Verdict::RestoreMark => "meta mark set ct mark".to_owned(),
        Verdict::Zone(zone) => format!("ct zone set {zone}"),
    }
}

/// A criterion of a rule for this protocol; `not` stands before its value.
fn condition(protocol: &str, not: &str, criterion: &Criterion) -> String {
    let address = |range: &Cidr| match range.family() {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    };
    match criterion {
        // Any interface, which nftables cannot spell.
        Criterion::InInterface(name) | Criterion::OutInterface(name) if name == "+" => {
            String::new()
        }
        Criterion::InInterface(name) => format!("iifname {not}{} ", interface(name)),
        Criterion::OutInterface(name) => format!("oifname {not}{} ", interface(name)),
        Criterion::Source(range) => format!("{} saddr {not}{range} ", address(range)),
        Criterion::Destination(range) => format!("{} daddr {not}{range} ", address(range)),
        Criterion::Protocol(Protocol::Tcp) => format!("meta l4proto {not}tcp "),
        Criterion::Protocol(Protocol::Udp) => format!("meta l4proto {not}udp "),
        Criterion::SourcePort(port) => format!("{protocol} sport {not}{port} "),
        Criterion::DestinationPort(ports) => {
            let texts: Vec<_> = ports.iter().map(|ports| range(ports, '-')).collect();
            match texts.as_slice() {
                [port] => format!("{protocol} dport {not}{port} "),
                ports => format!("{protocol} dport {not}{{ {} }} ", ports.join(", ")),
            }
        }
        Criterion::Owner(Owner::User(id)) => format!("skuid {not}{} ", owner(id)),
        Criterion::Owner(Owner::Group(id)) => format!("skgid {not}{} ", owner(id)),
        Criterion::StateInvalid => format!("ct state {not}invalid "),
        Criterion::StateRelatedOrEstablished => format!("ct state {not}related,established "),
        Criterion::Mark(mark) => format!("mark {not}{mark} "),
        Criterion::ConnectionMark(mark) => format!("ct mark {not}{mark} "),
    }
}

/// An interface's name, quoted. In the model, `+` at its end stands for any further characters.
fn interface(name: &str) -> String {
    match name.strip_suffix('+') {
        Some(prefix) => format!("\"{prefix}*\""),
        None => format!("\"{name}\""),
    }
}

/// A name is quoted: `$` and `@` have a meaning in front of a bare one.
fn owner(id: &Id) -> String {
    match id {
        Id::Numbers(numbers) => range(numbers, '-'),
        Id::Name(name) => format!("\"{name}\""),
    }
}

fn table_name(table: Table) -> String {
    format!("istio-proxy-{}", iptables::table_name(table))
}

/// The type, hook and priority of a chain that the kernel calls.
fn hook(table: Table, chain: Chain) -> Option<(&'static str, &'static str, i64)> {
    let hook = match chain {
        Chain::Prerouting => "prerouting",
        Chain::Output => "output",
        _ => return None,
    };
    Some(match (table, chain) {
        (Table::Nat, _) => ("nat", hook, -100),
        (Table::Mangle, Chain::Output) => ("route", hook, -150),
        (Table::Mangle, _) => ("filter", hook, -150),
        (Table::Raw, _) => ("filter", hook, -300),
        (Table::Filter, _) => ("filter", hook, 0),
    })
}

fn chain_name(chain: Chain) -> String {
    iptables::chain_name(chain).to_lowercase().replace('_', "-")
}

#[cfg(test)]
mod tests;
