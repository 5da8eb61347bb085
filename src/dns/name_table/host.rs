//! Reads an encoded `NameTable` of NDS in place: its fields, and the hosts they describe.
//!
//! A table of 100,000 hosts is decoded neither when it is received nor for lookups, so a host costs
//! little more memory than its bytes in the message.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use smallvec::SmallVec;

/// Field number of the map in `NameTable`.
const TABLE: u32 = 1;
/// Field number of `name_info`: with it, a `NameTable` is a change of one host (delta NDS).
const NAME_INFO: u32 = 2;
/// Field numbers in `NameInfo`.
const IPS: u32 = 1;
const ALT_HOSTS: u32 = 5;

/// The error that bytes are not a name table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub(super) &'static str);

pub(super) const DELTA: Malformed =
    Malformed("name_info (field 2) is set, as in delta NDS; expected a complete table");

/// A length-delimited field.
struct Field<'a> {
    /// Offset of its tag in the message.
    offset: usize,
    number: u32,
    value: &'a [u8],
}

/// Iterates over the length-delimited fields of a message.
fn fields(message: &[u8]) -> impl Iterator<Item = Result<Field<'_>, Malformed>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        while !rest.is_empty() {
            let offset = message.len() - rest.len();
            let Some((number, value)) = read_field(&mut rest) else {
                rest = &[];
                return Some(Err(Malformed("a field is malformed or incomplete")));
            };
            if let Some(value) = value {
                return Some(Ok(Field { offset, number, value }));
            }
        }
        None
    })
}

/// Splits the first field off the message: its number, and its content if it is length-delimited.
fn read_field<'a>(message: &mut &'a [u8]) -> Option<(u32, Option<&'a [u8]>)> {
    let (number, wire_type) = decode_key(message).ok()?;
    if wire_type != WireType::LengthDelimited {
        skip_field(wire_type, number, message, DecodeContext::default()).ok()?;
        return Some((number, None));
    }
    let length = usize::try_from(decode_varint(message).ok()?).ok()?;
    let (value, rest) = message.split_at_checked(length)?;
    *message = rest;
    Some((number, Some(value)))
}

fn text(value: &[u8]) -> Result<&str, Malformed> {
    std::str::from_utf8(value).map_err(|_| Malformed("a string is not UTF-8"))
}

/// A host and its `NameInfo`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Host<'a> {
    /// Offset of its field in the table, which identifies it.
    pub(super) offset: u32,
    /// The name from istiod, perhaps with a dot at its end.
    pub(super) name: &'a str,
    pub(super) registry: &'a str,
    pub(super) short_name: &'a str,
    pub(super) namespace: &'a str,
    /// The encoded `NameInfo`.
    info: &'a [u8],
}

/// Reads the hosts of a table, in its order.
pub(super) fn hosts(table: &[u8]) -> impl Iterator<Item = Result<Host<'_>, Malformed>> {
    fields(table).filter_map(|field| match field {
        // Offsets in a table are less than `u32::MAX`.
        Ok(field) if field.number == TABLE => Some(Host::parse(field.offset as u32, field.value)),
        Ok(field) if field.number == NAME_INFO => Some(Err(DELTA)),
        // A newer istiod may send other fields.
        Ok(_) => None,
        Err(malformed) => Some(Err(malformed)),
    })
}

/// Addresses of one host; most have one.
pub(super) type Addresses = (SmallVec<[Ipv4Addr; 4]>, SmallVec<[Ipv6Addr; 4]>);

impl<'a> Host<'a> {
    /// Parses a map entry of the table.
    fn parse(offset: u32, entry: &'a [u8]) -> Result<Self, Malformed> {
        let mut host = Self { offset, ..Self::default() };
        for field in fields(entry) {
            let field = field?;
            match field.number {
                1 => host.name = text(field.value)?,
                2 => host.info = field.value,
                _ => {}
            }
        }
        for field in fields(host.info) {
            let field = field?;
            match field.number {
                2 => host.registry = text(field.value)?,
                3 => host.short_name = text(field.value)?,
                4 => host.namespace = text(field.value)?,
                IPS | ALT_HOSTS => _ = text(field.value)?,
                // Fields of a newer istiod may not be text.
                _ => {}
            }
        }
        Ok(host)
    }

    /// Reads the host whose field is at this offset of a table that has been checked.
    pub(super) fn read_at(table: &'a [u8], offset: u32) -> Self {
        let rest = table.get(offset as usize..);
        let field = rest.and_then(|rest| fields(rest).next()?.ok());
        field.and_then(|field| Self::parse(offset, field.value).ok()).unwrap_or_default()
    }

    pub(super) fn ips(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.texts(IPS)
    }

    pub(super) fn alt_hosts(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.texts(ALT_HOSTS)
    }

    /// Iterates over the texts of its `NameInfo` in fields with this number.
    fn texts(&self, number: u32) -> impl Iterator<Item = &'a str> + use<'a> {
        let info = fields(self.info).map_while(Result::ok);
        info.filter(move |field| field.number == number).filter_map(|field| text(field.value).ok())
    }

    /// Parses its addresses, except for invalid ones. An IPv4-mapped IPv6 address counts as IPv6.
    pub(super) fn addresses(&self) -> Addresses {
        let mut addresses = Addresses::default();
        for ip in self.ips() {
            match ip.parse() {
                Ok(IpAddr::V4(v4)) => addresses.0.push(v4),
                Ok(IpAddr::V6(v6)) => addresses.1.push(v6),
                Err(_) => {}
            }
        }
        addresses
    }

    /// Returns whether clients can query its name. A Kubernetes host that ends in a dot cannot be queried:
    /// its absolute name would end in two dots.
    pub(super) fn is_queryable(&self) -> bool {
        !(without_dot(self.name).is_empty() || self.is_kubernetes() && self.name.ends_with('.'))
    }

    pub(super) fn has_addresses(&self) -> bool {
        self.ips().any(|ip| ip.parse::<IpAddr>().is_ok())
    }

    pub(super) fn is_kubernetes(&self) -> bool {
        self.registry == "Kubernetes"
    }
}

/// Removes the dot that a host may end in.
pub(super) fn without_dot(host: &str) -> &str {
    host.strip_suffix('.').unwrap_or(host)
}
