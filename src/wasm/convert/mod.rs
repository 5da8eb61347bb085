//! Recognises Wasm filters with a remote module in ECDS resources, and rewrites them.
//!
//! A resource is an encoded `Any`. In a filter, only the reference to the module and the environment
//! variables for the agent are replaced; all other fields, unknown ones too, stay byte for byte. Other
//! resources are not changed.

pub(crate) mod wire;

use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3 as core;
use envoy_types::pb::envoy::config::core::v3::async_data_source::Specifier;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
use envoy_types::pb::envoy::extensions::wasm::v3::plugin_config::Vm;
use envoy_types::pb::envoy::extensions::wasm::v3::{FailurePolicy, PluginConfig};
use envoy_types::pb::google::protobuf::Any;
use prost::{DecodeError, Message};
use prost_reflect::{DescriptorPool, DynamicMessage};

use super::request::{Request, Unusable};
use crate::runtime::lifecycle::BoxError;

const EXTENSION: &str = "envoy.config.core.v3.TypedExtensionConfig";
const TYPED_STRUCT: &str = "type.googleapis.com/udpa.type.v1.TypedStruct";

/// The beginning of a filter's type. The filter chain follows, `http` or `network`, and then its kind.
const FILTERS: &str = "type.googleapis.com/envoy.extensions.filters.";
const WASM: &str = ".wasm.v3.Wasm";
const RBAC: &str = ".rbac.v3.RBAC";

/// The prefix of a module's environment variables that are for the agent.
const FOR_AGENT: &str = "ISTIO_META_";

/// The definitions of `proto/envoy/extensions/wasm/v3/wasm.proto`, encoded.
const DEFINITIONS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wasm.fds"));

/// A Wasm filter whose module must be fetched.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    /// The name of the resource.
    pub(crate) name: String,
    pub(crate) module: Result<Arc<Request>, Unusable>,
    /// True if requests pass without the module.
    pub(crate) fails_open: bool,
    is_http: bool,
    /// The encoded `Any`.
    resource: Bytes,
    /// The encoded `Wasm` in it.
    wasm: Bytes,
}

/// The reason to reject a response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Rejected {
    #[error("failed to unmarshal extension config resource: {0}")]
    Resource(BoxError),
    #[error("typed extension config {name:?} does not contain any typed config")]
    Empty { name: String },
    #[error("failed to unmarshal the typed config of extension {name:?}: {error}")]
    Config { name: String, error: BoxError },
    #[error("no remote and local load found in Wasm {kind} filter {name:?}")]
    NoModule { kind: &'static str, name: String },
    #[error(transparent)]
    Fallback(#[from] DecodeError),
    #[error("discovery response from istiod: {0}")]
    Response(DecodeError),
    #[error("{}", lines(.0))]
    Several(Vec<Self>),
}

fn lines(problems: &[Rejected]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Returns the filter in a resource, if it is Wasm with a remote module. Fails if the resource cannot be
/// read; pilot-agent rejects the response then.
pub(crate) fn read_filter(resource: &Bytes) -> Result<Option<Filter>, Rejected> {
    let core::TypedExtensionConfig { name, typed_config } =
        decode_extension(resource).map_err(Rejected::Resource)?;
    let Some(config) = typed_config else {
        return Err(Rejected::Empty { name });
    };
    let decoded = match decode_wasm(config) {
        Ok(decoded) => decoded,
        Err(error) => return Err(Rejected::Config { name, error }),
    };
    let Some(WasmConfig { is_http, encoded, decoded }) = decoded else {
        return Ok(None);
    };
    let mut plugin = decoded.config.unwrap_or_default();
    let vm = plugin.vm.take().map(|Vm::VmConfig(vm)| vm).unwrap_or_default();
    let remote = match vm.code.and_then(|code| code.specifier) {
        Some(Specifier::Remote(remote)) => remote,
        Some(Specifier::Local(_)) => return Ok(None),
        None => {
            let kind = if is_http { "HTTP" } else { "Network" };
            return Err(Rejected::NoModule { kind, name });
        }
    };
    let variables = vm.environment_variables.unwrap_or_default().key_values;
    let request = Request::new(&name, &plugin.name, remote, &variables);
    Ok(Some(Filter {
        module: request.map(Arc::new),
        fails_open: fails_open(&plugin),
        resource: resource.clone(),
        is_http,
        wasm: encoded,
        name,
    }))
}

fn decode_extension(resource: &Bytes) -> Result<core::TypedExtensionConfig, BoxError> {
    let any = Any::decode(resource.clone())?;
    if any.type_url.rsplit('/').next() != Some(EXTENSION) {
        return Err(format!("type {:?}, expected {EXTENSION}", any.type_url).into());
    }
    Ok(core::TypedExtensionConfig::decode(any.value.as_slice())?)
}

/// The configuration of a Wasm filter.
struct WasmConfig {
    is_http: bool,
    encoded: Bytes,
    decoded: Wasm,
}

/// Decodes the configuration of a Wasm filter. None for another filter.
fn decode_wasm(config: Any) -> Result<Option<WasmConfig>, BoxError> {
    let is_struct = config.type_url == TYPED_STRUCT;
    let config = if is_struct {
        // A `TypedStruct` has the fields of an `Any`, and its value is a `Struct`.
        Any::decode(config.value.as_slice())?
    } else {
        config
    };
    let kind = config.type_url.strip_prefix(FILTERS);
    let is_http = match kind.and_then(|kind| kind.strip_suffix(WASM)) {
        Some("http") => true,
        Some("network") => false,
        _ => return Ok(None),
    };
    let encoded = if is_struct { wasm_from_struct(&config.value)? } else { config.value.into() };
    let decoded = Wasm::decode(encoded.clone())?;
    Ok(Some(WasmConfig { is_http, encoded, decoded }))
}

/// Converts an encoded `google.protobuf.Struct` to the encoded `Wasm` message that it describes, so that
/// both forms of a filter are handled alike. By the rules of protobuf's JSON, a member that is unknown or
/// has the wrong type is an error.
fn wasm_from_struct(value: &[u8]) -> Result<Bytes, BoxError> {
    const MISSING: &str = "its definition is missing in this program";
    // Such filters are rare, so the definitions are not stored.
    let definitions = DescriptorPool::decode(DEFINITIONS)?;
    let definition = definitions.get_message_by_name("google.protobuf.Struct").ok_or(MISSING)?;
    let value = serde_json::to_value(DynamicMessage::decode(definition, value)?)?;
    let definition =
        definitions.get_message_by_name("envoy.extensions.wasm.v3.Wasm").ok_or(MISSING)?;
    Ok(DynamicMessage::deserialize(definition, value)?.encode_to_vec().into())
}

#[expect(deprecated, reason = "EnvoyFilters still set it")]
fn fails_open(plugin: &PluginConfig) -> bool {
    match plugin.failure_policy {
        0 => plugin.fail_open,
        policy => policy == FailurePolicy::FailOpen as i32,
    }
}

impl Filter {
    /// Returns the resource with the module at `path`.
    pub(crate) fn with_module(&self, path: &str) -> Result<Bytes, DecodeError> {
        // An `AsyncDataSource` with `local`, a `DataSource` with `filename`.
        let mut local = Vec::new();
        wire::append(&mut local, 1, path.as_bytes());
        let mut code = Vec::new();
        wire::append(&mut code, 1, &local);
        let wasm = wire::edit_field(&self.wasm, 1, |plugin| {
            wire::edit_field(&plugin, 3, |vm| {
                let vm = wire::edit_field(&vm, 7, without_variables_for_agent)?;
                wire::edit_field(&vm, 3, |_| Ok(code.into()))
            })
        })?;
        self.with_config(WASM, &wasm)
    }

    /// Returns the resource with a filter that allows or denies all requests, in place of the filter whose
    /// module could not be fetched.
    pub(crate) fn fallback(&self) -> Result<Bytes, DecodeError> {
        // RBAC allows without rules and denies with empty rules. The other field is a prefix of
        // statistics.
        let (rules, prefix): (&[u8], &[u8]) = if self.fails_open {
            (&[], b"wasm-default-allow")
        } else {
            (&[0x0a, 0], b"wasm-default-deny")
        };
        let mut rbac = rules.to_vec();
        wire::append(&mut rbac, if self.is_http { 6 } else { 3 }, prefix);
        self.with_config(RBAC, &rbac)
    }

    fn with_config(&self, filter: &str, value: &[u8]) -> Result<Bytes, DecodeError> {
        let chain = if self.is_http { "http" } else { "network" };
        let type_url = format!("{FILTERS}{chain}{filter}");
        let mut config = Vec::new();
        wire::append(&mut config, 1, type_url.as_bytes());
        wire::append(&mut config, 2, value);
        wire::edit_field(&self.resource, 2, |extension| {
            wire::edit_field(&extension, 2, |_| Ok(config.into()))
        })
    }
}

/// Removes the variables for the agent from the environment of a module.
fn without_variables_for_agent(environment: Bytes) -> Result<Bytes, DecodeError> {
    let mut rest = Vec::new();
    for field in wire::fields(&environment)? {
        if let (2, Some(entry)) = (field.number, field.content)
            && wire::last(&entry, 1)?.unwrap_or_default().starts_with(FOR_AGENT.as_bytes())
        {
            continue;
        }
        rest.extend_from_slice(&field.record);
    }
    Ok(rest.into())
}

#[cfg(test)]
mod tests;
