//! Decodes a discovery response of a type with a single resource.
//!
//! Own messages instead of the generated ones, which would copy the resource: a name table may have
//! many megabytes.

use bytes::Bytes;
use prost::Message;

use crate::xds::Protocol;

/// `google.protobuf.Any`
#[derive(Clone, PartialEq, Message)]
pub(super) struct Any {
    #[prost(string, tag = "1")]
    pub(super) type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
}

/// `envoy.service.discovery.v3.DiscoveryResponse`
#[derive(Clone, PartialEq, Message)]
pub(super) struct StateOfTheWorld {
    #[prost(message, repeated, tag = "2")]
    pub(super) resources: Vec<Any>,
}

/// `envoy.service.discovery.v3.DeltaDiscoveryResponse`
#[derive(Clone, PartialEq, Message)]
pub(super) struct Delta {
    #[prost(message, repeated, tag = "2")]
    pub(super) resources: Vec<Resource>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Resource {
    #[prost(message, optional, tag = "2")]
    pub(super) resource: Option<Any>,
}

/// The first resource, which is the only one, of type `type_url`.
pub(super) fn first(protocol: Protocol, message: Bytes, type_url: &str) -> Result<Bytes, String> {
    let first = match protocol {
        Protocol::Sotw => {
            StateOfTheWorld::decode(message).map(|message| message.resources.into_iter().next())
        }
        Protocol::Delta => Delta::decode(message).map(|message| {
            message
                .resources
                .into_iter()
                .next()
                .and_then(|resource| resource.resource)
        }),
    };
    let first = first.map_err(|error| error.to_string())?;
    let first = first.ok_or("the resource holds nothing")?;
    if first.type_url != type_url {
        let found = first.type_url;
        return Err(format!("found a {found:?}, expected {type_url}"));
    }
    Ok(first.value)
}
