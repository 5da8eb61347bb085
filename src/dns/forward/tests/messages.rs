//! Encodes DNS messages for tests.

use std::net::Ipv4Addr;

/// Encodes a client's query for the IPv4 addresses of a name.
pub(crate) fn query(id: u16, name: &str) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    bytes.extend([0x01, 0x00, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).expect("a label"));
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

/// Encodes the query with an OPT record that has this UDP size and these options.
pub(crate) fn query_with_opt(id: u16, name: &str, size: u16, options: &[u8]) -> Vec<u8> {
    let mut bytes = query(id, name);
    bytes[11] = 1;
    push_opt(&mut bytes, size, options);
    bytes
}

pub(crate) fn push_opt(bytes: &mut Vec<u8>, size: u16, options: &[u8]) {
    bytes.extend([0, 0, 41]);
    bytes.extend(size.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(u16::try_from(options.len()).expect("fits").to_be_bytes());
    bytes.extend(options);
}

/// Returns the question section of a query.
pub(crate) fn question(query: &[u8]) -> Vec<u8> {
    let end = crate::dns::wire::question_end(query).expect("a question");
    query[12..end].to_vec()
}

/// Returns the UDP size that a query announces; None if no OPT record follows the question.
pub(crate) fn advertised(query: &[u8]) -> Option<u16> {
    let opt = 12 + question(query).len();
    let size = query.get(opt + 3..opt + 5)?;
    Some(u16::from_be_bytes([size[0], size[1]]))
}

/// The content of a server's reply.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) rcode: u8,
    /// The TTLs and addresses of the A records.
    pub(crate) addresses: Vec<(u32, Ipv4Addr)>,
    /// The number of bytes that TXT records add to the reply.
    pub(crate) padding: usize,
    /// The TTL of the SOA record, and its minimum field.
    pub(crate) soa: Option<(u32, u32)>,
    pub(crate) is_cut: bool,
}

impl Answer {
    pub(crate) fn address(last: u8) -> Self {
        Self { addresses: vec![(30, Ipv4Addr::new(10, 0, 0, last))], ..Self::default() }
    }

    pub(crate) fn rcode(rcode: u8) -> Self {
        Self { rcode, ..Self::default() }
    }

    pub(crate) fn nxdomain(ttl: u32, minimum: u32) -> Self {
        Self { rcode: 3, soa: Some((ttl, minimum)), ..Self::default() }
    }

    /// Returns an answer that is encoded in `size` bytes, including an OPT record.
    pub(crate) fn of_size(size: usize, query: &[u8]) -> Self {
        Self { padding: size - 12 - question(query).len() - 11, ..Self::default() }
    }

    /// Encodes the reply to a query, with an OPT record if the query has one.
    pub(crate) fn to(&self, query: &[u8]) -> Vec<u8> {
        let mut bytes = query[..2].to_vec();
        bytes.extend([0x81 | if self.is_cut { 2 } else { 0 }, 0x80 | self.rcode]);
        bytes.extend([0, 1, 0, 0, 0, 0, 0, 0]);
        bytes.extend(question(query));
        let mut answers = 0;
        for (ttl, address) in &self.addresses {
            record(&mut bytes, 1, *ttl, &address.octets());
            answers += 1;
        }
        let mut left = self.padding;
        while left > 0 {
            // Each record has twelve bytes before its data.
            let data = (left - 12).min(30_000);
            record(&mut bytes, 16, 30, &vec![0; data]);
            left -= 12 + data;
            answers += 1;
        }
        if let Some((ttl, minimum)) = self.soa {
            let mut data = vec![0; 2 + 16];
            data.extend(minimum.to_be_bytes());
            record(&mut bytes, 6, ttl, &data);
            bytes[9] = 1;
        }
        bytes[7] = answers;
        if advertised(query).is_some() {
            bytes[11] = 1;
            push_opt(&mut bytes, 4096, &[]);
        }
        bytes
    }
}

/// Appends a record of the queried name.
fn record(bytes: &mut Vec<u8>, kind: u16, ttl: u32, data: &[u8]) {
    bytes.extend([0xc0, 12]);
    bytes.extend(kind.to_be_bytes());
    bytes.extend([0, 1]);
    bytes.extend(ttl.to_be_bytes());
    bytes.extend(u16::try_from(data.len()).expect("fits").to_be_bytes());
    bytes.extend(data);
}
