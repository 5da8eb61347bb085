//! Parses the output of `iptables-save` and `ip6tables-save`, of either kind, with or without counters.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::capture::layout::{Entry, Layout};
use crate::capture::rules::{Chain, Criterion, Id, Match, Protocol, Table, Verdict, named};
use crate::net::address::Cidr;

/// Prefix of the names of Istio's chains, in every version.
pub(super) const ISTIO: &str = "ISTIO_";

/// The tables of one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved<'a> {
    /// Tables and names of all chains, including the kernel's own.
    pub(super) chains: Vec<(&'a str, &'a str)>,
    pub(super) rules: Vec<SavedRule<'a>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedRule<'a> {
    pub(super) table: &'a str,
    pub(super) chain: &'a str,
    /// Matches and target.
    pub(super) text: &'a str,
}

impl<'a> Saved<'a> {
    /// Parses the program's output. The error is the first invalid line, or the last line if the output is
    /// incomplete.
    pub fn parse(text: &'a str) -> Result<Self, &'a str> {
        let mut saved = Self::default();
        let mut open_table = None;
        let lines = text.lines().map(str::trim_end);
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match (line.strip_prefix('*'), open_table) {
                (table @ Some(_), None) => open_table = table,
                (None, Some(_)) if line == "COMMIT" => open_table = None,
                (None, Some(table)) => saved.add(table, line).ok_or(line)?,
                _ => return Err(line),
            }
        }
        if open_table.is_some() {
            return Err(text.lines().next_back().unwrap_or_default());
        }
        Ok(saved)
    }

    /// Adds a line that declares a chain, or adds a rule to one.
    fn add(&mut self, table: &'a str, line: &'a str) -> Option<()> {
        if let Some(declared) = line.strip_prefix(':') {
            self.chains.push((table, declared.split(' ').next()?));
            return Some(());
        }
        let uncounted = match line.strip_prefix('[') {
            Some(counters) => counters.split_once("] ")?.1,
            None => line,
        };
        let rule = uncounted.strip_prefix("-A ")?;
        let (chain, text) = rule.split_once(' ').unwrap_or((rule, ""));
        self.rules.push(SavedRule { table, chain, text });
        Some(())
    }

    /// Returns the DNS rules of earlier versions, last first, which are in the kernel's own chains. A rule that
    /// lets queries of some owners pass is Istio's if the next rule of its chain is, because other DNS proxies
    /// have such rules as well.
    pub(super) fn earlier_dns(&self) -> Vec<&SavedRule<'a>> {
        let mut chain_of_next = None;
        let mut found = Vec::new();
        for rule in self.rules.iter().rev() {
            let chain = Some((rule.table, rule.chain));
            if rule.is_earlier_dns().is_some_and(|it| it || chain_of_next == chain) {
                chain_of_next = chain;
                found.push(rule);
            } else {
                chain_of_next = None;
            }
        }
        found
    }

    /// Returns the interfaces that Istio excludes in both directions, in front of its jumps, and the interfaces of
    /// virtual machines whose traffic it captures.
    pub(super) fn istio_interfaces(&self) -> HashSet<&'a str> {
        let (inbound, _) = self.before_jump("PREROUTING");
        let (outbound, has_jump) = self.before_jump("OUTPUT");
        let mut interfaces = HashSet::new();
        if has_jump {
            interfaces.extend(outbound.iter().filter_map(|rule| rule.passing_interface()));
        }
        let entered: HashSet<_> =
            inbound.iter().filter_map(|rule| rule.passing_interface()).collect();
        interfaces.retain(|name| entered.contains(name));
        interfaces.extend(inbound.iter().filter_map(|rule| rule.captured_interface()));
        interfaces
    }

    /// Returns the rules of a chain of nat in front of its last jump to Istio, and true if there is such a jump.
    fn before_jump(&self, chain: &str) -> (Vec<&SavedRule<'a>>, bool) {
        let rules = self.rules.iter();
        let mut rules: Vec<_> =
            rules.filter(|rule| (rule.table, rule.chain) == ("nat", chain)).collect();
        let jump = rules
            .iter()
            .rposition(|rule| jumps_to_istio(rule.text) && rule.captured_interface().is_none());
        rules.truncate(jump.unwrap_or(rules.len()));
        (rules, jump.is_some())
    }

    /// Returns true if a table has a chain of Istio.
    pub(super) fn has_istio(&self, table: &str) -> bool {
        self.chains.iter().any(|(other, chain)| *other == table && chain.starts_with(ISTIO))
    }

    /// Returns the rules in chains that traffic capture knows.
    pub fn layout(&self) -> Layout {
        let mut layout = Layout::default();
        let earlier = self.earlier_dns();
        for (table, name) in &self.chains {
            match (named(&Table::ALL, table), named(&Chain::ALL, name)) {
                (Some(table), Some(chain)) if !chain.is_builtin() => {
                    layout.chains.entry((table, chain)).or_default();
                }
                (Some(table), None) if name.starts_with(ISTIO) => {
                    layout.unknown_chains.push((table, (*name).to_owned()));
                }
                _ => {}
            }
        }
        for rule in &self.rules {
            let SavedRule { table, chain, text } = rule;
            if earlier.contains(&rule) {
                layout.earlier_dns.push(format!("{table}: -A {chain} {text}"));
            } else if let Some(place) = rule.place() {
                layout.chains.entry(place).or_default().push(entry(text));
            }
        }
        layout
    }
}

impl<'a> SavedRule<'a> {
    /// Returns true if the rule was certainly written by Istio 1.8 to 1.24 for DNS, false if it may have been, and
    /// None for other rules.
    fn is_earlier_dns(&self) -> Option<bool> {
        let (server, rest) = self.text.split_once("-p udp -m udp ")?;
        let (matches, target) = rest.split_once(" -j ")?;
        let (port, owner) = matches.split_once(" -m owner ").unwrap_or((matches, ""));
        // Some versions name the resolver, as destination or source.
        let address = server.trim_start_matches("-d ").trim_start_matches("-s ");
        if address.trim_end().contains(' ') {
            return None;
        }
        let by_owner = if owner.is_empty() { "" } else { " owner" };
        match format!("{} {} {port}{by_owner} {target}", self.table, self.chain).as_str() {
            "nat OUTPUT --dport 53 owner RETURN" => Some(owner.ends_with("-owner 1337")),
            "nat OUTPUT --dport 53 DNAT --to-destination 127.0.0.1:15053"
            | "nat OUTPUT --dport 53 REDIRECT --to-ports 15053"
            | "nat POSTROUTING --dport 15053 SNAT --to-source 127.0.0.1"
            | "raw OUTPUT --dport 53 owner CT --zone 1"
            | "raw OUTPUT --sport 15053 owner CT --zone 2"
            | "raw OUTPUT --dport 53 CT --zone 2"
            | "raw PREROUTING --sport 53 CT --zone 1" => Some(true),
            _ => None,
        }
    }

    /// Returns the interface whose traffic a rule lets pass without another condition, as Istio's rules do.
    pub(super) fn passing_interface(&self) -> Option<&'a str> {
        let option = match self.chain {
            "PREROUTING" => "-i ",
            "OUTPUT" => "-o ",
            _ => return None,
        };
        let name = self.text.strip_prefix(option)?.strip_suffix(" -j RETURN")?;
        if name.contains(' ') { None } else { Some(name) }
    }

    /// Returns the interface of virtual machines whose traffic a jump of Istio captures.
    pub(super) fn captured_interface(&self) -> Option<&'a str> {
        let mut words = self.text.split(' ');
        words.find(|word| *word == "-i")?;
        if jumps_to_istio(self.text) { words.next() } else { None }
    }

    /// Returns table and chain, if traffic capture knows them.
    pub(super) fn place(&self) -> Option<(Table, Chain)> {
        named(&Table::ALL, self.table).zip(named(&Chain::ALL, self.chain))
    }
}

/// Parses the part of a rule behind `-A CHAIN`.
pub(in crate::capture) fn entry(text: &str) -> Entry {
    read(&text.split(' ').collect::<Vec<_>>()).unwrap_or_else(|| Entry::Foreign(text.to_owned()))
}

/// Converts the words of a rule to the model. Returns None if the model cannot express it.
fn read(mut words: &[&str]) -> Option<Entry> {
    let mut matches = Vec::new();
    let mut module = "";
    loop {
        match words {
            ["-j", target @ ..] => return Some(Entry::rule(matches, verdict(target)?)),
            // Extensions that match nothing without their options.
            [
                "-m",
                name @ ("tcp" | "udp" | "multiport" | "owner" | "conntrack" | "mark" | "connmark"),
                rest @ ..,
            ] => (module, words) = (name, rest),
            ["-m", ..] => return None,
            ["!", option, value, rest @ ..] => {
                matches.push(Match::Not(criterion(module, option, value)?));
                words = rest;
            }
            [option, value, rest @ ..] => {
                matches.push(Match::Is(criterion(module, option, value)?));
                words = rest;
            }
            _ => return None,
        }
    }
}

fn criterion(module: &str, option: &str, value: &str) -> Option<Criterion> {
    Some(match (option, module) {
        ("-i", _) => Criterion::InInterface(value.to_owned()),
        ("-o", _) => Criterion::OutInterface(value.to_owned()),
        ("-s", _) => Criterion::Source(Cidr::parse(value)?),
        ("-d", _) => Criterion::Destination(Cidr::parse(value)?),
        ("-p", _) => Criterion::Protocol(named(&Protocol::ALL, value)?),
        ("--sport", "tcp" | "udp") => Criterion::SourcePort(value.parse().ok()?),
        ("--dport", "tcp" | "udp") => Criterion::DestinationPort(vec![range(value, ':')?]),
        ("--dports", "multiport") => {
            let ports: Option<_> = value.split(',').map(|ports| range(ports, ':')).collect();
            Criterion::DestinationPort(ports?)
        }
        ("--uid-owner", "owner") => Criterion::User(Id::Numbers(range(value, '-')?)),
        ("--gid-owner", "owner") => Criterion::Group(Id::Numbers(range(value, '-')?)),
        ("--ctstate", "conntrack") if value == "INVALID" => Criterion::StateInvalid,
        ("--ctstate", "conntrack") if value == "RELATED,ESTABLISHED" => {
            Criterion::StateRelatedOrEstablished
        }
        ("--mark", "mark") => Criterion::Mark(mark(value)?),
        ("--mark", "connmark") => Criterion::ConnectionMark(mark(value)?),
        _ => return None,
    })
}

fn verdict(target: &[&str]) -> Option<Verdict> {
    const ALL: &str = "0xffffffff";
    Some(match target {
        ["RETURN"] => Verdict::Return,
        ["ACCEPT"] => Verdict::Accept,
        ["DROP"] => Verdict::Drop,
        ["REJECT", "--reject-with", "tcp-reset"] => Verdict::Reject,
        ["REDIRECT", "--to-ports", port] => Verdict::Redirect(port.parse().ok()?),
        ["TPROXY", "--on-port", port, "--on-ip", "0.0.0.0" | "::", "--tproxy-mark", set] => {
            Verdict::Tproxy { port: port.parse().ok()?, mark: mark(set)? }
        }
        ["MARK", "--set-xmark", set] => Verdict::SetMark(mark(set)?),
        ["CONNMARK", "--save-mark", "--nfmask", ALL, "--ctmask", ALL] => Verdict::SaveMark,
        ["CONNMARK", "--restore-mark", "--nfmask", ALL, "--ctmask", ALL] => Verdict::RestoreMark,
        ["CT", "--zone", zone] => Verdict::Zone(zone.parse().ok()?),
        [chain] => Verdict::Jump(named(&Chain::ALL, chain).filter(|it| !it.is_builtin())?),
        _ => return None,
    })
}

/// Parses a single number, or the first and the last of a range.
fn range<T: FromStr>(text: &str, separator: char) -> Option<RangeInclusive<T>> {
    let (first, last) = text.split_once(separator).unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

/// Parses a mark whose mask has all bits.
fn mark(text: &str) -> Option<u32> {
    let hex = text.strip_suffix("/0xffffffff").unwrap_or(text);
    u32::from_str_radix(hex.strip_prefix("0x")?, 16).ok()
}

/// Returns true if the target is one of Istio's chains, of any version.
pub(in crate::capture) fn jumps_to_istio(text: &str) -> bool {
    target(text).is_some_and(|target| target.starts_with(ISTIO))
}

pub(in crate::capture) fn target(text: &str) -> Option<&str> {
    // The last option counts, because a comment before it may contain any words.
    let words: Vec<_> = text.split(' ').collect();
    words.get(words.iter().rposition(|word| matches!(*word, "-j" | "-g"))? + 1).copied()
}

#[cfg(test)]
mod tests;
