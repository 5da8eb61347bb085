//! Packets that rules may tell apart: made of the values that the rules name, and of others.

use std::net::{IpAddr, SocketAddr};

use fastrand::Rng;

use crate::capture::packet::{Account, Direction, LOOPBACK, Packet, State};
use crate::capture::rules::{Criterion, Family, Id, Match, Owner, Protocol};

/// Values of a kind, at most.
const MOST_VALUES: usize = 64;

/// New connections have the most ways.
const STATES: [State; 4] = [State::New, State::New, State::Established, State::Invalid];

/// Values to make packets of.
#[derive(Clone, Debug)]
pub struct Values {
    addresses: Vec<IpAddr>,
    interfaces: Vec<String>,
    ports: Vec<u16>,
    users: Vec<Account>,
    groups: Vec<Account>,
    marks: Vec<u32>,
}

impl Values {
    /// Those of some rules of a family, and some that rules hardly name.
    pub fn new<'a>(rules: impl Iterator<Item = &'a [Match]>, family: Family) -> Self {
        let address = |v4: [u8; 4], v6: [u16; 8]| match family {
            Family::V4 => IpAddr::from(v4),
            Family::V6 => IpAddr::from(v6),
        };
        let user = Account {
            number: Some(54321),
            name: None,
        };
        let mut values = Self {
            addresses: vec![
                address([198, 51, 100, 7], [0x2001, 0xdb8, 7, 0, 0, 0, 0, 7]),
                address([127, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1]),
            ],
            interfaces: vec!["eth0".to_owned(), LOOPBACK.to_owned()],
            ports: vec![8080, 53],
            users: vec![user.clone()],
            groups: vec![user],
            marks: vec![0],
        };
        for each in rules.flatten() {
            let (Match::Is(criterion) | Match::Not(criterion)) = each;
            values.add(criterion);
        }
        values
    }

    fn add(&mut self, criterion: &Criterion) {
        match criterion {
            Criterion::InInterface(name) | Criterion::OutInterface(name) => {
                push(&mut self.interfaces, interface(name));
            }
            Criterion::Source(range) | Criterion::Destination(range) => {
                push(&mut self.addresses, range.address);
            }
            Criterion::SourcePort(port) => push(&mut self.ports, *port),
            Criterion::DestinationPort(ports) => {
                for port in ports
                    .iter()
                    .flat_map(|ports| [*ports.start(), *ports.end()])
                {
                    push(&mut self.ports, port);
                }
            }
            Criterion::Owner(Owner::User(id)) => push(&mut self.users, account(id)),
            Criterion::Owner(Owner::Group(id)) => push(&mut self.groups, account(id)),
            Criterion::Mark(mark) | Criterion::ConnectionMark(mark) => {
                push(&mut self.marks, *mark);
            }
            Criterion::Protocol(_)
            | Criterion::StateInvalid
            | Criterion::StateRelatedOrEstablished => {}
        }
    }

    /// A packet of any of the values.
    pub fn draw(&self, rng: &mut Rng) -> Packet {
        let is_sent = rng.bool();
        self.draw_in(is_sent, rng)
    }

    /// A packet of which these matches hold, as far as one criterion does not exclude another.
    pub fn draw_for(&self, matches: &[Match], rng: &mut Rng) -> Packet {
        let mut sides = matches.iter().filter_map(|each| match each {
            Match::Is(Criterion::InInterface(name)) => Some(name == LOOPBACK),
            Match::Is(Criterion::OutInterface(_) | Criterion::Owner(_)) => Some(true),
            _ => None,
        });
        let is_sent = sides.next_back().unwrap_or_else(|| rng.bool());
        let mut packet = self.draw_in(is_sent, rng);
        for each in matches {
            if let Match::Is(criterion) = each {
                set(&mut packet, criterion);
            }
        }
        packet
    }

    fn draw_in(&self, is_sent: bool, rng: &mut Rng) -> Packet {
        let mut packet = Packet {
            direction: match is_sent {
                true => Direction::Out {
                    user: one(&self.users, rng),
                    group: one(&self.groups, rng),
                },
                false => Direction::In,
            },
            protocol: one(&[Protocol::Tcp, Protocol::Tcp, Protocol::Udp], rng),
            source: SocketAddr::new(one(&self.addresses, rng), one(&self.ports, rng)),
            destination: SocketAddr::new(one(&self.addresses, rng), one(&self.ports, rng)),
            interface: one(&self.interfaces, rng),
            state: one(&STATES, rng),
            mark: one(&self.marks, rng),
            connection_mark: one(&self.marks, rng),
        };
        // What arrives over lo was sent.
        if !is_sent && packet.interface == LOOPBACK {
            packet.interface.clone_from(&self.interfaces[0]);
        }
        packet
    }
}

fn set(packet: &mut Packet, criterion: &Criterion) {
    match criterion {
        Criterion::InInterface(name) | Criterion::OutInterface(name) => {
            packet.interface = interface(name);
        }
        Criterion::Source(range) => packet.source.set_ip(range.address),
        Criterion::Destination(range) => packet.destination.set_ip(range.address),
        Criterion::Protocol(protocol) => packet.protocol = *protocol,
        Criterion::SourcePort(port) => packet.source.set_port(*port),
        Criterion::DestinationPort(ports) => {
            let port = ports.first().map(|ports| *ports.start());
            packet.destination.set_port(port.unwrap_or_default());
        }
        Criterion::Owner(owner) => {
            if let Direction::Out { user, group } = &mut packet.direction {
                match owner {
                    Owner::User(id) => *user = account(id),
                    Owner::Group(id) => *group = account(id),
                }
            }
        }
        Criterion::StateInvalid => packet.state = State::Invalid,
        Criterion::StateRelatedOrEstablished => packet.state = State::Established,
        Criterion::Mark(mark) => packet.mark = *mark,
        Criterion::ConnectionMark(mark) => packet.connection_mark = *mark,
    }
}

/// An interface that has this name; `+` at its end stands for any further characters.
fn interface(name: &str) -> String {
    name.replace('+', "0")
}

fn account(id: &Id) -> Account {
    match id {
        Id::Numbers(numbers) => Account {
            number: Some(*numbers.start()),
            name: None,
        },
        Id::Name(name) => Account {
            number: None,
            name: Some(name.clone()),
        },
    }
}

fn push<T: PartialEq>(values: &mut Vec<T>, value: T) {
    if values.len() < MOST_VALUES && !values.contains(&value) {
        values.push(value);
    }
}

fn one<T: Clone>(values: &[T], rng: &mut Rng) -> T {
    values[rng.usize(..values.len())].clone()
}
