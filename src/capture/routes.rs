//! Sets up the routes and addresses that captured traffic needs, over netlink.
//!
//! TPROXY needs marked packets to be delivered to this machine: a rule sends them to a table whose default
//! route is local. Over IPv6 Envoy binds `::6`, which therefore becomes an address of `lo`.

use std::io;
use std::net::Ipv6Addr;

use super::config::{Config, Mode};
use super::rules::Family;
use crate::net::netlink::{DUMP, attribute, parts, request};
use crate::problem::{Code, Problem};

/// The index of `lo` in every network namespace.
const LOOPBACK_INDEX: u32 = 1;
/// `NLM_F_CREATE | NLM_F_EXCL` of `linux/netlink.h`.
const CREATE_EXCLUSIVE: u16 = 0x600;
const RTM_NEWRULE: u16 = 32;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// An address, rule or route. Its numbers are defined in `linux/rtnetlink.h`, `fib_rules.h` and `if_addr.h`.
struct Item {
    name: String,
    /// Type of the message that adds it, `RTM_NEW…`. The next number is `RTM_DEL…`, and then comes `RTM_GET…`.
    add_message: u16,
    header: Vec<u8>,
    /// Encoded attributes.
    attributes: Vec<Vec<u8>>,
    is_wanted: bool,
}

/// Adds what the configuration needs, where it is missing.
pub fn add(config: &Config) -> Result<(), Problem> {
    for item in items(config).iter().filter(|item| item.is_wanted) {
        // The kernel accepts a rule that exists and adds it again.
        if item.add_message == RTM_NEWRULE && item.exists()? {
            continue;
        }
        if let Err(error) = request(None, item.add_message, CREATE_EXCLUSIVE, &item.body())
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(failed("add", &item.name, error));
        }
    }
    Ok(())
}

/// Removes what the configuration does not need: the address of `lo`, and rules and routes with the mark and
/// the routing table of the configuration. A cleanup has a configuration without IPv6 and with mode REDIRECT, which
/// needs nothing, so all is removed. Logs each removal. Fails only if the kernel denies permission.
pub fn remove_unneeded(config: &Config) -> Result<(), Problem> {
    for item in items(config).iter().filter(|item| !item.is_wanted) {
        // pilot-agent adds one more rule with each run.
        loop {
            match request(None, item.add_message + 1, 0, &item.body()) {
                Ok(_) => tracing::info!("removed the {}", item.name),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(failed("remove", &item.name, error));
                }
                // The errno for "not found" differs by kind and family, so every other error counts as not found.
                Err(_) => break,
            }
        }
    }
    Ok(())
}

/// Returns the names of routes and addresses that the configuration needs and the machine lacks.
pub fn missing(config: &Config) -> Result<Vec<(Family, String)>, Problem> {
    let mut missing = Vec::new();
    for item in items(config).into_iter().filter(|item| item.is_wanted) {
        if !item.exists()? {
            let family = if item.header[0] == AF_INET { Family::V4 } else { Family::V6 };
            missing.push((family, item.name));
        }
    }
    Ok(missing)
}

fn failed(verb: &str, item: &str, error: io::Error) -> Problem {
    let subject = format!("failed to configure routes: cannot {verb} {item}");
    super::problem(Code::CaptureRoutesFailed, subject, error)
}

/// Returns everything that a configuration may need.
fn items(config: &Config) -> Vec<Item> {
    let is_tproxy = config.mode == Mode::Tproxy && config.captures_inbound();
    let mut items = vec![passthrough_address(config.has_v6)];
    items.extend(local_delivery(config, AF_INET, is_tproxy));
    items.extend(local_delivery(config, AF_INET6, is_tproxy && config.has_v6));
    items
}

fn passthrough_address(is_wanted: bool) -> Item {
    const RTM_NEWADDR: u16 = 20;
    const IFA_ADDRESS: u16 = 1;
    Item {
        name: "address ::6/128 of lo".to_owned(),
        add_message: RTM_NEWADDR,
        header: [[AF_INET6, 128, 0, 0], LOOPBACK_INDEX.to_ne_bytes()].concat(),
        attributes: vec![attribute(IFA_ADDRESS, &Ipv6Addr::from_bits(6).octets())],
        is_wanted,
    }
}

/// Returns a rule that looks up packets with the mark in the routing table, and the local route in that table.
fn local_delivery(config: &Config, family: u8, is_wanted: bool) -> [Item; 2] {
    const RTM_NEWROUTE: u16 = 24;
    const FR_ACT_TO_TBL: u8 = 1;
    const RTPROT_STATIC: u8 = 4;
    const RT_SCOPE_HOST: u8 = 254;
    const RTN_LOCAL: u8 = 2;
    const RTA_OIF: u16 = 4;
    const FRA_FWMARK: u16 = 10;
    /// The same number as `FRA_TABLE`.
    const RTA_TABLE: u16 = 15;
    let mark = config.tproxy_mark;
    let table = config.tproxy_route_table;
    // The members of both headers: family, length of destination and source, TOS; then, of `struct rtmsg`, table,
    // protocol, scope, type, or, of `struct fib_rule_hdr`, table, two reserved bytes, action; then flags.
    // pilot-agent adds the route with another protocol. A removal with protocol 0 removes routes of any.
    let protocol = if is_wanted { RTPROT_STATIC } else { 0 };
    let attributes = |kind, value: u32| {
        vec![attribute(kind, &value.to_ne_bytes()), attribute(RTA_TABLE, &table.to_ne_bytes())]
    };
    let rule = Item {
        name: format!("rule that looks up mark {mark} in table {table}"),
        add_message: RTM_NEWRULE,
        header: [[family, 0, 0, 0], [0, 0, 0, FR_ACT_TO_TBL], [0; 4]].concat(),
        attributes: attributes(FRA_FWMARK, mark),
        is_wanted,
    };
    let route = Item {
        name: format!("local default route in table {table}"),
        add_message: RTM_NEWROUTE,
        header: [[family, 0, 0, 0], [0, protocol, RT_SCOPE_HOST, RTN_LOCAL], [0; 4]].concat(),
        attributes: attributes(RTA_OIF, LOOPBACK_INDEX),
        is_wanted,
    };
    [rule, route]
}

impl Item {
    /// Lists the items of this type and family, and returns true if this one is among them.
    fn exists(&self) -> Result<bool, Problem> {
        let mut header = vec![0; self.header.len()];
        header[0] = self.header[0];
        let replies = request(None, self.add_message + 2, DUMP, &header)
            .map_err(|error| failed("list", &self.name, error))?;
        Ok(replies.iter().any(|reply| self.matches(reply)))
    }

    fn body(&self) -> Vec<u8> {
        [self.header.clone(), self.attributes.concat()].concat()
    }

    /// Returns true if the kernel's reply has the same family, prefix length and type, and these attributes.
    fn matches(&self, reply: &[u8]) -> bool {
        let Some((header, attributes)) = reply.split_at_checked(self.header.len()) else {
            return false;
        };
        [0, 1, 7].iter().all(|index| header[*index] == self.header[*index])
            && self.attributes.iter().all(|wanted| {
                parts(attributes).any(|(kind, value)| attribute(kind, value) == *wanted)
            })
    }
}
