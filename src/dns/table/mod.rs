//! The pod's names: an index over the name table as istiod sent it.
//!
//! Each host is entered once under its name, once as `shortname.namespace`, once as `shortname` for
//! those of the same namespace, and under its further hosts. All other forms, those with the first
//! label of the domain and those with the search domain appended, are found by rule: the ending is
//! cut off and the rest looked up. The strings stay in the message they came in, so a host costs
//! little more than its bytes there. Where several hosts have one name, the host of that name comes
//! first, then short forms, longer ones first, then further hosts, and among equals the one that
//! sorts first; each family is taken from the first that has any of it.
//!
//! Does not know DNS messages: names are text here, lower case, without a dot at their end.

mod build;
mod index;
mod proto;
mod show;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use super::scope::Scope;
use index::Index;
pub use proto::Malformed;

/// Longest name there is, as text.
pub(super) const LONGEST: usize = 254;

/// A name table, ready to be asked. Never changes.
#[derive(Debug)]
pub struct Table {
    /// The encoded `NameTable`.
    raw: Box<[u8]>,
    scope: Scope,
    /// In the order of the message, and one more where the addresses of the last end.
    entries: Box<[Entry]>,
    alts: Box<[Alt]>,
    v4: Box<[Ipv4Addr]>,
    v6: Box<[Ipv6Addr]>,
    index: Index,
    /// Whether any host begins with `*.`.
    wildcards: bool,
}

/// What the table knows of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found<'a> {
    pub v4: &'a [Ipv4Addr],
    pub v6: &'a [Ipv6Addr],
    /// Where in the name the part begins that a wildcard stands before.
    pub wildcard: Option<usize>,
    /// Where in the name the target of its CNAME ends, if it has one. With a wildcard the target
    /// is `*.` and the part from there.
    pub target_end: Option<usize>,
}

/// A string in the message.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: u32,
    length: u32,
}

/// A host. One does not straddle what the processor fetches at once, and of one with a single
/// address, as nearly all are, nothing else is fetched but its name.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Entry {
    host: Place,
    /// Where these begin.
    short: u32,
    namespace: u32,
    /// Where its addresses begin; they end where those of the next begin.
    v4: u32,
    v6: u32,
    /// Its address, if `is_single`. It is nowhere else then.
    single: Ipv4Addr,
    is_single: bool,
    short_length: u8,
    namespace_length: u8,
    names: Names,
}

/// By which of its names a host can be asked for, beside its further ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Names {
    /// By none: it has no address, nobody can spell it, or it came again.
    Nothing,
    Host,
    /// By `shortname.namespace` as well.
    Aliased,
    /// By `shortname` too: it is in the pod's namespace.
    Own,
}

/// A further host of an entry.
#[derive(Clone, Copy, Debug)]
struct Alt {
    entry: u32,
    host: Place,
}

/// How an entry came by a name. The order is that of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Host,
    /// `shortname.namespace`
    Alias,
    /// `shortname`
    Short,
    Alt,
}

/// An entry, or for [`Kind::Alt`] a further host, under one of its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reference(u32);

impl Table {
    /// What is known of a name, itself or by a wildcard; the longest wildcard wins.
    pub fn find(&self, name: &[u8]) -> Option<Found<'_>> {
        if name.is_empty() || name.len() > LONGEST {
            return None;
        }
        if let Some(found) = self.exact(name) {
            return Some(found);
        }
        if !self.wildcards {
            return None;
        }
        let mut buffer = [0; LONGEST + 2];
        let buffer = &mut buffer[..name.len() + 2];
        buffer[2..].copy_from_slice(name);
        for at in (1..name.len()).filter(|at| name[at - 1] == b'.') {
            // Over the labels that have been tried.
            buffer[at..at + 2].copy_from_slice(b"*.");
            if let Some(found) = self.exact(&buffer[at..]) {
                // The star and its dot are not in the name that was asked for.
                let target_end = found.target_end.map(|end| at + end - 2);
                return Some(Found {
                    wildcard: Some(at),
                    target_end,
                    ..found
                });
            }
        }
        None
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.entries.len() - 1
    }

    /// Whether it was read from these bytes.
    pub fn is_of(&self, encoded: &[u8]) -> bool {
        *self.raw == *encoded
    }

    fn exact(&self, name: &[u8]) -> Option<Found<'_>> {
        if let Some(base) = self.scope.before_search(name) {
            let expands = self.any(base, |entry| !self.any(name, |other| other == entry));
            if expands {
                let found = self.addresses(base)?;
                return Some(Found {
                    target_end: Some(base.len()),
                    ..found
                });
            }
        }
        self.addresses(name)
    }

    /// The addresses of a name, each family from the first entry that has some. Every entry with a
    /// name has one.
    fn addresses(&self, name: &[u8]) -> Option<Found<'_>> {
        let (mut v4, mut v6) = (None, None);
        self.any_ranked(name, |rank, number, entry| {
            let order = (rank, entry.host(&self.raw));
            keep_first(&mut v4, order, self.v4_of(number, entry));
            keep_first(&mut v6, order, self.v6_of(number, entry));
            false
        });
        (v4.is_some() || v6.is_some()).then(|| Found {
            v4: v4.map_or(&[], |(_, v4)| v4),
            v6: v6.map_or(&[], |(_, v6)| v6),
            wildcard: None,
            target_end: None,
        })
    }

    /// Whether `wanted` holds for any entry of this name.
    fn any(&self, name: &[u8], mut wanted: impl FnMut(u32) -> bool) -> bool {
        self.any_ranked(name, |_, number, _| wanted(number))
    }

    /// Like [`Table::any`], with the rank of each entry under this name.
    fn any_ranked<'a>(
        &'a self,
        name: &[u8],
        mut wanted: impl FnMut(u8, u32, &'a Entry) -> bool,
    ) -> bool {
        let mut any = |name: &[u8], kinds: fn(Kind) -> Option<u8>| {
            self.index.any(self.index.hash(name), |reference| {
                let reference = Reference(reference);
                let Some(rank) = kinds(reference.kind()) else {
                    return false;
                };
                let number = self.entry_of(reference);
                let entry = self.entry(number);
                entry.names > Names::Nothing
                    && self.has_name(reference, entry, name)
                    && wanted(rank, number, entry)
            })
        };
        let of_itself = |kind| match kind {
            Kind::Host => Some(0),
            Kind::Alias => Some(2),
            Kind::Short => Some(3),
            Kind::Alt => Some(4),
        };
        let with_label = |kind| (kind == Kind::Alias).then_some(1);
        any(name, of_itself)
            || self
                .scope
                .before_first_label(name)
                .is_some_and(|base| any(base, with_label))
    }

    fn has_name(&self, reference: Reference, entry: &Entry, name: &[u8]) -> bool {
        match reference.kind() {
            Kind::Host => {
                let host = key(entry.host(&self.raw));
                // Most are lower case, and comparing words is faster than comparing letters.
                host == name || host.eq_ignore_ascii_case(name)
            }
            Kind::Short => entry.short(&self.raw).eq_ignore_ascii_case(name),
            Kind::Alt => self.alt(reference).eq_ignore_ascii_case(name),
            Kind::Alias => {
                let (short, namespace) = (entry.short(&self.raw), entry.namespace(&self.raw));
                name.len() == short.len() + 1 + namespace.len()
                    && name[..short.len()].eq_ignore_ascii_case(short)
                    && name[short.len()] == b'.'
                    && name[short.len() + 1..].eq_ignore_ascii_case(namespace)
            }
        }
    }

    /// The name a reference stands under, lower case; nothing if it is too long to be asked for.
    fn name<'a>(&self, reference: Reference, buffer: &'a mut [u8; LONGEST]) -> Option<&'a [u8]> {
        let entry = self.entry(self.entry_of(reference));
        let raw = &*self.raw;
        let short = entry.short(raw);
        let parts: [&[u8]; 3] = match reference.kind() {
            Kind::Host => [key(entry.host(raw)), b"", b""],
            Kind::Alias => [short, b".", entry.namespace(raw)],
            Kind::Short => [short, b"", b""],
            Kind::Alt => [self.alt(reference), b"", b""],
        };
        let length = parts.iter().map(|part| part.len()).sum();
        let name = buffer.get_mut(..length)?;
        let (first, rest) = name.split_at_mut(parts[0].len());
        first.copy_from_slice(parts[0]);
        let (dot, last) = rest.split_at_mut(parts[1].len());
        dot.copy_from_slice(parts[1]);
        last.copy_from_slice(parts[2]);
        name.make_ascii_lowercase();
        Some(name)
    }

    /// What comes first among those of one name.
    fn precedence(&self, reference: Reference) -> (Kind, &[u8]) {
        let entry = self.entry(self.entry_of(reference));
        (reference.kind(), entry.host(&self.raw))
    }

    fn entry(&self, number: u32) -> &Entry {
        &self.entries[number as usize]
    }

    fn entry_of(&self, reference: Reference) -> u32 {
        match reference.kind() {
            Kind::Alt => self.alts[reference.number() as usize].entry,
            _ => reference.number(),
        }
    }

    fn alt(&self, reference: Reference) -> &[u8] {
        self.alts[reference.number() as usize].host.of(&self.raw)
    }

    fn v4_of<'a>(&'a self, number: u32, entry: &'a Entry) -> &'a [Ipv4Addr] {
        if entry.is_single {
            return std::slice::from_ref(&entry.single);
        }
        &self.v4[entry.v4 as usize..self.entry(number + 1).v4 as usize]
    }

    fn v6_of(&self, number: u32, entry: &Entry) -> &[Ipv6Addr] {
        if entry.is_single {
            return &[];
        }
        &self.v6[entry.v6 as usize..self.entry(number + 1).v6 as usize]
    }
}

/// An entry's addresses, unless there are some of an entry that comes before it.
fn keep_first<'a, O: PartialOrd + Copy, T>(
    first: &mut Option<(O, &'a [T])>,
    order: O,
    addresses: &'a [T],
) {
    if !addresses.is_empty() && first.is_none_or(|(first, _)| order < first) {
        *first = Some((order, addresses));
    }
}

impl Entry {
    fn host<'a>(&self, raw: &'a [u8]) -> &'a [u8] {
        self.host.of(raw)
    }

    fn short<'a>(&self, raw: &'a [u8]) -> &'a [u8] {
        let start = self.short as usize;
        &raw[start..start + usize::from(self.short_length)]
    }

    fn namespace<'a>(&self, raw: &'a [u8]) -> &'a [u8] {
        let start = self.namespace as usize;
        &raw[start..start + usize::from(self.namespace_length)]
    }
}

impl Place {
    /// A place in a message whose length four bytes count.
    fn at(range: &Range<usize>) -> Self {
        Self {
            start: range.start as u32,
            length: range.len() as u32,
        }
    }

    fn range(self) -> Range<usize> {
        let start = self.start as usize;
        start..start + self.length as usize
    }

    fn of(self, raw: &[u8]) -> &[u8] {
        &raw[self.range()]
    }
}

impl Reference {
    /// A number is less than the bytes of the largest table, and an entry takes two at least.
    fn new(kind: Kind, number: u32) -> Self {
        Self(number << 2 | kind as u32)
    }

    fn kind(self) -> Kind {
        match self.0 & 3 {
            0 => Kind::Host,
            1 => Kind::Alias,
            2 => Kind::Short,
            _ => Kind::Alt,
        }
    }

    fn number(self) -> u32 {
        self.0 >> 2
    }
}

/// A host without the dot it may end in.
fn key(host: &[u8]) -> &[u8] {
    host.strip_suffix(b".").unwrap_or(host)
}

#[cfg(test)]
pub(crate) mod tests;
