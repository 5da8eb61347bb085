//! One Envoy stream of changes: the names asked for and what was said of each.
//!
//! A state machine without I/O, like the other form of the protocol. Here a name can be answered
//! with nothing: one that nobody serves, or whose files are not there, is told to be removed, with
//! the reason. It comes when its files do. The workload's own secrets are waited for instead, as
//! Envoy would go on without them.
//!
//! Does not await, and does not send.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource, ResourceError, ResourceName,
};
use envoy_types::pb::google::rpc;
use tonic::{Code, Status};

use super::desk::{Desk, Waits};
use super::secret::{self, Shelf, Shown, TYPE_URL, Version};
use super::session::{Protocol, Stamp};
use crate::secrets::name::Name;

/// The protocol's side of one stream.
#[derive(Debug)]
pub(super) struct Delta {
    desk: Desk,
    watch: BTreeMap<Name, Sent>,
    /// Names nobody serves that have not been answered yet, each with the reason.
    unserved: BTreeMap<String, String>,
}

/// What was said of a name since it was asked for.
#[derive(Clone, Debug)]
enum Sent {
    Nothing,
    /// Envoy says it holds this version, from an earlier stream.
    Held(String),
    Missing,
    Version(Version),
}

/// What a response says of one name.
enum Due {
    There(Version),
    Missing(String),
}

impl Protocol for Delta {
    type Request = DeltaDiscoveryRequest;
    type Response = DeltaDiscoveryResponse;

    fn new(desk: Desk) -> Self {
        Self {
            desk,
            watch: BTreeMap::new(),
            unserved: BTreeMap::new(),
        }
    }

    fn desk(&self) -> &Desk {
        &self.desk
    }

    fn apply(&mut self, request: &DeltaDiscoveryRequest) -> Result<(), Status> {
        if self
            .desk
            .is_skipped(&request.type_url, request.node.as_ref())?
        {
            return Ok(());
        }
        // Names count beside a refusal as well.
        if let Some(refusal) = &request.error_detail {
            self.desk.refused(refusal);
        }
        for text in &request.resource_names_unsubscribe {
            self.unserved.remove(text);
            if let Ok(name) = self.desk.parse(text) {
                self.watch.remove(&name);
            }
        }
        self.desk.bound(request.resource_names_subscribe.len())?;
        for text in &request.resource_names_subscribe {
            self.subscribe(text, &request.initial_resource_versions)?;
        }
        self.desk.bound(self.watch.len())
    }

    fn names(&self) -> BTreeSet<Name> {
        self.watch.keys().cloned().collect()
    }

    fn is_due(&self, shelf: &impl Shelf, is_patient: bool) -> bool {
        !self.unserved.is_empty() || !self.due(shelf, is_patient).is_empty()
    }

    fn waits(&self, shelf: &impl Shelf) -> Waits {
        let unsent = self.watch.iter();
        let unsent = unsent.filter(|(_, sent)| matches!(sent, Sent::Nothing));
        Waits::of(unsent.map(|(name, _)| shelf.shown(name)))
    }

    fn answer(
        &mut self,
        shelf: &impl Shelf,
        is_patient: bool,
        stamp: Stamp,
    ) -> DeltaDiscoveryResponse {
        let mut response = DeltaDiscoveryResponse {
            system_version_info: stamp.version,
            type_url: TYPE_URL.to_owned(),
            nonce: stamp.nonce,
            ..Default::default()
        };
        for (name, reason) in std::mem::take(&mut self.unserved) {
            remove(&mut response, name, Code::InvalidArgument, reason);
        }
        for (name, due) in self.due(shelf, is_patient) {
            let sent = match due {
                Due::There(version) => {
                    response.resources.extend(resource(&name, &version, shelf));
                    Sent::Version(version)
                }
                Due::Missing(reason) => {
                    remove(&mut response, name.to_string(), Code::NotFound, reason);
                    Sent::Missing
                }
            };
            self.watch.insert(name, sent);
        }
        response
    }
}

impl Delta {
    /// A name asked for again is answered again.
    fn subscribe(&mut self, text: &str, held: &HashMap<String, String>) -> Result<(), Status> {
        match self.desk.parse(text) {
            Ok(name) => {
                let held = held.get(text).cloned();
                self.watch
                    .insert(name, held.map_or(Sent::Nothing, Sent::Held));
            }
            Err(error) => {
                self.desk.warn_once(text, &error)?;
                self.unserved.insert(text.to_owned(), error.to_string());
            }
        }
        Ok(())
    }

    /// What the next response says, roots first. Names just asked for wait for each other while
    /// somebody is patient.
    fn due(&self, shelf: &impl Shelf, is_patient: bool) -> Vec<(Name, Due)> {
        let mut due = Vec::new();
        let mut is_complete = true;
        for (name, sent) in &self.watch {
            let is_new = matches!(sent, Sent::Nothing | Sent::Held(_));
            let is_own = matches!(name, Name::Default | Name::RootCa);
            let says = match (sent, shelf.shown(name)) {
                (Sent::Version(sent), Shown::There(now)) if *sent == now => continue,
                (Sent::Held(held), Shown::There(now)) if *held == now.text() => continue,
                (_, Shown::There(now)) => Due::There(now),
                (_, Shown::Missing(error)) if is_new && !is_own => Due::Missing(error.to_string()),
                (_, Shown::Pending) => {
                    is_complete &= !is_new;
                    continue;
                }
                _ => continue,
            };
            due.push((name.clone(), is_new, says));
        }
        let holds_back = is_patient && !is_complete;
        let due = due
            .into_iter()
            .filter(|(_, is_new, _)| !(*is_new && holds_back));
        due.map(|(name, _, says)| (name, says)).collect()
    }
}

fn resource(name: &Name, version: &Version, shelf: &impl Shelf) -> Option<Resource> {
    Some(Resource {
        name: name.to_string(),
        version: version.text(),
        resource: Some(secret::resource(name, shelf)?),
        ..Default::default()
    })
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
