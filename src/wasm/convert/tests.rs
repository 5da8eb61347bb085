//! Resources built from Envoy's own messages, converted and read again.
#![allow(deprecated, reason = "fields that EnvoyFilters still set")]

use std::collections::HashMap;

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
use proptest::prelude::*;
use prost_types::Struct;

use super::*;

const HTTP: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const NETWORK: &str = "type.googleapis.com/envoy.extensions.filters.network.wasm.v3.Wasm";
const OUTER: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

fn encoded(type_url: &str, value: Vec<u8>) -> Bytes {
    let (type_url, value) = (type_url.to_owned(), value.into());
    Any { type_url, value }.encode_to_vec().into()
}

/// A resource with this typed config.
fn extension(type_url: &str, value: Vec<u8>) -> Bytes {
    let config = protobuf::Any {
        type_url: type_url.to_owned(),
        value,
    };
    let extension = EnvoyExtension {
        name: "ns.plugin".to_owned(),
        typed_config: Some(config),
    };
    encoded(OUTER, extension.encode_to_vec())
}

fn remote() -> Code {
    Code::Remote(EnvoyRemote {
        http_uri: Some(HttpUri {
            uri: "oci://registry/plugin:v1".to_owned(),
            timeout: Some(protobuf::Duration {
                seconds: 30,
                nanos: 0,
            }),
            http_upstream_type: Some(HttpUpstreamType::Cluster("_".to_owned())),
        }),
        sha256: "nil".to_owned(),
        retry_policy: None,
    })
}

fn environment(pairs: &[(&str, &str)]) -> EnvoyEnvironment {
    let pairs = pairs
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    EnvoyEnvironment {
        host_env_keys: Vec::new(),
        key_values: pairs.collect::<HashMap<_, _>>(),
    }
}

fn wasm(code: Option<Code>, environment: Option<EnvoyEnvironment>) -> EnvoyWasm {
    let vm = EnvoyVm {
        runtime: "envoy.wasm.runtime.v8".to_owned(),
        code: code.map(|specifier| EnvoyCode {
            specifier: Some(specifier),
        }),
        environment_variables: environment,
        ..Default::default()
    };
    EnvoyWasm {
        config: Some(EnvoyPlugin {
            name: "plugin".to_owned(),
            configuration: Some(protobuf::Any {
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
    filter(&resource).expect("a resource").expect("a filter")
}

/// The typed config of a resource.
fn config(resource: Bytes) -> protobuf::Any {
    let any = Any::decode(resource).expect("an Any");
    assert_eq!(any.type_url, OUTER);
    let extension = EnvoyExtension::decode(any.value).expect("an extension");
    assert_eq!(extension.name, "ns.plugin");
    extension.typed_config.expect("a typed config")
}

#[test]
fn what_has_no_remote_module_is_left_alone_and_what_cannot_be_read_is_refused() {
    let local = |source| {
        let specifier = Some(source);
        let code = Code::Local(EnvoySource {
            specifier,
            ..Default::default()
        });
        wasm(Some(code), None).encode_to_vec()
    };
    let file = local(Source::Filename("/module".to_owned()));
    let inline = local(Source::InlineBytes(b"\0asm".to_vec()));
    let foreign = TypedStruct {
        type_url: "type.googleapis.com/other".to_owned(),
        value: None,
    };
    let empty_struct = |value| {
        TypedStruct {
            type_url: HTTP.to_owned(),
            value,
        }
        .encode_to_vec()
    };
    let none = EnvoyExtension::default().encode_to_vec();
    for (what, resource, expected) in [
        (
            "another type",
            extension("type.googleapis.com/rbac", b"\xff".to_vec()),
            Ok(()),
        ),
        ("local file", extension(HTTP, file), Ok(())),
        ("inline code", extension(NETWORK, inline), Ok(())),
        (
            "foreign struct",
            extension(TYPED_STRUCT, foreign.encode_to_vec()),
            Ok(()),
        ),
        (
            "no Any",
            Bytes::from_static(b"\xff"),
            Err("failed to unmarshal"),
        ),
        (
            "outer type",
            encoded("type.googleapis.com/x", Vec::new()),
            Err("expected envoy.config"),
        ),
        (
            "outer value",
            encoded(OUTER, b"\x0a\xff".to_vec()),
            Err("failed to unmarshal"),
        ),
        (
            "no config",
            encoded(OUTER, none),
            Err("does not contain any typed config"),
        ),
        (
            "no wasm",
            extension(HTTP, b"\x0a\xff".to_vec()),
            Err("failed to unmarshal"),
        ),
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
        (
            "no struct",
            extension(TYPED_STRUCT, b"\x0a\xff".to_vec()),
            Err("failed to unmarshal"),
        ),
        (
            "struct without a value",
            extension(TYPED_STRUCT, empty_struct(None)),
            Err("it has no value"),
        ),
        (
            "empty struct",
            extension(TYPED_STRUCT, empty_struct(Some(Struct::default()))),
            Err("no remote and local"),
        ),
    ] {
        match (filter(&resource), expected) {
            (Ok(None), Ok(())) => {}
            (Err(error), Err(part)) => assert!(error.contains(part), "{what}: {error}"),
            (found, _) => panic!("{what}: {found:?}"),
        }
    }
}

#[test]
fn the_request_says_what_to_fetch_and_with_which_rules() {
    let pairs = [
        (PULL_SECRET, "{}"),
        (PULL_POLICY, "Always"),
        (RESOURCE_VERSION, "7"),
    ];
    let request = found(&wasm(Some(remote()), Some(environment(&pairs))))
        .module
        .expect("a request");
    assert_eq!(request.url, "oci://registry/plugin:v1");
    assert_eq!(
        (request.checksum.as_str(), request.resource_version.as_str()),
        ("", "7")
    );
    assert_eq!(request.time_limit, Duration::from_secs(30));
    assert_eq!(request.pull_policy, PullPolicy::Always);
    assert_eq!(
        request.pull_secret.as_deref().map(String::as_str),
        Some("{}")
    );
    assert!(!format!("{request:?}").contains("{}"));

    let edit = |edit: &dyn Fn(&mut EnvoyRemote)| {
        let Code::Remote(mut changed) = remote() else {
            panic!("a remote module")
        };
        edit(&mut changed);
        found(&wasm(Some(Code::Remote(changed)), Some(environment(&[])))).module
    };
    let plain = edit(&|remote| {
        remote.sha256 = "abc".to_owned();
        remote.http_uri.as_mut().expect("a URI").timeout = None;
    });
    let plain = plain.expect("a request");
    assert_eq!(
        (plain.checksum.as_str(), plain.time_limit),
        ("abc", TIME_LIMIT)
    );
    assert_eq!(
        (plain.pull_policy, plain.pull_secret),
        (PullPolicy::Unspecified, None)
    );
    let negative = edit(&|remote| {
        let timeout = protobuf::Duration {
            seconds: -1,
            nanos: 0,
        };
        remote.http_uri.as_mut().expect("a URI").timeout = Some(timeout);
    });
    assert_eq!(negative.expect("a request").time_limit, Duration::ZERO);
    let none = edit(&|remote| remote.http_uri = None).expect_err("no URI");
    assert_eq!(none, Unusable::NoUri("ns.plugin".to_owned()));
    let secret = environment(&[(PULL_SECRET, "")]);
    let none = found(&wasm(Some(remote()), Some(secret)))
        .module
        .expect_err("no secret");
    assert_eq!(
        none.to_string(),
        "cannot fetch Wasm module plugin: missing image pulling secret"
    );
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
    let vm = wasm(Some(remote()), None)
        .config
        .and_then(|config| config.vm)
        .expect("a VM");
    let Vm::VmConfig(vm) = vm;
    let plugin = nested(3, unknown(vm.encode_to_vec(), b"in-vm"));
    let wasm = nested(1, unknown(plugin, b"in-plugin"));
    let config = nested(2, unknown(wasm, b"in-wasm"));
    let config = [
        nested(1, HTTP.into()),
        config,
        unknown(Vec::new(), b"in-config"),
    ]
    .concat();
    let extension = unknown(nested(2, config), b"in-extension");
    let any = [
        nested(1, OUTER.into()),
        nested(2, extension),
        unknown(Vec::new(), b"in-any"),
    ];
    let resource = Bytes::from(any.concat());
    let filter = filter(&resource).expect("a resource").expect("a filter");
    let rewritten = filter.with_module("/data/a.wasm").expect("a resource");
    // The Any of the filter is written anew: it has no other fields.
    for mark in ["in-vm", "in-plugin", "in-wasm", "in-extension", "in-any"] {
        let found = rewritten
            .windows(mark.len())
            .any(|part| part == mark.as_bytes());
        assert!(found, "{mark}");
    }
}

#[test]
fn a_module_that_is_missing_is_replaced_by_the_rbac_filter_of_its_policy() {
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
            (
                HTTP,
                "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
                http,
            ),
            (
                NETWORK,
                "type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC",
                network,
            ),
        ] {
            let resource = extension(type_url, wasm.encode_to_vec());
            let filter = filter(&resource).expect("a resource").expect("a filter");
            let fallback = config(filter.fallback().expect("a resource"));
            assert_eq!(
                (fallback.type_url.as_str(), &*fallback.value),
                (rbac, bytes)
            );
            assert_eq!(
                filter.policy() == "allow",
                bytes == allow || bytes == network_allow
            );
        }
    }
    let read = Rbac::decode(deny).expect("RBAC");
    assert!(read.rules.is_some() && read.rules_stat_prefix == "wasm-default-deny");
}

/// JSON as a `google.protobuf.Value`.
fn json(value: &serde_json::Value) -> prost_types::Value {
    use prost_types::value::Kind;
    use serde_json::Value;
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(number) => Kind::NumberValue(number.as_f64().expect("a number")),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(list) => Kind::ListValue(prost_types::ListValue {
            values: list.iter().map(json).collect(),
        }),
        Value::Object(map) => Kind::StructValue(Struct {
            fields: map
                .iter()
                .map(|(key, value)| (key.clone(), json(value)))
                .collect(),
        }),
    };
    prost_types::Value { kind: Some(kind) }
}

fn typed_struct(value: &serde_json::Value) -> Result<Option<Filter>, String> {
    let Some(prost_types::value::Kind::StructValue(value)) = json(value).kind else {
        panic!("an object is expected");
    };
    let value = Some(value);
    let message = TypedStruct {
        type_url: NETWORK.to_owned(),
        value,
    };
    filter(&extension(TYPED_STRUCT, message.encode_to_vec()))
}

#[test]
fn a_typed_struct_becomes_the_message_it_describes() {
    let described = serde_json::json!({"config": {
        "name": "plugin",
        "rootId": "root",
        "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": "{}"},
        "fail_open": true,
        "failure_policy": "FAIL_OPEN",
        "capability_restriction_config": {"allowed_capabilities": {"fd_write": {}}},
        "reload_config": {"backoff": {"base_interval": "1.5s"}},
        "allow_on_headers_stop_iteration": false,
        "vmConfig": {
            "vm_id": "vm",
            "runtime": "envoy.wasm.runtime.v8",
            "code": {"remote": {
                "httpUri": {"uri": "https://server/a.wasm", "cluster": "c", "timeout": "10s"},
                "sha256": "abc",
                "retry_policy": {"num_retries": 3},
            }},
            "configuration": {"@type": "type.googleapis.com/google.protobuf.BytesValue", "value": "_-8"},
            "allow_precompiled": true,
            "nack_on_code_cache_miss": null,
            "environment_variables": {"host_env_keys": ["A"], "key_values": {"K": "V"}},
        },
    }});
    let filter = typed_struct(&described)
        .expect("a resource")
        .expect("a filter");
    let request = filter.module.as_ref().expect("a request");
    assert_eq!(request.url, "https://server/a.wasm");
    assert_eq!(
        (request.checksum.as_str(), request.time_limit),
        ("abc", Duration::from_secs(10))
    );
    let rewritten = config(filter.with_module("/data/a.wasm").expect("a resource"));
    assert_eq!(rewritten.type_url, NETWORK);
    let plugin = EnvoyWasm::decode(&*rewritten.value)
        .expect("Wasm")
        .config
        .expect("a plugin");
    let Some(Vm::VmConfig(vm)) = plugin.vm else {
        panic!("no VM")
    };
    let capabilities = plugin.capability_restriction_config.expect("capabilities");
    assert!(capabilities.allowed_capabilities.contains_key("fd_write"));
    let interval = plugin
        .reload_config
        .and_then(|it| it.backoff)
        .and_then(|it| it.base_interval);
    assert_eq!(
        interval,
        Some(protobuf::Duration {
            seconds: 1,
            nanos: 500_000_000
        })
    );
    assert_eq!(
        (plugin.root_id.as_str(), plugin.failure_policy),
        ("root", 3)
    );
    let value = plugin.configuration.expect("a configuration").value;
    assert_eq!(String::decode(&*value), Ok("{}".to_owned()));
    let value = vm.configuration.expect("a configuration").value;
    assert_eq!(Vec::<u8>::decode(&*value), Ok(vec![0xff, 0xef]));
    assert!(vm.allow_precompiled && plugin.allow_on_headers_stop_iteration.is_some());
    let environment = vm.environment_variables.expect("an environment");
    assert_eq!(
        (environment.host_env_keys, &*environment.key_values["K"]),
        (vec!["A".to_owned()], "V")
    );
}

#[test]
fn a_typed_struct_with_anything_else_is_refused() {
    use serde_json::json;
    for (config, expected) in [
        (json!({"other": 1}), "unknown field \"other\""),
        (
            json!({"name": 1}),
            "field \"name\": found a number, expected text",
        ),
        (json!({"vm_config": []}), "found a list, expected an object"),
        (
            json!({"fail_open": "true"}),
            "found text, expected true or false",
        ),
        (
            json!({"failure_policy": "OPEN"}),
            "expected one of UNSPECIFIED",
        ),
        (
            json!({"configuration": {"value": 1}}),
            "\"@type\" is missing",
        ),
        (
            json!({"configuration": {"@type": "a/b.C"}}),
            "found a \"a/b.C\", expected a StringValue",
        ),
        (
            json!({"reload_config": {"backoff": {"max_interval": "long"}}}),
            "expected seconds",
        ),
        (
            json!({"vm_config": {"environment_variables": {"key_values": {"K": 1}}}}),
            "entry \"K\"",
        ),
    ] {
        let error = typed_struct(&json!({"config": config})).expect_err("an error");
        assert!(error.contains(expected), "{error}");
    }
}

/// Messages with the numbers of the fields that are looked at, over and over.
fn nested() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..12),
        prop::sample::select(vec![HTTP, NETWORK, OUTER, TYPED_STRUCT]).prop_map(Vec::from),
    ];
    leaf.prop_recursive(7, 60, 4, |inner| {
        prop::collection::vec((1u32..9, inner), 0..4).prop_map(|fields| {
            let mut message = Vec::new();
            for (number, content) in fields {
                wire::append(&mut message, number, &content);
            }
            message
        })
    })
}

proptest! {
    #[test]
    fn any_bytes_are_a_filter_or_none_and_only_the_module_is_replaced(
        value in nested(),
        type_url in prop::sample::select(vec![HTTP, NETWORK, TYPED_STRUCT, "other"]),
        wraps in 0..3,
    ) {
        let resource = match wraps {
            0 => value.into(),
            1 => encoded(OUTER, value),
            _ => extension(type_url, value),
        };
        if let Ok(Some(found)) = filter(&resource) {
            if let Ok(rewritten) = found.with_module("/data/a.wasm") {
                // What has a local module is no filter to be rewritten.
                prop_assert!(matches!(filter(&rewritten), Ok(None)));
            }
            if let Ok(fallback) = found.fallback() {
                prop_assert!(matches!(filter(&fallback), Ok(None)));
            }
        }
    }

    #[test]
    fn a_message_is_the_sum_of_its_fields(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        let bytes = Bytes::from(bytes);
        if let Ok(fields) = wire::fields(&bytes) {
            let records: Vec<_> = fields.into_iter().map(|field| field.record).collect();
            prop_assert_eq!(records.concat(), bytes);
        }
    }
}
