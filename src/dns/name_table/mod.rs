//! The names istiod sends by NDS: an index over the encoded `NameTable`.
//!
//! Each host is entered under its name, as `shortname.namespace`, as `shortname` if it is in the pod's
//! namespace, and under its `alt_hosts`. Names with the first label of the domain and names with the
//! search domain appended are found by rule: the ending is cut off and the rest looked up.
//!
//! Where several hosts have one name, the host of that name comes first, then short forms, longer ones
//! first, then `alt_hosts`, and among equals the host that sorts first; each address family is taken
//! from the first host that has any of it. Names are text here, lower case, without a dot at their end.

mod host;
mod json;

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, Ipv6Addr};

use hashbrown::HashTable;
use smallvec::SmallVec;

use super::search_domains::SearchDomains;
pub use host::Malformed;
use host::{ALT_HOSTS, Field, Host, NAME_INFO, TABLE, fields, without_dot};

/// Longest name there is, as text.
pub(super) const MAX_NAME: usize = 254;

/// Most bytes of a table: a [`Reference`] has 30 bits for a place in it.
const MAX_TABLE: usize = 1 << 30;

/// Hosts that count for one name, the first ones. Without a limit, a table in which all hosts share
/// a name would take time with the square of their number.
const MAX_OF_ONE_NAME: usize = 8;

/// A name table with its index. It never changes.
#[derive(Debug)]
pub struct NameTable {
    /// The encoded `NameTable`.
    encoded: Box<[u8]>,
    domains: SearchDomains,
    /// By the hash of their names.
    names: HashTable<Reference>,
    /// Keyed at random, so that service names cannot be chosen to collide.
    hasher: RandomState,
    alt_hosts: Vec<AltHost>,
    hosts: usize,
    has_wildcards: bool,
}

/// What the table knows of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub v4: SmallVec<[Ipv4Addr; 4]>,
    pub v6: SmallVec<[Ipv6Addr; 4]>,
    /// The offset of the host that comes first.
    host: u32,
    /// Where in the name the target of its CNAME ends, if it has one.
    pub target_end: Option<usize>,
}

/// The offsets of one of `alt_hosts` and of its host's field.
#[derive(Clone, Copy, Debug)]
struct AltHost {
    at: u32,
    host: u32,
}

/// Which of its names a host is entered under. The order is that of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Host,
    /// `shortname.namespace`
    Alias,
    /// `shortname`
    Short,
    AltHost,
}

/// One name of one host: its kind, and the offset of the host's field or the number of the alt host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reference(u32);

/// A name as parts of the message.
#[derive(Clone, Copy, Debug)]
struct Name<'a>(&'a [u8], Option<&'a [u8]>);

impl NameTable {
    /// Checks an encoded `NameTable` and builds its index.
    pub fn build(encoded: &[u8], domains: SearchDomains) -> Result<Self, Malformed> {
        if encoded.len() > MAX_TABLE {
            return Err(Malformed::TooLarge(encoded.len()));
        }
        let mut table = Self {
            // A copy of just this size: the message it came in is freed.
            encoded: encoded.into(),
            domains,
            names: HashTable::new(),
            hasher: RandomState::new(),
            alt_hosts: Vec::new(),
            hosts: 0,
            has_wildcards: false,
        };
        let mut hosts = Vec::new();
        let mut others = Vec::new();
        for field in fields(encoded, 0) {
            let field = field?;
            match field.number {
                TABLE => {}
                NAME_INFO => return Err(Malformed::Delta),
                // A later istiod may add more.
                _ => continue,
            }
            let host = Host::parse(&field, Field::check_text)?;
            let mut names = [host.name, host.short_name]
                .into_iter()
                .chain(host.alt_hosts());
            table.has_wildcards |= names.any(|name| name.starts_with(b"*"));
            hosts.push(Reference::new(Kind::Host, host.at));
            others.extend(table.other_names(&host));
        }
        table.hosts = hosts.len();
        let mut names = HashTable::with_capacity(hosts.len() + others.len());
        for host in hosts {
            table.enter(&mut names, host);
        }
        for other in others {
            let (host, _) = table.resolve(other);
            // A host that comes again counts as it came last.
            if table.is_entered(&names, Reference::new(Kind::Host, host.at)) {
                table.enter(&mut names, other);
            }
        }
        table.names = names;
        Ok(table)
    }

    /// What is known of a name, itself or by a wildcard; the longest wildcard wins.
    pub fn find(&self, name: &[u8]) -> Option<Found> {
        if name.is_empty() || name.len() > MAX_NAME {
            return None;
        }
        if let Some(found) = self.exact(name) {
            return Some(found);
        }
        if !self.has_wildcards {
            return None;
        }
        let mut buffer = [0; MAX_NAME + 2];
        let buffer = &mut buffer[..name.len() + 2];
        buffer[2..].copy_from_slice(name);
        for at in (1..name.len()).filter(|at| name[at - 1] == b'.') {
            // Over the labels that have been tried.
            buffer[at..at + 2].copy_from_slice(b"*.");
            if let Some(found) = self.exact(&buffer[at..]) {
                return Some(found);
            }
        }
        None
    }

    /// The host that a name leads to, as istiod wrote it, without a dot at its end.
    pub fn host_of(&self, name: &[u8]) -> Option<String> {
        let host = Host::at(&self.encoded, self.find(name)?.host);
        Some(String::from_utf8_lossy(without_dot(host.name)).into_owned())
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.hosts
    }

    fn exact(&self, name: &[u8]) -> Option<Found> {
        if let Some(base) = self.domains.before_search(name) {
            let has_name = |host| self.hosts_of(name).any(|(_, other)| other.at == host);
            let expands = |host: &Host<'_>| host.has_addresses() && !has_name(host.at);
            if self.hosts_of(base).any(|(_, host)| expands(&host)) {
                let found = self.addresses(base)?;
                // Clients refuse a name with a star as a target.
                let target_end = (!base.contains(&b'*')).then_some(base.len());
                return Some(Found {
                    target_end,
                    ..found
                });
            }
        }
        self.addresses(name)
    }

    /// The addresses of a name, each family from the first host that has some.
    fn addresses(&self, name: &[u8]) -> Option<Found> {
        let mut hosts: SmallVec<[_; 2]> = self.hosts_of(name).collect();
        hosts.sort_unstable_by_key(|(rank, host)| (*rank, host.name));
        let mut found = Found {
            host: hosts.first().map_or(0, |(_, host)| host.at),
            ..Found::default()
        };
        for (_, host) in &hosts {
            let (v4, v6) = host.addresses();
            if found.v4.is_empty() {
                found.v4 = v4;
            }
            if found.v6.is_empty() {
                found.v6 = v6;
            }
        }
        (!found.v4.is_empty() || !found.v6.is_empty()).then_some(found)
    }

    /// The hosts of this name, each with its rank.
    fn hosts_of<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = (u8, Host<'a>)> {
        let of_itself = self.entered(name).map(|(kind, host)| match kind {
            Kind::Host => (0, host),
            Kind::Alias => (2, host),
            Kind::Short => (3, host),
            Kind::AltHost => (4, host),
        });
        let base = self.domains.before_first_label(name);
        let with_label = base.into_iter().flat_map(|base| self.entered(base));
        let with_label = with_label.filter(|(kind, _)| *kind == Kind::Alias);
        let hosts = of_itself.chain(with_label.map(|(_, host)| (1, host)));
        hosts.filter(|(_, host)| host.can_be_asked_for())
    }

    fn entered<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = (Kind, Host<'a>)> {
        let references = self.names.iter_hash(self.hasher.hash_one(name));
        references.filter_map(move |reference| {
            let (host, entered) = self.resolve(*reference);
            entered.is(name).then_some((reference.kind(), host))
        })
    }

    /// A reference's host, and the name it stands for.
    fn resolve(&self, reference: Reference) -> (Host<'_>, Name<'_>) {
        let (kind, number) = (reference.kind(), reference.number());
        if kind == Kind::AltHost {
            let AltHost { at, host } = self.alt_hosts[number as usize];
            let name = Field::at(&self.encoded, at).map(|field| field.value);
            let name = Name(name.unwrap_or_default(), None);
            return (Host::at(&self.encoded, host), name);
        }
        let host = Host::at(&self.encoded, number);
        let name = match kind {
            Kind::Host => Name(without_dot(host.name), None),
            Kind::Alias => Name(host.short_name, Some(host.namespace)),
            Kind::Short | Kind::AltHost => Name(host.short_name, None),
        };
        (host, name)
    }

    /// All hosts, in the order of the message.
    fn all(&self) -> impl Iterator<Item = Host<'_>> {
        let fields = fields(&self.encoded, 0).map_while(Result::ok);
        let hosts = fields.filter(|field| field.number == TABLE);
        hosts.filter_map(|field| Host::parse(&field, |_| Ok(())).ok())
    }

    fn has_short_forms(&self, host: &Host<'_>) -> bool {
        let domain = &self.domains.domain;
        host.is_kubernetes() && !domain.is_empty() && host.name.ends_with(domain.as_bytes())
    }

    /// The names of a host beside its own.
    fn other_names(&mut self, host: &Host<'_>) -> Vec<Reference> {
        let mut names = Vec::new();
        if !self.has_short_forms(host) {
            return names;
        }
        names.push(Reference::new(Kind::Alias, host.at));
        if host.namespace == self.domains.namespace.as_bytes() {
            names.push(Reference::new(Kind::Short, host.at));
        }
        for alt_host in host.parts(ALT_HOSTS) {
            // A number is less than the bytes of the largest table, as an offset is.
            names.push(Reference::new(Kind::AltHost, self.alt_hosts.len() as u32));
            self.alt_hosts.push(AltHost {
                at: alt_host.at as u32,
                host: host.at,
            });
        }
        names
    }

    /// Enters a name, in place of the same name of the same host, or of the last of too many.
    fn enter(&self, names: &mut HashTable<Reference>, new: Reference) {
        let (_, name) = self.resolve(new);
        let name = name.to_lowercase();
        if name.len() > MAX_NAME {
            return;
        }
        let precedence = |name: &Reference| (name.kind(), self.resolve(*name).0.name);
        let hash = self.hasher.hash_one(name.as_slice());
        let same = names.iter_hash(hash).copied();
        let same = same.filter(|there| self.resolve(*there).1.is(&name));
        let same: SmallVec<[_; MAX_OF_ONE_NAME]> = same.collect();
        let again = same
            .iter()
            .find(|there| precedence(there) == precedence(&new));
        let last = same.iter().max_by_key(|there| precedence(there));
        let replaced = match (again, last) {
            (Some(again), _) => Some(again),
            (None, Some(last)) if same.len() == MAX_OF_ONE_NAME => {
                if precedence(last) < precedence(&new) {
                    return;
                }
                Some(last)
            }
            (None, _) => None,
        };
        match replaced.and_then(|old| names.find_mut(hash, |there| there == old)) {
            Some(place) => *place = new,
            None => {
                let hash_of = |name: &Reference| self.hash(*name);
                names.insert_unique(hash, new, hash_of);
            }
        }
    }

    fn is_entered(&self, names: &HashTable<Reference>, wanted: Reference) -> bool {
        let is_wanted = |there: &Reference| *there == wanted;
        names.find(self.hash(wanted), is_wanted).is_some()
    }

    fn hash(&self, reference: Reference) -> u64 {
        let (_, name) = self.resolve(reference);
        self.hasher.hash_one(name.to_lowercase().as_slice())
    }
}

impl Reference {
    /// A number is less than the bytes of the largest table.
    fn new(kind: Kind, number: u32) -> Self {
        Self(number << 2 | kind as u32)
    }

    fn kind(self) -> Kind {
        match self.0 & 3 {
            0 => Kind::Host,
            1 => Kind::Alias,
            2 => Kind::Short,
            _ => Kind::AltHost,
        }
    }

    fn number(self) -> u32 {
        self.0 >> 2
    }
}

impl Name<'_> {
    /// Whether it is the lower-case name `other`.
    fn is(&self, other: &[u8]) -> bool {
        let Self(first, second) = *self;
        let Some((start, rest)) = other.split_at_checked(first.len()) else {
            return false;
        };
        let ends_alike = match second {
            Some(second) => rest
                .strip_prefix(b".")
                .is_some_and(|rest| rest.eq_ignore_ascii_case(second)),
            None => rest.is_empty(),
        };
        ends_alike && start.eq_ignore_ascii_case(first)
    }

    fn to_lowercase(self) -> Vec<u8> {
        let mut name = self.0.to_ascii_lowercase();
        if let Some(second) = self.1 {
            name.push(b'.');
            name.extend(second.to_ascii_lowercase());
        }
        name
    }
}

#[cfg(test)]
pub(crate) mod tests;
