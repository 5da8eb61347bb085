//! Reads flows as `--explain` spells them, and says in words what the rules do with them.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use super::config::{self, Config};
use super::iptables::appended;
use super::packet::{Decision, Direction, LOOPBACK, Packet, Trace};
use super::rules::{DNS_PORT, Id, Protocol};
use crate::problem::{Problem, codes};

/// The fields of a flow.
pub const GRAMMAR: &str = "out,PROTOCOL,USER[/GROUP],[SOURCE,]ADDRESS:PORT[,INTERFACE] or \
                           in,PROTOCOL,[SOURCE,][ADDRESS:]PORT[,INTERFACE]";

/// The first packet of a connection or exchange, as far as it was described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Who sends it; None if it arrives.
    pub sender: Option<Sender>,
    pub protocol: Protocol,
    pub source: Option<IpAddr>,
    pub destination: Option<IpAddr>,
    pub port: u16,
    pub interface: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sender {
    pub user: Id,
    pub group: Option<Id>,
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
        let protocol = match *protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            other => return Err(problem("the protocol of --explain", other, "tcp or udp")),
        };
        let (sender, fields) = match fields {
            [user, fields @ ..] if is_sent => (Some(sender(user)?), fields),
            fields => (None, fields),
        };
        let source: Option<IpAddr> = fields.first().and_then(|first| first.parse().ok());
        let (target, interface) = match &fields[usize::from(source.is_some())..] {
            [target] => (target, None),
            [target, interface] => (target, Some(self::interface(interface, is_sent)?)),
            _ => return Err(problem("--explain", text, GRAMMAR)),
        };
        let (destination, port) = target_of(target, is_sent)?;
        if let (Some(from), Some(to)) = (source, destination)
            && from.is_ipv4() != to.is_ipv4()
        {
            let expected = format!("an address of the same family as {to}");
            return Err(problem(
                "the source of --explain",
                &from.to_string(),
                expected,
            ));
        }
        Ok(Self {
            sender,
            protocol,
            source,
            destination,
            port,
            interface,
        })
    }
}

fn problem(subject: &str, found: &str, expected: impl Into<Cow<'static, str>>) -> Problem {
    Problem::value(codes::ARGUMENT_INVALID, subject, found, expected)
}

fn sender(text: &str) -> Result<Sender, Problem> {
    let (user, group) = match text.split_once('/') {
        Some((user, group)) => (user, Some(account(group)?)),
        None => (text, None),
    };
    let user = account(user)?;
    Ok(Sender { user, group })
}

fn account(text: &str) -> Result<Id, Problem> {
    let is_single = |id: &Id| match id {
        Id::Numbers(numbers) => numbers.start() == numbers.end(),
        Id::Name(name) => !name.is_empty(),
    };
    let expected = "a number from 0 to 4294967294 or a name, in USER or USER/GROUP";
    let id = config::id(text).filter(is_single);
    id.ok_or_else(|| problem("the user of --explain", text, expected))
}

fn interface(text: &str, is_sent: bool) -> Result<String, Problem> {
    let expected = match is_sent {
        true => "the name of a network interface",
        false => "the name of a network interface but lo: what arrives there was sent (out)",
    };
    let is_name = !text.is_empty() && config::is_interface(text) && (is_sent || text != LOOPBACK);
    is_name
        .then(|| text.to_owned())
        .ok_or_else(|| problem("the interface of --explain", text, expected))
}

fn target_of(text: &str, is_sent: bool) -> Result<(Option<IpAddr>, u16), Problem> {
    let expected = match is_sent {
        true => "ADDRESS:PORT, such as 10.0.0.5:443 or [2001:db8::5]:443",
        false => "PORT or ADDRESS:PORT, such as 8080, 10.0.0.5:8080 or [2001:db8::5]:8080",
    };
    let port = text.parse().ok().filter(|_| !is_sent);
    let whole = || {
        text.parse()
            .ok()
            .map(|whole: SocketAddr| (Some(whole.ip()), whole.port()))
    };
    let target = port.map(|port| (None, port)).or_else(whole);
    let target = target.filter(|(_, port)| *port != 0);
    target.ok_or_else(|| problem("the destination of --explain", text, expected))
}

/// Says where a packet ends, and because of which rules.
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
    for (place, entry) in &trace.rules {
        text += &format!("  {}\n", appended(*place, entry));
    }
    if trace.rules.is_empty() {
        text += "  no rule matches\n";
    }
    text
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.protocol {
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
        })?;
        if let Direction::Out { user, group } = &self.direction {
            write!(f, " from user {user}, group {group}")?;
        }
        let source = self.source.ip();
        match (&self.direction, source.is_unspecified()) {
            (_, true) => {}
            (Direction::Out { .. }, _) => write!(f, " at {source}")?,
            (Direction::In, _) => write!(f, " from {source}")?,
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
