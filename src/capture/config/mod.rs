//! The configuration of traffic capture: texts of flags and variables become checked types.
//!
//! Every item ends up in the input of a program that runs as root, so each has to be exactly what it
//! claims to be. Items of lists may have blanks around them; empty items are left out.

pub(super) mod items;

use std::net::IpAddr;

use super::rules::{Id, Owner, Ports};
use crate::address::Cidr;
use crate::problem::{Diagnostics, Problem};
use items::Items;

/// Owner groups whose traffic is captured, at most.
const MOST_OWNER_GROUPS: usize = 64;
const PROXY_UID: &str = "1337";

/// Settings as texts; lists are separated by commas. Named after their flags.
#[derive(Clone, Debug)]
pub struct Settings {
    pub envoy_port: String,
    pub inbound_capture_port: String,
    pub inbound_tunnel_port: String,
    pub proxy_uid: String,
    pub proxy_gid: String,
    pub interception_mode: String,
    pub inbound_ports: String,
    pub local_exclude_ports: String,
    pub exclude_interfaces: String,
    pub service_cidr: String,
    pub service_exclude_cidr: String,
    pub outbound_ports: String,
    pub local_outbound_ports_exclude: String,
    pub kube_virt_interfaces: String,
    pub tproxy_mark: String,
    pub tproxy_route_table: String,
    pub redirect_dns: bool,
    pub capture_all_dns: bool,
    pub drop_invalid: bool,
    pub protect_admin: bool,
    pub force_iptables_binary: String,
    pub loopback_cidr: String,
    pub owner_groups: String,
    pub owner_groups_exclude: String,
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

/// The programs that load rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binaries {
    Detected,
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
    pub binaries: Binaries,
}

/// All problems of a configuration.
#[derive(Debug, thiserror::Error)]
#[error("traffic capture cannot be configured: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Invalid(pub Vec<Problem>);

impl Config {
    /// Reads the settings. Returns what is left out or taken for something else as well.
    pub fn check(settings: &Settings, host: &Host) -> Result<(Self, Vec<Problem>), Invalid> {
        let mut items = Items::default();
        let config = Self::read(settings, host, &mut items);
        let Diagnostics { problems, warnings } = items.0;
        if problems.is_empty() {
            Ok((config, warnings))
        } else {
            Err(Invalid(problems))
        }
    }

    /// The configuration; only of use if no problem was found.
    fn read(settings: &Settings, host: &Host, items: &mut Items) -> Self {
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
            mode: items.mode(&settings.interception_mode),
            outbound_port: items.port("--envoy-port", &settings.envoy_port),
            inbound_port: items.port("--inbound-capture-port", &settings.inbound_capture_port),
            tunnel_port: items.port("--inbound-tunnel-port", &settings.inbound_tunnel_port),
            uids: items.ids("--proxy-uid", &uid),
            gids: items.ids("--proxy-gid", gid),
            inbound: inbound(settings, items),
            exclude_interfaces: items
                .interfaces("--istio-exclude-interfaces", &settings.exclude_interfaces),
            virtual_interfaces: items
                .interfaces("--kube-virt-interfaces", &settings.kube_virt_interfaces),
            include_ranges: match settings.service_cidr.as_str() {
                "*" => OutboundRanges::All,
                list => OutboundRanges::Only(items.ranges("--istio-service-cidr", list)),
            },
            exclude_ranges: items.ranges(
                "--istio-service-exclude-cidr",
                &settings.service_exclude_cidr,
            ),
            include_outbound_ports: items.ports("--istio-outbound-ports", &settings.outbound_ports),
            exclude_outbound_ports: items.ports(
                "--istio-local-outbound-ports-exclude",
                &settings.local_outbound_ports_exclude,
            ),
            owner_groups: owner_groups(settings, items),
            dns: dns(settings, host, items),
            drop_invalid: settings.drop_invalid,
            protect_admin: settings.protect_admin,
            loopback: items.loopback(&settings.loopback_cidr),
            tproxy_mark: items.number("--istio-inbound-tproxy-mark", &settings.tproxy_mark),
            tproxy_route_table: items.number(
                "--istio-inbound-tproxy-route-table",
                &settings.tproxy_route_table,
            ),
            binaries: items.binaries(&settings.force_iptables_binary),
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

fn inbound(settings: &Settings, items: &mut Items) -> InboundPorts {
    match settings.inbound_ports.as_str() {
        "" => InboundPorts::None,
        "*" => {
            let excluded = &settings.local_exclude_ports;
            InboundPorts::AllBut(items.ports("--istio-local-exclude-ports", excluded))
        }
        list => InboundPorts::Only(items.ports("--istio-inbound-ports", list)),
    }
}

fn owner_groups(settings: &Settings, items: &mut Items) -> OwnerGroups {
    if settings.owner_groups == "*" {
        let subject = "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE";
        return OwnerGroups::AllBut(items.ids(subject, &settings.owner_groups_exclude));
    }
    let subject = "ISTIO_OUTBOUND_OWNER_GROUPS";
    let included = items.ids(subject, &settings.owner_groups);
    if included.len() > MOST_OWNER_GROUPS {
        let found = format!("a list of {} groups", included.len());
        items
            .0
            .problem(subject, found, format!("at most {MOST_OWNER_GROUPS}"));
    }
    OwnerGroups::Only(included)
}

fn dns(settings: &Settings, host: &Host, items: &mut Items) -> Option<DnsCapture> {
    match (settings.redirect_dns, settings.capture_all_dns) {
        (false, _) => None,
        (true, true) => Some(DnsCapture::All),
        (true, false) if host.nameservers.is_empty() => {
            let expected = "a server in resolv.conf, or --capture-all-dns; DNS is not captured";
            items.0.warn("--redirect-dns", "true", expected);
            None
        }
        (true, false) => Some(DnsCapture::Servers(host.nameservers.clone())),
    }
}

#[cfg(test)]
pub(in crate::capture) mod tests;
