//! Checks the members of node metadata that have a type, and converts them to the form that istiod reads.
//!
//! [`canonicalize`] is the entry. A typed member of another type is an error, as istiod would refuse the node.
//! Members without a type pass unchanged.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::json;
use crate::problem::{Code, Problem};

/// Converts a value to the form istiod reads; None if it has another type. A value that is false or empty is
/// unchanged.
type Read = fn(&Value) -> Option<Value>;

/// Names, type and reader of every typed member. Source: `BootstrapNodeMetadata` of istio.io/istio.
const MEMBERS: [(&str, &str, Read); 7] = [
    (
        "APP_CONTAINERS AUTO_REGISTER_GROUP BASE CLOUDRUN_ADDR CLUSTER_ID DNS_PROXY_ADDR \
         GENERATOR HTTP10 HTTP_PROXY_PORT IDLE_TIMEOUT INSTANCE_IPS INTERCEPTION_MODE \
         ISTIO_PROXY_SHA ISTIO_REVISION ISTIO_VERSION MESH_ID NAME NAMESPACE NETWORK \
         NODE_NAME OUTLIER_LOG_PATH OWNER REQUESTED_NETWORK_VIEW SERVICE_ACCOUNT STS_PORT \
         TLS_CLIENT_CERT_CHAIN TLS_CLIENT_KEY TLS_CLIENT_ROOT_CERT TLS_SERVER_CERT_CHAIN \
         TLS_SERVER_KEY TLS_SERVER_ROOT_CERT UNPRIVILEGED_POD WORKLOAD_ENTRY \
         WORKLOAD_IDENTITY_SOCKET_FILE WORKLOAD_NAME",
        "text",
        |value| same_if(value, value.is_string()),
    ),
    (
        "DISABLE_HBONE_SEND DNS_AUTO_ALLOCATE DNS_CAPTURE ENABLE_HBONE \
         ENABLE_SELF_DISCOVERY ENVOY_SKIP_DEPRECATED_LOGS EXIT_ON_ZERO_ACTIVE_CONNECTIONS \
         INBOUND_LISTENER_EXACT_BALANCE METADATA_DISCOVERY \
         OUTBOUND_LISTENER_EXACT_BALANCE",
        "true or false",
        flag,
    ),
    (
        "ENVOY_PROMETHEUS_PORT ENVOY_SECURE_MERGED_METRICS_PORT ENVOY_SECURE_METRICS_PORT \
         ENVOY_STATUS_PORT",
        "a number in JSON",
        |value| value.as_i64().map(Value::from),
    ),
    ("ANNOTATIONS LABELS PLATFORM_METADATA STATIC_LABELS", "an object of strings", |value| {
        same_if(value, value.as_object()?.values().all(Value::is_string))
    }),
    ("PROXY_CONFIG", "an object", |value| same_if(value, value.is_object())),
    ("PILOT_SAN", "a list of strings", |value| {
        same_if(value, value.as_array()?.iter().all(Value::is_string))
    }),
    ("POD_PORTS", "a JSON list of ports in a string", pod_ports),
];

/// Converts typed members to the form istiod reads. Returns a problem for each member that has another type.
pub fn canonicalize(members: &mut Map<String, Value>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (name, value) in members.iter_mut() {
        if let Some((expected, read)) = type_of(name)
            && json::remove_null(value)
        {
            match read(value) {
                Some(canonical) => *value = canonical,
                None => problems.push(mismatch(name, value, expected)),
            }
        }
    }
    problems
}

fn mismatch(name: &str, value: &Value, expected: &'static str) -> Problem {
    let (subject, found) = match value {
        Value::String(text) => (format!("ISTIO_META_{name}"), text.clone()),
        other => (format!("{name} of ISTIO_METAJSON_*"), other.to_string()),
    };
    Problem::value(Code::SettingInvalid, subject, &found, expected)
}

pub(super) fn is_typed(name: &str) -> bool {
    type_of(name).is_some()
}

/// Returns true if a member that the agent derives is left out of the metadata when it has this value.
pub fn is_left_out(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Number(number) => number.as_u64() == Some(0),
        _ => false,
    }
}

fn type_of(name: &str) -> Option<(&'static str, Read)> {
    let (_, expected, read) =
        MEMBERS.iter().find(|(names, ..)| names.split(' ').any(|known| known == name))?;
    Some((expected, *read))
}

fn same_if(value: &Value, is_typed: bool) -> Option<Value> {
    is_typed.then(|| value.clone())
}

/// Reads a boolean in a string.
fn flag(value: &Value) -> Option<Value> {
    match value.as_str()? {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(json!("true")),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(value.clone()),
        _ => None,
    }
}

/// Reads the ports of the pod, which are JSON in a string.
fn pod_ports(value: &Value) -> Option<Value> {
    let mut ports: Vec<PodPort> = json::read(value.as_str()?).ok()?;
    for port in &mut ports {
        port.port = port.port.filter(|port| *port != 0);
    }
    if ports.is_empty() {
        return Some(value.clone());
    }
    Some(serde_json::to_string(&ports).ok()?.into())
}

#[derive(Deserialize, Serialize)]
struct PodPort {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(rename = "containerPort", skip_serializing_if = "Option::is_none")]
    port: Option<i32>,
    #[serde(default)]
    protocol: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(value: Value) -> Result<Value, Vec<String>> {
        let Value::Object(mut members) = value else {
            panic!("no object");
        };
        let mismatches = canonicalize(&mut members);
        if mismatches.is_empty() {
            return Ok(members.into());
        }
        Err(mismatches.into_iter().map(|problem| problem.subject).collect())
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
            (
                json!({"POD_PORTS": r#"[{"name": null, "containerPort": null, "protocol": null}, null]"#}),
                json!({"POD_PORTS": r#"[{"protocol":""}]"#}),
            ),
            (
                json!({"CLUSTER_ID": null, "DNS_CAPTURE": null, "ENVOY_STATUS_PORT": null, "PILOT_SAN": null}),
                json!({"CLUSTER_ID": null, "DNS_CAPTURE": null, "ENVOY_STATUS_PORT": null, "PILOT_SAN": null}),
            ),
            (
                json!({"LABELS": {"a": "b", "c": null}, "MINE": {"a": null}}),
                json!({"LABELS": {"a": "b"}, "MINE": {"a": null}}),
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
            let subjects = checked(given).expect_err(name);
            assert!(subjects[0].contains(name) && subjects.len() == 1, "{subjects:?}");
        }
    }
}
