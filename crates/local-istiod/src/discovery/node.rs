//! Whose stream it is: the node Envoy describes, held against the identity of the caller.
//!
//! The node is taken from its request, its namespace from the caller's identity.

use std::fmt::Display;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::google::protobuf::value::Kind;
use tonic::Status;

use crate::identity::SpiffeId;

/// A node that may be served.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Identified {
    /// How events call it.
    pub(super) title: String,
    /// The folders that hold its resources.
    pub(super) folders: Vec<String>,
}

/// Refuses what istiod refuses. An id without `~` is none of Istio's: an Envoy without an agent has
/// a name of its own there, and only its metadata names a namespace.
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
        permit(caller, "namespace", &caller.namespace, namespace)?;
        permit(caller, "service account", &caller.service_account, account)?;
    }
    let mut folders = vec![node.cluster.clone(), name.to_owned()];
    folders.extend(pod_and_namespace.map(|(pod, _)| pod.to_owned()));
    folders.retain(|folder| !folder.is_empty());
    Ok(Identified {
        title: name.to_owned(),
        folders,
    })
}

fn permit(
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

    fn node(id: &str) -> Node {
        Node {
            id: id.to_owned(),
            cluster: "cart.shop".to_owned(),
            ..Node::default()
        }
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
    fn refuses_with_istiods_codes() {
        let caller = "spiffe://cluster.local/ns/bank/sa/cart".parse().unwrap();
        let table = [
            (None, Code::InvalidArgument, "missing node information"),
            (
                Some(node("")),
                Code::InvalidArgument,
                "missing node information",
            ),
            (
                Some(node("sidecar~10.0.0.1")),
                Code::InvalidArgument,
                "has 2 parts",
            ),
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
