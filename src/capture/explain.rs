//! Parses flows as `--explain` spells them, and describes in words what the rules do with them.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use super::config::{self, Config};
use super::iptables::appended;
use super::packet::{Decision, LOOPBACK, Packet, Sender, Trace};
use super::rules::{DNS_PORT, Id, Protocol, named};
use crate::problem::{Problem, codes};

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
        let [direction, protocol, fields @ ..] = fields.as_slice() else {
            return Err(problem("--explain", text, GRAMMAR));
        };
        let is_sent = match *direction {
            "out" => true,
            "in" => false,
            other => return Err(problem("the direction of --explain", other, "out or in")),
        };
        let protocol = named(&Protocol::ALL, protocol)
            .ok_or_else(|| problem("the protocol of --explain", protocol, "tcp or udp"))?;
        let ((user, group), fields) = match fields {
            [user, fields @ ..] if is_sent => (user_and_group(user)?, fields),
            fields => ((None, None), fields),
        };
        let source: Option<IpAddr> = fields.first().and_then(|first| first.parse().ok());
        let (target, interface) = match &fields[usize::from(source.is_some())..] {
            [target] => (target, None),
            [target, interface] => (target, Some(self::interface(interface, is_sent)?)),
            _ => return Err(problem("--explain", text, GRAMMAR)),
        };
        let (destination, port) = destination(target, is_sent)?;
        if let (Some(from), Some(to)) = (source, destination)
            && from.is_ipv4() != to.is_ipv4()
        {
            let expected = "an address of the same family as the destination";
            return Err(problem("the source of --explain", fields[0], expected));
        }
        Ok(Self {
            user,
            group,
            protocol,
            source,
            destination,
            port,
            interface,
        })
    }
}

fn problem(subject: &str, found: &str, expected: &'static str) -> Problem {
    Problem::value(codes::ARGUMENT_INVALID, subject, found, expected)
}

/// Parses `USER` or `USER/GROUP`.
fn user_and_group(text: &str) -> Result<(Option<Id>, Option<Id>), Problem> {
    let (user, group) = match text.split_once('/') {
        Some((user, group)) => (user, Some(account(group)?)),
        None => (text, None),
    };
    Ok((Some(account(user)?), group))
}

/// Parses a single user or group.
fn account(text: &str) -> Result<Id, Problem> {
    match config::id(text) {
        Some(Id::Numbers(numbers)) if numbers.start() == numbers.end() => Ok(Id::Numbers(numbers)),
        Some(Id::Name(name)) if !name.is_empty() => Ok(Id::Name(name)),
        _ => {
            let expected = "a number from 0 to 4294967294 or a name, in USER or USER/GROUP";
            Err(problem("the user of --explain", text, expected))
        }
    }
}

fn interface(text: &str, is_sent: bool) -> Result<String, Problem> {
    if !text.is_empty() && config::is_interface(text) && (is_sent || text != LOOPBACK) {
        return Ok(text.to_owned());
    }
    let expected =
        "an interface, such as eth0, and with `in` not lo, because what arrives there was sent";
    Err(problem("the interface of --explain", text, expected))
}

/// Parses a destination. A packet that arrives needs a port only.
fn destination(text: &str, is_sent: bool) -> Result<(Option<IpAddr>, u16), Problem> {
    match (text.parse::<u16>(), text.parse::<SocketAddr>()) {
        (Ok(port), _) if !is_sent && port != 0 => Ok((None, port)),
        (_, Ok(address)) if address.port() != 0 => Ok((Some(address.ip()), address.port())),
        _ => {
            let expected =
                "ADDRESS:PORT, such as 10.0.0.5:443 or [2001:db8::5]:443, or with `in` a port";
            Err(problem("the destination of --explain", text, expected))
        }
    }
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
