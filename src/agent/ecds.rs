//! Intercepts ECDS: has the Wasm modules of filters fetched, and forwards the response with them as
//! files.
//!
//! A module that is missing is replaced by a filter that allows or denies all requests, and the
//! response is forwarded again, with the same version and nonce, once the module is there. istiod
//! takes the second ACK as a repetition of the first.
//!
//! A newer response of the stream takes the place of one that waits. In delta, the resources that only
//! the older one had are added to it.

use std::collections::HashSet;

use bytes::Bytes;
use tokio::time::sleep_until;

use crate::wasm::{Converted, Wasm, wire};
use crate::xds::Protocol;
use crate::xds::intercept::{Intercepting, Interceptor, Later, Outcome};

const TYPE_URL: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// Of resources in a response, in both protocols, and of the `Any` in a `Resource` of delta.
const RESOURCES: u32 = 2;
const RESOURCE: u32 = 2;
/// Of names in delta: of a resource, and of those removed.
const NAME: u32 = 3;
const REMOVED: u32 = 6;

/// The interceptor of ECDS responses.
#[derive(Debug)]
pub(super) struct Ecds(Wasm);

impl Ecds {
    pub(super) fn new(wasm: Wasm) -> Self {
        Self(wasm)
    }
}

impl Interceptor for Ecds {
    fn type_url(&self) -> &str {
        TYPE_URL
    }

    fn subscribes(&self) -> bool {
        false
    }

    fn intercept(&self, protocol: Protocol, message: Bytes) -> Intercepting {
        converted(self.0.clone(), protocol, message, None)
    }

    fn merge(&self, protocol: Protocol, older: &Bytes, newer: &Bytes) -> Option<Bytes> {
        Some(match protocol {
            Protocol::Sotw => newer.clone(),
            // What cannot be read is handled as it came.
            Protocol::Delta => merged(older, newer).unwrap_or_else(|_| newer.clone()),
        })
    }
}

/// The response with its modules as files. `last` is an earlier result, which is not forwarded again.
fn converted(
    wasm: Wasm,
    protocol: Protocol,
    message: Bytes,
    mut last: Option<Converted>,
) -> Intercepting {
    Box::pin(async move {
        loop {
            if let Some(retry_at) = last.as_ref().and_then(|last| last.retry_at) {
                sleep_until(retry_at).await;
            }
            let (rewritten, converted) = match rewrite(&wasm, protocol, &message).await {
                Ok(rewritten) => rewritten,
                Err(problem) => return Outcome::Rejected(problem),
            };
            let is_progress = last
                .as_ref()
                .is_none_or(|last| converted.missing < last.missing);
            if !is_progress {
                last = Some(converted);
                continue;
            }
            if converted.retry_at.is_none() {
                return Outcome::Forward(rewritten);
            }
            let later = self::converted(wasm, protocol, message, Some(converted));
            return Outcome::ForwardAnd(rewritten, Later(later));
        }
    })
}

/// The response with other resources where they changed; byte for byte the same where none did.
async fn rewrite(
    wasm: &Wasm,
    protocol: Protocol,
    message: &Bytes,
) -> Result<(Bytes, Converted), String> {
    let broken = |error| format!("discovery response from istiod: {error}");
    let fields = wire::fields(message).map_err(broken)?;
    let (mut resources, mut places) = (Vec::new(), Vec::new());
    for (place, field) in fields.iter().enumerate() {
        let Some(content) = field.content.as_ref().filter(|_| field.number == RESOURCES) else {
            continue;
        };
        let any = match protocol {
            Protocol::Sotw => Some(content.clone()),
            Protocol::Delta => wire::last(content, RESOURCE).map_err(broken)?,
        };
        // Without one it is refused.
        resources.push(any.unwrap_or_default());
        places.push(place);
    }
    // In delta, other resources stay as they were.
    let converted = wasm.convert(&resources, protocol == Protocol::Sotw);
    let converted = converted.await?;
    if converted.resources.iter().all(Option::is_none) {
        return Ok((message.clone(), converted));
    }
    let mut rewritten = Vec::with_capacity(message.len());
    let mut changes = places.iter().zip(&converted.resources).peekable();
    for (place, field) in fields.iter().enumerate() {
        let change = changes.next_if(|(changed, _)| **changed == place);
        match (
            change.and_then(|(_, resource)| resource.clone()),
            &field.content,
        ) {
            (Some(any), Some(content)) => {
                let content = match protocol {
                    Protocol::Sotw => any,
                    Protocol::Delta => {
                        let replaced = wire::edited(content, RESOURCE, |_| Ok(Some(any)));
                        replaced.map_err(broken)?
                    }
                };
                wire::append(&mut rewritten, RESOURCES, &content);
            }
            _ => rewritten.extend_from_slice(&field.record),
        }
    }
    Ok((rewritten.into(), converted))
}

/// The newer delta response with what only the older one had. A response is the sum of its fields.
fn merged(older: &Bytes, newer: &Bytes) -> Result<Bytes, wire::DecodeError> {
    let named = |message: &Bytes| -> Result<Vec<_>, wire::DecodeError> {
        let fields = wire::fields(message)?.into_iter();
        let mut named = Vec::new();
        for field in fields {
            let name = match (field.number, &field.content) {
                (RESOURCES, Some(content)) => wire::last(content, NAME)?,
                (REMOVED, name) => name.clone(),
                _ => continue,
            };
            named.push((name.unwrap_or_default(), field.record));
        }
        Ok(named)
    };
    let known: HashSet<_> = named(newer)?.into_iter().map(|(name, _)| name).collect();
    let older = named(older)?.into_iter();
    let older = older.filter(|(name, _)| !known.contains(name));
    let mut merged = newer.to_vec();
    older.for_each(|(_, record)| merged.extend_from_slice(&record));
    Ok(merged.into())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use envoy_types::pb::envoy::config::core::v3 as core;
    use envoy_types::pb::envoy::extensions::filters::http::wasm::v3 as http_wasm;
    use envoy_types::pb::envoy::extensions::wasm::v3 as plugin;
    use envoy_types::pb::envoy::service::discovery::v3::{
        DeltaDiscoveryResponse, DiscoveryResponse, Resource,
    };
    use envoy_types::pb::google::protobuf;
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::metrics::Registry;
    use crate::trust_anchors::SystemRoots;
    use crate::wasm::{Config, FetchConfig};

    /// One that can fetch nothing.
    fn wasm() -> Wasm {
        let fetch = FetchConfig {
            insecure: Vec::new(),
            blocked: Vec::new(),
            proxies: Default::default(),
            request_limit: Duration::from_secs(1),
            attempts: 1,
            max_bytes: 1000,
            credentials: Vec::new(),
            roots: SystemRoots::default(),
        };
        let config = Config {
            directory: "/nonexistent".into(),
            fetch,
            expiry: Duration::from_secs(1),
            purge_interval: Duration::from_secs(1),
            max_cache_bytes: 0,
            requires_digest: true,
            allowed: Vec::new(),
        };
        Wasm::new(config, &Registry::default()).0
    }

    fn resource(name: &str, type_url: &str, value: Vec<u8>) -> protobuf::Any {
        let type_url = type_url.to_owned();
        let extension = core::TypedExtensionConfig {
            name: name.to_owned(),
            typed_config: Some(protobuf::Any { type_url, value }),
        };
        let (type_url, value) = (TYPE_URL.to_owned(), extension.encode_to_vec());
        protobuf::Any { type_url, value }
    }

    fn other(name: &str) -> protobuf::Any {
        resource(
            name,
            "type.googleapis.com/other",
            b"\xff no message".to_vec(),
        )
    }

    fn remote(name: &str) -> protobuf::Any {
        let remote = core::async_data_source::Specifier::Remote(core::RemoteDataSource {
            http_uri: Some(core::HttpUri::default()),
            ..Default::default()
        });
        let code = core::AsyncDataSource {
            specifier: Some(remote),
        };
        let vm = plugin::VmConfig {
            code: Some(code),
            ..Default::default()
        };
        let vm = Some(plugin::plugin_config::Vm::VmConfig(vm));
        let config = Some(plugin::PluginConfig {
            vm,
            ..Default::default()
        });
        let url = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
        resource(name, url, http_wasm::Wasm { config }.encode_to_vec())
    }

    fn delta(nonce: &str, resources: &[(&str, protobuf::Any)], removed: &[&str]) -> Bytes {
        let resources = resources.iter().map(|(name, any)| Resource {
            name: (*name).to_owned(),
            version: "v".to_owned(),
            resource: Some(any.clone()),
            ..Default::default()
        });
        let response = DeltaDiscoveryResponse {
            resources: resources.collect(),
            removed_resources: removed.iter().map(|name| (*name).to_owned()).collect(),
            type_url: TYPE_URL.to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        };
        response.encode_to_vec().into()
    }

    fn sotw(resources: &[protobuf::Any]) -> Bytes {
        let response = DiscoveryResponse {
            version_info: "v".to_owned(),
            resources: resources.to_vec(),
            type_url: TYPE_URL.to_owned(),
            nonce: "n".to_owned(),
            ..Default::default()
        };
        // With a field of a later version.
        let mut message = response.encode_to_vec();
        wire::append(&mut message, 3000, b"unknown");
        message.into()
    }

    async fn forwarded(protocol: Protocol, message: &Bytes) -> Bytes {
        let outcome = Ecds::new(wasm()).intercept(protocol, message.clone()).await;
        match outcome {
            Outcome::Forward(message) => message,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_response_without_remote_modules_is_forwarded_byte_for_byte() {
        let message = sotw(&[other("a"), other("b")]);
        assert_eq!(forwarded(Protocol::Sotw, &message).await, message);
        let message = delta("n", &[("a", other("a"))], &["b"]);
        assert_eq!(forwarded(Protocol::Delta, &message).await, message);
    }

    #[tokio::test]
    async fn only_the_resource_with_a_module_differs() {
        let message = sotw(&[other("a"), remote("b"), other("c")]);
        let found = forwarded(Protocol::Sotw, &message).await;
        let denied = DiscoveryResponse::decode(found.clone())
            .expect("a response")
            .resources
            .remove(1);
        assert!(String::from_utf8_lossy(&denied.value).contains("wasm-default-deny"));
        assert_eq!(found, sotw(&[other("a"), denied.clone(), other("c")]));
        let message = delta("n", &[("a", remote("b")), ("c", other("c"))], &["d"]);
        let found = forwarded(Protocol::Delta, &message).await;
        assert_eq!(
            found,
            delta("n", &[("a", denied), ("c", other("c"))], &["d"])
        );
    }

    #[tokio::test]
    async fn a_resource_that_cannot_be_read_refuses_the_response() {
        let broken = protobuf::Any {
            type_url: TYPE_URL.to_owned(),
            value: b"\xff".to_vec(),
        };
        let nothing = protobuf::Any::default();
        for message in [sotw(&[other("a"), broken]), sotw(&[nothing])] {
            let outcome = Ecds::new(wasm()).intercept(Protocol::Sotw, message).await;
            assert!(matches!(outcome, Outcome::Rejected(_)), "{outcome:?}");
        }
    }

    #[test]
    fn a_newer_delta_response_has_what_only_the_older_one_had() {
        let ecds = Ecds::new(wasm());
        let (a, b) = (("a", other("a")), ("b", other("b")));
        let older = delta(
            "1",
            &[a.clone(), b.clone(), ("c", other("old"))],
            &["x", "d"],
        );
        let newer = delta("2", &[("c", other("new")), ("d", other("d"))], &["b"]);
        let merged = ecds.merge(Protocol::Delta, &older, &newer).expect("merged");
        let merged = DeltaDiscoveryResponse::decode(merged).expect("a response");
        let expected = delta(
            "2",
            &[("c", other("new")), ("d", other("d")), a],
            &["b", "x"],
        );
        assert_eq!(
            merged,
            DeltaDiscoveryResponse::decode(expected).expect("a response")
        );
        assert_eq!(ecds.merge(Protocol::Sotw, &older, &newer), Some(newer));
    }

    /// Resources that look like filters, with no module to fetch in them.
    fn resources() -> impl Strategy<Value = Vec<protobuf::Any>> {
        let types = [
            "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
            "type.googleapis.com/xds.type.v3.TypedStruct",
            "",
        ];
        let bytes = prop::collection::vec(any::<u8>(), 0..40);
        let types = prop::sample::select(types.to_vec());
        let parts = (types, "[a-c]", bytes, 0..10);
        let any = parts.prop_map(|(type_url, name, value, kind)| {
            let mut resource = resource(&name, type_url, value.clone());
            match kind {
                0 => resource.value = value,
                // With a field of a later version.
                1 => wire::append(&mut resource.value, 3000, &value),
                _ => {}
            }
            resource
        });
        prop::collection::vec(any, 0..4)
    }

    proptest! {
        #[test]
        fn a_response_of_any_resources_comes_out_identical_or_is_refused(
            resources in resources(),
            rest in prop::collection::vec(any::<u8>(), 0..20),
            is_delta in any::<bool>(),
        ) {
            let named: Vec<_> = resources.iter().map(|any| ("a", any.clone())).collect();
            let (protocol, message) = match is_delta {
                true => (Protocol::Delta, delta("n", &named, &["b"])),
                false => (Protocol::Sotw, sotw(&resources)),
            };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            let runtime = runtime.expect("a runtime");
            for message in [message.clone(), [&message[..], &rest].concat().into()] {
                let outcome = Ecds::new(wasm()).intercept(protocol, message.clone());
                match runtime.block_on(outcome) {
                    Outcome::Forward(found) => prop_assert_eq!(found, message),
                    Outcome::Rejected(_) => {}
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
