//! Istio's ProxyConfig as types, with its YAML and JSON form.
//!
//! [`messages`] declares the members, [`field`] reads and writes them. Defaults, merging and the rules
//! for values are in `config`.

pub mod field;
mod messages;
mod scalar;
pub mod yaml;

use std::time::Duration;

use serde_json::{Map, Value, json};

use field::{Message, Secrets};
pub use messages::*;
pub use scalar::{Enumeration, Secret};

impl ProxyConfig {
    /// The form istiod reads.
    pub fn document(&self) -> Map<String, Value> {
        self.members(Secrets::Shown)
    }

    /// The form for logs: tokens are hidden, and so are the values of `proxyMetadata` that are not node
    /// metadata, because they become environment variables of any content.
    pub fn printable(&self) -> Map<String, Value> {
        let mut document = self.members(Secrets::Hidden);
        if let Some(metadata) = document.get_mut("proxyMetadata") {
            for (name, value) in &self.proxy_metadata {
                if name.starts_with("ISTIO_META") {
                    metadata[name] = json!(value.0);
                }
            }
        }
        document
    }

    pub fn admin_port(&self) -> u16 {
        u16::try_from(self.proxy_admin_port).unwrap_or_default()
    }

    /// None while the status server is switched off.
    pub fn agent_port(&self) -> Option<u16> {
        let port = u16::try_from(self.status_port).ok();
        port.filter(|port| *port != 0)
    }

    pub fn drain_time(&self) -> Duration {
        self.drain_duration.unwrap_or_default()
    }

    pub fn termination_drain_time(&self) -> Duration {
        self.termination_drain_duration.unwrap_or_default()
    }

    pub fn is_plaintext(&self) -> bool {
        self.control_plane_auth_policy == AuthenticationPolicy::NONE
    }

    pub fn metadata(&self, name: &str) -> Option<&str> {
        self.proxy_metadata.get(name).map(|value| value.0.as_str())
    }
}

/// Reads a message from JSON.
#[cfg(test)]
pub(crate) fn from_json<M: Message>(json: &Value) -> M {
    let mut message = M::default();
    let node = yaml::object("it", &json.to_string(), &mut Vec::new()).expect("JSON");
    let node = node.expect("an object");
    let mut diagnostics = crate::problem::Diagnostics::default();
    field::read_into(&mut message, "it", &node, &mut diagnostics);
    assert_eq!(diagnostics.problems, [], "{json}");
    message
}

#[cfg(test)]
pub(crate) mod tests;
