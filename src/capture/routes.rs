//! Sets up the routes and addresses that captured traffic needs, over netlink.
//!
//! TPROXY needs marked packets to be delivered to this machine: a rule sends them to a table whose default
//! route is local. Over IPv6 Envoy binds `::6`, which therefore becomes an address of `lo`.

use std::io;
use std::net::Ipv6Addr;

use super::config::{Config, Mode};
use super::rules::Family;
use crate::netlink::{DUMP, attribute, parts, request};
use crate::problem::{Problem, codes};

/// `lo` in every network namespace.
const LO: u32 = 1;
const CREATE_NEW: u16 = 0x600;
const NEW_RULE: u16 = 32;
const V4: u8 = 2;
const V6: u8 = 10;

/// An address, rule or route. The numbers are those of `linux/rtnetlink.h`.
struct Item {
    name: String,
    /// Type of the message that adds it. The next number removes it, and the one after that lists.
    kind: u16,
    header: Vec<u8>,
    /// Encoded attributes.
    attributes: Vec<Vec<u8>>,
    is_wanted: bool,
}

/// Adds what the configuration needs, where it is missing.
pub fn add(config: &Config) -> Result<(), Problem> {
    for item in items(config).iter().filter(|item| item.is_wanted) {
        // The kernel accepts a rule that exists and adds it again.
        if item.kind == NEW_RULE && item.exists()? {
            continue;
        }
        if let Err(error) = request(None, item.kind, CREATE_NEW, &item.body())
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(failed("add", &item.name, error));
        }
    }
    Ok(())
}

/// Removes what the configuration does not need: the address of `lo`, and rules and routes with the mark and
/// the routing table of the configuration.
pub fn remove(config: &Config) -> Result<(), Problem> {
    for item in items(config).iter().filter(|item| !item.is_wanted) {
        // pilot-agent adds one more rule with each run.
        loop {
            match request(None, item.kind + 1, 0, &item.body()) {
                Ok(_) => tracing::info!("removed the {}", item.name),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(failed("remove", &item.name, error));
                }
                // The errno for "not found" differs by kind and family.
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
            let is_v4 = item.header[0] == V4;
            missing.push((if is_v4 { Family::V4 } else { Family::V6 }, item.name));
        }
    }
    Ok(missing)
}

fn failed(verb: &str, item: &str, error: io::Error) -> Problem {
    let subject = format!("failed to configure routes: cannot {verb} {item}");
    super::problem(codes::CAPTURE_ROUTES_FAILED, subject, error)
}

/// Returns everything that a configuration may need.
fn items(config: &Config) -> Vec<Item> {
    let is_tproxy = config.mode == Mode::Tproxy && config.captures_inbound();
    let mut items = vec![passthrough_address(config.has_v6)];
    items.extend(local_delivery(config, V4, is_tproxy));
    items.extend(local_delivery(config, V6, is_tproxy && config.has_v6));
    items
}

fn passthrough_address(is_wanted: bool) -> Item {
    const NEW_ADDRESS: u16 = 20;
    const ADDRESS: u16 = 1;
    Item {
        name: "address ::6/128 of lo".to_owned(),
        kind: NEW_ADDRESS,
        header: [[V6, 128, 0, 0], LO.to_ne_bytes()].concat(),
        attributes: vec![attribute(ADDRESS, &Ipv6Addr::from_bits(6).octets())],
        is_wanted,
    }
}

/// Returns a rule that looks up packets with the mark in the routing table, and the local route in that table.
fn local_delivery(config: &Config, family: u8, is_wanted: bool) -> [Item; 2] {
    const NEW_ROUTE: u16 = 24;
    const TO_TABLE: u8 = 1;
    const BY_ADMINISTRATOR: u8 = 4;
    const HOST_SCOPE: u8 = 254;
    const LOCAL: u8 = 2;
    const INTERFACE: u16 = 4;
    const MARK: u16 = 10;
    const TABLE: u16 = 15;
    let (mark, table) = (config.tproxy_mark, config.tproxy_route_table);
    // The members of both headers: family, length of destination and source, TOS; then, of `struct rtmsg`, table,
    // protocol, scope, type, or, of `struct fib_rule_hdr`, table, two reserved bytes, action; then flags.
    // pilot-agent adds the route with another protocol. A removal with protocol 0 removes routes of any.
    let protocol = if is_wanted { BY_ADMINISTRATOR } else { 0 };
    let attributes = |kind, value: u32| {
        vec![
            attribute(kind, &value.to_ne_bytes()),
            attribute(TABLE, &table.to_ne_bytes()),
        ]
    };
    let rule = Item {
        name: format!("rule that looks up mark {mark} in table {table}"),
        kind: NEW_RULE,
        header: [[family, 0, 0, 0], [0, 0, 0, TO_TABLE], [0; 4]].concat(),
        attributes: attributes(MARK, mark),
        is_wanted,
    };
    let route = Item {
        name: format!("local default route in table {table}"),
        kind: NEW_ROUTE,
        header: [[family, 0, 0, 0], [0, protocol, HOST_SCOPE, LOCAL], [0; 4]].concat(),
        attributes: attributes(INTERFACE, LO),
        is_wanted,
    };
    [rule, route]
}

impl Item {
    fn exists(&self) -> Result<bool, Problem> {
        let mut header = vec![0; self.header.len()];
        header[0] = self.header[0];
        let listed = request(None, self.kind + 2, DUMP, &header);
        let replies = listed.map_err(|error| failed("list", &self.name, error))?;
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
        let has = |wanted: &Vec<u8>| {
            parts(attributes).any(|(kind, value)| attribute(kind, value) == *wanted)
        };
        let is_alike = [0, 1, 7].map(|index| header[index] == self.header[index]);
        is_alike == [true; 3] && self.attributes.iter().all(has)
    }
}
