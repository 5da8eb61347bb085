//! Intercepts NDS: hands istiod's name tables to the DNS server instead of to Envoy.
//!
//! A response holds one `NameTable`. Its bytes are not copied on their way.

use bytes::Bytes;

use super::resource;
use crate::dns::Dns;
use crate::xds::Protocol;
use crate::xds::intercept::{Intercepting, Interceptor, Outcome};

const TYPE_URL: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";

/// The interceptor of NDS responses.
#[derive(Debug)]
pub(super) struct Nds(Dns);

impl Nds {
    pub(super) fn new(dns: Dns) -> Self {
        Self(dns)
    }
}

impl Interceptor for Nds {
    fn type_url(&self) -> &str {
        TYPE_URL
    }

    fn subscribes(&self) -> bool {
        true
    }

    fn intercept(&self, protocol: Protocol, message: Bytes) -> Intercepting {
        let dns = self.0.clone();
        Box::pin(async move {
            let taken = match table(protocol, message) {
                Ok(table) => dns.update(table).await.map_err(|error| error.to_string()),
                Err(error) => Err(error),
            };
            match taken {
                Ok(()) => Outcome::Accepted,
                Err(error) => {
                    tracing::error!(target: "dns", "{error}, keeping the last one");
                    Outcome::Rejected(error)
                }
            }
        })
    }
}

/// The name table in a response.
fn table(protocol: Protocol, message: Bytes) -> Result<Bytes, String> {
    resource::first(protocol, message, TYPE_URL)
        .map_err(|why| format!("failed to unmarshal name table: {why}"))
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::resource::{Any, Delta, Resource, StateOfTheWorld};
    use super::*;

    fn response(protocol: Protocol, any: Option<Any>) -> Bytes {
        let message = match protocol {
            Protocol::Sotw => StateOfTheWorld {
                resources: any.into_iter().collect(),
            }
            .encode_to_vec(),
            Protocol::Delta => Delta {
                resources: vec![Resource { resource: any }],
            }
            .encode_to_vec(),
        };
        message.into()
    }

    #[test]
    fn a_table_is_found_in_both_protocols_and_nothing_else_is_one() {
        for protocol in [Protocol::Sotw, Protocol::Delta] {
            let any = |type_url: &str| Any {
                type_url: type_url.into(),
                value: Bytes::from_static(b"table"),
            };
            assert_eq!(
                table(protocol, response(protocol, Some(any(TYPE_URL)))),
                Ok("table".into())
            );
            for wrong in [Some(any("other")), None] {
                let error = table(protocol, response(protocol, wrong)).expect_err("no table");
                assert!(
                    error.starts_with("failed to unmarshal name table: "),
                    "{error}"
                );
            }
        }
    }
}
