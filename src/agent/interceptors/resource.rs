//! Finds the resource in a discovery response of a type with a single resource. Copies nothing, because a name table
//! may have many megabytes.

use bytes::Bytes;

use crate::wasm::wire::{DecodeError, fields, last};
use crate::xds::Protocol;

/// The field numbers of `resources` in both responses, of `resource` in delta's `Resource`, and of `value` in `Any`.
const CONTENT: u32 = 2;
/// The field number of `type_url` in `Any`.
const TYPE_URL: u32 = 1;

/// Returns the value of the first resource, which is the only one. Fails unless it is of type `type_url`.
pub(super) fn first(protocol: Protocol, message: &Bytes, type_url: &str) -> Result<Bytes, String> {
    let [found, value] = decoded(protocol, message).map_err(|error| error.to_string())?;
    if found != type_url.as_bytes() {
        let found = String::from_utf8_lossy(&found);
        return Err(format!("found a {found:?}, expected {type_url}"));
    }
    Ok(value)
}

/// Returns type and value of the first resource.
fn decoded(protocol: Protocol, message: &Bytes) -> Result<[Bytes; 2], DecodeError> {
    let mut resources = fields(message)?.into_iter();
    let first = resources.find(|field| field.number == CONTENT);
    let mut any = first.and_then(|field| field.content).unwrap_or_default();
    if protocol == Protocol::Delta {
        any = last(&any, CONTENT)?.unwrap_or_default();
    }
    let part = |number| last(&any, number).map(Option::unwrap_or_default);
    Ok([part(TYPE_URL)?, part(CONTENT)?])
}
