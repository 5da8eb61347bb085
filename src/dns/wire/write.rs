//! Writes answers record by record, as far as they fit.
//!
//! The question is copied as it came, names point back into it where they can, and room for the
//! EDNS record is kept from the start. What does not fit is left out and the answer says so.
//!
//! Does not decide what to answer.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::{
    A, AA, AAAA, CD, CNAME, Edns, HEADER, IN, OPCODE, OPT, OWN_UDP, QR, Question, RA, RD, Rcode, TC,
};

/// An EDNS record without options.
const EDNS_LENGTH: usize = 11;
/// What a record has between its owner and its data.
const FIXED: usize = 10;

/// Where a name already stands in the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pointer(u16);

impl Pointer {
    fn on_wire(self) -> [u8; 2] {
        (self.0 | 0xc000).to_be_bytes()
    }
}

/// An answer being written. It has room for the header and the question at least.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    out: &'a mut [u8],
    length: usize,
    limit: usize,
    ttl: u32,
    /// Records so far.
    answers: u16,
    edns: Option<Edns>,
}

impl<'a> Writer<'a> {
    /// Begins the answer to `query`, no longer than `limit`. `out` has room for any query.
    pub(crate) fn new(query: &[u8], question: &Question, limit: usize, out: &'a mut [u8]) -> Self {
        let length = header(query, Rcode::NoError, Some(question.end), out);
        let limit = limit.min(out.len());
        let edns = question.edns;
        let reserved = if edns.is_some() { EDNS_LENGTH } else { 0 };
        Self {
            out,
            length,
            limit: limit.saturating_sub(reserved),
            ttl: 0,
            answers: 0,
            edns,
        }
    }

    /// Says the answer comes from who knows, and how long it is good for.
    pub(crate) fn authoritative(&mut self, ttl: u32) {
        self.out[2] |= AA;
        self.ttl = ttl;
    }

    pub(crate) fn set_rcode(&mut self, rcode: Rcode) {
        self.out[3] = self.out[3] & 0xf0 | (rcode as u16 & 0xf) as u8;
    }

    /// The name of the question, as it came.
    pub(crate) fn question_name() -> Pointer {
        // The header's length, which two bytes hold.
        Pointer(HEADER as u16)
    }

    /// A CNAME from `owner` to a name of wire parts; a root label is added. Returns where the target
    /// stands.
    pub(crate) fn cname(&mut self, owner: Owner<'_>, target: [&[u8]; 2]) -> Option<Pointer> {
        let length = target[0].len() + target[1].len() + 1;
        let (_, data) = self.record(owner, CNAME, length)?;
        let (star, rest) = self.out[data..data + length].split_at_mut(target[0].len());
        star.copy_from_slice(target[0]);
        let (name, root) = rest.split_at_mut(target[1].len());
        name.copy_from_slice(target[1]);
        name.make_ascii_lowercase();
        root.fill(0);
        pointer(data)
    }

    /// Addresses of one owner, beginning with a random one. Returns where the owner stands.
    pub(crate) fn v4(&mut self, owner: Owner<'_>, addresses: &[Ipv4Addr]) -> Option<Pointer> {
        self.addresses(owner, A, addresses, |address| address.octets())
    }

    pub(crate) fn v6(&mut self, owner: Owner<'_>, addresses: &[Ipv6Addr]) -> Option<Pointer> {
        self.addresses(owner, AAAA, addresses, |address| address.octets())
    }

    /// Adds the EDNS record and returns the answer's length.
    pub(crate) fn finish(mut self) -> usize {
        self.out[6..8].copy_from_slice(&self.answers.to_be_bytes());
        if let Some(edns) = self.edns {
            self.limit += EDNS_LENGTH;
            let [high, low] = OWN_UDP.to_be_bytes();
            let dnssec = if edns.dnssec_ok { 0x80 } else { 0 };
            let [_, kind] = OPT.to_be_bytes();
            let record = [0, 0, kind, high, low, 0, 0, dnssec, 0, 0, 0];
            if let Some(room) = self.out.get_mut(self.length..self.length + EDNS_LENGTH) {
                room.copy_from_slice(&record);
                self.length += EDNS_LENGTH;
                self.out[11] = 1;
            }
        }
        self.length
    }

    fn addresses<T, const N: usize>(
        &mut self,
        mut owner: Owner<'_>,
        kind: u16,
        addresses: &[T],
        octets: impl Fn(&T) -> [u8; N],
    ) -> Option<Pointer> {
        let first = match addresses.len() {
            0 | 1 => 0,
            count => fastrand::usize(..count),
        };
        let mut at = None;
        let (before, from) = addresses.split_at(first);
        for address in from.iter().chain(before) {
            if let Owner::At(pointer) = owner {
                self.short_record(pointer, kind, octets(address))?;
                at = at.or(Some(pointer));
                continue;
            }
            let (stands, data) = self.record(owner, kind, N)?;
            self.out[data..data + N].copy_from_slice(&octets(address));
            if let Some(pointer) = stands {
                owner = Owner::At(pointer);
                at = stands;
            }
        }
        at
    }

    /// A record whose owner stands in the message, as nearly all are: of a size that is known.
    fn short_record<const N: usize>(
        &mut self,
        owner: Pointer,
        kind: u16,
        data: [u8; N],
    ) -> Option<()> {
        let start = self.length;
        let end = self.claim(2 + FIXED + N)?;
        let [p0, p1] = owner.on_wire();
        let [k0, k1] = kind.to_be_bytes();
        let [c0, c1] = IN.to_be_bytes();
        let [t0, t1, t2, t3] = self.ttl.to_be_bytes();
        // An address, whose length one byte holds.
        let fixed = [p0, p1, k0, k1, c0, c1, t0, t1, t2, t3, 0, N as u8];
        let (into_fixed, into_data) = self.out[start..end].split_at_mut(fixed.len());
        into_fixed.copy_from_slice(&fixed);
        into_data.copy_from_slice(&data);
        Some(())
    }

    /// Room for a record: where its owner stands, and where its data goes. Nothing if there is none.
    fn record(
        &mut self,
        owner: Owner<'_>,
        kind: u16,
        data_length: usize,
    ) -> Option<(Option<Pointer>, usize)> {
        let start = self.length;
        let fixed = start + owner.length();
        let data = fixed + FIXED;
        self.claim(owner.length() + FIXED + data_length)?;
        let stands = owner.write(&mut self.out[start..fixed], start);
        let fixed = &mut self.out[fixed..data];
        fixed[..2].copy_from_slice(&kind.to_be_bytes());
        fixed[2..4].copy_from_slice(&IN.to_be_bytes());
        fixed[4..8].copy_from_slice(&self.ttl.to_be_bytes());
        // A record fits in a message, whose length two bytes hold.
        fixed[8..].copy_from_slice(&(data_length as u16).to_be_bytes());
        Some((stands, data))
    }

    /// Takes room for a record of this length and returns where it ends. Nothing, and a truncated
    /// answer, if there is none.
    fn claim(&mut self, length: usize) -> Option<usize> {
        let end = self.length + length;
        if end > self.limit || self.out[2] & TC != 0 {
            self.out[2] |= TC;
            return None;
        }
        self.length = end;
        self.answers += 1;
        Some(end)
    }
}

/// The owner of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner<'a> {
    At(Pointer),
    /// A name on the wire, in any case, with its root label; written in lower case.
    Name(&'a [u8]),
}

impl Owner<'_> {
    fn length(&self) -> usize {
        match self {
            Self::At(_) => 2,
            Self::Name(name) => name.len(),
        }
    }

    fn write(&self, out: &mut [u8], start: usize) -> Option<Pointer> {
        match self {
            Self::At(pointer) => {
                out.copy_from_slice(&pointer.on_wire());
                Some(*pointer)
            }
            Self::Name(name) => {
                out.copy_from_slice(name);
                // Lengths of labels are below the letters.
                out.make_ascii_lowercase();
                pointer(start)
            }
        }
    }
}

/// Writes an answer without records: the header, and the question up to `end`.
pub(in crate::dns) fn header(
    query: &[u8],
    rcode: Rcode,
    end: Option<usize>,
    out: &mut [u8],
) -> usize {
    let length = end.unwrap_or(HEADER);
    out[..length].copy_from_slice(&query[..length]);
    let opcode = query[2] & OPCODE;
    let is_query = opcode == 0;
    out[2] = QR | opcode | if is_query { query[2] & RD } else { 0 };
    out[3] = RA | if is_query { query[3] & CD } else { 0 } | (rcode as u16 & 0xf) as u8;
    out[4..HEADER].fill(0);
    out[5] = u8::from(end.is_some());
    length
}

/// A place names can point to.
fn pointer(at: usize) -> Option<Pointer> {
    u16::try_from(at)
        .ok()
        .filter(|at| *at < 0x4000)
        .map(Pointer)
}
