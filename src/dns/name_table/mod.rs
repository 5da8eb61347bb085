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

use std::cmp::Reverse;
use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, Ipv6Addr};

use smallvec::SmallVec;

use super::search_domains::SearchDomains;
pub use host::Malformed;
use host::{Host, without_dot};

/// The longest name of DNS, as text.
pub(super) const MAX_NAME: usize = 254;

/// The most bytes of a table, whose offsets have 32 bits.
const MAX_TABLE: usize = 1 << 30;

/// Hosts that are entered under one name: the first ones. Without a limit, the lookup of a name that all
/// hosts share would take long.
const MAX_HOSTS_PER_NAME: usize = 8;

/// An immutable name table with its index.
#[derive(Debug)]
pub struct NameTable {
    /// The encoded `NameTable`.
    encoded: Box<[u8]>,
    domains: SearchDomains,
    /// The hash of each name of each host, with the offset of the host's field. Sorted by hash; a lookup
    /// compares the names of the hosts with the same hash.
    index: Box<[(u32, u32)]>,
    /// The hash function. Its key is random, so that nobody can choose service names with the same hash.
    hasher: RandomState,
    host_count: usize,
}

/// The addresses of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedName {
    pub v4: SmallVec<[Ipv4Addr; 4]>,
    pub v6: SmallVec<[Ipv6Addr; 4]>,
    /// The offset of the first host of that name in the table.
    host: u32,
    /// The end of the CNAME's target in the name, if there is a CNAME.
    pub target_end: Option<usize>,
}

/// The kinds of names that a host has, in order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Host,
    /// `shortname.namespace` with the first label of the domain. It is not entered, but looked up without the
    /// label.
    ShortNamespaceSvc,
    /// `shortname.namespace`
    ShortNamespace,
    /// `shortname`
    Short,
    AltHost,
}

/// An entered name, in lower case.
type Name = SmallVec<[u8; 64]>;

impl NameTable {
    /// Checks an encoded `NameTable` and builds its index.
    pub fn build(encoded: &[u8], domains: SearchDomains) -> Result<Self, Malformed> {
        if encoded.len() > MAX_TABLE {
            return Err(Malformed("it has more than 1 GiB"));
        }
        let mut hosts = Vec::new();
        for host in host::hosts(encoded) {
            let host = host?;
            hosts.push((host.name, Reverse(host.offset)));
        }
        hosts.sort_unstable();
        // The last of several fields with the same host replaces the others.
        hosts.dedup_by_key(|(name, _)| *name);
        let mut table = Self {
            // A copy, so that the larger response that contains it is freed.
            encoded: encoded.into(),
            domains,
            index: Box::default(),
            hasher: RandomState::new(),
            host_count: hosts.len(),
        };
        let mut names = Vec::new();
        for (rank, (_, Reverse(offset))) in (0_u32..).zip(&hosts) {
            for (kind, name) in table.names_of(&Host::read_at(encoded, *offset)) {
                if name.len() <= MAX_NAME {
                    names.push((table.hash(&name), kind, rank, *offset));
                }
            }
        }
        // Sorts by hash, and by precedence within each hash.
        names.sort_unstable();
        names.dedup();
        let by_hash = names.chunk_by(|name, next| name.0 == next.0);
        let first_ones = by_hash.flat_map(|same| same.iter().take(MAX_HOSTS_PER_NAME));
        table.index = first_ones.map(|(hash, _, _, offset)| (*hash, *offset)).collect();
        Ok(table)
    }

    /// Resolves a name, by itself or by the longest wildcard that matches.
    pub fn find(&self, name: &[u8]) -> Option<ResolvedName> {
        if name.is_empty() || name.len() > MAX_NAME {
            return None;
        }
        self.find_exact(name).or_else(|| self.find_wildcard(name))
    }

    /// Resolves a name by the longest wildcard that matches: replaces its first label by a star, then its first
    /// two, and so on.
    fn find_wildcard(&self, name: &[u8]) -> Option<ResolvedName> {
        let mut buffer = [0; MAX_NAME + 2];
        let wildcard = &mut buffer[..name.len() + 2];
        wildcard[2..].copy_from_slice(name);
        (1..name.len()).filter(|start| name[start - 1] == b'.').find_map(|start| {
            // The name starts at offset 2, so `*.` overwrites the two bytes before the label.
            wildcard[start..start + 2].copy_from_slice(b"*.");
            self.find_exact(&wildcard[start..])
        })
    }

    /// Returns the host that a name resolves to, as istiod wrote it, without a dot at its end.
    pub fn host_of(&self, name: &[u8]) -> Option<String> {
        Some(without_dot(Host::read_at(&self.encoded, self.find(name)?.host).name).to_owned())
    }

    /// Returns the number of hosts.
    pub fn host_count(&self) -> usize {
        self.host_count
    }

    /// Looks up this name, which may be a wildcard entry. If it ends in the search domain, the name without it
    /// answers, with a CNAME, if one of its hosts has addresses and does not have the full name as well.
    fn find_exact(&self, name: &[u8]) -> Option<ResolvedName> {
        if let Some(base) = self.domains.without_search_domain(name)
            && self.hosts_of(base).any(|(_, host)| {
                host.has_addresses() && !self.hosts_of(name).any(|(_, it)| it.offset == host.offset)
            })
        {
            let mut resolved = self.addresses(base)?;
            // Clients refuse a target with a star.
            resolved.target_end = if base.contains(&b'*') { None } else { Some(base.len()) };
            return Some(resolved);
        }
        self.addresses(name)
    }

    /// Returns the addresses of a name, each family from the first host that has any.
    fn addresses(&self, name: &[u8]) -> Option<ResolvedName> {
        let mut hosts: SmallVec<[_; 2]> = self.hosts_of(name).collect();
        hosts.sort_unstable_by_key(|(kind, host)| (*kind, host.name));
        let mut resolved = ResolvedName::default();
        // In reverse, so that earlier hosts overwrite later ones.
        for (_, host) in hosts.iter().rev() {
            let (v4, v6) = host.addresses();
            resolved.host = host.offset;
            if !v4.is_empty() {
                resolved.v4 = v4;
            }
            if !v6.is_empty() {
                resolved.v6 = v6;
            }
        }
        if resolved.v4.is_empty() && resolved.v6.is_empty() { None } else { Some(resolved) }
    }

    /// Returns the hosts of this name, each with the kind that the name is for it.
    fn hosts_of<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = (Kind, Host<'a>)> {
        let base = self.domains.without_svc_label(name);
        let under_base = base.into_iter().flat_map(|base| self.entries_of(base));
        let short_forms = under_base.filter(|(kind, _)| *kind == Kind::ShortNamespace);
        let with_label = short_forms.map(|(_, host)| (Kind::ShortNamespaceSvc, host));
        self.entries_of(name).chain(with_label).filter(|(_, host)| host.is_queryable())
    }

    /// Returns the hosts that are entered under this name, each with the kind that the name is for it.
    fn entries_of<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = (Kind, Host<'a>)> {
        let hash = self.hash(name);
        let start = self.index.partition_point(|(other, _)| *other < hash);
        let from_start = self.index[start..].iter();
        from_start.take_while(move |(other, _)| *other == hash).flat_map(move |(_, offset)| {
            let host = Host::read_at(&self.encoded, *offset);
            let names = self.names_of(&host).into_iter();
            let same_name = names.filter(move |(_, entered)| entered.as_slice() == name);
            same_name.map(move |(kind, _)| (kind, host))
        })
    }

    /// Returns the names that a host is entered under, by precedence.
    fn names_of(&self, host: &Host<'_>) -> SmallVec<[(Kind, Name); 4]> {
        let mut names = SmallVec::new();
        names.push((Kind::Host, lower_case(&[without_dot(host.name)])));
        let domain = self.domains.domain.as_str();
        if !host.is_kubernetes() || domain.is_empty() || !host.name.ends_with(domain) {
            return names;
        }
        names.push((Kind::ShortNamespace, lower_case(&[host.short_name, ".", host.namespace])));
        if host.namespace == self.domains.namespace {
            names.push((Kind::Short, lower_case(&[host.short_name])));
        }
        for alt_host in host.alt_hosts() {
            names.push((Kind::AltHost, lower_case(&[alt_host])));
        }
        names
    }

    fn hash(&self, name: &[u8]) -> u32 {
        self.hasher.hash_one(name) as u32
    }
}

/// Joins the parts of a name, in lower case.
fn lower_case(parts: &[&str]) -> Name {
    let mut name = Name::new();
    for part in parts {
        name.extend_from_slice(part.as_bytes());
    }
    name.make_ascii_lowercase();
    name
}

#[cfg(test)]
pub(crate) mod tests;
