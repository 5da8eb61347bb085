//! Reads an encoded name table into an index.
//!
//! The first pass counts, so that everything has its size from the start; the second notes where
//! each host and its parts are; the third enters the names. The bytes themselves are kept: they hold
//! every string once, as istiod wrote it.
//!
//! Does not answer anything.

use std::cmp::Ordering;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::thread::yield_now;

use super::index::Index;
use super::proto::{self, Malformed};
use super::{Alt, Entry, Kind, LONGEST, Names, Place, Reference, Table};
use crate::dns::scope::Scope;

/// Most bytes of a table.
const LARGEST: usize = 1 << 30;

/// How much is done between two moments in which others may have the processor: less than 0.1 ms.
const TURN: usize = 256;
const TURN_BYTES: usize = 64 * 1024;

const KUBERNETES: &[u8] = b"Kubernetes";

/// What the passes fill.
struct Builder {
    raw: Box<[u8]>,
    scope: Scope,
    entries: Vec<Entry>,
    alts: Vec<Alt>,
    v4: Vec<Ipv4Addr>,
    v6: Vec<Ipv6Addr>,
}

/// The parts of one entry, as they come.
#[derive(Default)]
struct Parts {
    host: Range<usize>,
    registry: Range<usize>,
    short: Range<usize>,
    namespace: Range<usize>,
}

impl Table {
    /// Reads an encoded `NameTable`.
    pub fn build(encoded: &[u8], scope: Scope) -> Result<Self, Malformed> {
        // Places and references, which hold two bits more than a number, have four bytes.
        if encoded.len() > LARGEST {
            return Err(Malformed::TooLarge(encoded.len()));
        }
        let count = count(encoded)?;
        let mut builder = Builder {
            raw: copy(encoded),
            scope,
            entries: Vec::with_capacity(count + 1),
            alts: Vec::new(),
            v4: Vec::new(),
            v6: Vec::new(),
        };
        builder.read()?;
        Ok(builder.finish())
    }
}

/// A copy of just this size lets go of the message around it.
fn copy(encoded: &[u8]) -> Box<[u8]> {
    let mut raw = Vec::with_capacity(encoded.len());
    for piece in encoded.chunks(TURN_BYTES) {
        raw.extend_from_slice(piece);
        yield_now();
    }
    raw.into()
}

/// Lets others have the processor now and then. A thread that is woken while this one computes waits
/// until the time slice is over otherwise, for milliseconds, and a nice value does not help it: the
/// kernel lets who runs come to its end (EEVDF, `RUN_TO_PARITY`).
fn make_way(done: usize) {
    if done.is_multiple_of(TURN) {
        yield_now();
    }
}

fn count(encoded: &[u8]) -> Result<usize, Malformed> {
    let mut count = 0;
    for field in proto::fields(encoded, 0..encoded.len()) {
        let (number, _) = field?;
        if number == 1 {
            count += 1;
            make_way(count);
        }
    }
    Ok(count)
}

impl Builder {
    fn read(&mut self) -> Result<(), Malformed> {
        let raw = std::mem::take(&mut self.raw);
        for field in proto::fields(&raw, 0..raw.len()) {
            if let (1, place) = field? {
                self.read_entry(&raw, place)?;
                make_way(self.entries.len());
            }
        }
        self.raw = raw;
        self.close();
        Ok(())
    }

    /// One pair of the map: a host, and its `NameInfo`.
    fn read_entry(&mut self, raw: &[u8], place: Range<usize>) -> Result<(), Malformed> {
        let mut parts = Parts::default();
        let mut info = None;
        for field in proto::fields(raw, place) {
            match field? {
                (1, host) => {
                    proto::text(raw, host.clone())?;
                    parts.host = host;
                }
                (2, place) => info = Some(place),
                _ => {}
            }
        }
        let (v4, v6, alts) = (self.v4.len(), self.v6.len(), self.alts.len());
        if let Some(info) = info {
            self.read_info(raw, info, &mut parts)?;
        }
        let has_addresses = (v4, v6) != (self.v4.len(), self.v6.len());
        let kubernetes = &raw[parts.registry.clone()] == KUBERNETES;
        let host = &raw[parts.host.clone()];
        let in_domain =
            !self.scope.domain.is_empty() && host.ends_with(self.scope.domain.as_bytes());
        // The absolute form of such a host would end in two dots.
        let unreachable = super::key(host).is_empty() || kubernetes && host.ends_with(b".");
        let has_forms = kubernetes && in_domain;
        let namespace = &raw[parts.namespace.clone()];
        // Names longer than one byte counts are longer than any that is asked for.
        let lengths = (
            parts.short.len().try_into(),
            parts.namespace.len().try_into(),
        );
        let names = match lengths {
            _ if !has_addresses || unreachable => Names::Nothing,
            (Ok(_), Ok(_)) if has_forms && namespace == self.scope.namespace.as_bytes() => {
                Names::Own
            }
            (Ok(_), Ok(_)) if has_forms => Names::Aliased,
            _ => Names::Host,
        };
        if names == Names::Nothing || !has_forms {
            self.alts.truncate(alts);
        }
        let is_single = (v4 + 1, v6) == (self.v4.len(), self.v6.len());
        let single = self.v4.pop_if(|_| is_single);
        self.entries.push(Entry {
            host: Place::at(&parts.host),
            // Shorter than the bytes, which four bytes count.
            short: parts.short.start as u32,
            namespace: parts.namespace.start as u32,
            v4: v4 as u32,
            v6: v6 as u32,
            single: single.unwrap_or(Ipv4Addr::UNSPECIFIED),
            is_single,
            short_length: lengths.0.unwrap_or_default(),
            namespace_length: lengths.1.unwrap_or_default(),
            names,
        });
        Ok(())
    }

    fn read_info(
        &mut self,
        raw: &[u8],
        info: Range<usize>,
        parts: &mut Parts,
    ) -> Result<(), Malformed> {
        // The entry being read is the next one.
        let entry = self.entries.len() as u32;
        for field in proto::fields(raw, info) {
            let (number, place) = field?;
            // What a later istiod adds need not be text.
            if !(1..=5).contains(&number) {
                continue;
            }
            let text = proto::text(raw, place.clone())?;
            match number {
                1 => self.read_address(text),
                2 => parts.registry = place,
                3 => parts.short = place,
                4 => parts.namespace = place,
                _ => self.alts.push(Alt {
                    entry,
                    host: Place::at(&place),
                }),
            }
        }
        Ok(())
    }

    /// What is no address is left out. An IPv4 address written as IPv6 is one of IPv6.
    fn read_address(&mut self, text: &str) {
        if let Ok(address) = text.parse() {
            self.v4.push(address);
        } else if let Ok(address) = text.parse() {
            self.v6.push(address);
        }
    }

    /// An entry behind the last, where its addresses end.
    fn close(&mut self) {
        self.entries.push(Entry {
            host: Place::at(&(0..0)),
            short: 0,
            namespace: 0,
            v4: self.v4.len() as u32,
            v6: self.v6.len() as u32,
            single: Ipv4Addr::UNSPECIFIED,
            is_single: false,
            short_length: 0,
            namespace_length: 0,
            names: Names::Nothing,
        });
    }

    fn finish(self) -> Table {
        let count = self.entries.len() - 1;
        let with = |names| {
            self.entries
                .iter()
                .filter(|entry| entry.names >= names)
                .count()
        };
        let names = count + with(Names::Aliased) + with(Names::Own) + self.alts.len();
        let mut v4 = self.v4;
        v4.shrink_to_fit();
        let mut table = Table {
            raw: self.raw,
            scope: self.scope,
            entries: self.entries.into(),
            alts: self.alts.into(),
            v4: v4.into(),
            v6: self.v6.into(),
            index: Index::new(0),
            wildcards: false,
        };
        let mut index = Index::new(names);
        // A number of entries, as is counted in four bytes.
        for entry in 0..count as u32 {
            table.enter(&mut index, entry);
            make_way(entry as usize);
        }
        for alt in 0..table.alts.len() as u32 {
            table.enter_name(&mut index, Reference::new(Kind::Alt, alt));
            make_way(alt as usize);
        }
        table.index = index;
        table
    }
}

impl Table {
    fn enter(&mut self, index: &mut Index, number: u32) {
        let entry = self.entries[number as usize];
        self.enter_name(index, Reference::new(Kind::Host, number));
        if entry.names >= Names::Aliased {
            self.enter_name(index, Reference::new(Kind::Alias, number));
        }
        if entry.names == Names::Own {
            self.enter_name(index, Reference::new(Kind::Short, number));
        }
    }

    fn enter_name(&mut self, index: &mut Index, reference: Reference) {
        let mut buffer = [0; LONGEST];
        let Some(name) = self.name(reference, &mut buffer) else {
            return;
        };
        let hash = index.hash(name);
        let compare = |there, new| self.compare(Reference(there), Reference(new));
        let replaced = index.insert(hash, reference.0, compare);
        self.wildcards |= name.starts_with(b"*.");
        if let (Some(replaced), Kind::Host) = (replaced, reference.kind()) {
            let entry = Reference(replaced).number();
            self.entries[entry as usize].names = Names::Nothing;
        }
    }

    /// How one reference stands to another of the same name; nothing if the names differ. Equal is
    /// the same host written twice: the later one counts.
    fn compare(&self, there: Reference, new: Reference) -> Option<Ordering> {
        let (mut a, mut b) = ([0; LONGEST], [0; LONGEST]);
        let is_same = self.name(there, &mut a)? == self.name(new, &mut b)?;
        is_same.then(|| self.precedence(there).cmp(&self.precedence(new)))
    }
}
