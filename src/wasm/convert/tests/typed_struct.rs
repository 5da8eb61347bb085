//! Tests the conversion of filters that are a `google.protobuf.Struct`.

use super::*;

/// Converts JSON to a `google.protobuf.Value`.
fn json(value: &serde_json::Value) -> prost_types::Value {
    use prost_types::value::Kind;
    use serde_json::Value;
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(number) => Kind::NumberValue(number.as_f64().expect("a number")),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(list) => {
            Kind::ListValue(prost_types::ListValue { values: list.iter().map(json).collect() })
        }
        Value::Object(map) => Kind::StructValue(Struct {
            fields: map.iter().map(|(key, value)| (key.clone(), json(value))).collect(),
        }),
    };
    prost_types::Value { kind: Some(kind) }
}

fn typed_struct(value: &serde_json::Value) -> Result<Option<Filter>, Rejected> {
    let Some(prost_types::value::Kind::StructValue(value)) = json(value).kind else {
        panic!("an object is expected");
    };
    read_filter(&extension(TYPED_STRUCT, typed(NETWORK, Some(value))))
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
    let filter = typed_struct(&described).expect("a resource").expect("a filter");
    let request = filter.module.as_ref().expect("a request");
    assert_eq!(request.source.redacted(), "https://server/a.wasm");
    assert_eq!(
        (request.pinned.as_deref(), request.time_limit),
        (Some("abc"), Duration::from_secs(10))
    );
    let rewritten = config(filter.with_module("/data/a.wasm").expect("a resource"));
    assert_eq!(rewritten.type_url, NETWORK);
    let plugin = EnvoyWasm::decode(&*rewritten.value).expect("Wasm").config.expect("a plugin");
    let Some(Vm::VmConfig(vm)) = plugin.vm else { panic!("no VM") };
    let capabilities = plugin.capability_restriction_config.expect("capabilities");
    assert!(capabilities.allowed_capabilities.contains_key("fd_write"));
    let interval = plugin.reload_config.and_then(|it| it.backoff).and_then(|it| it.base_interval);
    assert_eq!(interval, Some(protobuf::Duration { seconds: 1, nanos: 500_000_000 }));
    assert_eq!((plugin.root_id.as_str(), plugin.failure_policy), ("root", 3));
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
        (json!({"other": 1}), "unrecognized field name 'other'"),
        (json!({"name": 1}), "invalid type"),
        (json!({"vm_config": []}), "invalid type"),
        (json!({"fail_open": "true"}), "invalid type"),
        (json!({"failure_policy": "OPEN"}), "unrecognized enum value 'OPEN'"),
        (json!({"configuration": {"value": 1}}), "@type"),
        (json!({"configuration": {"@type": "a/b.C"}}), "message 'b.C' not found"),
        (
            json!({"reload_config": {"backoff": {"max_interval": "long"}}}),
            "failed to parse duration",
        ),
        (json!({"vm_config": {"environment_variables": {"key_values": {"K": 1}}}}), "invalid type"),
        (json!({"vm_config": {"code": {"local": {}, "remote": {}}}}), "multiple fields"),
    ] {
        let error = typed_struct(&json!({"config": config})).expect_err("an error").to_string();
        assert!(error.contains(expected), "{error}");
    }
}
