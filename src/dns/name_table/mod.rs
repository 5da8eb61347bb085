//! Indexes the names that istiod sends by NDS, over the encoded `NameTable`.
//!
//! Each host is entered under its name, as `shortname.namespace`, as `shortname` if it is in the pod's
//! namespace, and under its `alt_hosts`. Names with the first label of the domain and names with the
//! search domain appended are not entered: the ending is cut off and the rest is looked up.
//!
//! If several hosts share a name, the host of that name precedes short forms, longer forms precede
//! shorter ones, and `alt_hosts` come last; among equals the host that sorts first precedes. For
//! each address family, the first host with addresses answers. Names are text, lower case, without a dot at
//! their end.

mod host;
mod json;

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, Ipv6Addr};

use hashbrown::HashTable;
use smallvec::SmallVec;

use super::search_domains::SearchDomains;
pub use host::Malformed;
use host::{ALT_HOSTS, Field, Host, NAME_INFO, TABLE, fields, without_dot};

/// Longest name of DNS, as text.
pub(super) const MAX_NAME: usize = 254;

/// Most bytes of a table: a [`Reference`] has 30 bits for an offset.
const MAX_TABLE: usize = 1 << 30;

/// Hosts that are entered under one name: the first ones. Without a limit, a table in which all hosts
/// share a name would take quadratic time.
const MAX_HOSTS_PER_NAME: usize = 8;

/// An immutable name table with its index.
#[derive(Debug)]
pub struct NameTable {
    /// The encoded `NameTable`.
    encoded: Box<[u8]>,
    domains: SearchDomains,
    /// The entered names, by their hash.
    names: HashTable<Reference>,
    /// Keyed at random, so that nobody can choose service names that collide.
    hasher: RandomState,
    alt_hosts: Vec<AltHost>,
    hosts: usize,
}

/// The addresses of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedName {
    pub v4: SmallVec<[Ipv4Addr; 4]>,
    pub v6: SmallVec<[Ipv6Addr; 4]>,
    /// The offset of the first host of that name.
    host: u32,
    /// The end of the CNAME's target in the name, if there is a CNAME.
    pub target_end: Option<usize>,
}

/// The offsets of one of `alt_hosts` and of its host's field.
#[derive(Clone, Copy, Debug)]
struct AltHost {
    at: u32,
    host: u32,
}

/// The kinds of names that a host is entered under, in order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Host,
    /// `shortname.namespace`
    Alias,
    /// `shortname`
    Short,
    AltHost,
}

/// One name of one host: its kind, and the offset of the host's field or the index of the alt host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reference(u32);

/// An entered name, in lower case.
type Name = SmallVec<[u8; 64]>;

impl NameTable {
    /// Checks an encoded `NameTable` and builds its index.
    pub fn build(encoded: &[u8], domains: SearchDomains) -> Result<Self, Malformed> {
        if encoded.len() > MAX_TABLE {
            return Err(Malformed::TooLarge(encoded.len()));
        }
        let mut table = Self {
            // A copy, so that the larger response that contains it is freed.
            encoded: encoded.into(),
            domains,
            names: HashTable::new(),
            hasher: RandomState::new(),
            alt_hosts: Vec::new(),
            hosts: 0,
        };
        let mut hosts = Vec::new();
        let mut others = Vec::new();
        for field in fields(encoded, 0) {
            let field = field?;
            match field.number {
                TABLE => {}
                NAME_INFO => return Err(Malformed::Delta),
                // A newer istiod may send other fields.
                _ => continue,
            }
            let host = Host::parse(&field)?;
            hosts.push(Reference::new(Kind::Host, host.at));
            others.extend(table.other_names(&host));
        }
        table.hosts = hosts.len();
        let mut names = HashTable::with_capacity(hosts.len() + others.len());
        for host in hosts {
            table.enter(&mut names, host);
        }
        for other in others {
            let host = Reference::new(Kind::Host, table.resolve(other).0.at);
            // The last of several fields with the same host replaces the others.
            if names.find(table.hash(host), |name| *name == host).is_some() {
                table.enter(&mut names, other);
            }
        }
        table.names = names;
        Ok(table)
    }

    /// Resolves a name, by itself or by the longest wildcard that matches.
    pub fn find(&self, name: &[u8]) -> Option<ResolvedName> {
        if name.is_empty() || name.len() > MAX_NAME {
            return None;
        }
        self.find_exact(name).or_else(|| self.find_wildcard(name))
    }

    fn find_wildcard(&self, name: &[u8]) -> Option<ResolvedName> {
        let mut buffer = [0; MAX_NAME + 2];
        let wildcard = &mut buffer[..name.len() + 2];
        wildcard[2..].copy_from_slice(name);
        let mut labels = (1..name.len()).filter(|at| name[at - 1] == b'.');
        labels.find_map(|at| {
            // Overwrites labels that have been tried.
            wildcard[at..at + 2].copy_from_slice(b"*.");
            self.find_exact(&wildcard[at..])
        })
    }

    /// Returns the host that a name resolves to, as istiod wrote it, without a dot at its end.
    pub fn host_of(&self, name: &[u8]) -> Option<String> {
        let host = Host::at(&self.encoded, self.find(name)?.host);
        Some(without_dot(host.name).to_owned())
    }

    /// Returns the number of hosts.
    pub fn hosts(&self) -> usize {
        self.hosts
    }

    /// Resolves a name without wildcards. With a search domain, it is an alias of the name before that,
    /// unless a host has it.
    fn find_exact(&self, name: &[u8]) -> Option<ResolvedName> {
        if let Some(base) = self.domains.before_search(name) {
            let has_name = |host| self.hosts_of(name).any(|(_, other)| other.at == host);
            let expands = |host: &Host<'_>| host.has_addresses() && !has_name(host.at);
            if self.hosts_of(base).any(|(_, host)| expands(&host)) {
                let mut resolved = self.addresses(base)?;
                // Clients refuse a target with a star.
                resolved.target_end = (!base.contains(&b'*')).then_some(base.len());
                return Some(resolved);
            }
        }
        self.addresses(name)
    }

    /// Returns the addresses of a name, each family from the first host that has any.
    fn addresses(&self, name: &[u8]) -> Option<ResolvedName> {
        let mut hosts: SmallVec<[_; 2]> = self.hosts_of(name).collect();
        hosts.sort_unstable_by_key(|(rank, host)| (*rank, host.name));
        let mut resolved = ResolvedName::default();
        // In reverse, so that earlier hosts overwrite later ones.
        for (_, host) in hosts.iter().rev() {
            let (v4, v6) = host.addresses();
            resolved.host = host.at;
            if !v4.is_empty() {
                resolved.v4 = v4;
            }
            if !v6.is_empty() {
                resolved.v6 = v6;
            }
        }
        (!resolved.v4.is_empty() || !resolved.v6.is_empty()).then_some(resolved)
    }

    /// Returns the hosts of this name, each with its rank. A short form with the first label of the domain
    /// is longer than the alias, so it precedes that: false sorts before true.
    fn hosts_of<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = ((Kind, bool), Host<'a>)> {
        let exact = self.entered(name).map(|(kind, host)| ((kind, true), host));
        let base = self.domains.before_first_label(name);
        let before_label = base.into_iter().flat_map(|base| self.entered(base));
        let aliases = before_label.filter(|(kind, _)| *kind == Kind::Alias);
        let hosts = exact.chain(aliases.map(|(kind, host)| ((kind, false), host)));
        hosts.filter(|(_, host)| host.is_queryable())
    }

    /// Returns the hosts that are entered under this name.
    fn entered<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = (Kind, Host<'a>)> {
        let references = self.names.iter_hash(self.hasher.hash_one(name));
        references.filter_map(move |reference| {
            let (host, entered) = self.resolve(*reference);
            (entered.as_slice() == name).then_some((reference.kind(), host))
        })
    }

    /// Returns the host of a reference, and the name.
    fn resolve(&self, reference: Reference) -> (Host<'_>, Name) {
        let (kind, mut at) = (reference.kind(), reference.number());
        let mut alt_host = "";
        if kind == Kind::AltHost {
            let entry = self.alt_hosts[at as usize];
            let field = Field::at(&self.encoded, entry.at);
            alt_host = field.map_or("", |field| field.text().unwrap_or_default());
            at = entry.host;
        }
        let host = Host::at(&self.encoded, at);
        let first = match kind {
            Kind::Host => without_dot(host.name),
            Kind::Alias | Kind::Short => host.short_name,
            Kind::AltHost => alt_host,
        };
        let mut name = Name::from_slice(first.as_bytes());
        if kind == Kind::Alias {
            name.push(b'.');
            name.extend_from_slice(host.namespace.as_bytes());
        }
        name.make_ascii_lowercase();
        (host, name)
    }

    /// Iterates over all hosts, in the order of the message.
    fn all(&self) -> impl Iterator<Item = Host<'_>> {
        let fields = fields(&self.encoded, 0).map_while(Result::ok);
        let hosts = fields.filter(|field| field.number == TABLE);
        hosts.filter_map(|field| Host::parse(&field).ok())
    }

    fn has_short_forms(&self, host: &Host<'_>) -> bool {
        let domain = &self.domains.domain;
        host.is_kubernetes() && !domain.is_empty() && host.name.ends_with(domain.as_str())
    }

    /// Returns the names of a host other than its own, and remembers the offsets of alt hosts.
    fn other_names(&mut self, host: &Host<'_>) -> Vec<Reference> {
        let mut names = Vec::new();
        if !self.has_short_forms(host) {
            return names;
        }
        names.push(Reference::new(Kind::Alias, host.at));
        if host.namespace == self.domains.namespace {
            names.push(Reference::new(Kind::Short, host.at));
        }
        for alt_host in host.parts(ALT_HOSTS) {
            // Like an offset, an index is less than the bytes of the largest table.
            names.push(Reference::new(Kind::AltHost, self.alt_hosts.len() as u32));
            self.alt_hosts.push(AltHost {
                at: alt_host.at as u32,
                host: host.at,
            });
        }
        names
    }

    /// Enters a name. It replaces the same name of the same host, or, if too many hosts share the name, the
    /// last of these.
    fn enter(&self, names: &mut HashTable<Reference>, new: Reference) {
        let (_, name) = self.resolve(new);
        if name.len() > MAX_NAME {
            return;
        }
        let hash = self.hasher.hash_one(name.as_slice());
        let same_hash = names.iter_hash(hash).copied();
        let same_name = same_hash.filter(|old| self.resolve(*old).1 == name);
        let entered: SmallVec<[_; MAX_HOSTS_PER_NAME]> = same_name.collect();
        let precedence = |name: &Reference| (name.kind(), self.resolve(*name).0.name);
        let rank = precedence(&new);
        let same_host = entered.iter().find(|old| precedence(old) == rank);
        let last = entered.iter().max_by_key(|old| precedence(old));
        let is_full = entered.len() == MAX_HOSTS_PER_NAME;
        let replaced = same_host.or(last.filter(|_| is_full));
        if replaced.is_some_and(|old| precedence(old) < rank) {
            return;
        }
        match replaced.and_then(|old| names.find_mut(hash, |name| name == old)) {
            Some(old) => *old = new,
            None => {
                names.insert_unique(hash, new, |name| self.hash(*name));
            }
        }
    }

    fn hash(&self, reference: Reference) -> u64 {
        let (_, name) = self.resolve(reference);
        self.hasher.hash_one(name.as_slice())
    }
}

impl Reference {
    /// `number` is less than the bytes of the largest table.
    fn new(kind: Kind, number: u32) -> Self {
        Self(number << 2 | kind as u32)
    }

    fn kind(self) -> Kind {
        [Kind::Host, Kind::Alias, Kind::Short, Kind::AltHost][self.0 as usize & 3]
    }

    fn number(self) -> u32 {
        self.0 >> 2
    }
}

#[cfg(test)]
pub(crate) mod tests;
