//! Finds the resource in a discovery response of a type with a single resource. Copies nothing, because a name table
//! may have many megabytes.

use bytes::Bytes;

use crate::wasm::wire::{DecodeError, fields, last};
use crate::xds::Protocol;

/// The field numbers of `resources` in both responses, of `resource` in delta's `Resource`, and of `value` in `Any`.
const CONTENT: u32 = 2;
/// The field number of `type_url` in `Any`.
const TYPE_URL: u32 = 1;

/// The reason why a response cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unusable {
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    #[error("found a {found:?}, expected {expected}")]
    OtherType { found: String, expected: String },
}

/// Returns the value of the first resource, which is the only one. Fails unless it is of type `type_url`.
pub(super) fn first(
    protocol: Protocol,
    message: &Bytes,
    type_url: &str,
) -> Result<Bytes, Unusable> {
    let [found, value] = decoded(protocol, message)?;
    if found != type_url.as_bytes() {
        let found = String::from_utf8_lossy(&found).into_owned();
        return Err(Unusable::OtherType { found, expected: type_url.to_owned() });
    }
    Ok(value)
}

/// Returns type and value of the first resource.
fn decoded(protocol: Protocol, message: &Bytes) -> Result<[Bytes; 2], DecodeError> {
    let first = fields(message)?.into_iter().find(|field| field.number == CONTENT);
    let mut any = first.and_then(|field| field.content).unwrap_or_default();
    if protocol == Protocol::Delta {
        any = last(&any, CONTENT)?.unwrap_or_default();
    }
    Ok([last(&any, TYPE_URL)?.unwrap_or_default(), last(&any, CONTENT)?.unwrap_or_default()])
}
