//! Identifies the node of a stream, and compares it with the identity of the caller.
//!
//! The request describes the node. If it names a namespace or a service account, these must be the
//! caller's.

use std::fmt::Display;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::google::protobuf::value::Kind;
use tonic::Status;

use super::machines::Machine;
use crate::identity::SpiffeId;

/// A node that may be served.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Identified {
    /// The node's name in events.
    pub(super) title: String,
    /// The folders that hold its resources.
    pub(super) folders: Vec<String>,
    /// The machine that the node registers, and true if the machine has a readiness probe.
    pub(super) machine: Option<(Machine, bool)>,
}

/// Identifies a node, or refuses it if istiod would refuse it. An id without `~` is not in Istio's form:
/// an Envoy without an agent has any name there, and only its metadata can name a namespace.
pub(super) fn identify(
    node: Option<&Node>,
    caller: Option<&SpiffeId>,
) -> Result<Identified, Status> {
    let node = node
        .filter(|node| !node.id.is_empty())
        .ok_or_else(|| Status::invalid_argument("missing node information"))?;
    let parts: Vec<_> = node.id.split('~').collect();
    let name = match parts.as_slice() {
        [_, _, name, _] | [name] => *name,
        parts => {
            let found = parts.len();
            return Err(Status::invalid_argument(format!(
                "node id {:?} has {found} parts, expected <type>~<ip>~<name>.<namespace>~<domain>",
                node.id
            )));
        }
    };
    let pod_and_namespace = name.rsplit_once('.').filter(|_| node.id.contains('~'));
    let namespace =
        metadata(node, "NAMESPACE").or(pod_and_namespace.map(|(_, namespace)| namespace));
    if let Some(caller) = caller {
        let account = metadata(node, "SERVICE_ACCOUNT");
        check_matches_caller(caller, "namespace", &caller.namespace, namespace)?;
        check_matches_caller(caller, "service account", &caller.service_account, account)?;
    }
    let mut folders = vec![node.cluster.clone(), name.to_owned()];
    folders.extend(pod_and_namespace.map(|(pod, _)| pod.to_owned()));
    folders.retain(|folder| !folder.is_empty());
    Ok(Identified {
        title: name.to_owned(),
        folders,
        machine: machine(node, namespace.unwrap_or_default()),
    })
}

/// Returns the machine of a node that registers itself. Its address is the first address in the
/// metadata, or otherwise the address in the node id.
fn machine(node: &Node, namespace: &str) -> Option<(Machine, bool)> {
    let group = metadata(node, "AUTO_REGISTER_GROUP")?;
    let addresses = metadata(node, "INSTANCE_IPS").or(node.id.split('~').nth(1))?;
    let machine = Machine {
        group: format!("{namespace}/{group}"),
        address: addresses.split(',').next()?.to_owned(),
    };
    let proxy_config = node.metadata.as_ref()?.fields.get("PROXY_CONFIG");
    let is_probed = match proxy_config.and_then(|value| value.kind.as_ref()) {
        Some(Kind::StructValue(config)) => config.fields.contains_key("readinessProbe"),
        _ => false,
    };
    Some((machine, is_probed))
}

fn check_matches_caller(
    caller: &SpiffeId,
    what: impl Display,
    expected: &str,
    found: Option<&str>,
) -> Result<(), Status> {
    match found {
        Some(found) if found != expected => Err(Status::permission_denied(format!(
            "authorization failed: node has the {what} {found:?}, its caller is {caller}"
        ))),
        _ => Ok(()),
    }
}

fn metadata<'a>(node: &'a Node, key: &str) -> Option<&'a str> {
    match &node.metadata.as_ref()?.fields.get(key)?.kind {
        Some(Kind::StringValue(text)) if !text.is_empty() => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    use envoy_types::pb::google::protobuf::{Struct, Value};

    fn node(id: &str) -> Node {
        Node { id: id.to_owned(), cluster: "cart.shop".to_owned(), ..Node::default() }
    }

    #[test]
    fn names_its_folders_after_cluster_and_pod() {
        let found = identify(Some(&node("sidecar~10.0.0.1~cart-1.shop~shop.svc")), None).unwrap();
        assert_eq!(found.folders, ["cart.shop", "cart-1.shop", "cart-1"]);
        assert_eq!(found.title, "cart-1.shop");
        let plain = identify(Some(&node("edge.1")), None).unwrap();
        assert_eq!(plain.folders, ["cart.shop", "edge.1"]);
    }

    #[test]
    fn a_node_with_a_group_registers_its_first_address() {
        let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
        let with = |members: &[(&str, Value)]| {
            let members = members.iter();
            let fields = members.map(|(name, value)| ((*name).to_owned(), value.clone()));
            Struct { fields: fields.collect() }
        };
        let value = |config| Value { kind: Some(Kind::StructValue(config)) };
        let probe = value(with(&[("readinessProbe", value(Struct::default()))]));
        let group = ("AUTO_REGISTER_GROUP", text("machines"));
        let addresses = ("INSTANCE_IPS", text("10.0.0.7,10.0.0.8"));
        let namespace = ("NAMESPACE", text("bank"));
        let probed = ("PROXY_CONFIG", probe);
        for (members, expected) in [
            (vec![], None),
            (vec![group.clone()], Some(("shop/machines", "10.0.0.1", false))),
            (vec![group, addresses, namespace, probed], Some(("bank/machines", "10.0.0.7", true))),
        ] {
            let node =
                Node { metadata: Some(with(&members)), ..node("sidecar~10.0.0.1~cart-1.shop~x") };
            let found = identify(Some(&node), None).unwrap().machine;
            let expected = expected.map(|(group, address, is_probed)| {
                let (group, address) = (group.to_owned(), address.to_owned());
                (Machine { group, address }, is_probed)
            });
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn refuses_with_istiods_codes() {
        let caller = "spiffe://cluster.local/ns/bank/sa/cart".parse().unwrap();
        let table = [
            (None, Code::InvalidArgument, "missing node information"),
            (Some(node("")), Code::InvalidArgument, "missing node information"),
            (Some(node("sidecar~10.0.0.1")), Code::InvalidArgument, "has 2 parts"),
            (
                Some(node("sidecar~10.0.0.1~cart-1.shop~x")),
                Code::PermissionDenied,
                "authorization failed: ",
            ),
        ];
        for (node, code, message) in table {
            let status = identify(node.as_ref(), Some(&caller)).unwrap_err();
            assert_eq!(status.code(), code);
            assert!(status.message().contains(message), "{status}");
        }
        assert!(identify(Some(&node("sidecar~10.0.0.1~cart-1.bank~x")), Some(&caller)).is_ok());
    }
}
