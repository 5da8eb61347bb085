//! Reads a Wasm filter's configuration from a `google.protobuf.Struct`, by the rules of protobuf's
//! JSON: a member that is unknown or has another type is an error.

use std::error::Error;

use bytes::Bytes;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};

/// `proto/envoy/extensions/wasm/v3/wasm.proto`
const DEFINITIONS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wasm.fds"));

/// The encoded `Wasm` message that an encoded `Struct` describes, so that both forms of a filter are
/// handled alike.
pub(super) fn wasm(value: &[u8]) -> Result<Bytes, Box<dyn Error>> {
    // Rare, so nothing is kept.
    let definitions = DescriptorPool::decode(DEFINITIONS)?;
    let definition = |name| {
        let found = definitions.get_message_by_name(name);
        found.ok_or("this program has no definition of it")
    };
    let value = DynamicMessage::decode(definition("google.protobuf.Struct")?, value)?;
    let value = serde_json::to_value(&value)?;
    let wasm = definition("envoy.extensions.wasm.v3.Wasm")?;
    let wasm = DynamicMessage::deserialize(wasm, value)?;
    Ok(wasm.encode_to_vec().into())
}
