//! Implements `--explain`: completes a flow with the addresses, users and groups of this machine, and sends it
//! through the rules.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use if_addrs::Interface;

use super::machine::{self, accounts, field, numbered};
use crate::capture::config::Config;
use crate::capture::explain::{self, Flow};
use crate::capture::layout::Layout;
use crate::capture::packet::{Packet, Sender, simulate};
use crate::capture::rules::{Id, Rules};
use crate::net::address::Cidr;
use crate::runtime::lifecycle::BoxError;

/// Interface to other machines, unless the flow names one.
const INTERFACE: &str = "eth0";

/// Describes what the rules of these arguments do with a flow.
pub(super) async fn explain(flow: &Flow, config: &Config) -> Result<String, BoxError> {
    let packet = packet(flow, &machine::interfaces()?).await;
    let layout = Layout::new(&Rules::new(config), Cidr::single(packet.destination.ip()).family());
    Ok(explain::explain(&packet, &simulate(&layout, &packet), config))
}

/// Completes a flow. The destination defaults to an address of this machine.
async fn packet(flow: &Flow, interfaces: &[Interface]) -> Packet {
    let mut addresses = interfaces.iter().map(Interface::ip);
    let unspecified = match flow.destination.or(flow.source) {
        Some(IpAddr::V6(_)) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::from(Ipv4Addr::UNSPECIFIED),
    };
    let destination = flow.destination.unwrap_or_else(|| {
        addresses
            .clone()
            .find(|ip| ip.is_ipv4() == unspecified.is_ipv4() && !ip.is_loopback())
            .unwrap_or(unspecified)
    });
    let is_local = destination.is_loopback() || addresses.any(|ip| ip == destination);
    let interface = if flow.user.is_some() && is_local { "lo" } else { INTERFACE };
    Packet {
        sender: match &flow.user {
            Some(user) => Some(sender(user, flow.group.as_ref()).await),
            None => None,
        },
        protocol: flow.protocol,
        source: SocketAddr::new(flow.source.unwrap_or(unspecified), 0),
        destination: SocketAddr::new(destination, flow.port),
        interface: flow.interface.as_deref().unwrap_or(interface).to_owned(),
    }
}

/// Completes a sender. Its group defaults to the user's group in `/etc/passwd`, or else to the group with the
/// number or name of the user.
async fn sender(given: &Id, group: Option<&Id>) -> Sender {
    let user = numbered("passwd", given.clone()).await;
    let primary = match (&user, group) {
        (Id::Numbers(_), None) => field(&accounts("passwd"), 2, &user.to_string(), 3),
        _ => None,
    };
    let group = group.cloned().or(primary.map(Id::from)).unwrap_or_else(|| given.clone());
    Sender { user, group: numbered("group", group).await }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
