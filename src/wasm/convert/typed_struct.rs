//! Reads a Wasm filter's configuration from a `google.protobuf.Struct`, by the rules of protobuf's
//! JSON: a member that is unknown or has another type is an error, `null` is unset, and names are
//! those of the messages or their lowerCamelCase.
//!
//! The result is the encoded message, so that both forms of a filter are handled alike.
//!
//! Source: the protobuf guide, "ProtoJSON Format".

use base64::Engine;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use prost::Message;
use prost::encoding;
use prost_types::value::Kind as Json;
use prost_types::{Struct, Value};

use super::messages::Any;
use super::wire;

/// Name, number and type of a field.
type Field = (&'static str, u32, Type);

enum Type {
    Text,
    Texts,
    Bool,
    /// `google.protobuf.BoolValue`
    BoolValue,
    Enum(&'static [&'static str]),
    Message(&'static [Field]),
    /// From text to text.
    TextMap,
    /// From text to an empty message.
    Names,
    Duration,
    Any,
    /// A message that is not read: the rest of the resource says nothing else without it.
    Unread,
}

const WASM: &[Field] = &[("config", 1, Type::Message(PLUGIN))];
const PLUGIN: &[Field] = &[
    ("name", 1, Type::Text),
    ("root_id", 2, Type::Text),
    ("vm_config", 3, Type::Message(VM)),
    ("configuration", 4, Type::Any),
    ("fail_open", 5, Type::Bool),
    (
        "capability_restriction_config",
        6,
        Type::Message(CAPABILITIES),
    ),
    ("failure_policy", 7, Type::Enum(POLICIES)),
    ("reload_config", 8, Type::Message(RELOAD)),
    ("allow_on_headers_stop_iteration", 9, Type::BoolValue),
];
const POLICIES: &[&str] = &["UNSPECIFIED", "FAIL_RELOAD", "FAIL_CLOSED", "FAIL_OPEN"];
const CAPABILITIES: &[Field] = &[("allowed_capabilities", 1, Type::Names)];
const RELOAD: &[Field] = &[("backoff", 1, Type::Message(BACKOFF))];
const BACKOFF: &[Field] = &[
    ("base_interval", 1, Type::Duration),
    ("max_interval", 2, Type::Duration),
];
const VM: &[Field] = &[
    ("vm_id", 1, Type::Text),
    ("runtime", 2, Type::Text),
    ("code", 3, Type::Message(CODE)),
    ("configuration", 4, Type::Any),
    ("allow_precompiled", 5, Type::Bool),
    ("nack_on_code_cache_miss", 6, Type::Bool),
    ("environment_variables", 7, Type::Message(ENVIRONMENT)),
];
const ENVIRONMENT: &[Field] = &[
    ("host_env_keys", 1, Type::Texts),
    ("key_values", 2, Type::TextMap),
];
// A filter with local code passes as it came, so the code is not read.
const CODE: &[Field] = &[
    ("local", 1, Type::Unread),
    ("remote", 2, Type::Message(REMOTE)),
];
const REMOTE: &[Field] = &[
    ("http_uri", 1, Type::Message(URI)),
    ("sha256", 2, Type::Text),
    ("retry_policy", 3, Type::Unread),
];
const URI: &[Field] = &[
    ("uri", 1, Type::Text),
    ("cluster", 2, Type::Text),
    ("timeout", 3, Type::Duration),
];

/// The encoded `Wasm` message that `value` describes.
pub(super) fn wasm(value: &Struct) -> Result<Bytes, String> {
    let mut encoded = Vec::new();
    message(WASM, value, &mut encoded)?;
    Ok(encoded.into())
}

fn message(fields: &[Field], value: &Struct, encoded: &mut Vec<u8>) -> Result<(), String> {
    for (name, value) in &value.fields {
        let is_named = |field: &&Field| field.0 == name || is_camel_case(name, field.0);
        let (_, number, kind) = fields
            .iter()
            .find(is_named)
            .ok_or_else(|| format!("unknown field {name:?}"))?;
        match &value.kind {
            None | Some(Json::NullValue(_)) => {}
            Some(json) => field(*number, kind, json, encoded)
                .map_err(|problem| format!("field {name:?}: {problem}"))?,
        }
    }
    Ok(())
}

/// Whether `name` is the lowerCamelCase of a field's name.
fn is_camel_case(name: &str, field: &str) -> bool {
    let mut words = field.split('_');
    let mut camel = words.next().unwrap_or_default().to_owned();
    for word in words {
        let (first, rest) = word.split_at(1);
        camel += &first.to_ascii_uppercase();
        camel += rest;
    }
    name == camel
}

fn field(number: u32, kind: &Type, json: &Json, encoded: &mut Vec<u8>) -> Result<(), String> {
    let mut inner = Vec::new();
    match (kind, json) {
        (Type::Text, Json::StringValue(text)) => inner.extend_from_slice(text.as_bytes()),
        (Type::Bool, Json::BoolValue(value)) => {
            encoding::bool::encode(number, value, encoded);
            return Ok(());
        }
        (Type::BoolValue, Json::BoolValue(value)) => inner = value.encode_to_vec(),
        (Type::Enum(names), json) => {
            encoding::int32::encode(number, &enumerator(names, json)?, encoded);
            return Ok(());
        }
        (Type::Message(fields), Json::StructValue(value)) => message(fields, value, &mut inner)?,
        (Type::Unread, Json::StructValue(_)) => {}
        (Type::Texts, Json::ListValue(list)) => {
            for value in &list.values {
                let text = value.kind.as_ref().ok_or("an element is missing")?;
                field(number, &Type::Text, text, encoded)?;
            }
            return Ok(());
        }
        (Type::TextMap | Type::Names, Json::StructValue(map)) => {
            for (key, value) in &map.fields {
                wire::append(encoded, number, &entry(kind, key, value)?);
            }
            return Ok(());
        }
        (Type::Duration, Json::StringValue(text)) => {
            let duration: prost_types::Duration = text
                .parse()
                .map_err(|_| format!("found {text:?}, expected seconds such as 1.5s"))?;
            inner = duration.encode_to_vec();
        }
        (Type::Any, Json::StructValue(value)) => inner = any(value)?.encode_to_vec(),
        (kind, found) => {
            let (found, expected) = (name(found), kind.expected());
            return Err(format!("found {found}, expected {expected}"));
        }
    }
    wire::append(encoded, number, &inner);
    Ok(())
}

/// An entry of a map.
fn entry(kind: &Type, key: &str, value: &Value) -> Result<Vec<u8>, String> {
    let kind = match kind {
        Type::Names => &Type::Unread,
        _ => &Type::Text,
    };
    let mut entry = Vec::new();
    wire::append(&mut entry, 1, key.as_bytes());
    let value = value.kind.as_ref().ok_or("a value is missing")?;
    field(2, kind, value, &mut entry).map_err(|problem| format!("entry {key:?}: {problem}"))?;
    Ok(entry)
}

fn enumerator(names: &[&str], json: &Json) -> Result<i32, String> {
    let found = match json {
        Json::StringValue(text) => names.iter().position(|name| name == text),
        Json::NumberValue(number) if number.fract() == 0.0 => return Ok(*number as i32),
        _ => None,
    };
    let found = found.and_then(|index| i32::try_from(index).ok());
    found.ok_or_else(|| format!("expected one of {}", names.join(", ")))
}

/// The configuration of a plugin: one of the well-known types, named in the member `@type`.
fn any(value: &Struct) -> Result<Any, String> {
    let member = |name: &str| value.fields.get(name).and_then(|value| value.kind.as_ref());
    let Some(Json::StringValue(type_url)) = member("@type") else {
        return match value.fields.is_empty() {
            true => Ok(Any::default()),
            false => Err("\"@type\" is missing".to_owned()),
        };
    };
    let type_name = type_url.rsplit('/').next().unwrap_or_default();
    let encoded = match (type_name, member("value")) {
        ("google.protobuf.StringValue", Some(Json::StringValue(text))) => text.encode_to_vec(),
        ("google.protobuf.BytesValue", Some(Json::StringValue(text))) => {
            base64(text)?.encode_to_vec()
        }
        ("google.protobuf.BoolValue", Some(Json::BoolValue(value))) => value.encode_to_vec(),
        ("google.protobuf.Struct", Some(Json::StructValue(value))) => value.encode_to_vec(),
        ("google.protobuf.Value", Some(json)) => {
            let kind = Some(json.clone());
            Value { kind }.encode_to_vec()
        }
        ("google.protobuf.Empty", _) => Vec::new(),
        _ => {
            let expected = "a StringValue, BytesValue, BoolValue, Struct, Value or Empty";
            return Err(format!(
                "found a {type_url:?}, expected {expected} with its value"
            ));
        }
    };
    Ok(Any {
        type_url: type_url.clone(),
        value: encoded.into(),
    })
}

/// Either alphabet, with or without padding.
fn base64(text: &str) -> Result<Vec<u8>, String> {
    let is_url_safe = text.contains(['-', '_']);
    let alphabet = if is_url_safe { URL_SAFE } else { STANDARD };
    let mode = DecodePaddingMode::Indifferent;
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(mode);
    let decoded = GeneralPurpose::new(&alphabet, config).decode(text);
    decoded.map_err(|error| format!("no base64: {error}"))
}

impl Type {
    fn expected(&self) -> &'static str {
        match self {
            Type::Text => "text",
            Type::Texts => "a list",
            Type::Bool | Type::BoolValue => "true or false",
            Type::Duration => "text such as 1.5s",
            _ => "an object",
        }
    }
}

fn name(json: &Json) -> &'static str {
    match json {
        Json::NullValue(_) => "null",
        Json::NumberValue(_) => "a number",
        Json::StringValue(_) => "text",
        Json::BoolValue(_) => "a boolean",
        Json::StructValue(_) => "an object",
        Json::ListValue(_) => "a list",
    }
}
