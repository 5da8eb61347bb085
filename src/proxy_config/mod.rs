//! Reads and writes Istio's ProxyConfig in YAML and JSON. Its types are generated from its `.proto` file.
//!
//! [`ProxyConfig::read`] reads a document. The written form has camel-case names, names of enumerations, and
//! no members that are unset. Defaults, merging and the rules for values are in `config`.

mod read;
pub mod yaml;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;
use prost_reflect::{DescriptorError, DescriptorPool, DynamicMessage};
use serde_json::{Map, Value};

use crate::problem::{Code, Diagnostics, Problem};
pub use crate::proto::istio_mesh_v1alpha1::*;
use yaml::Node;

const DEFINITIONS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/proxy_config.fds"));

/// The decoded definitions while configurations are read. They take a quarter of a megabyte.
static DECODED: Mutex<Option<DescriptorPool>> = Mutex::new(None);

/// Frees the definitions. They are decoded again for the next configuration.
pub fn release_definitions() {
    *DECODED.lock() = None;
}

fn definitions() -> Result<DescriptorPool, DescriptorError> {
    let mut decoded = DECODED.lock();
    if let Some(definitions) = &*decoded {
        return Ok(definitions.clone());
    }
    Ok(decoded.insert(DescriptorPool::decode(DEFINITIONS)?).clone())
}

impl ProxyConfig {
    /// Reads the members that `node` sets; the others stay. Returns the lines of those members by path.
    pub fn read(
        &mut self,
        origin: &str,
        node: &Node,
        notes: &mut Diagnostics,
    ) -> BTreeMap<String, u64> {
        read::read(self, "ProxyConfig", origin, node, notes).unwrap_or_else(|error| {
            notes.add(Problem::new(Code::SettingInvalid, origin, error));
            BTreeMap::new()
        })
    }

    /// Returns the form that istiod reads.
    pub fn document(&self) -> Map<String, Value> {
        let value = dynamic(self, "ProxyConfig").map(serde_json::to_value);
        let mut written = value.ok().and_then(Result::ok).unwrap_or_default();
        // A float without a fraction is written as an integer.
        if let Some(sampling) = written.pointer_mut("/tracing/sampling")
            && let Some(integer) = sampling.as_f64().and_then(as_integer)
        {
            *sampling = integer.into();
        }
        // The maps of prost-reflect are not sorted.
        for map in ["/proxyMetadata", "/runtimeValues", "/tracing/customTags"] {
            if let Some(Value::Object(members)) = written.pointer_mut(map) {
                members.sort_keys();
            }
        }
        object(written)
    }

    /// Returns the form for logs. Tokens are hidden, and so are the values of `proxyMetadata` that are not node
    /// metadata, because they become environment variables of any content.
    pub fn printable(&self) -> Map<String, Value> {
        let mut document = Value::from(self.document());
        document.pointer_mut("/tracing/lightstep/accessToken").into_iter().for_each(hide);
        let headers = document.pointer_mut("/readinessProbe/httpGet/httpHeaders");
        for header in headers.and_then(Value::as_array_mut).into_iter().flatten() {
            header.get_mut("value").into_iter().for_each(hide);
        }
        if let Some(Value::Object(metadata)) = document.pointer_mut("/proxyMetadata") {
            for (name, value) in metadata {
                if !name.starts_with("ISTIO_META") {
                    hide(value);
                }
            }
        }
        object(document)
    }

    pub fn admin_port(&self) -> u16 {
        u16::try_from(self.proxy_admin_port).unwrap_or_default()
    }

    /// Returns the status port; None if the status server is switched off.
    pub fn agent_port(&self) -> Option<u16> {
        u16::try_from(self.status_port).ok().filter(|port| *port != 0)
    }

    pub fn drain_time(&self) -> Duration {
        time(self.drain_duration).unwrap_or_default()
    }

    pub fn termination_drain_time(&self) -> Duration {
        time(self.termination_drain_duration).unwrap_or_default()
    }

    pub fn is_plaintext(&self) -> bool {
        self.control_plane_auth_policy() == AuthenticationPolicy::None
    }

    pub fn metadata(&self, name: &str) -> Option<&str> {
        self.proxy_metadata.get(name).map(String::as_str)
    }
}

impl fmt::Debug for ProxyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.printable().fmt(f)
    }
}

/// Converts a duration of a message. No duration of ProxyConfig is negative.
pub fn time(duration: Option<prost_types::Duration>) -> Option<Duration> {
    duration.and_then(|duration| duration.try_into().ok())
}

fn object(document: Value) -> Map<String, Value> {
    match document {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

fn hide(value: &mut Value) {
    *value = "(not shown)".into();
}

/// Converts a message to one that has its descriptor.
fn dynamic(message: &impl prost::Message, name: &str) -> Result<DynamicMessage, Box<dyn Error>> {
    let found = definitions()?.get_message_by_name(&format!("istio.mesh.v1alpha1.{name}"));
    let mut dynamic = DynamicMessage::new(found.ok_or("this program has no definition of it")?);
    dynamic.transcode_from(message)?;
    Ok(dynamic)
}

/// Returns the integer that a float is equal to. Beyond the limit, floats do not represent every integer.
fn as_integer(number: f64) -> Option<i64> {
    if number.fract() == 0.0 && number.abs() < 9e15 { Some(number as i64) } else { None }
}

/// Reads a message from JSON.
#[cfg(test)]
pub(crate) fn from_json<M: prost::Message + Default>(json: &Value) -> M {
    let mut message = M::default();
    let node = yaml::parse(&json.to_string()).expect("JSON");
    let mut notes = Diagnostics::default();
    let name = std::any::type_name::<M>().rsplit("::").next().expect("the name of a message");
    let node = node.expect("an object");
    read::read(&mut message, name, "it", &node, &mut notes).expect("a definition");
    assert_eq!(notes.problems, [], "{json}");
    message
}

#[cfg(test)]
pub(crate) mod tests;
