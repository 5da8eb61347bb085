//! Intercepts NDS: passes istiod's name tables to the DNS server instead of to Envoy.
//!
//! A response contains one `NameTable`, whose bytes are not copied.

use bytes::Bytes;

use super::resource;
use crate::dns::Dns;
use crate::xds::Protocol;
use crate::xds::interceptor::{Intercepting, Interceptor, Outcome};

const TYPE_URL: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";

/// The interceptor of NDS responses.
#[derive(Debug)]
pub(super) struct Nds(pub(super) Dns);

impl Interceptor for Nds {
    fn type_url(&self) -> &str {
        TYPE_URL
    }

    fn intercept(&self, protocol: Protocol, message: Bytes) -> Intercepting {
        let dns = self.0.clone();
        Box::pin(async move {
            match resource::first(protocol, &message, TYPE_URL) {
                Ok(table) => match dns.update(table).await {
                    Ok(()) => Outcome::Accepted,
                    Err(why) => Outcome::Rejected(why),
                },
                Err(why) => Outcome::Rejected(format!("failed to unmarshal name table: {why}")),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::discovery::v3::{
        DeltaDiscoveryResponse, DiscoveryResponse, Resource,
    };
    use envoy_types::pb::google::protobuf::Any;
    use prost::Message;

    use super::*;

    fn response(protocol: Protocol, any: Option<Any>) -> Bytes {
        let message = match protocol {
            Protocol::Sotw => DiscoveryResponse {
                version_info: "1".into(),
                resources: any.into_iter().collect(),
                nonce: "n".into(),
                ..Default::default()
            }
            .encode_to_vec(),
            Protocol::Delta => DeltaDiscoveryResponse {
                system_version_info: "1".into(),
                resources: vec![Resource { name: "a".into(), resource: any, ..Default::default() }],
                ..Default::default()
            }
            .encode_to_vec(),
        };
        message.into()
    }

    #[test]
    fn sotw_and_delta_carry_a_name_table_and_other_types_are_errors() {
        for protocol in [Protocol::Sotw, Protocol::Delta] {
            let any = |type_url: &str| Any { type_url: type_url.into(), value: b"table".into() };
            let first = |any| resource::first(protocol, &response(protocol, any), TYPE_URL);
            assert_eq!(first(Some(any(TYPE_URL))).unwrap(), "table");
            for (wrong, found) in [(Some(any("other")), "\"other\""), (None, "\"\"")] {
                let error = first(wrong).unwrap_err().to_string();
                assert_eq!(error, format!("found a {found}, expected {TYPE_URL}"));
            }
        }
    }
}
