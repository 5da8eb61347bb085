//! `--explain`: completes a flow by what this machine says, and sends it through the rules.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use if_addrs::Interface;

use super::machine::{self, accounts, field, numbered};
use crate::address::Cidr;
use crate::capture::config::Config;
use crate::capture::explain::{self, Flow, Sender};
use crate::capture::layout::Layout;
use crate::capture::nftables;
use crate::capture::packet::{Direction, Packet, simulate};
use crate::capture::rules::{Id, Rules};
use crate::lifecycle::BoxError;

/// The interface of other machines, unless the flow names one.
const INTERFACE: &str = "eth0";

/// Says what the rules of these arguments do with a flow.
pub(super) async fn explain(
    flow: &Flow,
    config: &Config,
    is_native: bool,
) -> Result<String, BoxError> {
    let packet = packet(flow, &machine::interfaces()?).await;
    let rules = Rules::new(config);
    let family = Cidr::from(packet.destination.ip()).family();
    let layout = match is_native {
        true => nftables::wanted(&rules, family),
        false => Layout::new(&rules, family),
    };
    let trace = simulate(&layout, &packet);
    Ok(explain::explain(&packet, &trace, config))
}

async fn packet(flow: &Flow, interfaces: &[Interface]) -> Packet {
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
        direction: match &flow.sender {
            Some(sender) => direction(sender).await,
            None => Direction::In,
        },
        protocol: flow.protocol,
        source: SocketAddr::new(flow.source.unwrap_or(unspecified), 0),
        destination: SocketAddr::new(destination, flow.port),
        interface: flow.interface.as_deref().unwrap_or(interface).to_owned(),
    }
}

/// Without a group, that of the user in `/etc/passwd`, or else that of the same number or name.
async fn direction(sender: &Sender) -> Direction {
    let user = numbered("passwd", sender.user.clone()).await;
    let primary = || match &user {
        Id::Numbers(_) => field(&accounts("passwd"), 2, &user.to_string(), 3).map(Id::from),
        Id::Name(_) => None,
    };
    let group = sender.group.clone().or_else(primary);
    let group = group.unwrap_or_else(|| sender.user.clone());
    let group = numbered("group", group).await;
    Direction::Out { user, group }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
