//! Writes PEM, and cuts it into blocks.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use zeroize::Zeroizing;

const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";
const END: &[u8] = b"-----END CERTIFICATE-----";

/// Columns of PEM (RFC 7468, section 2).
const COLUMNS: usize = 64;

/// The parts of a text that claim to be certificates: each up to its end or to the next.
pub(crate) fn blocks(pem: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = find(pem, BEGIN).map(|start| &pem[start..]);
    std::iter::from_fn(move || {
        let block = rest?;
        let next = find(&block[BEGIN.len()..], BEGIN).map(|at| at + BEGIN.len());
        rest = next.map(|next| &block[next..]);
        let block = &block[..next.unwrap_or(block.len())];
        Some(find(block, END).map_or(block, |end| &block[..end + END.len()]))
    })
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// The capacity is enough from the start: a text that grows leaves copies of the key behind.
pub(crate) fn encode(label: &str, der: &[u8]) -> Zeroizing<String> {
    let base64 = Zeroizing::new(BASE64_STANDARD.encode(der));
    let capacity = base64.len() + base64.len().div_ceil(COLUMNS) + 2 * label.len() + 40;
    let mut pem = Zeroizing::new(String::with_capacity(capacity));
    pem.extend(["-----BEGIN ", label, "-----\n"]);
    let mut rest = base64.as_str();
    while !rest.is_empty() {
        let (line, more) = rest.split_at(rest.len().min(COLUMNS));
        pem.extend([line, "\n"]);
        rest = more;
    }
    pem.extend(["-----END ", label, "-----\n"]);
    pem
}
