//! Members of node metadata that have a type.
//!
//! A typed member of another type is an error, as istiod would refuse the node. Members without a type
//! pass unchanged.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A member that is not of its type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    pub name: String,
    pub found: String,
    pub expected: &'static str,
}

#[derive(Clone, Copy)]
enum Kind {
    Text,
    /// A boolean in a string.
    Flag,
    Port,
    /// An object of strings.
    Texts,
    Object,
    List,
    /// Ports of the pod, as JSON in a string.
    PodPorts,
}

/// Every typed member; source: `BootstrapNodeMetadata` of istio.io/istio.
const MEMBERS: [(Kind, &str); 7] = [
    (
        Kind::Text,
        "APP_CONTAINERS AUTO_REGISTER_GROUP BASE CLOUDRUN_ADDR CLUSTER_ID DNS_PROXY_ADDR \
         GENERATOR HTTP10 HTTP_PROXY_PORT IDLE_TIMEOUT INSTANCE_IPS INTERCEPTION_MODE \
         ISTIO_PROXY_SHA ISTIO_REVISION ISTIO_VERSION MESH_ID NAME NAMESPACE NETWORK \
         NODE_NAME OUTLIER_LOG_PATH OWNER REQUESTED_NETWORK_VIEW SERVICE_ACCOUNT STS_PORT \
         TLS_CLIENT_CERT_CHAIN TLS_CLIENT_KEY TLS_CLIENT_ROOT_CERT TLS_SERVER_CERT_CHAIN \
         TLS_SERVER_KEY TLS_SERVER_ROOT_CERT UNPRIVILEGED_POD WORKLOAD_ENTRY \
         WORKLOAD_IDENTITY_SOCKET_FILE WORKLOAD_NAME",
    ),
    (
        Kind::Flag,
        "DISABLE_HBONE_SEND DNS_AUTO_ALLOCATE DNS_CAPTURE ENABLE_HBONE \
         ENABLE_SELF_DISCOVERY ENVOY_SKIP_DEPRECATED_LOGS EXIT_ON_ZERO_ACTIVE_CONNECTIONS \
         INBOUND_LISTENER_EXACT_BALANCE METADATA_DISCOVERY \
         OUTBOUND_LISTENER_EXACT_BALANCE",
    ),
    (
        Kind::Port,
        "ENVOY_PROMETHEUS_PORT ENVOY_SECURE_MERGED_METRICS_PORT ENVOY_SECURE_METRICS_PORT \
         ENVOY_STATUS_PORT",
    ),
    (
        Kind::Texts,
        "ANNOTATIONS LABELS PLATFORM_METADATA STATIC_LABELS",
    ),
    (Kind::Object, "PROXY_CONFIG"),
    (Kind::List, "PILOT_SAN"),
    (Kind::PodPorts, "POD_PORTS"),
];

/// Brings typed members into the form istiod reads. Returns the members of another type.
pub fn check(members: &mut Map<String, Value>) -> Vec<Mismatch> {
    let mut mismatches = Vec::new();
    for (name, value) in members.iter_mut() {
        let Some(kind) = kind(name) else { continue };
        match kind.read(value) {
            Some(read) => *value = read,
            None => mismatches.push(Mismatch {
                name: name.clone(),
                found: value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned),
                expected: kind.expected(),
            }),
        }
    }
    mismatches
}

/// Whether a member has a type.
pub(super) fn is_typed(name: &str) -> bool {
    kind(name).is_some()
}

/// Whether a member that the agent decides is left out.
pub fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Number(number) => number.as_u64() == Some(0),
        _ => false,
    }
}

fn kind(name: &str) -> Option<Kind> {
    let is_among = |names: &str| names.split(' ').any(|known| known == name);
    let found = MEMBERS.iter().find(|(_, names)| is_among(names));
    found.map(|(kind, _)| *kind)
}

#[derive(Deserialize, Serialize)]
struct PodPort {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(default, rename = "containerPort", skip_serializing_if = "is_zero")]
    port: i32,
    #[serde(default)]
    protocol: String,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands out references"
)]
fn is_zero(port: &i32) -> bool {
    *port == 0
}

impl Kind {
    /// The value in its canonical form; None if it is of another type. A value that is false or empty
    /// stays as written.
    fn read(self, value: &Value) -> Option<Value> {
        let read = match self {
            Self::Text => value.as_str()?.into(),
            Self::Flag => match value.as_str()? {
                "1" | "t" | "T" | "TRUE" | "true" | "True" => json!("true"),
                "0" | "f" | "F" | "FALSE" | "false" | "False" => value.clone(),
                _ => return None,
            },
            Self::Port => value.as_i64()?.into(),
            Self::Texts if value.as_object()?.values().all(Value::is_string) => value.clone(),
            Self::Object if value.is_object() => value.clone(),
            Self::List if value.as_array()?.iter().all(Value::is_string) => value.clone(),
            Self::Texts | Self::Object | Self::List => return None,
            Self::PodPorts => {
                let ports: Vec<PodPort> = serde_json::from_str(value.as_str()?).ok()?;
                if ports.is_empty() {
                    return Some(value.clone());
                }
                serde_json::to_string(&ports).ok()?.into()
            }
        };
        Some(read)
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Flag => "true or false",
            Self::Port => "a number in JSON",
            Self::Texts => "an object of strings",
            Self::Object => "an object",
            Self::List => "a list of strings",
            Self::PodPorts => "a JSON list of ports in a string",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(value: Value) -> Result<Value, Vec<String>> {
        let Value::Object(mut members) = value else {
            panic!("no object");
        };
        let mismatches = check(&mut members);
        if mismatches.is_empty() {
            return Ok(members.into());
        }
        Err(mismatches
            .into_iter()
            .map(|mismatch| mismatch.name)
            .collect())
    }

    #[test]
    fn typed_members_get_their_canonical_form_and_others_stay() {
        for (given, expected) in [
            (json!({"DNS_CAPTURE": "1"}), json!({"DNS_CAPTURE": "true"})),
            (json!({"DNS_CAPTURE": "f"}), json!({"DNS_CAPTURE": "f"})),
            (json!({"MINE": [1]}), json!({"MINE": [1]})),
            (json!({"POD_PORTS": "[]"}), json!({"POD_PORTS": "[]"})),
            (
                json!({"POD_PORTS": r#"[ {"containerPort": 80, "protocol": "TCP", "x": 1} ]"#}),
                json!({"POD_PORTS": r#"[{"containerPort":80,"protocol":"TCP"}]"#}),
            ),
        ] {
            assert_eq!(checked(given), Ok(expected));
        }
    }

    #[test]
    fn a_member_of_another_type_is_named() {
        for (given, name) in [
            (json!({"DNS_CAPTURE": "yes"}), "DNS_CAPTURE"),
            (json!({"DNS_CAPTURE": ""}), "DNS_CAPTURE"),
            (json!({"POD_PORTS": "http"}), "POD_PORTS"),
            (json!({"ENVOY_STATUS_PORT": "15021"}), "ENVOY_STATUS_PORT"),
            (json!({"CLUSTER_ID": 7}), "CLUSTER_ID"),
            (json!({"LABELS": {"a": 1}}), "LABELS"),
        ] {
            assert_eq!(checked(given), Err(vec![name.to_owned()]));
        }
    }
}
