//! Intercepts ECDS: has the Wasm modules of filters fetched, and forwards the response with files in place of
//! remote modules.
//!
//! A module that is missing is replaced by a filter that allows or denies all requests, and the
//! response is forwarded again, with the same version and nonce, once the module is fetched. istiod
//! takes the second ACK as a repetition of the first.
//!
//! A newer response of the stream replaces one that waits for modules. In delta, the resources that only
//! the older one had are added to the newer one, and a resource waits for its own module only.

use std::collections::HashSet;

use bytes::Bytes;
use futures_util::future::select_all;
use tokio::time::sleep_until;

use crate::wasm::{Converted, Rejected, Wasm, wire};
use crate::xds::Protocol;
use crate::xds::interceptor::{Intercepting, Interceptor, Outcome, SecondOutcome};

const TYPE_URL: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// The field numbers of resources in a response, in both protocols, and of the `Any` in a `Resource` of delta.
const RESOURCES: u32 = 2;
const RESOURCE: u32 = 2;
/// The field numbers of names in delta: the name of a resource, and the names of removed resources.
const NAME: u32 = 3;
const REMOVED: u32 = 6;

/// The interceptor of ECDS responses.
#[derive(Debug)]
pub(super) struct Ecds(pub(super) Wasm);

impl Interceptor for Ecds {
    fn type_url(&self) -> &str {
        TYPE_URL
    }

    fn subscribes(&self) -> bool {
        false
    }

    fn intercept(&self, protocol: Protocol, message: Bytes) -> Intercepting {
        let parts = match protocol {
            Protocol::Delta => split(&message).unwrap_or_else(|| vec![message]),
            Protocol::Sotw => vec![message],
        };
        let converting = parts.into_iter().map(|part| {
            let outcome = convert(self.0.clone(), protocol, part.clone(), None);
            (part, outcome)
        });
        forward_one_by_one(converting.collect())
    }

    fn note_unsubscribed(&self, names: &[String]) {
        names.iter().for_each(|name| self.0.forget(name.as_bytes()));
    }

    fn merge(&self, protocol: Protocol, older: &Bytes, newer: &Bytes) -> Option<Bytes> {
        Some(match protocol {
            Protocol::Sotw => newer.clone(),
            // A response that cannot be read is not merged.
            Protocol::Delta => merge_responses(older, newer).unwrap_or_else(|_| newer.clone()),
        })
    }
}

/// Converts a response until all its modules are files, and forwards each result with fewer missing modules. `last` is
/// an earlier result, which is not forwarded again.
fn convert(
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
                Err(problem) => return Outcome::Rejected(problem.to_string()),
            };
            if let Some(last) = &mut last
                && converted.retryable >= last.retryable
            {
                *last = converted;
                continue;
            }
            if converted.retry_at.is_none() {
                return Outcome::Forward(rewritten, None);
            }
            let rest = message.clone();
            let outcome = convert(wasm, protocol, message, Some(converted));
            return Outcome::Forward(rewritten, Some(SecondOutcome { outcome, rest }));
        }
    })
}

/// Splits a delta response into one response for each resource with a module, and one with everything else. Returns
/// None if it cannot be read.
fn split(message: &Bytes) -> Option<Vec<Bytes>> {
    let mut head = Vec::new();
    let mut late = Vec::new();
    let mut rest = Vec::new();
    let mut is_empty = true;
    for field in wire::fields(message).ok()? {
        if field.number == RESOURCES {
            let any = wire::last(&field.content?, RESOURCE).ok()??;
            if Wasm::has_module(&any).ok()? {
                late.push(field.record);
                continue;
            }
        }
        match field.number {
            RESOURCES | REMOVED => is_empty = false,
            _ => head.extend_from_slice(&field.record),
        }
        rest.extend_from_slice(&field.record);
    }
    let mut parts = Vec::new();
    if !is_empty || late.is_empty() {
        parts.push(rest.into());
    }
    parts.extend(late.iter().map(|record| Bytes::from([&record[..], &head].concat())));
    Some(parts)
}

/// Forwards the parts of a response, each as soon as it is converted.
fn forward_one_by_one(mut parts: Vec<(Bytes, Intercepting)>) -> Intercepting {
    Box::pin(async move {
        let (outcome, index, _) = select_all(parts.iter_mut().map(|part| &mut part.1)).await;
        let Outcome::Forward(message, later) = outcome else { return outcome };
        match later {
            Some(later) => parts[index].1 = later.outcome,
            None => drop(parts.swap_remove(index)),
        }
        if parts.is_empty() {
            return Outcome::Forward(message, None);
        }
        let rest = parts.iter().map(|part| &part.0[..]).collect::<Vec<_>>().concat().into();
        Outcome::Forward(message, Some(SecondOutcome { outcome: forward_one_by_one(parts), rest }))
    })
}

/// Replaces the resources with modules in a response. The response stays byte for byte the same if there are none.
async fn rewrite(
    wasm: &Wasm,
    protocol: Protocol,
    message: &Bytes,
) -> Result<(Bytes, Converted), Rejected> {
    let fields = wire::fields(message).map_err(Rejected::Response)?;
    // In delta, resources that are not in the response stay in use.
    let is_complete = protocol == Protocol::Sotw;
    let mut resources = Vec::new();
    for field in &fields {
        match (field.number, &field.content) {
            (REMOVED, Some(name)) if !is_complete => wasm.forget(name),
            (RESOURCES, Some(any)) if is_complete => resources.push(any.clone()),
            (RESOURCES, Some(resource)) => {
                let any = wire::last(resource, RESOURCE).map_err(Rejected::Response)?;
                // A resource without an `Any` is rejected as an empty one.
                resources.push(any.unwrap_or_default());
            }
            _ => {}
        }
    }
    let converted = wasm.convert(&resources, is_complete).await?;
    if converted.resources.iter().all(Option::is_none) {
        return Ok((message.clone(), converted));
    }
    let mut rewritten = Vec::with_capacity(message.len());
    let mut changes = converted.resources.iter();
    for field in &fields {
        let content = field.content.as_ref().filter(|_| field.number == RESOURCES);
        let change = content.and_then(|content| Some((content, changes.next()?.clone()?)));
        let Some((content, any)) = change else {
            rewritten.extend_from_slice(&field.record);
            continue;
        };
        let content = match protocol {
            Protocol::Sotw => any,
            Protocol::Delta => {
                wire::edit_field(content, RESOURCE, |_| Ok(any)).map_err(Rejected::Response)?
            }
        };
        wire::append(&mut rewritten, RESOURCES, &content);
    }
    Ok((rewritten.into(), converted))
}

/// Adds the resources and removals that only the older delta response has to the newer one. A message is the sequence
/// of its fields, so records can be appended.
fn merge_responses(older: &Bytes, newer: &Bytes) -> Result<Bytes, wire::DecodeError> {
    let known: HashSet<_> = records_by_name(newer)?.into_iter().map(|(name, _)| name).collect();
    let mut merged = newer.to_vec();
    for (name, record) in records_by_name(older)? {
        if !known.contains(&name) {
            merged.extend_from_slice(&record);
        }
    }
    Ok(merged.into())
}

/// Returns the names of the resources and removals of a delta response, each with its record.
fn records_by_name(message: &Bytes) -> Result<Vec<(Bytes, Bytes)>, wire::DecodeError> {
    let mut named = Vec::new();
    for field in wire::fields(message)? {
        let name = match (field.number, field.content) {
            (RESOURCES, Some(content)) => wire::last(&content, NAME)?,
            (REMOVED, name) => name,
            _ => continue,
        };
        named.push((name.unwrap_or_default(), field.record));
    }
    Ok(named)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::slice::from_ref;
    use std::time::Duration;

    use envoy_types::pb::envoy::config::core::v3 as core;
    use envoy_types::pb::envoy::extensions::filters::http::wasm::v3 as http_wasm;
    use envoy_types::pb::envoy::extensions::wasm::v3 as plugin;
    use envoy_types::pb::envoy::service::discovery::v3::{
        DeltaDiscoveryResponse, DiscoveryResponse, Resource,
    };
    use envoy_types::pb::google::protobuf;
    use futures_util::FutureExt as _;
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::logging::logged;
    use crate::metrics::Registry;
    use crate::trust::trust_anchors::SystemRoots;
    use crate::wasm::{Config, FetchConfig};

    /// Returns a handle that can fetch nothing, because its future is dropped.
    fn wasm() -> Wasm {
        start(Path::new("/nonexistent")).0
    }

    /// Returns a handle, and a future that ends all fetches when it is dropped.
    fn start(directory: &Path) -> (Wasm, impl Future<Output = ()>) {
        let fetch = FetchConfig {
            insecure: Vec::new(),
            blocked: Vec::new(),
            proxies: Default::default(),
            request_limit: Duration::from_secs(1),
            attempts: 1,
            max_bytes: 1000,
            credentials: Vec::new(),
            roots: SystemRoots::new("", ""),
        };
        let config = Config {
            directory: directory.to_owned(),
            fetch,
            expiry: Duration::from_secs(1),
            purge_interval: Duration::from_secs(1),
            max_cache_bytes: 0,
            requires_digest: false,
            allowed: Vec::new(),
        };
        Wasm::new(config, &Registry::default())
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
        resource(name, "type.googleapis.com/other", b"\xff no message".to_vec())
    }

    fn remote(name: &str) -> protobuf::Any {
        remote_at(name, core::HttpUri::default())
    }

    fn remote_at(name: &str, uri: core::HttpUri) -> protobuf::Any {
        let remote = core::async_data_source::Specifier::Remote(core::RemoteDataSource {
            http_uri: Some(uri),
            ..Default::default()
        });
        let code = core::AsyncDataSource { specifier: Some(remote) };
        let vm = plugin::VmConfig { code: Some(code), ..Default::default() };
        let vm = Some(plugin::plugin_config::Vm::VmConfig(vm));
        let config = Some(plugin::PluginConfig { vm, ..Default::default() });
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
        // Adds a field that this version does not know.
        let mut message = response.encode_to_vec();
        wire::append(&mut message, 3000, b"unknown");
        message.into()
    }

    async fn forwarded(protocol: Protocol, message: &Bytes) -> Bytes {
        let outcome = Ecds(wasm()).intercept(protocol, message.clone()).await;
        match outcome {
            Outcome::Forward(message, None) => message,
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

    #[test]
    fn debug_lines_name_extensions_without_a_module() {
        let message = sotw(&[other("a")]);
        let log = logged(|| {
            let converted = forwarded(Protocol::Sotw, &message).now_or_never();
            assert_eq!(converted, Some(message.clone()));
        });
        for line in
            ["LocalFileCache is created in /nonexistent", "no remote load found in extension a"]
        {
            assert!(log.contains(line), "{log}");
        }
    }

    #[tokio::test]
    async fn only_the_resource_with_a_module_differs() {
        let message = sotw(&[other("a"), remote("b"), other("c")]);
        let found = forwarded(Protocol::Sotw, &message).await;
        let denied =
            DiscoveryResponse::decode(found.clone()).expect("a response").resources.remove(1);
        assert!(String::from_utf8_lossy(&denied.value).contains("wasm-default-deny"));
        assert_eq!(found, sotw(&[other("a"), denied.clone(), other("c")]));
        let message = delta("n", &[("a", remote("b")), ("c", other("c"))], &["d"]);
        let found = forwarded(Protocol::Delta, &message).await;
        assert_eq!(found, delta("n", &[("a", denied), ("c", other("c"))], &["d"]));
    }

    #[tokio::test]
    async fn an_undecodable_resource_rejects_the_response() {
        let broken = protobuf::Any { type_url: TYPE_URL.to_owned(), value: b"\xff".to_vec() };
        let nothing = protobuf::Any::default();
        for message in [sotw(&[other("a"), broken]), sotw(&[nothing])] {
            let outcome = Ecds(wasm()).intercept(Protocol::Sotw, message).await;
            assert!(matches!(outcome, Outcome::Rejected(_)), "{outcome:?}");
        }
    }

    /// Returns a server that never responds, and a resource whose module is fetched from this server.
    fn hanging(name: &str, limit: Duration) -> (std::net::TcpListener, protobuf::Any) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let uri = core::HttpUri {
            uri: format!("http://{address}/"),
            timeout: Some(protobuf::Duration {
                seconds: limit.as_secs() as i64,
                nanos: limit.subsec_nanos() as i32,
            }),
            ..Default::default()
        };
        (listener, remote_at(name, uri))
    }

    async fn forwarded_first(ecds: &Ecds, message: &Bytes) -> (Bytes, SecondOutcome) {
        match ecds.intercept(Protocol::Delta, message.clone()).await {
            Outcome::Forward(message, Some(later)) => (message, later),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_module_that_hangs_holds_back_its_own_resource_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let (wasm, _fetches) = start(directory.path());
        let ecds = Ecds(wasm);
        let (_server, hangs) = hanging("a", Duration::from_secs(3600));
        let (a, b, c) = (("a", hangs), ("b", other("b")), ("c", other("c")));
        let first = delta("1", &[b.clone(), a.clone(), c], &["x"]);
        let (found, later) = forwarded_first(&ecds, &first).await;
        assert_eq!(found, delta("1", &[b, ("c", other("c"))], &["x"]));
        assert_eq!(later.rest, delta("1", from_ref(&a), &[]));
        // The hanging module does not delay the next response either, nor a response with removals only.
        for (nonce, newer) in
            [("2", delta("2", &[("b", other("new"))], &[])), ("3", delta("3", &[], &["b"]))]
        {
            let merged = ecds.merge(Protocol::Delta, &later.rest, &newer).expect("merged");
            let (found, later) = forwarded_first(&ecds, &merged).await;
            assert_eq!(found, newer);
            assert_eq!(later.rest, delta(nonce, from_ref(&a), &[]));
        }
    }

    #[tokio::test]
    async fn a_resource_removed_or_replaced_during_its_fetch_is_not_sent_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let (wasm, _fetches) = start(directory.path());
        let ecds = Ecds(wasm);
        let (_server, hangs) = hanging("a", Duration::from_secs(3600));
        let first = delta("1", &[("a", hangs), ("b", other("b"))], &[]);
        let (_, later) = forwarded_first(&ecds, &first).await;
        for newer in [delta("2", &[], &["a"]), delta("2", &[("a", other("a"))], &[])] {
            let merged = ecds.merge(Protocol::Delta, &later.rest, &newer).expect("merged");
            let outcome = ecds.intercept(Protocol::Delta, merged).await;
            assert!(matches!(outcome, Outcome::Forward(found, None) if found == newer));
        }
    }

    #[tokio::test]
    async fn each_late_resource_comes_with_the_nonce_of_its_response() {
        let directory = tempfile::tempdir().expect("a directory");
        let (wasm, _fetches) = start(directory.path());
        let ecds = Ecds(wasm);
        let (_one, a) = hanging("a", Duration::from_millis(50));
        let (_other, b) = hanging("b", Duration::from_millis(50));
        let response = delta("1", &[("a", a), ("b", b)], &[]);
        let (first, later) = forwarded_first(&ecds, &response).await;
        let Outcome::Forward(second, Some(_)) = later.outcome.await else {
            panic!("the modules are fetched again later");
        };
        let mut names = Vec::new();
        for message in [first, second] {
            let found = DeltaDiscoveryResponse::decode(message).expect("a response");
            assert_eq!((found.nonce.as_str(), found.resources.len()), ("1", 1));
            let any = found.resources[0].resource.as_ref().expect("an Any");
            assert!(String::from_utf8_lossy(&any.value).contains("wasm-default-deny"));
            names.push(found.resources[0].name.clone());
        }
        names.sort();
        assert_eq!(names, ["a", "b"]);
    }

    #[test]
    fn a_newer_delta_response_takes_over_resources_of_the_older_one() {
        let ecds = Ecds(wasm());
        let (a, b) = (("a", other("a")), ("b", other("b")));
        let older = delta("1", &[a.clone(), b.clone(), ("c", other("old"))], &["x", "d"]);
        let newer = delta("2", &[("c", other("new")), ("d", other("d"))], &["b"]);
        let merged = ecds.merge(Protocol::Delta, &older, &newer).expect("merged");
        let merged = DeltaDiscoveryResponse::decode(merged).expect("a response");
        let expected = delta("2", &[("c", other("new")), ("d", other("d")), a], &["b", "x"]);
        assert_eq!(merged, DeltaDiscoveryResponse::decode(expected).expect("a response"));
        assert_eq!(ecds.merge(Protocol::Sotw, &older, &newer), Some(newer));
    }

    /// Generates resources that look like filters and have no module to fetch.
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
                // Adds a field that this version does not know.
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
            let (protocol, message) = if is_delta {
                (Protocol::Delta, delta("n", &named, &["b"]))
            } else {
                (Protocol::Sotw, sotw(&resources))
            };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            let runtime = runtime.expect("a runtime");
            for message in [message.clone(), [&message[..], &rest].concat().into()] {
                let outcome = Ecds(wasm()).intercept(protocol, message.clone());
                match runtime.block_on(outcome) {
                    Outcome::Forward(found, None) => prop_assert_eq!(found, message),
                    Outcome::Rejected(_) => {}
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
