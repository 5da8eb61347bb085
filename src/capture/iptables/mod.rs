//! iptables: renders rules as input of `iptables-restore`, reads what `iptables-save` prints, and runs both.

pub mod apply;
mod programs;
pub mod saved;

pub(in crate::capture) use saved::{jumps_to_istio, target};

use crate::capture::config::range;
use crate::capture::layout::Entry;
use crate::capture::rules::{
    Chain, Criterion, Family, Match, Owner, Place, Protocol, Rule, Rules, Table, Verdict,
};

/// What a dry run prints: each command, or the input of a command that has one.
pub fn dry_run(rules: &Rules) -> String {
    let save_v6 = match rules.has_v6() {
        true => "ip6tables-save\n",
        false => "",
    };
    let (v4, v6) = (restore(rules, Family::V4), restore(rules, Family::V6));
    format!("iptables-save\nip6tables-save\n{v4}{v6}iptables-save\n{save_v6}")
}

/// The input of a family's `iptables-restore --noflush`, for tables without these chains.
pub fn restore(rules: &Rules, family: Family) -> String {
    let tables = wanted(rules, family).into_iter().map(|table| {
        let chains = table.chains.iter().map(|chain| format!("-N {chain}"));
        let lines: Vec<_> = chains.chain(table.lines).collect();
        format!("* {}\n{}\nCOMMIT\n", table.name, lines.join("\n"))
    });
    tables.collect()
}

/// What a table is to have in the end, besides rules of others.
#[derive(Debug, Default)]
struct TableText {
    name: &'static str,
    chains: Vec<&'static str>,
    /// What `iptables-restore` adds rules by.
    lines: Vec<String>,
}

/// The tables that have rules.
fn wanted(rules: &Rules, family: Family) -> Vec<TableText> {
    let tables = Table::ALL.into_iter().map(|(table, name)| {
        let rules = rules.of(family).filter(|rule| rule.table == table);
        let rules: Vec<_> = rules.collect();
        TableText {
            name,
            chains: chains(&rules).into_iter().map(Chain::name).collect(),
            lines: rules.iter().map(|rule| line(rule)).collect(),
        }
    });
    tables.filter(|table| !table.lines.is_empty()).collect()
}

/// The chains to create: those with rules first, then those that are only jumped to.
fn chains(rules: &[&Rule]) -> Vec<Chain> {
    let targets = rules.iter().filter_map(|rule| match rule.verdict {
        Verdict::Jump(chain) => Some(chain),
        _ => None,
    });
    let mut found = Vec::new();
    for chain in rules.iter().map(|rule| rule.chain).chain(targets) {
        if !chain.is_builtin() && !found.contains(&chain) {
            found.push(chain);
        }
    }
    found
}

/// A rule as the line that adds it.
fn line(rule: &Rule) -> String {
    let (chain, text) = (rule.chain.name(), text(&rule.matches, rule.verdict));
    match rule.place {
        Place::Last => format!("-A {chain}{text}"),
        Place::At(number) => format!("-I {chain} {number}{text}"),
    }
}

/// An entry of a chain behind its table, as the line that appends it.
pub(in crate::capture) fn appended((table, chain): (Table, Chain), entry: &Entry) -> String {
    let text = match entry {
        Entry::Rule { matches, verdict } => text(matches, *verdict),
        Entry::Foreign(text) => format!(" {text}"),
    };
    format!("{}: -A {}{text}", table.name(), chain.name())
}

fn text(matches: &[Match], verdict: Verdict) -> String {
    let is_udp = matches.contains(&Match::Is(Criterion::Protocol(Protocol::Udp)));
    let target = match verdict {
        Verdict::Return => "RETURN".to_owned(),
        Verdict::Accept => "ACCEPT".to_owned(),
        Verdict::Drop => "DROP".to_owned(),
        Verdict::Reject => "REJECT --reject-with tcp-reset".to_owned(),
        Verdict::Jump(chain) => chain.name().to_owned(),
        // Istio abbreviates the option for UDP.
        Verdict::Redirect(port) if is_udp => format!("REDIRECT --to-port {port}"),
        Verdict::Redirect(port) => format!("REDIRECT --to-ports {port}"),
        Verdict::Tproxy { port, mark } => {
            format!("TPROXY --tproxy-mark {mark}/0xffffffff --on-port {port}")
        }
        Verdict::SetMark(mark) => format!("MARK --set-mark {mark}"),
        Verdict::SaveMark => "CONNMARK --save-mark".to_owned(),
        Verdict::RestoreMark => "CONNMARK --restore-mark".to_owned(),
        Verdict::Zone(zone) => format!("CT --zone {zone}"),
    };
    let matches: String = matches.iter().map(condition).collect();
    format!("{matches} -j {target}")
}

fn condition(found: &Match) -> String {
    let (Match::Is(criterion) | Match::Not(criterion)) = found;
    let (module, option, value) = match criterion {
        Criterion::InInterface(name) => ("", "-i", name.clone()),
        Criterion::OutInterface(name) => ("", "-o", name.clone()),
        Criterion::Source(range) => ("", "-s", range.to_string()),
        Criterion::Destination(range) => ("", "-d", range.to_string()),
        Criterion::Protocol(Protocol::Tcp) => ("", "-p", "tcp".to_owned()),
        Criterion::Protocol(Protocol::Udp) => ("", "-p", "udp".to_owned()),
        Criterion::SourcePort(port) => ("", "--sport", port.to_string()),
        Criterion::DestinationPort(ports) => {
            let texts: Vec<_> = ports.iter().map(|ports| range(ports, ':')).collect();
            match texts.len() {
                1 => ("", "--dport", texts.concat()),
                _ => (" -m multiport", "--dports", texts.join(",")),
            }
        }
        Criterion::Owner(Owner::User(id)) => (" -m owner", "--uid-owner", id.to_string()),
        Criterion::Owner(Owner::Group(id)) => (" -m owner", "--gid-owner", id.to_string()),
        Criterion::StateInvalid => (" -m conntrack", "--ctstate", "INVALID".to_owned()),
        Criterion::StateRelatedOrEstablished => (
            " -m conntrack",
            "--ctstate",
            "RELATED,ESTABLISHED".to_owned(),
        ),
        Criterion::Mark(mark) => (" -m mark", "--mark", mark.to_string()),
        Criterion::ConnectionMark(mark) => (" -m connmark", "--mark", mark.to_string()),
    };
    match found {
        Match::Is(_) => format!("{module} {option} {value}"),
        Match::Not(_) => format!("{module} ! {option} {value}"),
    }
}
