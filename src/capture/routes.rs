//! The routes and addresses that captured traffic needs, set up over netlink.
//!
//! TPROXY needs marked packets to be delivered here: a rule sends them to a table whose default route is
//! local. Over IPv6 Envoy binds `::6`, which is an address of `lo` for that.

use std::io;
use std::net::Ipv6Addr;

use super::config::{Config, InboundPorts, Mode};
use super::rules::Family;
use crate::netlink::{DUMP, Message, Socket, parts};

/// `lo` in every network namespace.
const LO: u32 = 1;
const CREATE_NEW: u16 = 0x600;
const NEW_RULE: u16 = 32;
const V4: u8 = 2;
const V6: u8 = 10;
const MARK: u16 = 10;
/// Attribute of rules and of routes.
const TABLE: u16 = 15;

#[derive(Debug, thiserror::Error)]
#[error("failed to configure routes: cannot {verb} {item}")]
pub struct Error {
    verb: &'static str,
    item: String,
    #[source]
    source: io::Error,
}

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
pub fn add(config: &Config) -> Result<(), Error> {
    let socket = open()?;
    for item in items(config).iter().filter(|item| item.is_wanted) {
        // The kernel takes a rule any number of times.
        if item.kind == NEW_RULE && item.is_there(&socket)? {
            continue;
        }
        match socket.ask(item.message(item.kind, CREATE_NEW)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => drop(other.map_err(|source| item.error("add", source))?),
        }
    }
    Ok(())
}

/// Removes what the configuration does not need, and what the marks needed that rules of ours had: an
/// `ip rule` for such a mark alone, to a table with our route. Names rules that look like that, and stay.
pub fn remove(config: &Config, marks: &[u32]) -> Result<(), Error> {
    let socket = open()?;
    let mut items = items(config);
    for family in [V4, V6] {
        for reply in rule(family, 0, 0, false).listed(&socket)? {
            let (mark, table) = (number(&reply, MARK), number(&reply, TABLE));
            let is_gone = marks.contains(&mark);
            let is_known = items.iter().any(|item| item.is(&reply));
            if is_known || !is_gone && mark != config.tproxy_mark {
                continue;
            }
            let rule = rule(family, mark, table, false);
            let route = local_route(family, table, false);
            match is_gone && rule.is(&reply) && route.is_there(&socket)? {
                true => items.extend([rule, route]),
                false => tracing::warn!("the {} stays, as it may be of others", rule.name),
            }
        }
    }
    for item in items.iter().filter(|item| !item.is_wanted) {
        let mut requests = vec![item.message(item.kind + 1, 0)];
        if item.kind == NEW_RULE {
            // As it is: a rule of others may begin alike. Earlier versions may have left several.
            let all = item
                .listed(&socket)?
                .into_iter()
                .filter(|reply| item.is(reply));
            requests = all
                .map(|reply| Message::new(item.kind + 1, 0, &reply))
                .collect();
        }
        for request in requests {
            match socket.ask(request) {
                Ok(_) => tracing::info!("removed the {}", item.name),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(item.error("remove", error));
                }
                // There is none, which has a number of its own for each kind and family.
                Err(_) => {}
            }
        }
    }
    Ok(())
}

/// Names what the configuration needs and the machine has not.
pub fn missing(config: &Config) -> Result<Vec<(Family, String)>, Error> {
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

fn open() -> Result<Socket, Error> {
    Socket::open(None).map_err(|source| Error {
        verb: "open",
        item: "a netlink socket".to_owned(),
        source,
    })
}

/// All that a configuration may need.
fn items(config: &Config) -> Vec<Item> {
    let mut all = vec![passthrough_address(config.has_v6)];
    let is_tproxy = config.mode == Mode::Tproxy && config.inbound != InboundPorts::None;
    for (family, exists) in [(V4, true), (V6, config.has_v6)] {
        let (mark, table) = (config.tproxy_mark, config.tproxy_route_table);
        all.push(rule(family, mark, table, is_tproxy && exists));
        all.push(local_route(family, table, is_tproxy && exists));
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

/// Looks packets with the mark up in the table.
fn rule(family: u8, mark: u32, table: u32, is_wanted: bool) -> Item {
    const TO_TABLE: u8 = 1;
    Item {
        name: format!("rule that looks up mark {mark} in table {table}"),
        kind: NEW_RULE,
        header: [[family, 0, 0, 0], [0, 0, 0, TO_TABLE], [0; 4]].concat(),
        attributes: vec![
            (MARK, mark.to_ne_bytes().to_vec()),
            (TABLE, table.to_ne_bytes().to_vec()),
        ],
        is_wanted,
    }
}

/// Delivers all packets looked up in the table to this machine.
fn local_route(family: u8, table: u32, is_wanted: bool) -> Item {
    const NEW_ROUTE: u16 = 24;
    // pilot-agent adds it as another protocol; none removes that of any.
    let by_administrator = if is_wanted { 4 } else { 0 };
    const OF_HOST: u8 = 254;
    const LOCAL: u8 = 2;
    const INTERFACE: u16 = 4;
    Item {
        name: format!("local default route in table {table}"),
        kind: NEW_ROUTE,
        header: [
            [family, 0, 0, 0],
            [0, by_administrator, OF_HOST, LOCAL],
            [0; 4],
        ]
        .concat(),
        attributes: vec![
            (INTERFACE, LO.to_ne_bytes().to_vec()),
            (TABLE, table.to_ne_bytes().to_vec()),
        ],
        is_wanted,
    }
}

impl Item {
    fn error(&self, verb: &'static str, source: io::Error) -> Error {
        let item = self.name.clone();
        Error { verb, item, source }
    }

    fn is_there(&self, socket: &Socket) -> Result<bool, Error> {
        Ok(self.listed(socket)?.iter().any(|reply| self.is(reply)))
    }

    /// All of its kind and family.
    fn listed(&self, socket: &Socket) -> Result<Vec<Vec<u8>>, Error> {
        let mut header = vec![0; self.header.len()];
        header[0] = self.header[0];
        let listed = socket.ask(Message::new(self.kind + 2, DUMP, &header));
        listed.map_err(|source| self.error("list", source))
    }

    fn message(&self, kind: u16, flags: u16) -> Message {
        let message = Message::new(kind, flags, &self.header);
        let attributes = self.attributes.iter();
        attributes.fold(message, |message, (kind, value)| {
            message.attribute(*kind, value)
        })
    }

    /// Whether this is what the kernel replied: of the same family, length and type, with these attributes.
    fn is(&self, reply: &[u8]) -> bool {
        let Some((header, attributes)) = reply.split_at_checked(self.header.len()) else {
            return false;
        };
        let has = |(kind, value): &(u16, Vec<u8>)| {
            parts(attributes).any(|(of, found)| of == *kind && found == value)
        };
        let alike = [0, 1, 7].map(|at| header[at] == self.header[at]);
        let is_whole = self.kind != NEW_RULE || is_for_mark_alone(header, attributes);
        !alike.contains(&false) && is_whole && self.attributes.iter().all(has)
    }
}

/// Whether a rule looks at nothing but the whole mark: neither source, TOS, interfaces, users nor ports.
fn is_for_mark_alone(header: &[u8], attributes: &[u8]) -> bool {
    const SELECTORS: [u16; 7] = [3, 12, 17, 20, 22, 23, 24];
    const INVERTED: u8 = 2;
    const MASK: u16 = 16;
    let flags = header[8..12].iter().fold(0, |all, byte| all | byte);
    let mut others = parts(attributes)
        .filter(|(kind, value)| SELECTORS.contains(kind) || *kind == MASK && *value != [0xff; 4]);
    header[2..4] == [0, 0] && flags & INVERTED == 0 && others.next().is_none()
}

/// An attribute of a rule that the kernel replied; 0 is none.
fn number(reply: &[u8], kind: u16) -> u32 {
    let attributes = reply.get(12..).unwrap_or_default();
    let value = parts(attributes).find(|(of, _)| *of == kind);
    let value = value.and_then(|(_, value)| value.first_chunk());
    value.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}
