//! Delta variant of the protocol: requests add and remove names.
//!
//! A state machine without I/O. A name that is not served, or whose files are not there, is answered as
//! removed, with the reason; it follows when its files are there. The workload's own secrets are waited
//! for instead, as Envoy would go on without them.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as DeltaResource, ResourceError,
    ResourceName,
};
use envoy_types::pb::google::rpc;
use tonic::{Code, Status};

use super::context::StreamContext;
use super::names::Names;
use super::resource::{Lookup, TYPE_URL};
use super::stream::{Protocol, ResponseId};

/// The protocol state of one stream.
#[derive(Debug, Default)]
pub(super) struct Delta {
    /// Names that are not served and not answered yet, each with the reason.
    unserved: BTreeMap<String, String>,
}

impl Protocol for Delta {
    type Request = DeltaDiscoveryRequest;
    type Response = DeltaDiscoveryResponse;

    fn apply(
        &mut self,
        context: &mut StreamContext,
        request: &DeltaDiscoveryRequest,
    ) -> Result<(), Status> {
        if context.is_skipped(&request.type_url, request.node.as_ref())? {
            return Ok(());
        }
        // The names of a NACK count as well.
        if let Some(error) = &request.error_detail {
            context.nack(error);
        }
        for text in &request.resource_names_unsubscribe {
            self.unserved.remove(text);
            if let Ok(name) = context.parse(text) {
                context.names.remove(&name);
            }
        }
        let (names, unserved) = context.parse_all(&request.resource_names_subscribe)?;
        context.report(&unserved)?;
        self.unserved.extend(unserved);
        // A name asked for again is answered again.
        for name in names {
            let held = request.initial_resource_versions.get(&name.to_string());
            context.names.insert(name, held.cloned());
        }
        context.check_count(context.names.len())
    }

    fn answer(
        &mut self,
        names: &mut Names,
        lookup: &Lookup<'_>,
        is_batching: bool,
        id: impl FnOnce() -> ResponseId,
    ) -> Option<DeltaDiscoveryResponse> {
        let [mut due, mut changed] = names.due(lookup, is_batching);
        due.append(&mut changed);
        due.sort_by(|(one, _), (other, _)| one.cmp(other));
        if due.is_empty() && self.unserved.is_empty() {
            return None;
        }
        let ResponseId { version, nonce } = id();
        let mut response = DeltaDiscoveryResponse {
            system_version_info: version,
            type_url: TYPE_URL.to_owned(),
            nonce,
            ..Default::default()
        };
        for (name, reason) in std::mem::take(&mut self.unserved) {
            remove(&mut response, name, Code::InvalidArgument, reason);
        }
        for change in due {
            match &change {
                (name, Ok(resource)) => response.resources.push(DeltaResource {
                    name: name.to_string(),
                    version: resource.version().text(),
                    resource: Some(resource.encode(name)),
                    ..Default::default()
                }),
                (name, Err(reason)) => {
                    let reason = reason.clone();
                    remove(&mut response, name.to_string(), Code::NotFound, reason);
                }
            }
            names.sent(change);
        }
        Some(response)
    }
}

fn remove(response: &mut DeltaDiscoveryResponse, name: String, code: Code, reason: String) {
    response.removed_resources.push(name.clone());
    response.resource_errors.push(ResourceError {
        resource_name: Some(ResourceName {
            name,
            ..Default::default()
        }),
        error_detail: Some(rpc::Status {
            code: code.into(),
            message: reason,
            details: Vec::new(),
        }),
    });
}
