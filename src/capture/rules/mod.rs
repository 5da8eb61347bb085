//! The rules of traffic capture as types: one ordered list for both address families, independent of
//! the program that loads them.

mod build;

pub use super::config::{Id, Ports};
use crate::net::address::Cidr;

/// The agent's DNS port.
pub(super) const DNS_PORT: u16 = 15053;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    V4,
    V6,
}

impl Cidr {
    pub fn family(&self) -> Family {
        if self.address.is_ipv4() { Family::V4 } else { Family::V6 }
    }
}

/// Tables, in the order in which they are rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    Filter,
    Mangle,
    Nat,
    Raw,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Chain {
    /// The kernel's own chains.
    Prerouting,
    Output,
    /// Traffic to the pod.
    Inbound,
    /// Sends traffic to Envoy's port for inbound traffic.
    InRedirect,
    /// Traffic from the pod.
    IstioOutput,
    /// Sends traffic to Envoy's port for outbound traffic.
    Redirect,
    /// DNS from the pod.
    OutputDns,
    /// Marks packets of connections that a socket here already has (TPROXY).
    Divert,
    /// Hands packets to Envoy with their destination unchanged (TPROXY).
    Tproxy,
    /// Drops packets that conntrack calls invalid.
    Drop,
    /// Keeps applications from Envoy's admin port.
    ProtectAdmin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Criterion {
    InInterface(String),
    OutInterface(String),
    Source(Cidr),
    Destination(Cidr),
    Protocol(Protocol),
    SourcePort(u16),
    /// Any of these ports.
    DestinationPort(Vec<Ports>),
    User(Id),
    Group(Id),
    StateInvalid,
    StateRelatedOrEstablished,
    Mark(u32),
    ConnectionMark(u32),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Match {
    Is(Criterion),
    Not(Criterion),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    Return,
    Accept,
    Drop,
    /// Answers TCP with a reset.
    Reject,
    Jump(Chain),
    /// Redirects to this port of the machine itself.
    Redirect(u16),
    Tproxy {
        port: u16,
        mark: u32,
    },
    SetMark(u32),
    /// Copies the packet's mark to its connection.
    SaveMark,
    /// Copies the connection's mark to the packet.
    RestoreMark,
    /// Assigns the conntrack zone; the first assignment counts.
    Zone(u16),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// None is both.
    pub family: Option<Family>,
    pub table: Table,
    pub chain: Chain,
    /// The number of the rule that it is inserted before, counted from 1. None appends it.
    pub position: Option<usize>,
    /// The conditions, all of which must hold, in the order of the rule's text.
    pub matches: Vec<Match>,
    pub verdict: Verdict,
}

/// The rules in the order in which they are added to their chains. There are always rules for IPv4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    rules: Vec<Rule>,
    pub(super) has_v6: bool,
}

impl Rules {
    /// Iterates over the rules of a family, in the order in which they are added.
    pub fn for_family(&self, family: Family) -> impl Iterator<Item = &Rule> {
        let has_rules = family == Family::V4 || self.has_v6;
        self.rules.iter().filter(move |rule| has_rules && rule.is_for(family))
    }

    /// Iterates over the rules of all families that have rules, in the order in which they are added.
    pub fn all(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(|rule: &&Rule| self.has_v6 || rule.family != Some(Family::V6))
    }
}

impl Rule {
    pub(super) fn is_for(&self, family: Family) -> bool {
        self.family.is_none_or(|only| only == family)
    }
}

/// Looks up a value by its name.
pub(super) fn named<T: Copy>(all: &[(T, &str)], name: &str) -> Option<T> {
    all.iter().find(|(_, found)| *found == name).map(|(value, _)| *value)
}

impl Protocol {
    /// The variants in their order, with the names that iptables and nftables have for them.
    pub const ALL: [(Self, &str); 2] = [(Self::Tcp, "tcp"), (Self::Udp, "udp")];

    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

impl Table {
    /// The variants in their order, with the names that iptables has for them.
    pub const ALL: [(Self, &str); 4] = [
        (Self::Filter, "filter"),
        (Self::Mangle, "mangle"),
        (Self::Nat, "nat"),
        (Self::Raw, "raw"),
    ];

    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

impl Chain {
    /// The variants in their order, with the names that iptables has for them.
    pub const ALL: [(Self, &str); 11] = [
        (Self::Prerouting, "PREROUTING"),
        (Self::Output, "OUTPUT"),
        (Self::Inbound, "ISTIO_INBOUND"),
        (Self::InRedirect, "ISTIO_IN_REDIRECT"),
        (Self::IstioOutput, "ISTIO_OUTPUT"),
        (Self::Redirect, "ISTIO_REDIRECT"),
        (Self::OutputDns, "ISTIO_OUTPUT_DNS"),
        (Self::Divert, "ISTIO_DIVERT"),
        (Self::Tproxy, "ISTIO_TPROXY"),
        (Self::Drop, "ISTIO_DROP"),
        (Self::ProtectAdmin, "ISTIO_PROTECT_ADMIN"),
    ];

    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// Returns true for the kernel's own chains.
    pub fn is_builtin(self) -> bool {
        matches!(self, Self::Prerouting | Self::Output)
    }
}
