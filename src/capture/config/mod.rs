//! The configuration of traffic capture: texts of flags and variables become checked types.
//!
//! Every item ends up in the input of a program that runs as root, so each has to be exactly what it
//! claims to be. Items of lists may have blanks around them; empty items are left out.

pub(super) mod items;

use std::net::IpAddr;

use clap::Args;

use super::types::{Id, Owner, Ports};
use crate::address::Cidr;
use crate::problem::{Diagnostics, Problem};
use items::SettingsParser;

const PROXY_UID: &str = "1337";

/// The name of a setting with its text.
macro_rules! of {
    ($settings:ident.$name:ident) => {
        (stringify!($name), $settings.$name.as_str())
    };
}

/// Settings as texts; lists are separated by commas. They are flags of `istio-iptables`.
#[derive(Args, Clone, Debug)]
pub struct Settings {
    /// Port that outbound TCP connections are redirected to.
    #[arg(short = 'p', long, value_name = "PORT", default_value = "15001")]
    pub envoy_port: String,
    /// Port that inbound TCP connections are redirected to.
    #[arg(short = 'z', long, value_name = "PORT", default_value = "15006")]
    pub inbound_capture_port: String,
    /// Port of HBONE, which is not redirected.
    #[arg(short = 'e', long, value_name = "PORT", default_value = "15008")]
    pub inbound_tunnel_port: String,
    /// Users whose traffic is not captured; empty is that of --envoy-user, or else 1337.
    #[arg(short = 'u', long, value_name = "USERS", default_value_t)]
    pub proxy_uid: String,
    /// Groups whose traffic is not captured; empty is the value of --proxy-uid.
    #[arg(short = 'g', long, value_name = "GROUPS", default_value_t)]
    pub proxy_gid: String,
    /// How inbound connections reach Envoy: REDIRECT or TPROXY.
    #[arg(short = 'm', long, value_name = "MODE", default_value_t)]
    pub istio_inbound_interception_mode: String,
    /// Inbound ports to capture: a list, or * for all; empty is none.
    #[arg(short = 'b', long, value_name = "PORTS", default_value_t)]
    pub istio_inbound_ports: String,
    /// Inbound ports not to capture when all are.
    #[arg(short = 'd', long, value_name = "PORTS", default_value_t)]
    pub istio_local_exclude_ports: String,
    /// Network interfaces whose traffic is not captured.
    #[arg(short = 'c', long, value_name = "NAMES", default_value_t)]
    pub istio_exclude_interfaces: String,
    /// Outbound ranges to capture: a list, or * for all; empty is none.
    #[arg(short = 'i', long, value_name = "RANGES", default_value_t)]
    pub istio_service_cidr: String,
    /// Outbound ranges not to capture.
    #[arg(short = 'x', long, value_name = "RANGES", default_value_t)]
    pub istio_service_exclude_cidr: String,
    /// Outbound TCP ports to capture, whatever the address.
    #[arg(short = 'q', long, value_name = "PORTS", default_value_t)]
    pub istio_outbound_ports: String,
    /// Outbound ports not to capture.
    #[arg(short = 'o', long, value_name = "PORTS", default_value_t)]
    pub istio_local_outbound_ports_exclude: String,
    /// Interfaces of virtual machines, whose traffic to the pod is outbound.
    #[arg(short = 'k', long, value_name = "NAMES", default_value_t)]
    pub kube_virt_interfaces: String,
    /// Mark of inbound packets in mode TPROXY.
    #[arg(short = 't', long, value_name = "NUMBER", default_value = "1337")]
    pub istio_inbound_tproxy_mark: String,
    /// Routing table of marked packets in mode TPROXY.
    #[arg(short = 'r', long, value_name = "NUMBER", default_value = "133")]
    pub istio_inbound_tproxy_route_table: String,
    /// Captures DNS to the servers of /etc/resolv.conf.
    #[arg(long)]
    pub redirect_dns: bool,
    /// Captures DNS to any server, with --redirect-dns.
    #[arg(long)]
    pub capture_all_dns: bool,
    /// Drops packets that conntrack calls invalid.
    #[arg(long)]
    pub drop_invalid: bool,
    /// Lets only root and the users of --proxy-uid connect to Envoy's admin port over loopback.
    #[arg(long)]
    pub protect_admin: bool,
    /// Kind of iptables: legacy or nft; empty is detected.
    #[arg(long, value_name = "KIND", default_value_t)]
    pub force_iptables_binary: String,
    /// Loopback range of IPv4.
    #[arg(long, default_value = "127.0.0.1/32")]
    pub istio_outbound_ipv4_loopback_cidr: String,
    /// Groups whose outbound traffic is captured: a list, or * for all.
    #[arg(long, default_value = "*")]
    pub istio_outbound_owner_groups: String,
    /// Groups whose outbound traffic is not captured when that of all is.
    #[arg(long, default_value_t)]
    pub istio_outbound_owner_groups_exclude: String,
}

/// What the machine says.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// Whether there are rules for IPv6.
    pub has_v6: bool,
    /// The servers of `resolv.conf`.
    pub nameservers: Vec<IpAddr>,
    /// The number of Envoy's user, if that user exists.
    pub envoy_uid: Option<u32>,
}

/// How inbound connections reach Envoy. Outbound ones are always redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Redirect,
    /// Keeps the client's address.
    Tproxy,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InboundPorts {
    None,
    AllBut(Vec<Ports>),
    Only(Vec<Ports>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutboundRanges {
    All,
    Only(Vec<Cidr>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnerGroups {
    AllBut(Vec<Id>),
    Only(Vec<Id>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsCapture {
    /// Port 53 of any server.
    All,
    /// Port 53 of these servers; not empty.
    Servers(Vec<IpAddr>),
}

/// The kinds of iptables, which do not see each other's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Legacy,
    Nft,
}

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub has_v6: bool,
    pub mode: Mode,
    pub outbound_port: u16,
    pub inbound_port: u16,
    /// Port of HBONE, which REDIRECT leaves alone.
    pub tunnel_port: u16,
    pub uids: Vec<Id>,
    pub gids: Vec<Id>,
    pub inbound: InboundPorts,
    pub exclude_interfaces: Vec<String>,
    /// Interfaces of virtual machines, whose traffic to the pod is outbound.
    pub virtual_interfaces: Vec<String>,
    pub include_ranges: OutboundRanges,
    pub exclude_ranges: Vec<Cidr>,
    /// TCP ports captured whatever the address.
    pub include_outbound_ports: Vec<Ports>,
    pub exclude_outbound_ports: Vec<Ports>,
    pub owner_groups: OwnerGroups,
    pub dns: Option<DnsCapture>,
    pub drop_invalid: bool,
    /// Keeps applications from Envoy's admin port.
    pub protect_admin: bool,
    /// Loopback range of IPv4.
    pub loopback: Cidr,
    pub tproxy_mark: u32,
    pub tproxy_route_table: u32,
    /// The kind of iptables to use; None is detected.
    pub kind: Option<Kind>,
}

/// All problems of a configuration.
#[derive(Debug, thiserror::Error)]
#[error("traffic capture cannot be configured: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Invalid(pub Vec<Problem>);

impl Config {
    /// Reads the settings. Returns what is left out or taken for something else as well.
    pub fn check(settings: &Settings, host: &Host) -> Result<(Self, Vec<Problem>), Invalid> {
        let mut items = SettingsParser::default();
        let config = Self::read(settings, host, &mut items);
        let Diagnostics { problems, warnings } = items.0;
        if problems.is_empty() {
            Ok((config, warnings))
        } else {
            Err(Invalid(problems))
        }
    }

    /// The configuration; only of use if no problem was found.
    fn read(settings: &Settings, host: &Host, items: &mut SettingsParser) -> Self {
        let uid = match settings.proxy_uid.as_str() {
            "" => host
                .envoy_uid
                .map_or_else(|| PROXY_UID.to_owned(), |uid| uid.to_string()),
            given => given.to_owned(),
        };
        let gid = match settings.proxy_gid.as_str() {
            "" => &uid,
            given => given,
        };
        Self {
            has_v6: host.has_v6,
            mode: items.mode(of!(settings.istio_inbound_interception_mode)),
            outbound_port: items.number(of!(settings.envoy_port), u16::MAX),
            inbound_port: items.number(of!(settings.inbound_capture_port), u16::MAX),
            tunnel_port: items.number(of!(settings.inbound_tunnel_port), u16::MAX),
            uids: items.ids(("proxy_uid", &uid)),
            gids: items.ids(("proxy_gid", gid)),
            inbound: match settings.istio_inbound_ports.as_str() {
                "" => InboundPorts::None,
                "*" => InboundPorts::AllBut(items.ports(of!(settings.istio_local_exclude_ports))),
                _ => InboundPorts::Only(items.ports(of!(settings.istio_inbound_ports))),
            },
            exclude_interfaces: items.interfaces(of!(settings.istio_exclude_interfaces)),
            virtual_interfaces: items.interfaces(of!(settings.kube_virt_interfaces)),
            include_ranges: match settings.istio_service_cidr.as_str() {
                "*" => OutboundRanges::All,
                _ => OutboundRanges::Only(items.ranges(of!(settings.istio_service_cidr))),
            },
            exclude_ranges: items.ranges(of!(settings.istio_service_exclude_cidr)),
            include_outbound_ports: items.ports(of!(settings.istio_outbound_ports)),
            exclude_outbound_ports: items.ports(of!(settings.istio_local_outbound_ports_exclude)),
            owner_groups: match settings.istio_outbound_owner_groups.as_str() {
                "*" => {
                    let excluded = of!(settings.istio_outbound_owner_groups_exclude);
                    OwnerGroups::AllBut(items.ids(excluded))
                }
                _ => OwnerGroups::Only(items.ids(of!(settings.istio_outbound_owner_groups))),
            },
            dns: dns(settings, host, items),
            drop_invalid: settings.drop_invalid,
            protect_admin: settings.protect_admin,
            loopback: items.loopback(of!(settings.istio_outbound_ipv4_loopback_cidr)),
            tproxy_mark: items.number(of!(settings.istio_inbound_tproxy_mark), u32::MAX),
            tproxy_route_table: items
                .number(of!(settings.istio_inbound_tproxy_route_table), u32::MAX),
            kind: items.kind(of!(settings.force_iptables_binary)),
        }
    }

    /// The users and groups of the proxy.
    pub fn proxies(&self) -> impl Iterator<Item = Owner> {
        let users = self.uids.iter().cloned().map(Owner::User);
        users.chain(self.gids.iter().cloned().map(Owner::Group))
    }

    /// Whether a captured range has a loopback address.
    pub fn includes_loopback(&self) -> bool {
        match &self.include_ranges {
            OutboundRanges::All => false,
            OutboundRanges::Only(ranges) => ranges.iter().any(|range| range.address.is_loopback()),
        }
    }
}

fn dns(settings: &Settings, host: &Host, items: &mut SettingsParser) -> Option<DnsCapture> {
    match (settings.redirect_dns, settings.capture_all_dns) {
        (false, _) => None,
        (true, true) => Some(DnsCapture::All),
        (true, false) if host.nameservers.is_empty() => {
            let expected = "a server in resolv.conf, or --capture-all-dns; DNS is not captured";
            items.warn(("redirect_dns", "true"), expected);
            None
        }
        (true, false) => Some(DnsCapture::Servers(host.nameservers.clone())),
    }
}

#[cfg(test)]
pub(in crate::capture) mod tests;
