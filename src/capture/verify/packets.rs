//! Packets that take each way through rules: made of the values that the rules name, and of values beside
//! them.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::address::Cidr;
use crate::capture::layout::Layout;
use crate::capture::packet::{
    Account, Direction, LOOPBACK, Packet, State, Trace, is_named, simulate,
};
use crate::capture::rules::{Criterion, Family, Id, Match, Owner, Protocol};

/// Packets that are simulated, at most: about a second for the longest rules.
const MAX_PACKETS: usize = 50_000;

/// A packet for each way through both layouts. The search begins with the first packet of a usual
/// connection in each direction. Beside each packet that takes a new way, it tries the packets for which
/// all matches of a rule hold, and those for which all but one do.
pub(in crate::capture) fn ways<'a>(
    layouts: [&'a Layout; 2],
    family: Family,
) -> Vec<(Packet, Trace<'a>, Trace<'a>)> {
    let rules: HashSet<_> = layouts.iter().flat_map(|layout| layout.matches()).collect();
    let mut rules: Vec<_> = rules.into_iter().collect();
    rules.sort_by_cached_key(|matches| format!("{matches:?}"));
    let mut queue = VecDeque::from(usual(family));
    let (mut known, mut found) = (HashSet::new(), Vec::new());
    let mut left = MAX_PACKETS;
    while let Some(packet) = queue.pop_front() {
        let [first, second] = layouts.map(|layout| simulate(layout, &packet));
        if !known.insert((first.rules.clone(), second.rules.clone())) {
            continue;
        }
        // What arrives over lo was sent.
        let is_possible =
            |packet: &Packet| packet.direction != Direction::In || packet.interface != LOOPBACK;
        let from = &packet;
        let beside = rules
            .iter()
            .flat_map(|matches| (0..=matches.len()).map(move |but| changed(from, matches, but)));
        let before = queue.len();
        queue.extend(beside.filter(is_possible).take(left));
        left -= queue.len() - before;
        found.push((packet, first, second));
    }
    found
}

/// First packets of connections, which are sent or arrive, with values that hardly any rule names.
fn usual(family: Family) -> [Packet; 2] {
    let addresses: [IpAddr; 2] = match family {
        Family::V4 => [[203, 0, 113, 7].into(), [198, 51, 100, 7].into()],
        Family::V6 => [8, 7].map(|net| Ipv6Addr::new(0x2001, 0xdb8, net, 0, 0, 0, 0, 7).into()),
    };
    let account = || Account {
        number: Some(54321),
        name: None,
    };
    let sent = Direction::Out {
        user: account(),
        group: account(),
    };
    [sent, Direction::In].map(|direction| Packet {
        direction,
        protocol: Protocol::Tcp,
        source: SocketAddr::new(addresses[0], 40000),
        destination: SocketAddr::new(addresses[1], 8080),
        interface: "eth0".to_owned(),
        state: State::New,
        mark: 0,
        connection_mark: 0,
    })
}

/// The packet with values for which the matches hold, but the one of this number.
fn changed(packet: &Packet, matches: &[Match], but: usize) -> Packet {
    let mut packet = packet.clone();
    for (at, each) in matches.iter().enumerate() {
        let (Match::Is(criterion) | Match::Not(criterion)) = each;
        let holds = matches!(each, Match::Is(_)) == (at != but);
        if packet.fits(criterion) != holds {
            set(&mut packet, criterion, holds);
        }
    }
    packet
}

/// Gives the packet the first value for which the criterion holds, or the first one behind those.
fn set(packet: &mut Packet, criterion: &Criterion, holds: bool) {
    let mark = |mark: u32| if holds { mark } else { u32::from(mark == 0) };
    let state = |state| if holds { state } else { State::New };
    match criterion {
        Criterion::InInterface(name) | Criterion::OutInterface(name) => {
            packet.interface = match (holds, is_named("eth0", name)) {
                (true, _) => name.replace('+', "0"),
                (false, true) => "other0".to_owned(),
                (false, false) => "eth0".to_owned(),
            }
        }
        Criterion::Source(range) => packet.source.set_ip(address(range, holds)),
        Criterion::Destination(range) => packet.destination.set_ip(address(range, holds)),
        Criterion::Protocol(protocol) => {
            packet.protocol = match protocol {
                _ if holds => *protocol,
                Protocol::Tcp => Protocol::Udp,
                Protocol::Udp => Protocol::Tcp,
            }
        }
        Criterion::SourcePort(port) => {
            let other = port.wrapping_add(1);
            packet.source.set_port(if holds { *port } else { other });
        }
        Criterion::DestinationPort(all) => {
            let is_in = |port: &u16| all.iter().any(|ports| ports.contains(port));
            let mut behind = all.iter().map(|ports| ports.end().wrapping_add(1));
            let port = match holds {
                true => all.first().map(|ports| *ports.start()),
                false => behind.find(|port| !is_in(port)),
            };
            packet.destination.set_port(port.unwrap_or_default());
        }
        Criterion::Owner(owner) => {
            if let Direction::Out { user, group } = &mut packet.direction {
                match owner {
                    Owner::User(id) => *user = account(id, holds),
                    Owner::Group(id) => *group = account(id, holds),
                }
            }
        }
        Criterion::StateInvalid => packet.state = state(State::Invalid),
        Criterion::StateRelatedOrEstablished => packet.state = state(State::Established),
        Criterion::Mark(value) => packet.mark = mark(*value),
        Criterion::ConnectionMark(value) => packet.connection_mark = mark(*value),
    }
}

/// The first address of a range, or the first one behind it.
fn address(range: &Cidr, is_in: bool) -> IpAddr {
    let first = range.masked().address;
    match first {
        _ if is_in => first,
        IpAddr::V4(v4) => {
            let size = 1_u32.checked_shl(32 - u32::from(range.prefix));
            Ipv4Addr::from_bits(v4.to_bits().wrapping_add(size.unwrap_or_default())).into()
        }
        IpAddr::V6(v6) => {
            let size = 1_u128.checked_shl(128 - u32::from(range.prefix));
            Ipv6Addr::from_bits(v6.to_bits().wrapping_add(size.unwrap_or_default())).into()
        }
    }
}

fn account(id: &Id, is_it: bool) -> Account {
    let (number, name) = match id {
        Id::Numbers(numbers) if is_it => (Some(*numbers.start()), None),
        Id::Numbers(numbers) => (Some(numbers.end().wrapping_add(1)), None),
        Id::Name(name) => (None, is_it.then(|| name.clone())),
    };
    Account { number, name }
}
