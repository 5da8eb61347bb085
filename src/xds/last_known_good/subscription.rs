//! The fields of a discovery request that decide what is kept of its type, and what answers it.

use aws_lc_rs::digest::{SHA256, digest};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use prost::{DecodeError, Message};

use crate::xds::Protocol;
use crate::xds::request::HEAD;

/// What a request says of the subscription to its type.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Subscription {
    pub(super) type_url: String,
    pub(super) node: Option<Bytes>,
    /// SotW: all names. Delta: those added.
    pub(super) names: Vec<Bytes>,
    /// Delta only: the resources that Envoy has when the stream begins.
    pub(super) held: Vec<Bytes>,
}

/// The fields of any message of discovery, by their numbers. All are bytes, which are not copied.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Fields {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub(super) first: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub(super) second: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub(super) third: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub(super) fourth: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub(super) fifth: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub(super) sixth: Vec<Bytes>,
}

/// The fields of a node that istiod's answers follow from. Maps are ordered, unlike Envoy's.
#[derive(Clone, PartialEq, Message)]
struct Node {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "3")]
    metadata: Option<prost_types::Struct>,
    #[prost(string, tag = "7")]
    user_agent_version: String,
    #[prost(message, optional, tag = "8")]
    user_agent_build_version: Option<BuildVersion>,
}

#[derive(Clone, PartialEq, Message)]
struct BuildVersion {
    #[prost(bytes = "vec", tag = "1")]
    version: Vec<u8>,
    #[prost(message, optional, tag = "2")]
    metadata: Option<prost_types::Struct>,
}

impl Subscription {
    /// Reads a request with its gRPC head.
    pub(super) fn read(protocol: Protocol, frame: &Bytes) -> Result<Self, DecodeError> {
        let mut fields = Fields::decode(frame.slice(HEAD.min(frame.len())..))?;
        Ok(match protocol {
            Protocol::Sotw => Self {
                node: fields.second.pop(),
                names: fields.third,
                type_url: text(fields.fourth.pop()),
                held: Vec::new(),
            },
            Protocol::Delta => Self {
                node: fields.first.pop(),
                type_url: text(fields.second.pop()),
                names: fields.third,
                held: fields.fifth.into_iter().filter_map(key).collect(),
            },
        })
    }

    /// A digest of the protocol, and of the node's id, metadata and Envoy's version: what is kept for
    /// one is not served to another.
    pub(super) fn identity(&self, protocol: Protocol) -> Option<String> {
        let node = Node::decode(self.node.clone()?).ok()?.encode_to_vec();
        let digest = BASE64_STANDARD.encode(digest(&SHA256, &node));
        Some(format!("{protocol:?} {digest}"))
    }
}

/// The key of an entry of a map.
fn key(entry: Bytes) -> Option<Bytes> {
    Fields::decode(entry).ok()?.first.pop()
}

fn text(bytes: Option<Bytes>) -> String {
    String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use envoy_types::pb::envoy::config::core::v3 as core;
    use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
    use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
    use proptest::prelude::*;

    use super::*;
    use crate::xds::intercept::frame;

    fn node(id: &str, version: &str, labels: usize) -> core::Node {
        let value = |text: String| Value {
            kind: Some(Kind::StringValue(text)),
        };
        // A new map has another order.
        let fields: HashMap<_, _> = (0..labels)
            .map(|i| (format!("label {i}"), value(i.to_string())))
            .collect();
        core::Node {
            id: id.into(),
            metadata: Some(Struct { fields }),
            extensions: vec![core::Extension {
                name: fastrand::u64(..).to_string(),
                ..Default::default()
            }],
            user_agent_version_type: Some(core::node::UserAgentVersionType::UserAgentVersion(
                version.into(),
            )),
            ..Default::default()
        }
    }

    fn identity(protocol: Protocol, node: core::Node) -> String {
        let node = Some(node);
        let message = match protocol {
            Protocol::Sotw => DiscoveryRequest {
                node,
                ..Default::default()
            }
            .encode_to_vec(),
            Protocol::Delta => DeltaDiscoveryRequest {
                node,
                ..Default::default()
            }
            .encode_to_vec(),
        };
        let read = Subscription::read(protocol, &frame(&message)).unwrap();
        read.identity(protocol).unwrap()
    }

    #[test]
    fn the_identity_is_that_of_node_version_and_protocol_whatever_the_order_of_maps() {
        let first = identity(Protocol::Delta, node("a", "1.40", 30));
        for _ in 0..5 {
            assert_eq!(identity(Protocol::Delta, node("a", "1.40", 30)), first);
        }
        for (protocol, other) in [
            (Protocol::Delta, node("b", "1.40", 30)),
            (Protocol::Delta, node("a", "1.41", 30)),
            (Protocol::Delta, node("a", "1.40", 29)),
            (Protocol::Sotw, node("a", "1.40", 30)),
        ] {
            assert_ne!(identity(protocol, other), first);
        }
    }

    #[test]
    fn a_request_without_a_node_has_no_identity() {
        let read = Subscription::read(Protocol::Delta, &frame(&[])).unwrap();
        assert_eq!(read.identity(Protocol::Delta), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            for protocol in [Protocol::Sotw, Protocol::Delta] {
                if let Ok(read) = Subscription::read(protocol, &Bytes::from(bytes.clone())) {
                    let _ = read.identity(protocol);
                }
            }
        }
    }
}
