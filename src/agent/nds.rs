//! Runs the DNS server, and intercepts NDS: passes istiod's name tables to the server instead of to Envoy.
//!
//! A response contains one `NameTable`, whose bytes are not copied.

use std::io;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::{Agent, resource};
use crate::dns::forward::Forwarder;
use crate::dns::{self, Dns};
use crate::runtime::lifecycle::BoxError;
use crate::xds::Protocol;
use crate::xds::intercept::{Intercepting, Interceptor, Outcome};

const TYPE_URL: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";

impl Agent {
    /// Answers DNS on its own thread, so that no other work delays an answer.
    pub(super) fn dns(&mut self) -> Result<Option<(Dns, Forwarder)>, BoxError> {
        let Some(config) = self.config.dns.clone() else {
            return Ok(None);
        };
        let forwarder = Forwarder::new(config.forwarder, &self.metrics);
        let (dns, serving) = dns::new(
            config.server,
            self.ports.clone().dns(),
            forwarder.clone(),
            &self.metrics,
            self.listener_handover.clone(),
            self.shutdown.clone(),
        );
        let (done, ended) = oneshot::channel();
        let failed =
            |error: io::Error| format!("cannot start the thread of the DNS server: {error}");
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let serve = move || {
            // The receiver is dropped if the shutdown took too long.
            let _ = done.send(runtime.block_on(serving));
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("dns".to_owned());
        // The channel reports the end of the thread; a panic closes the channel.
        thread.spawn(serve).map_err(failed)?;
        self.tasks.spawn("DNS server", async move { ended.await? });
        Ok(Some((dns, forwarder)))
    }
}

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
            let updated = match table(protocol, &message) {
                Ok(table) => dns.update(table).await,
                Err(error) => Err(error),
            };
            updated.map_or_else(Outcome::Rejected, |()| Outcome::Accepted)
        })
    }
}

/// Returns the name table of a response.
fn table(protocol: Protocol, message: &Bytes) -> Result<Bytes, String> {
    resource::first(protocol, message, TYPE_URL)
        .map_err(|why| format!("failed to unmarshal name table: {why}"))
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
    fn a_name_table_is_found_in_sotw_and_delta_and_other_types_are_errors() {
        for protocol in [Protocol::Sotw, Protocol::Delta] {
            let any = |type_url: &str| Any { type_url: type_url.into(), value: b"table".into() };
            assert_eq!(
                table(protocol, &response(protocol, Some(any(TYPE_URL)))),
                Ok("table".into())
            );
            for wrong in [Some(any("other")), None] {
                let error = table(protocol, &response(protocol, wrong)).expect_err("no table");
                assert!(error.starts_with("failed to unmarshal name table: "), "{error}");
            }
        }
    }
}
