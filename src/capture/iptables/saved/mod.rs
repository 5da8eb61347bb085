//! Reads what `iptables-save` and `ip6tables-save` print, of either kind, with or without counters.

use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::address::Cidr;
use crate::capture::layout::{Entry, Layout};
use crate::capture::rules::{Chain, Criterion, Id, Match, Owner, Protocol, Table, Verdict};

/// What the names of Istio's chains start with, in every version.
pub(super) const ISTIO: &str = "ISTIO_";

/// The tables of one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved<'a> {
    /// The tables and names of all chains, also of the kernel's own.
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
    /// Reads the program's output. An error is the line that it does not print, or the last one if more
    /// would follow.
    pub fn parse(text: &'a str) -> Result<Self, &'a str> {
        let (mut saved, mut open) = (Self::default(), None);
        let lines = text.lines().map(str::trim_end);
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match (line.strip_prefix('*'), open) {
                (table @ Some(_), None) => open = table,
                (None, Some(_)) if line == "COMMIT" => open = None,
                (None, Some(table)) => saved.add(table, line).ok_or(line)?,
                _ => return Err(line),
            }
        }
        match open {
            None => Ok(saved),
            Some(_) => Err(text.lines().next_back().unwrap_or_default()),
        }
    }

    /// Adds a line that declares a chain, or adds a rule to one.
    fn add(&mut self, table: &'a str, line: &'a str) -> Option<()> {
        if let Some(declared) = line.strip_prefix(':') {
            self.chains.push((table, declared.split(' ').next()?));
            return Some(());
        }
        let line = match line.strip_prefix('[') {
            Some(counted) => counted.split_once("] ")?.1,
            None => line,
        };
        let rule = line.strip_prefix("-A ")?;
        let (chain, text) = rule.split_once(' ').unwrap_or((rule, ""));
        self.rules.push(SavedRule { table, chain, text });
        Some(())
    }

    /// The DNS rules of earlier versions, which stand in the kernel's own chains. A rule that lets queries of
    /// some owners pass is Istio's if the next one of its chain is: other DNS proxies have such rules as well.
    pub(super) fn earlier_dns(&self) -> Vec<&SavedRule<'a>> {
        let mut next = None;
        let is_istios = |rule: &&SavedRule<'a>| {
            let place = Some((rule.table, rule.chain));
            let is_certain = rule.is_earlier_dns();
            next = place.filter(|_| is_certain.is_some_and(|it| it || next == place));
            next.is_some()
        };
        self.rules.iter().rev().filter(is_istios).collect()
    }

    /// The rules in chains that traffic capture knows.
    pub fn layout(&self) -> Layout {
        let (mut layout, earlier) = (Layout::default(), self.earlier_dns());
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
                let line = format!("{table}: -A {chain} {text}");
                layout.earlier_dns.push(line);
            } else if let Some(place) = rule.place() {
                let entries = layout.chains.entry(place).or_default();
                entries.push(entry(text));
            }
        }
        layout
    }
}

impl SavedRule<'_> {
    /// Whether it is certain that Istio 1.8 to 1.24 has written the rule for DNS. `None` for other rules.
    fn is_earlier_dns(&self) -> Option<bool> {
        let (server, rest) = self.text.split_once("-p udp -m udp ")?;
        let (matches, target) = rest.split_once(" -j ")?;
        let (port, owner) = matches.split_once(" -m owner ").unwrap_or((matches, ""));
        // Some versions name the resolver, in either direction.
        let server = server.trim_start_matches("-d ").trim_start_matches("-s ");
        if server.trim_end().contains(' ') {
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

    /// The chain, if traffic capture knows it.
    pub(super) fn place(&self) -> Option<(Table, Chain)> {
        named(&Table::ALL, self.table).zip(named(&Chain::ALL, self.chain))
    }
}

fn named<T: Copy>(all: &[(T, &str)], name: &str) -> Option<T> {
    let found = all.iter().find(|(_, found)| *found == name);
    found.map(|(it, _)| *it)
}

/// The rule that stands behind `-A CHAIN`.
pub(in crate::capture) fn entry(text: &str) -> Entry {
    let words: Vec<_> = text.split(' ').collect();
    match read(&words) {
        Some((matches, verdict)) => Entry::rule(matches, verdict),
        None => Entry::Foreign(text.to_owned()),
    }
}

/// None is a rule with anything the model has not.
fn read(mut words: &[&str]) -> Option<(Vec<Match>, Verdict)> {
    let (mut matches, mut module) = (Vec::new(), "");
    loop {
        match words {
            ["-j", target @ ..] => return Some((matches, verdict(target)?)),
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
        ("-p", _) if value == "tcp" => Criterion::Protocol(Protocol::Tcp),
        ("-p", _) if value == "udp" => Criterion::Protocol(Protocol::Udp),
        ("--sport", "tcp" | "udp") => Criterion::SourcePort(value.parse().ok()?),
        ("--dport", "tcp" | "udp") => Criterion::DestinationPort(vec![range(value, ':')?]),
        ("--dports", "multiport") => {
            let ports = value.split(',').map(|ports| range(ports, ':'));
            Criterion::DestinationPort(ports.collect::<Option<_>>()?)
        }
        ("--uid-owner", "owner") => Criterion::Owner(Owner::User(Id::Numbers(range(value, '-')?))),
        ("--gid-owner", "owner") => Criterion::Owner(Owner::Group(Id::Numbers(range(value, '-')?))),
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
        [
            "TPROXY",
            "--on-port",
            port,
            "--on-ip",
            "0.0.0.0" | "::",
            "--tproxy-mark",
            set,
        ] => Verdict::Tproxy {
            port: port.parse().ok()?,
            mark: mark(set)?,
        },
        ["MARK", "--set-xmark", set] => Verdict::SetMark(mark(set)?),
        ["CONNMARK", direction, "--nfmask", ALL, "--ctmask", ALL] => match *direction {
            "--save-mark" => Verdict::SaveMark,
            "--restore-mark" => Verdict::RestoreMark,
            _ => return None,
        },
        ["CT", "--zone", zone] => Verdict::Zone(zone.parse().ok()?),
        [chain] => Verdict::Jump(named(&Chain::ALL, chain).filter(|it| !it.is_builtin())?),
        _ => return None,
    })
}

/// A single number, or the first and the last of a range.
fn range<T: FromStr>(text: &str, separator: char) -> Option<RangeInclusive<T>> {
    let (first, last) = text.split_once(separator).unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

/// A mark of all bits.
fn mark(text: &str) -> Option<u32> {
    let hex = text.strip_suffix("/0xffffffff").unwrap_or(text);
    u32::from_str_radix(hex.strip_prefix("0x")?, 16).ok()
}

/// Whether the target is one of Istio's chains, of any version.
pub(in crate::capture) fn jumps_to_istio(text: &str) -> bool {
    target(text).is_some_and(|target| target.starts_with(ISTIO))
}

pub(in crate::capture) fn target(text: &str) -> Option<&str> {
    let words: Vec<_> = text.split(' ').collect();
    // Before it there may be a comment, with anything in it.
    let option = words.iter().rposition(|word| matches!(*word, "-j" | "-g"));
    words.get(option? + 1).copied()
}

#[cfg(test)]
mod tests;
