//! Delta variant of the protocol: the names asked for and what was sent of each.
//!
//! A state machine without I/O. A name that is not served, or whose files are not there, is answered as
//! removed, with the reason; it follows when its files are there. The workload's own secrets are waited
//! for instead, as Envoy would go on without them.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as DeltaResource, ResourceError,
    ResourceName,
};
use envoy_types::pb::google::rpc;
use tonic::{Code, Status};

use super::context::StreamContext;
use super::resource::{Lookup, Resource, TYPE_URL, Version};
use super::stream::{Protocol, ResponseId};
use crate::secrets::SecretState;
use crate::secrets::name::Name;

/// The protocol state of one stream.
#[derive(Debug, Default)]
pub(super) struct Delta {
    subscribed: BTreeMap<Name, Sent>,
    /// Names that are not served and not answered yet, each with the reason.
    unserved: BTreeMap<String, String>,
}

/// What was sent of a name since it was asked for.
#[derive(Clone, Debug)]
enum Sent {
    Nothing,
    /// Envoy holds this version from an earlier stream.
    Held(String),
    Removed,
    Version(Version),
}

/// What a response says of one name.
enum Change<'a> {
    Updated(Resource<'a>),
    Removed(String),
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
                self.subscribed.remove(&name);
            }
        }
        context.check_count(request.resource_names_subscribe.len())?;
        for text in &request.resource_names_subscribe {
            match context.parse(text) {
                // A name asked for again is answered again.
                Ok(name) => {
                    let held = request.initial_resource_versions.get(text).cloned();
                    let sent = held.map_or(Sent::Nothing, Sent::Held);
                    self.subscribed.insert(name, sent);
                }
                Err(error) => {
                    context.report_unserved(text, &error)?;
                    self.unserved.insert(text.clone(), error);
                }
            }
        }
        context.check_count(self.subscribed.len())
    }

    fn names(&self) -> BTreeSet<Name> {
        self.subscribed.keys().cloned().collect()
    }

    fn unanswered(&self) -> impl Iterator<Item = &Name> {
        let subscribed = self.subscribed.iter();
        subscribed.filter_map(|(name, sent)| matches!(sent, Sent::Nothing).then_some(name))
    }

    fn answer(
        &mut self,
        lookup: &Lookup<'_>,
        is_batching: bool,
        id: impl FnOnce() -> ResponseId,
    ) -> Option<DeltaDiscoveryResponse> {
        let due = self.due(lookup, is_batching);
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
        for (name, change) in due {
            let sent = match change {
                Change::Updated(resource) => {
                    let version = resource.version();
                    response.resources.push(DeltaResource {
                        name: name.to_string(),
                        version: version.text(),
                        resource: Some(resource.encode(&name)),
                        ..Default::default()
                    });
                    Sent::Version(version)
                }
                Change::Removed(reason) => {
                    remove(&mut response, name.to_string(), Code::NotFound, reason);
                    Sent::Removed
                }
            };
            self.subscribed.insert(name, sent);
        }
        Some(response)
    }
}

impl Delta {
    /// What the next response says, roots first. Names just asked for wait for each other while
    /// batching.
    fn due<'a>(&self, lookup: &Lookup<'a>, is_batching: bool) -> Vec<(Name, Change<'a>)> {
        let (mut asked, mut changed) = (Vec::new(), Vec::new());
        let mut is_complete = true;
        for (name, sent) in &self.subscribed {
            let is_new = matches!(sent, Sent::Nothing | Sent::Held(_));
            let is_own = matches!(name, Name::Default | Name::RootCa);
            let change = match lookup(name) {
                SecretState::Available(now) if sent.is(&now.version()) => continue,
                SecretState::Available(now) => Change::Updated(now),
                SecretState::Unusable(error) if is_new && !is_own => {
                    Change::Removed(error.to_string())
                }
                SecretState::Reading => {
                    is_complete &= !is_new;
                    continue;
                }
                SecretState::Unusable(_) | SecretState::Unsigned => continue,
            };
            let due = if is_new { &mut asked } else { &mut changed };
            due.push((name.clone(), change));
        }
        if !is_batching || is_complete {
            changed.append(&mut asked);
            changed.sort_by(|(one, _), (other, _)| one.cmp(other));
        }
        changed
    }
}

impl Sent {
    fn is(&self, version: &Version) -> bool {
        match self {
            Self::Version(sent) => sent == version,
            Self::Held(held) => *held == version.text(),
            Self::Nothing | Self::Removed => false,
        }
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
