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
    let mut items = items(config);
    items.retain(|item| item.is_wanted);
    change("add", &items, |item, socket| {
        // The kernel takes a rule any number of times.
        if item.kind == NEW_RULE && item.is_there(socket)? {
            return Ok(());
        }
        match socket.ask(item.message(item.kind, CREATE_NEW)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other.map(drop),
        }
    })
}

/// Removes what the configuration does not need, and what the marks needed that rules of ours had: an
/// `ip rule` for such a mark alone, to a table with our route. Names rules that look like that, and stay.
pub fn remove(config: &Config, marks: &[u32]) -> Result<(), Error> {
    let mut items = items(config);
    let known = |items: &[Item], reply: &[u8]| items.iter().any(|item| item.is(reply));
    let any = [V4, V6].map(|family| rule(family, config.tproxy_mark, 0, false));
    change("list", &any, |any, socket| {
        let family = any.header[0];
        for reply in any.listed(socket)? {
            let (mark, table) = (number(&reply, MARK), number(&reply, TABLE));
            let is_gone = marks.contains(&mark);
            if !is_gone && mark != config.tproxy_mark || known(&items, &reply) {
                continue;
            }
            let rule = rule(family, mark, table, false);
            let route = local_route(family, table, false);
            match is_gone && rule.is(&reply) && route.is_there(socket)? {
                true => items.extend([rule, route]),
                false => tracing::warn!("the {} stays, as it may be of others", rule.name),
            }
        }
        Ok(())
    })?;
    items.retain(|item| !item.is_wanted);
    change("remove", &items, |item, socket| {
        let requests = match item.kind {
            // As it is: a rule of others may begin alike. Earlier versions may have left several.
            NEW_RULE => {
                let mut all = item.listed(socket)?;
                all.retain(|reply| item.is(reply));
                all.iter()
                    .map(|reply| Message::new(item.kind + 1, 0, reply))
                    .collect()
            }
            _ => vec![item.message(item.kind + 1, 0)],
        };
        for request in requests {
            match socket.ask(request) {
                Ok(_) => tracing::info!("removed the {}", item.name),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(error);
                }
                // There is none, which has a number of its own for each kind and family.
                Err(_) => {}
            }
        }
        Ok(())
    })
}

/// Names what the configuration needs and the machine has not.
pub fn missing(config: &Config) -> Result<Vec<(Family, String)>, Error> {
    let mut items = items(config);
    items.retain(|item| item.is_wanted);
    let mut missing = Vec::new();
    change("list", &items, |item, socket| {
        if !item.is_there(socket)? {
            let family = match item.header[0] {
                V4 => Family::V4,
                _ => Family::V6,
            };
            missing.push((family, item.name.clone()));
        }
        Ok(())
    })?;
    Ok(missing)
}

fn change(
    verb: &'static str,
    items: &[Item],
    mut carry_out: impl FnMut(&Item, &Socket) -> io::Result<()>,
) -> Result<(), Error> {
    let error = |item: &str, source| Error {
        verb,
        item: item.to_owned(),
        source,
    };
    let Some(first) = items.first() else {
        return Ok(());
    };
    let socket = Socket::open(None).map_err(|source| error(&first.name, source))?;
    for item in items {
        carry_out(item, &socket).map_err(|source| error(&item.name, source))?;
    }
    Ok(())
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
    let six = Ipv6Addr::from_bits(6).octets().to_vec();
    let mut header = vec![V6, 128, 0, 0];
    header.extend(LO.to_ne_bytes());
    Item {
        name: "address ::6/128 of lo".to_owned(),
        kind: NEW_ADDRESS,
        header,
        attributes: vec![(ADDRESS, six)],
        is_wanted,
    }
}

/// Looks packets with the mark up in the table.
fn rule(family: u8, mark: u32, table: u32, is_wanted: bool) -> Item {
    const TO_TABLE: u8 = 1;
    Item {
        name: format!("rule that looks up mark {mark} in table {table}"),
        kind: NEW_RULE,
        header: vec![family, 0, 0, 0, 0, 0, 0, TO_TABLE, 0, 0, 0, 0],
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
    let header = [
        family,
        0,
        0,
        0,
        0,
        by_administrator,
        OF_HOST,
        LOCAL,
        0,
        0,
        0,
        0,
    ];
    Item {
        name: format!("local default route in table {table}"),
        kind: NEW_ROUTE,
        header: header.to_vec(),
        attributes: vec![
            (INTERFACE, LO.to_ne_bytes().to_vec()),
            (TABLE, table.to_ne_bytes().to_vec()),
        ],
        is_wanted,
    }
}

impl Item {
    fn is_there(&self, socket: &Socket) -> io::Result<bool> {
        Ok(self.listed(socket)?.iter().any(|reply| self.is(reply)))
    }

    /// All of its kind and family.
    fn listed(&self, socket: &Socket) -> io::Result<Vec<Vec<u8>>> {
        let mut header = vec![0; self.header.len()];
        header[0] = self.header[0];
        socket.ask(Message::new(self.kind + 2, DUMP, &header))
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
