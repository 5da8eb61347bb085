//! Reads the text of a rule, as `iptables-save` prints it.

use std::ops::RangeInclusive;
use std::str::FromStr;

use super::saved::chain_named;
use crate::address::Cidr;
use crate::capture::layout::Entry;
use crate::capture::rules::{Criterion, Id, Match, Owner, Protocol, Verdict};

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
            ["-m", name, rest @ ..] => (module, words) = (extension(name)?, rest),
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

/// An extension that matches nothing without its options.
fn extension(name: &str) -> Option<&str> {
    let known = [
        "tcp",
        "udp",
        "multiport",
        "owner",
        "conntrack",
        "mark",
        "connmark",
    ];
    known.contains(&name).then_some(name)
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
        [chain] => match chain_named(chain)? {
            chain if chain.is_builtin() => return None,
            chain => Verdict::Jump(chain),
        },
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
