//! iptables: renders rules as input of `iptables-restore`, reads what `iptables-save` prints, and runs both.

pub mod apply;
mod programs;
mod rule;
pub mod saved;
mod swap;

pub use programs::Error;
pub(in crate::capture) use rule::entry;
pub(in crate::capture) use swap::jumps_to_istio;

use std::fmt;

use crate::capture::packet::Matched;
use crate::capture::rules::{
    Chain, Criterion, Family, Match, Owner, Place, Protocol, Rule, Rules, Table, Verdict,
};
use crate::capture::types::range;

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
#[derive(Debug)]
struct TableText {
    name: &'static str,
    chains: Vec<&'static str>,
    /// What `iptables-restore` adds rules by.
    lines: Vec<String>,
}

/// The tables that have rules.
fn wanted(rules: &Rules, family: Family) -> Vec<TableText> {
    let tables = Table::ALL.into_iter().map(|table| {
        let rules = rules.of(family).filter(|rule| rule.table == table);
        let rules: Vec<_> = rules.collect();
        TableText {
            name: table_name(table),
            chains: chains(&rules).into_iter().map(chain_name).collect(),
            lines: rules.iter().map(|rule| Line(rule).to_string()).collect(),
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

/// A rule as a line.
struct Line<'a>(&'a Rule);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(rule) = self;
        let chain = chain_name(rule.chain);
        match rule.place {
            Place::Last => write!(f, "-A {chain}")?,
            Place::At(number) => write!(f, "-I {chain} {number}")?,
        }
        write_rule(f, &rule.matches, rule.verdict)
    }
}

/// As the line that appends it.
impl fmt::Display for Matched<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "-A {}", chain_name(self.chain))?;
        write_rule(f, self.matches, self.verdict)
    }
}

fn write_rule(f: &mut fmt::Formatter<'_>, matches: &[Match], verdict: Verdict) -> fmt::Result {
    for each in matches {
        match each {
            Match::Is(criterion) => write_match(f, "", criterion)?,
            Match::Not(criterion) => write_match(f, " !", criterion)?,
        }
    }
    f.write_str(" -j ")?;
    match verdict {
        Verdict::Return => f.write_str("RETURN"),
        Verdict::Accept => f.write_str("ACCEPT"),
        Verdict::Drop => f.write_str("DROP"),
        Verdict::Reject => f.write_str("REJECT --reject-with tcp-reset"),
        Verdict::Jump(chain) => f.write_str(chain_name(chain)),
        // Istio abbreviates the option for UDP.
        Verdict::Redirect(port) if is_udp(matches) => write!(f, "REDIRECT --to-port {port}"),
        Verdict::Redirect(port) => write!(f, "REDIRECT --to-ports {port}"),
        Verdict::Tproxy { port, mark } => {
            write!(f, "TPROXY --tproxy-mark {mark}/0xffffffff --on-port {port}")
        }
        Verdict::SetMark(mark) => write!(f, "MARK --set-mark {mark}"),
        Verdict::SaveMark => f.write_str("CONNMARK --save-mark"),
        Verdict::RestoreMark => f.write_str("CONNMARK --restore-mark"),
        Verdict::Zone(zone) => write!(f, "CT --zone {zone}"),
    }
}

/// Writes a criterion; `not` stands before its option.
fn write_match(f: &mut fmt::Formatter<'_>, not: &str, criterion: &Criterion) -> fmt::Result {
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
    write!(f, "{module}{not} {option} {value}")
}

fn is_udp(matches: &[Match]) -> bool {
    matches.contains(&Match::Is(Criterion::Protocol(Protocol::Udp)))
}

pub(in crate::capture) fn table_name(table: Table) -> &'static str {
    match table {
        Table::Filter => "filter",
        Table::Mangle => "mangle",
        Table::Nat => "nat",
        Table::Raw => "raw",
    }
}

pub(in crate::capture) fn chain_name(chain: Chain) -> &'static str {
    match chain {
        Chain::Prerouting => "PREROUTING",
        Chain::Output => "OUTPUT",
        Chain::Inbound => "ISTIO_INBOUND",
        Chain::InRedirect => "ISTIO_IN_REDIRECT",
        Chain::IstioOutput => "ISTIO_OUTPUT",
        Chain::Redirect => "ISTIO_REDIRECT",
        Chain::OutputDns => "ISTIO_OUTPUT_DNS",
        Chain::Divert => "ISTIO_DIVERT",
        Chain::Tproxy => "ISTIO_TPROXY",
        Chain::Drop => "ISTIO_DROP",
        Chain::ProtectAdmin => "ISTIO_PROTECT_ADMIN",
    }
}
