//! Simulates how the kernel sends the first packet of a connection through the rules of one address family:
//! [`simulate`] returns where the packet ends, and the rules that matched.
//!
//! A packet that is sent passes the tables of OUTPUT and, if it stays on the machine, then the tables of
//! PREROUTING as a packet that arrived over `lo`. Rules that are not part of traffic capture never match
//! here. The simulation assumes that Envoy listens, so packets that TPROXY hands over have a socket.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow::{self, Break, Continue};

use super::layout::{Entry, Layout};
use super::rules::{Chain, Criterion, Id, Match, Protocol, Table, Verdict};

pub(super) const LOOPBACK: &str = "lo";
/// The tables in the order in which a packet passes them.
const TABLES: [Table; 4] = [Table::Raw, Table::Mangle, Table::Nat, Table::Filter];
/// Limit of nested jumps. Istio's chains stay below it, and the kernel does not allow loops.
const MAX_JUMPS: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The sending process; None if the packet arrives.
    pub sender: Option<Sender>,
    pub protocol: Protocol,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// The interface by which it leaves or arrives.
    pub interface: String,
}

/// A single user and group, given by number where it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sender {
    pub user: Id,
    pub group: Id,
}

/// The place where a packet ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The packet reaches this port of the machine itself, with a new destination.
    Redirected(u16),
    /// The packet reaches this port of the machine itself, with its destination unchanged.
    Tproxied(u16),
    /// The packet reaches its destination.
    Untouched,
    Dropped,
    Rejected,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace<'a> {
    pub decision: Decision,
    /// Rules that matched, without jumps to chains in which no rule matched.
    pub rules: Vec<((Table, Chain), &'a Entry)>,
}

/// Sends a packet through the rules.
pub fn simulate<'a>(layout: &'a Layout, packet: &Packet) -> Trace<'a> {
    let mut walk = Walk {
        layout,
        packet: packet.clone(),
        hook: match packet.sender {
            Some(_) => Chain::Output,
            None => Chain::Prerouting,
        },
        mark: 0,
        is_translated: false,
        trace: Trace { decision: Decision::Untouched, rules: Vec::new() },
    };
    walk.pass_tables();
    let is_local = packet.interface == LOOPBACK || walk.packet.destination != packet.destination;
    if walk.hook == Chain::Output && is_local && !walk.is_refused() {
        walk.hook = Chain::Prerouting;
        walk.packet.interface = LOOPBACK.to_owned();
        walk.pass_tables();
    }
    walk.trace
}

struct Walk<'a> {
    layout: &'a Layout,
    /// The packet with its current destination.
    packet: Packet,
    mark: u32,
    /// The kernel's chain that the packet passes, OUTPUT or PREROUTING.
    hook: Chain,
    /// True once conntrack knows the destination: from then on nat rules see no packet of the connection.
    is_translated: bool,
    trace: Trace<'a>,
}

impl<'a> Walk<'a> {
    /// Sends the packet through the tables of the hook, until one refuses it.
    fn pass_tables(&mut self) {
        for table in TABLES {
            if table == Table::Nat && std::mem::replace(&mut self.is_translated, true) {
                continue;
            }
            // A verdict that ends the walk through one table does not keep the packet from the next table.
            let _ = self.pass_chain(table, self.hook, 0);
            if self.is_refused() {
                return;
            }
        }
    }

    fn is_refused(&self) -> bool {
        matches!(self.trace.decision, Decision::Dropped | Decision::Rejected)
    }

    /// Sends the packet through a chain. Breaks if the packet leaves the table.
    fn pass_chain(&mut self, table: Table, chain: Chain, depth: usize) -> ControlFlow<()> {
        for entry in self.layout.entries((table, chain)) {
            let Entry::Rule { matches, verdict } = entry else {
                continue;
            };
            if !matches.iter().all(|each| self.holds(each)) {
                continue;
            }
            let count = self.trace.rules.len();
            self.trace.rules.push(((table, chain), entry));
            match *verdict {
                Verdict::Return => return Continue(()),
                Verdict::Jump(target) if depth < MAX_JUMPS => {
                    self.pass_chain(table, target, depth + 1)?;
                    if self.trace.rules.len() == count + 1 {
                        self.trace.rules.pop();
                    }
                }
                Verdict::SetMark(mark) => self.mark = mark,
                // Marks of connections and zones are for the packets that follow.
                Verdict::Jump(_) | Verdict::SaveMark | Verdict::RestoreMark | Verdict::Zone(_) => {}
                Verdict::Accept => return Break(()),
                Verdict::Drop => return self.end(Decision::Dropped),
                Verdict::Reject => return self.end(Decision::Rejected),
                Verdict::Redirect(port) => return self.redirect(port),
                Verdict::Tproxy { port, mark } => {
                    self.mark = mark;
                    return self.end(Decision::Tproxied(port));
                }
            }
        }
        Continue(())
    }

    /// Decides where the packet ends. It leaves the table.
    fn end(&mut self, decision: Decision) -> ControlFlow<()> {
        self.trace.decision = decision;
        Break(())
    }

    /// Redirects the packet to a loopback address. A packet that arrived really goes to the address of its
    /// interface, but no later rule looks at that.
    fn redirect(&mut self, port: u16) -> ControlFlow<()> {
        let loopback = match self.packet.destination {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        self.packet.destination = SocketAddr::new(loopback, port);
        // A socket that TPROXY has assigned stays.
        match self.trace.decision {
            Decision::Untouched => self.end(Decision::Redirected(port)),
            _ => Break(()),
        }
    }

    /// Returns true if the packet meets a match.
    fn holds(&self, each: &Match) -> bool {
        let (Match::Is(criterion) | Match::Not(criterion)) = each;
        let packet = &self.packet;
        let is_output = self.hook == Chain::Output;
        let sender = if is_output { packet.sender.as_ref() } else { None };
        let is_met = match criterion {
            Criterion::InInterface(name) => !is_output && is_named(&packet.interface, name),
            Criterion::OutInterface(name) => is_output && is_named(&packet.interface, name),
            Criterion::Source(range) => range.contains(packet.source.ip()),
            Criterion::Destination(range) => range.contains(packet.destination.ip()),
            Criterion::Protocol(protocol) => packet.protocol == *protocol,
            Criterion::SourcePort(port) => packet.source.port() == *port,
            Criterion::DestinationPort(ports) => {
                ports.iter().any(|ports| ports.contains(&packet.destination.port()))
            }
            Criterion::User(id) => sender.is_some_and(|it| id.includes(&it.user)),
            Criterion::Group(id) => sender.is_some_and(|it| id.includes(&it.group)),
            Criterion::Mark(mark) => self.mark == *mark,
            Criterion::StateInvalid
            | Criterion::StateRelatedOrEstablished
            | Criterion::ConnectionMark(_) => false,
        };
        is_met == matches!(each, Match::Is(_))
    }
}

/// Returns true if an interface has this name. A name that ends in `+` is a prefix.
fn is_named(interface: &str, name: &str) -> bool {
    match name.strip_suffix('+') {
        Some(prefix) => interface.starts_with(prefix),
        None => interface == name,
    }
}

#[cfg(test)]
#[path = "packet_tests.rs"]
mod tests;
