//! Recognises Wasm filters with a remote module in ECDS resources, and rewrites them.
//!
//! A resource is an encoded `Any`. One that is no such filter is not touched. In one that is, only the
//! reference to the module and the environment variables for the agent are replaced; all other fields,
//! unknown ones too, stay as they were written.

pub(crate) mod wire;

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3 as core;
use envoy_types::pb::envoy::config::core::v3::async_data_source::Specifier;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
use envoy_types::pb::envoy::extensions::wasm::v3::plugin_config::Vm;
use envoy_types::pb::envoy::extensions::wasm::v3::{FailurePolicy, PluginConfig, VmConfig};
use envoy_types::pb::google::protobuf::Any;
use prost::{DecodeError, Message};
use prost_reflect::{DescriptorPool, DynamicMessage};

use super::request::{Request, Unusable};

const EXTENSION: &str = "envoy.config.core.v3.TypedExtensionConfig";
const TYPED_STRUCT: &str = "type.googleapis.com/udpa.type.v1.TypedStruct";

/// Between the two is the chain that a filter belongs to: `http` or `network`.
const FILTERS: &str = "type.googleapis.com/envoy.extensions.filters.";
const WASM: &str = ".wasm.v3.Wasm";
const RBAC: &str = ".rbac.v3.RBAC";

/// Environment variables of a module that are for the agent begin with this.
const FOR_AGENT: &str = "ISTIO_META_";

/// `proto/envoy/extensions/wasm/v3/wasm.proto`
const DEFINITIONS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wasm.fds"));

/// A Wasm filter whose module has to be fetched.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    /// The name of the resource.
    pub(crate) name: String,
    pub(crate) module: Result<Arc<Request>, Unusable>,
    /// Whether requests pass without the module.
    pub(crate) fails_open: bool,
    is_http: bool,
    /// The `Any`, and the filter's own configuration in it.
    resource: Bytes,
    wasm: Bytes,
}

/// The filter in a resource, if it is Wasm with a remote module. An error is a resource that cannot be
/// read, for which pilot-agent refuses the response.
pub(crate) fn filter(resource: &Bytes) -> Result<Option<Filter>, String> {
    let failed = |error: &dyn fmt::Display| {
        format!("failed to unmarshal extension config resource: {error}")
    };
    let any = Any::decode(resource.clone()).map_err(|error| failed(&error))?;
    if any.type_url.rsplit('/').next() != Some(EXTENSION) {
        let problem = format!("type {:?}, expected {EXTENSION}", any.type_url);
        return Err(failed(&problem));
    }
    let extension = core::TypedExtensionConfig::decode(any.value.as_slice());
    let extension = extension.map_err(|error| failed(&error))?;
    let name = extension.name;
    let mut config = extension.typed_config.ok_or_else(|| {
        format!("typed extension config {name:?} does not contain any typed config")
    })?;
    let failed = |error: &dyn fmt::Display| {
        format!("failed to unmarshal the typed config of extension {name:?}: {error}")
    };
    let is_struct = config.type_url == TYPED_STRUCT;
    if is_struct {
        // It has the same fields, and the value is a `Struct`.
        config = Any::decode(config.value.as_slice()).map_err(|error| failed(&error))?;
    }
    let chain = config.type_url.strip_prefix(FILTERS);
    let chain = chain.and_then(|chain| chain.strip_suffix(WASM));
    let (is_http, kind) = match chain {
        Some("http") => (true, "HTTP"),
        Some("network") => (false, "Network"),
        _ => return Ok(None),
    };
    let wasm = match is_struct {
        true => wasm_of_struct(&config.value).map_err(|error| failed(&error))?,
        false => config.value.into(),
    };
    let decoded = Wasm::decode(wasm.clone()).map_err(|error| failed(&error))?;
    let mut plugin = decoded.config.unwrap_or_default();
    let vm = plugin.vm.take().map(|Vm::VmConfig(vm)| vm);
    let VmConfig {
        code,
        environment_variables,
        ..
    } = vm.unwrap_or_default();
    let remote = match code.and_then(|code| code.specifier) {
        Some(Specifier::Remote(remote)) => remote,
        Some(Specifier::Local(_)) => return Ok(None),
        None => {
            let problem = "no remote and local load found in Wasm";
            return Err(format!("{problem} {kind} filter {name:?}"));
        }
    };
    let variables = environment_variables.unwrap_or_default().key_values;
    let request = Request::new(&name, &plugin.name, remote, &variables);
    Ok(Some(Filter {
        module: request.map(Arc::new),
        fails_open: fails_open(&plugin),
        resource: resource.clone(),
        is_http,
        wasm,
        name,
    }))
}

/// The encoded `Wasm` message that an encoded `google.protobuf.Struct` describes, so that both forms of a
/// filter are handled alike. By the rules of protobuf's JSON a member that is unknown or has another type
/// is an error.
fn wasm_of_struct(value: &[u8]) -> Result<Bytes, Box<dyn Error>> {
    // Rare, so nothing is kept.
    let definitions = DescriptorPool::decode(DEFINITIONS)?;
    let definition = |name| {
        let found = definitions.get_message_by_name(name);
        found.ok_or("its definition is missing in this program")
    };
    let value = DynamicMessage::decode(definition("google.protobuf.Struct")?, value)?;
    let value = serde_json::to_value(&value)?;
    let wasm = definition("envoy.extensions.wasm.v3.Wasm")?;
    let wasm = DynamicMessage::deserialize(wasm, value)?;
    Ok(wasm.encode_to_vec().into())
}

#[expect(deprecated, reason = "EnvoyFilters still set it")]
fn fails_open(plugin: &PluginConfig) -> bool {
    match plugin.failure_policy {
        0 => plugin.fail_open,
        policy => policy == FailurePolicy::FailOpen as i32,
    }
}

impl Filter {
    /// The resource with the module at `path`.
    pub(crate) fn with_module(&self, path: &str) -> Result<Bytes, DecodeError> {
        // An `AsyncDataSource` with `local`, a `DataSource` with `filename`.
        let mut local = Vec::new();
        wire::append(&mut local, 1, path.as_bytes());
        let mut code = Vec::new();
        wire::append(&mut code, 1, &local);
        let wasm = wire::edited(&self.wasm, 1, |plugin| {
            let plugin = wire::edited(&plugin, 3, |vm| {
                let vm = wire::edited(&vm, 7, without_variables_for_agent)?;
                wire::edited(&vm, 3, |_| Ok(Some(code.into()))).map(Some)
            });
            plugin.map(Some)
        })?;
        self.with_config(WASM, &wasm)
    }

    /// The resource with a filter in place of the module that could not be fetched: one that lets all
    /// requests pass, or refuses them all.
    pub(crate) fn fallback(&self) -> Result<Bytes, DecodeError> {
        // RBAC without rules allows; with rules that are empty it denies. The other field is a prefix
        // of statistics.
        let (rules, prefix): (&[u8], &[u8]) = match self.fails_open {
            true => (&[], b"wasm-default-allow"),
            false => (&[0x0a, 0], b"wasm-default-deny"),
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
        wire::edited(&self.resource, 2, |extension| {
            wire::edited(&extension, 2, |_| Ok(Some(config.into()))).map(Some)
        })
    }
}

/// The environment of a module without what is for the agent; none if nothing else is left.
fn without_variables_for_agent(environment: Bytes) -> Result<Option<Bytes>, DecodeError> {
    let (mut left, mut is_empty) = (Vec::new(), true);
    for field in wire::fields(&environment)? {
        if let (2, Some(entry)) = (field.number, field.content) {
            let key = wire::last(&entry, 1)?.unwrap_or_default();
            if key.starts_with(FOR_AGENT.as_bytes()) {
                continue;
            }
        }
        is_empty &= !matches!(field.number, 1 | 2);
        left.extend_from_slice(&field.record);
    }
    Ok((!is_empty).then(|| left.into()))
}

#[cfg(test)]
mod tests;
