//! iptables: renders rules as input of `iptables-restore`, reads what `iptables-save` prints, and runs both.

pub mod apply;
mod programs;
mod rule;
pub mod saved;
mod swap;

pub(in crate::capture) use rule::entry;
pub(in crate::capture) use swap::jumps_to_istio;

use std::fmt::{self, Write};
use std::ops::RangeInclusive;

use crate::capture::packet::Matched;
use crate::capture::rules::{
    Chain, Criterion, Family, Id, Match, Owner, Place, Protocol, Rule, Rules, Table, Verdict,
};

/// What a dry run prints: each command, or the input of a command that has one.
pub fn dry_run(rules: &Rules) -> String {
    let save_v6 = if rules.has_v6() {
        "ip6tables-save\n"
    } else {
        ""
    };
    let (v4, v6) = (restore(rules, Family::V4), restore(rules, Family::V6));
    format!("iptables-save\nip6tables-save\n{v4}{v6}iptables-save\n{save_v6}")
}

/// The input of a family's `iptables-restore --noflush`, for tables without these chains.
pub fn restore(rules: &Rules, family: Family) -> String {
    let mut text = String::new();
    for table in wanted(rules, family) {
        // A String takes any text.
        let _ = writeln!(text, "* {}", table.name);
        for chain in table.chains {
            let _ = writeln!(text, "-N {chain}");
        }
        for line in table.lines {
            let _ = writeln!(text, "{line}");
        }
        text.push_str("COMMIT\n");
    }
    text
}

/// What a table is to have in the end, besides rules of others.
#[derive(Debug)]
struct TableText<'a> {
    name: &'a str,
    chains: Vec<&'a str>,
    /// What `iptables-restore` adds rules by.
    lines: Vec<String>,
}

/// The tables that have rules.
fn wanted(rules: &Rules, family: Family) -> Vec<TableText<'static>> {
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
    match criterion {
        Criterion::InInterface(name) => write!(f, "{not} -i {name}"),
        Criterion::OutInterface(name) => write!(f, "{not} -o {name}"),
        Criterion::Source(range) => write!(f, "{not} -s {range}"),
        Criterion::Destination(range) => write!(f, "{not} -d {range}"),
        Criterion::Protocol(Protocol::Tcp) => write!(f, "{not} -p tcp"),
        Criterion::Protocol(Protocol::Udp) => write!(f, "{not} -p udp"),
        Criterion::SourcePort(port) => write!(f, "{not} --sport {port}"),
        Criterion::DestinationPort(ports) => match ports.as_slice() {
            [ports] => write!(f, "{not} --dport {}", range(ports, ':')),
            ports => {
                let ports: Vec<_> = ports.iter().map(|each| range(each, ':')).collect();
                write!(f, " -m multiport{not} --dports {}", ports.join(","))
            }
        },
        Criterion::Owner(Owner::User(id)) => write!(f, " -m owner{not} --uid-owner {id}"),
        Criterion::Owner(Owner::Group(id)) => write!(f, " -m owner{not} --gid-owner {id}"),
        Criterion::StateInvalid => write!(f, " -m conntrack{not} --ctstate INVALID"),
        Criterion::StateRelatedOrEstablished => {
            write!(f, " -m conntrack{not} --ctstate RELATED,ESTABLISHED")
        }
        Criterion::Mark(mark) => write!(f, " -m mark{not} --mark {mark}"),
        Criterion::ConnectionMark(mark) => write!(f, " -m connmark{not} --mark {mark}"),
    }
}

fn is_udp(matches: &[Match]) -> bool {
    matches.contains(&Match::Is(Criterion::Protocol(Protocol::Udp)))
}

/// A single number, or the first and the last of a range.
pub(super) fn range<T: fmt::Display + PartialEq>(
    numbers: &RangeInclusive<T>,
    separator: char,
) -> String {
    let (first, last) = (numbers.start(), numbers.end());
    match first == last {
        true => first.to_string(),
        false => format!("{first}{separator}{last}"),
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Numbers(numbers) => f.write_str(&range(numbers, '-')),
            Self::Name(name) => f.write_str(name),
        }
    }
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
