//! Tests the conversion of resources that are built from Envoy's own messages.
#![allow(deprecated, reason = "fields that EnvoyFilters still set")]

mod arbitrary;
mod typed_struct;

use std::collections::HashMap;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::async_data_source::Specifier as Code;
use envoy_types::pb::envoy::config::core::v3::data_source::Specifier as Source;
use envoy_types::pb::envoy::config::core::v3::http_uri::HttpUpstreamType;
use envoy_types::pb::envoy::config::core::v3::{
    AsyncDataSource as EnvoyCode, DataSource as EnvoySource, HttpUri,
    RemoteDataSource as EnvoyRemote, TypedExtensionConfig as EnvoyExtension,
};
use envoy_types::pb::envoy::extensions::filters::http::rbac::v3::Rbac;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm as EnvoyWasm;
use envoy_types::pb::envoy::extensions::wasm::v3::{
    EnvironmentVariables as EnvoyEnvironment, PluginConfig as EnvoyPlugin, VmConfig as EnvoyVm,
    plugin_config::Vm,
};
use envoy_types::pb::google::protobuf;
use prost_types::Struct;

use super::*;
use crate::wasm::request::{MAX_FETCH, PULL_POLICY, PULL_SECRET, RESOURCE_VERSION, TIME_LIMIT};

const HTTP: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const NETWORK: &str = "type.googleapis.com/envoy.extensions.filters.network.wasm.v3.Wasm";
const OUTER: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

fn encoded(type_url: &str, value: Vec<u8>) -> Bytes {
    let type_url = type_url.to_owned();
    Any { type_url, value }.encode_to_vec().into()
}

/// Encodes a `TypedStruct`, which has the same fields as an `Any`.
fn typed(type_url: &str, value: Option<Struct>) -> Vec<u8> {
    let value = value.map_or_else(Vec::new, |value| value.encode_to_vec());
    encoded(type_url, value).into()
}

/// Returns a resource with this typed config.
fn extension(type_url: &str, value: Vec<u8>) -> Bytes {
    let config = Any { type_url: type_url.to_owned(), value };
    let extension = EnvoyExtension { name: "ns.plugin".to_owned(), typed_config: Some(config) };
    encoded(OUTER, extension.encode_to_vec())
}

fn remote() -> Code {
    Code::Remote(EnvoyRemote {
        http_uri: Some(HttpUri {
            uri: "oci://registry/plugin:v1".to_owned(),
            timeout: Some(protobuf::Duration { seconds: 30, nanos: 0 }),
            http_upstream_type: Some(HttpUpstreamType::Cluster("_".to_owned())),
        }),
        sha256: "nil".to_owned(),
        retry_policy: None,
    })
}

fn environment(pairs: &[(&str, &str)]) -> EnvoyEnvironment {
    let pairs = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    EnvoyEnvironment { host_env_keys: Vec::new(), key_values: pairs.collect::<HashMap<_, _>>() }
}

fn wasm(code: Option<Code>, environment: Option<EnvoyEnvironment>) -> EnvoyWasm {
    let vm = EnvoyVm {
        runtime: "envoy.wasm.runtime.v8".to_owned(),
        code: code.map(|specifier| EnvoyCode { specifier: Some(specifier) }),
        environment_variables: environment,
        ..Default::default()
    };
    EnvoyWasm {
        config: Some(EnvoyPlugin {
            name: "plugin".to_owned(),
            configuration: Some(Any {
                type_url: "type.googleapis.com/google.protobuf.StringValue".to_owned(),
                value: "config".to_owned().encode_to_vec(),
            }),
            vm: Some(Vm::VmConfig(vm)),
            ..Default::default()
        }),
    }
}

fn found(wasm: &EnvoyWasm) -> Filter {
    let resource = extension(HTTP, wasm.encode_to_vec());
    read_filter(&resource).expect("a resource").expect("a filter")
}

/// Returns the typed config of a resource.
fn config(resource: Bytes) -> Any {
    let any = Any::decode(resource).expect("an Any");
    assert_eq!(any.type_url, OUTER);
    let extension = EnvoyExtension::decode(&*any.value).expect("an extension");
    assert_eq!(extension.name, "ns.plugin");
    extension.typed_config.expect("a typed config")
}

#[test]
fn resources_without_a_remote_module_pass_and_undecodable_ones_are_refused() {
    let local = |source| {
        let specifier = Some(source);
        let code = Code::Local(EnvoySource { specifier, ..Default::default() });
        wasm(Some(code), None).encode_to_vec()
    };
    let file = local(Source::Filename("/module".to_owned()));
    let inline = local(Source::InlineBytes(b"\0asm".to_vec()));
    let foreign = typed("type.googleapis.com/other", None);
    let empty = typed(HTTP, Some(Struct::default()));
    let none = EnvoyExtension::default().encode_to_vec();
    for (what, resource, expected) in [
        ("another type", extension("type.googleapis.com/rbac", b"\xff".to_vec()), Ok(())),
        ("local file", extension(HTTP, file), Ok(())),
        ("inline code", extension(NETWORK, inline), Ok(())),
        ("foreign struct", extension(TYPED_STRUCT, foreign), Ok(())),
        ("no Any", Bytes::from_static(b"\xff"), Err("failed to unmarshal")),
        ("outer type", encoded("type.googleapis.com/x", Vec::new()), Err("expected envoy.config")),
        ("outer value", encoded(OUTER, b"\x0a\xff".to_vec()), Err("failed to unmarshal")),
        ("no config", encoded(OUTER, none), Err("does not contain any typed config")),
        ("no wasm", extension(HTTP, b"\x0a\xff".to_vec()), Err("failed to unmarshal")),
        (
            "empty wasm",
            extension(HTTP, Vec::new()),
            Err("no remote and local load found in Wasm HTTP filter"),
        ),
        (
            "no code",
            extension(NETWORK, wasm(None, None).encode_to_vec()),
            Err("in Wasm Network filter"),
        ),
        ("no struct", extension(TYPED_STRUCT, b"\x0a\xff".to_vec()), Err("failed to unmarshal")),
        (
            "struct without a value",
            extension(TYPED_STRUCT, typed(HTTP, None)),
            Err("no remote and local"),
        ),
        ("empty struct", extension(TYPED_STRUCT, empty), Err("no remote and local")),
    ] {
        match (read_filter(&resource), expected) {
            (Ok(None), Ok(())) => {}
            (Err(error), Err(part)) => {
                assert!(error.to_string().contains(part), "{what}: {error}");
            }
            (found, _) => panic!("{what}: {found:?}"),
        }
    }
}

#[test]
fn the_request_says_what_to_fetch_and_with_which_rules() {
    let pairs = [(PULL_SECRET, "{}"), (PULL_POLICY, "Always"), (RESOURCE_VERSION, "7")];
    let request =
        found(&wasm(Some(remote()), Some(environment(&pairs)))).module.expect("a request");
    assert_eq!(request.source.redacted(), "oci://registry/plugin:v1");
    assert_eq!((request.pinned.as_deref(), request.ignores_version), (None, false));
    assert_eq!(request.time_limit, Duration::from_secs(30));
    assert_eq!(request.pull_secret.as_deref().map(String::as_str), Some("{}"));
    assert!(!format!("{request:?}").contains("{}"));

    let edit = |edit: &dyn Fn(&mut EnvoyRemote)| {
        let Code::Remote(mut changed) = remote() else { panic!("a remote module") };
        edit(&mut changed);
        found(&wasm(Some(Code::Remote(changed)), Some(environment(&[])))).module
    };
    let plain = edit(&|remote| {
        remote.sha256 = "abc".to_owned();
        remote.http_uri.as_mut().expect("a URI").timeout = None;
    });
    let plain = plain.expect("a request");
    assert_eq!((plain.pinned.as_deref(), plain.time_limit), (Some("abc"), TIME_LIMIT));
    assert_eq!((plain.ignores_version, plain.pull_secret.as_ref()), (true, None));
    for (seconds, nanos, expected) in [
        (-1, 0, Duration::ZERO),
        (1, -1, Duration::from_nanos(999_999_999)),
        (1, 5, Duration::from_nanos(1_000_000_005)),
        (i64::MAX, i32::MAX, MAX_FETCH),
    ] {
        let limited = edit(&|remote| {
            let timeout = protobuf::Duration { seconds, nanos };
            remote.http_uri.as_mut().expect("a URI").timeout = Some(timeout);
        });
        assert_eq!(limited.expect("a request").time_limit, expected);
    }
    let none = edit(&|remote| remote.http_uri = None).expect_err("no URI");
    assert_eq!(none.result, "miss_remote_fetch_hint");
    assert!(none.error.1.contains("config ns.plugin"), "{none:?}");
    let secret = environment(&[(PULL_SECRET, "")]);
    let none = found(&wasm(Some(remote()), Some(secret))).module.expect_err("no secret");
    assert_eq!(none.error.1, "cannot fetch Wasm module plugin: missing image pulling secret");
}

#[test]
fn a_rewritten_filter_differs_in_code_and_environment_alone() {
    let agents = [(PULL_SECRET, "{}"), ("ISTIO_META_OTHER", "x")];
    let others = [("MINE", "x"), ("ISTIO_METAL", "y")];
    let both = environment(&[agents, others].concat());
    let host = |mut environment: EnvoyEnvironment| {
        environment.host_env_keys.push("HOME".to_owned());
        Some(environment)
    };
    for (before, after) in [
        (None, None),
        (Some(environment(&agents)), None),
        (Some(both.clone()), Some(environment(&others))),
        (host(environment(&agents)), host(environment(&[]))),
        (host(both), host(environment(&others))),
    ] {
        let local = Code::Local(EnvoySource {
            specifier: Some(Source::Filename("/data/a.wasm".to_owned())),
            ..Default::default()
        });
        let rewritten = found(&wasm(Some(remote()), before)).with_module("/data/a.wasm");
        let rewritten = config(rewritten.expect("a resource"));
        assert_eq!(rewritten.type_url, HTTP);
        let rewritten = EnvoyWasm::decode(&*rewritten.value).expect("Wasm");
        assert_eq!(rewritten, wasm(Some(local), after));
    }
}

#[test]
fn unknown_fields_of_every_message_survive() {
    let unknown = |mut message: Vec<u8>, mark: &[u8]| {
        wire::append(&mut message, 3000, mark);
        message
    };
    let nested = |number, message: Vec<u8>| {
        let mut outer = Vec::new();
        wire::append(&mut outer, number, &message);
        outer
    };
    let vm = wasm(Some(remote()), None).config.and_then(|config| config.vm).expect("a VM");
    let Vm::VmConfig(vm) = vm;
    let plugin = nested(3, unknown(vm.encode_to_vec(), b"in-vm"));
    let wasm = nested(1, unknown(plugin, b"in-plugin"));
    let config = nested(2, unknown(wasm, b"in-wasm"));
    let config = [nested(1, HTTP.into()), config, unknown(Vec::new(), b"in-config")].concat();
    let extension = unknown(nested(2, config), b"in-extension");
    let any = [nested(1, OUTER.into()), nested(2, extension), unknown(Vec::new(), b"in-any")];
    let resource = Bytes::from(any.concat());
    let filter = read_filter(&resource).expect("a resource").expect("a filter");
    let rewritten = filter.with_module("/data/a.wasm").expect("a resource");
    // The `Any` of the filter is encoded again, so the unknown field `in-config` in it is lost.
    for mark in ["in-vm", "in-plugin", "in-wasm", "in-extension", "in-any"] {
        let found = rewritten.windows(mark.len()).any(|part| part == mark.as_bytes());
        assert!(found, "{mark}");
    }
}

#[test]
fn the_rbac_filter_of_its_policy_replaces_a_missing_module() {
    let deny = b"\x0a\x00\x32\x11wasm-default-deny".as_slice();
    let allow = b"\x32\x12wasm-default-allow".as_slice();
    let network_deny = b"\x0a\x00\x1a\x11wasm-default-deny".as_slice();
    let network_allow = b"\x1a\x12wasm-default-allow".as_slice();
    for (policy, fail_open, http, network) in [
        (0, false, deny, network_deny),
        (0, true, allow, network_allow),
        (1, true, deny, network_deny),
        (2, true, deny, network_deny),
        (3, false, allow, network_allow),
    ] {
        let mut wasm = wasm(Some(remote()), None);
        let plugin = wasm.config.as_mut().expect("a plugin");
        plugin.failure_policy = policy;
        plugin.fail_open = fail_open;
        for (type_url, rbac, bytes) in [
            (HTTP, "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC", http),
            (NETWORK, "type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC", network),
        ] {
            let resource = extension(type_url, wasm.encode_to_vec());
            let filter = read_filter(&resource).expect("a resource").expect("a filter");
            let fallback = config(filter.fallback().expect("a resource"));
            assert_eq!((fallback.type_url.as_str(), &*fallback.value), (rbac, bytes));
            assert_eq!(filter.fails_open, bytes == allow || bytes == network_allow);
        }
    }
    let read = Rbac::decode(deny).expect("RBAC");
    assert!(read.rules.is_some() && read.rules_stat_prefix == "wasm-default-deny");
}
