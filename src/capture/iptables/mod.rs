//! Renders rules as input of `iptables-restore`, reads the output of `iptables-save`, and runs both.

pub mod apply;
mod programs;
pub mod saved;

pub(in crate::capture) use saved::{jumps_to_istio, target};

use indexmap::IndexSet;

use crate::capture::config::range;
use crate::capture::layout::Entry;
use crate::capture::rules::{
    Chain, Criterion, Family, Match, Protocol, Rule, Rules, Table, Verdict,
};

/// Renders the output of a dry run: each command, or the input of a command that has one.
pub fn dry_run(rules: &Rules) -> String {
    let save_v6 = if rules.has_v6 { "ip6tables-save\n" } else { "" };
    let v4 = restore(rules, Family::V4);
    let v6 = restore(rules, Family::V6);
    format!("iptables-save\nip6tables-save\n{v4}{v6}iptables-save\n{save_v6}")
}

/// Renders the input of a family's `iptables-restore --noflush`, for tables without these chains.
pub fn restore(rules: &Rules, family: Family) -> String {
    let mut text = String::new();
    for TableText { name, chains, lines } in tables(rules, family) {
        let declared = chains.iter().map(|chain| format!("-N {chain}"));
        let lines = Vec::from_iter(declared.chain(lines)).join("\n");
        text += &format!("* {name}\n{lines}\nCOMMIT\n");
    }
    text
}

/// The wanted content of a table, apart from rules of others.
#[derive(Debug, Default)]
struct TableText {
    name: &'static str,
    chains: Vec<&'static str>,
    /// Lines by which `iptables-restore` adds the rules.
    lines: Vec<String>,
}

/// Renders the tables that have rules.
fn tables(rules: &Rules, family: Family) -> Vec<TableText> {
    let tables = Table::ALL.into_iter().map(|(table, name)| {
        let rules: Vec<_> = rules.for_family(family).filter(|rule| rule.table == table).collect();
        TableText {
            name,
            chains: new_chains(&rules),
            lines: rules.iter().map(|rule| line(rule)).collect(),
        }
    });
    tables.filter(|table| !table.lines.is_empty()).collect()
}

/// Returns the names of chains to create: first the chains with rules, then the chains that are only jumped to.
fn new_chains(rules: &[&Rule]) -> Vec<&'static str> {
    let targets = rules.iter().filter_map(|rule| match rule.verdict {
        Verdict::Jump(chain) => Some(chain),
        _ => None,
    });
    let mut chains: IndexSet<_> = rules.iter().map(|rule| rule.chain).chain(targets).collect();
    chains.retain(|chain| !chain.is_builtin());
    chains.into_iter().map(Chain::name).collect()
}

/// Renders the line that adds a rule.
fn line(rule: &Rule) -> String {
    let chain = rule.chain.name();
    let text = text(&rule.matches, rule.verdict);
    match rule.position {
        None => format!("-A {chain}{text}"),
        Some(number) => format!("-I {chain} {number}{text}"),
    }
}

/// Renders an entry of a chain as the line that appends it, after the name of the table.
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
    matches.iter().map(condition).collect::<String>() + " -j " + &target
}

fn condition(each: &Match) -> String {
    let (Match::Is(criterion) | Match::Not(criterion)) = each;
    let (module, option, value) = match criterion {
        Criterion::InInterface(name) => ("", "-i", name.clone()),
        Criterion::OutInterface(name) => ("", "-o", name.clone()),
        Criterion::Source(range) => ("", "-s", range.to_string()),
        Criterion::Destination(range) => ("", "-d", range.to_string()),
        Criterion::Protocol(protocol) => ("", "-p", protocol.name().to_owned()),
        Criterion::SourcePort(port) => ("", "--sport", port.to_string()),
        Criterion::DestinationPort(ports) => match ports.as_slice() {
            [ports] => ("", "--dport", range(ports, ':')),
            list => {
                let texts: Vec<_> = list.iter().map(|ports| range(ports, ':')).collect();
                (" -m multiport", "--dports", texts.join(","))
            }
        },
        Criterion::User(id) => (" -m owner", "--uid-owner", id.to_string()),
        Criterion::Group(id) => (" -m owner", "--gid-owner", id.to_string()),
        Criterion::StateInvalid => (" -m conntrack", "--ctstate", "INVALID".to_owned()),
        Criterion::StateRelatedOrEstablished => {
            (" -m conntrack", "--ctstate", "RELATED,ESTABLISHED".to_owned())
        }
        Criterion::Mark(mark) => (" -m mark", "--mark", mark.to_string()),
        Criterion::ConnectionMark(mark) => (" -m connmark", "--mark", mark.to_string()),
    };
    match each {
        Match::Is(_) => format!("{module} {option} {value}"),
        Match::Not(_) => format!("{module} ! {option} {value}"),
    }
}
