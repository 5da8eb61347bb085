//! `--explain`: completes a flow by what this machine says, and sends it through the rules.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use if_addrs::Interface;

use super::machine::{self, accounts, entry};
use crate::address::Cidr;
use crate::capture::config::Config;
use crate::capture::explain::{self, Flow, Sender};
use crate::capture::layout::Layout;
use crate::capture::nftables;
use crate::capture::packet::{Account, Direction, Packet, State, simulate};
use crate::capture::rules::Rules;
use crate::lifecycle::BoxError;

/// The interface of other machines, unless the flow names one.
const INTERFACE: &str = "eth0";

/// Says what the rules of these arguments do with a flow.
pub(super) fn explain(flow: &Flow, config: &Config, is_native: bool) -> Result<String, BoxError> {
    let packet = packet(flow, &machine::interfaces()?);
    let rules = Rules::new(config);
    let family = Cidr::from(packet.destination.ip()).family();
    let layout = match is_native {
        true => nftables::wanted(&rules).of(family).clone(),
        false => Layout::new(&rules, family),
    };
    let trace = simulate(&layout, &packet);
    Ok(explain::explain(&packet, &trace, config))
}

fn packet(flow: &Flow, interfaces: &[Interface]) -> Packet {
    let own: Vec<_> = interfaces.iter().map(Interface::ip).collect();
    let unspecified = match flow.destination.or(flow.source) {
        Some(IpAddr::V6(_)) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::from(Ipv4Addr::UNSPECIFIED),
    };
    let destination = flow.destination.unwrap_or_else(|| {
        let is_alike = |ip: &&IpAddr| ip.is_ipv4() == unspecified.is_ipv4() && !ip.is_loopback();
        own.iter().find(is_alike).copied().unwrap_or(unspecified)
    });
    let is_here = destination.is_loopback() || own.contains(&destination);
    let interface = match flow.sender.is_some() && is_here {
        true => "lo",
        false => INTERFACE,
    };
    Packet {
        direction: flow.sender.as_ref().map_or(Direction::In, direction),
        protocol: flow.protocol,
        source: SocketAddr::new(flow.source.unwrap_or(unspecified), 0),
        destination: SocketAddr::new(destination, flow.port),
        interface: flow.interface.as_deref().unwrap_or(interface).to_owned(),
        state: State::New,
        mark: 0,
        connection_mark: 0,
    }
}

/// Without a group, that of the user in `/etc/passwd`, or else that of the same number or name.
fn direction(sender: &Sender) -> Direction {
    let users = accounts(machine::PASSWD);
    let groups = accounts(machine::GROUP);
    let primary = entry(&sender.user, &users).and_then(|fields| fields.get(3)?.parse().ok());
    let primary = primary.map(|number| Account {
        number: Some(number),
        name: None,
    });
    let group = sender.group.clone().or(primary);
    Direction::Out {
        user: complete(sender.user.clone(), &users),
        group: complete(group.unwrap_or_else(|| sender.user.clone()), &groups),
    }
}

/// Adds the name or number that a file such as `/etc/passwd` has.
fn complete(account: Account, accounts: &str) -> Account {
    let Some(fields) = entry(&account, accounts) else {
        return account;
    };
    Account {
        number: account.number.or_else(|| fields[2].parse().ok()),
        name: account.name.or_else(|| Some(fields[0].to_owned())),
    }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
