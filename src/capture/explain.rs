//! Parses flows as `--explain` spells them, and describes in words what the rules do with them.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use super::config::{self, Config};
use super::iptables::appended;
use super::packet::{Decision, LOOPBACK, Packet, Sender, Trace};
use super::rules::{DNS_PORT, Id, Protocol, named};
use crate::problem::{Code, Problem};

/// Grammar of a flow.
const GRAMMAR: &str = "out,PROTOCOL,USER[/GROUP],[SOURCE,]ADDRESS:PORT[,INTERFACE] or \
                       in,PROTOCOL,[SOURCE,][ADDRESS:]PORT[,INTERFACE]";

/// A description of the first packet of a connection or exchange; optional parts may be missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The user of the sending process; None if the packet arrives.
    pub user: Option<Id>,
    pub group: Option<Id>,
    pub protocol: Protocol,
    pub source: Option<IpAddr>,
    pub destination: Option<IpAddr>,
    pub port: u16,
    pub interface: Option<String>,
}

impl FromStr for Flow {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let fields: Vec<_> = text.split(',').map(str::trim).collect();
        if let Some(protocol) = fields.get(1)
            && named(&Protocol::ALL, protocol).is_none()
        {
            return Err(problem("the protocol of --explain", protocol, "tcp or udp"));
        }
        parse(&fields).ok_or_else(|| problem("--explain", text, GRAMMAR))
    }
}

fn problem(subject: &str, found: &str, expected: &'static str) -> Problem {
    Problem::value(Code::ArgumentInvalid, subject, found, expected)
}

/// Parses the fields of a flow. Returns None if one of them does not follow the grammar.
fn parse(fields: &[&str]) -> Option<Flow> {
    let [direction @ ("out" | "in"), protocol, fields @ ..] = fields else {
        return None;
    };
    let is_sent = *direction == "out";
    let (user, group, fields) = match fields {
        [sender, fields @ ..] if is_sent => {
            let (user, group) = user_and_group(sender)?;
            (Some(user), group, fields)
        }
        fields => (None, None, fields),
    };
    let source: Option<IpAddr> = fields.first().and_then(|first| first.parse().ok());
    let (target, interface) = match &fields[usize::from(source.is_some())..] {
        [target] => (target, None),
        [target, interface] => (target, Some((*interface).to_owned())),
        _ => return None,
    };
    let (destination, port) = match (target.parse::<SocketAddr>(), target.parse::<u16>()) {
        (Ok(address), _) => (Some(address.ip()), address.port()),
        // A packet that arrives needs a port only.
        (_, Ok(port)) if !is_sent => (None, port),
        _ => return None,
    };
    // A packet does not arrive over lo before it was sent.
    let is_interface = interface.as_deref().is_none_or(|name: &str| {
        !name.is_empty() && config::is_interface(name) && (is_sent || name != LOOPBACK)
    });
    let is_one_family = source.zip(destination).is_none_or(|(a, b)| a.is_ipv4() == b.is_ipv4());
    if port == 0 || !is_interface || !is_one_family {
        return None;
    }
    let protocol = named(&Protocol::ALL, protocol)?;
    Some(Flow { user, group, protocol, source, destination, port, interface })
}

/// Parses `USER` or `USER/GROUP`.
fn user_and_group(text: &str) -> Option<(Id, Option<Id>)> {
    Some(match text.split_once('/') {
        Some((user, group)) => (account(user)?, Some(account(group)?)),
        None => (account(text)?, None),
    })
}

/// Parses a single user or group.
fn account(text: &str) -> Option<Id> {
    config::id(text).filter(|id| match id {
        Id::Numbers(numbers) => numbers.start() == numbers.end(),
        Id::Name(name) => !name.is_empty(),
    })
}

/// Describes where a packet ends, and because of which rules.
pub fn explain(packet: &Packet, trace: &Trace<'_>, config: &Config) -> String {
    let listener = match trace.decision {
        Decision::Redirected(port) | Decision::Tproxied(port) => match port {
            DNS_PORT => ", the agent's for DNS",
            _ if port == config.outbound_port => ", Envoy's for outbound connections",
            _ if port == config.inbound_port => ", Envoy's for inbound connections",
            _ => "",
        },
        Decision::Untouched => ", not to Envoy",
        Decision::Dropped | Decision::Rejected => "",
    };
    let mut text = format!("{packet} {}{listener}\n", trace.decision);
    for (chain, entry) in &trace.rules {
        text += &format!("  {}\n", appended(*chain, entry));
    }
    if trace.rules.is_empty() {
        text += "  no rule matches\n";
    }
    text
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.protocol.name().to_uppercase())?;
        if let Some(Sender { user, group }) = &self.sender {
            write!(f, " from user {user}, group {group}")?;
        }
        match (&self.sender, self.source.ip()) {
            (_, source) if source.is_unspecified() => {}
            (Some(_), source) => write!(f, " at {source}")?,
            (None, source) => write!(f, " from {source}")?,
        }
        write!(f, " to {} over {}", self.destination, self.interface)
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redirected(port) => write!(f, "is redirected to port {port}"),
            Self::Tproxied(port) => write!(f, "passes unchanged to port {port}"),
            Self::Untouched => f.write_str("goes to its destination"),
            Self::Dropped => f.write_str("is dropped"),
            Self::Rejected => f.write_str("is rejected with a TCP reset"),
        }
    }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
