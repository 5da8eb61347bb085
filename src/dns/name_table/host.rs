//! Reads an encoded `NameTable` of NDS in place: its fields, and the hosts they describe.
//!
//! A table of 100,000 hosts is decoded neither when it is received nor for lookups, so a host costs
//! little more memory than its bytes in the message.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use smallvec::SmallVec;

/// Field number of the map in `NameTable`.
pub(super) const TABLE: u32 = 1;
/// Field number of `name_info`: with it, a `NameTable` is a change of one host (delta NDS).
pub(super) const NAME_INFO: u32 = 2;
/// Field numbers in `NameInfo`.
const IPS: u32 = 1;
pub(super) const ALT_HOSTS: u32 = 5;

/// The error that bytes are not a name table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("byte {0} begins no whole protobuf field")]
    Field(usize),
    #[error("the string at byte {0} is not UTF-8")]
    Text(usize),
    #[error("{0} bytes, expected at most 1073741824")]
    TooLarge(usize),
    #[error("name_info (field 2) is set, as in delta NDS; expected a whole table")]
    Delta,
}

/// A length-delimited field.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<'a> {
    /// Offset of its tag in the table.
    pub(super) at: usize,
    pub(super) number: u32,
    value: &'a [u8],
    value_at: usize,
}

/// Iterates over the length-delimited fields of a message that begins at byte `at` of the table.
pub(super) fn fields(
    mut message: &[u8],
    mut at: usize,
) -> impl Iterator<Item = Result<Field<'_>, Malformed>> {
    std::iter::from_fn(move || {
        while !message.is_empty() {
            let (start, before) = (at, message.len());
            let Some((number, value)) = read_field(&mut message) else {
                message = &[];
                return Some(Err(Malformed::Field(start)));
            };
            at += before - message.len();
            if let Some(value) = value {
                return Some(Ok(Field {
                    at: start,
                    number,
                    value,
                    value_at: at - value.len(),
                }));
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

impl<'a> Field<'a> {
    /// Returns the field at this offset of a table that has been checked.
    pub(super) fn at(table: &'a [u8], at: u32) -> Option<Self> {
        let rest = table.get(at as usize..)?;
        fields(rest, at as usize).next()?.ok()
    }

    fn fields(&self) -> impl Iterator<Item = Result<Field<'a>, Malformed>> + use<'a> {
        fields(self.value, self.value_at)
    }

    pub(super) fn text(&self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.value).map_err(|_| Malformed::Text(self.value_at))
    }
}

/// A host and its `NameInfo`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Host<'a> {
    /// Offset of its field in the table, which identifies it.
    pub(super) at: u32,
    /// The name from istiod, perhaps with a dot at its end.
    pub(super) name: &'a str,
    pub(super) registry: &'a str,
    pub(super) short_name: &'a str,
    pub(super) namespace: &'a str,
    info: Option<Field<'a>>,
}

/// Addresses of one host; most have one.
pub(super) type Addresses = (SmallVec<[Ipv4Addr; 4]>, SmallVec<[Ipv6Addr; 4]>);

impl<'a> Host<'a> {
    /// Reads the map entry in `field`.
    pub(super) fn parse(field: &Field<'a>) -> Result<Self, Malformed> {
        let mut host = Self {
            // Offsets in a table are less than `u32::MAX`.
            at: field.at as u32,
            ..Self::default()
        };
        for part in field.fields() {
            let part = part?;
            match part.number {
                1 => host.name = part.text()?,
                2 => host.info = Some(part),
                _ => {}
            }
        }
        for part in host.info.iter().flat_map(Field::fields) {
            let part = part?;
            match part.number {
                2 => host.registry = part.text()?,
                3 => host.short_name = part.text()?,
                4 => host.namespace = part.text()?,
                IPS | ALT_HOSTS => _ = part.text()?,
                // Fields of a newer istiod may not be text.
                _ => {}
            }
        }
        Ok(host)
    }

    /// Returns the host whose field is at this offset of a table that has been checked.
    pub(super) fn at(table: &'a [u8], at: u32) -> Self {
        let host = Field::at(table, at).and_then(|field| Self::parse(&field).ok());
        host.unwrap_or_default()
    }

    pub(super) fn ips(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.parts(IPS).filter_map(|ip| ip.text().ok())
    }

    pub(super) fn alt_hosts(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.parts(ALT_HOSTS).filter_map(|host| host.text().ok())
    }

    /// Iterates over the fields of its `NameInfo` with this number.
    pub(super) fn parts(&self, number: u32) -> impl Iterator<Item = Field<'a>> + use<'a> {
        let fields = self.info.into_iter().flat_map(|info| info.fields());
        let parts = fields.map_while(Result::ok);
        parts.filter(move |part| part.number == number)
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
        let is_absolute = self.is_kubernetes() && self.name.ends_with('.');
        !without_dot(self.name).is_empty() && !is_absolute
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
