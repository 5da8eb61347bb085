//! The routes and addresses that captured traffic needs, set up over netlink.
//!
//! TPROXY needs marked packets to be delivered here: a rule sends them to a table whose default route is
//! local. Over IPv6 Envoy binds `::6`, which is an address of `lo` for that.

use std::io;
use std::net::Ipv6Addr;

use super::config::{Config, InboundPorts, Mode};
use super::rules::Family;
use crate::netlink::{DUMP, Socket, attribute, parts};
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
    /// What adds it; the next number removes it, the one after that reads.
    kind: u16,
    header: Vec<u8>,
    attributes: Vec<(u16, Vec<u8>)>,
    is_wanted: bool,
}

/// Adds what the configuration needs, where it is missing.
pub fn add(config: &Config) -> Result<(), Problem> {
    let socket = open()?;
    for item in items(config).iter().filter(|item| item.is_wanted) {
        // The kernel takes a rule any number of times.
        if item.kind == NEW_RULE && item.is_there(&socket)? {
            continue;
        }
        match socket.ask(item.kind, CREATE_NEW, &item.body()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("add", &item.name, error)),
            Ok(_) => {}
        }
    }
    Ok(())
}

/// Removes what the configuration does not need: of rules and routes, those of its mark and table.
pub fn remove(config: &Config) -> Result<(), Problem> {
    let socket = open()?;
    for item in items(config).iter().filter(|item| !item.is_wanted) {
        // pilot-agent adds one more rule with each run.
        loop {
            match socket.ask(item.kind + 1, 0, &item.body()) {
                Ok(_) => tracing::info!("removed the {}", item.name),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(failed("remove", &item.name, error));
                }
                // There is none, which has a number of its own for each kind and family.
                Err(_) => break,
            }
        }
    }
    Ok(())
}

/// Names what the configuration needs and the machine has not.
pub fn missing(config: &Config) -> Result<Vec<(Family, String)>, Problem> {
    let socket = open()?;
    let mut missing = Vec::new();
    for item in items(config).into_iter().filter(|item| item.is_wanted) {
        if !item.is_there(&socket)? {
            let is_v4 = item.header[0] == V4;
            missing.push((if is_v4 { Family::V4 } else { Family::V6 }, item.name));
        }
    }
    Ok(missing)
}

fn open() -> Result<Socket, Problem> {
    Socket::open(None).map_err(|error| failed("open", "a netlink socket", error))
}

fn failed(verb: &str, item: &str, error: io::Error) -> Problem {
    let subject = format!("failed to configure routes: cannot {verb} {item}");
    super::problem(codes::CAPTURE_ROUTES_FAILED, subject, error)
}

/// All that a configuration may need.
fn items(config: &Config) -> Vec<Item> {
    let mut all = vec![passthrough_address(config.has_v6)];
    let is_tproxy = config.mode == Mode::Tproxy && config.inbound != InboundPorts::None;
    for (family, exists) in [(V4, true), (V6, config.has_v6)] {
        all.extend(to_this_machine(config, family, is_tproxy && exists));
    }
    all
}

fn passthrough_address(is_wanted: bool) -> Item {
    const NEW_ADDRESS: u16 = 20;
    const ADDRESS: u16 = 1;
    let header = [[V6, 128, 0, 0], LO.to_ne_bytes()];
    Item {
        name: "address ::6/128 of lo".to_owned(),
        kind: NEW_ADDRESS,
        header: header.concat(),
        attributes: vec![(ADDRESS, Ipv6Addr::from_bits(6).octets().to_vec())],
        is_wanted,
    }
}

/// A rule that looks packets with the mark up in the table, and the route there.
fn to_this_machine(config: &Config, family: u8, is_wanted: bool) -> [Item; 2] {
    const NEW_ROUTE: u16 = 24;
    const TO_TABLE: u8 = 1;
    const OF_HOST: u8 = 254;
    const LOCAL: u8 = 2;
    const INTERFACE: u16 = 4;
    const MARK: u16 = 10;
    const TABLE: u16 = 15;
    let (mark, table) = (config.tproxy_mark, config.tproxy_route_table);
    // pilot-agent adds the route as another protocol; none removes that of any.
    let by_administrator = if is_wanted { 4 } else { 0 };
    let of_table = (TABLE, table.to_ne_bytes().to_vec());
    let item = |name, kind, middle: [u8; 4], attribute| Item {
        name,
        kind,
        header: [[family, 0, 0, 0], middle, [0; 4]].concat(),
        attributes: vec![attribute, of_table.clone()],
        is_wanted,
    };
    [
        item(
            format!("rule that looks up mark {mark} in table {table}"),
            NEW_RULE,
            [0, 0, 0, TO_TABLE],
            (MARK, mark.to_ne_bytes().to_vec()),
        ),
        item(
            format!("local default route in table {table}"),
            NEW_ROUTE,
            [0, by_administrator, OF_HOST, LOCAL],
            (INTERFACE, LO.to_ne_bytes().to_vec()),
        ),
    ]
}

impl Item {
    fn is_there(&self, socket: &Socket) -> Result<bool, Problem> {
        let mut header = vec![0; self.header.len()];
        header[0] = self.header[0];
        let listed = socket.ask(self.kind + 2, DUMP, &header);
        let listed = listed.map_err(|error| failed("list", &self.name, error))?;
        Ok(listed.iter().any(|reply| self.is(reply)))
    }

    fn body(&self) -> Vec<u8> {
        let attributes = self.attributes.iter();
        let attributes = attributes.flat_map(|(kind, value)| attribute(*kind, value));
        self.header.iter().copied().chain(attributes).collect()
    }

    /// Whether this is what the kernel replied: of the same family, length and type, with these attributes.
    fn is(&self, reply: &[u8]) -> bool {
        let Some((header, attributes)) = reply.split_at_checked(self.header.len()) else {
            return false;
        };
        let has = |(kind, value): &(u16, Vec<u8>)| {
            parts(attributes).any(|(found_kind, found)| found_kind == *kind && found == value)
        };
        let alike = [0, 1, 7].map(|at| header[at] == self.header[at]);
        !alike.contains(&false) && self.attributes.iter().all(has)
    }
}
